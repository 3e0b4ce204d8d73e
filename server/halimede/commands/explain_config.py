"""`halimede explain-config`: a model's configuration as the server would run it, and where each value comes from.

All that a load does is done here, short of loading the model, so that what is wrong is found here too; of an ensemble,
for the models of its steps as well. The configuration goes to standard output; problems and notes, a line each, to
standard error.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import replace
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

if TYPE_CHECKING:
    from halimede.runtime.prepare import LoadOptions, ModelPlan
    from halimede.runtime.repository import ModelEntry, ModelRepository

DEFAULT_BACKEND_DIRECTORY = "/opt/tritonserver/backends"

FORMATS = ("pbtxt", "yaml", "json")


def run(
    model: Path,
    form: str,
    backend_options: tuple[BackendOption, ...],
    backend_directory: Path,
    autocomplete: bool,
    config_name: str,
) -> int:
    """Print the configuration and the notes, or all that is wrong; the exit code."""
    # Imported here, so that --help and a mistyped flag answer without the serving libraries.
    from halimede.core.types import InferenceError
    from halimede.runtime.devices import read_inventory
    from halimede.runtime.prepare import ConfigError, LoadOptions, in_file
    from halimede.settings import Settings

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    device_list = os.environ.get(DEVICE_LIST_VARIABLE)
    try:
        repository, name = _repository(model, config_name)
        entry = _find(repository, name)
        inventory = read_inventory(
            Path(device_list) if device_list else None, Settings().min_supported_compute_capability
        )
        options = LoadOptions(
            inventory=inventory,
            backend_config=merge_backend_options(backend_options),
            autocomplete=autocomplete,
            backend_directory=backend_directory,
        )
        try:
            plan = _plan(entry, options, repository, {})
        finally:
            options.launcher.close()
    except ConfigError as error:
        for problem in error.problems:
            _say(problem)
        return 1
    except (InferenceError, OSError) as error:
        _say(str(error))
        return 1
    for warning in entry.warnings:
        _say(f"{entry.name}: {warning}")
    for note in plan.notes:
        _say(in_file(entry, plan.stages[0].origin, note))
    click.echo(printed(plan, form))
    return 0


def _plan(
    entry: "ModelEntry", options: "LoadOptions", repository: "ModelRepository", planned: "dict[str, ModelPlan | None]"
) -> "ModelPlan":
    """The plan of a model, or of an ensemble with those of its steps' models, from the same repository.

    `planned` has what was planned before by name, None for what is being planned.
    """
    from halimede.core.config.explain import Stage
    from halimede.core.ensemble.graph import members_of
    from halimede.core.types import ErrorCode, InferenceError
    from halimede.runtime.prepare import ensemble_graph, plan_model
    from halimede.workers.abandon import Abandon

    planned[entry.name] = None
    plan = plan_model(entry, options, Abandon())
    members = []
    for name, version in members_of(plan.config):
        if name not in planned:
            try:
                member = repository.find(name)
            except LookupError as error:
                text = f"ensemble {entry.name} contains models that are not available or ambiguous: {name}: {error}"
                raise InferenceError(ErrorCode.INVALID_ARG, text) from None
            planned[name] = _plan(member, options, repository, planned)
        step = planned[name]
        if step is None:
            text = f"circular dependency between ensembles: {name} -> ... -> {entry.name} -> {name}"
            raise InferenceError(ErrorCode.INVALID_ARG, text)
        if version not in (-1, *step.versions):
            text = f"ensemble '{entry.name}' depends on '{name}' whose required version {version} is not loaded."
            raise InferenceError(ErrorCode.INVALID_ARG, text)
        members.append(step.config)
    if members:
        _, config = ensemble_graph(plan.config, members)
        plan = replace(plan, config=config, stages=(*plan.stages, Stage("the steps' models", config)))
    planned[entry.name] = plan
    return plan


def _say(text: str) -> None:
    """A line on standard error. It may repeat what a model's files say, which must not steer the reader's terminal."""
    click.echo("".join(each if each.isprintable() else ascii(each)[1:-1] for each in text), err=True)


def printed(plan: "ModelPlan", form: str) -> str:
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


def _repository(model: Path, config_name: str) -> "tuple[ModelRepository, str]":
    """The repository that the model is in, and its name there."""
    from halimede.runtime.repository import ModelRepository

    if model.is_file():
        repository = ModelRepository((), model)
        return repository, repository.scan().names[0]
    # Not resolved: a link's own name is the model's.
    directory = Path(os.path.abspath(model))
    return ModelRepository((directory.parent,), config_name=config_name), directory.name


def _find(repository: "ModelRepository", name: str) -> "ModelEntry":
    try:
        return repository.find(name)
    except LookupError as error:
        raise click.UsageError(str(error)) from None


def _reader(read: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A click callback that reads an option's value or values, and says what is wrong with one. Any: click's own."""

    def convert(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            return tuple(map(read, value)) if isinstance(value, tuple) else read(value)
        except ValueError as error:
            raise click.UsageError(f"{param.opts[0]}: {error}", ctx) from None

    return convert


@click.command("explain-config", context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("model", type=click.Path(exists=True, path_type=Path), metavar="MODEL_DIR|FILE.onnx")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="pbtxt", show_default=True, help="How to print it."
)
@click.option(
    "--backend-config",
    multiple=True,
    callback=_reader(read_backend_option),
    metavar="[BACKEND,]KEY=VALUE",
    help="A setting of one backend, or of all (repeatable).",
)
@click.option(
    "--backend-directory",
    default=DEFAULT_BACKEND_DIRECTORY,
    callback=_reader(read_directory),
    metavar="DIR",
    help="Where backends lie that are programs in Python.",
    show_default=True,
)
@click.option("--disable-auto-complete-config", is_flag=True, help="Fill nothing in from the model file.")
@click.option(
    "--model-config-name",
    default="",
    callback=_reader(read_config_name),
    metavar="NAME",
    help="Read configs/NAME.pbtxt or .yaml where there is one.",
)
@click.pass_context
def explain_config(
    ctx: click.Context,
    model: Path,
    form: str,
    backend_config: tuple[BackendOption, ...],
    backend_directory: Path,
    disable_auto_complete_config: bool,
    model_config_name: str,
) -> None:
    """Print the configuration that a model would run under, and where each value comes from.

    A value is from a line of the configuration file, from the model directory (the backend, by the names of its files),
    from the model file (what the backend reads in it), or a default of the server or the backend. An ensemble's is held
    against those of its steps' models, which are looked for in the directory that it is in itself. The model is not
    loaded; one in Python is asked by its auto_complete_config, in a process of its own. Exits with 1, and says all that
    is wrong, where the configuration cannot be used.
    """
    ctx.exit(run(model, form, backend_config, backend_directory, not disable_auto_complete_config, model_config_name))
