"""`halimede check-backend`: hold an installed backend to the rules of `halimede.backends.api`.

Each check is one line on standard output: ok, FAIL or -- (not tried), its name, and what was seen, or what is wrong and
what to do. The checks run in a process of their own, so that a crash of the runtime is a result like others.
"""

import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halimede.commands.explain_config import ModelFlags, find_model, print_line, printable, takes_model_flags

if TYPE_CHECKING:
    from halimede.core.config.model_config import ModelConfig
    from halimede.core.types import InferenceRequest

MAX_REQUEST_BYTES = 64 << 20
_SHAPE = re.compile(r"([^:]+):([0-9]+(?:,[0-9]+)*)")


def run(
    name: str,
    models: Sequence[Path],
    shapes: Sequence[str],
    refused: Sequence[Path],
    tolerance: float,
    cycles: int,
    flags: ModelFlags,
    begin: Callable[[str], None],
) -> int:
    """Check the backend with each model, and print the outcomes; returns the exit code."""
    from halimede.backends.discover import find_backend
    from halimede.conformance_kit.kit import Verdict, make_subject, run_checks, write_sample
    from halimede.core.types import InferenceError

    logging.basicConfig(level=logging.CRITICAL)
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            backend = find_backend(name)
            if not models and backend.default_model_filename:
                filename = f"1/{backend.default_model_filename}"
                print_line(f"backend '{name}' needs a file: give the directory of a model with {filename}")
                return 2
            paths = list(models) or [write_sample(Path(folder), name)]
            with flags.load_options() as options:
                for path in paths:
                    _, entry = find_model(path, flags.config_name)
                    subject = make_subject(
                        entry,
                        options,
                        name,
                        shapes=_shapes(shapes),
                        refused=lambda config: [_request(path, config) for path in refused],
                        tolerance=tolerance,
                        cycles=cycles,
                    )
                    click.echo(f"backend {name}, model {entry.name}")
                    for outcome in run_checks(subject, begin):
                        click.echo(printable(str(outcome)))
                        failed = failed or outcome.verdict is Verdict.FAILED
        except (InferenceError, OSError) as error:
            print_line(str(error))
            return 2
    return 1 if failed else 0


def _shapes(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in texts:
        match = _SHAPE.fullmatch(text)
        if match is None:
            raise click.UsageError(f"--shape {text}: write INPUT:SIZE,SIZE without the batch dimension")
        shapes[match[1]] = tuple(map(int, match[2].split(",")))
    return shapes


def _request(path: Path, config: "ModelConfig") -> "InferenceRequest":
    """The request of a file with the body of an inference call, as JSON."""
    from halimede.core.config.check_request import RequestChecker
    from halimede.core.config.model_view import ModelView
    from halimede.core.wire.http_request import decode_infer
    from halimede.runtime.repository import read_file

    view = ModelView(config.name, "1", ("1",), config, {})
    request = decode_infer(view, read_file(path, MAX_REQUEST_BYTES), None).request
    RequestChecker(config).check(request)
    return request


def supervised(work: Callable[[Callable[[str], None]], int]) -> int:
    """The exit code of the work, which is done in a fork. It reports what it begins; if it dies, that is printed."""
    reports, report = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(reports)
        code = 70
        try:
            code = work(lambda name: _write(report, name))
        except click.ClickException as error:
            error.show()
            code = error.exit_code
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            # Threads of a runtime must not keep the process from ending.
            os._exit(code)
    os.close(report)
    with open(reports, encoding="utf-8") as lines:
        begun = [line.strip() for line in lines]
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        during = f"during the check {begun[-1]}" if begun else "before the first check"
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        advice = 'find the cause in the runtime, and set isolation to "process" if it can crash'
        click.echo(f"FAIL  {begun[-1] if begun else 'start':<12}  the process died with {name} {during}; {advice}")
        return 1
    return os.waitstatus_to_exitcode(status)


def _write(report: int, name: str) -> None:
    os.write(report, f"{name}\n".encode())


@click.command(
    "check-backend",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    short_help="Hold an installed backend to the rules for backends.",
)
@click.argument("name")
@click.argument("models", nargs=-1, type=click.Path(exists=True, path_type=Path), metavar="[MODEL_DIR|FILE]...")
@click.option(
    "--shape",
    "shapes",
    multiple=True,
    metavar="INPUT:SIZE,...",
    help="The shape of an input with variable dimensions, without the batch dimension (repeatable).",
)
@click.option(
    "--refused",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A request that the model must refuse: the JSON body of an inference call (repeatable).",
)
@click.option(
    "--tolerance",
    default=1e-3,
    show_default=True,
    type=click.FloatRange(0, 1),
    metavar="FRACTION",
    help="How far floating-point results of a batch may differ from those of single rows.",
)
@click.option(
    "--cycles",
    default=10,
    show_default=True,
    type=click.IntRange(2, 10_000),
    metavar="COUNT",
    help="How often the model is loaded and unloaded to find leaks.",
)
@takes_model_flags
@click.pass_context
# Any: click's own, the values of `takes_model_flags`.
def check_backend(
    ctx: click.Context,
    /,
    name: str,
    models: tuple[Path, ...],
    shapes: tuple[str, ...],
    refused: tuple[Path, ...],
    tolerance: float,
    cycles: int,
    **flags: Any,
) -> None:
    """Hold the backend NAME to the rules of halimede.backends.api, with the given models.

    Without a model, a model with an input and an output of each datatype is made, for a backend that needs no file.
    Each check is one line: ok, FAIL, or -- if it does not apply to the model. Exits with 0 if no check fails, with 1 if
    one fails, and with 2 if the checks cannot begin. The models are loaded into this command's process, also those of
    backends whose models run in worker processes: use only models that you trust.
    """
    given = ModelFlags(**flags)
    ctx.exit(supervised(lambda begin: run(name, models, shapes, refused, tolerance, cycles, given, begin)))
