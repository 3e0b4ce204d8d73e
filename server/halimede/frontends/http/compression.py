"""Content codings: gzip and deflate, in slices that hold the event loop for milliseconds."""

import zlib
from collections.abc import Sequence
from functools import partial

from halimede.core.types import Buffer, InferenceError, invalid
from halimede.core.wire.growing_bytes import GrowingBytes
from halimede.core.wire.steps import Steps
from halimede.core.wire.zlib_steps import GZIP_WBITS, RAW_WBITS, ZLIB_WBITS, compress_steps, inflate_steps

GZIP = "gzip"
DEFLATE = "deflate"
IDENTITY = "identity"
CODINGS = (GZIP, DEFLATE, IDENTITY)

_MAX_MEMBERS = 65_536
"""The same limit as for chunks. An empty member has 20 bytes and is a stream: 64 MiB of them would take 30 s."""


def choose_coding(accept_encoding: bytes) -> str:
    """The coding that a client prefers for the answer: "gzip" or "deflate" if it names one, else "identity"."""
    weights: dict[str, float] = {}
    for item in accept_encoding.decode("latin-1").lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights[name] = _weight(parameters)
    best = max((GZIP, DEFLATE), key=lambda name: weights.get(name, 0.0))
    best_weight = weights.get(best, 0.0)
    return best if best_weight > 0.0 and best_weight >= weights.get(IDENTITY, 0.0) else IDENTITY


def _weight(parameters: Sequence[str]) -> float:
    """The q-value of an item; a malformed one counts as a refusal of the coding."""
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                weight = float(parameter[2:])
            except ValueError:
                return 0.0
            return weight if 0.0 <= weight <= 1.0 else 0.0
    return 1.0


def decompress_steps(body: Buffer, coding: str, limit: int) -> Steps[Buffer]:
    """Decompress a whole body. INVALID_ARG when it is broken, cut short, or gives more than `limit` bytes.

    Each step yields the number of bytes that it added.
    `deflate` is zlib's format as the standard says, or the raw one that some clients send.
    """
    out = GrowingBytes()
    members = 0
    rest = memoryview(body)
    wbits = GZIP_WBITS if coding == GZIP else _deflate_format(rest)
    errors = partial(_too_large, limit), partial(_broken, coding)
    while True:  # One turn per member: a gzip body may consist of several in sequence.
        members += 1
        if members > _MAX_MEMBERS:
            raise invalid(f"the request body has more than {_MAX_MEMBERS} gzip members. Send fewer or larger ones.")
        rest, last = yield from inflate_steps(rest, wbits, out, limit, *errors)
        yield last
        if not len(rest):
            return out.content()
        if coding != GZIP:
            raise _broken(coding, f"{len(rest)} bytes follow its end")


def _deflate_format(body: memoryview) -> int:
    is_zlib = len(body) >= 2 and body[0] & 0x0F == zlib.DEFLATED and (body[0] << 8 | body[1]) % 31 == 0
    return ZLIB_WBITS if is_zlib else RAW_WBITS


def _too_large(limit: int) -> InferenceError:
    return invalid(
        f"Decompressed data size exceeds the maximum allowed value of {limit} bytes. "
        "Use --http-max-input-size to increase the limit."
    )


def _broken(coding: str, reason: str) -> InferenceError:
    return invalid(f"the request body is not valid {coding} data: {reason}")


def encode_steps(chunks: Sequence[Buffer], coding: str) -> Steps[list[bytes] | None]:
    """An answer's chunks in a coding, gzip or deflate (in zlib's format); None if that is not smaller."""
    return compress_steps(chunks, GZIP_WBITS if coding == GZIP else ZLIB_WBITS)
