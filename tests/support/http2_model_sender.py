"""The sending side of `support.http2_model`: answers within the client's windows, and credit for its DATA."""

from dataclasses import dataclass, field
from math import inf
from struct import pack

from halimede.core.wire.http2.codes import H2Code
from support.http2 import DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, WINDOW_UPDATE, Frame

WHOLE_BYTES = 16_384
"""Answers up to this size are not cut for the room of the transport."""


@dataclass
class ModelStream:
    id: int
    window_in: int
    window_out: int
    left: int | None
    """Of the content-length."""
    is_receiving: bool = True
    credit: int = 0
    unsent: bytes = b""
    trailers: bytes | None = None


@dataclass
class ModelSender:
    window: int
    """Of received DATA, for each stream."""
    sent: list[Frame] = field(default_factory=list)
    streams: dict[int, ModelStream] = field(default_factory=dict)
    closed: dict[int, str] = field(default_factory=dict)
    """By whom a stream was reset, or "ended"."""
    waiting: list[ModelStream] = field(default_factory=list)
    max_frame_out: int = 16_384
    initial_window_out: int = 65_535
    window_out: int = 65_535
    room: float = inf

    def send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.sent.append(Frame(kind, flags, stream, payload))

    def use(self, number: int, size: int) -> None:
        stream = self.streams[number]
        if not stream.is_receiving:
            return
        stream.credit += size
        if stream.credit * 2 >= self.window:
            self._grant(stream, stream.credit)

    def expect(self, number: int, size: int) -> None:
        stream = self.streams[number]
        if stream.is_receiving and size > stream.window_in:
            self._grant(stream, size - stream.window_in)

    def _grant(self, stream: ModelStream, size: int) -> None:
        stream.credit -= size
        stream.window_in += size
        self.send(WINDOW_UPDATE, 0, stream.id, pack(">I", size))

    def answer(self, number: int, content: bytes) -> None:
        stream = self.streams[number]
        self.respond(number)
        if len(content) <= min(WHOLE_BYTES, stream.window_out, self.window_out) and self.room > 0:
            self._write(stream, content)
        else:
            self.respond_data(number, content)
        self.finish(number)

    def respond(self, number: int) -> None:
        self.send(HEADERS, END_HEADERS, number, b"head")

    def respond_data(self, number: int, content: bytes) -> None:
        stream = self.streams[number]
        stream.unsent += content
        if stream in self.waiting:
            return
        while self._can_write(stream):
            self._write_frame(stream)
        if stream.unsent:
            self.waiting.append(stream)

    def finish(self, number: int) -> None:
        stream = self.streams[number]
        stream.trailers = b"trailers"
        if not stream.unsent:
            self._end(stream)

    def write_waiting(self) -> list[tuple[object, ...]]:
        """A frame of each stream in turn; a stream without a window goes to the end. Returns events."""
        events: list[tuple[object, ...]] = []
        blocked = []
        while self.waiting and self.window_out > 0 and self.room > 0:
            stream = self.waiting.pop(0)
            if stream.id not in self.streams:
                continue
            if not self._can_write(stream):
                blocked.append(stream)
                continue
            self._write_frame(stream)
            if stream.unsent:
                self.waiting.append(stream)
            elif stream.trailers is not None:
                self._end(stream)
            else:
                events.append(("room", stream.id))
        self.waiting += blocked
        return events

    def _can_write(self, stream: ModelStream) -> bool:
        return bool(stream.unsent) and stream.window_out > 0 and self.window_out > 0 and self.room > 0

    def _write_frame(self, stream: ModelStream) -> None:
        size = int(min(self.max_frame_out, stream.window_out, self.window_out, self.room))
        content, stream.unsent = stream.unsent[:size], stream.unsent[size:]
        self._write(stream, content)

    def _write(self, stream: ModelStream, content: bytes) -> None:
        stream.window_out -= len(content)
        self.window_out -= len(content)
        self.room -= len(content)
        self.send(DATA, 0, stream.id, content)

    def _end(self, stream: ModelStream) -> None:
        self.send(HEADERS, END_HEADERS | END_STREAM, stream.id, stream.trailers or b"")
        if stream.is_receiving:
            self.reset(stream.id, H2Code.NO_ERROR)  # 8.1
        else:
            del self.streams[stream.id]
            self.closed[stream.id] = "ended"

    def reset(self, number: int, code: H2Code) -> None:
        del self.streams[number]
        self.closed[number] = "server"
        self.send(RST_STREAM, 0, number, pack(">I", code))
