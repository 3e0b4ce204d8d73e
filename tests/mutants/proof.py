"""Shows that each kind of process imports the product from the copy: a fault at its start is detected by a test."""

import ast
from dataclasses import dataclass

from mutants.runs import End, Runner
from mutants.tree import say


@dataclass(frozen=True, slots=True)
class Process:
    name: str
    file: str
    function: str
    test: str


PROCESSES = (
    Process("server", "server/halimede/app.py", "run", "tests/conformance/test_process.py"),
    Process("worker", "server/halimede/workers/host/main.py", "main", "tests/shell/workers/test_process_worker.py"),
    Process("zygote", "server/halimede/processes/zygote.py", "main", "tests/shell/workers/test_zygote.py"),
    Process("front end", "server/halimede/front_processes/main.py", "main", "tests/shell/front_processes/test_stop.py"),
    Process("fetch", "server/halimede/fetch/plan.py", "", "tests/shell/fetch/test_command.py"),
    Process("operator", "operator/halimede_operator/main.py", "main", "tests/shell/operator/test_main.py"),
)
LIMIT_S = 300


def prove(runner: Runner) -> None:
    for process in PROCESSES:
        path = runner.tree.root / process.file
        proof = runner.folder / "proof"
        proof.write_text("")
        source = path.read_text()
        with runner.tree.changed({process.file: _broken(source, process, str(proof))}):
            run = runner.run([process.test], LIMIT_S)
        written = set(proof.read_text().split())
        if run.end is End.PASSED or written != {str(path)}:
            raise SystemExit(f"{process.name}: {process.test} {run.end}; files that were imported: {written or 'none'}")
        say(f"{process.name}: imports {path}; a fault there fails {run.test}")


def _broken(source: str, process: Process, proof: str) -> str:
    """The function, or the module itself, says where it is and fails."""
    statement = f"open({proof!r}, 'a').write(__file__ + chr(10)); raise RuntimeError('a fault for a proof')\n"
    tree = ast.parse(source)
    [body] = [
        node.body for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == process.function
    ] or [tree.body]
    first = body[1] if isinstance(body[0], ast.Expr) else body[0]
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, " " * first.col_offset + statement)
    return "".join(lines)
