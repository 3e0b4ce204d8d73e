"""The classification extension: an output's best classes as strings, `<value>:<index>[:<label>]`."""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.types import DataType, Tensor
from halimede.core.types.error import clip, invalid
from halimede.core.types.tensor import join_bytes
from halimede.core.wire.steps import Steps, run

UNCLASSIFIABLE = (DataType.FP16, DataType.BF16, DataType.BOOL, DataType.BYTES)
"""Datatypes for which there are no classes, as in Triton."""


def check_classifiable(name: str, datatype: DataType) -> None:
    """Raise INVALID_ARG if an output of this datatype has no classes."""
    if datatype in UNCLASSIFIABLE:
        raise invalid(
            f"class result not available for output due to unsupported type '{datatype.name}', output '{clip(name)}'"
        )


MAX_ELEMENTS = 1_000_000
"""Maximum elements of an output that is classified, as in Triton."""

TEXTS_PER_STEP = 4096


def classify(tensor: Tensor, k: int, labels: Sequence[str], batched: bool) -> Tensor:
    """As `classify_steps`, at once."""
    return run(classify_steps(tensor, k, labels, batched))


def classify_steps(tensor: Tensor, k: int, labels: Sequence[str], batched: bool) -> Steps[Tensor]:
    """The `k` largest values of each row, best first, as a BYTES tensor of shape `[batch,]min(k, n)`.

    `batched` means that the first dimension counts rows; the other dimensions belong to one row. Equal values keep the
    order of their indices and NaN comes last. A label that is missing or empty is left out. A step makes at most
    TEXTS_PER_STEP texts. INVALID_ARG for a tensor of more than MAX_ELEMENTS elements.
    """
    check_classifiable(tensor.name, tensor.datatype)
    if prod(tensor.shape) > MAX_ELEMENTS:
        raise invalid("classification output tensor too large")
    values = tensor.array()
    batch = tensor.shape[0] if batched and tensor.shape else 1
    rows = values.reshape(batch, values.size // batch if batch else 0)
    count = min(k, rows.shape[1])
    texts: list[str] = []
    for row in rows:
        best = _largest(row, count)
        for at in range(0, count, TEXTS_PER_STEP):
            some = best[at : at + TEXTS_PER_STEP]
            texts += _class_texts(row[some].tolist(), some.tolist(), labels)
            yield 0
    shape = (batch, count) if batched and tensor.shape else (count,)
    return Tensor(tensor.name, DataType.BYTES, shape, join_bytes(texts))


def _largest(row: NDArray[Any], count: int) -> NDArray[np.intp]:
    """Indices of the `count` largest values, largest first."""
    # Both reverse the order without overflow: `~x` is -x-1 for signed and max-x for unsigned integers.
    keys = -row if row.dtype.kind == "f" else ~row
    if count < row.size:
        bound = np.partition(keys, count)[count]
        # Sorting a few candidates instead of all; a NaN bound compares with nothing and needs the full sort.
        if not np.isnan(bound):
            candidates = np.flatnonzero(keys <= bound)
            return candidates[np.argsort(keys[candidates], kind="stable")[:count]]
    return np.argsort(keys, kind="stable")[:count]


def _class_texts(values: list[Any], indices: list[int], labels: Sequence[str]) -> list[str]:
    form = "%f:%d" if values and isinstance(values[0], float) else "%d:%d"
    texts = []
    for value, index in zip(values, indices, strict=True):
        text = form % (value, index)
        label = labels[index] if index < len(labels) else ""
        texts.append(f"{text}:{label}" if label else text)
    return texts
