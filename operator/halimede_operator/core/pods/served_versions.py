"""Failures that a pod's repository index reports: versions that cannot be loaded, worker processes that died."""

from collections.abc import Iterator

from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import SERVER, container_status, memory_limit
from halimede_operator.core.reading import at, clean, condition, moment_at, root_cause, seconds_before
from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion

_UNLOADED = "unloaded"
"""The index's reason for a version that was unloaded on purpose."""


INDEX_LIMIT_S = 10.0
"""A pod is asked for its index when it becomes ready. Until its answer is here, the last one may be that of a server
that was still loading, or of a port that was not open yet."""


def is_newly_ready(pod: Object, now: str) -> bool:
    """Whether the pod is ready for less than INDEX_LIMIT_S, so that its last index may be older."""
    ready = condition(pod, "Ready")
    since = moment_at(ready, "lastTransitionTime") or ""
    return ready.get("status") == "True" and since > seconds_before(now, INDEX_LIMIT_S)


def index_failures(
    pod: Object, name: str, index: PodIndex | None, served: str, reached: Stage, now: str
) -> Iterator[Failure]:
    """Failures of versions, or of a ready pod that serves no version of the model. now: as `moment_at` writes it."""
    if index is None or index.error is not None or at(container_status(pod, SERVER), "state", "running") is None:
        return
    found = [
        Failure(reason, clean(f"pod {name}: {_version_text(entry)}: {text}"), stage, name, SERVER)
        for entry in sorted(index.versions, key=lambda v: (v.model, v.version))
        for reason, text, stage in _version_failures(pod, entry)
    ]
    yield from found
    is_ready = condition(pod, "Ready").get("status") == "True" and not is_newly_ready(pod, now)
    if not found and reached < Stage.LOADED and is_ready:
        text = f"it is ready, but no version of model {clean(served, 253)} is ready"
        yield Failure(Reason.MODEL_LOAD_FAILED, clean(f"pod {name}: {text}"), Stage.LOADED, name, SERVER)


def _version_text(entry: ServedVersion) -> str:
    version = f" version {clean(entry.version, 32)}" if entry.version else ""
    return f"model {clean(entry.model, 253)}{version}"


def _version_failures(pod: Object, entry: ServedVersion) -> Iterator[tuple[Reason, str, Stage]]:
    is_up = entry.state != "UNAVAILABLE"
    if entry.worker_failure:
        text = root_cause(entry.worker_failure)
        stage = Stage.SERVING if is_up else Stage.LOADED
        if entry.out_of_memory:
            limit = memory_limit(pod, SERVER)
            hint = f"; the limit is {limit}, raise spec.resources.limits.memory" if limit else ""
            yield Reason.OUT_OF_MEMORY, text + hint, stage
        else:
            yield Reason.WORKER_CRASHED, text, stage
    elif not is_up and entry.reason not in {"", _UNLOADED}:
        yield Reason.MODEL_LOAD_FAILED, root_cause(entry.reason), Stage.LOADED
