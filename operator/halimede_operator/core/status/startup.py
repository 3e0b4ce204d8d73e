"""How the newest pod that serves started, by the cluster's own times."""

from halimede_operator.core.pods.fields import FETCH, SERVER, container_status
from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.pods.start import Start, read_start
from halimede_operator.core.reading import at, condition, moment_at, seconds_between, text_at


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
