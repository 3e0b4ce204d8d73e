"""gRPC messages are compressed in steps, if that makes them smaller."""

import gzip
import zlib
from collections.abc import Callable

import pytest

from halimede.core.wire.grpc_call import DEFLATE, GZIP
from halimede.core.wire.grpc_deflate import deflate_steps
from halimede.core.wire.steps import run

UNPACK = {GZIP: gzip.decompress, DEFLATE: zlib.decompress}
SLICE = 256 << 10


@pytest.mark.parametrize(("encoding", "unpack"), UNPACK.items())
def test_a_message_of_parts_is_compressed_as_one(encoding: bytes, unpack: Callable[[bytes], bytes]) -> None:
    parts = (b"head", memoryview(bytes(3 * SLICE)), b"", b"end")
    out, is_compressed = run(deflate_steps(parts, encoding))
    assert is_compressed
    assert unpack(b"".join(out)) == b"".join(parts)
    assert len(list(deflate_steps(parts, encoding))) == 5


@pytest.mark.parametrize("encoding", UNPACK)
@pytest.mark.parametrize("parts", [(), (b"",), (b"short", memoryview(b"text"))])
def test_what_becomes_no_smaller_is_sent_as_it_is(encoding: bytes, parts: tuple[bytes, ...]) -> None:
    assert run(deflate_steps(parts, encoding)) == ([bytes(part) for part in parts], False)
