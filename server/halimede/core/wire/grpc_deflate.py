"""Compress gRPC messages, in steps."""

import zlib
from collections.abc import Sequence

from halimede.core.types import Buffer
from halimede.core.wire.grpc_call import GZIP
from halimede.core.wire.steps import Steps

_LEVEL = 1
"""zlib's: fast rather than small, because compression takes the time of all other requests."""
_SLICE_BYTES = 256 << 10


def deflate_steps(parts: Sequence[Buffer], encoding: bytes) -> Steps[tuple[list[bytes], bool]]:
    """The message in an encoding, gzip or deflate, and True; or as it is and False, if that is not smaller."""
    coder = zlib.compressobj(_LEVEL, zlib.DEFLATED, zlib.MAX_WBITS + (16 if encoding is GZIP else 0))
    out: list[bytes] = []
    for part in parts:
        view = memoryview(part)
        for start in range(0, len(view), _SLICE_BYTES):
            out.append(coder.compress(view[start : start + _SLICE_BYTES]))
            yield 0
    out.append(coder.flush())
    if sum(map(len, out)) < sum(map(len, parts)):
        return out, True
    return [bytes(part) for part in parts], False
