"""What a request asks for, from its path and its query."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.rules import PODS, Resource, Rule, Rules
from halimede_operator.metrics_api.core.selectors import Requirement, parse_selector

GROUP = "custom.metrics.k8s.io"
VERSION = "v1beta2"
ROOT = f"/apis/{GROUP}/{VERSION}"
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Discovery:
    """Which metrics there are."""


@dataclass(frozen=True, slots=True)
class MetricOf:
    """A metric of one object, or of the pods of a selector."""

    namespace: str
    resource: str
    name: str
    """`*`: all that `label_selector` matches."""
    metric: str
    label_selector: str = ""
    """As it came. The API server checks it."""
    metric_label_selector: str = ""

    @property
    def is_for_all(self) -> bool:
        return self.name == "*"


@dataclass(frozen=True, slots=True)
class Unknown:
    """A path that nothing is served at. Kubernetes also asks for /apis and /openapi, and expects 404."""

    path: str


Request = Discovery | MetricOf | Unknown


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request whose metric exists."""

    rule: Rule
    resource: Resource
    required: tuple[Requirement, ...]


def parse_request(path: str, query: Mapping[str, str]) -> Request:
    """path: decoded. Raises MetricsError if a name in it is none of Kubernetes."""
    if path == ROOT:
        return Discovery()
    parts = path.removeprefix(f"{ROOT}/").split("/")
    if not path.startswith(f"{ROOT}/") or len(parts) != 5 or parts[0] != "namespaces":
        return Unknown(path)
    _, namespace, resource, name, metric = parts
    if _NAMESPACE.fullmatch(namespace) is None:
        raise MetricsError(Reason.BadRequest, f"{namespace[:128]!r} is no name of a namespace")
    if name != "*" and _NAME.fullmatch(name) is None:
        raise MetricsError(Reason.BadRequest, f"{name[:128]!r} is no name of an object")
    return MetricOf(
        namespace, resource, name, metric, query.get("labelSelector", ""), query.get("metricLabelSelector", "")
    )


def find(request: MetricOf, rules: Rules) -> Wanted:
    """Raises MetricsError if there is no such metric of such objects, or its selector is invalid."""
    rule = rules.by_metric.get(request.metric)
    if rule is None:
        raise MetricsError(
            Reason.NotFound,
            f"there is no metric {request.metric[:128]!r}; there are {', '.join(sorted(rules.by_metric))}",
        )
    resource = next((each for each in rule.labels if each.name == request.resource), None)
    if resource is None:
        raise MetricsError(
            Reason.NotFound,
            f"{request.resource[:128]!r} have no metric {rule.metric}; "
            f"{', '.join(each.name for each in rule.labels)} have it",
        )
    if request.is_for_all and resource != PODS:
        raise MetricsError(Reason.BadRequest, f"name one of {resource.name}: only pods are chosen by a selector")
    return Wanted(rule, resource, parse_selector(request.metric_label_selector))
