"""The fuzz target of HTTP/2 and gRPC's messages: a connection with an application that echoes each message.

The first byte of the input sets the size of the pieces in which the rest is received, and what the application does.
"""

from halimede.core.types import Buffer, ErrorCode, InferenceError
from halimede.core.wire.grpc_call import OK_TRAILERS, CallHead, opening, read_head, trailers
from halimede.core.wire.grpc_messages import MessageReader, MessageTooLarge, pack_prefix
from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.events import (
    ConnectionFails,
    DataArrives,
    Event,
    Pinged,
    RequestBegins,
    RequestEnds,
    StreamHasRoom,
    StreamIsReset,
)
from halimede.core.wire.http2.fields import MAX_HEADER_LIST_BYTES
from halimede.core.wire.http2.frames import PREFACE
from halimede.core.wire.http2.limits import Http2Limits
from halimede.core.wire.http2.streams import Stream
from support.http2 import DATA, END_STREAM, GOAWAY, HEADERS, RST_STREAM, Frame, frames_of

LIMITS = Http2Limits(max_streams=4, window=300, connection_window=70_000, large_frame_bytes=20_000)
MAX_MESSAGE = 100_000
GREETING = PREFACE + b"\0\0\0\4\0\0\0\0\0"

SENT_FOR_EACH_BYTE = 40
"""A frame of a client has at least nine bytes, and brings it answers of less than 360."""


class _Call:
    def __init__(self, head: CallHead) -> None:
        assert head.size_bytes <= MAX_HEADER_LIST_BYTES
        self.reader = MessageReader(MAX_MESSAGE, lambda size: MessageTooLarge(size, MAX_MESSAGE))
        self.has_begun = False


class _Application:
    """Echoes messages: at once, or with the end of the request if it is `patient`."""

    def __init__(self, *, is_patient: bool, is_thrifty: bool) -> None:
        self.h2: Http2Connection[CallHead, _Call] = Http2Connection(read_head, LIMITS, 0)
        self._is_patient = is_patient
        # Gives no credit.
        self._is_thrifty = is_thrifty
        self._fails = 0

    def receive(self, piece: bytes) -> None:
        for event in self.h2.receive(memoryview(piece), 0):
            assert not self._fails, "an event after the end of the connection"
            self._handle(event)
        assert len(self.h2.table.open) <= LIMITS.max_streams
        assert self.h2.table.unsent_bytes == sum(stream.unsent_bytes for stream in self.h2.table.all())

    def _handle(self, event: Event[CallHead, _Call]) -> None:
        match event:
            case RequestBegins(stream, head, is_end):
                stream.call = _Call(head)
                if is_end:
                    self._end(stream)
            case DataArrives(stream, data, size, is_end):
                self._take(stream, data, size, is_end=is_end)
            case RequestEnds(stream):
                self._end(stream)
            case StreamIsReset(stream, _):
                assert stream.is_closed
            case ConnectionFails(fault, streams):
                assert fault.text
                assert all(stream.is_closed for stream in streams)
                self._fails += 1
            case StreamHasRoom() | Pinged():
                pass

    def _take(self, stream: Stream[_Call], data: memoryview, size: int, *, is_end: bool) -> None:
        call = stream.call
        if call is None or stream.is_closed:
            return  # Answered already, while these events waited.
        try:
            for message in call.reader.read(data):
                self._echo(stream, call, message.content)
        except InferenceError as error:
            self._refuse(stream, error)
            return
        if not self._is_thrifty:
            self.h2.credit.use(stream, size)
            if call.reader.missing:
                self.h2.credit.expect(stream, call.reader.missing)
        if is_end:
            self._end(stream)

    def _refuse(self, stream: Stream[_Call], error: InferenceError) -> None:
        assert isinstance(error, MessageTooLarge) or error.code is ErrorCode.INTERNAL, error
        stream.call = None
        self.h2.out.finish(stream, trailers(13, error.message))

    def _echo(self, stream: Stream[_Call], call: _Call, content: Buffer) -> None:
        if not call.has_begun:
            call.has_begun = True
            self.h2.out.respond(stream, opening())
        self.h2.out.send(stream, (pack_prefix(False, len(content)), content), len(content) + 5)

    def _end(self, stream: Stream[_Call]) -> None:
        call, stream.call = stream.call, None
        if call is None or stream.is_closed:
            return
        if call.has_begun:
            self.h2.out.finish(stream, OK_TRAILERS)
        elif self._is_patient:
            self.h2.out.reset(stream, H2Code.CANCEL)
        else:
            self.h2.out.answer(stream, opening(), (b"\0\0\0\0\1x",), 6, OK_TRAILERS)


def _check_sent(sent: list[Frame]) -> None:
    """Nothing follows the end of a stream, and the number of GOAWAY never grows."""
    ended: set[int] = set()
    last = 2**31
    for frame in sent:
        if frame.kind in (DATA, HEADERS):
            assert frame.stream not in ended, frame
            if frame.flags & END_STREAM:
                ended.add(frame.stream)
        elif frame.kind == RST_STREAM:
            assert frame.stream
        elif frame.kind == GOAWAY:
            number = int.from_bytes(frame.payload[:4], "big")
            assert number <= last
            last = number


def http2_frames(data: bytes) -> None:
    """The bytes of a gRPC client after its greeting."""
    if not data:
        return
    mode, stream = data[0], data[1:]
    application = _Application(is_patient=mode & 1 == 1, is_thrifty=mode & 2 == 2)
    h2 = application.h2
    application.receive(GREETING)
    h2.out.room = 1000 if mode & 4 else 1 << 20
    size = len(stream) if mode >= 0xC0 else mode // 8 + 1
    sent = h2.out.take()
    half = len(stream) // 2
    for at in range(0, len(stream), size or 1):
        if mode & 16 and at <= half < at + size:
            h2.shut_down("drain")
        application.receive(stream[at : at + size])
        sent += h2.out.take()
    assert sum(map(len, sent)) <= SENT_FOR_EACH_BYTE * len(data) + 500
    h2.out.room = 1 << 20
    h2.out.write_waiting()
    h2.send_final_goaway()
    if not h2.is_failed:
        h2.fail(ConnectionFault(H2Code.NO_ERROR, "bye"))
    assert h2.is_over
    assert not h2.table.unsent_bytes
    _check_sent(frames_of(b"".join([*sent, *h2.out.take()])))
