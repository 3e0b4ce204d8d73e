"""Paths and queries of requests, and which metric they mean."""

import pytest
import yaml

from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.requests import ROOT, Discovery, MetricOf, Unknown, find, parse_request
from halimede_operator.metrics_api.core.rules import MODELS, Rules, parse_rules
from halimede_operator.metrics_api.core.selectors import Operator, Requirement
from support.metrics_api import RULES


def rules() -> Rules:
    parsed = parse_rules(yaml.safe_load(RULES.read_text()))
    assert isinstance(parsed, Rules)
    return parsed


def test_requests_are_read() -> None:
    assert parse_request(ROOT, {}) == Discovery()
    query = {"labelSelector": "a=b", "metricLabelSelector": "c=d", "pretty": "true"}
    assert parse_request(f"{ROOT}/namespaces/prod/pods/*/waiting", query) == MetricOf(
        "prod", "pods", "*", "waiting", "a=b", "c=d"
    )


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/apis",
            "/openapi/v2",
            "/apis/custom.metrics.k8s.io",
            "/apis/custom.metrics.k8s.io/v1beta1",
            f"{ROOT}/",
        ),
        *(f"{ROOT}/namespaces/prod/metrics/a", f"{ROOT}/nodes/n/a", f"{ROOT}x/namespaces/a/pods/b/c"),
    ],
)
def test_nothing_is_at_other_paths(path: str) -> None:
    assert parse_request(path, {}) == Unknown(path)


@pytest.mark.parametrize("path", ["Prod/pods/a", 'a"/pods/a', f"{'a' * 64}/pods/a", "a/pods/A", "a/pods/", "a/pods/ü"])
def test_names_that_kubernetes_has_not_are_refused(path: str) -> None:
    with pytest.raises(MetricsError, match="is no name of") as error:
        parse_request(f"{ROOT}/namespaces/{path}/waiting", {})
    assert error.value.reason is Reason.BadRequest


def test_the_metric_of_a_request_is_found() -> None:
    request = MetricOf("prod", MODELS.name, "bert", "halimede_queue_requests", metric_label_selector="version=2")
    wanted = find(request, rules())
    assert (wanted.rule.metric, wanted.resource) == ("halimede_queue_requests", MODELS)
    assert wanted.required == (Requirement("version", Operator.IN, ("2",)),)


@pytest.mark.parametrize(
    ("request_", "reason", "message"),
    [
        (MetricOf("prod", "pods", "a", "heat"), Reason.NotFound, "there is no metric 'heat'; there are halimede_infl"),
        (MetricOf("prod", "jobs", "a", "halimede_queue_requests"), Reason.NotFound, "'jobs' have no metric"),
        (
            MetricOf("prod", MODELS.name, "*", "halimede_queue_requests"),
            Reason.BadRequest,
            "name one of inferencemodels",
        ),
    ],
)
def test_metrics_that_are_not_there(request_: MetricOf, reason: Reason, message: str) -> None:
    with pytest.raises(MetricsError, match=message) as error:
        find(request_, rules())
    assert error.value.reason is reason
