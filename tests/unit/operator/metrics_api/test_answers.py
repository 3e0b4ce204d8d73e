"""Prometheus' answers, errors, and whose the API is."""

import json
from decimal import Decimal

import pytest
import yaml

from halimede_operator.metrics_api.core import answers, ownership
from halimede_operator.metrics_api.core.cache import ExpiringCache
from halimede_operator.metrics_api.core.errors import MetricsError, Reason
from halimede_operator.metrics_api.core.ownership import Service
from halimede_operator.metrics_api.core.requests import MetricOf, find
from halimede_operator.metrics_api.core.results import Sample, has_samples, read_vector
from halimede_operator.metrics_api.core.rules import MODELS, Rules, parse_rules
from support.metrics_api import RULES


def vector(*found: tuple[str, str]) -> bytes:
    result = [{"metric": {"pod": pod}, "value": [1000.25, value]} for pod, value in found]
    return json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()


def test_samples_are_those_of_the_wanted_objects_with_values() -> None:
    body = vector(("a", "1.5"), ("b", "NaN"), ("c", "2"))
    assert read_vector(200, body, "pod", {"a", "b"}) == {"a": Sample(Decimal("1.5"), 1000.25)}
    assert read_vector(200, body, "inferencemodel", {"a"}) == {}
    assert has_samples(200, body)
    assert not has_samples(200, vector())


@pytest.mark.parametrize(
    ("body", "message", "reason"),
    [
        (b'{"status":"error","errorType":"timeout","error":"slow"}', "timeout: slow", Reason.ServiceUnavailable),
        (b"<html>502 Bad Gateway</html>", "not an answer of its API: '<html>502", Reason.ServiceUnavailable),
        (b"[]", "not an answer of its API", Reason.ServiceUnavailable),
        (
            b'{"status":"success","data":{"resultType":"vector","result":[7]}}',
            "not an answer",
            Reason.ServiceUnavailable,
        ),
        (b'{"status":"success","data":{"resultType":"scalar","result":[1,"2"]}}', "is no vector", Reason.InternalError),
    ],
)
def test_a_failure_of_prometheus_is_an_error(body: bytes, message: str, reason: Reason) -> None:
    with pytest.raises(MetricsError, match=message) as error:
        read_vector(502, body, "pod", {"a"})
    assert error.value.reason is reason


def test_errors_are_statuses_of_kubernetes() -> None:
    assert answers.status(MetricsError(Reason.NotFound, "no value")) == {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": "no value",
        "reason": "NotFound",
        "code": 404,
    }


OWN = Service("halimede", "halimede-metrics-api")
OTHER = Service("monitoring", "prometheus-adapter")


def test_the_service_of_an_api_service() -> None:
    spec = {"service": {"namespace": "monitoring", "name": "prometheus-adapter", "port": 443}}
    assert ownership.service_of({"spec": spec}) == OTHER
    assert ownership.service_of({"spec": {}}) is None
    assert ownership.service_of(None) is None


def test_nothing_is_served_while_the_api_belongs_to_another() -> None:
    assert ownership.why_not_serving(OWN, OWN) is None
    assert ownership.why_not_serving(OWN, None) is None
    why = ownership.why_not_serving(OWN, OTHER)
    assert why is not None
    assert "belongs to the Service monitoring/prometheus-adapter, not to halimede/halimede-metrics-api" in why


def test_another_server_of_the_earlier_version_is_warned_of() -> None:
    warning = ownership.warning(OWN, OWN, OTHER)
    assert warning is not None
    assert "find no metrics of that Service any more" in warning
    assert ownership.warning(OWN, OWN, None) is None
    assert ownership.warning(OWN, None, OTHER) is None


def test_a_cache_forgets_what_is_old() -> None:
    cache: ExpiringCache[str, int] = ExpiringCache(capacity=10, age_s=5)
    cache.put("a", 1, now_s=0)
    assert (cache.get("a", 4.9), cache.get("a", 5), cache.get("b", 0)) == (1, None, None)
    cache.put("b", 2, now_s=6)
    assert len(cache) == 1


def test_a_full_cache_forgets_the_oldest() -> None:
    cache: ExpiringCache[str, int] = ExpiringCache(capacity=2, age_s=5)
    for number, key in enumerate("abac"):
        cache.put(key, number, now_s=number)
    assert [cache.get(key, 3) for key in "abc"] == [2, None, 3]


def test_a_new_value_of_a_key_makes_room_for_itself() -> None:
    cache: ExpiringCache[str, int] = ExpiringCache(capacity=2, age_s=5)
    for number, key in enumerate("abb"):
        cache.put(key, number, now_s=number)
    assert [cache.get(key, 3) for key in "ab"] == [0, 2]


def test_documents_of_metrics_and_values() -> None:
    rules = parse_rules(yaml.safe_load(RULES.read_text()))
    assert isinstance(rules, Rules)
    listed = answers.resource_list(rules)["resources"]
    assert len(listed) == 12
    assert listed[0]["name"] == "inferencemodels.halimede.dev/halimede_inflight_requests"
    request = MetricOf("prod", MODELS.name, "bert", "halimede_queue_wait_seconds", metric_label_selector="version=2")
    (item,) = answers.value_list(request, find(request, rules), {"bert": Sample(Decimal("0.25"), 1000.9)})["items"]
    assert item == {
        "describedObject": {
            "kind": "InferenceModel",
            "namespace": "prod",
            "name": "bert",
            "apiVersion": "halimede.dev/v1alpha1",
        },
        "metric": {
            "name": "halimede_queue_wait_seconds",
            "selector": {"matchExpressions": [{"key": "version", "operator": "In", "values": ["2"]}]},
        },
        "timestamp": "1970-01-01T00:16:40Z",
        "windowSeconds": 60,
        "value": "250m",
    }


def test_what_is_missing_is_named() -> None:
    rules = parse_rules(yaml.safe_load(RULES.read_text()))
    assert isinstance(rules, Rules)
    request = MetricOf("prod", "pods", "*", "halimede_queue_requests", "a=b")
    assert str(answers.no_pods(request)) == (
        "no value of halimede_queue_requests: no pod in the namespace prod matches 'a=b'"
    )
    wanted = find(request, rules)
    unseen = str(answers.no_samples(request, wanted, 'pod="x"', were_there=False))
    start = "no value of halimede_queue_requests for pods of 'a=b' in the namespace prod: Prometheus has "
    assert unseen.startswith(start + 'no samples of halimede_queue_requests{pod="x"}: it must scrape the pods\' port')
    seen = str(answers.no_samples(request, wanted, 'pod="x"', were_there=True))
    assert seen.startswith(start + 'samples of halimede_queue_requests{pod="x"}, but they are older than 30 s')
