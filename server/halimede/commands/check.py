"""`halimede check`: whether each model of a repository would load, and which parts of its configuration are honoured.

Each model is planned as for a load, like in `explain-config`. The table, or with --json the document, goes to standard
output; warnings about the repository itself go to standard error.
"""

import logging
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halimede.commands.explain_config import ModelFlags, ended_by_interrupt, print_line, printable, takes_model_flags

if TYPE_CHECKING:
    from halimede.commands.planner import Planner
    from halimede.runtime.repository import ModelRepository

NARROWEST = 40
"""Minimum width of the column of reasons, even if the terminal is narrower."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of planning a load: the model is refused for the reasons in `refused`, else it would load.

    `honoured` are fields that the configuration file sets, `ignored` explains why other fields have no effect.
    """

    name: str
    backend: str = ""
    versions: tuple[int, ...] = ()
    honoured: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def loads(self) -> bool:
        return not self.refused


def run(repositories: tuple[Path, ...], as_json: bool, flags: ModelFlags) -> int:
    """Print the result for each model; 0 if all repositories are readable and have models that would all load."""
    # Imported here, so that --help and a mistyped flag answer quickly, without the serving libraries.
    from halimede.commands.planner import Planner
    from halimede.core.types import InferenceError
    from halimede.runtime.repository import ModelRepository

    # The table has all problems.
    logging.basicConfig(level=logging.CRITICAL)
    try:
        repository = ModelRepository(repositories, config_name=flags.config_name)
        listing = repository.scan()
        with ended_by_interrupt(), flags.load_options() as options:
            planner = Planner(repository, options)
            results = [examine(repository, planner, name) for name in listing.names]
    except (InferenceError, OSError) as error:
        print_line(str(error))
        return 1
    unreadable = tuple(repository.unreadable().values())
    warnings = (*unreadable, *listing.warnings)
    for warning in warnings:
        print_line(warning)
    if as_json:
        click.echo(document(results, warnings))
    elif results:
        click.echo("\n".join(table(results, shutil.get_terminal_size((120, 24)).columns)))
    return 0 if results and not unreadable and all(result.loads for result in results) else 1


def examine(repository: "ModelRepository", planner: "Planner", name: str) -> CheckResult:
    """The result for one model."""
    from halimede.core.repository.load_errors import ConfigError
    from halimede.core.types import InferenceError
    from halimede.runtime.model_file import support_in_file

    try:
        entry = repository.find(name)
    except (LookupError, OSError) as error:
        return CheckResult(name, refused=(str(error),))
    honoured, ignored = support_in_file(entry)
    refused: tuple[str, ...] = ()
    try:
        plan = planner.plan(entry)
    except ConfigError as error:
        refused = error.problems
    except InferenceError as error:
        refused = (error.message,)
    if refused:
        return CheckResult(name, "", tuple(sorted(entry.versions)), honoured, ignored, refused, entry.warnings)
    notes = tuple(note.message for note in plan.notes)
    backend = plan.config.backend or plan.config.platform
    return CheckResult(name, backend, plan.versions, honoured, notes, (), (*entry.warnings, *plan.warnings))


HEADS = ("MODEL", "LOADS", "BACKEND", "VERSIONS", "WHAT", "")


def table(results: Sequence[CheckResult], width: int) -> list[str]:
    """The lines of the table, as wide as `width` if that is wide enough, and of the count below it."""
    rows = [row for result in results for row in _rows(result)]
    widths = [max(len(row[at]) for row in (HEADS, *rows)) for at in range(len(HEADS) - 1)]
    room = max(NARROWEST, width - sum(widths) - 2 * len(widths))
    lines = []
    for row in (HEADS, *rows):
        texts = textwrap.wrap(row[-1], room, break_on_hyphens=False) or [""]
        for text in texts:
            cells = (*row[:-1], text) if text is texts[0] else (*[""] * len(widths), text)
            padded = [cell.ljust(columns) for cell, columns in zip(cells, (*widths, 0), strict=True)]
            lines.append("  ".join(padded).rstrip())
    loading = sum(result.loads for result in results)
    return [*lines, "", f"{loading} of {len(results)} models load"]


def _rows(result: CheckResult) -> Iterator[tuple[str, ...]]:
    """One row per finding; the first row has the model's name."""
    versions = ",".join(map(str, result.versions))
    head = (printable(result.name), "yes" if result.loads else "NO", result.backend, versions)
    rows = [
        *(("refused", text) for text in result.refused),
        *(("ignored", text) for text in result.ignored),
        *(("warning", text) for text in result.warnings),
        ("honoured", ", ".join(result.honoured) or "(nothing is configured)"),
    ]
    for what, text in rows:
        yield (*head, what, printable(text))
        head = ("", "", "", "")


def document(results: Sequence[CheckResult], warnings: Sequence[str]) -> str:
    """The results and the warnings about the repository, as JSON."""
    import orjson

    models = [{"loads": result.loads, **asdict(result)} for result in results]
    return orjson.dumps({"models": models, "warnings": warnings}, option=orjson.OPT_INDENT_2).decode()


@click.command(
    "check",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    short_help="Check which models of a repository would load.",
)
@click.argument(
    "repositories",
    nargs=-1,
    required=True,
    # `run` reports an unreadable directory, with a hint.
    type=click.Path(exists=True, file_okay=False, readable=False, path_type=Path),
    metavar="REPOSITORY...",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of the table.")
@takes_model_flags
@click.pass_context
# Any: click's own, the values of `takes_model_flags`.
def check(ctx: click.Context, /, repositories: tuple[Path, ...], as_json: bool, **flags: Any) -> None:
    """Check which models of a repository would load, and which fields of their configurations are honoured.

    The rows of a model show why a load would be refused, which fields are ignored and why, warnings, and the fields of
    its configuration file that are honoured. Models are not loaded: the configuration is compared with the model file.
    Python models are imported in separate processes, where auto_complete_config is called and initialize is not. Exits
    with 0 if every model would load, and with 1 if a model would be refused or there is no model.
    """
    ctx.exit(run(repositories, as_json, ModelFlags(**flags)))
