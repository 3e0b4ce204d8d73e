"""Requests and answers of all kinds for tests of the worker channel's codec, and a fake shared memory."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from hypothesis import strategies as st

from halimede.backends.hosting import RESCHEDULED, Answer, BatchReply, Reply
from halimede.channel.frames import HEADER, INLINE_BYTES
from halimede.core.types import (
    Buffer,
    DataType,
    ErrorCode,
    InferenceError,
    InferenceRequest,
    InferenceResponse,
    Tensor,
)
from halimede.workers.frames.answers import (
    Done,
    decode_done,
    encode_done,
)
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.worker import BatchItem

INPUTS = ("in", "zweiter ✓", *(f"x{at}" for at in range(300)))
OUTPUTS = ("out", "größe", "n")
OUT = {name: at for at, name in enumerate(OUTPUTS)}
TYPES = [each for each in DataType if each is not DataType.INVALID]


class Shelf:
    """Fake shared memory: blocks by segment and offset."""

    def __init__(self, stores: bool) -> None:
        self._stores = stores
        self.blocks: dict[tuple[int, int], bytes] = {}

    def store(self, data: Buffer) -> tuple[int, int] | None:
        if not self._stores:
            return None
        block = 1 + len(self.blocks) % 3, 64 * len(self.blocks)
        self.blocks[block] = bytes(data)
        return block

    def locate(self, segment: int, offset: int, size: int) -> memoryview:
        data = self.blocks.get((segment, offset))
        if data is None or len(data) != size:
            raise ValueError(f"{size} bytes at {offset} of {segment}")
        return memoryview(data)


def body_of(frame: Buffer, kind: IntEnum) -> memoryview:
    length, number = HEADER.unpack_from(frame)
    assert (length, number) == (len(frame) - HEADER.size, kind)
    return memoryview(bytes(frame))[HEADER.size :]


def plain(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.name, t.datatype, t.shape, bytes(t.data)) for t in tensors]


def text(**how: Any) -> st.SearchStrategy[str]:
    return st.text(st.characters(codec="utf-8"), **how)


SIZES = st.sampled_from([0, 1, 4, 7, 16, 100, INLINE_BYTES, INLINE_BYTES + 1, 3 * INLINE_BYTES])
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, -1, 2**63 - 1, -(2**63)]), max_size=5) | st.just([1] * 64)
PARAMETERS = st.dictionaries(
    text(max_size=5),
    st.booleans() | st.integers() | st.floats(allow_nan=False) | text(max_size=9),
    max_size=3,
)


def tensors(names: Sequence[str], most: int = 4) -> st.SearchStrategy[list[Tensor]]:
    def made(name: str, datatype: DataType, shape: list[int], size: int, filling: int) -> Tensor:
        return Tensor(name, datatype, tuple(shape), bytes([filling]) * size)

    one = st.builds(made, st.sampled_from(names), st.sampled_from(TYPES), SHAPES, SIZES, st.integers(0, 255))
    return st.lists(one, max_size=most, unique_by=lambda tensor: tensor.name)


REQUESTS = st.builds(
    InferenceRequest,
    st.just("m"),
    id=text(max_size=20),
    inputs=tensors(INPUTS),
    outputs=st.lists(st.sampled_from(OUTPUTS), max_size=3, unique=True).map(tuple),
    parameters=PARAMETERS,
    timeout_us=st.integers(0, 2**64 - 1),
    sequence_id=st.integers(0, 2**64 - 1) | text(max_size=9).map(lambda name: name or 0),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
)
U32 = st.integers(0, 2**32 - 1)
ITEMS = st.builds(BatchItem, st.integers(0, 2**64 - 1), REQUESTS, U32, st.just(False), sequence_slot=U32)
ERRORS = st.builds(InferenceError, st.sampled_from(list(ErrorCode)), text(max_size=50))
REPLIES = st.one_of(st.builds(Answer, tensors(OUTPUTS), PARAMETERS), ERRORS, st.none())
BATCH_REPLIES = REPLIES | st.just(RESCHEDULED)
U64 = st.integers(0, 2**64 - 1)
PLACED = st.booleans()


def check_same(reply: Reply, sent: BatchReply) -> None:
    if isinstance(sent, Answer):
        assert isinstance(reply, Answer)
        assert plain(reply.outputs) == plain(sent.outputs)
        assert reply.parameters == sent.parameters
        assert [type(value) for value in reply.parameters.values()] == [type(v) for v in sent.parameters.values()]
    else:
        assert reply == (None if sent is RESCHEDULED else sent)


NAMES = text(max_size=9)
CALLS = st.builds(
    InferenceRequest,
    NAMES,
    text(max_size=9),
    id=text(max_size=20),
    inputs=tensors(["in", "größe ✓", "", "x" * 300]),
    outputs=st.lists(NAMES, max_size=3).map(tuple),
    parameters=PARAMETERS,
    priority=U64,
    timeout_us=U64,
    sequence_id=U64 | text(max_size=9).map(lambda name: name or 0),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    wants_one=st.booleans(),
)
CALL_ANSWERS = st.builds(
    InferenceResponse,
    NAMES,
    text(max_size=9),
    text(max_size=20),
    tensors(["out", "größe ✓", "", "x" * 300]),
    PARAMETERS,
    st.none(),
    st.booleans(),
) | st.builds(InferenceResponse, NAMES, NAMES, NAMES, error=ERRORS, final=st.booleans())


def request(**fields: Any) -> BatchItem:
    return BatchItem(1, InferenceRequest("m", **fields), 1, False)


def done_frame(replies: list[BatchReply], shelf: Shelf | None = None) -> Buffer:
    shelf = shelf or Shelf(False)
    return encode_done(1, replies, False, (1, 2, 3), OUT, shelf.store, lambda: (0, ()))


def decoded(frame: Buffer, shelf: Shelf | None = None) -> Done:
    return decode_done(body_of(frame, WorkerFrame.DONE), OUTPUTS, (shelf or Shelf(False)).locate)


def out(size: int = 4, name: str = "out") -> Tensor:
    return Tensor(name, DataType.INT8, (size,), bytes(size))


def done_of(body: bytes, shelf: Shelf) -> Done:
    return decode_done(memoryview(body), OUTPUTS, shelf.locate)
