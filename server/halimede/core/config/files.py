"""The configuration files of a model directory: their names, and the one that is read."""

from collections.abc import Callable

from halimede.core.config.names import model_name_problem

CONFIG_NAME = "config.pbtxt"
"""The name of the configuration in messages when there is no file."""

FORMATS = (".pbtxt", ".yaml")


def config_file(config_name: str, exists: Callable[[str], bool]) -> str | None:
    """The configuration file, relative to the model's directory; None for a model without one.

    With a `config_name` (`--model-config-name`, "" if not set) it is `configs/<config_name>` in either format if the
    model has that file, else `config`. ValueError if both formats exist, because it is unclear which one is meant.
    """
    for stem in (f"configs/{config_name}", "config") if config_name else ("config",):
        found = [stem + suffix for suffix in FORMATS if exists(stem + suffix)]
        if len(found) > 1:
            raise ValueError(f"there are both {' and '.join(found)}; keep one of them")
        if found:
            return found[0]
    return None


def config_name_problem(name: str) -> str | None:
    """Why this cannot be a `--model-config-name`, or None: it must be one safe path component, like a model's name."""
    problem = model_name_problem(name)
    return f"configuration {problem.removeprefix('a ').removeprefix('model ')}" if problem else None
