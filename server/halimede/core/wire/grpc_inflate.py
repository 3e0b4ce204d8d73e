"""Inflate compressed gRPC messages, with a size limit.

grpc passes on a message as it arrived and does not report whether it is compressed, so the first bytes have to show it.
No request begins like gzip's format, whose first byte is a wire type that protobuf does not have, or like zlib's, whose
first byte is a field 15 that no request has.
"""

import zlib

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip

_PIECE_BYTES = 256 << 10
_ZLIB_WINDOW = 0x78
"""zlib's first byte for a window of 32 KiB, which every gRPC library uses."""


def is_compressed(raw: bytes) -> bool:
    """Whether the message is in gzip's format or in zlib's (gRPC's `deflate`)."""
    if raw[:2] == b"\x1f\x8b":
        return True
    return len(raw) > 1 and raw[0] == _ZLIB_WINDOW and (raw[0] << 8 | raw[1]) % 31 == 0


class Inflating:
    """A compressed message, inflated in steps. `content` is the part inflated so far."""

    def __init__(self, raw: bytes) -> None:
        self.content = bytearray()
        self._stream = zlib.decompressobj(zlib.MAX_WBITS + 32)
        self._rest = memoryview(raw)

    def advance(self, most: int) -> bool:
        """Inflate until the end, or to more than `most` bytes; returns whether it ended. INTERNAL for broken data."""
        stream = self._stream
        while not stream.eof and len(self.content) <= most:
            pending = self._rest[:_PIECE_BYTES]
            try:
                piece = stream.decompress(pending, min(_PIECE_BYTES, most + 1 - len(self.content)))
            except zlib.error as error:
                raise _broken(clip(str(error))) from None
            if not (stream.eof or pending or piece):
                raise _broken("it ends before its data does")
            self.content += piece
            unused = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
            self._rest = self._rest[len(pending) - unused :]
        if not stream.eof:
            return False
        if self._rest:
            raise _broken(f"{len(self._rest)} bytes follow its end")
        return len(self.content) <= most


def _broken(reason: str) -> InferenceError:
    # gRPC's specification of compression asks for INTERNAL.
    return InferenceError(ErrorCode.INTERNAL, f"the compressed message cannot be inflated: {reason}")
