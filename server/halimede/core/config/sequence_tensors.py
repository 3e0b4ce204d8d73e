"""The tensors of a model that clients do not send or see: control inputs and implicit state."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput, SequenceControl
from halimede.core.sequences.plan import ControlKind
from halimede.core.types import DataType

_TensorT_co = TypeVar("_TensorT_co", bound=ModelInput | ModelOutput, covariant=True)


@dataclass(frozen=True, slots=True)
class LocatedTensor(Generic[_TensorT_co]):
    """A tensor without its batch dimension, its path in the configuration, and the path of its name."""

    tensor: _TensorT_co
    path: str
    name_path: str


def added_inputs(config: ModelConfig) -> tuple[LocatedTensor[ModelInput], ...]:
    """The inputs that the server adds to each request, for controls and states."""
    batching = config.sequence_batching
    if batching is None:
        return ()
    added = []
    for i, control_input in enumerate(batching.control_input):
        path = f"sequence_batching.control_input[{i}]"
        for control in control_input.control[:1]:
            tensor = ModelInput(control_input.name, _control_type(control), dims=(1,))
            added.append(LocatedTensor(tensor, f"{path}.control[0]", f"{path}.name"))
    for i, state in enumerate(batching.state):
        path = f"sequence_batching.state[{i}]"
        tensor = ModelInput(state.input_name, state.data_type, dims=state.dims)
        added.append(LocatedTensor(tensor, path, f"{path}.input_name"))
    return tuple(added)


def hidden_outputs(config: ModelConfig) -> tuple[LocatedTensor[ModelOutput], ...]:
    """The outputs for states that clients do not see."""
    batching = config.sequence_batching
    if batching is None:
        return ()
    listed = {output.name for output in config.output}
    return tuple(
        LocatedTensor(
            ModelOutput(state.output_name, state.data_type, dims=state.dims),
            f"sequence_batching.state[{i}]",
            f"sequence_batching.state[{i}].output_name",
        )
        for i, state in enumerate(batching.state)
        if state.output_name not in listed
    )


def model_inputs(config: ModelConfig) -> tuple[ModelInput, ...]:
    """All inputs that the model gets."""
    return (*config.input, *(each.tensor for each in added_inputs(config)))


def model_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """All outputs that the model must have."""
    return (*config.output, *(each.tensor for each in hidden_outputs(config)))


def _control_type(control: SequenceControl) -> DataType:
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.INT32
    return DataType.FP32 if control.fp32_false_true else DataType.BOOL
