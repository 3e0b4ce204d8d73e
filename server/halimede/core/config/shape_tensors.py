"""Shape tensors: inputs and outputs whose elements are dimensions of other tensors, as TensorRT has them.

They have no batch dimension. In a model that batches, as in Triton, the number of rows is their first value, which the
configured dims leave out: dims [2] means three values. The requests of a batch share the values after it.
"""

from collections.abc import Sequence

from halimede.core.config.model_config import ModelConfig

MAX_VALUES = 64
"""The most values of a shape tensor without the number of rows: requests that may share a batch are found by them."""


def shape_tensors(config: ModelConfig) -> frozenset[str]:
    """The inputs and outputs of a model that batches whose first value is the number of rows."""
    if config.max_batch_size == 0:
        return frozenset()
    inputs = (each.name for each in config.input if each.is_shape_tensor)
    return frozenset((*inputs, *(each.name for each in config.output if each.is_shape_tensor)))


def with_rows(dims: Sequence[int]) -> tuple[int, ...]:
    """The shape of a shape tensor with these configured dims in a model that batches."""
    return (*(dim + 1 for dim in dims[:1]), *dims[1:])


def without_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The dims to configure for a shape tensor of this shape in a model that batches."""
    return (*(dim - 1 for dim in shape[:1]), *shape[1:])


def can_have_rows(dims: Sequence[int]) -> bool:
    """Whether a shape tensor of a model that batches can have these configured dims."""
    return len(dims) == 1 and 1 <= dims[0] <= MAX_VALUES
