"""Updates of the size of HPACK's dynamic table at the start of a header block."""

import pytest

from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.fields import HeaderBlocks, RequestFields, literal

REQUEST = literal(b":method", b"POST") + literal(b":scheme", b"http") + literal(b":path", b"/")
TO_ZERO, TO_31, TO_4096 = b"\x20", b"\x3f\x00", b"\x3f\xe1\x1f"


def blocks() -> HeaderBlocks[RequestFields]:
    return HeaderBlocks(lambda fields: fields)


@pytest.mark.parametrize(
    "updates", [b"", TO_ZERO, TO_ZERO + TO_4096, TO_31 + TO_31], ids=["none", "one", "two", "long"]
)
def test_a_block_may_begin_with_two_updates(updates: bytes) -> None:
    assert blocks().request(updates + REQUEST)[0].path == b"/"


@pytest.mark.parametrize(
    "updates",
    [TO_ZERO * 3, TO_4096 * 3, TO_ZERO + TO_4096 + TO_31, TO_ZERO * 30_000, b"\x3f\xe2\x1f", b"\x3f\xe1"],
    ids=["three", "long", "mixed", "endless", "above the limit", "cut off"],
)
def test_more_updates_or_larger_or_broken_ones_end_the_connection(updates: bytes) -> None:
    with pytest.raises(ConnectionFault) as caught:
        blocks().request(updates + REQUEST)
    assert caught.value.code is H2Code.COMPRESSION_ERROR
