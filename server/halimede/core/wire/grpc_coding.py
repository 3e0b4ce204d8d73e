"""Compressed gRPC messages, in steps."""

from collections.abc import Callable, Sequence
from functools import partial

from halimede.core.types import Buffer, InferenceError, internal
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.core.wire.grpc_call import DEFLATE, GZIP
from halimede.core.wire.steps import Steps
from halimede.core.wire.zlib_steps import GZIP_WBITS, ZLIB_WBITS, compress_steps, inflate_steps

_WBITS = {GZIP: GZIP_WBITS, DEFLATE: ZLIB_WBITS}
"""gRPC's `deflate` is zlib's format."""


def decode_steps(raw: Buffer, encoding: bytes, most: int, too_large: Callable[[str], InferenceError]) -> Steps[Buffer]:
    """The content of a message in an encoding, gzip or deflate. A message that becomes no larger than 256 KiB takes no
    step. `too_large` makes the error for more than `most` bytes; INTERNAL for broken data."""
    content = GrowingBytes()
    errors = partial(too_large, f"more than {most}"), _broken
    rest, _ = yield from inflate_steps(memoryview(raw), _WBITS[encoding], content, most, *errors)
    if len(rest):
        raise _broken(f"{len(rest)} bytes follow its end")
    return content.content()


def encode_steps(parts: Sequence[Buffer], encoding: bytes) -> Steps[tuple[Sequence[Buffer], bool]]:
    """The message in an encoding, gzip or deflate, and True; or as it is and False, if that is not smaller."""
    coded = yield from compress_steps(parts, _WBITS[encoding])
    return (parts, False) if coded is None else (coded, True)


def _broken(reason: str) -> InferenceError:
    # gRPC's specification of compression asks for INTERNAL.
    return internal(f"the compressed message cannot be inflated: {reason}")
