"""The output of `GET /v2/models/<m>/config`."""

import json
import math

import pytest

from halimede.core.config.model_config import (
    AllVersions,
    EnsembleStep,
    HistogramOptions,
    InstanceKind,
    LatestVersions,
    MetricControl,
    ModelConfig,
    ModelDynamicBatching,
    ModelEnsembling,
    ModelInput,
    ModelInstanceGroup,
    ModelMetrics,
    ModelOptimizationPolicy,
    ModelOutput,
    ModelParameter,
    ModelQueuePolicy,
    ModelRateLimiter,
    ModelSequenceBatching,
    ModelVersionPolicy,
    ModelWarmup,
    PinnedMemoryBuffer,
    RateLimiterResource,
    StrategyDirect,
    TimeoutAction,
    WarmupInput,
)
from halimede.core.config.write import to_json
from halimede.core.types import DataType

# What Triton 2.51.0 prints of a python model that it completed.
DUMP_OF_TRITON = (
    '{"name":"auto","platform":"","backend":"python","runtime":"","version_policy":{"latest":{"num_versions":1}},'
    '"max_batch_size":4,"input":[{"name":"IN","data_type":"TYPE_FP32","format":"FORMAT_NONE","dims":[4],'
    '"is_shape_tensor":false,"allow_ragged_batch":false,"optional":false,"is_non_linear_format_io":false}],'
    '"output":[{"name":"OUT","data_type":"TYPE_FP32","dims":[4],"label_filename":"","is_shape_tensor":false,'
    '"is_non_linear_format_io":false}],"batch_input":[],"batch_output":[],"optimization":{"priority":"PRIORITY_DEFAULT",'
    '"input_pinned_memory":{"enable":true},"output_pinned_memory":{"enable":true},"gather_kernel_buffer_threshold":0,'
    '"eager_batching":false},"dynamic_batching":{"preferred_batch_size":[4],"max_queue_delay_microseconds":0,'
    '"preserve_ordering":false,"priority_levels":0,"default_priority_level":0,"priority_queue_policy":{}},'
    '"instance_group":[{"name":"auto","kind":"KIND_CPU","count":1,"gpus":[],"secondary_devices":[],"profile":[],'
    '"passive":false,"host_policy":""}],"default_model_filename":"model.py","cc_model_filenames":{},"metric_tags":{},'
    '"parameters":{},"model_warmup":[]}'
)


def test_a_completed_configuration_is_printed_as_triton_prints_it():
    config = ModelConfig(
        name="auto",
        backend="python",
        version_policy=ModelVersionPolicy(latest=LatestVersions(num_versions=1)),
        max_batch_size=4,
        input=(ModelInput(name="IN", data_type=DataType.FP32, dims=(4,)),),
        output=(ModelOutput(name="OUT", data_type=DataType.FP32, dims=(4,)),),
        optimization=ModelOptimizationPolicy(
            input_pinned_memory=PinnedMemoryBuffer(enable=True), output_pinned_memory=PinnedMemoryBuffer(enable=True)
        ),
        dynamic_batching=ModelDynamicBatching(preferred_batch_size=(4,)),
        instance_group=(ModelInstanceGroup(name="auto", kind=InstanceKind.KIND_CPU, count=1),),
        default_model_filename="model.py",
    )
    assert to_json(config).decode() == DUMP_OF_TRITON


def test_an_empty_configuration_prints_its_scalars_lists_and_maps():
    assert json.loads(to_json(ModelConfig())) == {
        "name": "",
        "platform": "",
        "backend": "",
        "runtime": "",
        "max_batch_size": 0,
        "input": [],
        "output": [],
        "batch_input": [],
        "batch_output": [],
        "instance_group": [],
        "default_model_filename": "",
        "cc_model_filenames": {},
        "metric_tags": {},
        "parameters": {},
        "model_warmup": [],
    }


def test_maps_are_sorted_by_key_and_numeric_keys_by_value():
    config = ModelConfig(
        parameters={"b": ModelParameter("2"), "é": ModelParameter("3"), "a": ModelParameter("1")},
        dynamic_batching=ModelDynamicBatching(
            priority_queue_policy={10: ModelQueuePolicy(), 9: ModelQueuePolicy(timeout_action=TimeoutAction.DELAY)}
        ),
    )
    text = to_json(config).decode()
    assert '"parameters":{"a":{"string_value":"1"},"b":{"string_value":"2"},"é":{"string_value":"3"}}' in text
    assert (
        '"priority_queue_policy":{"9":{"timeout_action":"DELAY","default_timeout_microseconds":0,'
        '"allow_timeout_override":false,"max_queue_size":0},"10":{"timeout_action":"REJECT"'
    ) in text


def test_set_oneof_member_is_printed_even_at_its_default():
    inputs = {"x": WarmupInput(zero_data=False), "y": WarmupInput(input_data_file="raw")}
    printed = json.loads(to_json(ModelConfig(model_warmup=(ModelWarmup(inputs=inputs),))))
    assert printed["model_warmup"] == [
        {
            "name": "",
            "batch_size": 0,
            "inputs": {
                "x": {"data_type": "TYPE_INVALID", "dims": [], "zero_data": False},
                "y": {"data_type": "TYPE_INVALID", "dims": [], "input_data_file": "raw"},
            },
            "count": 0,
        }
    ]


def test_an_empty_message_is_an_empty_object_and_global_has_its_own_name():
    config = ModelConfig(
        version_policy=ModelVersionPolicy(all=AllVersions()),
        instance_group=(
            ModelInstanceGroup(rate_limiter=ModelRateLimiter(resources=(RateLimiterResource("R", True, 2),))),
        ),
    )
    printed = json.loads(to_json(config))
    assert printed["version_policy"] == {"all": {}}
    assert printed["instance_group"][0]["rate_limiter"] == {
        "resources": [{"name": "R", "global": True, "count": 2}],
        "priority": 0,
    }


def test_integers_of_64_bits_stay_numbers():
    config = ModelConfig(
        ensemble_scheduling=ModelEnsembling(step=(EnsembleStep(model_version=-(2**63)),)),
        dynamic_batching=ModelDynamicBatching(max_queue_delay_microseconds=2**64 - 1),
    )
    text = to_json(config)
    assert b'"model_version":-9223372036854775808,' in text
    assert b'"max_queue_delay_microseconds":18446744073709551615,' in text


@pytest.mark.parametrize(
    ("number", "printed"),
    [
        (0.1, "0.1"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1 / 3, "0.3333333333333333"),
        (5e-324, "5e-324"),
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        (math.nan, '"NaN"'),
    ],
)
def test_floats_are_as_short_as_they_can_be(number, printed):
    options = HistogramOptions(buckets=(number,))
    config = ModelConfig(
        sequence_batching=ModelSequenceBatching(direct=StrategyDirect(minimum_slot_utilization=number)),
        model_metrics=ModelMetrics(metric_control=(MetricControl(histogram_options=options),)),
    )
    text = to_json(config).decode()
    assert f'"minimum_slot_utilization":{printed}}}' in text
    assert f'"histogram_options":{{"buckets":[{printed}]}}' in text


def test_a_large_configuration_is_printed_in_linear_time():
    # Quadratic time would be minutes, and end in the timeout.
    many = {f"{i:06}": ModelParameter(str(i)) for i in reversed(range(50_000))}
    printed = json.loads(to_json(ModelConfig(parameters=many)))["parameters"]
    assert list(printed.items()) == [(f"{i:06}", {"string_value": str(i)}) for i in range(50_000)]
