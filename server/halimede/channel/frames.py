"""The header of a frame, tables of frames, and the frames that every channel has.

Standard library only, for any CPython from 3.10 on.
"""

import struct
from collections.abc import Mapping
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

FrameTable = Mapping[IntEnum, int | None]
"""The frames of one protocol, with numbers of their own each. The value is the largest body that the process may send;
None for a frame that only the server sends."""


class FrameError(Exception):
    """A frame that a correct process never sends."""


class ChannelFrame(IntEnum):
    """In all protocols, frames of the server have numbers below 32, and frames of the process have them above."""

    START = 1
    """What the process is to do."""
    RELEASE = 5
    """Blocks of the process's arena that the server no longer uses."""
    SEGMENT = 6
    """Number and arena of a segment, with its descriptor."""
    STOP = 9
    UNMAP = 11
    """The number of a segment of another process that is to be unmapped."""

    STARTED = 32
    """JSON: properties of what runs, or the result of the task in START."""
    FAILED = 33
    """JSON: code and message of the error of the start."""
    UNUSED = 39
    """Blocks of the server's arena that the process kept beyond a frame's use and has now dropped."""
    MAPPED = 45
    """The number of a segment of another process, and whether this one reads it in place; else it gets copies."""


HEADER = struct.Struct("<II")
BLOCK = struct.Struct("<HQ")
SEGMENT = struct.Struct("<HB")
UNMAP = struct.Struct("<H")
MAPPED = struct.Struct("<HB")

INBOUND, OUTBOUND, SHARED = 0, 1, 2
"""The use of a segment: requests, answers, or reading tensors of another process."""

FIRST_SHARED = 1 << 15
"""The first number of other processes' segments. A process's own segments are numbered from 1."""

CHANNEL_FRAMES: FrameTable = {
    ChannelFrame.START: None,
    ChannelFrame.RELEASE: None,
    ChannelFrame.SEGMENT: None,
    ChannelFrame.STOP: None,
    ChannelFrame.UNMAP: None,
    ChannelFrame.STARTED: MAX_CONTROL_BYTES,
    ChannelFrame.FAILED: MAX_CONTROL_BYTES,
    ChannelFrame.UNUSED: MAX_BLOCKS * BLOCK.size,
    ChannelFrame.MAPPED: MAPPED.size,
}
"""Part of every protocol."""


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
