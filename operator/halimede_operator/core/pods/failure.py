"""The reasons why a pod does not serve, and the stages that a pod goes through."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum


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
    CLAIM_MISSING = "ClaimMissing"
    CLAIM_UNBOUND = "ClaimUnbound"
    VOLUME_MOUNT_FAILED = "VolumeMountFailed"
    DEVICE_PREPARATION_FAILED = "DevicePreparationFailed"
    SANDBOX_FAILED = "SandboxFailed"
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

    CREATED = 0
    PLACED = 1
    """It has a node."""
    FETCHED = 2
    """The fetch container has succeeded."""
    LOADED = 3
    """Its index has a version that is READY. If the index could not be read, its readiness is used instead."""
    SERVING = 4


def joined(text: str, more: str) -> str:
    """Two sentences as one text."""
    return f"{text}{' ' if text.endswith('.') else '; '}{more}" if more else text


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
    detail: str = ""
    """More words of the scheduler, for the one condition that is about it."""

    @property
    def text(self) -> str:
        """The message with the detail behind it."""
        return joined(self.message, self.detail)

    @property
    def order(self) -> tuple[int, str, str]:
        return _RANK[self.reason], self.container, self.message
