"""Reads the state of one container: which failure keeps it from being ready.

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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import FETCH, SERVER, container_statuses, image_of, memory_limit
from halimede_operator.core.pods.kubelet_events import PULL_REASONS, missing_object_reason
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    integer_at,
    last_error,
    moment_at,
    name_at,
    objects_at,
    root_cause,
    text_at,
)
from halimede_operator.core.snapshot import Object
from halimede_spec.fetch_exit import FetchExit

_NORMAL_WAITS = frozenset({"", "PodInitializing", "ContainerCreating", "CrashLoopBackOff", "RestartingAllContainers"})
_NEVER_STARTED = frozenset({"StartError", "ContainerCannotRun"})
_FETCH_EXITS: dict[int, tuple[Reason, str]] = {
    FetchExit.AUTH: (Reason.MODEL_FETCH_FAILED, "not allowed"),
    FetchExit.NOT_FOUND: (Reason.MODEL_FETCH_FAILED, "not found"),
    FetchExit.DIGEST: (Reason.MODEL_FETCH_FAILED, "digest mismatch"),
    FetchExit.NO_SPACE: (Reason.MODEL_FETCH_FAILED, "disk full"),
    FetchExit.NOT_A_MODEL: (Reason.INVALID_MODEL, "not a model"),
    FetchExit.UNREACHABLE: (Reason.MODEL_FETCH_FAILED, "unreachable"),
}
_TRIED_AGAIN = frozenset({FetchExit.AUTH, FetchExit.NOT_FOUND, FetchExit.UNREACHABLE})
"""The next run waits until the store has the model."""
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
_LOAD_FAILED_EXIT, _LOAD_FAILED_WORDS = 1, "failed to load"
"""The server's exit code if a model cannot be loaded at startup, and words of the cause. Shells and Python
end with the same code."""


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod."""

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

    def failure(self, reason: Reason, text: str, exit_code: int | None = None, time: str | None = None) -> Failure:
        image = image_of(self.pod, self.name) or name_at(self.status, "image")
        stage = Stage.FETCHED if self.is_init else Stage.LOADED
        message = clean(f"pod {self.pod_name}: container {self.name} (image {image}): {text}")
        return Failure(reason, message, stage, self.pod_name, self.name, exit_code, time)


def container_failure(container: Container) -> Failure | None:
    """Why the container is not ready; None if nothing is wrong with it."""
    waiting, failure = container.waits_for, container.failure
    text = at_rest(text_at(container.status, "state", "waiting", "message"))
    if waiting in PULL_REASONS:
        return failure(Reason.IMAGE_PULL_FAILED, text or waiting)
    if waiting == "CreateContainerConfigError":
        return failure(missing_object_reason(text, Reason.CONTAINER_CONFIG_ERROR), text or waiting)
    ended = container.last_end
    if waiting not in _NORMAL_WAITS and text_at(ended, "reason") not in _NEVER_STARTED:
        return failure(Reason.CONTAINER_START_FAILED, f"{clean(waiting, 63)}: {text}".removesuffix(": "))
    if container.name == FETCH and integer_at(ended, "exitCode") == FetchExit.RECOVERED:
        return None
    if ended is not None and not container.is_end_past:
        return _exit_failure(container, ended)
    if waiting == "CrashLoopBackOff":
        return failure(Reason.CRASH_LOOP, text or waiting)
    if _has_lost_readiness(container):
        time = moment_at(condition(container.pod, "ContainersReady"), "lastTransitionTime")
        return failure(Reason.PROBE_FAILED, "it runs, and its readiness probe fails", time=time)
    return None


def _exit_failure(container: Container, ended: Mapping[str, Any]) -> Failure:
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
        trying = ", trying again" if code in _TRIED_AGAIN else ""
        return failure(kind, what, f"{cause}{trying}")
    is_load_failure = code == _LOAD_FAILED_EXIT and _LOAD_FAILED_WORDS in cause
    if container.name == SERVER and is_load_failure and not container.was_ready_in(ended):
        return failure(Reason.MODEL_LOAD_FAILED, how, cause)
    shown = how if reason in {"", "Error", "Completed"} else f"{how}, {reason}"
    return failure(Reason.CRASH_LOOP, shown, cause)


def _lack_of_memory(container: Container) -> str:
    limit = memory_limit(container.pod, container.name)
    if not limit:
        return "out of memory; it has no memory limit of its own"
    ours = container.name in {FETCH, SERVER}
    field = "spec.resources.limits.memory" if ours else "its memory limit in spec.podTemplate"
    return f"out of memory; its limit is {limit}, raise {field}"


def _last_log_error(message: str) -> str:
    return f"the last error in its log is: {error}" if (error := last_error(message)) else ""


def past_failure(pod: Object, name: str) -> Failure | None:
    """The newest end of any container, for a pod that serves again."""
    containers = (Container(pod, name, status) for status in container_statuses(pod))
    ends = [_exit_failure(container, ended) for container in containers if (ended := container.last_end) is not None]
    return max(ends, key=lambda failure: (failure.time or "", failure.container), default=None)


def _has_lost_readiness(container: Container) -> bool:
    """Whether a running container was ready and no longer is.

    False between the end of the startup probe and the first readiness probe, when a container is not ready yet.
    """
    status, running = container.status, at(container.status, "state", "running")
    if running is None or at(status, "started") is not True or at(status, "ready") is True:
        return False
    return container.was_ready_in(running)
