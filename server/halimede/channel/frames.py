"""The header of a frame, tables of frames, and the frames that every channel has.

Standard library only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from halimede.core.types import Buffer

MAX_CONTROL_BYTES = 16 << 20
"""Maximum bytes of a JSON frame, and of a SERVICE_CALL."""

MAX_TEXT_BYTES = 64 << 10
"""Maximum bytes of an error's message, which is cut, and of a reply's parameters."""

INLINE_BYTES = 16 << 10
"""Tensors of at most this size are sent in the frame."""

MAX_BLOCKS = 16 << 10
"""Maximum blocks in one frame: an arena cannot hold more blocks of tensors above INLINE_BYTES."""


class FrameError(Exception):
    """A frame that a correct process never sends."""


HEADER = struct.Struct("<II")
BLOCK = struct.Struct("<HQ")
SEGMENT = struct.Struct("<HB")
UNMAP = struct.Struct("<H")
MAPPED = struct.Struct("<HB")

INBOUND, OUTBOUND, SHARED = 0, 1, 2
"""The use of a segment: requests, answers, or reading tensors of another process."""

FIRST_SHARED = 1 << 15
"""The first number of other processes' segments. A process's own segments are numbered from 1."""


class FrameKind(IntEnum):
    """A kind of frame: its number, and the largest body that the process may send; no limit for a frame that only the
    server sends. In all protocols, frames of the server have numbers below 32, and frames of the process have them
    above."""

    limit: int | None

    def __new__(cls, number: int, limit: int | None = None) -> "FrameKind":
        kind = int.__new__(cls, number)
        kind._value_ = number
        kind.limit = limit
        return kind


FrameTable = Mapping[int, FrameKind]
"""The frames of one protocol, by their numbers."""


def frame_table(*parts: Iterable[FrameKind]) -> FrameTable:
    """The frames of a protocol that consists of these parts."""
    return {int(kind): kind for part in parts for kind in part}


class ChannelFrame(FrameKind):
    """Part of every protocol."""

    START = 1
    """What the process is to do."""
    RELEASE = 5
    """Blocks of the process's arena that the server no longer uses."""
    SEGMENT = 6
    """Number and arena of a segment, with its descriptor."""
    STOP = 9
    UNMAP = 11
    """The number of a segment of another process that is to be unmapped."""

    STARTED = 32, MAX_CONTROL_BYTES
    """JSON: properties of what runs, or the result of the task in START."""
    FAILED = 33, MAX_CONTROL_BYTES
    """JSON: code and message of the error of the start."""
    UNUSED = 39, MAX_BLOCKS * BLOCK.size
    """Blocks of the server's arena that the process kept beyond a frame's use and has now dropped."""
    MAPPED = 45, MAPPED.size
    """The number of a segment of another process, and whether this one reads it in place; else it gets copies."""


def encode_frame(kind: IntEnum, body: bytes = b"") -> bytes:
    """A whole frame."""
    return HEADER.pack(len(body), kind) + body


def unpack(layout: struct.Struct, body: Buffer, kind: IntEnum) -> tuple[Any, ...]:
    """The numbers of a frame that consists of numbers only. FrameError."""
    if len(body) != layout.size:
        raise unexpected(kind)
    return layout.unpack(body)


def unexpected(kind: IntEnum) -> FrameError:
    return FrameError(f"an unexpected {kind.name} frame")
