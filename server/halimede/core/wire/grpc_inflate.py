"""Inflate compressed gRPC messages, in steps and with a size limit."""

import zlib
from collections.abc import Callable

from halimede.core.types import Buffer, ErrorCode, InferenceError
from halimede.core.types.error import clip
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.core.wire.steps import Steps

_PIECE_BYTES = 256 << 10
_FORMATS = {b"gzip": zlib.MAX_WBITS + 16, b"deflate": zlib.MAX_WBITS}
"""gRPC's `deflate` is zlib's format."""


def inflate_steps(raw: Buffer, encoding: bytes, most: int, too_large: Callable[[str], InferenceError]) -> Steps[Buffer]:
    """The content of a message, gzip or deflate. Each step inflates at most 256 KiB; a message that becomes no larger
    takes none. `too_large` makes the error for more than `most` bytes; INTERNAL for broken data."""
    content = GrowingBytes()
    stream = zlib.decompressobj(_FORMATS[encoding])
    rest = memoryview(raw)
    while True:
        pending = rest[:_PIECE_BYTES]
        try:
            # One byte above the limit is enough to refuse the message.
            piece = stream.decompress(pending, min(_PIECE_BYTES, most + 1 - content.size_bytes))
        except zlib.error as error:
            raise _broken(clip(str(error))) from None
        content.add(piece)
        if content.size_bytes > most:
            raise too_large(f"more than {most}")
        unused = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        rest = rest[len(pending) - unused :]
        if stream.eof:
            break
        if not (pending or piece):
            raise _broken("it ends before its data does")
        yield len(piece)
    if len(rest):
        raise _broken(f"{len(rest)} bytes follow its end")
    return content.content()


def _broken(reason: str) -> InferenceError:
    # gRPC's specification of compression asks for INTERNAL.
    return InferenceError(ErrorCode.INTERNAL, f"the compressed message cannot be inflated: {reason}")
