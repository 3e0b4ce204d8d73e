"""The tensors of a model that clients do not send or see: control inputs and implicit state."""

from dataclasses import dataclass

from halimede.core.config.model_config import ControlKind, ModelConfig, ModelInput, ModelOutput, SequenceControl
from halimede.core.types import DataType


@dataclass(frozen=True, slots=True)
class AddedInput:
    """An input that the server adds to each request. `path` is its place in the configuration."""

    tensor: ModelInput
    path: str


def added_inputs(config: ModelConfig) -> tuple[AddedInput, ...]:
    """The inputs for controls and states, without the batch dimension."""
    batching = config.sequence_batching
    if batching is None:
        return ()
    controls = (
        AddedInput(
            ModelInput(each.name, _control_type(each.control[0]), dims=(1,)), f"sequence_batching.control_input[{i}]"
        )
        for i, each in enumerate(batching.control_input)
        if each.control
    )
    states = (
        AddedInput(ModelInput(each.input_name, each.data_type, dims=each.dims), f"sequence_batching.state[{i}]")
        for i, each in enumerate(batching.state)
    )
    return (*controls, *states)


def state_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """The outputs with new states, also those that clients see, without the batch dimension."""
    batching = config.sequence_batching
    if batching is None:
        return ()
    return tuple(ModelOutput(each.output_name, each.data_type, dims=each.dims) for each in batching.state)


def model_inputs(config: ModelConfig) -> tuple[ModelInput, ...]:
    """All inputs that the model gets."""
    return (*config.input, *(each.tensor for each in added_inputs(config)))


def model_outputs(config: ModelConfig) -> tuple[ModelOutput, ...]:
    """All outputs that the model must have."""
    listed = {output.name for output in config.output}
    return (*config.output, *(each for each in state_outputs(config) if each.name not in listed))


def _control_type(control: SequenceControl) -> DataType:
    if control.kind is ControlKind.CONTROL_SEQUENCE_CORRID:
        return control.data_type
    if control.int32_false_true:
        return DataType.INT32
    return DataType.FP32 if control.fp32_false_true else DataType.BOOL
