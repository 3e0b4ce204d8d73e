"""`halimede explain-config`: a model's configuration as the server would use it, with the origin of each value.

All steps of a load are done except loading the model, so this finds the same errors as a load; for an ensemble, also
those of the models of its steps. The configuration goes to standard output; problems and notes, one per line, go to
standard error.
"""

import json
import logging
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halimede.commands.assemble import DEVICE_LIST_VARIABLE
from halimede.commands.readers import (
    BackendOption,
    merge_backend_options,
    read_backend_option,
    read_config_name,
    read_directory,
)
from halimede_spec.flag_values import read_boolean

if TYPE_CHECKING:
    from halimede.runtime.prepare import LoadOptions, LoadPlan
    from halimede.runtime.repository import ModelEntry, ModelRepository

DEFAULT_BACKEND_DIRECTORY = "/opt/tritonserver/backends"

FORMATS = ("pbtxt", "yaml", "json")


@dataclass(frozen=True, slots=True)
class ModelFlags:
    """The command line's flags on how to load models; they are those of `serve`."""

    backend_options: tuple[BackendOption, ...] = ()
    backend_directory: Path = Path(DEFAULT_BACKEND_DIRECTORY)
    autocomplete: bool = True
    config_name: str = ""
    allow_pickle: bool = True

    @contextmanager
    def load_options(self) -> "Iterator[LoadOptions]":
        """The load options, valid in this context. InferenceError if the device list cannot be read."""
        from halimede.runtime.devices import read_inventory
        from halimede.runtime.prepare import LoadOptions
        from halimede.settings import Settings

        device_list = os.environ.get(DEVICE_LIST_VARIABLE)
        options = LoadOptions(
            inventory=read_inventory(
                Path(device_list) if device_list else None, Settings().min_supported_compute_capability
            ),
            backend_config=merge_backend_options(self.backend_options),
            autocomplete=self.autocomplete,
            backend_directory=self.backend_directory,
            allow_pickle=self.allow_pickle,
        )
        try:
            yield options
        finally:
            options.launcher.close()


def run(model: Path, form: str, flags: ModelFlags) -> int:
    """Print the configuration and the notes, or all problems; returns the exit code."""
    # Imported here, so that --help and a mistyped flag answer quickly, without the serving libraries.
    from halimede.commands.planner import Planner
    from halimede.core.repository.load_errors import ConfigError
    from halimede.core.types import InferenceError
    from halimede.runtime.model_file import in_file

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        repository, entry = find_model(model, flags.config_name)
        with ended_by_interrupt(), flags.load_options() as options:
            plan = Planner(repository, options).plan(entry)
    except ConfigError as error:
        for problem in error.problems:
            print_line(problem)
        return 1
    except (InferenceError, OSError) as error:
        print_line(str(error))
        return 1
    for warning in (*entry.warnings, *plan.warnings):
        print_line(f"{entry.name}: {warning}")
    for note in plan.notes:
        print_line(in_file(entry, plan.stages[0].origin, note))
    click.echo(printed(plan, form))
    return 0


@contextmanager
def ended_by_interrupt() -> Iterator[None]:
    """Ctrl-C ends the process. As an exception it would be an error of the model that is planned."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def print_line(text: str) -> None:
    """Print a line on standard error, escaped: text from a model's files must not control the reader's terminal."""
    click.echo(printable(text), err=True)


def printable(text: str) -> str:
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def printed(plan: "LoadPlan", form: str) -> str:
    """The plan's configuration with the origin of each value that is set."""
    import orjson

    from halimede.core.config.explain import explained, origins
    from halimede.core.config.write import to_json, to_pbtxt, to_yaml

    by_path = origins(plan.stages, plan.locations)
    lines = (to_yaml if form == "yaml" else to_pbtxt)(plan.config, plan.locations)
    if form != "json":
        return "\n".join(explained(lines, by_path))
    document = {
        "config": orjson.loads(to_json(plan.config)),
        "origins": {line.path: by_path[line.path] for line in lines if line.path},
    }
    text = orjson.dumps(document, option=orjson.OPT_INDENT_2).decode()
    return "".join(each if each.isprintable() or each == "\n" else json.dumps(each)[1:-1] for each in text)


def find_model(model: Path, config_name: str) -> "tuple[ModelRepository, ModelEntry]":
    """The model, and the repository that contains it."""
    from halimede.runtime.repository import ModelRepository, is_model_file, model_problem

    if is_model_file(model):
        repository = ModelRepository((), model)
        name = repository.scan().names[0]
    else:
        # Symbolic links are not resolved, because the link's own name is the model's.
        directory = Path(os.path.abspath(model))
        repository, name = ModelRepository((directory.parent,), config_name=config_name), directory.name
        if problem := model_problem(directory.parent, name):
            raise click.UsageError(f"'{model}' is not the folder of a model: {problem}")
    try:
        return repository, repository.find(name)
    except LookupError as error:
        raise click.UsageError(str(error)) from None


def _reader(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that reads an option's value or values, and reports an invalid one. Any: click's type."""

    def convert(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return tuple(map(read, value)) if isinstance(value, tuple) else read(value)
        except ValueError as error:
            raise click.UsageError(f"{param.opts[0]}: {error}", ctx) from None

    return convert


def takes_model_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Add the flags of `ModelFlags` as parameters with the names of its fields."""
    options = (
        click.option(
            "--backend-config",
            "backend_options",
            multiple=True,
            callback=_reader(read_backend_option),
            metavar="[BACKEND,]KEY=VALUE",
            help="A setting of one backend, or of all (repeatable).",
        ),
        click.option(
            "--backend-directory",
            default=DEFAULT_BACKEND_DIRECTORY,
            callback=_reader(read_directory),
            metavar="DIR",
            help="The directory of backends that are programs in Python.",
            show_default=True,
        ),
        click.option(
            "--disable-auto-complete-config",
            "autocomplete",
            flag_value=False,
            default=True,
            help="Fill nothing in from the model file.",
        ),
        click.option(
            "--model-config-name",
            "config_name",
            default="",
            callback=_reader(read_config_name),
            metavar="NAME",
            help="Read configs/NAME.pbtxt or .yaml if it exists.",
        ),
        click.option(
            "--allow-pickle",
            default="true",
            callback=_reader(read_boolean),
            metavar="BOOLEAN",
            help="Whether models may have pickles, which can execute any code.",
            show_default=True,
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


@click.command(
    "explain-config",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    short_help="Check a model's configuration and print where each value comes from.",
)
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL_DIR|FILE")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="pbtxt", show_default=True, help="How to print it."
)
@takes_model_flags
@click.pass_context
# Any: click's own, the values of `takes_model_flags`.
def explain_config(ctx: click.Context, /, model: Path, form: str, **flags: Any) -> None:
    """Print the configuration that a model would run with, and where each value comes from.

    A value comes from a line of the configuration file, from the model directory (the backend follows from the names of
    its files), from the model file (what the backend reads in it), or is a default of the server or the backend. An
    ensemble is checked against the models of its steps, which must be in the same repository. The model is not loaded:
    the configuration is compared with the model file. For a python model only auto_complete_config is called, in a
    separate process.

    If a load would be refused, all errors are printed, and the exit code is 1.
    """
    ctx.exit(run(model, form, ModelFlags(**flags)))
