"""A gRPC client that works in HTTP/2 frames: it records all received frames, and can send invalid ones."""

import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from hpack import Decoder, Encoder

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
UNKNOWN = 0x42
"""A type of frame that no specification has."""
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR = 1, 3, 5, 6
CANCEL, COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 8, 9, 11
INITIAL_WINDOW_SIZE = 4

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PIECE_BYTES = 16384
WINDOW_BYTES = 65535

LIVE = "/inference.GRPCInferenceService/ServerLive"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"

Header = tuple[str, str]


@dataclass(frozen=True)
class Frame:
    kind: int
    flags: int
    stream: int
    payload: bytes


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    """The bytes of a frame, valid or not."""
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def grpc_message(payload: bytes, *, compressed: bool = False) -> bytes:
    """The payload as a gRPC message: a flag and its length before it."""
    return bytes((compressed,)) + len(payload).to_bytes(4, "big") + payload


EMPTY_MESSAGE = grpc_message(b"")


class H2Client:
    """A blocking connection. `frames` has all received frames; `fields` has headers and trailers by stream.

    It answers settings and pings, and returns flow-control credit for the data that it reads, unless disabled.
    """

    def __init__(
        self,
        address: tuple[str, int] | str,
        tls: ssl.SSLContext | None = None,
        *,
        is_greedy: bool = True,
        answers_pings: bool = True,
    ):
        self.socket: socket.socket
        if isinstance(address, str):
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.connect(address)
        else:
            self.socket = socket.create_connection(address, timeout=20)
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self.frames: list[Frame] = []
        self.fields: dict[int, dict[str, str]] = {}
        self.is_closed = False
        self._is_greedy = is_greedy
        self._answers_pings = answers_pings
        self._encoder = Encoder()
        self._decoder = Decoder()
        self._next_stream = 1
        self._buffer = bytearray()
        self._initial_window = WINDOW_BYTES
        self._windows: dict[int, int] = {0: WINDOW_BYTES}
        self.send(PREFACE + frame(SETTINGS))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, raw: bytes) -> None:
        """Send raw bytes. If the server has closed the connection, `is_closed` becomes true."""
        try:
            self.socket.settimeout(20)
            self.socket.sendall(raw)
        except OSError:
            # What the server sent before it closed has arrived.
            while not self.is_closed and self.receive(0):
                pass
            self.is_closed = True

    def ping_until_refused(self, limit: int) -> int:
        """Send pings, each 5 ms after the last one's answer, until the server closes. The number sent, at most `limit`."""
        for count in range(1, limit + 1):
            self.send(frame(PING, 0, 0, b"lifesign"))
            self.receive_until(lambda count=count: len(self.of(PING, ACK)) >= count or self.goaway())  # type: ignore[misc]
            if self.goaway() or self.is_closed:
                return count
            time.sleep(0.005)
        return limit

    def head(self, path: str, extra: Sequence[Header] = (), flags: int = END_HEADERS) -> tuple[int, bytes]:
        """The number of a new stream, and its HEADERS frame."""
        stream = self.new_stream()
        fields = [
            *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")),
            *(("te", "trailers"), ("content-type", "application/grpc"), *extra),
        ]
        return stream, frame(HEADERS, flags, stream, self.encode(fields))

    def new_stream(self) -> int:
        """Reserve the number of the next stream without starting it."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._initial_window
        return stream

    def encode(self, fields: Sequence[Header]) -> bytes:
        """A header block. It must be sent, because encoding updates the HPACK table of the connection."""
        return bytes(self._encoder.encode(fields))

    def call(self, path: str, messages: bytes | None = EMPTY_MESSAGE, extra: Sequence[Header] = ()) -> int:
        """Begin a call, send these message bytes and half-close; None leaves it open. Returns the stream's number."""
        stream, head = self.head(path, extra)
        self.send(head)
        if messages is not None:
            self.send_data(stream, messages)
        return stream

    def send_data(self, stream: int, data: bytes, *, is_end: bool = True) -> None:
        """Send as fast as flow control allows; stops early when the stream or the connection ends."""
        at = 0
        while not self.is_closed and not self.is_over(stream):
            size = min(len(data) - at, PIECE_BYTES, self._windows[0], self._windows[stream])
            if size <= 0 < len(data) - at:
                self.receive(20)
                continue
            is_last = at + size == len(data)
            self.send(frame(DATA, END_STREAM if is_last and is_end else 0, stream, data[at : at + size]))
            self._windows[0] -= size
            self._windows[stream] -= size
            at += size
            if is_last:
                return
            self.receive(0)

    def receive(self, limit_s: float) -> bool:
        """Read what arrives within the limit; False if nothing did."""
        if self.is_closed:
            return False
        self.socket.settimeout(limit_s)
        try:
            raw = self.socket.recv(1 << 20)
        except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            raw = b""
        if not raw:
            self.is_closed = True
            return False
        self._buffer += raw
        while len(self._buffer) >= 9:
            end = 9 + int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < end:
                break
            head, payload = bytes(self._buffer[:9]), bytes(self._buffer[9:end])
            del self._buffer[:end]
            self._take(Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload))
        return True

    def _take(self, got: Frame) -> None:
        self.frames.append(got)
        match got.kind:
            case 1:
                fields = self.fields.setdefault(got.stream, {})
                fields |= {str(name): str(value) for name, value in self._decoder.decode(got.payload)}
            case 4 if not got.flags & ACK:
                for at in range(0, len(got.payload), 6):
                    if int.from_bytes(got.payload[at : at + 2], "big") == 4:
                        change = int.from_bytes(got.payload[at + 2 : at + 6], "big") - self._initial_window
                        self._initial_window += change
                        self._windows = {
                            stream: size + (change if stream else 0) for stream, size in self._windows.items()
                        }
                self.send(frame(SETTINGS, ACK))
            case 6 if not got.flags & ACK and self._answers_pings:
                self.send(frame(PING, ACK, 0, got.payload))
            case 8:
                self._windows[got.stream] = self._windows.get(got.stream, 0) + int.from_bytes(got.payload, "big")
            case 0 if got.payload and self._is_greedy:
                size = len(got.payload).to_bytes(4, "big")
                self.send(frame(WINDOW_UPDATE, 0, 0, size) + frame(WINDOW_UPDATE, 0, got.stream, size))

    def receive_until(self, is_there: Callable[[], object], limit_s: float = 20.0) -> bool:
        """Read until the condition holds or the connection ends; returns whether it holds."""
        deadline = time.monotonic() + limit_s
        while not is_there() and not self.is_closed and (left := deadline - time.monotonic()) > 0:
            self.receive(left)
        return bool(is_there())

    def wait_closed(self, limit_s: float = 20.0) -> bool:
        """Whether the server closes the connection within the limit."""
        return self.receive_until(lambda: self.is_closed, limit_s)

    def is_over(self, stream: int) -> bool:
        """Whether the server has ended the stream."""
        return any(
            got.stream == stream
            and (got.kind == RST_STREAM or (got.kind in (HEADERS, DATA) and bool(got.flags & END_STREAM)))
            for got in self.frames
        )

    def finish(self, stream: int, limit_s: float = 20.0) -> dict[str, str]:
        """Wait for the stream's end; its headers and trailers together."""
        assert self.receive_until(lambda: self.is_over(stream), limit_s), f"stream {stream}: {self.frames[-5:]}"
        return self.fields.get(stream, {})

    def data(self, stream: int) -> bytes:
        """The received body of the stream."""
        return b"".join(got.payload for got in self.of(DATA) if got.stream == stream)

    def of(self, kind: int, flags: int = 0) -> list[Frame]:
        """The frames of a kind, with these flags."""
        return [got for got in self.frames if got.kind == kind and got.flags & flags == flags]

    def pings(self) -> int:
        """The number of pings from the server, without its answers to the client's pings."""
        return len([got for got in self.of(PING) if not got.flags & ACK])

    def goaway(self) -> tuple[int, bytes] | None:
        """The last GOAWAY's error code and text."""
        seen = self.of(GOAWAY)
        return (int.from_bytes(seen[-1].payload[4:8], "big"), seen[-1].payload[8:]) if seen else None
