"""Inputs of zeros for a run before the first request. Pure."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.pytorch.exported import ExportedTensor
from halimede.core.config.autocomplete import is_given
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig, inner_dims
from halimede.core.config.sequence_tensors import model_inputs
from halimede.core.types import DataType

MOST_ELEMENTS = 1 << 24
"""Samples with more elements are not made."""

ANY_SIZE = 32
"""The size of dimensions that may have any."""

Shapes = Mapping[str, tuple[DataType, tuple[int, ...]]]
"""Datatype and shape of each input by its name."""


def configured_shapes(config: ModelConfig, rows: int, size: int = ANY_SIZE) -> Shapes | None:
    """The shapes by the configuration; None if inputs depend on the requests of a batch, or have no dims.

    `rows` are those of a batch, `size` that of each dimension of any size.
    """
    inputs = model_inputs(config)
    if made_inputs(config) or any(each.allow_ragged_batch or not is_given(each) for each in inputs):
        return None
    first = (rows,) if config.max_batch_size > 0 else ()
    return {
        each.name: (each.data_type, (*first, *(size if dim == -1 else dim for dim in inner_dims(each))))
        for each in inputs
    }


def exported_shapes(
    tensors: Sequence[ExportedTensor], names: Mapping[str, int], rows: int, size: int = ANY_SIZE
) -> Shapes:
    """The shapes by an exported program: `rows` for its first dimensions if they are dynamic, `size` for others, within
    their bounds."""
    firsts = {each.dimensions[0].symbol for each in tensors if each.dimensions and each.dimensions[0].size == -1}
    shapes = {}
    for name, at in names.items():
        dims = []
        for axis, dimension in enumerate(tensors[at].dimensions):
            is_first = axis == 0 or (dimension.symbol != "" and dimension.symbol in firsts)
            wanted = max(rows if is_first else size, dimension.least or 0)
            bounded = wanted if dimension.most is None else min(wanted, dimension.most)
            dims.append(bounded if dimension.size == -1 else dimension.size)
        shapes[name] = (tensors[at].datatype, tuple(dims))
    return shapes


def zeros(shapes: Shapes) -> dict[str, NDArray[Any]] | None:
    """Arrays of zeros or empty strings; None if they would be too large."""
    if sum(prod(shape) for _, shape in shapes.values()) > MOST_ELEMENTS:
        return None
    return {
        name: np.full(shape, b"", object) if datatype is DataType.BYTES else np.zeros(shape, datatype.dtype)
        for name, (datatype, shape) in shapes.items()
    }
