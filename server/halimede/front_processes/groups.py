"""INFERS and ANSWERS: the requests that a front-end process passes on together, and their answers.

Answers are sent in groups. Those of a group have equal descriptions (model, names, shapes, sizes), which are sent once.
Most answers are of the same kind, so a frame usually has one group. An answer with tensors in shared memory, or with
texts of its own, is a group of its own.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from halimede.channel.frames import HEADER, FrameError
from halimede.core.types import Buffer, InferenceRequest, InferenceResponse
from halimede.front_processes.frames import ANSWERS, INFERS
from halimede.inference_frames.calls import answer_form, describe_answer, describe_call, known_answer_form, make_answer
from halimede.inference_frames.kinds import MAX_CLIENT_TEXT_BYTES, describe_decode_error
from halimede.inference_frames.requests import Described, encode_requests, read_requests
from halimede.inference_frames.tensors import PADDING, REMEMBERED_BYTES, Locate, Store, data_start

_WANTED = struct.Struct("<Q")
_GROUP = struct.Struct("<IIQ")
"""Length of the description, number of answers, bytes of each."""


class _Groups:
    """Groups of one frame, while they are encoded."""

    def __init__(self, start: int) -> None:
        """`start`: where the first group begins in the body."""
        self.parts: list[Buffer] = []
        self.end = start
        self._described = b""
        self._numbers: list[int] = []
        self._data: list[Buffer] = []
        self._size = 0

    def add(self, number: int, described: bytes, data: list[Buffer], size: int) -> None:
        """Add a request. Equal descriptions are mostly the same object, because the encoder caches them."""
        if self._numbers and (described is self._described or described == self._described):
            self._numbers.append(number)
            self._data += data
            return
        self.close()
        self._described, self._numbers, self._data, self._size = described, [number], data, size

    def repeat(self, number: int, data: Buffer) -> None:
        """Add a request like the last one, whose only tensor has these bytes."""
        self._numbers.append(number)
        self._data.append(data)
        over = -len(data) & 15
        if over:
            self._data.append(PADDING[over])

    def close(self) -> None:
        """End the current group, if there is one."""
        if not self._numbers:
            return
        numbers, described, size = self._numbers, self._described, self._size
        count = len(numbers)
        start = self.end + _GROUP.size + len(described) + 4 * count
        base = data_start(start)
        head = _GROUP.pack(len(described), count, size)
        self.parts += (head, described, _numbers(count).pack(*numbers), PADDING[base - start], *self._data)
        self.end = base + count * size
        self._numbers = []


@lru_cache(256)
def _numbers(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}I")


def encode_infers(
    requests: Sequence[tuple[int, InferenceRequest]],
    store: Store,
    wanted: Callable[[], int],
    on_error: Callable[[int, Exception], None],
) -> Buffer:
    """An INFERS frame of numbered requests. `wanted` as in `calls.encode_infer`. `on_error` gets the number of each
    request that cannot be sent, which the frame then lacks."""
    described: list[tuple[int, int, int, Described]] = []
    for number, request in requests:
        try:
            described.append((number, 0, 0, describe_call(request, store, MAX_CLIENT_TEXT_BYTES)))
        except (ValueError, struct.error) as error:
            on_error(number, error)
    return encode_requests(INFERS, wanted(), described)


def wanted_bytes(body: memoryview) -> int:
    """The bytes of an INFERS frame's requests that did not fit into the sender's arena. FrameError."""
    try:
        (wanted,) = _WANTED.unpack_from(body)
    except struct.error as error:
        raise FrameError("INFERS: too short") from error
    return int(wanted)


def decode_infers(body: memoryview, locate: Locate) -> Sequence[tuple[int, InferenceRequest]]:
    """The numbers and requests of an INFERS frame. FrameError. Tensors in the frame are views of `body`."""
    try:
        found = read_requests(body, locate, MAX_CLIENT_TEXT_BYTES)
        return [(number, request) for number, _, _, request in found]
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFERS: {describe_decode_error(error)}") from error


def encode_answers(answers: Sequence[tuple[int, InferenceResponse]], store: Store) -> Buffer:
    """An ANSWERS frame: each answer with the number of its request."""
    groups = _Groups(0)
    last: InferenceResponse | None = None
    for number, response in answers:
        if last is not None and _is_like(response, last):
            groups.repeat(number, response.outputs[0].data)
            continue
        described, data, size = describe_answer(response, store)
        groups.add(number, described, data, size)
        last = response if size and _is_plain(response) else None
    groups.close()
    return b"".join((HEADER.pack(groups.end, ANSWERS), *groups.parts))


def _is_plain(response: InferenceResponse) -> bool:
    return response.error is None and not response.id and not response.parameters and len(response.outputs) == 1


def _is_like(response: InferenceResponse, last: InferenceResponse) -> bool:
    """Whether its description is that of the last one, which is plain. Most answers of a batch are alike, and comparing
    them costs half as much as describing them."""
    if not _is_plain(response):
        return False
    (output,), (known,) = response.outputs, last.outputs
    return (
        len(output.data) == len(known.data)
        and output.shape == known.shape
        and output.name == known.name
        and output.datatype is known.datatype
        and response.model_version == last.model_version
        and response.model_name == last.model_name
        and response.final == last.final
    )


def decode_answers(body: memoryview, locate: Locate) -> Iterator[tuple[int, InferenceResponse]]:
    """The answers in an ANSWERS frame. Not checked: the server made it. Tensors are views of `body`."""
    for described, numbers, base, size in _read(body, 0):
        form = known_answer_form(bytes(described)) if len(described) <= REMEMBERED_BYTES else answer_form(described)
        for index, number in enumerate(numbers):
            yield number, make_answer(form, body, base + index * size, locate)


def _read(body: memoryview, at: int) -> Iterator[tuple[memoryview, Sequence[int], int, int]]:
    """The groups of a frame: description, numbers, start and length of the first request's data."""
    end = len(body)
    while at < end:
        length, count, size = _GROUP.unpack_from(body, at)
        at += _GROUP.size
        described = body[at : at + length]
        at += length
        if at + 4 * count > end or not count:
            raise FrameError(f"a group of {count} answers that ends too early")
        numbers = _numbers(count).unpack_from(body, at)
        base = data_start(at + 4 * count)
        yield described, numbers, base, size
        at = base + count * size
