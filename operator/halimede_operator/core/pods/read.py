"""Reads the state of one of our pods: which stage it has reached, and which failure keeps it from the next one."""

from collections.abc import Iterator, Mapping, Sequence

from halimede_operator.core.pods.containers import Container, container_failure, past_failure
from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import (
    FETCH,
    SERVER,
    container_status,
    container_statuses,
    has_started,
    image_of,
)
from halimede_operator.core.pods.kubelet_events import missing_pull_secrets, start_failures, with_missing_secrets
from halimede_operator.core.pods.scheduling import (
    ended_pod_failure,
    lost_device_failures,
    node_failures,
    scheduler_failures,
    scheduling_failures,
    unhealthy_device_failures,
)
from halimede_operator.core.pods.served_versions import index_failures, is_newly_ready
from halimede_operator.core.pods.view import DIGEST, FetchedModel, PodView, ready_versions
from halimede_operator.core.pods.volume_claims import claim_failures
from halimede_operator.core.reading import (
    at,
    clean,
    condition,
    decimal,
    integer_at,
    json_object,
    moment_at,
    name_at,
    objects_at,
    seconds_before,
    text_at,
)
from halimede_operator.core.snapshot import Object, PodIndex, Shortage, VolumeClaim

_REASONS_WHILE_SERVING = frozenset(
    {Reason.DEVICE_UNHEALTHY, Reason.DEVICE_LOST, Reason.OUT_OF_MEMORY, Reason.WORKER_CRASHED}
)
"""Reasons that a pod may have while it serves."""


def read_pod(
    pod: Object,
    index: PodIndex | None,
    served: str,
    now: str,
    events: Sequence[Object] = (),
    shortages: Sequence[Shortage] = (),
    claims: Mapping[str, VolumeClaim | None] | None = None,
) -> PodView:
    """Read one pod. Never raises, for any content of the object.

    index: the pod's, None if it was not asked yet. served: the name under which the model or ensemble is served. now:
    UTC time as `moment_at` writes it. events: about it. shortages: of its node. claims: those that were read, by name.
    """
    name = name_at(pod, "metadata", "name")
    has_ended = text_at(pod, "status", "phase") in {"Failed", "Succeeded"}
    reached = _reached(pod, index, served)
    found = [*_failures(pod, name, index, served, reached, now), *start_failures(pod, name, events)]
    found += claim_failures(pod, name, claims or {})
    found += [*lost_device_failures(pod, name, shortages), *scheduler_failures(pod, name, now)]
    missing_secrets = missing_pull_secrets(events, now)
    found = [with_missing_secrets(failure, missing_secrets) for failure in found]
    worst = min(found, key=lambda failure: failure.order, default=None)
    failure_while_serving = worst if worst is not None and worst.reason in _REASONS_WHILE_SERVING else None
    return PodView(
        name=name,
        uid=text_at(pod, "metadata", "uid"),
        created=moment_at(pod, "metadata", "creationTimestamp") or "",
        placed=placed_at(pod),
        node=name_at(pod, "spec", "nodeName"),
        template_hash=name_at(pod, "metadata", "labels", "pod-template-hash"),
        image=image_of(pod, SERVER),
        is_terminating=at(pod, "metadata", "deletionTimestamp") is not None,
        has_ended=has_ended,
        has_started=any(has_started(status) for status in container_statuses(pod)),
        stage=reached,
        failure=worst if reached < Stage.SERVING else None,
        failure_while_serving=failure_while_serving if reached == Stage.SERVING else None,
        past_failure=past_failure(pod, name) if reached == Stage.SERVING else None,
        waits_for=_waits_for(pod, name, reached, now),
        is_fetching=reached == Stage.PLACED and at(container_status(pod, FETCH), "state", "running") is not None,
        fetch_ended=_fetch_ended(pod),
        fetched=_fetched(pod),
        index=index,
        is_newly_ready=is_newly_ready(pod, now),
    )


def placed_at(pod: Object) -> str:
    """When a pod got its node, as `moment_at` writes it; "" before that."""
    scheduled = condition(pod, "PodScheduled")
    return (moment_at(scheduled, "lastTransitionTime") or "") if scheduled.get("status") == "True" else ""


def _reached(pod: Object, index: PodIndex | None, served: str) -> Stage:
    if text_at(pod, "status", "phase") in {"Failed", "Succeeded"}:
        return Stage.CREATED
    if not text_at(pod, "spec", "nodeName") and condition(pod, "PodScheduled").get("status") != "True":
        return Stage.CREATED
    fetch = container_status(pod, FETCH)
    has_fetched = integer_at(fetch, "state", "terminated", "exitCode") == 0
    if not has_fetched and condition(pod, "Initialized").get("status") != "True":
        return Stage.PLACED
    if at(container_status(pod, SERVER), "state", "running") is None:
        return Stage.FETCHED
    is_ready = condition(pod, "Ready").get("status") == "True"
    has_loaded = is_ready if index is None or index.error is not None else _has_loaded(index, served)
    if not has_loaded:
        return Stage.FETCHED
    return Stage.SERVING if is_ready and text_at(pod, "status", "phase") == "Running" else Stage.LOADED


def _has_loaded(index: PodIndex, served: str) -> bool:
    return next(ready_versions(index.versions, served), None) is not None


def _failures(
    pod: Object, name: str, index: PodIndex | None, served: str, reached: Stage, now: str
) -> Iterator[Failure]:
    if text_at(pod, "status", "phase") in {"Failed", "Succeeded"}:
        yield ended_pod_failure(pod, name)
        return
    yield from scheduling_failures(pod, name)
    yield from node_failures(pod, name)
    yield from unhealthy_device_failures(pod, name)
    for status in container_statuses(pod):
        if failure := container_failure(Container(pod, name, status)):
            yield failure
    yield from index_failures(pod, name, index, served, reached, now)


VOLUMES_LIMIT_S = 3.0
"""Most pods have their network and their volumes by then, so earlier they are not reported as waiting for them."""


def _waits_for(pod: Object, name: str, reached: Stage, now: str) -> str:
    """What the pod waits for. One text per stage, because each new text is a write of the status."""
    on = f"pod {name} on node {name_at(pod, 'spec', 'nodeName')}"
    if reached == Stage.CREATED:
        return clean(f"pod {name} waits for a node")
    sandbox = condition(pod, "PodReadyToStartContainers")
    since = moment_at(sandbox, "lastTransitionTime") or ""
    is_late = since <= seconds_before(now, VOLUMES_LIMIT_S)
    if reached == Stage.PLACED and sandbox.get("status") == "False" and is_late:
        names = ", ".join(_mounts(pod))
        return clean(f"{on} waits for its network and its volumes" + (f", which need {names}" if names else ""))
    if reached == Stage.PLACED:
        return clean(f"{on} pulls its image and fetches the model")
    if reached == Stage.FETCHED:
        return clean(f"{on} starts the server and loads the model")
    return clean(f"{on} has loaded the model and is about to be ready")


def _mounts(pod: Object) -> Iterator[str]:
    """Objects that the pod mounts: a kubelet may wait for them, whether its events report it or not."""
    for volume in objects_at(pod, "spec", "volumes"):
        for kind, path in (
            ("Secret", ("secret", "secretName")),
            ("ConfigMap", ("configMap", "name")),
            ("PersistentVolumeClaim", ("persistentVolumeClaim", "claimName")),
        ):
            if (named := name_at(volume, *path)) and at(volume, path[0], "optional") is not True:
                yield f"{kind} {named}"


def _fetch_ended(pod: Object) -> str:
    ended = at(container_status(pod, FETCH), "state", "terminated")
    return (moment_at(ended, "finishedAt") or "") if integer_at(ended, "exitCode") == 0 else ""


def _fetched(pod: Object) -> tuple[FetchedModel, ...]:
    """The models that the fetch container reported at its end.

    The image is the user's choice, so the report is untrusted: malformed parts are ignored.
    """
    ended = at(container_status(pod, FETCH), "state", "terminated")
    if integer_at(ended, "exitCode") != 0:
        return ()
    report = json_object(text_at(ended, "message")) or {}
    return tuple(
        FetchedModel(
            name=name_at(model, "name"),
            digest=digest if DIGEST.fullmatch(digest := text_at(model, "digest")) else None,
            size_bytes=decimal(at(model, "size_bytes")),
            fetched_at=moment_at(model, "fetched_at"),
        )
        for model in objects_at(report, "models")
    )
