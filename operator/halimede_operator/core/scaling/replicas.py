"""Decides who sets the Deployment's number of replicas, and hands it over without another number in between.

With server-side apply, a field that its only owner no longer applies falls back to its default, here 1. So before the
operator stops applying `replicas`, a second field manager of ours applies the present number. The HPA takes the field
from it with its first change. In the other direction the scaler is deleted first: as long as one exists, the operator
does not apply a number.

    spec                 a scaler exists   the Deployment         applied         held before
    not autoscaled       no                (any)                  spec.replicas
    not autoscaled       yes               (any)                                  the present number, if ours
    suspended            no                (any)                  0
    suspended            yes               (any)                                  the present number, if ours
    autoscaled           (any)             does not exist         minReplicas
    autoscaled           (any)             its number is ours                     the present number; for 0 minReplicas
    autoscaled           (any)             its number is others'

A number is ours if the operator's own field manager applied it. So 0 is that of `suspend` or of `spec.replicas`, and
the pods come back; a 0 of others stays: an HPA does nothing at 0 unless its minReplicas is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from halimede_operator.core.platform import FIELD_MANAGER
from halimede_operator.core.reading import at, decimal
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Workload

HOLDER = f"{FIELD_MANAGER}-replicas"
"""The second field manager."""
IS_OURS = "replicasAreOurs"
"""Field beside `spec` in a cached Deployment: whether the operator's field manager applied `spec.replicas`."""


@dataclass(frozen=True, slots=True)
class Replicas:
    counted: int
    """How many pods there should be, now or after the planned changes."""
    applied: int | None
    """What the Deployment child has; None: it has no `replicas`."""
    held: int | None = None
    """What HOLDER applies before; None: nothing."""


def replicas_of(workload: Workload, deployment: Object | None, scaler_exists: bool) -> Replicas:
    """deployment: the object's, with IS_OURS; None if it does not exist. scaler_exists: an HPA or a ScaledObject of the
    object, or an HPA that KEDA made from it, exists."""
    scaling = workload.autoscaling
    is_scaled = scaling is not None and not workload.suspend
    if not is_scaled and (deployment is None or not scaler_exists):
        wanted = 0 if workload.suspend else workload.replicas
        return Replicas(wanted, wanted)
    first = max(1, scaling.min_replicas) if scaling is not None else 1
    if deployment is None:
        # 1 is the API server's default.
        return Replicas(first, first if first > 1 else None)
    present = present_of(deployment)
    if not deployment.get(IS_OURS):
        return Replicas(present, None)
    held = first if is_scaled and present == 0 else present
    return Replicas(held, None, held)


def present_of(deployment: Object) -> int:
    """The replicas that a Deployment asks for."""
    number = decimal(at(deployment, "spec", "replicas"))
    return 1 if number is None else number


def are_ours(managed_fields: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the operator's field manager applied `spec.replicas`. Any: JSON."""
    return any(
        entry.get("manager") == FIELD_MANAGER
        and entry.get("operation") == "Apply"
        and "f:replicas" in ((entry.get("fieldsV1") or {}).get("f:spec") or {})
        for entry in managed_fields
    )


def held(deployment: Object, replicas: int, annotations: Mapping[str, str] | None = None) -> Object:
    """What HOLDER applies to a Deployment, on the version that was read. A conflict if it has changed since."""
    metadata = deployment["metadata"]
    named = {name: metadata[name] for name in ("name", "namespace", "uid", "resourceVersion")}
    return {
        "apiVersion": deployment["apiVersion"],
        "kind": deployment["kind"],
        "metadata": {**named, "annotations": dict(annotations)} if annotations else named,
        "spec": {"replicas": replicas},
    }
