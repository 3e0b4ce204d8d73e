"""Triton's exact texts for configurations that it refuses, and which one it reports if there are several problems."""

import pytest

from halimede.core.config.read import read_config
from halimede.core.config.validate import validate

HEAD = 'name: "m" backend: "onnxruntime" '
INPUT = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } '
OUTPUT = 'output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] } '
GOOD = f"{HEAD}max_batch_size: 8 {INPUT}{OUTPUT}"
RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension for m"
CACHE = "response_cache { enable: true }"


def with_input(text: str, batch: int = 8) -> str:
    return f"{HEAD}max_batch_size: {batch} input {{ {text} }} {OUTPUT}"


def with_output(text: str, batch: int = 8) -> str:
    return f"{HEAD}max_batch_size: {batch} {INPUT} output {{ {text} }}"


def with_x(text: str) -> str:
    return with_input(f'name: "x" data_type: TYPE_FP32 {text}')


def with_control(text: str) -> str:
    return f'{GOOD} sequence_batching {{ control_input {{ name: "C" control {{ {text} }} }} }}'


def first_problem(config: str) -> str | None:
    parsed = read_config("config.pbtxt", config)
    assert parsed.problems == ()
    return next((problem.message for problem in validate(parsed.config, "m")), None)


CASES = {
    GOOD: None,
    f"{HEAD}max_batch_size: -1 {INPUT}{OUTPUT}": "'max_batch_size' must be non-negative value for m",
    f"{HEAD}{OUTPUT}": "model configuration must contain at least one input, none were specified",
    # Inputs and outputs.
    with_input("data_type: TYPE_FP32 dims: [ 4 ]"): "model input must specify 'name' for m",
    with_input('name: "x" dims: [ 4 ]'): "model input 'x' must specify 'data_type' for m",
    with_input('name: "x" data_type: TYPE_FP32'): "model input 'x' must specify 'dims' for m",
    with_x("reshape { shape: [ 1 ] }"): "model input 'x' must specify 'dims' for m",
    with_output('name: "y" dims: [ 4 ]'): "model output 'y' must specify 'data_type' for m",
    with_x("dims: [ 0 ]"): f"model input 'x' dimension {RULE}",
    with_x("dims: [ 4, -2 ]"): f"model input 'x' dimension {RULE}",
    with_x("dims: [ 4 ] reshape { shape: [ 0 ] }"): f"model input 'x' reshape dimensions {RULE}",
    with_x("dims: [ 1 ] reshape { shape: [ ] }"): None,
    with_x("dims: [ 2 ] reshape { shape: [ ] }"): "model input 'x' has different size for dims and reshape for m",
    with_x("dims: [ 4 ] reshape { shape: [ 5 ] }"): "model input 'x' has different size for dims and reshape for m",
    with_x("dims: [ -1 ] reshape { shape: [ 5 ] }"): "model input 'x' has different size for dims and reshape for m",
    with_x("dims: [ -1 ] reshape { shape: [ -1, -1 ] }"): (
        "model input 'x' has different number of variable-size dimensions for dims and reshape for m"
    ),
    with_x("dims: [ 2, -1 ] reshape { shape: [ -1, 2 ] }"): (
        "model input 'x' has different size for dims and reshape for m"
    ),
    with_input('name: "x" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] }', 0): (
        "model input 'x' cannot have empty reshape for non-batching model as scalar tensors are not supported for m"
    ),
    with_output('name: "y" data_type: TYPE_FP32 dims: [ 1 ] reshape { shape: [ ] }', 0): (
        "model output 'y' cannot have empty reshape for non-batching model as scalar tensors are not supported for m"
    ),
    with_x("dims: [ 4 ] format: FORMAT_NCHW"): "model input NHWC/NCHW require 3 dims for m",
    # Batch inputs and outputs.
    f"{GOOD} batch_input {{ kind: BATCH_ELEMENT_COUNT target_name: 'N' data_type: TYPE_FP32 }}": (
        "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"
    ),
    f"{GOOD} batch_input {{ target_name: 'N' data_type: TYPE_INT64 source_input: 'other' }}": (
        "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"
    ),
    f"{GOOD} batch_input {{ target_name: 'N' data_type: TYPE_INT32 source_input: 'other' }}": (
        "unknown source input name 'other' for m"
    ),
    f"{GOOD} batch_output {{ target_name: 'other' source_input: 'x' }}": "unknown target output name 'other' for m",
    f"{GOOD} batch_output {{ target_name: [ 'y', 'y' ] source_input: 'x' }}": (
        "target output name 'y' can only be specified once for m"
    ),
    # Dynamic batching.
    f"{GOOD} dynamic_batching {{ preferred_batch_size: [ 0 ] }}": (
        "dynamic batching preferred size must be positive for m"
    ),
    f"{GOOD} dynamic_batching {{ preferred_batch_size: [ 9 ] }}": (
        "dynamic batching preferred size must be <= max batch size for m"
    ),
    f"{GOOD} dynamic_batching {{ priority_levels: 2 }}": "default priority level must be in range [1, 2] for m",
    f"{GOOD} dynamic_batching {{ priority_levels: 2 default_priority_level: 1 preserve_ordering: true "
    "priority_queue_policy { key: 3 value { } } }": (
        "priority queue policy must have priority level in range [1, 2] for m"
    ),
    f"{GOOD} dynamic_batching {{ priority_levels: 2 default_priority_level: 1 preserve_ordering: true }}": (
        "Only one priority level is allowed when 'preserve_ordering' is true for m"
    ),
    f"{GOOD} dynamic_batching {{ preserve_ordering: true "
    "default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 1 } }": (
        "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"
    ),
    # Sequences.
    f"{GOOD} {CACHE} sequence_batching {{ oldest {{ preferred_batch_size: [ 0 ] }} }}": (
        "Response Cache does not currently support model m with sequence batching scheduler. Please disable the "
        "response cache."
    ),
    f"{GOOD} sequence_batching {{ oldest {{ preferred_batch_size: [ 0 ] }} }}": (
        "sequence batching preferred batch size must be positive for m"
    ),
    f"{GOOD} sequence_batching {{ oldest {{ preferred_batch_size: [ 9 ] }} }}": (
        "sequence batching preferred batch size must be <= max batch size for m"
    ),
    f"{GOOD} sequence_batching {{ direct {{ minimum_slot_utilization: 1.5 }} }}": (
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"
    ),
    f"{GOOD} sequence_batching {{ control_input {{ }} direct {{ minimum_slot_utilization: 2 }} }}": (
        "sequence batching control tensor must have a name for m"
    ),
    with_control("kind: CONTROL_SEQUENCE_START"): (
        "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
        "CONTROL_SEQUENCE_START for m"
    ),
    with_control("kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] fp32_false_true: [ 0, 1 ]"): (
        "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
        "for CONTROL_SEQUENCE_END for m"
    ),
    with_control("kind: CONTROL_SEQUENCE_READY fp32_false_true: [ 0 ]"): (
        "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_READY for m"
    ),
    with_control("kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32"): (
        "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
        "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
    ),
    # The rest.
    f"{GOOD} {CACHE} model_transaction_policy {{ decoupled: true }}": (
        "Response Cache does not currently support model m with 'decoupled' transaction policy. Please disable the "
        "response cache."
    ),
    f"{GOOD} instance_group {{ kind: KIND_CPU gpus: [ 0 ] }}": (
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"
    ),
    f"{GOOD} instance_group {{ name: 'g' kind: KIND_MODEL gpus: [ 0 ] }}": (
        "instance group g of model m has kind KIND_MODEL but specifies one or more GPUs"
    ),
}


@pytest.mark.parametrize("config", CASES, ids=[str(text) for text in CASES.values()])
def test_refused_configurations_have_the_texts_of_triton(config: str):
    assert first_problem(config) == CASES[config]


ORDER = (
    ("max_batch_size: -1", "'max_batch_size' must be non-negative value for m"),
    (
        "sequence_batching { direct { minimum_slot_utilization: 2 } }",
        "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
    ),
    ("input { } ", "model input must specify 'name' for m"),
    ("output { }", "model output must specify 'name' for m"),
    (
        "instance_group { kind: KIND_CPU gpus: [ 0 ] }",
        "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs",
    ),
)


@pytest.mark.parametrize("start", range(len(ORDER)))
def test_the_first_of_several_problems_is_the_one_of_triton(start: int):
    # Fields of a message may be in any order in the file.
    text = " ".join(text for text, _ in reversed(ORDER[start:]))

    assert first_problem(f"{text} {HEAD} {INPUT} {OUTPUT}") == ORDER[start][1]
