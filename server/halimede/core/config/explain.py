"""Find the origin of each value of a complete configuration, by comparing the configuration before and after each step.

A value is attributed to the first step after which it no longer changed. The code that completes a configuration
therefore does not record origins, and this also works for third-party backends.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halimede.core.config.message_types import message_type
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.write import Line, entry_path

DEFAULT = "default"
MAX_COMMENT_COLUMN = 60
"""Comments are aligned, but at most at this column, so that one long line does not move all of them to the right."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The configuration after one step of completion; `origin` names the source of what the step added."""

    origin: str
    config: ModelConfig


def origins(stages: Sequence[Stage], locations: Mapping[str, tuple[int, int]]) -> dict[str, str]:
    """The origin of every value and message of the last stage, by path.

    The first stage is the configuration file, and `locations` has the positions in it. A value that the file leaves at
    the protocol's default also counts as a default.
    """
    values = [dict(_values(stage.config, "")) for stage in stages]
    found: dict[str, str] = {}
    for path, value in values[-1].items():
        since = len(stages) - 1
        while since > 0 and values[since - 1].get(path) == value:
            since -= 1
        if since > 0:
            found[path] = stages[since].origin
        else:
            position = locations.get(path)
            found[path] = f"{stages[0].origin}:{position[0]}" if position else DEFAULT
    return found


def explained(lines: Sequence[Line], by_path: Mapping[str, str]) -> list[str]:
    """The lines with the origins of their values as aligned comments."""
    width = max((len(line.text) for line in lines if line.path and len(line.text) <= MAX_COMMENT_COLUMN), default=0)
    return [f"{line.text:<{width}}  # {by_path[line.path]}" if line.path else line.text for line in lines]


def _values(message: Any, path: str) -> Iterator[tuple[str, str]]:  # Any: a message's dataclass
    """Every value in the message by its path: a scalar or list of scalars, as text that is unique for the value."""
    kind: type = type(message)
    for target in message_type(kind).by_name.values():
        value = getattr(message, target.attribute)
        at = path + target.step if path else target.name
        if value is None:
            continue
        if target.entry is not None:
            parts = [(entry_path(at, key), entry) for key, entry in value.items()]
        elif target.repeated and target.value.message is not None:
            parts = [(f"{at}[{i}]", element) for i, element in enumerate(value)]
        else:
            parts = [(at, value)]
        for where, part in parts:
            if target.value.message is None:
                yield where, repr(part)
            else:
                yield where, "a message"
                yield from _values(part, where)
