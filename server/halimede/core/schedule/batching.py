"""From the requests of a batch to one array per input, and from one array per output to the requests' answers.

The cost is in the copies: a batch of one request consists of views; several requests are copied once, into one buffer
per input; outputs are sliced, not copied. BYTES elements are Python objects in the model, so they are always made. The
outputs of a model are not trusted: one that does not fit is an INTERNAL error that names it.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.core.config.check_request import FRAMED_AT_ONCE
from halimede.core.types import DataType, Tensor, internal
from halimede.core.types.tensor import concatenate, join_bytes, shape_text

OutputTypes = Mapping[str, DataType]
"""A model's outputs in the configuration's order."""


def gather(batch: Sequence[Sequence[Tensor]]) -> dict[str, NDArray[Any]]:
    """One array per input name from the inputs of each request, rows in the requests' order.

    The requests name the same inputs with the same datatypes, and shapes that differ in the first dimension at most.
    """
    first = batch[0]
    if len(batch) == 1:
        return {tensor.name: tensor.array() for tensor in first}
    return {name: stack(parts) for name, parts in columns(batch)}


def columns(batch: Sequence[Sequence[Tensor]]) -> list[tuple[str, list[Tensor]]]:
    """Each input's name and its tensors in the requests' order. INTERNAL if the requests name different inputs."""
    first = batch[0]
    for inputs in batch:
        if len(inputs) != len(first):
            names = [sorted(tensor.name for tensor in each) for each in (first, inputs)]
            raise internal(f"requests with inputs {names[0]} and {names[1]} cannot share a batch")
    return [(tensor.name, [_input(inputs, at, tensor.name) for inputs in batch]) for at, tensor in enumerate(first)]


def wanted_outputs(datatypes: OutputTypes, wanted: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The outputs that a batch must compute, in the configuration's order. A request that names no output gets all."""
    if not all(wanted):
        return tuple(datatypes)
    named = {name for names in wanted for name in names}
    return tuple(name for name in datatypes if name in named)


def scatter(
    outputs: Mapping[str, NDArray[Any]],
    datatypes: OutputTypes,
    rows: Sequence[int] | None,
    wanted: Sequence[Sequence[str]],
) -> list[list[Tensor]]:
    """Each request's answer, in the configuration's order.

    `rows` are the rows of each request; None for a model that does not batch, whose batches hold one request. `wanted`
    are the outputs that each request names, empty for all. Raises INTERNAL for an output that is missing or has the
    wrong datatype or row count.
    """
    replies: list[list[Tensor]] = [[] for _ in wanted]
    for name, datatype in datatypes.items():
        takers = [at for at, names in enumerate(wanted) if not names or name in names]
        if not takers:
            continue
        array = checked_output(outputs, name, datatype)
        if rows is None:
            (reply,) = replies
            reply.append(whole(name, datatype, array))
            continue
        total = sum(rows)
        if not array.ndim or array.shape[0] != total:
            raise internal(
                f"output '{name}': the model returned shape {shape_text(array.shape)} for a batch of {total} rows; "
                f"its first dimension must be {total}"
            )
        if len(rows) == 1:
            replies[0].append(whole(name, datatype, array))
            continue
        slices = _slices(name, datatype, array, rows)
        for at in takers:
            replies[at].append(slices[at])
    return replies


def checked_output(outputs: Mapping[str, NDArray[Any]], name: str, datatype: DataType) -> NDArray[Any]:
    """The output of that name; INTERNAL if it is missing or has the wrong datatype."""
    array = outputs.get(name)
    if not isinstance(array, np.ndarray):
        what = "nothing" if array is None else f"a {type(array).__name__}"
        raise internal(f"output '{name}': the model returned {what}, not an array")
    if array.dtype != datatype.dtype:
        raise internal(
            f"output '{name}': the model returned {array.dtype}, "
            f"but the configuration says {datatype.config_name} ({datatype.dtype})"
        )
    return array


def check_reply(
    tensors: Sequence[Tensor], datatypes: OutputTypes, wanted: Sequence[str], rows: int | None
) -> list[Tensor]:
    """One request's own answer: the wanted outputs of `tensors`, in the order in which the model sent them.

    `rows` are the request's, None for a model that does not batch. Raises INTERNAL for an output that the model does
    not have or sent twice, or whose datatype, rows or size are wrong.
    """
    if len(tensors) == 1:
        # The common answer, one output of numbers, takes a few comparisons. If one fails, the full check explains.
        sole = tensors[0]
        expected = datatypes.get(sole.name)
        if (
            sole.datatype is expected
            and sole.shape
            and (rows is None or sole.shape[0] == rows)
            and (not wanted or sole.name in wanted)
        ):
            size = expected.itemsize * prod(sole.shape)
            if size and size == len(sole.data) and min(sole.shape) > 0:
                return [sole]
    named: dict[str, Tensor] = {}
    for tensor in tensors:
        datatype = datatypes.get(tensor.name)
        if datatype is None:
            raise internal(f"unexpected inference output '{tensor.name}'; the model has {', '.join(datatypes)}")
        if tensor.name in named:
            raise internal(f"output '{tensor.name}': the model sent it twice in one answer")
        if tensor.datatype is not datatype:
            raise internal(
                f"output '{tensor.name}': the model sent {tensor.datatype.name}, "
                f"but the configuration says {datatype.config_name}"
            )
        if rows is not None and tensor.shape[:1] != (rows,):
            sent = f"the model sent shape {shape_text(tensor.shape)} for a request of {rows} rows"
            raise internal(f"output '{tensor.name}': {sent}; its first dimension must be {rows}")
        check_size(tensor)
        named[tensor.name] = tensor
    return [tensor for name, tensor in named.items() if not wanted or name in wanted]


def _input(inputs: Sequence[Tensor], at: int, name: str) -> Tensor:
    """The input of that name, which is at this index unless the client orders its inputs differently."""
    if inputs[at].name == name:
        return inputs[at]
    for tensor in inputs:
        if tensor.name == name:
            return tensor
    raise internal(f"requests with and without input '{name}' cannot share a batch")


def stack(parts: list[Tensor]) -> NDArray[Any]:
    """The rows of all parts; for one part, a view of its bytes.

    Wire layout is row-major, so the concatenated bytes are the array.
    """
    first = parts[0]
    if len(parts) == 1:
        return first.array()
    rows = 0
    for part in parts:
        if part.shape[1:] != first.shape[1:] or part.datatype is not first.datatype:
            raise internal(f"input '{first.name}': {first!r} and {part!r} cannot share a batch")
        rows += part.shape[0]
    data = concatenate([part.data for part in parts])
    return Tensor(first.name, first.datatype, (rows, *first.shape[1:]), data).array()


def whole(name: str, datatype: DataType, array: NDArray[Any]) -> Tensor:
    """The array as a tensor, over the array's own memory if that is contiguous."""
    if datatype is DataType.BYTES:
        return Tensor(name, datatype, array.shape, _encode(name, array))
    return Tensor(name, datatype, array.shape, _data(datatype, array))


def _slices(name: str, datatype: DataType, array: NDArray[Any], rows: Sequence[int]) -> list[Tensor]:
    """A tensor per request, over the array's own memory."""
    tail = array.shape[1:]
    slices: list[Tensor] = []
    start = 0
    if datatype is DataType.BYTES:
        for count in rows:
            part = array[start : start + count]
            slices.append(Tensor(name, datatype, part.shape, _encode(name, part)))
            start += count
        return slices
    data = _data(datatype, array)
    row_bytes = datatype.itemsize * prod(tail)
    for count in rows:
        stop = start + count * row_bytes
        slices.append(Tensor(name, datatype, (count, *tail), data[start:stop]))
        start = stop
    return slices


def _data(datatype: DataType, array: NDArray[Any]) -> memoryview:
    # A view with a zero in its shape cannot be cast to bytes.
    if not array.size:
        return memoryview(b"")
    return np.ascontiguousarray(array, dtype=datatype.dtype).reshape(-1).view(np.uint8).data


def _encode(name: str, array: NDArray[Any]) -> bytes:
    elements: Iterable[Any] = array.reshape(-1).tolist()
    for at, element in enumerate(elements):
        if not isinstance(element, bytes | str):
            raise internal(
                f"output '{name}': element {at} is a {type(element).__name__}; a TYPE_STRING output has bytes or str"
            )
    try:
        return join_bytes(elements)
    except UnicodeEncodeError as error:
        raise internal(f"output '{name}': an element is not text that UTF-8 can encode: {error.reason}") from error


def check_size(tensor: Tensor) -> None:
    """Raise unless the data has the length that follows from datatype and shape.

    Of very many BYTES elements only the minimum length is checked. Walking them takes seconds, on the loop if they come
    from a process, and every reader walks them again: a client, the next model's check, the JSON of a response.
    """
    if min(tensor.shape, default=0) < 0:
        raise internal(f"output '{tensor.name}': shape {shape_text(tensor.shape)} has a negative dimension")
    expected = prod(tensor.shape)
    if tensor.datatype is not DataType.BYTES:
        size = expected * tensor.datatype.itemsize
        if len(tensor.data) != size:
            raise internal(
                f"output '{tensor.name}': the model sent {len(tensor.data)} bytes; "
                f"{tensor.datatype.name} of shape {shape_text(tensor.shape)} has {size}"
            )
        return
    data = memoryview(tensor.data)
    if expected > FRAMED_AT_ONCE and len(data) >= 4 * expected:
        return
    count = at = 0
    while at < len(data):
        at += 4 + int.from_bytes(data[at : at + 4], "little")
        count += 1
    if at != len(data) or count != expected:
        raise internal(
            f"output '{tensor.name}': the model sent {len(data)} bytes that are not the {expected} elements "
            f"of shape {shape_text(tensor.shape)}"
        )
