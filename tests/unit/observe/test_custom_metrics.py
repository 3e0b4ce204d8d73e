from collections.abc import Callable, Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from halimede.core.observe import custom_metrics, metrics_page
from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.core.observe.metrics import PAGE_NAMES, ModelSample
from halimede.core.observe.stats import ModelStats
from halimede.core.types import ErrorCode, InferenceError
from support.examples import examples
from support.refusals import error_of

A, B = "m:1", "other:1"


def page(custom: CustomMetrics) -> str:
    """The part of a scrape that the registry adds, all steps at once."""
    steps = custom.render()
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return b"".join(stop.value).decode()


def parse(custom: CustomMetrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(page(custom))}


def counter(custom: CustomMetrics, owner: str = A, name: str = "c", labels: Mapping[str, str] | None = None) -> int:
    """Declare a family of this name and a counter in it."""
    return custom.new_metric(owner, custom.new_family(owner, name, "help", "COUNTER"), labels or {}, None)


def refusal(call: Callable[[], object]) -> tuple[ErrorCode, str]:
    error = error_of(call)
    return error.code, error.message


def test_a_model_counts_measures_and_observes():
    custom = CustomMetrics()
    jobs = custom.new_metric(A, custom.new_family(A, "jobs_total", "Jobs", "COUNTER"), {"b": "2", "a": "1"}, None)
    heat = custom.new_metric(A, custom.new_family(A, "heat", "Heat", "GAUGE"), {}, None)
    wait = custom.new_metric(A, custom.new_family(A, "wait", "Wait", "HISTOGRAM"), {"a": "1"}, [0.5, 2])
    custom.update(A, jobs, "increment", 1)
    custom.update(A, jobs, "increment", 2)
    custom.update(A, heat, "set", 20.5)
    custom.update(A, heat, "increment", -1)
    for seconds in (0.5, 1, 7):
        custom.update(A, wait, "observe", seconds)

    assert (custom.value(A, jobs), custom.value(A, heat)) == (3, 19.5)
    assert page(custom) == (
        "# HELP jobs_total Jobs\n"
        "# TYPE jobs_total counter\n"
        'jobs_total{a="1",b="2"} 3\n'
        "# HELP heat Heat\n"
        "# TYPE heat gauge\n"
        "heat 19.5\n"
        "# HELP wait Wait\n"
        "# TYPE wait histogram\n"
        'wait_bucket{a="1",le="0.5"} 1\n'
        'wait_bucket{a="1",le="2"} 2\n'
        'wait_bucket{a="1",le="+Inf"} 3\n'
        'wait_sum{a="1"} 8.5\n'
        'wait_count{a="1"} 3\n'
    )


def test_restarted_instance_continues_its_counts():
    custom = CustomMetrics()
    before = counter(custom, labels={"x": "1"})
    custom.update(A, before, "increment", 5)
    after = counter(custom, labels={"x": "1"})
    custom.update(A, after, "increment", 1)

    assert after == before
    assert custom.value(A, after) == 6


def test_models_share_a_series_until_the_last_is_unloaded():
    custom = CustomMetrics()
    first, second = counter(custom, A), counter(custom, B)
    custom.update(A, first, "increment", 1)
    custom.update(B, second, "increment", 2)
    assert page(custom).count("# TYPE c counter") == 1
    assert custom.value(A, first) == custom.value(B, second) == 3

    custom.forget(A)
    assert custom.value(B, second) == 3
    assert "c 3\n" in page(custom)

    custom.forget(B)
    assert page(custom) == ""
    assert repr(custom) == "<CustomMetrics families=0 series=0 owners=0>"


def test_family_declared_twice_must_be_deleted_twice():
    custom = CustomMetrics()
    metric = counter(custom)
    family = custom.new_family(A, "c", "help", "COUNTER")
    assert counter(custom) == metric
    custom.update(A, metric, "increment", 1)

    for _ in range(2):
        custom.delete_family(A, family)
        assert custom.value(A, metric) == 1
    custom.delete_family(A, family)
    assert "Metric has been invalidated" in refusal(lambda: custom.value(A, metric))[1]
    assert page(custom) == ""


def test_deleted_family_removes_only_its_owners_metrics():
    custom = CustomMetrics()
    family = custom.new_family(A, "c", "help", "COUNTER")
    first = custom.new_metric(A, family, {"of": "a"}, None)
    counter(custom, B, labels={"of": "b"})
    custom.delete_family(A, family)

    assert page(custom).splitlines()[2:] == ['c{of="b"} 0']
    for use in (
        lambda: custom.update(A, first, "increment", 1),
        lambda: custom.value(A, first),
        lambda: custom.new_metric(A, family, {}, None),
        lambda: custom.delete_family(A, family),
    ):
        assert refusal(use)[0] is ErrorCode.INVALID_ARG


def test_name_can_be_reused_after_its_last_owner():
    custom = CustomMetrics()
    custom.new_family(A, "f", "", "HISTOGRAM")
    custom.forget(A)
    gauge = custom.new_family(B, "f", "", "GAUGE")
    custom.new_metric(B, gauge, {}, None)
    custom.new_metric(B, custom.new_family(B, "f_count", "", "COUNTER"), {}, None)
    assert {"f 0", "f_count 0"} <= set(page(custom).splitlines())


def test_ids_are_valid_only_for_their_owner():
    custom = CustomMetrics()
    metric = counter(custom, A)
    family = custom.new_family(A, "c", "help", "COUNTER")
    assert refusal(lambda: custom.update(B, metric, "increment", 1))[0] is ErrorCode.INVALID_ARG
    assert refusal(lambda: custom.delete_family(B, family))[0] is ErrorCode.INVALID_ARG


def test_a_family_has_one_kind_and_the_first_description():
    custom = CustomMetrics()
    first = custom.new_family(A, "f", "old", "GAUGE")
    assert refusal(lambda: custom.new_family(B, "f", "old", "COUNTER")) == (
        ErrorCode.INVALID_ARG,
        "Family name already exists with different type: 'f' is a GAUGE, declared by a model that is loaded",
    )
    custom.new_family(A, "f", "new", "GAUGE")
    custom.delete_family(A, first)
    custom.new_family(B, "f", "newer", "GAUGE")
    custom.forget(A)
    assert page(custom).startswith("# HELP f old\n")


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "é", "a\n", "a" * 257, "a{x=1}"])
def test_a_name_that_prometheus_cannot_read_is_refused(name: str):
    code, text = refusal(lambda: CustomMetrics().new_family(A, name, "", "GAUGE"))
    assert code is ErrorCode.INVALID_ARG
    assert text.startswith("Invalid metric name")
    assert len(text) < 500


def test_the_servers_own_names_are_refused():
    custom = CustomMetrics()
    taken = [
        *PAGE_NAMES,
        "halimede_request_duration_seconds_bucket",
        "halimede_anything",
        "nv_inference_first_response_histogram_ms_sum",
    ]
    for name in taken:
        code, text = refusal(lambda name=name: custom.new_family(A, name, "", "COUNTER"))
        assert code is ErrorCode.INVALID_ARG
        assert text == f"Family name already exists: '{name}' is a name of the server's own metrics"
    custom.new_family(A, "nv_trt_llm_request_metrics", "", "GAUGE")
    custom.new_family(A, "vllm:time_to_first_token_seconds", "", "HISTOGRAM")


def test_two_families_never_have_series_of_one_name():
    custom = CustomMetrics()
    custom.new_family(A, "h", "", "HISTOGRAM")
    custom.new_family(A, "g_count", "", "GAUGE")
    for name, kind in (("h_bucket", "GAUGE"), ("h_sum", "COUNTER"), ("g", "HISTOGRAM")):
        assert refusal(lambda name=name, kind=kind: custom.new_family(B, name, "", kind))[1].startswith(
            "Family name already exists"
        )
    custom.new_family(B, "g", "", "COUNTER")


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ({"a-b": "x"}, "Invalid label name 'a-b'"),
        ({"": "x"}, "Invalid label name ''"),
        ({"__name__": "x"}, "Invalid label name '__name__'"),
        ({"a" * 257: "x"}, "Invalid label name"),
        ({1: "x"}, "Invalid label name '1'"),
        ({"a": 1}, "the value of label 'a' is of type int; expected text"),
        ({"a": "x" * 1_024}, "the labels of a metric may have 1024 bytes"),
        ({"a": "\ud800"}, "the labels of a metric may have 1024 bytes of UTF-8"),
        (["a"], "Failed to create metric. Labels must be a dictionary."),
        ({f"l{i}": "x" for i in range(300)}, "the labels of a metric may have 1024 bytes"),
    ],
)
def test_labels_that_prometheus_cannot_read_are_refused(labels: dict[str, str], expected: str):
    custom = CustomMetrics()
    family = custom.new_family(A, "f", "", "GAUGE")
    code, text = refusal(lambda: custom.new_metric(A, family, labels, None))
    assert (code, text.startswith(expected)) == (ErrorCode.INVALID_ARG, True), text


@pytest.mark.parametrize(
    ("kind", "operation", "value", "code", "expected"),
    [
        ("COUNTER", "set", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_COUNTER does not support Set"),
        ("COUNTER", "observe", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_COUNTER does not support Observe"),
        ("GAUGE", "observe", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_GAUGE does not support Observe"),
        ("HISTOGRAM", "set", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Set"),
        ("HISTOGRAM", "increment", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support"),
        ("GAUGE", "format_disk", 1, ErrorCode.UNSUPPORTED, "TRITONSERVER_METRIC_KIND_GAUGE does not support"),
        ("COUNTER", "increment", -1, ErrorCode.INVALID_ARG, "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented"),
        *(
            (kind, operation, bad, ErrorCode.INVALID_ARG, "metric 'f': ")
            for kind, operation in (("COUNTER", "increment"), ("GAUGE", "set"), ("HISTOGRAM", "observe"))
            for bad in (float("nan"), float("inf"), "1", None, True, 10**400)
        ),
    ],
)
def test_invalid_updates_change_nothing(kind: str, operation: str, value: float, code: ErrorCode, expected: str):
    custom = CustomMetrics()
    family = custom.new_family(A, "f", "", kind)
    metric = custom.new_metric(A, family, {}, [1] if kind == "HISTOGRAM" else None)
    before = page(custom)
    refused = refusal(lambda: custom.update(A, metric, operation, value))
    assert (refused[0], refused[1].startswith(expected)) == (code, True), refused
    assert page(custom) == before


def test_a_sum_never_leaves_the_range_of_numbers():
    custom = CustomMetrics()
    metric = counter(custom)
    custom.update(A, metric, "increment", 1.7e308)
    assert "leaves the range" in refusal(lambda: custom.update(A, metric, "increment", 1.7e308))[1]
    assert custom.value(A, metric) == 1.7e308


def test_histogram_has_no_single_value():
    custom = CustomMetrics()
    metric = custom.new_metric(A, custom.new_family(A, "h", "", "HISTOGRAM"), {}, [1])
    assert refusal(lambda: custom.value(A, metric)) == (
        ErrorCode.UNSUPPORTED,
        "TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
    )


@pytest.mark.parametrize(
    ("buckets", "expected"),
    [
        (None, "Failed to create metric. Missing required buckets."),
        ("12", "Failed to create metric. Buckets must be a list."),
        (7, "Failed to create metric. Buckets must be a list."),
        ([2, 1], "Bucket Boundaries must be strictly sorted"),
        ([1, 1], "Bucket Boundaries must be strictly sorted"),
        ([1, float("inf")], "bucket inf of a histogram"),
        ([float("nan")], "bucket nan of a histogram"),
        (["1"], "bucket '1' of a histogram"),
        (list(range(257)), "a histogram may have 256 buckets, 257 are given"),
    ],
)
def test_buckets_are_ascending_finite_numbers(buckets: list[float] | None, expected: str):
    custom = CustomMetrics()
    family = custom.new_family(A, "h", "", "HISTOGRAM")
    assert refusal(lambda: custom.new_metric(A, family, {}, buckets))[1].startswith(expected)


def test_a_histogram_s_buckets_are_its_own():
    custom = CustomMetrics()
    histogram, gauge = custom.new_family(A, "h", "", "HISTOGRAM"), custom.new_family(A, "g", "", "GAUGE")
    assert "Unexpected buckets found" in refusal(lambda: custom.new_metric(A, gauge, {}, [1]))[1]
    assert "Invalid label name 'le'" in refusal(lambda: custom.new_metric(A, histogram, {"le": "1"}, [1]))[1]
    assert custom.new_metric(A, gauge, {"le": "1"}, None) == custom.new_metric(A, gauge, {"le": "1"}, [])
    custom.new_metric(A, histogram, {}, [1, 2])
    assert "has other buckets already" in refusal(lambda: custom.new_metric(A, histogram, {}, [1, 3]))[1]
    # A histogram without edges is one that only counts and sums; Triton takes it.
    assert custom.new_metric(A, histogram, {"x": "1"}, []) > 0


def test_the_number_of_families_is_bounded_per_model_and_in_all():
    custom = CustomMetrics()
    for number in range(custom_metrics.MAX_FAMILIES):
        custom.new_family(f"m{number // custom_metrics.MAX_FAMILIES_OF_OWNER}", f"f{number}", "", "GAUGE")
    assert refusal(lambda: custom.new_family("m0", "f_more", "", "GAUGE")) == (
        ErrorCode.UNAVAILABLE,
        "a model may have 1000 metric families",
    )
    assert refusal(lambda: custom.new_family("other", "f_more", "", "GAUGE")) == (
        ErrorCode.UNAVAILABLE,
        "all models together may have 5000 metric families",
    )
    custom.new_family("m0", "f1", "", "GAUGE")
    custom.new_family("other", "f1", "", "GAUGE")
    custom.forget("m0")
    custom.new_family("other", "f_more", "", "GAUGE")


def test_number_of_series_including_buckets_is_bounded():
    custom = CustomMetrics()

    def fill(owner: str) -> int:
        family = custom.new_family(owner, "h", "", "HISTOGRAM")
        made = 0
        while made + 103 <= custom_metrics.MAX_SERIES_OF_OWNER:
            custom.new_metric(owner, family, {"owner": owner, "n": str(made)}, range(100))
            made += 103
        assert refusal(lambda: custom.new_metric(owner, family, {"owner": owner}, range(100))) == (
            ErrorCode.UNAVAILABLE,
            "a model may have 10000 series of metrics, of which a bucket of a histogram is one",
        )
        return made

    made = sum(fill(f"m{number}") for number in range(5))
    family = custom.new_family("last", "c", "", "GAUGE")
    for number in range(custom_metrics.MAX_SERIES - made):
        custom.new_metric("last", family, {"n": str(number)}, None)
    assert refusal(lambda: custom.new_metric("last", family, {}, None)) == (
        ErrorCode.UNAVAILABLE,
        "all models together may have 50000 series of metrics",
    )
    assert len([line for line in page(custom).splitlines() if not line.startswith("#")]) == custom_metrics.MAX_SERIES
    custom.forget("m0")
    custom.new_metric("last", family, {}, None)


def test_arguments_of_any_type_get_an_error_and_change_nothing():
    custom = CustomMetrics()
    metric = counter(custom)
    before = page(custom)
    for garbage in (None, [], {}, "1", 1.5, -1, 10**400, b"x"):
        for use in (
            lambda garbage=garbage: custom.new_family(A, garbage, "", "GAUGE"),
            lambda garbage=garbage: custom.new_family(A, "f", garbage if garbage != "1" else None, "GAUGE"),
            lambda garbage=garbage: custom.new_family(A, "f", "", garbage),
            lambda garbage=garbage: custom.new_metric(A, garbage, {}, None),
            lambda garbage=garbage: custom.update(A, garbage, "increment", 1),
            lambda garbage=garbage: custom.update(A, metric, garbage, 1),
            lambda garbage=garbage: custom.value(A, garbage),
            lambda garbage=garbage: custom.delete_family(A, garbage),
        ):
            assert len(refusal(use)[1]) < 600
    assert page(custom) == before


def test_a_description_that_is_too_long_is_refused():
    assert "at most 1024 bytes" in refusal(lambda: CustomMetrics().new_family(A, "f", "x" * 1_025, "GAUGE"))[1]
    assert "Unsupported metric kind" in refusal(lambda: CustomMetrics().new_family(A, "f", "", "SUMMARY"))[1]


def test_many_series_are_rendered_in_steps_while_models_come_and_go():
    custom = CustomMetrics()
    family = custom.new_family(A, "g", "", "GAUGE")
    for number in range(5_000):
        custom.new_metric(A, family, {"n": str(number)}, None)
    for number in range(1_000):
        custom.new_family(B, f"empty{number}", "", "GAUGE")
    steps = custom.render()
    count = 1
    for _ in steps:
        custom.forget(A)
        count += 1
    assert count >= 6


@settings(max_examples=examples(200), deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda n: n != "le"), st.text(), max_size=4
    ),
    st.text(max_size=200),
)
def test_labels_and_descriptions_are_escaped(labels: dict[str, str], description: str):
    custom = CustomMetrics()
    try:
        family = custom.new_family(A, "hostile", description, "HISTOGRAM")
        custom.update(A, custom.new_metric(A, family, labels, [1.5]), "observe", 1)
    except InferenceError:
        return
    (parsed,) = parse(custom).values()
    found = [{name: value for name, value in one.labels.items() if name != "le"} for one in parsed.samples]
    assert found == [labels] * 4
    assert [one.value for one in parsed.samples] == [1, 1, 1, 1]


def test_custom_metrics_are_at_the_end_of_the_page():
    def whole(custom: CustomMetrics | None) -> bytes:
        steps = metrics_page.render(
            [ModelSample(ModelStats("m", "1"))], None, [], custom=custom.render() if custom is not None else None
        )
        while True:
            try:
                next(steps)
            except StopIteration as stop:
                return b"".join(stop.value)

    custom = CustomMetrics()
    assert whole(custom) == whole(None)
    counter(custom)
    assert whole(custom) == whole(None) + b"# HELP c help\n# TYPE c counter\nc 0\n"
