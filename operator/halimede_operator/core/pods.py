"""Reads the state of one of our pods: which stage it has reached, and which failure keeps it from the next one.

A failure is reported for as long as its cause may exist. A container that failed, waits for its restart, and runs again
without being ready yet has the same failure with the same message all the time. Otherwise a crash loop would write a
new status at each of its steps. The last end of a container is the cause until the container is ready again:

    the container                           readiness was lost          its last end
    does not run                            (at any time)               is reported
    waits for the init containers           (at any time)               is past: they keep it from running
    runs, is ready                          (is not lost)               is past
    runs, is not ready                      after the run began         is past: its readiness probe fails
    runs, is not ready                      before the run began,       is reported: the run that ended was
                                            or never                    the last one that may have been ready

This table needs no clock. The transition time of `ContainersReady` is when readiness was lost, or when the pod was
created if it never was ready. The kubelet sets this time and those of runs, in whole seconds. It writes the condition
before it restarts a container, so a loss in the same second as the start belongs to the run before.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
    last_error,
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
    """Why a pod does not serve, worst first. Of several reasons the first one is reported."""

    INVALID_MODEL = "InvalidModel"
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    DEVICE_LOST = "DeviceLost"
    MODEL_LOAD_FAILED = "ModelLoadFailed"
    OUT_OF_MEMORY = "OutOfMemory"
    CRASH_LOOP = "CrashLoop"
    WORKER_CRASHED = "WorkerCrashed"
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


_AILMENTS = frozenset({Reason.DEVICE_UNHEALTHY, Reason.DEVICE_LOST, Reason.OUT_OF_MEMORY, Reason.WORKER_CRASHED})
"""Reasons that a pod may have while it serves."""


class NormalReason(StrEnum):
    """Why an object is not ready although nothing is wrong with it."""

    PENDING = "Pending"
    SCHEDULING = "Scheduling"
    FETCHING = "Fetching"
    LOADING = "Loading"
    PROGRESSING = "Progressing"
    """The last pods of the newest spec are starting, while others serve, of this spec or of the one before."""
    SUSPENDED = "Suspended"
    SCALED_TO_ZERO = "ScaledToZero"
    DELETING = "Deleting"


_RANK = {reason: rank for rank, reason in enumerate(Reason)}


class Stage(IntEnum):
    """The stage that a pod has reached."""

    MADE = 0
    PLACED = 1
    """It has a node."""
    FETCHED = 2
    """The fetch container has succeeded."""
    LOADED = 3
    """Its index has a version that is READY. If the index could not be read, its readiness is used instead."""
    SERVING = 4


@dataclass(frozen=True, slots=True)
class Failure:
    reason: Reason
    message: str
    stage: Stage
    """The stage that the pod cannot reach because of it."""
    pod: str = ""
    container: str = ""
    exit_code: int | None = None
    time: str | None = None
    """When it happened, as the cluster reports it; None if it does not."""

    @property
    def order(self) -> tuple[int, str, str]:
        return _RANK[self.reason], self.container, self.message


@dataclass(frozen=True, slots=True)
class FetchedModel:
    """One fetched model, as the fetch container reported it."""

    name: str
    digest: str | None
    size_bytes: int | None
    fetched_at: str | None


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod, as far as the status needs it."""

    name: str
    uid: str
    created: str
    node: str
    template_hash: str
    image: str
    """Of the server container, from the pod's spec."""
    is_leaving: bool
    """It is being deleted."""
    is_over: bool
    """Phase Failed or Succeeded: nothing runs in it any more, and its ReplicaSet creates another pod."""
    has_begun: bool
    """One of its containers has been started."""
    stage: Stage
    failure: Failure | None
    ailment: Failure | None
    """What is wrong with it although it serves. The server may not have noticed yet."""
    past: Failure | None
    """The last end of a container, if the pod has recovered from it."""
    waits_for: str
    """What the pod waits for, while nothing has failed. A text for people."""
    is_fetching: bool
    """The fetch container runs. It ends by itself if the store does not answer."""
    fetch_ended: str
    """When the model's files were complete, as the cluster reports it; "" before that."""
    fetched: tuple[FetchedModel, ...]
    index: PodIndex | None
    """None: the pod was not asked yet."""

    @property
    def is_live(self) -> bool:
        return not self.is_leaving and not self.is_over

    @property
    def is_unknown(self) -> bool:
        """Its index could not be read, so what it serves is not known."""
        return self.index is None or self.index.error is not None

    @property
    def age(self) -> tuple[str, str]:
        """Sorts the oldest first."""
        return self.created, self.name

    def versions(self, model: str) -> frozenset[int]:
        """The versions of the model that are READY in this pod."""
        return frozenset(ready_versions(self.index.versions if self.index else (), model))


def ready_versions(index: Sequence[ServedVersion], model: str) -> Iterator[int]:
    """The versions of a model that are READY in an index."""
    for entry in index:
        if entry.model == model and entry.state == "READY" and (number := decimal(entry.version)) is not None:
            yield number


def read_pod(
    pod: Object,
    index: PodIndex | None,
    served: str,
    now: str,
    events: Sequence[Object] = (),
    shortages: Sequence[Shortage] = (),
) -> PodView:
    """Read one pod; never raises, whatever the object contains.

    index: the pod's, None if it was not asked yet. served: the name under which the model or ensemble is served. now:
    UTC time as `moment_at` writes it. events: of its kubelet, about volumes and pull secrets. shortages: of its node.
    """
    name = name_at(pod, "metadata", "name")
    is_over = text_at(pod, "status", "phase") in {"Failed", "Succeeded"}
    reached = _reached(pod, index, served)
    found = [*_failures(pod, name, index, served, reached), *_of_mounts(pod, name, events)]
    found += [*_of_lost_devices(pod, name, shortages), *_of_scheduler(pod, name, now)]
    missing_secrets = _missing_pull_secrets(events, now)
    found = [_with_missing_secrets(failure, missing_secrets) for failure in found]
    worst = min(found, key=lambda failure: failure.order, default=None)
    ailment = worst if worst is not None and worst.reason in _AILMENTS else None
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
        failure=worst if reached < Stage.SERVING else None,
        ailment=ailment if reached == Stage.SERVING else None,
        past=_past_end(pod, name) if reached == Stage.SERVING else None,
        waits_for=_waits_for(pod, name, reached, now),
        is_fetching=reached == Stage.PLACED and at(_status_of(pod, FETCH), "state", "running") is not None,
        fetch_ended=_fetch_ended(pod),
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
        if failure := _of_container(_Container(pod, name, status)):
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


SCHEDULER_PATIENCE_S = 10.0
"""By then a running scheduler has set the pod's condition PodScheduled, if only to report that no node fits."""


def waits_for_scheduler(pod: Object) -> bool:
    """Whether no scheduler has looked at the pod yet."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and not text_at(pod, "spec", "nodeName")
        and at(pod, "metadata", "deletionTimestamp") is None
        and not condition(pod, "PodScheduled")
    )


def _of_scheduler(pod: Object, name: str, now: str) -> Iterator[Failure]:
    created = moment_at(pod, "metadata", "creationTimestamp")
    if not waits_for_scheduler(pod) or created is None or created > seconds_before(now, SCHEDULER_PATIENCE_S):
        return
    scheduler = name_at(pod, "spec", "schedulerName")
    said = f"no scheduler has looked at it: its schedulerName is '{scheduler}'; does that scheduler run?"
    yield Failure(Reason.UNSCHEDULABLE, clean(f"pod {name}: {said}"), Stage.PLACED, pod=name, time=created)


def _of_node(pod: Object, name: str) -> Iterator[Failure]:
    """The failure of a pod on a lost node.

    A lost node cannot report it. Controllers set its pods to not ready, while their containers still appear ready.
    """
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
    """Failures for devices that the node does not have any more: a kubelet reports them as healthy."""
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


def _missing_object_reason(said: str, otherwise: Reason) -> Reason:
    """The reason for a missing Secret or ConfigMap. Kubelets use the same words for variables and volumes."""
    return next((reason for pattern, reason in _MISSING if pattern.search(said)), otherwise)


def waits_for_volumes(pod: Object) -> bool:
    """Whether the pod has a node and no sandbox yet. The cause is not in its status: kubelets report it in events."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and at(pod, "metadata", "deletionTimestamp") is None
        and condition(pod, "PodScheduled").get("status") == "True"
        and condition(pod, "PodReadyToStartContainers").get("status") == "False"
    )


MOUNT_RETRIES_S = 150.0
"""A kubelet retries each volume after at most 2 min 2 s. A failure that it has not repeated by then is over."""
_OF_VOLUME = re.compile(r'\bfor volume "([^"]{1,253})"')


def _of_mounts(pod: Object, name: str, events: Sequence[Object]) -> Iterator[Failure]:
    """The kubelet's last failure for each volume that it still tries to mount."""
    if not waits_for_volumes(pod):
        return
    last: dict[str, tuple[str, str]] = {}
    for event in events:
        if event.get("reason") == NO_PULL_SECRET or not (said := at_rest(text_at(event, "message"))):
            continue
        volume = match[1] if (match := _OF_VOLUME.search(said)) else said
        last[volume] = max(last.get(volume, ("", "")), (moment_at(event, "lastTimestamp") or "", said))
    since = seconds_before(max((time for time, _ in last.values()), default=""), MOUNT_RETRIES_S)
    for said in sorted({said for time, said in last.values() if time >= since}):
        reason = _missing_object_reason(said, Reason.VOLUME_MOUNT_FAILED)
        yield Failure(reason, clean(f"pod {name}: {said}"), Stage.FETCHED, pod=name)


_PULL_REASONS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
})  # fmt: skip
NO_PULL_SECRET = "FailedToRetrieveImagePullSecret"  # noqa: S105 - a kubelet's reason
PULL_SECRET_RETRIES_S = 360.0
"""A kubelet repeats this event for as long as it is true, and the API server receives it at least every 5 minutes."""
_PULL_SECRETS = re.compile(r"image pull secrets \(([^)]{1,1000})\)")


def waits_for_pull_secrets(pod: Object) -> bool:
    """Whether an image cannot be pulled and the pod names pull secrets. Only events report whether these exist."""
    waiting = {text_at(status, "state", "waiting", "reason") for status in _all_statuses(pod)}
    return bool(waiting & _PULL_REASONS) and bool(objects_at(pod, "spec", "imagePullSecrets"))


def _missing_pull_secrets(events: Sequence[Object], now: str) -> str:
    """The pull secrets that a kubelet could not read, as it lists them; "" if it has not reported any lately."""
    since = seconds_before(now, PULL_SECRET_RETRIES_S)
    said = [
        (time, match[1])
        for event in events
        if event.get("reason") == NO_PULL_SECRET
        and (time := moment_at(event, "lastTimestamp") or "") >= since
        and (match := _PULL_SECRETS.search(text_at(event, "message")))
    ]
    return max(said, default=("", ""))[1]


def _with_missing_secrets(failure: Failure, secrets: str) -> Failure:
    if failure.reason != Reason.IMAGE_PULL_FAILED or not secrets:
        return failure
    hint = f"the node cannot read the pull secrets {secrets}: are they in the pod's namespace?"
    pull = clean(failure.message, _HINT_ROOM).removesuffix(".")
    return replace(failure, message=clean(f"{pull}; {hint}"))


_HINT_ROOM = 700
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
_UNREACHABLE_EXIT = 15
"""The store did not answer. The next run retries until it does."""
_RECOVERED_EXIT = 16
"""A store that an earlier run could not reach answers again. The next run continues: nothing is wrong."""
_SIGNALS = {
    128 + number: name
    for number, name in {
        1: "HUP", 2: "INT", 3: "QUIT", 4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", 9: "KILL", 11: "SEGV", 13: "PIPE",
        15: "TERM",
    }.items()
}  # fmt: skip
_KILLED = 137
_KILLED_TEXT = (
    "killed by SIGKILL (exit code 137): the kernel sends it for lack of memory, "
    "the kubelet after failed liveness probes, or a person"
)
_LOAD_FAILED_EXIT = 1
"""The server's exit code if a model cannot be loaded at startup."""


@dataclass(frozen=True, slots=True)
class _Container:
    """One container of a pod; makes its failures."""

    pod: Object
    pod_name: str
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        return name_at(self.status, "name")

    @property
    def is_init(self) -> bool:
        return any(text_at(c, "name") == self.name for c in objects_at(self.pod, "spec", "initContainers"))

    @property
    def last_end(self) -> Mapping[str, Any] | None:
        """Its newest end; None if it has not ended, or is an init container that succeeded."""
        ended = at(self.status, "state", "terminated") or at(self.status, "lastState", "terminated")
        if not isinstance(ended, Mapping) or (self.is_init and integer_at(ended, "exitCode") == 0):
            return None
        return ended

    @property
    def waits_for(self) -> str:
        return text_at(self.status, "state", "waiting", "reason")

    def was_ready_in(self, run: object) -> bool:
        """Whether readiness was lost after this run began."""
        lost = moment_at(condition(self.pod, "ContainersReady"), "lastTransitionTime")
        started = moment_at(run, "startedAt")
        return lost is not None and started is not None and lost > started

    @property
    def is_end_past(self) -> bool:
        """Whether the last end is past, that is, not why the container is not ready now. See the module's table."""
        if (run := at(self.status, "state", "running")) is not None:
            return at(self.status, "ready") is True or self.was_ready_in(run)
        return self.waits_for == "PodInitializing"

    def failure(self, reason: Reason, said: str, exit_code: int | None = None, time: str | None = None) -> Failure:
        image = _image_of(self.pod, self.name) or name_at(self.status, "image")
        stage = Stage.FETCHED if self.is_init else Stage.LOADED
        message = clean(f"pod {self.pod_name}: container {self.name} (image {image}): {said}")
        return Failure(reason, message, stage, self.pod_name, self.name, exit_code, time)


def _of_container(container: _Container) -> Failure | None:
    waiting, failure = container.waits_for, container.failure
    said = at_rest(text_at(container.status, "state", "waiting", "message"))
    if waiting in _PULL_REASONS:
        return failure(Reason.IMAGE_PULL_FAILED, said or waiting)
    if waiting == "CreateContainerConfigError":
        return failure(_missing_object_reason(said, Reason.CONTAINER_CONFIG_ERROR), said or waiting)
    ended = container.last_end
    if waiting not in _STILL_COMING and text_at(ended, "reason") not in _NEVER_STARTED:
        return failure(Reason.CONTAINER_START_FAILED, f"{clean(waiting, 63)}: {said}".removesuffix(": "))
    if container.name == FETCH and integer_at(ended, "exitCode") == _RECOVERED_EXIT:
        return None
    if ended is not None and not container.is_end_past:
        return _of_exit(container, ended)
    if waiting == "CrashLoopBackOff":
        return failure(Reason.CRASH_LOOP, said or waiting)
    if _has_lost_readiness(container):
        time = moment_at(condition(container.pod, "ContainersReady"), "lastTransitionTime")
        return failure(Reason.PROBE_FAILED, "it runs, and its readiness probe fails", time=time)
    return None


def _of_exit(container: _Container, ended: Mapping[str, Any]) -> Failure:
    code = integer_at(ended, "exitCode")
    reason, time = name_at(ended, "reason"), moment_at(ended, "finishedAt")
    message = text_at(ended, "message")

    def failure(kind: Reason, what: str, cause: str) -> Failure:
        return container.failure(kind, f"{what}: {cause}".removesuffix(": "), code, time)

    if reason == "OOMKilled" and code == _KILLED:
        return failure(
            Reason.OUT_OF_MEMORY, f"killed by the kernel: {_lack_of_memory(container)}", _last_log_error(message)
        )
    if reason == "OOMKilled":
        # Runtimes report OOMKilled whenever the kernel has killed any process of the container, however the main one
        # ended.
        what = f"exited with code {code} after the kernel killed a process in it: {_lack_of_memory(container)}"
        return failure(Reason.OUT_OF_MEMORY, what, root_cause(message))
    if code == _KILLED:
        # A killed process cannot write a message, so the message is the end of the log.
        kind = Reason.MODEL_FETCH_FAILED if container.name == FETCH else Reason.CRASH_LOOP
        return failure(kind, _KILLED_TEXT, _last_log_error(message))
    how = f"exited with code {code}"
    if code in _SIGNALS:
        how += f" (SIG{_SIGNALS[code]})"
    cause = root_cause(message)
    if reason in _NEVER_STARTED:
        return failure(Reason.CONTAINER_START_FAILED, reason, cause)
    if container.name == FETCH:
        kind, what = _FETCH_EXITS.get(code or 0, (Reason.MODEL_FETCH_FAILED, how))
        trying = ", trying again" if code == _UNREACHABLE_EXIT else ""
        return failure(kind, what, f"{cause}{trying}")
    if container.name == SERVER and code == _LOAD_FAILED_EXIT and not container.was_ready_in(ended):
        return failure(Reason.MODEL_LOAD_FAILED, how, cause)
    shown = how if reason in {"", "Error", "Completed"} else f"{how}, {reason}"
    return failure(Reason.CRASH_LOOP, shown, cause)


def _lack_of_memory(container: _Container) -> str:
    limit = memory_limit(container.pod, container.name)
    if not limit:
        return "out of memory; it has no memory limit of its own"
    ours = container.name in {FETCH, SERVER}
    field = "spec.resources.limits.memory" if ours else "its memory limit in spec.podTemplate"
    return f"out of memory; its limit is {limit}, raise {field}"


def memory_limit(pod: Object, container: str) -> str:
    """A container's memory limit as the pod has it, `512Mi`; "" if there is none."""
    both = objects_at(pod, "spec", "initContainers") + objects_at(pod, "spec", "containers")
    limits = (at(each, "resources", "limits", "memory") for each in both if text_at(each, "name") == container)
    return clean(str(next((limit for limit in limits if isinstance(limit, str | int)), "")), 64)


def _last_log_error(message: str) -> str:
    return f"the last error in its log is: {error}" if (error := last_error(message)) else ""


def _past_end(pod: Object, name: str) -> Failure | None:
    """The newest end of any container, for a pod that serves again."""
    containers = (_Container(pod, name, status) for status in _all_statuses(pod))
    ends = [_of_exit(container, ended) for container in containers if (ended := container.last_end) is not None]
    return max(ends, key=lambda failure: (failure.time or "", failure.container), default=None)


def _has_lost_readiness(container: _Container) -> bool:
    """Whether a running container was ready and is not any more.

    False between the end of the startup probe and the first readiness probe, when a container is not ready yet.
    """
    status, running = container.status, at(container.status, "state", "running")
    if running is None or at(status, "started") is not True or at(status, "ready") is True:
        return False
    return container.was_ready_in(running)


_UNLOADED = "unloaded"
"""The index's reason for a version that was unloaded on purpose."""


def _of_index(pod: Object, name: str, index: PodIndex | None, served: str, reached: Stage) -> Iterator[Failure]:
    if index is None or index.error is not None or at(_status_of(pod, SERVER), "state", "running") is None:
        return
    found = [
        Failure(reason, clean(f"pod {name}: {_version_of(entry)}: {said}"), stage, name, SERVER)
        for entry in sorted(index.versions, key=lambda v: (v.model, v.version))
        for reason, said, stage in _of_version(pod, entry)
    ]
    yield from found
    if not found and reached < Stage.LOADED and condition(pod, "Ready").get("status") == "True":
        said = f"it is ready, and has no version of model {clean(served, 253)} that is"
        yield Failure(Reason.MODEL_LOAD_FAILED, clean(f"pod {name}: {said}"), Stage.LOADED, name, SERVER)


def _version_of(entry: ServedVersion) -> str:
    version = f" version {clean(entry.version, 32)}" if entry.version else ""
    return f"model {clean(entry.model, 253)}{version}"


def _of_version(pod: Object, entry: ServedVersion) -> Iterator[tuple[Reason, str, Stage]]:
    is_up = entry.state != "UNAVAILABLE"
    if entry.worker_failure:
        said = root_cause(entry.worker_failure)
        stage = Stage.SERVING if is_up else Stage.LOADED
        if entry.out_of_memory:
            limit = memory_limit(pod, SERVER)
            hint = f"; the limit is {limit}, raise spec.resources.limits.memory" if limit else ""
            yield Reason.OUT_OF_MEMORY, said + hint, stage
        else:
            yield Reason.WORKER_CRASHED, said, stage
    elif not is_up and entry.reason not in {"", _UNLOADED}:
        yield Reason.MODEL_LOAD_FAILED, root_cause(entry.reason), Stage.LOADED


VOLUMES_PATIENCE_S = 3.0
"""Most pods have their network and their volumes by then, so earlier they are not reported as waiting for them."""


def _waits_for(pod: Object, name: str, reached: Stage, now: str) -> str:
    """What the pod waits for. One text per stage, because each new text is a write of the status."""
    on = f"pod {name} on node {name_at(pod, 'spec', 'nodeName')}"
    if reached == Stage.MADE:
        return clean(f"pod {name} waits for a node")
    sandbox = condition(pod, "PodReadyToStartContainers")
    since = moment_at(sandbox, "lastTransitionTime") or ""
    is_late = since <= seconds_before(now, VOLUMES_PATIENCE_S)
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


DIGEST = re.compile(r"[a-z0-9]{1,16}:[0-9a-f]{32,128}")


def _fetch_ended(pod: Object) -> str:
    ended = at(_status_of(pod, FETCH), "state", "terminated")
    return (moment_at(ended, "finishedAt") or "") if integer_at(ended, "exitCode") == 0 else ""


def _fetched(pod: Object) -> tuple[FetchedModel, ...]:
    """The models that the fetch container reported at its end.

    The image is the user's choice, so the report is untrusted: malformed parts are ignored.
    """
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


def _image_of(pod: Object, container: str) -> str:
    both = objects_at(pod, "spec", "initContainers") + objects_at(pod, "spec", "containers")
    return next((clean(text_at(c, "image"), 512) for c in both if text_at(c, "name") == container), "")
