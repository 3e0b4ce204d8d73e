"""Header blocks that are built to cost the server memory or time, on the running server.

Each connection ends by the code that RFC 9113 or RFC 7541 gives, while another client's calls succeed and take about as long
as alone.
"""

import time
from collections.abc import Iterator

import pytest

from support.bystander import undisturbed
from support.h2attack import ending, flood
from support.h2client import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FRAME_SIZE_ERROR,
    HEADERS,
    LIVE,
    SETTINGS,
    H2Client,
    frame,
)
from support.models import add_identity
from support.server import RunningServer, serving

MIB = 1 << 20
ATTACK_SECS = 0.5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "ident", dims="-1")
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", repository]) as running:
        yield running
    assert "unexpected error" not in running.log, running.log


@pytest.fixture(autouse=True)
def _others_are_undisturbed(server: RunningServer) -> Iterator[None]:
    with undisturbed(server, "ident"):
        yield


@pytest.fixture
def client(server: RunningServer) -> Iterator[H2Client]:
    with H2Client(("127.0.0.1", server.grpc_port)) as made:
        # Its settings have arrived: what the test sends is not a part of the first bytes.
        assert made.receive_until(lambda: made.of(SETTINGS, ACK))
        yield made


def literal(name: bytes, value: bytes, prefix: bytes = b"\0") -> bytes:
    """A field that is not indexed, or with the prefix 0x40 one that enters the dynamic table."""
    return prefix + integer(len(name)) + name + integer(len(value)) + value


def integer(value: int) -> bytes:
    """Of HPACK, with seven bits in its first byte."""
    if value < 127:
        return bytes((value,))
    value -= 127
    out = bytearray((127,))
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


CALL = (
    literal(b":method", b"POST")
    + literal(b":scheme", b"http")
    + literal(b":path", LIVE.encode())
    + literal(b"te", b"trailers")
    + literal(b"content-type", b"application/grpc")
)
NEWEST = b"\xbe"
"""The newest field of the dynamic table, in one byte."""


def request(client: H2Client, block: bytes) -> bytes:
    """A request whose header block is in as many frames as it needs."""
    stream = client.new_stream()
    pieces = [block[at : at + 16_384] for at in range(0, len(block), 16_384)]
    frames = [frame(HEADERS, END_STREAM, stream, pieces[0]), *(frame(CONTINUATION, 0, stream, x) for x in pieces[1:])]
    last = bytearray(frames[-1])
    last[4] |= END_HEADERS
    return b"".join(frames[:-1]) + last


@pytest.mark.parametrize("references", [60, 16_000])
def test_an_hpack_bomb_ends_the_connection(client: H2Client, references: int) -> None:
    """Each byte stands for a field of 4 KB."""
    client.send(request(client, CALL + literal(b"x", b"v" * 4000, b"\x40") + NEWEST * references))
    assert ending(client) == ENHANCE_YOUR_CALM


def test_many_bombs_on_many_connections_hold_no_memory(server: RunningServer) -> None:
    clients = [H2Client(("127.0.0.1", server.grpc_port)) for _ in range(50)]
    for client in clients:
        # Just within the limit of a header list, and the call is refused for its metadata.
        client.send(request(client, CALL + literal(b"x", b"v" * 4000, b"\x40") + NEWEST * 14))
    for client in clients:
        assert client.finish(1)["grpc-status"] == "8"
        client.socket.close()


@pytest.mark.parametrize(
    "block",
    [
        b"\x3f\xe2\x1f" + CALL,
        b"\x3f" + b"\xff" * 9 + b"\x7f" + CALL,
        b"\x20" * 16_000 + CALL,
        b"\x20\x3f\xe1\x1f" * 2 + CALL,
        CALL + b"\x20",
        CALL + NEWEST,
        literal(b"x", b"y", b"\x40") + b"\x20" + CALL + NEWEST,
        CALL + b"\x80",
        CALL + b"\xff" + b"\xff" * 100 + b"\x7f",
        CALL + b"\x7f" + b"\xff" * 16_000,
        CALL + literal(b"x", b"y")[:-1],
        CALL + b"\0\x01x\x7f\xff\xff\xff\x7f",
        CALL + b"\0\x01x\x82\xff\xff",
    ],
    ids=[
        "a table of 4,097 bytes", "a table of 2^70 bytes", "16,000 updates of the table's size", "four updates",
        "an update after fields", "an entry of the empty table", "an entry that an update has removed", "entry zero",
        "an entry of a large number", "a number without end", "a text that is cut off", "a text of 256 MB",
        "invalid Huffman code",
    ],
)  # fmt: skip
def test_an_invalid_header_block_ends_the_connection(client: H2Client, block: bytes) -> None:
    client.send(request(client, block))
    assert ending(client) == COMPRESSION_ERROR


def test_the_dynamic_table_does_not_grow_with_the_fields_that_enter_it(client: H2Client) -> None:
    """Each request replaces all entries, and changes the size of the table twice."""
    for count in range(300):
        name = b"x%d" % count
        client.send(request(client, b"\x20\x3f\xe1\x1f" + CALL + literal(name, b"v" * 4000, b"\x40") + NEWEST))
        assert client.finish(2 * count + 1)["grpc-status"] == "3"  # It has no message.


@pytest.mark.parametrize("piece_bytes", [1000, 16_384])
def test_a_header_list_of_a_megabyte_ends_the_connection(client: H2Client, piece_bytes: int) -> None:
    block = CALL + literal(b"x", b"v" * MIB)
    stream = client.new_stream()
    pieces = (frame(CONTINUATION, 0, stream, block[at : at + piece_bytes]) for at in range(0, len(block), piece_bytes))
    flood(client, [frame(HEADERS, END_STREAM, stream), *pieces], per_write=1)
    assert ending(client) == ENHANCE_YOUR_CALM


def test_a_header_list_of_a_megabyte_in_one_frame_ends_the_connection(client: H2Client) -> None:
    block = CALL + literal(b"x", b"v" * MIB)
    client.send(frame(HEADERS, END_STREAM | END_HEADERS, client.new_stream(), block))
    assert ending(client) == FRAME_SIZE_ERROR


def test_a_header_list_above_the_limit_of_metadata_ends_only_its_call(client: H2Client) -> None:
    client.send(request(client, CALL + literal(b"x", b"v" * 20_000)))
    assert client.finish(1)["grpc-status"] == "8"
    client.send(request(client, CALL + literal(b"x", b"v" * 10_000)))
    assert client.finish(3)["grpc-status"] == "3"  # It has no message.


@pytest.mark.parametrize("prefix", [b"\0", b"\x40"], ids=["not indexed", "entries of the table"])
def test_requests_of_a_thousand_fields_without_end_end_the_connection(client: H2Client, prefix: bytes) -> None:
    """Each is refused for the size of its metadata, and takes the server longer than many others."""
    block = CALL + literal(b"x", b"", prefix) * 1000
    flood(client, (request(client, block) for _ in range(1000)), per_write=1)
    assert ending(client) == ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "extra",
    [literal(b"x", b"") * 90, literal(b"x", b"y", b"\x40") * 90, b"\0\x01x\xff\x81\x7c" + b"\x07" * 16_000],
    ids=["many fields", "many entries", "Huffman code"],
)
def test_header_blocks_that_take_long_do_not_keep_others_waiting(client: H2Client, extra: bytes) -> None:
    """Each request is valid HPACK, and refused for the size of its metadata at most."""
    ends_at = time.monotonic() + ATTACK_SECS
    while time.monotonic() < ends_at and not client.is_closed:
        client.send(b"".join(request(client, CALL + extra) for _ in range(100)))
        client.receive(0)
        client.frames.clear()
        client.fields.clear()
