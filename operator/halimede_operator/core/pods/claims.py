"""What kube-scheduler allocated to the pods' ResourceClaims."""

from halimede_operator.core.pods.placements import read_placements
from halimede_operator.core.reading import at, clean, name_at, objects_at, text_at
from halimede_operator.core.snapshot import Object, Snapshot

MAX_ALLOCATED = 64
"""Of one pod: the most devices that a spec may ask for."""


def claim_of(pod: Object) -> str:
    """The name of the pod's ResourceClaim; "" if it has none yet."""
    return next((text_at(each, "resourceClaimName") for each in objects_at(pod, "status", "resourceClaimStatuses")), "")


def unread_claims(snapshot: Snapshot) -> list[Object]:
    """Pods that have a node, and whose devices are in no status yet. What a pod was allocated never changes."""
    known = {each.pod for each in read_placements(at(snapshot.object, "status")) if each.allocated}
    return [
        pod
        for pod in snapshot.pods
        if claim_of(pod) and text_at(pod, "spec", "nodeName") and pod["metadata"]["name"] not in known
    ]


def allocated(claim: Object) -> tuple[str, ...]:
    """The devices of a ResourceClaim, `driver/pool/device`."""
    results = objects_at(claim, "status", "allocation", "devices", "results")[:MAX_ALLOCATED]
    parts = (tuple(name_at(each, part) for part in ("driver", "pool", "device")) for each in results)
    return tuple(clean("/".join(each), 512) for each in parts)
