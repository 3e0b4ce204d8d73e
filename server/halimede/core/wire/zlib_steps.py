"""gzip and zlib, in steps that hold the event loop for milliseconds: for bodies of HTTP and messages of gRPC."""

import zlib
from collections.abc import Callable, Sequence

from halimede.core.types import Buffer, InferenceError
from halimede.core.types.error import clip
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.core.wire.steps import Steps

GZIP_WBITS = zlib.MAX_WBITS + 16
ZLIB_WBITS = zlib.MAX_WBITS
RAW_WBITS = -zlib.MAX_WBITS
"""zlib's numbers of the formats. The last one is zlib's without a header."""

SLICE_BYTES = 256 << 10
_LEVEL = 1
"""zlib's: fast rather than small, because compression takes the time of all other requests."""


def compress_steps(parts: Sequence[Buffer], wbits: int) -> Steps[list[bytes] | None]:
    """The parts as one stream; None if it is not smaller than they are."""
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, wbits)
    out: list[bytes] = []
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), SLICE_BYTES):
            out.append(stream.compress(view[start : start + SLICE_BYTES]))
            yield 0
    out.append(stream.flush())
    return out if sum(map(len, out)) < sum(map(len, parts)) else None


def inflate_steps(
    rest: memoryview,
    wbits: int,
    content: GrowingBytes,
    most: int,
    too_large: Callable[[], InferenceError],
    broken: Callable[[str], InferenceError],
) -> Steps[tuple[memoryview, int]]:
    """Add what one stream inflates to to the content. Returns what follows the stream, and the size of the last piece,
    for which there is no step: a small stream takes none.

    `too_large` makes the error for a content of more than `most` bytes, `broken` that for broken data, by its reason.
    """
    stream = zlib.decompressobj(wbits)
    while True:
        pending = rest[:SLICE_BYTES]
        try:
            # One byte above the limit is enough to refuse the stream.
            piece = stream.decompress(pending, min(SLICE_BYTES, most + 1 - content.size_bytes))
        except zlib.error as error:
            raise broken(clip(str(error))) from None
        content.add(piece)
        if content.size_bytes > most:
            raise too_large()
        # At the end of a stream that took several calls, zlib has the rest of the input in both.
        unused = len(stream.unused_data if stream.eof else stream.unconsumed_tail)
        rest = rest[len(pending) - unused :]
        if stream.eof:
            return rest, len(piece)
        if not (pending or piece):
            raise broken("it ends before its data does")
        yield len(piece)
