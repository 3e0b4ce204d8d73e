"""Cuts the DATA of a call into messages: each has a prefix of five bytes, a flag for compression and its length.

A message that arrives in one piece is copied once. A large one is received into memory of its own, and the caller may
receive into it directly (`room`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct

import numpy as np

from halimede.core.types import Buffer, ErrorCode, InferenceError, internal

PREFIX_BYTES = 5
_PREFIX = Struct(">BI")
_EMPTY = memoryview(b"")

pack_prefix = _PREFIX.pack
"""`pack_prefix(is_compressed, size)`."""
unpack_prefix = _PREFIX.unpack_from
"""`unpack_prefix(data)`: the flag, which must be 0 or 1, and the size."""


class MessageTooLarge(InferenceError):
    """A message above `--grpc-max-input-size`, for which gRPC has its own status."""

    def __init__(self, size: int | str, max_bytes: int) -> None:
        super().__init__(
            ErrorCode.INVALID_ARG,
            f"request message size of {size} bytes exceeds the maximum allowed value of {max_bytes} bytes. Use "
            "--grpc-max-input-size to increase the limit.",
        )


@dataclass(slots=True)
class Message:
    """One message as it was sent. `content` is bytes, or a view of memory of its own.

    `held_bytes` were counted for it while it arrived or waited; who has the message gives them back.
    """

    content: Buffer
    is_compressed: bool
    held_bytes: int = 0

    def take_held(self) -> int:
        """The caller gives the counted bytes back from now on. Returns how many there are."""
        size, self.held_bytes = self.held_bytes, 0
        return size


class MessageReader:
    """The messages of one call, of at most `max_bytes` each; `too_large` makes the error for a larger one.

    `missing` is how much of the message in receipt has not arrived, 0 for none.
    """

    __slots__ = ("_content", "_is_compressed", "_max_bytes", "_prefix", "_too_large", "filled_bytes", "missing")

    def __init__(self, max_bytes: int, too_large: Callable[[int], InferenceError]) -> None:
        self._max_bytes = max_bytes
        self._too_large = too_large
        self._prefix = b""
        self._content = _EMPTY
        self.filled_bytes = 0
        """What has arrived of the message in receipt."""
        self._is_compressed = False
        self.missing = 0

    @property
    def is_within(self) -> bool:
        """Whether a message, or its prefix, is incomplete."""
        return bool(self.missing or self._prefix)

    def read(self, data: memoryview) -> Iterator[Message]:
        """The messages that `data` completes. INTERNAL for an invalid prefix."""
        at, end = 0, len(data)
        if self.missing:
            at = min(end, self.missing)
            self._content[self.filled_bytes : self.filled_bytes + at] = data[:at]
            if (message := self.received(at)) is not None:
                yield message
        while at < end:
            if self._prefix or end - at < PREFIX_BYTES:
                size = min(end - at, PREFIX_BYTES - len(self._prefix))
                self._prefix += data[at : at + size]
                at += size
                if len(self._prefix) < PREFIX_BYTES:
                    return
                flag, length = _PREFIX.unpack(self._prefix)
                self._prefix = b""
            else:
                flag, length = _PREFIX.unpack_from(data, at)
                at += PREFIX_BYTES
            if flag > 1:
                raise internal(f"a message begins with the flag {flag}, not 0 or 1")
            if length > self._max_bytes:
                raise self._too_large(length)
            if end - at >= length:
                yield Message(bytes(data[at : at + length]), flag == 1)
                at += length
                continue
            # Memory from numpy is not touched before data arrives: an announced length alone uses no memory.
            self._content = np.empty(length, dtype=np.uint8).data
            self._is_compressed = flag == 1
            self.filled_bytes = end - at
            self._content[: self.filled_bytes] = data[at:end]
            self.missing = length - self.filled_bytes
            return

    def room(self) -> memoryview:
        """The memory of the rest of the message in receipt; empty without one."""
        return self._content[self.filled_bytes :] if self.missing else _EMPTY

    def received(self, size: int) -> Message | None:
        """`size` bytes were received into `room`. Returns the message if it is complete."""
        self.filled_bytes += size
        self.missing -= size
        if self.missing:
            return None
        content, self._content, self.filled_bytes = self._content, _EMPTY, 0
        return Message(content, self._is_compressed)
