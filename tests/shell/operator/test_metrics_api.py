"""The metrics API with a real Prometheus, which scrapes pods that the test plays: values, errors and namespaces."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import yaml

from cluster.pki import Authority
from support.image import Unavailable
from support.metrics_api import (
    ROOT,
    RULES,
    SERVICE,
    Caller,
    MetricsApi,
    PlayedCluster,
    PlayedPods,
    as_user,
    http_server,
    metrics_api,
)
from support.phases import shown
from support.prometheus import Prometheus, start_prometheus

# The first run downloads Prometheus.
pytestmark = pytest.mark.timeout(600)

HPA = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
DIGITS = {"halimede.dev/model": "digits", "halimede.dev/track": "stable"}
METRICS = (
    "halimede_inflight_requests",
    "halimede_instance_busy_ratio",
    "halimede_queue_requests",
    "halimede_queue_wait_seconds",
)


def page(
    model: str = "bert",
    *,
    queue: object = 0,
    executing: object = 0,
    busy: tuple[object, ...] = (0,),
    waits: tuple[object, object] = (0, 0),
    at_ms: object = "",
) -> str:
    """The series of one model. waits: seconds and requests."""
    labels = f'model="{model}",version="1"'
    ratios = [
        f'halimede_instance_busy_ratio{{{labels},instance="{number}",device="cpu"}} {value} {at_ms}'
        for number, value in enumerate(busy)
    ]
    lines = [
        f"halimede_queue_requests{{{labels}}} {queue} {at_ms}",
        f"halimede_executing_requests{{{labels}}} {executing} {at_ms}",
        *ratios,
        f'halimede_queue_duration_seconds_sum{{{labels},outcome="success"}} {waits[0]} {at_ms}',
        f'halimede_queue_duration_seconds_count{{{labels},outcome="success"}} {waits[1]} {at_ms}',
    ]
    return "".join(f"{line.strip()}\n" for line in lines)


class Waiting:
    """A pod whose requests waited 0.25 s each; half as many were refused after 1 s, and do not count."""

    def __init__(self) -> None:
        self._scrapes = 0

    def __call__(self) -> str:
        self._scrapes += 1
        rejected = page(waits=(self._scrapes * 5, self._scrapes * 5)).replace("success", "rejected")
        return page(waits=(self._scrapes * 2.5, self._scrapes * 10)) + "\n".join(rejected.splitlines()[-2:]) + "\n"


def played_pods() -> PlayedPods:
    pods = PlayedPods()
    late_ms = int((time.time() - 45) * 1000)
    pages = {
        "digits-0": page("bert", queue=2, executing=4, busy=(0.9, 0.5)) + page("vision", queue=1, busy=(0.2,)),
        "digits-nan": page("bert", queue="NaN", busy=("NaN",), waits=("NaN", 0)) + page("vision", queue=5),
        "digits-inf": page("bert", queue="+Inf", busy=("+Inf",), waits=("+Inf", "+Inf")) + page("vision", queue=5),
        "digits-negative": page("bert", queue=-1, busy=(-1,), waits=(-1, 0)) + page("vision", queue=5),
        "digits-huge": page(queue="1e300", executing=1, busy=("1e300",), waits=("1e300", 0)),
        "digits-stale": page(queue=7, at_ms=late_ms),
        "digits-quoted": page('a\\"}b{', queue=7),
    }
    for name, text in pages.items():
        pods.add("team-a", name, text, inferencemodel="digits")
    pods.add("team-a", "quiet-0", page(queue=1, busy=(0.1, 0.3)) + page("vision", busy=(0.1,)), inferencemodel="quiet")
    pods.add("team-a", "quiet-1", page(queue=3, executing=2, busy=(0.6, 0.6)), inferencemodel="quiet")
    pods.add("team-a", "waiting-0", Waiting(), inferencemodel="waiting")
    pods.add("team-a", "waiting-1", page(), inferencemodel="waiting")
    pods.add("team-a", "steps-0", page("first", queue=4) + page("second", queue=2), modelensemble="steps")
    pods.add("team-b", "digits-0", page(queue=100), inferencemodel="digits")
    return pods


@dataclass
class World:
    cluster: PlayedCluster
    prometheus: Prometheus
    api: MetricsApi
    hpa: Caller


@pytest.fixture(scope="module")
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("metrics-api")
    pods = played_pods()
    cluster = PlayedCluster(Authority("front-proxy-ca"))
    cluster.api_services["v1beta2.custom.metrics.k8s.io"] = SERVICE
    cluster.allowed |= {(HPA, "team-a"), (HPA, "team-b")}
    for target in pods.targets:
        name = target.get("inferencemodel") or target["modelensemble"]
        cluster.pods[target["namespace"], target["pod"]] = {"halimede.dev/model": name, "halimede.dev/track": "stable"}
    cluster.pods["team-a", "digits-unscraped"] = DIGITS
    try:
        with shown(request.config), http_server(pods.respond) as url:
            stack = start_prometheus(pods.configuration(url), folder)
            with stack as prometheus, metrics_api(cluster, prometheus.url, folder) as api:
                # A rate needs two scrapes.
                api.until(lambda: len(prometheus.query("sum_over_time(up[1m]) >= 2")) == len(pods.targets))
                yield World(cluster, prometheus, api, as_user(api, cluster, HPA, "system:authenticated"))
    except Unavailable as why:
        pytest.skip(str(why))


def of_pods(metric: str, namespace: str = "team-a") -> str:
    return f"{namespace}/pods/*/{metric}"


SELECTOR = "halimede.dev/model=digits,halimede.dev/track=stable"


def test_discovery_lists_each_metric_of_pods_and_of_our_kinds(world: World) -> None:
    status, answer = world.hpa.get(ROOT)
    resources = ("inferencemodels.halimede.dev", "modelensembles.halimede.dev", "pods")
    assert (status, answer["kind"], answer["groupVersion"]) == (200, "APIResourceList", "custom.metrics.k8s.io/v1beta2")
    assert answer["resources"] == [
        {
            "name": f"{resource}/{metric}",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for resource in resources
        for metric in METRICS
    ]


def test_only_pods_with_valid_recent_samples_have_values(world: World) -> None:
    good = {"digits-0": "3", "digits-quoted": "7"}
    assert world.hpa.values(of_pods("halimede_queue_requests"), labelSelector=SELECTOR) == good
    good = {"digits-0": "7", "digits-quoted": "7"}
    assert world.hpa.values(of_pods("halimede_inflight_requests"), labelSelector=SELECTOR) == good
    good = {"digits-0": "700m", "digits-quoted": "0"}
    assert world.hpa.values(of_pods("halimede_instance_busy_ratio"), labelSelector=SELECTOR) == good
    good = {"digits-0": "0", "digits-quoted": "0"}
    waits = world.hpa.values(of_pods("halimede_queue_wait_seconds"), labelSelector=SELECTOR)
    assert {name: waits.get(name) for name in good} == good
    assert not waits.keys() & {"digits-nan", "digits-inf", "digits-negative", "digits-stale", "digits-unscraped"}


def test_an_answer_describes_its_object_and_the_age_of_its_samples(world: World) -> None:
    before = int(time.time())
    _, answer = world.hpa.get(f"{ROOT}/namespaces/team-a/pods/digits-0/halimede_queue_requests")
    (value,) = answer["items"]
    at = time.strptime(value.pop("timestamp"), "%Y-%m-%dT%H:%M:%SZ")
    assert before <= time.mktime(at) - time.timezone <= time.time()
    assert (answer["kind"], answer["apiVersion"]) == ("MetricValueList", "custom.metrics.k8s.io/v1beta2")
    assert value == {
        "describedObject": {"kind": "Pod", "namespace": "team-a", "name": "digits-0", "apiVersion": "v1"},
        "metric": {"name": "halimede_queue_requests", "selector": None},
        "windowSeconds": 30,
        "value": "3",
    }


def test_a_metric_of_an_object_is_the_sum_or_mean_of_its_pods(world: World) -> None:
    def of(name: str, metric: str) -> dict[str, str]:
        return world.hpa.values(f"team-a/{name}/{metric}")

    quiet, steps = "inferencemodels.halimede.dev/quiet", "modelensembles.halimede.dev/steps"
    assert of(quiet, "halimede_queue_requests") == {"quiet": "4"}
    assert of(quiet, "halimede_inflight_requests") == {"quiet": "6"}
    assert of(quiet, "halimede_instance_busy_ratio") == {"quiet": "400m"}
    assert of(steps, "halimede_queue_requests") == {"steps": "6"}
    _, answer = world.hpa.get(f"{ROOT}/namespaces/team-a/{steps}/halimede_queue_requests")
    assert answer["items"][0]["describedObject"] == {
        "kind": "ModelEnsemble",
        "namespace": "team-a",
        "name": "steps",
        "apiVersion": "halimede.dev/v1alpha1",
    }


def test_waits_are_means_without_refused_requests_and_0_without_any(world: World) -> None:
    waits = world.hpa.values(of_pods("halimede_queue_wait_seconds"), labelSelector="halimede.dev/model=waiting")
    assert waits == {"waiting-0": "250m", "waiting-1": "0"}
    of_object = world.hpa.values("team-a/inferencemodels.halimede.dev/waiting/halimede_queue_wait_seconds")
    assert of_object == {"waiting": "125m"}


@pytest.mark.parametrize("metric", METRICS)
def test_an_object_with_one_invalid_sample_has_no_value(world: World, metric: str) -> None:
    """A sum over the rest would understate the load."""
    status, message = world.hpa.refusal(f"team-a/inferencemodels.halimede.dev/digits/{metric}")
    assert status == 404
    assert "no numbers, infinite or negative" in message


def test_a_value_comes_from_the_namespace_of_the_request_alone(world: World) -> None:
    assert world.hpa.values("team-b/pods/digits-0/halimede_queue_requests") == {"digits-0": "100"}
    assert world.hpa.values("team-b/inferencemodels.halimede.dev/digits/halimede_queue_requests") == {"digits": "100"}
    wide = "namespace in (team-a,team-b)"
    assert world.hpa.values("team-b/pods/digits-0/halimede_queue_requests", metricLabelSelector=wide) == {
        "digits-0": "100"
    }
    status, _ = world.hpa.refusal(
        "team-b/pods/digits-0/halimede_queue_requests", metricLabelSelector="namespace=team-a"
    )
    assert status == 404


@pytest.mark.parametrize(
    ("selector", "value"),
    [("model=bert", "2"), ("model!=bert", "1"), ("model in (bert,vision)", "3"), ("model,!outcome", "3")],
)
def test_a_metric_selector_chooses_series(world: World, selector: str, value: str) -> None:
    path = "team-a/pods/digits-0/halimede_queue_requests"
    assert world.hpa.values(path, metricLabelSelector=selector) == {"digits-0": value}


@pytest.mark.parametrize(
    "path",
    [
        'team-a"} or {namespace="team-b/pods/digits-0/halimede_queue_requests',
        'team-a/pods/digits-0"} or vector(1) or x{a="/halimede_queue_requests',
        "team-a/pods/digits-0|digits-nan/halimede_queue_requests",
        "team-a/pods/.*/halimede_queue_requests",
    ],
)
def test_promql_in_a_path_is_refused(world: World, path: str) -> None:
    status, message = world.hpa.refusal(path)
    assert status == 400
    assert "is no name of" in message


@pytest.mark.parametrize("selector", ['model="x"} or vector(1) #', "model=~.*", 'model in (a") or vector(1)', "a-b=c"])
def test_promql_in_a_metric_selector_is_refused(world: World, selector: str) -> None:
    path = "team-a/pods/digits-0/halimede_queue_requests"
    status, message = world.hpa.refusal(path, metricLabelSelector=selector)
    assert status == 400
    assert message.startswith("metricLabelSelector")


def test_what_is_missing_is_said(world: World) -> None:
    def refusal(path: str, selector: str = SELECTOR) -> tuple[int, str]:
        return world.hpa.refusal(f"team-a/{path}", labelSelector=selector)

    status, message = refusal("pods/*/gpu_temperature")
    assert (status, "there are halimede_inflight_requests, halimede_instance" in message) == (404, True)
    status, message = refusal("services/digits/halimede_queue_requests")
    assert (status, "'services' have no metric halimede_queue_requests; pods, infer" in message) == (404, True)
    status, message = refusal("pods/*/halimede_queue_requests", "halimede.dev/model=nobody")
    assert (status, "no pod in the namespace team-a matches 'halimede.dev/model=nobody'" in message) == (404, True)
    status, message = refusal("pods/digits-unscraped/halimede_queue_requests")
    assert (status, "Prometheus has no samples of halimede_queue_requests{" in message) == (404, True)
    status, message = refusal("pods/digits-stale/halimede_queue_requests")
    assert (status, "they are older than 30 s" in message) == (404, True)
    status, message = refusal("inferencemodels.halimede.dev/*/halimede_queue_requests")
    assert (status, "name one of inferencemodels.halimede.dev" in message) == (400, True)
    status, message = refusal("pods/*/halimede_queue_requests", "a b c")
    assert (status, "labelSelector 'a b c': unable to parse requirement" in message) == (400, True)


def test_a_thousand_pods_are_one_query_and_more_are_refused(world: World) -> None:
    for number in range(999):
        world.cluster.pods["team-b", f"digits-with-a-long-name-of-forty-letters-{number:04}"] = {"app": "many"}
    world.cluster.pods["team-b", "digits-0"]["app"] = "many"
    assert world.hpa.values(of_pods("halimede_queue_requests", "team-b"), labelSelector="app=many") == {
        "digits-0": "100"
    }
    world.cluster.pods["team-b", "one-more"] = {"app": "many", "too": "many"}
    for labels in world.cluster.pods.values():
        labels["too"] = "many"
    status, message = world.hpa.refusal(of_pods("halimede_queue_requests", "team-b"), labelSelector="app=many,too=many")
    assert (status, "matches more than 1000 pods" in message) == (400, True)


def test_pods_and_decisions_are_cached_for_a_moment(world: World) -> None:
    """Lists of pods for 2 s, decisions for 5 s; a decision does not depend on selectors."""
    asked = len(world.cluster.requests)
    begun = time.monotonic()
    for number in range(30):
        more = "" if number % 2 else ",halimede.dev/track=stable"
        world.hpa.values(of_pods("halimede_queue_requests"), labelSelector=f"halimede.dev/model=digits{more}")
    took_s = time.monotonic() - begun
    requests = world.cluster.requests[asked:]
    assert requests.count("GET /api/v1/namespaces/team-a/pods") <= 2 * (2 + took_s / 2)
    assert requests.count("POST /apis/authorization.k8s.io/v1/subjectaccessreviews") <= 2 + took_s / 5


def test_queries_of_prometheus_adapter_give_the_same_values(world: World) -> None:
    """Written here as prometheus-adapter fills the templates: matchers of the namespace first, names unescaped."""
    values = {}
    for rule in yaml.safe_load(RULES.read_text())["rules"]:
        query = rule["metricsQuery"].replace("<<.GroupBy>>", "pod")
        query = query.replace("<<.LabelMatchers>>", 'namespace="team-a",pod=~"digits-0|quiet-0"')
        values[rule["name"]["as"]] = {each["metric"]["pod"]: each["value"][1] for each in world.prometheus.query(query)}
    assert values == {
        "halimede_queue_requests": {"digits-0": "3", "quiet-0": "1"},
        "halimede_inflight_requests": {"digits-0": "7", "quiet-0": "1"},
        "halimede_instance_busy_ratio": {"digits-0": "0.7", "quiet-0": "0.2"},
        "halimede_queue_wait_seconds": {"digits-0": "0", "quiet-0": "0"},
    }
