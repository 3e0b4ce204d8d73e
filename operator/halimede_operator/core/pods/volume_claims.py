"""PersistentVolumeClaims that keep a pod from getting a node. The scheduler names neither an unbound one nor why."""

import re
from collections.abc import Iterator, Mapping, Sequence

from halimede_operator.core.pods.failure import Failure, Reason, Stage
from halimede_operator.core.reading import at, at_rest, clean, condition, moment_at, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object, VolumeClaim

_ABOUT_CLAIMS = re.compile(r"persistent ?volumes? ?(claim|to bind)|VolumeBinding|binding volumes", re.IGNORECASE)
MAX_EVENT_CHARACTERS = 400


def claim_names(pod: Object) -> list[str]:
    """The claims that the pod mounts."""
    mounted = (name_at(each, "persistentVolumeClaim", "claimName") for each in objects_at(pod, "spec", "volumes"))
    return sorted({name for name in mounted if name})


def waits_for_claims(pod: Object) -> bool:
    """Whether the scheduler finds no node for the pod because of a claim."""
    scheduled = condition(pod, "PodScheduled")
    is_waiting = scheduled.get("status") == "False" and at(pod, "metadata", "deletionTimestamp") is None
    return is_waiting and bool(claim_names(pod)) and _ABOUT_CLAIMS.search(text_at(scheduled, "message")) is not None


def volume_claim(value: Object, events: Sequence[Object]) -> VolumeClaim:
    """What matters of a PersistentVolumeClaim. events: about it."""
    named = at(value, "spec", "storageClassName")
    newest = max(events, key=lambda event: moment_at(event, "lastTimestamp") or "", default=None)
    return VolumeClaim(
        is_bound=text_at(value, "status", "phase") == "Bound",
        storage_class=clean(named, 253) if isinstance(named, str) else None,
        event=clean(at_rest(text_at(newest, "message")), MAX_EVENT_CHARACTERS),
    )


def claim_failures(pod: Object, name: str, claims: Mapping[str, VolumeClaim | None]) -> Iterator[Failure]:
    """The failures of claims that the pod waits for. claims: those that were read."""
    if not waits_for_claims(pod):
        return
    scheduled = condition(pod, "PodScheduled")
    time, said = moment_at(scheduled, "lastTransitionTime"), at_rest(text_at(scheduled, "message"))
    for claim in claim_names(pod):
        if claim not in claims or ((found := claims[claim]) is not None and found.is_bound):
            continue
        what = f"pod {name}: PersistentVolumeClaim {claim}"
        if found is None:
            reason, text = Reason.CLAIM_MISSING, f"{what} does not exist"
        else:
            reason, text = Reason.CLAIM_UNBOUND, f"{what} ({_class_text(found)}) is not bound"
            text += f": {found.event}" if found.event else ""
        yield Failure(reason, clean(text), Stage.PLACED, pod=name, time=time, detail=clean(said))


def _class_text(claim: VolumeClaim) -> str:
    if claim.storage_class is None:
        return "without a StorageClass, and the cluster has no default one"
    return f"StorageClass {claim.storage_class}" if claim.storage_class else "without a StorageClass"
