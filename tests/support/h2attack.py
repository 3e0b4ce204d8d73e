"""Frames of an attack, and the ends of connections and streams that it provokes."""

from collections.abc import Iterable

from support.h2client import CANCEL, GOAWAY, LIVE, RST_STREAM, SETTINGS, WINDOW_UPDATE, H2Client, frame

FRAMES_PER_WRITE = 500


def number(value: int) -> bytes:
    return value.to_bytes(4, "big")


def setting(key: int, value: int) -> bytes:
    return frame(SETTINGS, 0, 0, key.to_bytes(2, "big") + number(value))


def window_update(stream: int, size: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, number(size))


def reset(stream: int) -> bytes:
    return frame(RST_STREAM, 0, stream, number(CANCEL))


def flood(client: H2Client, frames: Iterable[bytes], per_write: int = FRAMES_PER_WRITE) -> None:
    """Send until the server has had enough."""
    pending: list[bytes] = []
    for each in frames:
        pending.append(each)
        if len(pending) == per_write:
            client.send(b"".join(pending))
            pending.clear()
            client.receive(0)
            if client.is_closed or client.of(GOAWAY):
                return
    client.send(b"".join(pending))


def ending(client: H2Client) -> int:
    """The code by which the server ends the connection."""
    assert client.receive_until(client.goaway), client.frames[-3:]
    assert client.wait_closed()
    goaway = client.goaway()
    assert goaway is not None
    return goaway[0]


def stream_end(client: H2Client, stream: int) -> int:
    """The code by which the server resets the stream. Its connection must be of use afterwards."""

    def codes() -> list[int]:
        return [int.from_bytes(got.payload, "big") for got in client.of(RST_STREAM) if got.stream == stream]

    assert client.receive_until(codes), client.frames[-3:]
    assert client.finish(client.call(LIVE))["grpc-status"] == "0"
    assert client.goaway() is None
    return codes()[0]
