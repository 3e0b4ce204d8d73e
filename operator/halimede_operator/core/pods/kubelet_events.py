"""Failures that kubelets report only in events: volumes that cannot be mounted, and missing pull secrets."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.pods.fields import container_statuses
from halimede_operator.core.reading import at, at_rest, clean, condition, moment_at, objects_at, seconds_before, text_at
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


MOUNT_RETRIES_S = 150.0
"""A kubelet retries each volume after at most 2 min 2 s. A failure that it has not repeated by then is over."""
_OF_VOLUME = re.compile(r'\bfor volume "([^"]{1,253})"')


def mount_failures(pod: Object, name: str, events: Sequence[Object]) -> Iterator[Failure]:
    """The kubelet's last failure for each volume that it still tries to mount."""
    if not waits_for_volumes(pod):
        return
    last: dict[str, tuple[str, str]] = {}
    for event in events:
        if event.get("reason") == NO_PULL_SECRET or not (message := at_rest(text_at(event, "message"))):
            continue
        volume = match[1] if (match := _OF_VOLUME.search(message)) else message
        last[volume] = max(last.get(volume, ("", "")), (moment_at(event, "lastTimestamp") or "", message))
    since = seconds_before(max((time for time, _ in last.values()), default=""), MOUNT_RETRIES_S)
    for message in sorted({message for time, message in last.values() if time >= since}):
        reason = missing_object_reason(message, Reason.VOLUME_MOUNT_FAILED)
        yield Failure(reason, clean(f"pod {name}: {message}"), Stage.FETCHED, pod=name)


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
