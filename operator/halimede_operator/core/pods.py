"""What a pod of ours says about itself: how far it has come, and why it does not get further.

A failure is told for as long as its cause may still be there. A container that failed, waits to be tried again, and
runs again without being ready yet, tells the same failure with the same words all the way: else a crash loop would be a
new status at each of its turns. None of this looks at a clock: whether a container was ready before it stopped being so
is told by the pod's own times.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from halimede_operator.core.devices import held_devices
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    decimal,
    integer_at,
    json_object,
    moment_at,
    name_at,
    objects_at,
    root_cause,
    seconds_before,
    text_at,
)
from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion, Shortage

FETCH, SERVER = "fetch", "server"
"""Names of the containers."""


class Reason(StrEnum):
    """Why a pod does not serve, worst first: of several pods' reasons the first one is told."""

    INVALID_MODEL = "InvalidModel"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    DEVICE_LOST = "DeviceLost"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    CRASH_LOOP = "CrashLoop"
    MODEL_FETCH_FAILED = "ModelFetchFailed"
    SECRET_MISSING = "SecretMissing"  # noqa: S105 - a reason
    CONFIG_MAP_MISSING = "ConfigMapMissing"
    VOLUME_MOUNT_FAILED = "VolumeMountFailed"
    CONTAINER_CONFIG_ERROR = "ContainerConfigError"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_START_FAILED = "ContainerStartFailed"
    PROBE_FAILED = "ProbeFailed"
    NODE_LOST = "NodeLost"
    INSUFFICIENT_DEVICES = "InsufficientDevices"
    UNSCHEDULABLE = "Unschedulable"
    EVICTED = "Evicted"
    POD_FAILED = "PodFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    PODS_REFUSED = "PodsRefused"


class Calm(StrEnum):
    """Why an object is not ready though nothing is wrong with it."""

    PENDING = "Pending"
    SCHEDULING = "Scheduling"
    FETCHING = "Fetching"
    LOADING = "Loading"
    PROGRESSING = "Progressing"
    """Pods of the spec before serve, or enough others do, while the last ones come."""
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    DELETING = "Deleting"


_OF_DEVICES = frozenset({Reason.DEVICE_UNHEALTHY, Reason.DEVICE_LOST})
_RANK = {reason: rank for rank, reason in enumerate(Reason)}


class Stage(IntEnum):
    """How far a pod has come."""

    MADE = 0
    PLACED = 1
    """It has a node."""
    FETCHED = 2
    """The fetch container has ended well."""
    LOADED = 3
    """Its index says so, or only its readiness where the index could not be asked."""
    SERVING = 4


@dataclass(frozen=True, slots=True)
class Failure:
    reason: Reason
    message: str
    stage: Stage
    """What was not reached because of it."""
    pod: str = ""
    container: str = ""
    exit_code: int | None = None
    time: str | None = None
    """When it happened, as the cluster says; None where it does not."""

    @property
    def order(self) -> tuple[int, str, str]:
        return _RANK[self.reason], self.container, self.message


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """One model as the fetch container said that it got it."""

    name: str
    digest: str | None
    size_bytes: int | None
    fetched_at: str | None


@dataclass(frozen=True, slots=True)
class PodView:
    name: str
    uid: str
    created: str
    node: str
    template_hash: str
    image: str
    """Of the server container, as the pod asks for it."""
    is_leaving: bool
    """It is being deleted."""
    is_over: bool
    """Phase Failed or Succeeded: nothing runs in it any more, and its ReplicaSet makes another one."""
    has_begun: bool
    """One of its containers has been started."""
    stage: Stage
    failure: Failure | None
    past: Failure | None
    """What it recovered from, or serves in spite of."""
    waits_for: str
    """What comes next, while nothing has failed."""
    fetched: tuple[FetchedModel, ...]
    index: PodIndex | None
    """None: not asked yet."""

    @property
    def is_live(self) -> bool:
        return not self.is_leaving and not self.is_over

    @property
    def is_unknown(self) -> bool:
        """Nobody knows what it serves, since its index was not had."""
        return self.index is None or self.index.error is not None

    @property
    def ailment(self) -> Failure | None:
        """What is wrong with it though it serves: the node says so, and the server may not have noticed yet."""
        return self.past if self.past is not None and self.past.reason in _OF_DEVICES else None

    @property
    def age(self) -> tuple[str, str]:
        """Sorts the oldest first."""
        return self.created, self.name

    def versions(self, model: str) -> frozenset[int]:
        """The versions of the model that are ready in it."""
        return frozenset(ready_versions(self.index.versions if self.index else (), model))


def ready_versions(index: Sequence[ServedVersion], model: str) -> Iterator[int]:
    for entry in index:
        if entry.model == model and entry.state == "READY" and (number := decimal(entry.version)) is not None:
            yield number


def read_pod(
    pod: Object,
    index: PodIndex | None,
    served: str,
    mount_events: Sequence[Object] = (),
    shortages: Sequence[Shortage] = (),
) -> PodView:
    """`served` is the name of the model, or the ensemble, that clients ask for. `mount_events`: what its kubelet said
    of volumes that it could not mount. `shortages`: of its node."""
    name = name_at(pod, "metadata", "name")
    is_over = text_at(pod, "status", "phase") in {"Failed", "Succeeded"}
    reached = _reached(pod, index, served)
    found = [*_failures(pod, name, index, served, reached), *_of_mounts(pod, name, mount_events)]
    found += _of_lost_devices(pod, name, shortages)
    failures = sorted(found, key=lambda failure: failure.order)
    return PodView(
        name=name,
        uid=text_at(pod, "metadata", "uid"),
        created=moment_at(pod, "metadata", "creationTimestamp") or "",
        node=name_at(pod, "spec", "nodeName"),
        template_hash=name_at(pod, "metadata", "labels", "pod-template-hash"),
        image=_image_of(pod, SERVER),
        is_leaving=at(pod, "metadata", "deletionTimestamp") is not None,
        is_over=is_over,
        has_begun=any(_has_begun(status) for status in _all_statuses(pod)),
        stage=reached,
        failure=failures[0] if failures and reached < Stage.SERVING else None,
        past=failures[0] if failures and reached == Stage.SERVING else None,
        waits_for=_waits_for(pod, name, reached),
        fetched=_fetched(pod),
        index=index,
    )


def _reached(pod: Object, index: PodIndex | None, served: str) -> Stage:
    if text_at(pod, "status", "phase") in {"Failed", "Succeeded"}:
        return Stage.MADE
    if not text_at(pod, "spec", "nodeName") and condition(pod, "PodScheduled").get("status") != "True":
        return Stage.MADE
    fetch = _status_of(pod, FETCH)
    has_fetched = integer_at(fetch, "state", "terminated", "exitCode") == 0
    if not has_fetched and condition(pod, "Initialized").get("status") != "True":
        return Stage.PLACED
    if at(_status_of(pod, SERVER), "state", "running") is None:
        return Stage.FETCHED
    is_ready = condition(pod, "Ready").get("status") == "True"
    has_loaded = is_ready if index is None or index.error is not None else _has_loaded(index, served)
    if not has_loaded:
        return Stage.FETCHED
    return Stage.SERVING if is_ready and text_at(pod, "status", "phase") == "Running" else Stage.LOADED


def _has_loaded(index: PodIndex, served: str) -> bool:
    return next(ready_versions(index.versions, served), None) is not None


def _failures(pod: Object, name: str, index: PodIndex | None, served: str, reached: Stage) -> Iterator[Failure]:
    if text_at(pod, "status", "phase") in {"Failed", "Succeeded"}:
        yield _of_pod_that_is_over(pod, name)
        return
    yield from _of_scheduling(pod, name)
    yield from _of_node(pod, name)
    yield from _of_devices(pod, name)
    for status in _all_statuses(pod):
        if failure := _of_container(pod, name, status):
            yield failure
    yield from _of_index(pod, name, index, served, reached)


def _of_pod_that_is_over(pod: Object, name: str) -> Failure:
    reason = name_at(pod, "status", "reason") or name_at(pod, "status", "phase")
    said = at_rest(text_at(pod, "status", "message"))
    if reason == "UnexpectedAdmissionError" and "devices unavailable" in said:
        kind = Reason.INSUFFICIENT_DEVICES
    elif reason == "NodeLost":
        kind = Reason.NODE_LOST
    else:
        kind = Reason.EVICTED if reason == "Evicted" else Reason.POD_FAILED
    on = f" on node {node}" if (node := name_at(pod, "spec", "nodeName")) else ""
    times = (moment_at(status, "state", "terminated", "finishedAt") for status in _all_statuses(pod))
    time = max((t for t in times if t), default=moment_at(pod, "status", "startTime"))
    return Failure(kind, clean(f"pod {name}{on}: {reason}: {said}"), Stage.PLACED, pod=name, time=time)


_LACKS_DEVICE = re.compile(r"Insufficient nvidia\.com/")


def _of_scheduling(pod: Object, name: str) -> Iterator[Failure]:
    scheduled = condition(pod, "PodScheduled")
    if scheduled.get("status") != "False":
        return
    said = at_rest(text_at(scheduled, "message"))
    reason = Reason.INSUFFICIENT_DEVICES if _LACKS_DEVICE.search(said) else Reason.UNSCHEDULABLE
    why = "" if text_at(scheduled, "reason") == "Unschedulable" else f"{name_at(scheduled, 'reason')}: "
    time = moment_at(scheduled, "lastTransitionTime")
    yield Failure(reason, clean(f"pod {name}: {why}{said}"), Stage.PLACED, pod=name, time=time)


def _of_node(pod: Object, name: str) -> Iterator[Failure]:
    """A node that is gone cannot say so: the controllers make its pods not ready, whose containers still seem to be."""
    ready = condition(pod, "Ready")
    by_controller = (
        text_at(ready, "status") in {"False", "Unknown"}
        and condition(pod, "ContainersReady").get("status") == "True"
        and not objects_at(pod, "spec", "readinessGates")
    )
    said_so = "NodeLost" in {text_at(pod, "status", "reason"), text_at(ready, "reason")}
    if not (by_controller or said_so or text_at(pod, "status", "phase") == "Unknown"):
        return
    node = name_at(pod, "spec", "nodeName") or "unknown"
    message = clean(f"pod {name}: its node {node} does not answer. {at_rest(text_at(pod, 'status', 'message'))}")
    yield Failure(Reason.NODE_LOST, message, Stage.SERVING, pod=name, time=moment_at(ready, "lastTransitionTime"))


def _of_devices(pod: Object, name: str) -> Iterator[Failure]:
    for status in _all_statuses(pod):
        for resource in objects_at(status, "allocatedResourcesStatus"):
            for device in objects_at(resource, "resources"):
                if text_at(device, "health") != "Unhealthy":
                    continue
                which = f"device {name_at(device, 'resourceID')} ({name_at(resource, 'name')})"
                said = f"{which} is unhealthy: {at_rest(text_at(device, 'message'))}".removesuffix(": ")
                container = name_at(status, "name")
                message = clean(f"pod {name}: container {container}: {said}")
                yield Failure(Reason.DEVICE_UNHEALTHY, message, Stage.SERVING, pod=name, container=container)


def _of_lost_devices(pod: Object, name: str, shortages: Sequence[Shortage]) -> Iterator[Failure]:
    """A kubelet says of a device that is gone that it is well, and lets the pod run."""
    for node, held in held_devices([pod]).items():
        for short in shortages:
            if short.resource in held:
                whose = "one that a pod of ours has is gone" if short.has else "the pod's is gone"
                said = f"node {node} has {short.has} {short.resource}, and pods hold {short.held}: {whose}"
                yield Failure(Reason.DEVICE_LOST, clean(f"pod {name}: {said}"), Stage.SERVING, pod=name)


_MISSING = (
    (re.compile(r'\bsecret "[^"]{1,253}" not found'), Reason.SECRET_MISSING),
    (re.compile(r'\bconfigmap "[^"]{1,253}" not found'), Reason.CONFIG_MAP_MISSING),
)


def _reason_of_lack(said: str, otherwise: Reason) -> Reason:
    """Which kind of object is not there, by the words of the kubelet, the same for variables and volumes."""
    return next((reason for pattern, reason in _MISSING if pattern.search(said)), otherwise)


def waits_for_volumes(pod: Object) -> bool:
    """It has a node and no sandbox yet. Why is not in its status: kubelets say it in events."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and at(pod, "metadata", "deletionTimestamp") is None
        and condition(pod, "PodScheduled").get("status") == "True"
        and condition(pod, "PodReadyToStartContainers").get("status") == "False"
    )


MOUNT_RETRIES_S = 150.0
"""A kubelet tries each volume again after 2 min 2 s at most: what it has not said again by then is over."""
_OF_VOLUME = re.compile(r'\bfor volume "([^"]{1,253})"')


def _of_mounts(pod: Object, name: str, events: Sequence[Object]) -> Iterator[Failure]:
    """What the kubelet said last of each volume that it still tries to mount."""
    if not waits_for_volumes(pod):
        return
    last: dict[str, tuple[str, str]] = {}
    for event in events:
        if not (said := at_rest(text_at(event, "message"))):
            continue
        volume = match[1] if (match := _OF_VOLUME.search(said)) else said
        last[volume] = max(last.get(volume, ("", "")), (moment_at(event, "lastTimestamp") or "", said))
    since = seconds_before(max((time for time, _ in last.values()), default=""), MOUNT_RETRIES_S)
    for said in sorted({said for time, said in last.values() if time >= since}):
        reason = _reason_of_lack(said, Reason.VOLUME_MOUNT_FAILED)
        yield Failure(reason, clean(f"pod {name}: {said}"), Stage.FETCHED, pod=name)


_PULL_REASONS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
})  # fmt: skip
_STILL_COMING = frozenset({"", "PodInitializing", "ContainerCreating", "CrashLoopBackOff", "RestartingAllContainers"})
_NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})
_FETCH_EXITS = {
    10: (Reason.MODEL_FETCH_FAILED, "not allowed"),
    11: (Reason.MODEL_FETCH_FAILED, "not found"),
    12: (Reason.MODEL_FETCH_FAILED, "digest mismatch"),
    13: (Reason.MODEL_FETCH_FAILED, "disk full"),
    14: (Reason.INVALID_MODEL, "not a model"),
    15: (Reason.MODEL_FETCH_FAILED, "unreachable"),
}
_SIGNALS = {
    128 + number: name
    for number, name in {
        1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 11: "SEGV", 13: "PIPE",
        15: "TERM",
    }.items()
}  # fmt: skip
_LOAD_FAILED_EXIT = 1
"""The server's exit code when a model does not load at its start."""


def _of_container(pod: Object, name: str, status: Mapping[str, Any]) -> Failure | None:
    container = name_at(status, "name")
    stage = Stage.FETCHED if _is_init(pod, container) else Stage.LOADED
    image = _image_of(pod, container) or name_at(status, "image")

    def failure(reason: Reason, said: str, exit_code: int | None = None, time: str | None = None) -> Failure:
        message = clean(f"pod {name}: container {container} (image {image}): {said}")
        return Failure(reason, message, stage, name, container, exit_code, time)

    waiting = text_at(status, "state", "waiting", "reason")
    said = at_rest(text_at(status, "state", "waiting", "message"))
    if waiting in _PULL_REASONS:
        return failure(Reason.IMAGE_PULL_FAILED, said or waiting)
    if waiting == "CreateContainerConfigError":
        return failure(_reason_of_lack(said, Reason.CONTAINER_CONFIG_ERROR), said or waiting)
    ended = at(status, "state", "terminated") or at(status, "lastState", "terminated")
    if waiting not in _STILL_COMING and text_at(ended, "reason") not in _NEVER_STARTED:
        return failure(Reason.CONTAINER_START_FAILED, f"{clean(waiting, 63)}: {said}".removesuffix(": "))
    if isinstance(ended, Mapping) and not (_is_init(pod, container) and integer_at(ended, "exitCode") == 0):
        return _of_exit(pod, container, ended, failure)
    if waiting == "CrashLoopBackOff":
        return failure(Reason.CRASH_LOOP, said or waiting)
    if container == SERVER and _has_lost_readiness(pod, status):
        said = "it runs, and its readiness probe fails"
        return failure(Reason.PROBE_FAILED, said, time=moment_at(condition(pod, "Ready"), "lastTransitionTime"))
    return None


def _of_exit(pod: Object, container: str, ended: Mapping[str, Any], failure: Callable[..., Failure]) -> Failure:
    code = integer_at(ended, "exitCode")
    reason, cause = name_at(ended, "reason"), root_cause(text_at(ended, "message"))
    time = moment_at(ended, "finishedAt")
    how = f"exited with code {code}"
    if code in _SIGNALS:
        how += f" (SIG{_SIGNALS[code]})"
    if reason == "OOMKilled":
        said = f"{how}: out of memory, it needs a higher limit in spec.resources"
        return failure(Reason.OUT_OF_MEMORY, f"{said}: {cause}".removesuffix(": "), code, time)
    if reason in _NEVER_STARTED:
        return failure(Reason.CONTAINER_START_FAILED, f"{reason}: {cause}".removesuffix(": "), code, time)
    if container == FETCH:
        kind, what = _FETCH_EXITS.get(code or 0, (Reason.MODEL_FETCH_FAILED, how))
        return failure(kind, f"{what}: {cause}".removesuffix(": "), code, time)
    if container == SERVER and code == _LOAD_FAILED_EXIT and not _was_ready(pod, ended):
        return failure(Reason.MODEL_LOAD_FAILED, f"{how}: {cause}".removesuffix(": "), code, time)
    shown = how if reason in {"", "Error", "Completed"} else f"{how}, {reason}"
    return failure(Reason.CRASH_LOOP, f"{shown}: {cause}".removesuffix(": "), code, time)


def _was_ready(pod: Object, ended: Mapping[str, Any]) -> bool:
    """A pod that was never ready became so at its creation; one that was became it after the container's start."""
    lost = moment_at(condition(pod, "ContainersReady"), "lastTransitionTime")
    started = moment_at(ended, "startedAt")
    return lost is not None and started is not None and lost > started


def _has_lost_readiness(pod: Object, status: Mapping[str, Any]) -> bool:
    """Not between the startup probe's end and the first readiness probe: a container is not ready then either."""
    running = at(status, "state", "running")
    if running is None or at(status, "started") is not True or at(status, "ready") is True:
        return False
    return _was_ready(pod, running)


_UNLOADED = "unloaded"
"""What the index says of a version that is gone because it should be."""


def _of_index(pod: Object, name: str, index: PodIndex | None, served: str, reached: Stage) -> Iterator[Failure]:
    if index is None or index.error is not None or at(_status_of(pod, SERVER), "state", "running") is None:
        return
    for entry in sorted(index.versions, key=lambda v: (v.model, v.version)):
        if entry.state == "UNAVAILABLE" and entry.reason not in {"", _UNLOADED}:
            version = f" version {clean(entry.version, 32)}" if entry.version else ""
            said = f"model {clean(entry.model, 253)}{version}: {root_cause(entry.reason)}"
            yield Failure(Reason.MODEL_LOAD_FAILED, clean(f"pod {name}: {said}"), Stage.LOADED, name, SERVER)
    if reached < Stage.LOADED and condition(pod, "Ready").get("status") == "True":
        said = f"it is ready, and has no version of model {clean(served, 253)} that is"
        yield Failure(Reason.MODEL_LOAD_FAILED, clean(f"pod {name}: {said}"), Stage.LOADED, name, SERVER)


def _waits_for(pod: Object, name: str, reached: Stage) -> str:
    on = f"pod {name} on node {name_at(pod, 'spec', 'nodeName')}"
    if reached == Stage.MADE:
        return clean(f"pod {name} waits for a node")
    if reached == Stage.PLACED and condition(pod, "PodReadyToStartContainers").get("status") == "False":
        names = ", ".join(_mounts(pod))
        return clean(f"{on} waits for its network and its volumes" + (f", which need {names}" if names else ""))
    if reached == Stage.PLACED:
        is_running = at(_status_of(pod, FETCH), "state", "running") is not None
        return clean(f"{on} fetches the model" if is_running else f"{on} starts to fetch the model")
    if reached == Stage.FETCHED:
        is_running = at(_status_of(pod, SERVER), "state", "running") is not None
        return clean(f"{on} loads the model" if is_running else f"{on} starts the server")
    return clean(f"{on} has loaded the model and is about to be ready")


def _mounts(pod: Object) -> Iterator[str]:
    """What a kubelet may wait for, where its events do not say it or may not be read."""
    for volume in objects_at(pod, "spec", "volumes"):
        for kind, path in (
            ("Secret", ("secret", "secretName")),
            ("ConfigMap", ("configMap", "name")),
            ("PersistentVolumeClaim", ("persistentVolumeClaim", "claimName")),
        ):
            if (named := name_at(volume, *path)) and at(volume, path[0], "optional") is not True:
                yield f"{kind} {named}"


DIGEST = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{32,128}")


def _fetched(pod: Object) -> tuple[FetchedModel, ...]:
    """What the fetch container said at its end. Whoever wrote the image wrote this: only what is well-formed counts."""
    ended = at(_status_of(pod, FETCH), "state", "terminated")
    if integer_at(ended, "exitCode") != 0:
        return ()
    said = json_object(text_at(ended, "message")) or {}
    return tuple(
        FetchedModel(
            name=name_at(model, "name"),
            digest=digest if DIGEST.fullmatch(digest := text_at(model, "digest")) else None,
            size_bytes=decimal(at(model, "size_bytes")),
            fetched_at=moment_at(model, "fetched_at"),
        )
        for model in objects_at(said, "models")
    )


def _all_statuses(pod: Object) -> list[Mapping[str, Any]]:
    return objects_at(pod, "status", "initContainerStatuses") + objects_at(pod, "status", "containerStatuses")


def _status_of(pod: Object, container: str) -> Mapping[str, Any]:
    return next((status for status in _all_statuses(pod) if status.get("name") == container), {})


def _has_begun(status: Mapping[str, Any]) -> bool:
    return any(
        at(status, *path) is not None
        for path in (("state", "running"), ("state", "terminated"), ("lastState", "terminated"))
    )


def _is_init(pod: Object, container: str) -> bool:
    return any(text_at(c, "name") == container for c in objects_at(pod, "spec", "initContainers"))


def _image_of(pod: Object, container: str) -> str:
    both = objects_at(pod, "spec", "initContainers") + objects_at(pod, "spec", "containers")
    return next((clean(text_at(c, "image"), 512) for c in both if text_at(c, "name") == container), "")
