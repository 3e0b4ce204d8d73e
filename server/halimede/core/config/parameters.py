"""Reads values that a configuration has as texts: a model's parameters, and the settings of `--backend-config`."""

from collections.abc import Mapping
from typing import TypeVar

from halimede.core.config.model_config import ModelConfig
from halimede.core.types.error import clip, invalid

V = TypeVar("V")
D = TypeVar("D")

BOOLEANS = {"0": False, "1": True, "false": False, "true": True}
MOST_INT32 = 2**31 - 1


def parse_number(text: str, least: int, most: int) -> int | None:
    """The number that a text has in decimal digits; None if it has none, or none from `least` to `most`."""
    # int() also accepts digits of other scripts, and refuses texts of thousands of digits.
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most
    return int(text) if is_number else None


def number_setting(
    backend: str, settings: Mapping[str, str], key: str, default: int, least: int = 0, most: int = MOST_INT32
) -> int:
    """A number in the backend's settings, `default` if it is not set. INVALID_ARG if it is anything else."""
    text = settings.get(key, str(default))
    number = parse_number(text, least, most)
    if number is None:
        raise invalid(f"--backend-config {backend},{key}={clip(text)}: it must be a number, at least {least}")
    return number


def parameters_of(config: ModelConfig) -> dict[str, str]:
    """The texts of the model's parameters."""
    return {key: value.string_value for key, value in config.parameters.items()}


class ValueReader:
    """Reads values and collects the `problems` of wrong ones, which count as not set.

    `what` is how a problem names a key. An empty text counts as not set, unless `reads_empty`.
    """

    def __init__(self, values: Mapping[str, str], what: str = "parameter '{}'", *, reads_empty: bool = False) -> None:
        self._values = {key: text for key, text in values.items() if text or reads_empty}
        self._what = what
        self.problems: list[str] = []

    def text(self, key: str) -> str:
        """The text as it is; "" if it is not set."""
        return self._values.get(key, "")

    def count(self, key: str, most: int, least: int = 0, default: int = 0) -> int:
        """A number."""
        if key not in self._values:
            return default
        number = parse_number(self._values[key], least, most)
        if number is None:
            self.wrong(key, f"a number from {least} to {most}")
        return number or 0

    def flag(self, key: str, default: D) -> bool | D:
        """A boolean, in words or as a digit."""
        return self.choice(key, BOOLEANS, default, "'true' or 'false'")

    def choice(self, key: str, choices: Mapping[str, V], default: D, right: str = "") -> V | D:
        """The value of a choice, in upper or lower case. `right` says which there are, if not all are to be listed."""
        if key not in self._values:
            return default
        by_name = {name.lower(): value for name, value in choices.items()}
        name = self._values[key].lower()
        if name not in by_name:
            self.wrong(key, right or f"one of {', '.join(choices)}")
        return by_name.get(name, default)

    def wrong(self, key: str, right: str) -> None:
        """Note that the value of a key is wrong, and what would be right."""
        self.problems.append(f"{self._what.format(key)} is '{clip(self.text(key))}'; it must be {right}")

    def finish(self, model: str) -> None:
        """INVALID_ARG that names every problem, if there are any."""
        if self.problems:
            raise invalid(f"model '{model}': {'; '.join(self.problems)}")
