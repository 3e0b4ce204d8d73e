"""The scalers of an object: never two at once."""

from collections.abc import Sequence

from halimede_operator.core.reading import text_at
from halimede_operator.core.snapshot import Object, Snapshot

HPA = "HorizontalPodAutoscaler"
SCALED_OBJECT = "ScaledObject"
KINDS = frozenset({HPA, SCALED_OBJECT})


def scalers_in(snapshot: Snapshot) -> tuple[Object, ...]:
    """The existing scalers, also those that are being deleted, and the HPA that KEDA made."""
    found = [child for child in snapshot.children if text_at(child, "kind") in KINDS]
    return (*found, *([snapshot.keda_hpa] if snapshot.keda_hpa is not None else []))


def scaler_in(snapshot: Snapshot) -> Object | None:
    """The HPA or the ScaledObject of the operator."""
    return next((child for child in snapshot.children if text_at(child, "kind") in KINDS), None)


def rival_of(made: Object, hpas: Sequence[Object]) -> Object | None:
    """Another HPA that scales the same Deployment as the scaler that is to be made, or the Deployment's owner; None if
    there is none.

    hpas: of the namespace. KEDA makes one for each ScaledObject, so these need not be asked for.
    """
    targets = [made["spec"]["scaleTargetRef"], *made["metadata"]["ownerReferences"]]
    named = {(target["kind"], target["name"]) for target in targets}

    def is_rival(hpa: Object) -> bool:
        other = hpa["spec"]["scaleTargetRef"]
        is_same = (other.get("kind"), other.get("name")) in named
        return is_same and hpa["metadata"]["name"] != made["metadata"]["name"]

    return next((hpa for hpa in hpas if is_rival(hpa)), None)


def without_second(wanted: Sequence[Object], snapshot: Snapshot) -> tuple[Object, ...]:
    """The wanted children, without a scaler whose predecessor of the other kind still exists."""

    def has_to_wait(child: Object) -> bool:
        # KEDA makes the HPA for its ScaledObject, so these two may exist together.
        others = {each["kind"] for each in snapshot.children if each["kind"] in KINDS - {child["kind"]}}
        if child["kind"] == HPA and snapshot.keda_hpa is not None:
            others.add(SCALED_OBJECT)
        return bool(others)

    return tuple(child for child in wanted if child["kind"] not in KINDS or not has_to_wait(child))
