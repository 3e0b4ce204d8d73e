"""`status.startup`: how the newest pod that serves started, by the cluster's own times."""

import re

from halimede_operator.core.pods.fields import FETCH, SERVER, container_status
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.reading import at, clean, condition, moment_at, seconds_between, text_at
from halimede_operator.core.status.observed import Observed

_TEXT = re.compile(r"(\S{1,253}) created \S{20}(?:[:,] [a-z]+ \+\d+ s)*")


def startup_text(observed: Observed) -> str | None:
    """`bert-1-a created 2026-11-22T09:00:00Z: scheduled +0 s, fetched +4 s, … ready +8 s`: seconds since the creation.

    A pod may be unready for a while and then ready again, so the text of a known pod stays, also if no pod serves.
    """
    old = _TEXT.fullmatch(clean(text_at(observed.old, "startup"), 512))
    newest = max(observed.serving, key=lambda pod: pod.age, default=None)
    if newest is None or not newest.name or not newest.created or (old is not None and newest.name == old[1]):
        return old[0] if old is not None else None
    pod = next(each for each in observed.snapshot.pods if text_at(each, "metadata", "uid") == newest.uid)
    times = {
        "scheduled": placed_at(pod),
        "fetched": moment_at(at(container_status(pod, FETCH), "state", "terminated"), "finishedAt"),
        "started": moment_at(at(container_status(pod, SERVER), "state", "running"), "startedAt"),
        "loaded": moment_at(condition(pod, "ContainersReady"), "lastTransitionTime"),
        "ready": moment_at(condition(pod, "Ready"), "lastTransitionTime"),
    }
    stages = [f"{stage} +{seconds_between(newest.created, time):.0f} s" for stage, time in times.items() if time]
    return f"{newest.name} created {newest.created}" + (f": {', '.join(stages)}" if stages else "")
