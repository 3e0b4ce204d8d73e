"""`status.startup`: how the newest pod that serves started, by the cluster's own times."""

from halimede_operator.core.pods.fields import FETCH, SERVER, container_status
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.reading import at, condition, moment_at, name_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.status.observed import Observed

_STAGES = ("created", "scheduled", "fetched", "started", "loaded", "ready")


def startup_json(observed: Observed) -> Object | None:
    """The times of the stages; those of the old status if no newer pod serves.

    A pod may be unready for a while and then ready again, so the times of a known pod stay.
    """
    old = at(observed.old, "startup")
    newest = max(observed.serving, key=lambda pod: pod.age, default=None)
    if newest is None or not newest.name or newest.name == text_at(old, "pod"):
        return _kept(old)
    pod = next(each for each in observed.snapshot.pods if text_at(each, "metadata", "uid") == newest.uid)
    times = {
        "created": newest.created,
        "scheduled": placed_at(pod),
        "fetched": moment_at(at(container_status(pod, FETCH), "state", "terminated"), "finishedAt"),
        "started": moment_at(at(container_status(pod, SERVER), "state", "running"), "startedAt"),
        "loaded": moment_at(condition(pod, "ContainersReady"), "lastTransitionTime"),
        "ready": moment_at(condition(pod, "Ready"), "lastTransitionTime"),
    }
    return {"pod": newest.name, **{stage: time for stage, time in times.items() if time}}


def _kept(old: object) -> Object | None:
    pod = name_at(old, "pod")
    times = {stage: moment_at(old, stage) for stage in _STAGES}
    return {"pod": pod, **{stage: time for stage, time in times.items() if time}} if pod else None
