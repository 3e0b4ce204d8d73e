"""`status.startup`: how a pod started, as one line that the operator reads back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halimede_operator.core.reading import clean, moment_at, text_at

_MAX_CHARACTERS = 512
_TEXT = re.compile(r"(\S{1,253}) created (\S{20})((?:[:,] [a-z]{1,16} \+[0-9]{1,9} s){0,16})")
_STAGE = re.compile(r"([a-z]+) \+([0-9]+) s")


@dataclass(frozen=True, slots=True)
class Start:
    """How a pod started."""

    pod: str
    """Its name."""
    created: str
    """When it was created, as `moment_at` writes it."""
    stages: Mapping[str, int]
    """The whole seconds from then until each stage, in their order."""

    def as_text(self) -> str:
        """`bert-1-a created 2026-11-22T09:00:00Z: scheduled +0 s, fetched +4 s, ready +8 s`."""
        stages = ", ".join(f"{stage} +{seconds} s" for stage, seconds in self.stages.items())
        return f"{self.pod} created {self.created}" + (f": {stages}" if stages else "")


def read_start(status: object) -> Start | None:
    """The start in a status; None without one, or if it is malformed, because any user may have written it."""
    found = _TEXT.fullmatch(clean(text_at(status, "startup"), _MAX_CHARACTERS))
    if found is None or (created := moment_at({"created": found[2]}, "created")) is None:
        return None
    return Start(found[1], created, {stage: int(seconds) for stage, seconds in _STAGE.findall(found[3])})
