from collections.abc import Iterable, Sequence

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from halimede.core.hangs import ProcessKind
from halimede.core.observe.busy import Busy, BusyTime
from halimede.core.observe.load import Load
from halimede.core.observe.metrics_page import MODELS_PER_STEP, render
from halimede.core.observe.samples import GpuSample, InstanceSample, ModelSample, StateSample, SystemSample
from halimede.core.observe.stats import BUCKET_EDGES_NS, ModelStats
from halimede.core.types import ModelReadyState
from halimede.core.types.statistics import FailureReason, SequenceCount

MS = 1_000_000

# Names, types and help texts as the clients and dashboards of Triton know them.
COUNTERS = {
    "nv_inference_request_success": "Number of successful inference requests, all batch sizes",
    "nv_inference_request_failure": "Number of failed inference requests, all batch sizes",
    "nv_inference_count": "Number of inferences performed (does not include cached requests)",
    "nv_inference_exec_count": "Number of model executions performed (does not include cached requests)",
    "nv_inference_request_duration_us": "Cumulative inference request duration in microseconds (includes cached requests)",
    "nv_inference_queue_duration_us": "Cumulative inference queuing duration in microseconds (includes cached requests)",
    "nv_inference_compute_input_duration_us": "Cumulative compute input duration in microseconds (does not include cached requests)",
    "nv_inference_compute_infer_duration_us": "Cumulative compute inference duration in microseconds (does not include cached requests)",
    "nv_inference_compute_output_duration_us": "Cumulative inference compute output duration in microseconds (does not include cached requests)",
    "nv_energy_consumption": "GPU energy consumption in joules since the Triton Server started",
}
GAUGES = {
    "nv_inference_pending_request_count": "Instantaneous number of pending requests awaiting execution per-model.",
    "nv_model_load_duration_secs": "Model load time in seconds",
    "nv_gpu_utilization": "GPU utilization rate [0.0 - 1.0)",
    "nv_gpu_memory_total_bytes": "GPU total memory, in bytes",
    "nv_gpu_memory_used_bytes": "GPU used memory, in bytes",
    "nv_gpu_power_usage": "GPU power usage in watts",
    "nv_gpu_power_limit": "GPU power management limit in watts",
    "nv_cpu_utilization": "CPU utilization rate [0.0 - 1.0]",
    "nv_cpu_memory_total_bytes": "CPU total memory (RAM), in bytes",
    "nv_cpu_memory_used_bytes": "CPU used memory (RAM), in bytes",
}
TRITON_FAMILIES = {
    **{name: ("counter", text) for name, text in COUNTERS.items()},
    **{name: ("gauge", text) for name, text in GAUGES.items()},
}


def page(
    models: Iterable[ModelSample], system: SystemSample | None = None, gpus: Sequence[GpuSample] = (), **options: object
) -> bytes:
    """All steps at once."""
    steps = render(models, system, gpus, **options)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return b"".join(stop.value)


def parse(body: bytes) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def values(body: bytes, family: str) -> dict[tuple[tuple[str, str], ...], float]:
    """The samples of a family by their labels, sorted."""
    return {tuple(sorted(sample.labels.items())): sample.value for sample in parse(body)[family].samples}


def test_every_family_is_announced_before_there_is_a_model():
    families = parse(page([]))

    announced = {name: (family.type, family.documentation) for name, family in families.items()}
    assert {name: announced[name] for name in TRITON_FAMILIES} == TRITON_FAMILIES
    assert {name: kind for name, (kind, _) in announced.items() if name not in TRITON_FAMILIES} == {
        "halimede_executing_requests": "gauge",
        "halimede_ensemble_requests": "gauge",
        "halimede_queue_requests": "gauge",
        "halimede_queue_oldest_request_seconds": "gauge",
        "halimede_request_duration_seconds": "histogram",
        "halimede_queue_duration_seconds": "histogram",
        "halimede_worker_restarts": "counter",
        "halimede_parked_instances": "gauge",
        "halimede_unstartable_instances": "gauge",
        "halimede_sequences_open": "gauge",
        "halimede_sequence_slots": "gauge",
        "halimede_instance_busy_seconds": "counter",
        "halimede_instance_busy_ratio": "gauge",
        "halimede_model_version_state": "gauge",
        "halimede_log_dropped_lines": "counter",
        "halimede_hung_processes": "counter",
    }
    of_server = ["halimede_log_dropped_lines", "halimede_hung_processes"]
    assert [name for name, family in families.items() if family.samples] == of_server


def test_a_model_has_every_series_from_the_moment_it_is_loaded():
    idle = InstanceSample("m_0", "cpu", BusyTime(0).value(0, 0))
    body = page([ModelSample(ModelStats("m", "1"), load=Load(sequences=SequenceCount(0, 0)), instances=[idle])])

    families = parse(body)
    del families["halimede_model_version_state"]
    assert families.pop("halimede_ensemble_requests").samples == []
    not_of_models = ("nv_gpu", "nv_cpu", "nv_energy")
    assert [
        name for name, family in families.items() if not family.samples and not name.startswith(not_of_models)
    ] == []
    assert {sample.value for family in families.values() for sample in family.samples} == {0}


def test_requests_in_the_steps_of_an_ensemble_do_not_count_as_executing():
    body = page([ModelSample(ModelStats("pipeline", "1"), load=Load(2, in_steps=3))])

    key = (("model", "pipeline"), ("version", "1"))
    assert values(body, "halimede_ensemble_requests") == {key: 3}
    assert values(body, "halimede_executing_requests")[key] == 0
    assert values(body, "halimede_queue_requests")[key] == 2


def test_the_failure_counter_has_its_four_reasons_from_the_start():
    stats = ModelStats("m", "1")
    stats.record_failure(FailureReason.CANCELED, 5, 0)

    lines = page([ModelSample(stats)]).decode().splitlines()
    assert [line for line in lines if line.startswith("nv_inference_request_failure")] == [
        'nv_inference_request_failure{model="m",reason="REJECTED",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="CANCELED",version="1"} 1',
        'nv_inference_request_failure{model="m",reason="BACKEND",version="1"} 0',
        'nv_inference_request_failure{model="m",reason="OTHER",version="1"} 0',
    ]


def test_counters_follow_the_statistics_in_whole_microseconds():
    stats = ModelStats("m", "1")
    stats.record_execution(5, 1 * MS, 20 * MS, 2 * MS)
    stats.record_success(2, 30 * MS, 7 * MS, 1 * MS, 20 * MS, 2 * MS, 5)
    stats.record_success(3, 25 * MS + 999, 2 * MS, 1 * MS, 20 * MS, 2 * MS, 5)
    stats.worker_restarts = 6
    load = Load(4, 3, 1_500 * MS, parked=2, unstartable=1, sequences=SequenceCount(5, 8))
    body = page([ModelSample(stats, load=load, load_seconds=0.25)])

    of_model = {
        name: values(body, name)[(("model", "m"), ("version", "1"))]
        for name in (
            *TRITON_FAMILIES,
            "halimede_executing_requests",
            "halimede_queue_requests",
            "halimede_queue_oldest_request_seconds",
            "halimede_worker_restarts",
            "halimede_parked_instances",
            "halimede_unstartable_instances",
            "halimede_sequences_open",
            "halimede_sequence_slots",
        )
        if not name.startswith(("nv_gpu", "nv_cpu", "nv_energy", "nv_inference_request_failure"))
    }
    assert of_model == {
        "nv_inference_request_success": 2,
        "nv_inference_count": 5,
        "nv_inference_exec_count": 1,
        "nv_inference_request_duration_us": 55_000,
        "nv_inference_queue_duration_us": 9_000,
        "nv_inference_compute_input_duration_us": 2_000,
        "nv_inference_compute_infer_duration_us": 40_000,
        "nv_inference_compute_output_duration_us": 4_000,
        "nv_inference_pending_request_count": 4,
        "nv_model_load_duration_secs": 0.25,
        "halimede_executing_requests": 3,
        "halimede_queue_requests": 4,
        "halimede_queue_oldest_request_seconds": 1.5,
        "halimede_worker_restarts": 6,
        "halimede_parked_instances": 2,
        "halimede_unstartable_instances": 1,
        "halimede_sequences_open": 5,
        "halimede_sequence_slots": 8,
    }


def test_a_version_is_in_one_state():
    names = ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
    states = [StateSample("m", str(version), ModelReadyState(name)) for version, name in enumerate(names)]
    found = values(page([], states=states), "halimede_model_version_state")

    assert found == {
        (("model", "m"), ("state", name), ("version", str(version))): float(name == names[version])
        for version in range(len(names))
        for name in names
    }


def test_histograms_are_in_seconds():
    stats = ModelStats("m", "1")
    stats.record_success(1, 3 * MS, 40_000 * MS, 0, 0, 0, 0)
    stats.record_success(1, 7 * MS, 0, 0, 0, 0, 0)
    families = parse(page([ModelSample(stats)]))

    request, queue = (
        {
            (one.name.removeprefix(name), one.labels.get("le")): one.value
            for one in families[name].samples
            if one.labels.get("outcome", "success") == "success"
        }
        for name in ("halimede_request_duration_seconds", "halimede_queue_duration_seconds")
    )
    assert len(request) == len(BUCKET_EDGES_NS) + 3
    assert [request["_bucket", le] for le in ("0.0025", "0.005", "0.01", "+Inf")] == [0, 1, 2, 2]
    assert (request["_sum", None], request["_count", None]) == (0.01, 2)
    assert [queue["_bucket", le] for le in ("0.0001", "30", "+Inf")] == [1, 1, 2]
    assert (queue["_sum", None], queue["_count", None]) == (40, 2)


def test_failed_requests_have_times_in_the_queue_by_outcome():
    stats = ModelStats("m", "1")
    stats.record_success(1, 9 * MS, 4 * MS, 0, 0, 0, 0)
    stats.record_failure(FailureReason.EXPIRED, 2_000 * MS, 2_000 * MS)
    stats.record_failure(FailureReason.REJECTED, 0, 0)
    stats.record_failure(FailureReason.CANCELED, 700 * MS, 500 * MS)
    stats.record_failure(FailureReason.BACKEND, 9 * MS, 3 * MS)
    stats.record_failure(FailureReason.OTHER, 9 * MS, 5 * MS)
    body = page([ModelSample(stats)])

    samples = parse(body)["halimede_queue_duration_seconds"].samples
    totals = {
        (one.labels["outcome"], one.name.rpartition("_")[2]): one.value for one in samples if "le" not in one.labels
    }
    assert totals == {
        ("success", "count"): 1,
        ("success", "sum"): 0.004,
        ("error", "count"): 2,
        ("error", "sum"): 0.008,
        ("timeout", "count"): 1,
        ("timeout", "sum"): 2,
        ("rejected", "count"): 1,
        ("rejected", "sum"): 0,
        ("cancelled", "count"): 1,
        ("cancelled", "sum"): 0.5,
    }
    assert {one.labels["outcome"]: one.value for one in samples if one.labels.get("le") == "1"} == {
        "success": 1,
        "error": 2,
        "timeout": 0,
        "rejected": 1,
        "cancelled": 1,
    }
    unused = parse(page([ModelSample(ModelStats("m", "1"))]))["halimede_queue_duration_seconds"].samples
    assert [(one.name.rpartition("_")[2], one.value) for one in unused if one.labels["outcome"] == "timeout"] == [
        ("bucket", 0),
        ("sum", 0),
        ("count", 0),
    ]
    assert sum(values(body, "nv_inference_request_failure").values()) == 5


def test_ensembles_count_no_waits_of_their_own():
    stats = ModelStats("m", "1", has_queue=False)
    stats.record_failure(FailureReason.EXPIRED, 5, 5)
    stats.record_success(1, 9, 4, 0, 0, 0, 0)

    assert parse(page([ModelSample(stats)]))["halimede_queue_duration_seconds"].samples == []


def test_each_instance_has_its_busy_time_and_device():
    instances = [InstanceSample("m_0", "GPU-7", Busy(0, 2_500 * MS, 0.25)), InstanceSample("m_1", "cpu", Busy(1, 0, 0))]
    body = page([ModelSample(ModelStats("m", "1"), {"team": "a"}, instances=instances)])

    labels = [
        (("_team", "a"), ("device", device), ("instance", name), ("model", "m"), ("version", "1"))
        for name, device in (("m_0", "GPU-7"), ("m_1", "cpu"))
    ]
    assert values(body, "halimede_instance_busy_seconds") == dict(zip(labels, (2.5, 0), strict=True))
    assert values(body, "halimede_instance_busy_ratio") == dict(zip(labels, (0.25, 0), strict=True))


def test_decoupled_models_have_a_histogram_of_the_time_to_their_first_answer():
    stats = ModelStats("m", "1", decoupled=True)
    stats.record_first_response(90 * MS)
    stats.record_first_response(1_000 * MS)
    families = parse(page([ModelSample(stats), ModelSample(ModelStats("plain", "1"))]))

    family = families["nv_inference_first_response_histogram_ms"]
    samples = {(one.name.removeprefix(family.name), one.labels.get("le")): one.value for one in family.samples}
    assert {one.labels["model"] for one in family.samples} == {"m"}
    assert [samples["_bucket", le] for le in ("0.1", "50", "100", "1000", "30000", "+Inf")] == [0, 0, 1, 2, 2, 2]
    assert (samples["_sum", None], samples["_count", None]) == (1_090, 2)


def test_metrics_of_requests_name_the_gpu_that_a_model_is_on():
    stats = ModelStats("m", "1", decoupled=True)
    gpu = InstanceSample("m_0", "GPU-1", BusyTime(0).value(0, 0))
    body = page([ModelSample(stats, {"team": "vision"}, instances=[gpu], gpu_uuid="GPU-1")])

    lines = body.decode().splitlines()
    assert 'nv_inference_count{_team="vision",gpu_uuid="GPU-1",model="m",version="1"} 0' in lines
    failed = 'nv_inference_request_failure{_team="vision",gpu_uuid="GPU-1",model="m",reason="REJECTED",version="1"} 0'
    assert failed in lines
    named = {line.partition("{")[0] for line in lines if 'gpu_uuid="GPU-1"' in line}
    assert named == {line.partition("{")[0] for line in lines if line.startswith("nv_inference_")}


def test_metric_tags_become_labels_with_an_underscore_in_front():
    tags = {"team": 'a "b"', "cost-centre": "7", "version": "tag", "__own": "x"}
    body = page([ModelSample(ModelStats("m", "1"), tags)])

    line = next(line for line in body.decode().splitlines() if line.startswith("nv_inference_count{"))
    assert line == (
        'nv_inference_count{_cost_centre="7",_own="x",_team="a \\"b\\"",_version="tag",model="m",version="1"} 0'
    )


def test_unknown_gpu_values_have_no_series():
    whole = GpuSample("GPU-1", 0.75, 80 << 30, 5 << 30, 210.5, 700.0, 12.25)
    mig = GpuSample("GPU-2", None, 40 << 30, 1 << 30, None, None, None)
    body = page([], None, [whole, mig])

    assert {name: values(body, name) for name in TRITON_FAMILIES if name.startswith(("nv_gpu", "nv_energy"))} == {
        "nv_gpu_utilization": {(("gpu_uuid", "GPU-1"),): 0.75},
        "nv_gpu_memory_total_bytes": {(("gpu_uuid", "GPU-1"),): 80 << 30, (("gpu_uuid", "GPU-2"),): 40 << 30},
        "nv_gpu_memory_used_bytes": {(("gpu_uuid", "GPU-1"),): 5 << 30, (("gpu_uuid", "GPU-2"),): 1 << 30},
        "nv_gpu_power_usage": {(("gpu_uuid", "GPU-1"),): 210.5},
        "nv_gpu_power_limit": {(("gpu_uuid", "GPU-1"),): 700},
        "nv_energy_consumption": {(("gpu_uuid", "GPU-1"),): 12.25},
    }


def test_the_first_sample_of_the_machine_has_no_utilization():
    body = page([], SystemSample(None, 1000, 400))

    assert {name: values(body, name) for name in TRITON_FAMILIES if name.startswith("nv_cpu")} == {
        "nv_cpu_utilization": {},
        "nv_cpu_memory_total_bytes": {(): 1000},
        "nv_cpu_memory_used_bytes": {(): 400},
    }


def test_no_series_is_repeated_for_any_model_names():
    models = [ModelSample(ModelStats(name, version)) for name in ("a", "b", 'a"') for version in ("1", "2")]
    lines = page(models, SystemSample(0.5, 2, 1)).decode().splitlines()

    series = [line.rsplit(" ", 1)[0] for line in lines if not line.startswith("#")]
    assert len(series) == len(set(series))
    help_lines = [line.split(" ")[2] for line in lines if line.startswith("# HELP")]
    assert len(help_lines) == len(set(help_lines))


def test_dropped_log_lines_are_counted():
    assert values(page([], dropped_log_lines=7), "halimede_log_dropped_lines") == {(): 7}


def test_processes_that_hung_are_counted_by_what_they_are_for():
    counted = values(page([], hung_processes={ProcessKind.WORKER: 3}), "halimede_hung_processes")
    assert {kind.value: counted[(("process", kind.value),)] for kind in ProcessKind} == {
        "frontend": 0,
        "worker": 3,
        "zygote": 0,
    }


def test_without_latencies_only_duration_counters_are_missing():
    models = [ModelSample(ModelStats("m", "1"))]
    gone = parse(page(models)).keys() - parse(page(models, latencies=False)).keys()
    assert gone == {name for name in TRITON_FAMILIES if name.endswith("_duration_us")}
    assert len(gone) == 5


def test_the_histogram_of_first_responses_can_be_left_out():
    models = [ModelSample(ModelStats("m", "1", decoupled=True))]
    gone = parse(page(models)).keys() - parse(page(models, first_responses=False)).keys()
    assert gone == {"nv_inference_first_response_histogram_ms"}


def test_first_responses_have_the_edges_of_triton():
    family = parse(page([ModelSample(ModelStats("m", "1", decoupled=True))]))[
        "nv_inference_first_response_histogram_ms"
    ]
    assert {"100", "500", "2000", "5000", "+Inf"} <= {one.labels.get("le") for one in family.samples}


def test_values_of_one_model_are_rendered_in_one_step():
    """Requests are recorded between two steps: each model's counter and histogram must still agree."""
    statistics = [ModelStats(f"m{number}", "1") for number in range(5 * MODELS_PER_STEP)]
    steps = render((ModelSample(each) for each in statistics), None, [])
    count = 0
    body = b""
    while not body:
        try:
            next(steps)
        except StopIteration as stop:
            body = b"".join(stop.value)
        count += 1
        for each in statistics:
            each.record_success(1, 3 * MS, 0, 0, 0, 0, 0)

    assert count >= 5
    success = values(body, "nv_inference_request_success")
    assert set(success.values()) >= {0, 1, 2, 3, 4}
    counted = {
        tuple(sorted(one.labels.items())): one.value
        for one in parse(body)["halimede_request_duration_seconds"].samples
        if one.name.endswith("_count")
    }
    assert counted == success


def test_hostile_names_and_tags_stay_inside_their_labels():
    """Text that a repository's owner writes in a tag cannot become a line or a label of its own."""
    hostile = 'x"} 1\nnv_fake{a="\\'
    body = page([ModelSample(ModelStats(hostile, "1"), {hostile: hostile})])

    families = parse(body)
    assert families.keys() == parse(page([ModelSample(ModelStats("m", "1"))])).keys()
    (sample,) = families["nv_inference_count"].samples
    assert sample.labels["model"] == hostile
    assert [value for name, value in sample.labels.items() if name not in {"model", "version"}] == [hostile]
