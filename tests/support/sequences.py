"""Configurations and requests of models of sequences for tests of the worker side, which has no scheduler."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import read_pbtxt
from halimede.core.config.write import to_json
from halimede.core.sequences.plan import SequencePlan, read_plan
from halimede.core.sequences.rows import Row, Sequences, initial_states
from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.types.tensor import tensor_from_array
from halimede.workers.states import HeldStates
from halimede.workers.worker import BatchItem

CONTROLS = """
control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [ -1, 2.5 ] } }
control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [ false, true ] } }
control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
SUM = 'state { input_name: "sum_in" output_name: "sum" data_type: TYPE_FP32 dims: [ 1 ] %s }'


def config_of(
    batching: str,
    *,
    rows: int = 8,
    backend: str = "onnxruntime",
    kind: str = "FP32",
    dims: str = "1",
    extra: str = "",
) -> ModelConfig:
    """A model with an input x and an output y of these dims, and this `sequence_batching`."""
    datatype = "TYPE_STRING" if kind == "BYTES" else f"TYPE_{kind}"
    parsed = read_pbtxt(
        f"""
        name: "m" backend: "{backend}" max_batch_size: {rows}
        input [ {{ name: "x" data_type: {datatype} dims: [ {dims} ] }} ]
        output [ {{ name: "y" data_type: {datatype} dims: [ {dims} ] }} ]
        sequence_batching {{ {batching} }}
        {extra}
        """
    )
    assert parsed.problems == ()
    return parsed.config


def json_of(config: ModelConfig) -> dict[str, Any]:
    return dict(json.loads(to_json(config)))


def plan_of(config: ModelConfig) -> SequencePlan:
    plan = read_plan(json_of(config))
    assert plan is not None
    return plan


def sequences_of(
    config: ModelConfig,
    files: Mapping[str, bytes] | None = None,
    *,
    copies: bool = False,
    states: HeldStates | None = None,
) -> Sequences:
    plan = plan_of(config)
    return Sequences(plan, "m", initial_states(plan, files or {}), states or HeldStates(), copies=copies)


def item(
    key: int,
    sequence_slot: int,
    value: Any = 0.0,
    *,
    identity: int | str = 7,
    start: bool = False,
    end: bool = False,
    kind: DataType = DataType.FP32,
    rows: int | None = 1,
    outputs: tuple[str, ...] = (),
) -> BatchItem:
    """A request of a sequence with one element; `rows` None for a model that does not batch."""
    values = value if isinstance(value, list) else [value]
    return BatchItem(
        key,
        InferenceRequest(
            "m",
            inputs=[tensor("x", kind, [values] if rows is not None else values)],
            outputs=outputs,
            sequence_id=identity,
            sequence_start=start,
            sequence_end=end,
        ),
        1,
        False,
        sequence_slot=sequence_slot,
    )


def tensor(name: str, kind: DataType, values: Any) -> Tensor:
    return tensor_from_array(name, kind, np.array(values, dtype=kind.dtype))


def values(tensors: Sequence[Tensor]) -> dict[str, Any]:
    return {each.name: each.array().tolist() for each in tensors}


def inputs(row: Row) -> dict[str, Any]:
    return values(row.request.inputs)
