"""Whether a caller may have what a request asks for: the API server decides, in a SubjectAccessReview."""

from collections.abc import Mapping
from typing import Any

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.identity import Caller
from halimede_operator.metrics_api.core.requests import GROUP, ROOT, VERSION, Discovery, MetricOf

# Any, in this module: JSON.

MASTERS = "system:masters"


def is_always_allowed(caller: Caller) -> bool:
    """The API server allows this group everything, too. So its check of our availability needs no review."""
    return MASTERS in caller.groups


def access_review(caller: Caller, request: Discovery | MetricOf) -> dict[str, Any]:
    spec: dict[str, Any] = {"user": caller.name, "groups": list(caller.groups)}
    if caller.uid:
        spec["uid"] = caller.uid
    if caller.extra:
        spec["extra"] = {key: list(values) for key, values in caller.extra}
    match request:
        case Discovery():
            spec["nonResourceAttributes"] = {"path": ROOT, "verb": "get"}
        case MetricOf():
            # As the API server reads such a path: the metric is a subresource.
            spec["resourceAttributes"] = {
                "namespace": request.namespace,
                "verb": "get",
                "group": GROUP,
                "version": VERSION,
                "resource": request.resource,
                "subresource": request.metric,
                "name": request.name,
            }
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}


def is_allowed(review: Mapping[str, Any]) -> bool:
    status = review.get("status") or {}
    return status.get("allowed") is True and not status.get("denied")


def refused(caller: Caller, request: Discovery | MetricOf) -> MetricsError:
    match request:
        case Discovery():
            what = f"get {ROOT}"
        case MetricOf():
            what = f"get {request.resource}/{request.metric} of {GROUP} in the namespace {request.namespace}"
    return MetricsError(Reason.Forbidden, f"{caller.name} may not {what}")
