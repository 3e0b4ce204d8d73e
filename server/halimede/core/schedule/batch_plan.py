"""Batches that are not only rows after rows: ragged and padded inputs, inputs made from all requests, allowed sizes.

| | gathered | scattered |
|---|---|---|
| ragged input | the elements of all requests, flat | |
| target of `batch_input` | counts or shapes of one input of the requests | |
| target of `batch_output` | | flat, cut by the shapes of one input of the requests |
| padded input | rows of one length; the lengths before as one more input | its outputs are cut back |
| shape tensor | its values, which all requests share, with the batch's rows as the first one | with own rows first |
| BATCH_SIZES | the last row is repeated up to an allowed size | the repeated rows are dropped |

Requests of a batch are executed one group after the other if all together would be padded to more than
`MAX_PADDED_BYTES`: one long request makes each row of its batch as long. A request is never divided.

As in Triton, an element count is that of a whole request with all its rows, and there is one per request; an item is
one row, so BATCH_ITEM_SHAPE has an entry per row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.model_config import BatchInput, BatchInputKind, ModelConfig
from halimede.core.config.padding import Padding, batch_sizes_of, pad_element, padding_of
from halimede.core.config.shape_tensors import shape_tensors
from halimede.core.schedule.batching import OutputTypes, checked_output, columns, stack, whole
from halimede.core.types import InferenceError, Tensor, internal, invalid
from halimede.core.types.tensor import shape_text

Shape = tuple[int, ...]

MAX_PADDED_BYTES = 64 << 20
"""Maximum bytes of the padded inputs of several requests that are executed together."""

_REFERENCE_BYTES = 8
"""An element of an array of BYTES, beside its text."""


@dataclass(slots=True)
class Gathered:
    """The arrays of a batch, and what `BatchPlan.scatter` needs to divide the outputs.

    `rows` are those of the model's arrays: those of the requests, and repeated ones. `shapes` has the requests' shapes
    by input, `elements` the requests' element counts by ragged input, `padded` the common length by padded input.
    """

    inputs: dict[str, NDArray[Any]]
    rows: int
    shapes: dict[str, list[Shape]] = field(default_factory=dict)
    elements: dict[str, list[int]] = field(default_factory=dict)
    padded: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Padded:
    padding: Padding
    element: Any


class BatchPlan:
    """How the batches of one model are gathered and scattered. Made by `plan_batches`."""

    __slots__ = ("_batch_inputs", "_batches", "_cuts", "_padded", "_ragged", "_sizes", "_sources", "_values")

    def __init__(self, config: ModelConfig) -> None:
        """`config` must be complete and valid."""
        datatypes = {tensor.name: tensor.data_type for tensor in config.input}
        paddings = padding_of(config)
        self._batches = config.max_batch_size > 0
        self._ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        self._values = shape_tensors(config)
        self._batch_inputs = config.batch_input
        self._sources = {name: each.source_input[0] for each in config.batch_output for name in each.target_name}
        self._padded = {each.input: _Padded(each, pad_element(each.value, datatypes[each.input])) for each in paddings}
        self._cuts: dict[str, list[tuple[int, Padding]]] = {}
        for padding in paddings:
            for name, axis in padding.outputs.items():
                self._cuts.setdefault(name, []).append((axis, padding))
        self._sizes = batch_sizes_of(config)

    def gather(self, batch: Sequence[Sequence[Tensor]], rows: Sequence[int]) -> Gathered:
        """The arrays for the inputs of each request, which has that many rows."""
        total = sum(rows)
        gathered = Gathered({}, self._row_count(total))
        for name, parts in columns(batch):
            padded = self._padded.get(name)
            gathered.shapes[name] = [part.shape for part in parts]
            if name in self._ragged:
                gathered.elements[name] = [prod(part.shape) for part in parts]
                gathered.inputs[name] = stack([_flat(part) for part in parts])
            elif name in self._values:
                gathered.inputs[name] = _with_count(parts[0].array(), gathered.rows)
            elif padded is not None:
                self._pad(gathered, parts, padded, rows)
            elif gathered.rows != total:
                gathered.inputs[name] = _fill(parts, gathered.rows)
            else:
                gathered.inputs[name] = stack(parts)
        for made in self._batch_inputs:
            shapes = gathered.shapes.get(made.source_input[0])
            if shapes is None:
                raise _absent(made.source_input[0], f"batch input '{made.target_name[0]}'")
            array = make_batch_input(made, shapes)
            gathered.inputs.update(dict.fromkeys(made.target_name, array))
        return gathered

    @property
    def pads(self) -> bool:
        return bool(self._padded)

    def groups(self, batch: Sequence[Sequence[Tensor]], rows: Sequence[int]) -> list[list[int]]:
        """The requests that are executed together, by position: those of similar lengths, as few groups as possible.

        The padded inputs of a group have at most MAX_PADDED_BYTES, unless it has only one request.
        """
        row_bytes = [self._padded_row_bytes(inputs) for inputs in batch]
        order = sorted(range(len(batch)), key=lambda at: sum(row_bytes[at]))
        groups: list[list[int]] = []
        longest: list[int] = []
        count = 0
        for at in order:
            joint = [*map(max, longest, row_bytes[at])] if groups else []
            if not groups or self._row_count(count + rows[at]) * sum(joint) > MAX_PADDED_BYTES:
                groups.append([])
                joint, count = row_bytes[at], 0
            groups[-1].append(at)
            longest, count = joint, count + rows[at]
        return [sorted(group) for group in groups]

    def _padded_row_bytes(self, inputs: Sequence[Tensor]) -> list[int]:
        """The bytes of a row of each padded input, padded as if the request were alone; 0 for one that it lacks."""
        by_name = {tensor.name: tensor for tensor in inputs}
        sizes = []
        for name, padded in self._padded.items():
            tensor = by_name.get(name)
            if tensor is None:
                sizes.append(0)
                continue
            shape, axis = tensor.shape, padded.padding.axis
            elements = prod(shape[1:axis]) * padded.padding.padded(shape[axis]) * prod(shape[axis + 1 :])
            sizes.append(elements * (tensor.datatype.itemsize or _REFERENCE_BYTES))
        return sizes

    def _row_count(self, total: int) -> int:
        """The rows of the model's arrays for so many of the requests."""
        return next((size for size in self._sizes if size >= total), total)

    def scatter(
        self,
        outputs: Mapping[str, NDArray[Any]],
        datatypes: OutputTypes,
        gathered: Gathered,
        rows: Sequence[int],
        wanted: Sequence[Sequence[str]],
    ) -> list[list[Tensor]]:
        """Each request's answer, as `batching.scatter` makes it. INTERNAL for an output that does not fit the batch."""
        replies: list[list[Tensor]] = [[] for _ in wanted]
        for name, datatype in datatypes.items():
            takers = [at for at, names in enumerate(wanted) if not names or name in names]
            if not takers:
                continue
            array = checked_output(outputs, name, datatype)
            source = self._sources.get(name)
            if source is not None:
                parts = _by_shape(name, array, source, gathered)
            elif name in self._values:
                parts = [_with_count(array, count) for count in rows]
            elif self._batches:
                parts = self._by_rows(name, array, gathered, rows)
            else:
                parts = [array]
            for at in takers:
                replies[at].append(whole(name, datatype, parts[at]))
        return replies

    def _pad(self, gathered: Gathered, parts: list[Tensor], padded: _Padded, rows: Sequence[int]) -> None:
        padding = padded.padding
        lengths = [part.shape[padding.axis] for part in parts]
        length = gathered.padded[padding.input] = padding.padded(max(lengths))
        if gathered.rows == sum(rows) and min(lengths) == length:
            gathered.inputs[padding.input] = stack(parts)
        else:
            gathered.inputs[padding.input] = _fill(parts, gathered.rows, padding.axis, length, padded.element)
        if padding.lengths:
            each = np.repeat(np.array(lengths, np.int64), rows)
            gathered.inputs[padding.lengths] = np.pad(each, (0, gathered.rows - len(each)), mode="edge")

    def _by_rows(self, name: str, array: NDArray[Any], gathered: Gathered, rows: Sequence[int]) -> list[NDArray[Any]]:
        if array.shape[:1] != (gathered.rows,):
            raise internal(
                f"output '{name}': the model returned shape {shape_text(array.shape)} for a batch of {gathered.rows} "
                f"rows; its first dimension must be {gathered.rows}"
            )
        ends = list(accumulate(rows))
        parts = [array[end - count : end] for end, count in zip(ends, rows, strict=True)]
        for axis, padding in self._cuts.get(name, ()):
            length = gathered.padded[padding.input]
            if array.shape[axis : axis + 1] != (length,):
                raise internal(
                    f"output '{name}': the model returned shape {shape_text(array.shape)} for input '{padding.input}' "
                    f"of length {length}; its dimension {axis} must be {length}"
                )
            before = (slice(None),) * axis
            own = (shape[padding.axis] for shape in gathered.shapes[padding.input])
            parts = [part[(*before, slice(count))] for part, count in zip(parts, own, strict=True)]
        return parts


def plan_batches(config: ModelConfig) -> BatchPlan | None:
    """The plan of a complete, valid configuration; None for a model whose batches are rows after rows."""
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    made = config.batch_input or config.batch_output
    if ragged or made or padding_of(config) or batch_sizes_of(config) or shape_tensors(config):
        return BatchPlan(config)
    return None


def make_batch_input(made: BatchInput, shapes: Sequence[Shape]) -> NDArray[Any]:
    """The array of one `batch_input` for the shapes, rows first, of its source in each request.

    Shape by kind, for n requests with m rows of rank r: [n], [n], [n+1], [largest element count], [m,r], [m*r]. Only
    the shape of BATCH_MAX_ELEMENT_COUNT_AS_SHAPE has a meaning.
    """
    dtype = made.data_type.dtype
    counts = [prod(shape) for shape in shapes]
    match made.kind:
        case BatchInputKind.BATCH_ELEMENT_COUNT:
            values: Any = counts
        case BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT:
            values = list(accumulate(counts))
        case BatchInputKind.BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            values = list(accumulate(counts, initial=0))
        case BatchInputKind.BATCH_MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), dtype)
        case BatchInputKind.BATCH_ITEM_SHAPE | BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN:
            values = [shape[1:] for shape in shapes for _ in range(shape[0])]
    # From INT64, because numpy refuses a Python integer that is too large, which would fail the other requests too.
    array = np.array(values, np.int64).astype(dtype)
    return array.reshape(-1) if made.kind is BatchInputKind.BATCH_ITEM_SHAPE_FLATTEN else array


def _with_count(values: NDArray[Any], rows: int) -> NDArray[Any]:
    """A copy with the number of rows as its first value."""
    changed = values.copy()
    changed.reshape(-1)[:1] = rows
    return changed


def _flat(part: Tensor) -> Tensor:
    return Tensor(part.name, part.datatype, (prod(part.shape),), part.data)


def _fill(parts: list[Tensor], rows: int, axis: int = 1, length: int | None = None, element: Any = 0) -> NDArray[Any]:
    """The rows of all parts, then the last one again up to `rows`.

    With `length`, that of `axis`, which is shorter in the parts; the rest is `element`.
    """
    first = parts[0]
    shape = [rows, *first.shape[1:]]
    if length is not None:
        shape[axis] = length
    array = np.empty(shape, first.datatype.dtype)
    if length is not None:
        array.fill(element)
    end = 0
    for part in parts:
        start, end = end, end + part.shape[0]
        target = array[start:end]
        if length is not None:
            target = target[(*(slice(None),) * axis, slice(part.shape[axis]))]
        if target.shape != part.shape or part.datatype is not first.datatype:
            raise internal(f"input '{first.name}': {first!r} and {part!r} cannot share a batch")
        target[...] = part.array()
    array[end:] = array[end - 1]
    return array


def _by_shape(name: str, array: NDArray[Any], source: str, gathered: Gathered) -> list[NDArray[Any]]:
    shapes = gathered.shapes.get(source)
    if shapes is None:
        raise _absent(source, f"output '{name}'")
    ends = list(accumulate(map(prod, shapes)))
    if array.size != ends[-1]:
        raise internal(
            f"output '{name}': the model returned shape {shape_text(array.shape)} with {array.size} elements; input "
            f"'{source}', whose shape it gets, has {ends[-1]} elements in this batch"
        )
    flat = array.reshape(-1)
    return [flat[end - prod(shape) : end].reshape(shape) for end, shape in zip(ends, shapes, strict=True)]


def _absent(source: str, what: str) -> InferenceError:
    return invalid(f"input '{source}' is missing: {what} is made from it")
