"""Answers as documents of Kubernetes."""

import datetime
from collections.abc import Mapping
from typing import Any

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.requests import GROUP, VERSION, MetricOf, Wanted
from halimede_operator.metrics_api.core.results import Sample
from halimede_operator.metrics_api.core.rules import Rules
from halimede_operator.metrics_api.core.selectors import as_label_selector
from halimede_operator.metrics_api.core.values import quantity

# Any, in this module: JSON.


def resource_list(rules: Rules) -> dict[str, Any]:
    """The metrics that the rules define, whether or not there are samples of them."""
    names = sorted(f"{resource.name}/{rule.metric}" for rule in rules.by_metric.values() for resource in rule.labels)
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": f"{GROUP}/{VERSION}",
        "resources": [
            {"name": name, "singularName": "", "namespaced": True, "kind": "MetricValueList", "verbs": ["get"]}
            for name in names
        ],
    }


def value_list(request: MetricOf, wanted: Wanted, samples: Mapping[str, Sample]) -> dict[str, Any]:
    """samples: by the object's name."""
    rule, resource = wanted.rule, wanted.resource
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{GROUP}/{VERSION}",
        "metadata": {},
        "items": [
            {
                "describedObject": {
                    "kind": resource.kind,
                    "namespace": request.namespace,
                    "name": name,
                    "apiVersion": resource.api_version,
                },
                "metric": {"name": rule.metric, "selector": as_label_selector(wanted.required)},
                "timestamp": _timestamp(found.at_s),
                "windowSeconds": rule.window_s,
                "value": quantity(found.value),
            }
            for name, found in sorted(samples.items())
        ],
    }


def status(error: MetricsError) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": error.message,
        "reason": error.reason.name,
        "code": error.reason.value,
    }


def no_pods(request: MetricOf) -> MetricsError:
    return MetricsError(
        Reason.NotFound,
        f"no value of {request.metric}: no pod in the namespace {request.namespace} matches {request.label_selector!r}",
    )


def no_samples(request: MetricOf, wanted: Wanted, matchers: str, *, were_there: bool) -> MetricsError:
    """were_there: Prometheus has samples of the series, but none that counts."""
    series = f"{wanted.rule.series}{{{matchers[:500]}}}"
    whom = (
        f"{request.resource} of {request.label_selector!r}"
        if request.is_for_all
        else f"{request.resource} {request.name}"
    )
    if were_there:
        why = (
            f"Prometheus has samples of {series}, but they are older than 30 s, no numbers, infinite or negative, "
            "or too few"
        )
    else:
        why = (
            f"Prometheus has no samples of {series}: it must scrape the pods' port `metrics`, and its targets must "
            "have these labels"
        )
    return MetricsError(
        Reason.NotFound, f"no value of {wanted.rule.metric} for {whom} in the namespace {request.namespace}: {why}"
    )


def _timestamp(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
