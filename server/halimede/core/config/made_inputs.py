"""The inputs of a model file that no client sends: the server computes them from all requests of a batch."""

from dataclasses import dataclass

from halimede.core.config.model_config import BatchInputKind, ModelConfig
from halimede.core.config.padding import PADDING, padding_of, parameter_path
from halimede.core.types import DataType


@dataclass(frozen=True, slots=True)
class MadeInput:
    """`datatypes` are those that the model file may have, `rank` is the number of dimensions of the array."""

    name: str
    datatypes: tuple[DataType, ...]
    rank: int
    path: str


def made_inputs(config: ModelConfig) -> tuple[MadeInput, ...]:
    """The targets of `batch_input`, and the inputs that get the lengths of padded rows."""
    made = [
        MadeInput(
            name,
            (batch_input.data_type,),
            2 if batch_input.kind is BatchInputKind.BATCH_ITEM_SHAPE else 1,
            f"batch_input[{i}].target_name[{j}]",
        )
        for i, batch_input in enumerate(config.batch_input)
        for j, name in enumerate(batch_input.target_name)
    ]
    lengths = (padding.lengths for padding in padding_of(config) if padding.lengths)
    return (*made, *(MadeInput(name, (DataType.INT64, DataType.INT32), 1, parameter_path(PADDING)) for name in lengths))
