"""config.pbtxt and JSON to a ModelConfig: the values, the problems, and their positions."""

import json

import pytest

from halimede.core.config.model_config import (
    AllVersions,
    EnsembleStep,
    InputFormat,
    InstanceKind,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelPriority,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelSequenceBatching,
    ModelTensorReshape,
    ModelVersionPolicy,
    ModelWarmup,
    OptimizationCuda,
    RateLimiterResource,
    SequenceControl,
    SequenceControlInput,
    SequenceInitialState,
    SequenceState,
    SpecificVersions,
    StrategyDirect,
    TimeoutAction,
    WarmupInput,
)
from halimede.core.config.read import PROBLEM_LIMIT, ParsedConfig, locate, read_json, read_pbtxt
from halimede.core.sequences.plan import ControlKind
from halimede.core.types import DataType, Problem
from support.configs import (
    names_of,
)
from support.written_configs import ENSEMBLE, SEQUENCES, VISION


def test_a_type_without_its_prefix_is_recognized():
    for word in ("FP32", "fp32", '"FP32"'):
        [problem] = read_pbtxt(f"input {{ data_type: {word} }}").problems
        assert problem.message.startswith("input[0].data_type: expected TYPE_FP32, found "), problem.message
    [problem] = read_pbtxt("instance_group { kind: GPU }").problems
    assert problem.message.endswith(": expected KIND_GPU, found GPU")
    [problem] = read_pbtxt("input { data_type: FLOAT32 }").problems
    assert problem.message.endswith("found FLOAT32")


def test_a_vision_model_is_read():
    assert read_pbtxt(VISION).problems == ()
    assert read_pbtxt(VISION).config == ModelConfig(
        name="resnet50",
        platform="onnxruntime_onnx",
        max_batch_size=16,
        input=(
            ModelInput(
                name="input",
                data_type=DataType.FP32,
                format=InputFormat.FORMAT_NCHW,
                dims=(3, 224, 224),
                reshape=ModelTensorReshape(shape=(1, 3, 224, 224)),
            ),
            ModelInput(name="mask", data_type=DataType.BOOL, dims=(-1,), optional=True),
        ),
        output=(ModelOutput(name="output", data_type=DataType.FP32, dims=(1000,), label_filename="labels.txt"),),
        instance_group=(
            ModelInstanceGroup(
                count=2,
                kind=InstanceKind.KIND_GPU,
                gpus=(0, 1),
                rate_limiter=ModelRateLimiter(resources=(RateLimiterResource("R1", True, 3),), priority=2),
            ),
        ),
        dynamic_batching=ModelDynamicBatching(
            preferred_batch_size=(4, 8),
            max_queue_delay_microseconds=100,
            default_queue_policy=ModelQueuePolicy(TimeoutAction.DELAY, 5000),
            priority_queue_policy={2: ModelQueuePolicy(max_queue_size=7)},
        ),
        version_policy=ModelVersionPolicy(specific=SpecificVersions((1, 3))),
        optimization=ModelOptimizationPolicy(
            cuda=OptimizationCuda(graphs=True), priority=ModelPriority.PRIORITY_MAX, eager_batching=True
        ),
        parameters={"threads": ModelParameter("4"), "café": ModelParameter('"x"\n')},
    )


def test_a_stateful_model_is_read():
    assert read_pbtxt(SEQUENCES) == ParsedConfig(
        ModelConfig(
            name="stateful",
            backend="python",
            sequence_batching=ModelSequenceBatching(
                max_sequence_idle_microseconds=5_000_000,
                direct=StrategyDirect(minimum_slot_utilization=0.5),
                control_input=(
                    SequenceControlInput(
                        "START", (SequenceControl(ControlKind.CONTROL_SEQUENCE_START, fp32_false_true=(0.0, 1.0)),)
                    ),
                    SequenceControlInput(
                        "CORRID", (SequenceControl(ControlKind.CONTROL_SEQUENCE_CORRID, data_type=DataType.UINT64),)
                    ),
                ),
                state=(
                    SequenceState(
                        input_name="in",
                        output_name="out",
                        data_type=DataType.INT32,
                        dims=(-1,),
                        initial_state=(
                            SequenceInitialState(data_type=DataType.INT32, dims=(1,), zero_data=False, name="zero"),
                        ),
                    ),
                ),
            ),
            model_warmup=(
                ModelWarmup(
                    name="first",
                    batch_size=1,
                    inputs={"x": WarmupInput(data_type=DataType.BYTES, dims=(2,), random_data=True)},
                ),
            ),
        ),
        (),
        read_pbtxt(SEQUENCES).locations,
    )


def test_an_ensemble_is_read():
    assert read_pbtxt(ENSEMBLE).config == ModelConfig(
        name="pipeline",
        platform="ensemble",
        version_policy=ModelVersionPolicy(all=AllVersions()),
        ensemble_scheduling=ModelEnsembling(
            step=(
                EnsembleStep("a", -1, {"A_IN": "raw"}, {"A_OUT": "mid"}),
                EnsembleStep("b", 2, {"B0": "mid", "B1": "raw"}),
            )
        ),
    )


def test_every_problem_of_a_file_is_reported_in_its_order():
    text = """name: "m"
max_batchsize: 8
input { name: x data_type: TYPE_FLOAT dims: [1, "2", 99999999999999999999] }
dynamic_batching { preferred_batch_size: 4294967296 max_queue_delay_microseconds: -1 }
oldest { }
sequence_batching { }
name: "again"
output [ { dim: 1 } ]
metric_tags { key: "a" valu: "b" }
parameters: 3
response_cache { enable: yes }
version_policy: [ { } ]
optimization { priority: 9 cuda: "on" }
input { name: "\\xff" }
"""
    parsed = read_pbtxt(text)
    kinds = "TYPE_INVALID, TYPE_BOOL, TYPE_UINT8, TYPE_UINT16, TYPE_UINT32, TYPE_UINT64, TYPE_INT8, TYPE_INT16, "
    kinds += "TYPE_INT32, TYPE_INT64, TYPE_FP16, TYPE_FP32, TYPE_FP64, TYPE_STRING, TYPE_BF16"
    int64 = "an integer from -9223372036854775808 to 9223372036854775807"
    assert [str(problem) for problem in parsed.problems] == [
        "2:1: max_batchsize: unknown field of ModelConfig; did you mean max_batch_size?",
        "3:15: input[0].name: expected a string of UTF-8, found x",
        f"3:28: input[0].data_type: expected one of {kinds}, found TYPE_FLOAT",
        f'3:49: input[0].dims[1]: expected {int64}, found the string "2"',
        f"3:54: input[0].dims[2]: expected {int64}, found 99999999999999999999",
        "4:42: dynamic_batching.preferred_batch_size[0]: expected an integer from -2147483648 to 2147483647, "
        "found 4294967296",
        "4:83: dynamic_batching.max_queue_delay_microseconds: expected an integer from 0 to 18446744073709551615, "
        "found -1",
        "5:1: oldest: unknown field of ModelConfig; its fields are " + ", ".join(names_of(ModelConfig)),
        "6:1: sequence_batching: given beside dynamic_batching of line 4; only one of dynamic_batching, "
        "sequence_batching, ensemble_scheduling is allowed",
        "7:1: name: given twice, first in line 1",
        "8:12: output[0].dim: unknown field of ModelOutput; did you mean dims?",
        '9:24: metric_tags["a"].valu: unknown field of the map entry; did you mean value?',
        "10:13: parameters: expected a message with key and value, found 3",
        "11:26: response_cache.enable: expected true or false, found yes",
        "12:17: version_policy: expected a message, found a list",
        "13:26: optimization.priority: expected one of PRIORITY_DEFAULT, PRIORITY_MAX, PRIORITY_MIN, found 9",
        '13:34: optimization.cuda: expected a message, found the string "on"',
        r'14:15: input[1].name: expected a string of UTF-8, found the string "\xff"',
    ]
    assert parsed.problems[3].path == "input[0].dims[1]"
    assert parsed.config == ModelConfig(
        name="again",
        input=(ModelInput(dims=(1, 0, 0)), ModelInput()),
        output=(ModelOutput(),),
        sequence_batching=ModelSequenceBatching(),
        metric_tags={"a": ""},
        parameters={},
        response_cache=read_pbtxt("response_cache {}").config.response_cache,
        optimization=ModelOptimizationPolicy(),
    )


def test_syntax_error_ends_parsing_but_keeps_earlier_fields():
    parsed = read_pbtxt('name: "m"\nmax_batch_size: x\ninput { dims: [1, 2\n}')
    assert parsed.config == ModelConfig(name="m", input=(ModelInput(dims=(1, 2)),))
    assert [str(problem) for problem in parsed.problems] == [
        "2:17: max_batch_size: expected an integer from -2147483648 to 2147483647, found x",
        "4:1: expected ',' or ']', found '}'",
    ]


def test_the_number_of_problems_is_bounded():
    parsed = read_pbtxt("nothing: 1\n" * 1000)
    assert len(parsed.problems) == PROBLEM_LIMIT + 1
    assert parsed.problems[-1] == Problem("900 more problems are not listed")


def test_text_in_errors_is_clipped_and_printable():
    name, value = json.dumps("\ud800\n" + "n" * 5000), json.dumps("\ud800\n" + "v" * 5000)
    parsed = read_json(f'{{{name}: 1, "name": {value}, "metric_tags": {{{name}: 1}}}}')
    texts = [part for problem in parsed.problems for part in (problem.message, problem.path)]
    assert len(texts) == 8
    assert all(text.isprintable() and len(text) < 1000 for text in texts)


# --- the rules of the text format ---


def test_repeated_fields_and_maps_accumulate():
    parsed = read_pbtxt(
        "input { name: 'a' } input [ { name: 'b' }, < name: 'c' > ] input: [] input: { dims: 1 dims: [2] }"
    )
    assert parsed.problems == ()
    assert parsed.config.input == (ModelInput("a"), ModelInput("b"), ModelInput("c"), ModelInput(dims=(1, 2)))


def test_last_of_equal_map_keys_wins():
    parsed = read_pbtxt("parameters { key: 'a' value { string_value: '1' } } parameters { key: 'a' } metric_tags {}")
    assert parsed.problems == ()
    assert (parsed.config.parameters, parsed.config.metric_tags) == ({"a": ModelParameter()}, {"": ""})


def test_scalar_may_repeat_after_its_default_value():
    assert read_pbtxt("max_batch_size: 0 max_batch_size: 4 name: '' name: 'x'").problems == ()
    assert [p.path for p in read_pbtxt("max_batch_size: 4 max_batch_size: 4").problems] == ["max_batch_size"]
    assert [p.path for p in read_pbtxt("optimization {} optimization {}").problems] == ["optimization"]
    direct = "sequence_batching { direct { minimum_slot_utilization: %s minimum_slot_utilization: 1 } }"
    assert read_pbtxt(direct % "0").problems == ()
    assert len(read_pbtxt(direct % "-0.0").problems) == 1


def test_a_oneof_member_that_is_given_twice_is_one_problem():
    parsed = read_pbtxt("model_warmup { inputs { key: 'a' value { zero_data: false zero_data: true } } }")
    assert [p.path for p in parsed.problems] == ['model_warmup[0].inputs["a"].zero_data']


@pytest.mark.parametrize(
    ("written", "value"),
    [("0", 0), ("-0", 0), ("017", 15), ("-0x1F", -31), ("0X1f", 31), ("- 5", -5), ("2147483647", 2147483647)],
)
def test_integers_of_the_text_format(written, value):
    parsed = read_pbtxt(f"max_batch_size: {written}")
    assert (parsed.problems, parsed.config.max_batch_size) == ((), value)


@pytest.mark.parametrize("written", ["08", "0x", "1.0", "1f", "1_0", "0b1", "2147483648", "9" * 5000, "true", "-x"])
def test_invalid_integers_of_the_text_format(written):
    assert [p.path for p in read_pbtxt(f"max_batch_size: {written}").problems] == ["max_batch_size"]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("1", 1.0),
        ("-.5", -0.5),
        ("5.", 5.0),
        ("1.5F", 1.5),
        ("2e-3f", 0.002),
        ("-INF", -float("inf")),
        ("infinity", float("inf")),
        ("1e400", float("inf")),
        ("0f", 0.0),
    ],
)
def test_floats_of_the_text_format(written, value):
    parsed = read_pbtxt(f"sequence_batching {{ direct {{ minimum_slot_utilization: {written} }} }}")
    assert parsed.problems == ()
    assert parsed.config.sequence_batching == ModelSequenceBatching(direct=StrategyDirect(0, value))


@pytest.mark.parametrize("written", ["01", "0x1", "1e", "1.2.3", "1_0", "x", '"1"', "1ff"])
def test_invalid_floats_of_the_text_format(written):
    parsed = read_pbtxt(f"sequence_batching {{ direct {{ minimum_slot_utilization: {written} }} }}")
    assert [p.path for p in parsed.problems] == ["sequence_batching.direct.minimum_slot_utilization"]


def test_booleans_and_enums_of_the_text_format():
    words = ["true", "True", "t", "1", "0x1", "false", "False", "f", "0", "00"]
    read = [read_pbtxt(f"response_cache {{ enable: {word} }}") for word in words]
    assert [parsed.config.response_cache.enable for parsed in read] == [True] * 5 + [False] * 5
    assert {parsed.problems for parsed in read} == {()}
    wrong = ["TRUE", "2", "-1", '"true"', "1.0", "yes"]
    assert [len(read_pbtxt(f"response_cache {{ enable: {word} }}").problems) for word in wrong] == [1] * 6
    assert read_pbtxt("input { data_type: 13 }").config.input == (ModelInput(data_type=DataType.BYTES),)
    wrong = ["type_fp32", "15", "-1", '"TYPE_FP32"']
    assert [len(read_pbtxt(f"input {{ data_type: {word} }}").problems) for word in wrong] == [1] * 4


def test_a_list_of_plain_values_needs_its_colon():
    assert [str(p) for p in read_pbtxt("input { dims [] }").problems] == ["1:9: input[0].dims: expected ':' before '['"]


# --- the rules of proto-JSON ---


def test_json_accepts_both_spellings_of_names_numbers_and_enums():
    text = """{
      "maxBatchSize": "8", "max_batch_size": null,
      "input": [{"dataType": "type_fp32", "dims": [1, "2", 3.0, "4e0", -1]},
                {"data_type": 11, "format": "FORMAT_NHWC"}],
      "instance_group": [{"rateLimiter": {"resources": [{"global": true}]}}],
      "optimization": null, "version_policy": {"latest": null, "all": {}},
      "dynamicBatching": {"priorityQueuePolicy": {"18446744073709551615": {"timeoutAction": "Delay"}}},
      "metricTags": {"a b": "c"}
    }"""
    parsed = read_json(text.replace('"max_batch_size": null,', ""))
    assert parsed.problems == ()
    assert parsed.config == ModelConfig(
        max_batch_size=8,
        input=(
            ModelInput(data_type=DataType.FP32, dims=(1, 2, 3, 4, -1)),
            ModelInput(data_type=DataType.FP32, format=InputFormat.FORMAT_NHWC),
        ),
        instance_group=(ModelInstanceGroup(rate_limiter=ModelRateLimiter((RateLimiterResource(global_=True),))),),
        version_policy=ModelVersionPolicy(all=AllVersions()),
        dynamic_batching=ModelDynamicBatching(priority_queue_policy={2**64 - 1: ModelQueuePolicy(TimeoutAction.DELAY)}),
        metric_tags={"a b": "c"},
    )
    assert [str(p) for p in read_json(text).problems] == ["2:28: max_batch_size: given twice, first in line 2"]


def test_json_floats():
    def buckets(text):
        parsed = read_json(f'{{"modelMetrics":{{"metricControl":[{{"histogramOptions":{{"buckets":[{text}]}}}}]}}}}')
        return parsed.problems or parsed.config.model_metrics.metric_control[0].histogram_options.buckets

    assert buckets('1, -2.5e-1, "3.5", "Infinity", "-Infinity"') == (1.0, -0.25, 3.5, float("inf"), -float("inf"))
    assert [len(buckets(text)) for text in ("true", "1e999", '"inf"', '"1_0"', '" 1"', '""')] == [1] * 6


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"input": {}}', "1:11: input: expected a list, found an object"),
        ('{"input": [null]}', "1:12: input[0]: expected an object, found null"),
        ('{"dynamic_batching": []}', "1:22: dynamic_batching: expected an object, found a list"),
        ('{"parameters": []}', "1:16: parameters: expected an object, found a list"),
        ('{"parameters": {"a": null}}', '1:22: parameters["a"]: expected an object, found null'),
        ('{"metric_tags": {"a": "1", "a": "2"}}', '1:28: metric_tags["a"]: given twice'),
        ('{"name": 1}', "1:10: name: expected a string of UTF-8, found 1"),
        (
            '{"response_cache": {"enable": "true"}}',
            '1:31: response_cache.enable: expected true or false, found the string "true"',
        ),
        ('{"response_cache": {"enable": 1}}', "1:31: response_cache.enable: expected true or false, found 1"),
        ('{"max_batchsize": 1}', "1:2: max_batchsize: unknown field of ModelConfig; did you mean max_batch_size?"),
        (
            '{"version_policy": {"latest": {}, "all": {}}}',
            "1:35: version_policy.all: given beside latest of line 1; only one of latest, all, specific is allowed",
        ),
        (
            '{"max_batch_size": 1.5}',
            "1:20: max_batch_size: expected an integer from -2147483648 to 2147483647, found 1.5",
        ),
        (
            '{"dynamic_batching": {"priority_queue_policy": {"0x1": {}}}}',
            "1:49: dynamic_batching.priority_queue_policy[0x1]: expected an integer from 0 to 18446744073709551615, "
            'found the string "0x1"',
        ),
        ('{"name": "\\ud800"}', r'1:10: name: expected a string of UTF-8, found the string "\xed\xa0\x80"'),
    ],
)
def test_problems_of_json(text, problem):
    assert [str(p) for p in read_json(text).problems] == [problem]


# --- places ---


def test_every_field_and_element_has_a_place():
    text = """name: "m"
input {
  name: "a"
  dims: [1,
    2]
  dims: 3
}
parameters { key: "x.y" value: { string_value: "z" } }
input [ { }, { name: "b" } ]
metric_tags: { key: "t", value: "u" }
dynamic_batching { priority_queue_policy { key: 0x2 value { max_queue_size: 1 } } }
"""
    assert read_pbtxt(text).locations == {
        "name": (1, 1),
        "input": (2, 1),
        "input[0]": (2, 1),
        "input[0].name": (3, 3),
        "input[0].dims": (4, 3),
        "input[0].dims[0]": (4, 10),
        "input[0].dims[1]": (5, 5),
        "input[0].dims[2]": (6, 3),
        "parameters": (8, 1),
        'parameters["x.y"]': (8, 1),
        'parameters["x.y"].key': (8, 14),
        'parameters["x.y"].string_value': (8, 34),
        "input[1]": (9, 9),
        "input[2]": (9, 14),
        "input[2].name": (9, 16),
        "metric_tags": (10, 1),
        'metric_tags["t"]': (10, 1),
        'metric_tags["t"].key': (10, 16),
        "dynamic_batching": (11, 1),
        "dynamic_batching.priority_queue_policy": (11, 20),
        "dynamic_batching.priority_queue_policy[2]": (11, 20),
        "dynamic_batching.priority_queue_policy[2].key": (11, 44),
        "dynamic_batching.priority_queue_policy[2].max_queue_size": (11, 61),
    }


def test_json_fields_have_places_under_the_protocol_s_names():
    text = '{"maxBatchSize": 1,\n "input": [{},\n {"dims": [1]}], "parameters":\n {"x": {"stringValue": "z"}}}'
    assert read_json(text).locations == {
        "max_batch_size": (1, 2),
        "input": (2, 2),
        "input[0]": (2, 12),
        "input[1]": (3, 2),
        "input[1].dims": (3, 3),
        "input[1].dims[0]": (3, 12),
        "parameters": (3, 18),
        'parameters["x"]': (4, 3),
        'parameters["x"].string_value': (4, 9),
    }


def test_problems_are_located_by_the_longest_path_that_is_known():
    locations = read_pbtxt('name: "m"\ninput { dims: [1, 2] }\nparameters {\n key: "x.y[0]"\n value {} }').locations
    problems = (
        Problem("exact", "input[0].dims[1]"),
        Problem("no such element", "input[0].dims[7]"),
        Problem("no such field", "input[0].reshape.shape[0]"),
        Problem("no such input", "input[3].name"),
        Problem("in a map", 'parameters["x.y[0]"].string_value'),
        Problem("another key", 'parameters["z"].string_value'),
        Problem("not in the text", "output[0].dims"),
        Problem("the whole file"),
        Problem("has its place", "name", 7, 8),
    )
    assert [(p.message, p.line, p.column) for p in locate(problems, locations)] == [
        ("exact", 2, 19),
        ("no such element", 2, 9),
        ("no such field", 2, 1),
        ("no such input", 2, 1),
        ("in a map", 3, 1),
        ("another key", 3, 1),
        ("not in the text", 0, 0),
        ("the whole file", 0, 0),
        ("has its place", 7, 8),
    ]
