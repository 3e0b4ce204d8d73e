"""How the pods of a new template replace those of the old one: the Deployment's strategy.

It is outside the pod template, so it may change in the middle of a rollout. At rest it stays as it is.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from halimede_operator.core.children.pod import DRAIN_DELAY_SECONDS
from halimede_operator.core.labels import REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.placement.choice import placement_of
from halimede_operator.core.pods.fields import FETCH, container_status
from halimede_operator.core.pods.read import placed_at
from halimede_operator.core.pods.scheduling import waits_for_devices
from halimede_operator.core.pods.start import Start, read_start
from halimede_operator.core.reading import (
    at,
    condition,
    decimal,
    integer_at,
    moment_at,
    seconds_before,
    seconds_between,
    text_at,
)
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import RolloutPolicy, Workload
from halimede_operator.core.subject import Subject

STEP_S = 5
HAND_OVER_S = 3
"""Until the old pod's devices are free, and the new one has its node and its sandbox."""
UNKNOWN_START_S = 120
WAITS_AT_MOST_S = 60
"""A new pod that waits longer for devices, although some are free, takes those of an old pod."""


@dataclass(frozen=True, slots=True)
class Strategy:
    policy: RolloutPolicy
    """Not Auto."""
    reason: str = ""
    """Why, and what to expect, for the status; "" at rest."""
    needs_room: bool = False
    """The decision depends on whether a device is free, which was not asked yet."""

    @property
    def takes_pods_away(self) -> bool:
        """Whether old pods end before new ones serve."""
        return bool(self.reason) and self.policy is not RolloutPolicy.SURGE


def strategy_at_rest(workload: Workload, existing: Object | None) -> RolloutPolicy:
    """The policy of the spec; with Auto that of the existing Deployment."""
    if workload.rollout.policy is not RolloutPolicy.AUTO:
        return workload.rollout.policy
    is_in_place = at(existing, "spec", "strategy", "rollingUpdate", "maxSurge") == 0
    return RolloutPolicy.IN_PLACE if is_in_place else RolloutPolicy.SURGE


def surges(deployment: Object) -> bool:
    """Whether old pods of a Deployment stay until new ones serve."""
    strategy = at(deployment, "spec", "strategy")
    return text_at(strategy, "type") != "Recreate" and integer_at(strategy, "rollingUpdate", "maxSurge") != 0


def strategy_of(
    subject: Subject, workload: Workload, wanted: Object, now: str, *, room: int | None = None, over_quota: bool = False
) -> Strategy:
    """Decide how the pods of `wanted` replace others: the subject's Deployment as it will be applied.

    workload: of the subject's spec. now: UTC time as `moment_at` writes it. room: how many further pods the free
    devices allow; None if that was not asked. over_quota: a quota refuses pods, and has room for one when another goes.
    No other refusal counts: without the old pod the new one is refused all the same.
    """
    existing, placement, startup = subject.deployment, placement_of(wanted), read_start(subject.status)
    kept = strategy_at_rest(workload, existing)
    if existing is None or workload.suspend or workload.replicas == 0:
        return Strategy(kept)
    is_beginning = _hash(existing) != _hash(wanted)
    revision = at(wanted, "spec", "template", "metadata", "labels", REVISION_LABEL)
    pods = [pod for pod in subject.snapshot.pods if "deletionTimestamp" not in pod["metadata"] and not _has_ended(pod)]
    newest = [pod for pod in pods if at(pod, "metadata", "labels", REVISION_LABEL) == revision]
    if len(newest) == len(pods):
        return Strategy(kept)
    gap = _gap(wanted, pods, startup)
    if workload.rollout.policy is not RolloutPolicy.AUTO:
        return Strategy(kept, f"spec.rollout.policy is {kept}: {_effect(kept, workload.replicas, gap)}")
    if placement is None:
        return Strategy(RolloutPolicy.SURGE, _effect(RolloutPolicy.SURGE, workload.replicas, gap))
    # A rollout that has begun goes on as it is, unless its new pod waits for devices.
    waiting = [pod for pod in newest if waits_for_devices(pod)]
    if not is_beginning and (kept is RolloutPolicy.IN_PLACE or not (waiting or over_quota)):
        return Strategy(kept, _effect(kept, workload.replicas, gap))
    effect = _effect(RolloutPolicy.IN_PLACE, workload.replicas, gap)
    if not is_beginning and over_quota:
        return Strategy(RolloutPolicy.IN_PLACE, f"a quota refuses a further pod: {effect}")
    since = seconds_before(now, WAITS_AT_MOST_S)
    if any((moment_at(condition(pod, "PodScheduled"), "lastTransitionTime") or now) <= since for pod in waiting):
        # Devices may be free that the pod cannot use, for instance on a node without its volume.
        return Strategy(
            RolloutPolicy.IN_PLACE, f"the new pod has found no {placement.title} for {WAITS_AT_MOST_S} s: {effect}"
        )
    if placement.claim is not None:
        # Only the scheduler knows what is free.
        effect = _effect(RolloutPolicy.SURGE, workload.replicas, gap)
        unless = f"but an old pod goes first if its successor finds no {placement.title} for {WAITS_AT_MOST_S} s"
        return Strategy(RolloutPolicy.SURGE, f"{effect}, {unless}")
    if room is None:
        return Strategy(kept, _effect(kept, workload.replicas, gap), needs_room=True)
    policy = RolloutPolicy.SURGE if room > 0 else RolloutPolicy.IN_PLACE
    why = f"a further {placement.title} is free, or soon" if room > 0 else f"no further {placement.title} is free"
    return Strategy(policy, f"{why}: {_effect(policy, workload.replicas, gap)}")


def _effect(policy: RolloutPolicy, replicas: int, gap: str) -> str:
    match policy:
        case RolloutPolicy.RECREATE:
            return f"all old pods go before the new ones start; nothing serves for {gap}"
        case RolloutPolicy.IN_PLACE if replicas == 1:
            return f"the old pod goes before the new one starts; nothing serves for {gap}"
        case RolloutPolicy.IN_PLACE:
            return f"each old pod goes before its successor starts; {replicas - 1} of {replicas} replicas serve"
        case _:
            return "each old pod serves until its successor is ready"


def _gap(deployment: Object, pods: Iterable[Object], startup: Start | None) -> str:
    """How long it takes from the end of the old pod's service to the beginning of the new one's.

    An old pod without requests ends after its drain delay. One with long requests may take its whole grace period.
    """
    grace_s = decimal(at(deployment, "spec", "template", "spec", "terminationGracePeriodSeconds")) or 0
    start_s = _measured_start_s(pods, startup)
    if start_s is None:
        return f"up to {grace_s + UNKNOWN_START_S} s"
    # Rounded up, so that pods with nearly equal starts do not change the text.
    about_s = math.ceil((DRAIN_DELAY_SECONDS + HAND_OVER_S + start_s) / STEP_S) * STEP_S
    drain_s = max(0, grace_s - DRAIN_DELAY_SECONDS)
    return f"about {about_s} s, by the last start, and for up to {drain_s} s more while old requests end"


def _measured_start_s(pods: Iterable[Object], startup: Start | None) -> float | None:
    """The longest time that one of the pods took to fetch and load its models; None if that is not known."""
    return max((start for pod in pods if (start := _start_s(pod, startup)) is not None), default=None)


def _start_s(pod: Object, startup: Start | None) -> float | None:
    """From the start of its first container to its readiness; None if it is not ready.

    startup: of the status, which keeps when a pod was ready first. The pod has only the last time: it may have been
    unready since then.
    """
    ready = condition(pod, "Ready")
    if ready.get("status") != "True":
        return None
    begun = moment_at(container_status(pod, FETCH), "state", "terminated", "startedAt") or placed_at(pod)
    begun = begun or moment_at(pod, "metadata", "creationTimestamp") or ""
    if not begun:
        return None
    if startup is not None and startup.pod == text_at(pod, "metadata", "name") and "ready" in startup.stages:
        return max(0.0, seconds_between(begun, startup.created) + startup.stages["ready"])
    since = moment_at(ready, "lastTransitionTime")
    return max(0.0, seconds_between(begun, since)) if since is not None else None


def _has_ended(pod: Object) -> bool:
    return text_at(pod, "status", "phase") in {"Failed", "Succeeded"}


def _hash(deployment: Object) -> str:
    return text_at(deployment, "metadata", "annotations", TEMPLATE_HASH)
