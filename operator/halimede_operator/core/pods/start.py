"""`status.startup`: how a pod started, as one line that the operator reads back."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halimede_operator.core.pods.fields import FETCH, SERVER, container_status
from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.reading import at, clean, condition, moment_at, seconds_between, text_at

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


def startup_text(observed: Observed) -> str | None:
    """`status.startup`; None before a pod has served.

    A pod may be unready for a while and then ready again, so the text of a known pod stays, also if no pod serves.
    """
    old = read_start(observed.subject.status)
    newest = max(observed.serving, key=lambda pod: pod.age, default=None)
    if newest is None or not newest.name or not newest.created or (old is not None and newest.name == old.pod):
        return old.as_text() if old is not None else None
    pod = next(each for each in observed.subject.snapshot.pods if text_at(each, "metadata", "uid") == newest.uid)
    times = {
        "scheduled": placed_at(pod),
        "fetched": moment_at(at(container_status(pod, FETCH), "state", "terminated"), "finishedAt"),
        "started": moment_at(at(container_status(pod, SERVER), "state", "running"), "startedAt"),
        "loaded": moment_at(condition(pod, "ContainersReady"), "lastTransitionTime"),
        "ready": moment_at(condition(pod, "Ready"), "lastTransitionTime"),
    }
    # The clock of a node may be behind that of the API server.
    stages = {name: max(0, int(seconds_between(newest.created, time))) for name, time in times.items() if time}
    return Start(newest.name, newest.created, stages).as_text()
