"""What reads metrics names series and labels that the server, the operator or the metrics API exports.

Readers are the rules of the metrics API, the alerts, the recording rules, the dashboards, the operator's presets, the
operator itself, and the documentation. `tests/monitoring` evaluates expressions in a Prometheus; this reads names alone.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from halimede.core.observe import metrics
from halimede.core.observe.busy import Busy
from halimede.core.observe.kv_cache import FAMILY as KV_CACHE
from halimede.core.observe.load import Load
from halimede.core.observe.metrics_page import render
from halimede.core.observe.samples import GpuSample, InstanceSample, ModelSample, StateSample, SystemSample
from halimede.core.observe.stats import ModelStats
from halimede.core.types import ModelReadyState
from halimede.core.types.statistics import SequenceCount
from halimede_operator.core.scaling.idle import Work, read_work
from halimede_operator.core.scaling.presets import IN_USE, PRESETS, promql
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.metrics import Metrics as OperatorMetrics
from halimede_operator.metrics import ScrapeGauges
from halimede_operator.metrics_api.core.rules import Resource, Rule, Rules, parse_rules
from halimede_operator.metrics_api.metrics import Metrics as MetricsApiMetrics
from support.image import REPOSITORY_ROOT
from support.metrics_api import RULES
from support.monitored import KUBE_STATE_METRICS
from support.monitored import RULES as ALERTS
from support.promql_labels import Wrong, labels_of

Series = dict[str, frozenset[str]]

OF_TARGET = frozenset({"namespace", "pod", "job"})
"""Set by Prometheus for each pod. Not `instance`, the address of the pod: it says nothing, and looks like the server's label."""
OF_MODELS = OF_TARGET | {"inferencemodel", "modelensemble"}
GROUPS = yaml.load(ALERTS.read_text(), yaml.CSafeLoader)["groups"]
DASHBOARDS = sorted((REPOSITORY_ROOT / "helm" / "halimede" / "files" / "dashboards").glob("*.json"))
DOCUMENTS = [REPOSITORY_ROOT / "README.md", *sorted((REPOSITORY_ROOT / "docs" / "pages").glob("*.md"))]


def of_server() -> Series:
    found = {}
    for group in metrics.GROUPS:
        # The target has an `instance` too.
        labels = OF_MODELS | {"exported_instance" if label == "instance" else label for label in group.labels}
        for family in group.families:
            for name in metrics.sample_names(family.name, family.kind):
                if not (family.kind == "histogram" and name == family.name):
                    found[name] = labels | ({"le"} if name.endswith("_bucket") else set())
    return found


def of_page(text: str) -> Series:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name: frozenset(sample.labels) | OF_TARGET for sample in samples}


def of_operator() -> Series:
    made = OperatorMetrics()
    made.watch(ScrapeGauges(lambda: 0, lambda: 0.0, lambda: {"Pod": 0.0}, lambda: True, lambda: 0))
    made.wrote("apply", "Deployment", 200)
    return of_page(made.text().decode())


def exported() -> Series:
    found = of_server() | of_operator() | of_page(MetricsApiMetrics(lambda: 0.0).text().decode())
    found |= of_page(KUBE_STATE_METRICS) | {"up": OF_MODELS}
    for rule in rules("record"):
        found[rule["record"]] = labels_of(rule["expr"], found)
    return found


def rules(kind: str) -> list[Any]:
    return [rule for group in GROUPS for rule in group["rules"] if kind in rule]


SERIES = exported()


def test_nothing_is_exported_under_two_names() -> None:
    assert not of_server().keys() & of_operator().keys()
    assert {"nv_inference_request_success", "halimede_queue_duration_seconds_count", "up"} < SERIES.keys()
    assert SERIES["halimede_operator_reconcile_seconds_bucket"] == OF_TARGET | {"le"}


@pytest.mark.parametrize("rule", rules("alert"), ids=lambda rule: rule["alert"])
def test_an_alert_reads_what_is_exported_and_shows_labels_that_it_has(rule: Any) -> None:
    found = labels_of(rule["expr"], SERIES)
    shown = {label for text in rule["annotations"].values() for label in re.findall(r"\$labels\.(\w+)", text)}
    assert shown <= found


def expressions(dashboard: Any) -> Iterator[tuple[str, str, str]]:
    """Panel, legend ("" in a table) and expression."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            text = re.sub(r"\[\$__rate_interval\]", "[1m]", target["expr"])
            yield panel["title"], target.get("legendFormat", ""), text


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_a_dashboard_reads_what_is_exported_and_its_legends_have_labels(path: Any) -> None:
    dashboard = json.loads(path.read_text())
    for panel, legend, text in expressions(dashboard):
        assert set(re.findall(r"{{(\w+)}}", legend)) <= labels_of(text, SERIES), f"{panel}: {legend}"
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert found is not None
            assert found[2] in labels_of(found[1], SERIES)


def rules_of_metrics_api() -> dict[str, Rule]:
    found = parse_rules(yaml.safe_load(RULES.read_text()))
    assert isinstance(found, Rules)
    return dict(found.by_metric)


CASES = [(metric, resource) for metric, rule in rules_of_metrics_api().items() for resource in rule.labels]


@pytest.mark.parametrize(("metric", "resource"), CASES, ids=str)
def test_a_rule_of_the_metrics_api_reads_what_is_exported(metric: str, resource: Resource) -> None:
    rule = rules_of_metrics_api()[metric]
    query = rule.query(resource, rule.matchers(resource, "prod", ["bert", "other"]))
    assert labels_of(query, SERIES) == {rule.labels[resource]}
    assert {*rule.labels.values(), rule.namespace_label} <= SERIES[rule.series]


@pytest.mark.parametrize("metric", sorted({goal.metric for goals in (*PRESETS.values(), IN_USE) for goal in goals}))
def test_a_presets_query_reads_what_is_exported_and_has_one_result(metric: str) -> None:
    for kind in Kind:
        assert labels_of(promql(metric, Key(kind, "prod", "bert")), SERIES) == set()


def test_every_metric_of_a_preset_is_one_of_the_metrics_api() -> None:
    assert {goal.metric for goals in PRESETS.values() for goal in goals} <= rules_of_metrics_api().keys()


def server_page() -> bytes:
    """With every kind of series: of a decoupled model with sequences, a GPU and a machine, and of a second model."""
    stats = ModelStats("m", "1", decoupled=True)
    stats.success_count = 5
    load = Load(queued=2, executing=1, sequences=SequenceCount(open=4, sequence_slots=8), in_steps=0)
    instances = [InstanceSample("m_0", "GPU-0", Busy(0, 0, 0.5))]
    models = [ModelSample(stats, load=load, instances=instances), ModelSample(ModelStats("n", "1"))]
    states = [StateSample("m", "1", ModelReadyState.READY)]
    parts = render(models, SystemSample(0.5, 1, 1), [GpuSample("GPU-0", 0.5, 1, 1, 1.0, 1.0, 1.0)], states=states)
    try:
        while True:
            next(parts)
    except StopIteration as done:
        return b"".join(done.value)


def test_the_servers_list_of_families_is_what_its_page_has() -> None:
    # The client library's parser would add _total to Triton's names of counters.
    samples = re.findall(r"^(\w+)(?:{(.*)})? ", server_page().decode(), re.MULTILINE)
    found = {name: frozenset(re.findall(r'(\w+)="', labels)) for name, labels in samples}
    listed = {
        name: frozenset(group.labels) | ({"le"} if name.endswith("_bucket") else set())
        for group in metrics.GROUPS
        for family in group.families
        for name in metrics.sample_names(family.name, family.kind)
    }
    # A histogram's own name is no series.
    assert found == {name: labels for name, labels in listed.items() if f"{name}_bucket" not in listed}


def test_the_operator_reads_the_work_of_a_pod_from_the_servers_page() -> None:
    assert read_work(server_page()) == Work(requests=5, waiting=7)


NAME = re.compile(r"(?<![\w./-])(?:halimede|nv)_[a-z0-9_]*[a-z0-9](?![\w*/.…{}-])")
OTHERS = {"halimede_version", KV_CACHE}
"""Words that look like series of the server, and a metric that models publish."""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_a_document_names_what_is_exported(path: Any) -> None:
    bases = {name.removesuffix("_bucket") for name in SERIES if name.endswith("_bucket")}
    known = SERIES.keys() | bases | rules_of_metrics_api().keys() | OTHERS
    assert set(NAME.findall(path.read_text())) <= known


@pytest.mark.parametrize("page", ["metrics.md", "scaling-metrics.md"])
def test_the_queries_of_a_page_read_what_is_exported(page: str) -> None:
    text = (REPOSITORY_ROOT / "docs" / "pages" / page).read_text()
    for block in re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for query in re.split(r"\n(?=\S)", block.strip()):
            assert labels_of(query, SERIES)


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("halimede_queued_requests", "nobody has the series halimede_queued_requests"),
        ("sum by (pod) (rate(halimede_worker_restarts[5m]))", "nobody has the series halimede_worker_restarts"),
        ('up{model="a"}', "up has no label model"),
        ("sum by (reason) (nv_inference_request_success)", "sum has no label reason"),
        ("sum(up) without (version)", "sum has no label version"),
        ("histogram_quantile(0.9, sum by (pod) (rate(halimede_request_duration_seconds_bucket[1m])))", "no label le"),
        ("sum by (pod) (up) / sum by (job) (up)", "the sides of / never match"),
        ("up / on (model) up", "the left side of / has no label model"),
        ('{__name__=~"halimede_(queue|busy)_requests"}', "nobody has the series halimede_busy_requests"),
        ('label_replace(up, "a", "$1", "version", "(.*)")', "label_replace has no label version"),
        ("halimede_parked_instances or nv_gpu_power_usage{model=~'a'}", "is not understood"),
        ("sum(up", ") is missing before"),
        ("2 * 3", "2 is no vector"),
    ],
)
def test_an_expression_that_reads_nothing_is_found(expression: str, problem: str) -> None:
    with pytest.raises(Wrong, match=re.escape(problem)):
        labels_of(expression, SERIES)
