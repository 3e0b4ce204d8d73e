"""INFERS and ANSWERS: the requests that a front-end process passes on together, and their answers.

These frames and EXECUTE consist of groups. The requests of a group have equal descriptions (model, names, shapes,
sizes), which are sent once. Most clients send the same kind of request, so a frame usually has one group. A request
with tensors in shared memory, or with texts of its own, is a group of its own.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from halimede.core.types import Buffer, InferenceRequest, InferenceResponse
from halimede.workers.frames.calls import (
    answer_form,
    describe_answer,
    describe_call,
    known_answer_form,
    make_answer,
)
from halimede.workers.frames.kinds import (
    ANSWERS,
    HEADER,
    INFERS,
    MAX_CLIENT_TEXT_BYTES,
    FrameError,
    describe_decode_error,
)
from halimede.workers.frames.requests import RequestReader
from halimede.workers.frames.tensors import PADDING, REMEMBERED_BYTES, Locate, Place, data_start

_WANTED = struct.Struct("<Q")
_GROUP = struct.Struct("<IIIQ")
"""Length of the description, of what each request has of its own, number of requests, bytes of each."""


class Groups:
    """Groups of one frame, while they are encoded."""

    def __init__(self, start: int, entry: str) -> None:
        """`start`: where the first group begins in the body. `entry`: the layout of the numbers of one request."""
        self.parts: list[Buffer] = []
        self.end = start
        self._described = b""
        self._entry = entry
        self._numbers: list[int] = []
        self._owns: list[bytes] = []
        self._data: list[Buffer] = []
        self._size = 0

    def add(self, numbers: tuple[int, ...], described: bytes, own: bytes, data: list[Buffer], size: int) -> None:
        """Add a request. Equal descriptions are mostly the same object, because the encoder caches them."""
        is_like = size == self._size and (not own) is (not self._owns) and self._numbers
        if is_like and (described is self._described or described == self._described):
            self._numbers += numbers
            self._data += data
            if own:
                self._owns.append(own)
            return
        if self._numbers:
            self.close()
        self._described, self._numbers, self._data, self._size = described, [*numbers], data, size
        self._owns = [own] if own else []

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
        count = len(numbers) // len(self._entry)
        entries = _entries(self._entry, count)
        owns = b"".join(self._owns)
        start = self.end + _GROUP.size + len(described) + entries.size + len(owns)
        base = data_start(start)
        head = _GROUP.pack(len(described), len(owns), count, size)
        self.parts += (head, described, entries.pack(*numbers), owns, PADDING[base - start], *self._data)
        self.end = base + count * size
        self._numbers = []


@lru_cache(256)
def _entries(entry: str, count: int) -> struct.Struct:
    return struct.Struct("<" + entry * count)


def encode_infers(
    requests: Sequence[tuple[int, InferenceRequest]],
    place: Place,
    wanted: Callable[[], int],
    on_error: Callable[[int, Exception], None],
) -> Buffer:
    """An INFERS frame of numbered requests. `wanted` as in `calls.encode_infer`. `on_error` gets the number of each
    request that cannot be sent, which the frame then lacks."""
    groups = Groups(_WANTED.size, "I")
    for number, request in requests:
        try:
            described = describe_call(request, place, MAX_CLIENT_TEXT_BYTES)
        except (ValueError, struct.error) as error:
            on_error(number, error)
        else:
            groups.add((number,), *described)
    groups.close()
    head = HEADER.pack(groups.end, INFERS)
    return b"".join((head, _WANTED.pack(wanted()), *groups.parts))


def wanted_bytes(body: memoryview) -> int:
    """The bytes of an INFERS frame's requests that did not fit into the sender's arena. FrameError."""
    try:
        (wanted,) = _WANTED.unpack_from(body)
    except struct.error as error:
        raise FrameError("INFERS: too short") from error
    return int(wanted)


def decode_infers(body: memoryview, locate: Locate) -> Iterator[tuple[int, InferenceRequest]]:
    """The numbers and requests of an INFERS frame. FrameError. Tensors in the frame are views of `body`."""
    try:
        for (number,), request in read_requests(RequestReader(body, locate, MAX_CLIENT_TEXT_BYTES), _WANTED.size, "I"):
            yield number, request
    except (struct.error, ValueError, IndexError, KeyError) as error:
        raise FrameError(f"INFERS: {describe_decode_error(error)}") from error


def encode_answers(answers: Sequence[tuple[int, InferenceResponse]], place: Place) -> Buffer:
    """An ANSWERS frame: each answer with the number of its request."""
    groups = Groups(0, "I")
    last: InferenceResponse | None = None
    for number, response in answers:
        if last is not None and _is_like(response, last):
            groups.repeat(number, response.outputs[0].data)
            continue
        described, data, size = describe_answer(response, place)
        groups.add((number,), described, b"", data, size)
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
    for described, numbers, _, base, size in _read(body, 0, "I"):
        form = known_answer_form(bytes(described)) if len(described) <= REMEMBERED_BYTES else answer_form(described)
        for index, (number,) in enumerate(numbers):
            yield number, make_answer(form, body, base + index * size, locate)


def read_requests(reader: RequestReader, at: int, entry: str) -> Iterator[tuple[tuple[Any, ...], InferenceRequest]]:
    """The numbers of each request of a frame, and the request. `at` and `entry` as in `Groups`. The errors are those of
    `RequestReader`."""
    for described, entries, owns, start, size in _read(reader.body, at, entry):
        known = reader.form(described)
        own_at = 0
        for index, numbers in enumerate(entries):
            request, own_at = reader.request(known, start + index * size, owns, own_at)
            yield numbers, request


def _read(
    body: memoryview, at: int, entry: str
) -> Iterator[tuple[memoryview, Iterator[tuple[Any, ...]], memoryview, int, int]]:
    """The groups of a frame: description, numbers of each request, what each has of its own, start and length of the
    first one's data."""
    layout = _entries(entry, 1)
    end = len(body)
    while at < end:
        length, own_length, count, size = _GROUP.unpack_from(body, at)
        at += _GROUP.size
        described = body[at : at + length]
        at += length
        own_at = at + layout.size * count
        stop = own_at + own_length
        if stop > end or not count:
            raise FrameError(f"a group of {count} requests that ends too early")
        base = data_start(stop)
        yield described, layout.iter_unpack(body[at:own_at]), body[own_at:stop], base, size
        at = base + count * size
