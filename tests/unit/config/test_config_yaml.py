"""config.yaml: the same configurations in YAML, with problems and their positions."""

import json
import subprocess
import sys
import time

import pytest
import yaml
from hypothesis import HealthCheck, given, settings

from halimede.core.config.model_config import (
    AllVersions,
    HistogramOptions,
    LatestVersions,
    MetricControl,
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelMetrics,
    ModelParameter,
    ModelQueuePolicy,
    ModelVersionPolicy,
    RateLimiterResource,
    WarmupInput,
)
from halimede.core.config.read import read_pbtxt, read_yaml
from halimede.core.config.text import MAX_DEPTH
from halimede.core.config.write import to_json, to_pbtxt, to_yaml
from halimede.core.config.yaml_text import parse_yaml
from halimede.core.types import DataType
from support.config_seeds import SEEDS
from support.configs import CONFIGURATION_BYTES, configuration
from support.examples import drawn, examples

RESNET = """\
# A vision model, as people write them.
name: resnet
platform: onnxruntime_onnx
max_batch_size: 16
version_policy: {specific: {versions: [1, 3]}}
input:
  - name: x
    data_type: TYPE_FP32
    dims: [3, 224, -1]      # C, H, W
  - {name: mask, data_type: "TYPE_BOOL", dims: [1], optional: true}
output:
- name: y
  data_type: TYPE_FP32
  dims:
  - 1000
instance_group:
  - count: 2
    rate_limiter: {resources: [{name: R1, global: true, count: 3}]}
dynamic_batching:
  priority_queue_policy:
    2: {max_queue_size: 7}
parameters:
  note:
    string_value: |
      two
      lines
"""


def problems(text):
    return [str(problem) for problem in read_yaml(text).problems]


def test_a_configuration_as_people_write_it():
    parsed = read_yaml(RESNET)
    config = parsed.config
    assert parsed.problems == ()
    assert (config.name, config.platform, config.max_batch_size) == ("resnet", "onnxruntime_onnx", 16)
    assert config.version_policy == read_pbtxt("version_policy { specific { versions: [1, 3] } }").config.version_policy
    assert config.input == (
        ModelInput("x", DataType.FP32, dims=(3, 224, -1)),
        ModelInput("mask", DataType.BOOL, dims=(1,), optional=True),
    )
    assert config.output[0].dims == (1000,)
    assert config.instance_group[0].rate_limiter.resources == (RateLimiterResource("R1", True, 3),)
    assert config.dynamic_batching == ModelDynamicBatching(
        priority_queue_policy={2: ModelQueuePolicy(max_queue_size=7)}
    )
    assert config.parameters == {"note": ModelParameter("two\nlines\n")}


def test_every_field_and_element_has_a_place():
    locations = read_yaml(RESNET).locations
    assert {path: locations[path] for path in ("name", "input", "input[0]", "input[0].dims", "input[0].dims[2]")} == {
        "name": (2, 1),
        "input": (6, 1),
        "input[0]": (7, 5),
        "input[0].dims": (9, 5),
        "input[0].dims[2]": (9, 20),
    }
    assert locations["dynamic_batching.priority_queue_policy[2].max_queue_size"] == (21, 9)
    assert locations['parameters["note"].string_value'] == (24, 5)


@pytest.mark.parametrize(
    "written", ["no", "on", "1.0", "0x1F", "null", "~", "2024-01-31", "true", "012", "1_000", ".inf"]
)
def test_scalar_of_a_string_field_is_its_text(written):
    parsed = read_yaml(f"name: {written}\nparameters: {{{written}: {{string_value: {written}}}}}\n")
    assert parsed.problems == ()
    assert parsed.config == ModelConfig(name=written, parameters={written: ModelParameter(written)})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("response_cache: {enable: yes}", "1:26: response_cache.enable: expected true or false, found yes"),
        (
            "response_cache: {enable: 'true'}",
            '1:26: response_cache.enable: expected true or false, found the string "true"',
        ),
        (
            "max_batch_size: '8'",
            '1:17: max_batch_size: expected an integer from -2147483648 to 2147483647, found the string "8"',
        ),
        ("max_batch_size: 010", "1:17: max_batch_size: expected an integer from -2147483648 to 2147483647, found 010"),
        ("max_batch_size: 8.0", "1:17: max_batch_size: expected an integer from -2147483648 to 2147483647, found 8.0"),
        ("max_batch_size:", "1:16: max_batch_size: expected an integer from -2147483648 to 2147483647, found nothing"),
        ("dynamic_batching:", "1:18: dynamic_batching: expected an object, found nothing"),
        ("dynamic_batching: true", "1:19: dynamic_batching: expected an object, found true"),
        ("input: {name: x}", "1:8: input: expected a list, found an object"),
        ("input: [{dims: 3}]", "1:16: input[0].dims: expected a list, found 3"),
        ("name: [a]", "1:7: name: expected a string of UTF-8, found a list"),
        ("parameters: {a: b}", '1:17: parameters["a"]: expected an object, found b'),
        ("maxBatchSize: 8", "1:1: maxBatchSize: unknown field of ModelConfig; did you mean max_batch_size?"),
        ("name: a\nname: b", "2:1: name: given twice, first in line 1"),
        ("name: a\n'name': b", "2:1: name: given twice, first in line 1"),
        ("metric_tags: {a: 1, a: 2}", '1:21: metric_tags["a"]: given twice'),
        (
            "version_policy: {all: {}, latest: {}}",
            "1:27: version_policy.latest: given beside all of line 1; only one of latest, all, specific is allowed",
        ),
    ],
)
def test_invalid_values_are_reported(text, problem):
    assert problems(text) == [problem]


def test_enums_are_named_in_full():
    text = "input: [{data_type: FP32}, {data_type: type_fp32}, {data_type: 11}, {data_type: 'TYPE_FP32'}]"
    assert [problem.path for problem in read_yaml(text).problems] == [f"input[{i}].data_type" for i in range(3)]
    assert problems(text)[0].endswith(": expected TYPE_FP32, found FP32")
    assert problems(text)[1].endswith(": expected TYPE_FP32, found type_fp32")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- name: x", "1:1: expected fields, such as 'max_batch_size: 8'"),
        ("just text", "1:1: expected fields, such as 'max_batch_size: 8'"),
        ("name: &n a", "1:7: an anchor (&); write the value out, or quote the text"),
        ("name: *n", "1:7: an alias (*); write the value out, or quote the text"),
        (
            "name: !!python/name:os.system x",
            "1:7: a tag (!); leave it out, since the field gives the type, or quote the text",
        ),
        ("name: !!str 1", "1:7: a tag (!); leave it out, since the field gives the type, or quote the text"),
        ("? [a]\n: b", "1:3: a list or an object as a key; a key is text"),
        ("name: a\n---\nname: b", "2:1: a second document; a configuration is one"),
        (
            "name: a\n\tb: c",
            "2:1: not YAML: while scanning a plain scalar found a tab character that violates indentation",
        ),
        ("name: 'a", "1:9: not YAML: while scanning a quoted scalar found unexpected end of stream"),
        (b"name: a\nplatform: \xff", "2:11: not UTF-8: invalid start byte"),
        ("name: a\nplatform: \x07", "2:11: a character that YAML does not allow, '\\x07'"),
        ("name: \ud800", "1:7: not UTF-8: invalid continuation byte"),
        (
            'name: "\\ud800"',
            "1:10: not YAML: while parsing a quoted scalar found invalid Unicode character escape code",
        ),
    ],
)
def test_yaml_that_is_not_plain_data_ends_parsing(text, problem):
    found = problems(text)
    # The wording of the library's own errors may change.
    assert found == [problem] or found[0].startswith(problem.split("not YAML: ")[0] + "not YAML: ")


def test_fields_before_the_error_are_checked():
    parsed = read_yaml("max_batch_size: x\ninput:\n  - name: a\n    dims: [1, 2\n")
    assert [(problem.path, problem.line) for problem in parsed.problems] == [("max_batch_size", 1), ("", 5)]
    assert parsed.config.input == (ModelInput("a", dims=(1, 2)),)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n...\n", "{}", "\ufeff", b"\xef\xbb\xbfname: ''"])
def test_empty_text_is_an_empty_configuration(text):
    assert (read_yaml(text).problems, read_yaml(text).config) == ((), ModelConfig())


def test_messages_lists_and_maps_may_be_empty():
    parsed = read_yaml("version_policy: {all: {}}\ninput: []\nparameters: {}\nmetric_tags: {}\ndynamic_batching: {}")
    assert parsed.problems == ()
    assert parsed.config == ModelConfig(
        version_policy=ModelVersionPolicy(all=AllVersions()), dynamic_batching=ModelDynamicBatching()
    )


def test_infinities_are_the_only_special_yaml_numbers():
    text = "model_metrics: {metric_control: [{histogram_options: {buckets: [1, 2.5, -1e3, .inf, -.inf]}}]}"
    infinity = float("inf")
    assert read_yaml(text).config.model_metrics == ModelMetrics(
        (MetricControl(histogram_options=HistogramOptions((1.0, 2.5, -1000.0, infinity, -infinity))),)
    )
    wrong = [text.replace("2.5", number) for number in ("1e999", "inf", "+1", "1_0", "'1'", "0x1")]
    assert [len(problems(each)) for each in wrong] == [1] * 6


@pytest.mark.parametrize(
    "text",
    [
        "input: " + "[" * 100_000,
        "input: " + "{a: " * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "".join(f"{' ' * i}a:\n" for i in range(1000)),
        "a: &a [x]\n" + "".join(f"b{i}: &b{i} [{'*a,' * 9}]\n" for i in range(1000)),
        pytest.param("metric_tags:\n" + "  a: b\n" * 500_000, marks=pytest.mark.large),
        pytest.param("input: [" + "1," * 2_000_000 + "]", marks=pytest.mark.large),
        "name: 'x" + "''" * 2_000_000,
        "name: " + "a " * 2_000_000,
    ],
    ids=["lists", "objects", "dashes", "keys", "steps", "bomb", "pairs", "elements", "quotes", "words"],
)
def test_text_of_4_mib_takes_limited_time(text):
    begun = time.monotonic()
    found = read_yaml(text).problems
    # The goal is 2 s; a busy machine gets more.
    assert time.monotonic() - begun < 20
    assert all(problem.line >= 1 for problem in found[:100])


@pytest.mark.large
def test_text_of_4_mib_takes_limited_memory():
    program = (
        "import resource; from halimede.core.config.read import read_yaml\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "read_yaml('input: [{dims: [' + '1,' * 2_000_000 + ']}]'), read_yaml('metric_tags:\\n' + '  a: b\\n' * 500_000)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown_kib = int(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    # Without a bound on the tokens it is 500 MiB.
    assert grown_kib < 300 << 10


def test_nesting_and_token_limits_are_reported():
    assert problems("name: " + "[" * 200)[-1] == f"1:{6 + MAX_DEPTH}: nested more than {MAX_DEPTH} deep"
    assert problems("input: [{dims: [%s]}]" % ("1," * 20_000)) == []
    root, problem = parse_yaml("a: [%s]" % ("1," * 200_000))
    assert str(problem).endswith("more than 200000 names and values")
    # The others are the whole, its name, and the list.
    assert len(root.fields[0].value.items) == 200_000 - 3


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn(configuration, CONFIGURATION_BYTES))
def test_one_configuration_in_both_formats_is_read_alike(config):
    for lines, read in ((to_yaml(config), read_yaml), (to_pbtxt(config), read_pbtxt)):
        parsed = read("\n".join(line.text for line in lines))
        assert (parsed.problems, parsed.config) == ((), config)


@pytest.mark.parametrize("seed", SEEDS)
def test_served_json_written_as_yaml_is_read_back(seed):
    config = read_pbtxt(SEEDS[seed]).config
    # JSON has text where YAML has an infinite number.
    text = yaml.safe_dump(json.loads(to_json(config))).replace("Infinity", ".inf")
    parsed = read_yaml(text)
    assert (parsed.problems, parsed.config) == ((), config)


def test_a_oneof_member_that_is_false_is_set():
    text = "model_warmup: [{inputs: {x: {zero_data: false}}}]"
    assert read_yaml(text).config.model_warmup[0].inputs == {"x": WarmupInput(zero_data=False)}
    assert read_yaml("version_policy: {latest: {num_versions: 2}}").config.version_policy == ModelVersionPolicy(
        latest=LatestVersions(2)
    )
