"""Messages that the server compresses: what clients get back, in bounded steps."""

import gzip
import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.wire.grpc_call import DEFLATE, GZIP
from halimede.core.wire.grpc_coding import encode_steps
from halimede.core.wire.steps import run

RESTORE = {GZIP: gzip.decompress, DEFLATE: zlib.decompress}


@pytest.mark.parametrize("encoding", RESTORE)
@given(parts=st.lists(st.binary(max_size=2000), max_size=4), repeat=st.integers(1, 50))
def test_a_message_in_parts_is_restored(encoding: bytes, parts: list[bytes], repeat: int) -> None:
    parts = [part * repeat for part in parts]
    coded, is_compressed = run(encode_steps(parts, encoding))
    whole = b"".join(parts)
    if is_compressed:
        assert RESTORE[encoding](b"".join(coded)) == whole
        assert sum(map(len, coded)) < len(whole)
    else:
        assert b"".join(coded) == whole


@pytest.mark.parametrize("encoding", RESTORE)
def test_a_message_that_does_not_become_smaller_is_sent_as_it_is(encoding: bytes) -> None:
    noise = random.Random(1).randbytes(1000)
    assert run(encode_steps((noise[:10], noise[10:]), encoding)) == ((noise[:10], noise[10:]), False)
    assert run(encode_steps((bytes(1000),), encoding))[1]


def test_a_large_message_takes_a_step_for_each_slice() -> None:
    assert len(list(encode_steps((bytes(1 << 20), b"x"), GZIP))) == 5
