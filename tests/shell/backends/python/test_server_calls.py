"""Calls of models to the server: metrics, load and unload, log lines."""

import gc

import pytest

from halimede.backends.python.utils import module
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.logger import Logger
from halimede.backends.python.utils.metrics import MetricFamily, MetricKind
from halimede.backends.python.utils.models import get_model_dir, is_model_ready, load_model, unload_model
from halimede.backends.python.utils.session import Session
from halimede.backends.service_calls import (
    DeleteMetricFamily,
    IsModelReady,
    LoadModel,
    MetricValue,
    NewMetric,
    NewMetricFamily,
    UnloadModel,
)
from halimede.core.types import ErrorCode, InferenceError
from support.python_models import FakeHost, asked, body, runner_of

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


@pytest.fixture
def host() -> FakeHost:
    host = FakeHost()
    module.install(Session(host, "/models/m/1", False, ("OUT",)))
    return host


def test_a_counter_counts_a_gauge_is_set_and_a_histogram_observes(host):
    family = MetricFamily("requests", "how many", COUNTER)
    counter = family.Metric(labels={"kind": "a"})
    gauges = MetricFamily(name="level", description="how high", kind=MetricFamily.GAUGE)
    gauge = gauges.Metric()
    histograms = MetricFamily("sizes", "how large", HISTOGRAM)
    histogram = histograms.Metric(None, [1, 2.5, float("inf")])
    assert host.calls == [
        NewMetricFamily("requests", "how many", "COUNTER"),
        NewMetric(1, {"kind": "a"}, []),
        NewMetricFamily("level", "how high", "GAUGE"),
        NewMetric(3, {}, []),
        NewMetricFamily("sizes", "how large", "HISTOGRAM"),
        NewMetric(5, {}, [1, 2.5]),
    ]
    counter.increment(2)
    counter.increment(0.5)
    gauge.increment(-1)
    gauge.set(True)
    histogram.observe(3)
    assert host.updates == [
        (2, "increment", 2.0),
        (2, "increment", 0.5),
        (4, "increment", -1.0),
        (4, "set", 1.0),
        (6, "observe", 3.0),
    ]
    host.results["metric_value"] = 2.5
    assert counter.value() == 2.5
    assert host.calls[-1] == MetricValue(2)


@pytest.mark.parametrize(
    ("kind", "operation", "arguments", "text"),
    [
        (COUNTER, "increment", (-1,), "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be"),
        (COUNTER, "increment", (float("nan"),), "incremented monotonically by non-negative values, not nan."),
        (COUNTER, "set", (1,), "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        (COUNTER, "observe", (1,), "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe"),
        (GAUGE, "observe", (1,), "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
        (HISTOGRAM, "increment", (1,), "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Increment"),
        (
            HISTOGRAM,
            "value",
            (),
            "Failed to get metric value: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
        ),
    ],
)
def test_metric_refuses_operations_of_other_kinds(host, kind, operation, arguments, text):
    family = MetricFamily("f", "", kind)
    metric = family.Metric(buckets=[1.0] if kind is HISTOGRAM else None)
    with pytest.raises(TritonModelException) as caught:
        getattr(metric, operation)(*arguments)
    assert text in str(caught.value)
    assert host.updates == []


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (COUNTER, {"labels": "x"}, "Labels must be a dictionary."),
        (COUNTER, {"labels": {"a": 1}}, "Labels must be strings: str 'a' is int."),
        (COUNTER, {"buckets": [1]}, "Unexpected buckets found."),
        (HISTOGRAM, {}, "Missing required buckets."),
        (HISTOGRAM, {"buckets": (1, 2)}, "Buckets must be a list."),
        (HISTOGRAM, {"buckets": [2, 1]}, "Buckets must ascend, not [2.0, 1.0]."),
        (HISTOGRAM, {"buckets": [float("nan")]}, "Buckets must ascend, not [nan]."),
    ],
)
def test_a_metrics_arguments_are_checked(host, kind, arguments, text):
    with pytest.raises(TritonModelException) as caught:
        MetricFamily("f", "", kind).Metric(**arguments)
    assert str(caught.value) == "Failed to create metric. " + text


@pytest.mark.parametrize("arguments", [("f", "", 0), (1, "", COUNTER), ("f", None, COUNTER), ("f",)])
def test_a_familys_arguments_are_checked(host, arguments):
    with pytest.raises(TypeError):
        MetricFamily(*arguments)
    assert host.calls == []


def test_update_requires_a_number(host):
    family = MetricFamily("f", "", GAUGE)
    gauge = family.Metric()
    for wrong in ("1", None, [1]):
        with pytest.raises(TypeError, match="'value' must be float"):
            gauge.set(wrong)


def test_servers_refusal_of_a_family_is_raised(host):
    host.results["metric_family_new"] = InferenceError(ErrorCode.INVALID_ARG, "the name is taken")
    with pytest.raises(TritonModelException, match=r"^Error when creating MetricFamily: the name is taken$"):
        MetricFamily("f", "", COUNTER)
    gc.collect()
    assert [call.NAME for call in host.calls] == ["metric_family_new"]


def test_metrics_live_as_long_as_the_object_of_their_family(host):
    family = MetricFamily("f", "", COUNTER)
    family.Metric({"a": "1"}).increment(1)
    metric = family.Metric()
    gc.collect()
    MetricFamily("g", "", COUNTER)
    assert "metric_family_delete" not in [call.NAME for call in host.calls[:-1]]
    del family
    with pytest.raises(TritonModelException, match="corresponding 'MetricFamily' has been deleted"):
        metric.increment(1)
    assert DeleteMetricFamily(1) not in host.calls
    MetricFamily("h", "", COUNTER)
    assert DeleteMetricFamily(1) in host.calls


def test_family_dropped_in_a_batch_is_deleted_at_its_end(tmp_path):
    host = FakeHost()
    code = body(
        """
        family = pb.MetricFamily("f", "", pb.MetricFamily.COUNTER)
        family.Metric().increment(1)
        del family
        return [pb.InferenceResponse([])]
        """
    )
    runner_of(tmp_path, code, host).execute([asked()])
    assert [call.NAME for call in host.calls] == ["metric_family_new", "metric_new", "metric_family_delete"]


def test_failed_deletion_of_a_family_does_not_fail_the_batch(tmp_path):
    host = FakeHost(results={"metric_family_delete": InferenceError(ErrorCode.UNAVAILABLE, "busy")})
    code = body('pb.MetricFamily("f", "", pb.MetricFamily.COUNTER)\nreturn [pb.InferenceResponse([])]')
    [reply] = runner_of(tmp_path, code, host).execute([asked()])
    assert reply.outputs == []
    assert "the removal of a metric family failed" in host.logs[0][1]


def test_models_are_loaded_unloaded_and_checked_for_readiness(host):
    load_model("a")
    load_model("b", config="{}", files={"file:1/model.onnx": b"\0\xff"})
    unload_model(model_name="a", unload_dependents=True)
    host.results["is_model_ready"] = True
    assert is_model_ready("b") is True
    assert is_model_ready("b", "2") is True
    assert host.calls == [
        LoadModel("a", "", {}),
        LoadModel("b", "{}", {"file:1/model.onnx": b"\0\xff"}),
        UnloadModel("a", True),
        IsModelReady("b", ""),
        IsModelReady("b", "2"),
    ]
    assert get_model_dir() == "/models/m/1"


def test_servers_refusal_of_a_load_is_raised(host):
    host.results["load_model"] = InferenceError(ErrorCode.NOT_FOUND, "failed to load 'x'")
    with pytest.raises(TritonModelException, match=r"^Failed to load model: failed to load 'x'$"):
        load_model("x")


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (load_model, (1,)),
        (load_model, ("a", None)),
        (load_model, ("a", "", ["x"])),
        (load_model, ("a", "", {"x": 1})),
        (unload_model, (None,)),
        (unload_model, ("a", "yes")),
        (is_model_ready, ("a", 1)),
    ],
)
def test_arguments_about_models_are_checked(host, function, arguments):
    with pytest.raises(TypeError):
        function(*arguments)
    assert host.calls == []


def test_lines_reach_the_servers_log_at_their_level(host):
    Logger.log("a")
    Logger.log("b", Logger.VERBOSE)
    Logger.log(message="c", level=Logger.LogLevel.ERROR)
    Logger.log_info("d")
    Logger.log_warn("e")
    Logger.log_error("f")
    Logger.log_verbose("g")
    assert host.logs == [
        ("INFO", "a"), ("VERBOSE", "b"), ("ERROR", "c"), ("INFO", "d"), ("WARNING", "e"), ("ERROR", "f"), ("VERBOSE", "g"),
    ]  # fmt: skip
    for wrong in (lambda: Logger.log("x", 1), lambda: Logger.log_info(5)):
        with pytest.raises(TypeError):
            wrong()
