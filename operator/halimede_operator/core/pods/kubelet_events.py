"""Failures that are reported only in events: of volumes, devices and sandboxes, and missing pull secrets."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import container_statuses
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    moment_at,
    objects_at,
    seconds_before,
    seconds_between,
    text_at,
)
from halimede_operator.core.snapshot import Object

_MISSING = (
    (re.compile(r'\bsecret "[^"]{1,253}" not found'), Reason.SECRET_MISSING),
    (re.compile(r'\bconfigmap "[^"]{1,253}" not found'), Reason.CONFIG_MAP_MISSING),
)


def missing_object_reason(message: str, otherwise: Reason) -> Reason:
    """The reason for a missing Secret or ConfigMap. Kubelets use the same words for variables and volumes."""
    return next((reason for pattern, reason in _MISSING if pattern.search(message)), otherwise)


def waits_for_volumes(pod: Object) -> bool:
    """Whether the pod has a node and no sandbox yet. The cause is not in its status: kubelets report it in events."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and at(pod, "metadata", "deletionTimestamp") is None
        and condition(pod, "PodScheduled").get("status") == "True"
        and condition(pod, "PodReadyToStartContainers").get("status") == "False"
    )


def waits_for_device_claim(pod: Object) -> bool:
    """Whether a ResourceClaim of the pod was not made yet. Until then the scheduler does not look at the pod."""
    return (
        text_at(pod, "status", "phase") == "Pending"
        and at(pod, "metadata", "deletionTimestamp") is None
        and bool(objects_at(pod, "spec", "resourceClaims"))
        and not objects_at(pod, "status", "resourceClaimStatuses")
        and condition(pod, "PodScheduled").get("status") != "True"
    )


START_WARNINGS = {
    "FailedAttachVolume": Reason.VOLUME_MOUNT_FAILED,
    "FailedMount": Reason.VOLUME_MOUNT_FAILED,
    "FailedMapVolume": Reason.VOLUME_MOUNT_FAILED,
    "FailedMountOnFilesystemMismatch": Reason.VOLUME_MOUNT_FAILED,
    "FailedResourceClaimCreation": Reason.DEVICE_PREPARATION_FAILED,
    "FailedPrepareDynamicResources": Reason.DEVICE_PREPARATION_FAILED,
    "NetworkNotReady": Reason.SANDBOX_FAILED,
    "FailedCreatePodContainer": Reason.SANDBOX_FAILED,
    "FailedCreatePodSandBox": Reason.SANDBOX_FAILED,
    "FailedPodSandBoxStatus": Reason.SANDBOX_FAILED,
    "FailedSync": Reason.SANDBOX_FAILED,
}
"""Reasons of events about pods that have no sandbox yet: of kubelets, and of controllers that attach volumes and make
ResourceClaims. No status has these. Other warnings about pods are in their statuses: of the scheduler, images,
containers, probes and evictions."""
MOUNT_RETRIES_S = 150.0
"""A kubelet retries each volume after at most 2 min 2 s. A failure that it has not repeated by then is over."""
_UNKNOWN_YET = re.compile(r"\bfailed to sync (?:configmap|secret) cache: timed out")
SHORT_WAIT_S = 10.0


def _is_short_wait(event: Object, message: str) -> bool:
    """Whether a kubelet does not know a ConfigMap or Secret yet, which exists.

    It waits for a second and tries again. On a busy node starts of healthy pods have this for a few seconds.
    """
    first, last = moment_at(event, "firstTimestamp"), moment_at(event, "lastTimestamp")
    has_lasted = first is not None and last is not None and seconds_between(first, last) >= SHORT_WAIT_S
    return _UNKNOWN_YET.search(message) is not None and not has_lasted


_OF_VOLUME = re.compile(r'\bfor volume "([^"]{1,253})"')


def start_failures(pod: Object, name: str, events: Sequence[Object]) -> Iterator[Failure]:
    """Why the pod has no sandbox. Volumes, devices and sandbox are made one after the other, so only failures of the
    kind of the newest one exist still; of volumes the last failure of each."""
    if not (waits_for_volumes(pod) or waits_for_device_claim(pod)):
        return
    last: dict[tuple[Reason, str], tuple[str, str]] = {}
    for event in events:
        kind, message = START_WARNINGS.get(text_at(event, "reason")), at_rest(text_at(event, "message"))
        if kind is None or not message or _is_short_wait(event, message):
            continue
        is_of_volume = kind is Reason.VOLUME_MOUNT_FAILED
        what = (match[1] if (match := _OF_VOLUME.search(message)) else message) if is_of_volume else ""
        last[kind, what] = max(last.get((kind, what), ("", "")), (moment_at(event, "lastTimestamp") or "", message))
    newest, kind = max(((time, kind) for (kind, _), (time, _) in last.items()), default=("", None))
    since = seconds_before(newest, MOUNT_RETRIES_S)
    for message in sorted({message for (of, _), (time, message) in last.items() if of is kind and time >= since}):
        reason = missing_object_reason(message, kind or Reason.SANDBOX_FAILED)
        stage = Stage.PLACED if waits_for_device_claim(pod) else Stage.FETCHED
        yield Failure(reason, clean(f"pod {name}: {message}"), stage, pod=name)


PULL_REASONS = frozenset({
    "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
})  # fmt: skip
NO_PULL_SECRET = "FailedToRetrieveImagePullSecret"  # noqa: S105 - a kubelet's reason
PULL_SECRET_RETRIES_S = 360.0
"""A kubelet repeats this event for as long as it is true, and the API server receives it at least every 5 minutes."""
_PULL_SECRETS = re.compile(r"image pull secrets \(([^)]{1,1000})\)")


def waits_for_pull_secrets(pod: Object) -> bool:
    """Whether an image cannot be pulled and the pod names pull secrets. Only events report whether these exist."""
    waiting = {text_at(status, "state", "waiting", "reason") for status in container_statuses(pod)}
    return bool(waiting & PULL_REASONS) and bool(objects_at(pod, "spec", "imagePullSecrets"))


def missing_pull_secrets(events: Sequence[Object], now: str) -> str:
    """The pull secrets that a kubelet could not read, as it lists them; "" if it has not reported any lately."""
    since = seconds_before(now, PULL_SECRET_RETRIES_S)
    found = [
        (time, match[1])
        for event in events
        if event.get("reason") == NO_PULL_SECRET
        and (time := moment_at(event, "lastTimestamp") or "") >= since
        and (match := _PULL_SECRETS.search(text_at(event, "message")))
    ]
    return max(found, default=("", ""))[1]


def with_missing_secrets(failure: Failure, secrets: str) -> Failure:
    """The failure; if an image cannot be pulled, its message also names the missing pull secrets."""
    if failure.reason != Reason.IMAGE_PULL_FAILED or not secrets:
        return failure
    hint = f"the node cannot read the pull secrets {secrets}: are they in the pod's namespace?"
    pull = clean(failure.message, _HINT_ROOM).removesuffix(".")
    return replace(failure, message=clean(f"{pull}; {hint}"))


_HINT_ROOM = 700
