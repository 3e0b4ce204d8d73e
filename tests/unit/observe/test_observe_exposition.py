from math import inf, isnan, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from halimede.core.observe.exposition import FamilyText, edge_texts, label_text, number_text


def test_a_family_with_two_series():
    out = FamilyText("nv_inference_count", "counter", "Number of inferences")
    out.sample(label_text({"version": "1", "model": "a"}), 3)
    out.sample(label_text({"version": "2", "model": "a"}), 0.5)

    assert out.to_bytes() == (
        b"# HELP nv_inference_count Number of inferences\n"
        b"# TYPE nv_inference_count counter\n"
        b'nv_inference_count{model="a",version="1"} 3\n'
        b'nv_inference_count{model="a",version="2"} 0.5\n'
    )


def test_a_family_is_announced_without_series_and_a_series_may_have_no_labels():
    out = FamilyText("nv_gpu_utilization", "gauge", "GPU")
    assert out.to_bytes() == b"# HELP nv_gpu_utilization GPU\n# TYPE nv_gpu_utilization gauge\n"

    out.sample("", 1.0)
    assert out.to_bytes().endswith(b"# TYPE nv_gpu_utilization gauge\nnv_gpu_utilization 1\n")


def test_a_family_may_be_taken_in_parts():
    out = FamilyText("a", "gauge", "A")
    out.sample('n="1"', 1)
    first = out.take_bytes()
    out.sample('n="2"', 2)
    assert first + out.take_bytes() == b'# HELP a A\n# TYPE a gauge\na{n="1"} 1\na{n="2"} 2\n'
    assert out.take_bytes() == b""


def test_a_histogram_is_cumulative():
    out = FamilyText("h_seconds", "histogram", "H")
    out.histogram('model="a"', edge_texts([0.1, 1.0]), [2, 0, 3], 12.5)
    out.histogram("", edge_texts([]), [4], 0)

    assert out.to_bytes().decode().splitlines()[2:] == [
        'h_seconds_bucket{model="a",le="0.1"} 2',
        'h_seconds_bucket{model="a",le="1"} 2',
        'h_seconds_bucket{model="a",le="+Inf"} 5',
        'h_seconds_sum{model="a"} 12.5',
        'h_seconds_count{model="a"} 5',
        'h_seconds_bucket{le="+Inf"} 4',
        "h_seconds_sum 0",
        "h_seconds_count 4",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2**64, "18446744073709551616"),
        (1.0, "1"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1e-05, "1e-05"),
        (1e300, "1e+300"),
        (inf, "+Inf"),
        (-inf, "-Inf"),
        (nan, "NaN"),
    ],
)
def test_numbers(value: float, text: str):
    assert number_text(value) == text


def test_label_values_are_escaped():
    assert label_text({"model": 'back\\slash "quote" new\nline'}) == 'model="back\\\\slash \\"quote\\" new\\nline"'


def test_help_is_escaped():
    out = FamilyText("a", "gauge", "one\ntwo \\ three")

    assert out.to_bytes() == b"# HELP a one\\ntwo \\\\ three\n# TYPE a gauge\n"


def test_name_that_is_not_utf8_does_not_fail_the_scrape():
    out = FamilyText("a", "gauge", "A")
    out.sample(label_text({"model": "m\udcff"}), 1)

    assert out.to_bytes().endswith(b'a{model="m?"} 1\n')


@given(
    st.dictionaries(st.from_regex(r"_?[a-z][a-z_]{0,3}", fullmatch=True), st.text(max_size=20), max_size=4), st.floats()
)
def test_page_is_read_back_by_another_parser(labels: dict[str, str], value: float):
    out = FamilyText("some_gauge", "gauge", "A gauge")
    out.sample(label_text(labels), value)

    # A lone surrogate is never UTF-8; see the test above.
    expected = {name: text.encode("utf-8", "replace").decode() for name, text in labels.items()}
    (family,) = text_string_to_metric_families(out.to_bytes().decode())
    (sample,) = family.samples
    assert (family.name, family.type, family.documentation) == ("some_gauge", "gauge", "A gauge")
    assert (sample.name, sample.labels) == ("some_gauge", expected)
    assert sample.value == value or (isnan(sample.value) and isnan(value))
