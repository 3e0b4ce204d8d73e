"""Which files of a model directory hold its configuration: their names, and which of them is read."""

from collections.abc import Callable

from halimede.core.config.validate import model_name_problem

CONFIG_NAME = "config.pbtxt"
"""What a configuration is called where there is no file to name."""

FORMATS = (".pbtxt", ".yaml")


def config_file(config_name: str, exists: Callable[[str], bool]) -> str | None:
    """The configuration file, relative to the model's directory; None where there is none.

    With a `config_name` (`--model-config-name`, "" without) that is `configs/<config_name>` in either format where the
    model has it, else `config`. ValueError where it is there in both formats: nobody can say which of them is meant.
    """
    for stem in (f"configs/{config_name}", "config") if config_name else ("config",):
        found = [stem + suffix for suffix in FORMATS if exists(stem + suffix)]
        if len(found) > 1:
            raise ValueError(f"there are both {' and '.join(found)}; keep one of them")
        if found:
            return found[0]
    return None


def config_name_problem(name: str) -> str | None:
    """Why this cannot be a `--model-config-name`, None when it can: it is one safe path component, like a model's."""
    problem = model_name_problem(name)
    return f"configuration {problem.removeprefix('a ').removeprefix('model ')}" if problem else None
