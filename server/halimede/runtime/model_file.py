"""Read and check the configuration file of a model, before a backend completes it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from halimede.core.config.files import CONFIG_NAME
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import PROBLEM_LIMIT, ParsedConfig, locate, read_config
from halimede.core.config.support import check_support
from halimede.core.config.validate import validate
from halimede.core.repository.layout import ENSEMBLE_PLATFORM, detect_backend
from halimede.core.repository.load_errors import ConfigError
from halimede.core.types import ErrorCode, InferenceError, Problem
from halimede.runtime.repository import ModelEntry, config_filename, read_config_text


def read_model_config(entry: ModelEntry) -> tuple[str, ModelConfig, Mapping[str, tuple[int, int]], tuple[Problem, ...]]:
    """The configuration and its file, the position of each field, and notes on fields without effect."""
    try:
        filename = config_filename(entry)
    except ValueError as error:
        raise ConfigError(ErrorCode.INVALID_ARG, str(error)) from error
    if filename is None:
        return CONFIG_NAME, ModelConfig(), {}, ()
    try:
        text = read_config_text(entry, filename)
    except (OSError, ValueError) as error:
        raise ConfigError(ErrorCode.INTERNAL, f"{filename} cannot be read: {error}") from error
    parsed = read_config(filename, text)
    refusals, notes = check_support(parsed.config, _backend(entry, parsed.config))
    problems = [*parsed.problems, *locate((*refusals, *_wrong_as_written(entry, parsed)), parsed.locations)]
    raise_problems(entry, filename, sorted(problems, key=lambda problem: (problem.line, problem.column)))
    return filename, parsed.config, parsed.locations, locate(notes, parsed.locations)


def support_in_file(entry: ModelEntry) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of the configuration file that are honoured, and notes on those without effect.

    Empty for a file that cannot be read.
    """
    try:
        filename = config_filename(entry)
        parsed = read_config(filename, read_config_text(entry, filename)) if filename is not None else None
    except (OSError, ValueError):
        parsed = None
    if parsed is None:
        return (), ()
    refusals, notes = check_support(parsed.config, _backend(entry, parsed.config))
    others = tuple(problem.path for problem in (*parsed.problems, *refusals, *notes))
    below = tuple(f"{path}{step}" for path in others for step in ".[")
    parents = {path[: found.start()] for path in parsed.locations if (found := _LAST_STEP.search(path))}
    values = (path for path in parsed.locations if path not in parents)
    honoured = (path for path in values if path not in others and not path.startswith(below))
    # The fields of ModelConfig of which a part at least is honoured.
    fields = dict.fromkeys(path.partition(".")[0].partition("[")[0] for path in honoured)
    return tuple(fields), tuple(note.message for note in notes)


_LAST_STEP = re.compile(r"(\.[^.\[]*|\[[^\[]*\])$")


def _backend(entry: ModelEntry, config: ModelConfig) -> str:
    """The model's backend; "" if it cannot be told, which the load reports later."""
    try:
        return detect_backend(config, entry.name, entry.first_files()).backend
    except InferenceError:
        return ""


def _wrong_as_written(entry: ModelEntry, parsed: ParsedConfig) -> list[Problem]:
    """Problems that no completion can fix: those of fields that the file itself sets.

    They are found before the backend completes the configuration, so that one load reports all problems of a file. The
    scheduling of an ensemble is never completed either. It has no line, so that it comes first, as in Triton.
    """
    config = parsed.config
    # The model file may set fields that are left out. The largest batch size stands for the one that it may set.
    completed = replace(config, name=config.name or entry.name, max_batch_size=config.max_batch_size or 2**31 - 1)
    if config.ensemble_scheduling is not None and not config.backend:
        completed = replace(completed, platform=config.platform or ENSEMBLE_PLATFORM)
    reported = {problem.path for problem in (*parsed.problems, *check_support(config, _backend(entry, config))[0])}
    written = {*parsed.locations, "ensemble_scheduling"} - reported
    return [problem for problem in validate(completed, entry.name) if problem.path in written]


def raise_problems(entry: ModelEntry, filename: str, problems: Sequence[Problem]) -> None:
    if problems:
        # The text goes to a client and into the index. The reader adds one problem with the count of the rest.
        texts = [in_file(entry, filename, problem) for problem in problems[: PROBLEM_LIMIT + 1]]
        if unlisted := len(problems) - len(texts):
            texts.append(f"{unlisted} more problems are not listed")
        raise ConfigError(ErrorCode.INVALID_ARG, "; ".join(texts), tuple(texts))


def in_file(entry: ModelEntry, filename: str, problem: Problem) -> str:
    """The problem's text with file, line and column in the form of compilers, which editors understand."""
    path = Path(entry.name) / filename
    return f"{path}:{problem}" if problem.line else f"{path}: {problem}"
