"""Mutants as a measure of what tests detect: `python tests/mutants/run.py draw`, `record` or `compare`."""

import json
import os
import signal
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from mutants.apply import locate, module_of
from mutants.compare import describe, table
from mutants.draw import QUOTAS, draw, kinds
from mutants.find import Kind, Mutant, find
from mutants.proof import prove
from mutants.reach import STAGES
from mutants.record import Recorder, compacted, has_effect_at_import, read
from mutants.runs import Runner
from mutants.tree import Tree, folder_of, say

HERE = Path(__file__).parent
LIST, BEFORE = HERE / "mutants.json", HERE / "before.jsonl"
SEED = 36
COPIES = Path(os.environ.get("MUTANTS_DIR") or Path(tempfile.gettempdir()) / "halimede-mutants")


def drawn() -> list[Mutant]:
    rows = json.loads(LIST.read_text())
    return [Mutant(**{**row, "kind": Kind(row["kind"])}) for row in rows]


@click.group()
def main() -> None:
    """Everything runs in a copy of a commit, in $MUTANTS_DIR or a temporary folder."""


@main.command("draw")
@click.option("--commit", default="HEAD")
def draw_command(commit: str) -> None:
    """Draw mutants of a commit into mutants.json."""
    tree = Tree.of_commit(commit, COPIES)
    sources = tree.sources()

    def is_usable(mutant: Mutant) -> bool:
        position = locate(mutant, sources)
        if position is None or has_effect_at_import(mutant, position, sources):
            return False
        try:
            compile(tree.mutated_text(mutant, position), mutant.file, "exec")
        except SyntaxError:
            return False
        with tree.mutated(mutant, position):
            usable = tree.imports(module_of(mutant.file))
        say(f"{'drawn' if usable else 'fails at import'}: {mutant.kind}: {describe(mutant)}")
        return usable

    found = [mutant for file, source in sources.items() for mutant in find(file, source)]
    say(f"{len(found)} mutants are possible: {kinds(found)}")
    mutants = draw(found, SEED, QUOTAS, is_usable)
    LIST.write_text("[\n" + ",\n".join(json.dumps(asdict(each)) for each in mutants) + "\n]\n")
    say(f"{len(mutants)} mutants: {kinds(mutants)}")


@main.command()
@click.option("--commit", default="HEAD")
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice(list(STAGES)),
    default=["unit", "rest", "conformance", "properties", "cluster"],
)
@click.option("--budget", "budget_s", default=120.0, help="seconds of tests per mutant and stage")
@click.option("--durations", type=Path, help="build/durations.json of a whole run")
@click.option(
    "--before/--after", "is_before", default=False, help="write the committed record that later ones are compared with"
)
@click.option("--proof/--no-proof", default=True, help="show first that each kind of process imports the copy")
def record(
    commit: str, stages: tuple[str, ...], budget_s: float, durations: Path | None, is_before: bool, proof: bool
) -> None:
    """Find a killer for each mutant; goes on where an earlier run ended."""
    # So that an ended run ends its tests, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    tree = Tree.of_commit(commit, COPIES)
    runner = Runner(tree)
    if proof:
        prove(runner)
    seconds = {}
    if durations:
        seconds = {name: test["wall_s"] for name, test in json.loads(durations.read_text())["tests"].items()}
    recorder = Recorder(runner, drawn(), tree.folder / "record.jsonl", {} if is_before else read(BEFORE), seconds)
    recorder.known_killers()
    for stage in stages:
        recorder.stage(stage, budget_s)
    if is_before:
        BEFORE.write_text(compacted(recorder.rows[each.id] for each in recorder.mutants if each.id in recorder.rows))


@main.command()
@click.option("--commit", default="HEAD")
def compare(commit: str) -> None:
    """Print the table of the committed record and that of a commit; fails if a mutant was killed before and is not now."""
    text, is_kept = table(drawn(), read(BEFORE), read(folder_of(commit, COPIES) / "record.jsonl"))
    click.echo(text)
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
