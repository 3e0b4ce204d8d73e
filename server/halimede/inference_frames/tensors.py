"""Tensors in a frame: their description, and their bytes, in the frame itself or in shared memory."""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

from halimede.channel.frames import HEADER, INLINE_BYTES, FrameError
from halimede.core.types import Buffer, DataType, Tensor
from halimede.inference_frames.texts import encode_name

MAX_DIMENSIONS = 255

REMEMBERED_BYTES = 4 << 10
"""Longer descriptions are not cached."""

REMEMBERED = 128
"""The number of cached descriptions of each kind, the most recently used ones."""

Store = Callable[[Buffer], "tuple[int, int] | None"]
"""Places a tensor's bytes in shared memory: segment (from 1) and offset; None to send them in the frame."""

Locate = Callable[[int, int, int], Buffer]
"""The bytes at segment, offset and length. ValueError if the sender may not refer to them."""

TensorForm = tuple[str, DataType, tuple[int, ...], int, int, int]
"""Name, datatype, shape, segment (0 for the frame itself), offset, length."""

# position of the name or its length, datatype, number of dimensions, segment (0 for the frame itself), offset, length.
_TENSOR = struct.Struct("<HBBHQQ")
_DIMENSIONS = tuple(struct.Struct(f"<{count}q") for count in range(MAX_DIMENSIONS + 1))
_DATATYPES = {each.number: each for each in DataType if each is not DataType.INVALID}
_BYTES = DataType.BYTES
PADDING = tuple(bytes(count) for count in range(16))


def describe_tensor(
    name: int | str, datatype: DataType, shape: tuple[int, ...], segment: int, at: int, size: int
) -> bytes:
    """The description of a tensor, whose name is text or a position. struct.error, ValueError."""
    text = encode_name(name) if isinstance(name, str) else b""
    position = len(text) if isinstance(name, str) else name
    dimensions = len(shape)
    tensor = _TENSOR.pack(position, datatype.number, dimensions, segment, at, size)
    return tensor + _DIMENSIONS[dimensions].pack(*shape) + text


_describe = lru_cache(8 * REMEMBERED)(describe_tensor)


def add_tensor(
    tensor: Tensor, name: int | str, described: list[bytes], at: int, store: Store, data: list[Buffer]
) -> int:
    """Describe a tensor. If its bytes are sent in the frame, they are added to `data`, at offset `at`. Returns the
    offset for the next tensor."""
    payload = tensor.data
    size = len(payload)
    put = None if size <= INLINE_BYTES else store(payload)
    if put is not None:
        described.append(_describe(name, tensor.datatype, tensor.shape, *put, size))
        return at
    described.append(_describe(name, tensor.datatype, tensor.shape, 0, at, size))
    data.append(payload)
    over = -size & 15
    if over:
        data.append(PADDING[over])
    return at + size + over


def data_start(described_end: int) -> int:
    """The offset of the tensors' bytes in the body. They are aligned to the start of the frame, before its header."""
    return (described_end + HEADER.size + 15 & ~15) - HEADER.size


def read_tensors(
    described: Buffer, at: int, count: int, names: tuple[str, ...] | None
) -> tuple[Sequence[TensorForm], int]:
    """Read descriptions of tensors; returns them and the offset of their end. Without `names`, each description has its
    name as text, and the field for the position is the length of the name. struct.error, ValueError, IndexError,
    KeyError."""
    forms: list[TensorForm] = []
    for _ in range(count):
        position, number, dimensions, segment, offset, size = _TENSOR.unpack_from(described, at)
        at += _TENSOR.size
        shape = _DIMENSIONS[dimensions].unpack_from(described, at)
        at += dimensions * 8
        if names is not None:
            name = names[position]
        else:
            name = str(described[at : at + position], "utf-8")
            at += position
        forms.append((name, _DATATYPES[number], shape, segment, offset, size))
    return forms, at


def make_tensors(
    forms: Sequence[TensorForm], body: memoryview, base: int, locate: Locate, may_change: bool
) -> list[Tensor]:
    """Tensors whose bytes are in `body` from `base` on, or in shared memory, where `locate` finds them. FrameError.

    `may_change`: the sender may still write to that shared memory. So BYTES are copied, because their element lengths
    must not change after they are checked. Other datatypes are used in place.
    """
    tensors = []
    for name, datatype, shape, segment, offset, size in forms:
        if segment:
            payload = locate(segment, offset, size)
            if may_change and datatype is _BYTES:
                payload = bytes(payload)
        else:
            start = base + offset
            stop = start + size
            if stop > len(body):
                raise FrameError(f"a tensor that ends at byte {stop} of {len(body)}")
            payload = body[start:stop]
        tensors.append(Tensor(name, datatype, shape, payload))
    return tensors
