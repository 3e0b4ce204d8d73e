"""What the client may send: the windows for received DATA (RFC 9113 sections 5.2 and 6.9).

The window of a stream opens as the application uses its DATA. The window of the connection opens at once, so that a
stream whose request is not used stops its own sender alone.
"""

from typing import Generic, TypeVar

from halimede.core.wire.http2 import frames
from halimede.core.wire.http2.codes import DEFAULT_WINDOW, MAX_WINDOW, ConnectionFault, H2Code, Setting
from halimede.core.wire.http2.frame_reader import FrameReader
from halimede.core.wire.http2.limits import LARGE_REQUEST_BYTES, Http2Limits
from halimede.core.wire.http2.sender import Sender
from halimede.core.wire.http2.streams import HALF_CLOSED_LOCAL, OPEN, Stream

C = TypeVar("C")


class Credit(Generic[C]):
    """The windows that one client has got."""

    __slots__ = ("_limits", "_out", "_reader", "_uncredited", "_window")

    def __init__(self, limits: Http2Limits, reader: FrameReader, out: Sender[C]) -> None:
        self._limits = limits
        self._reader = reader
        self._out = out
        self._window = limits.connection_window
        # Received, without credit for it yet.
        self._uncredited = 0
        out.outgoing.append(frames.window_update(0, limits.connection_window - DEFAULT_WINDOW))

    def received(self, size: int) -> None:
        """Count a DATA frame against the window of the connection, whatever becomes of it (section 6.9)."""
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(H2Code.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        self._uncredited += size
        if self._uncredited * 2 >= self._limits.connection_window:
            self._window += self._uncredited
            self._out.outgoing.append(frames.window_update(0, self._uncredited))
            self._uncredited = 0

    def use(self, stream: Stream[C], size: int) -> None:
        """The application has used `size` bytes of a stream: its client may send as many more."""
        if stream.state is not OPEN and stream.state is not HALF_CLOSED_LOCAL:
            return
        stream.uncredited += size
        if stream.uncredited * 2 >= self._limits.window:
            self._grant(stream, stream.uncredited)

    def expect(self, stream: Stream[C], size: int) -> None:
        """The client is to send `size` more bytes that the application will use in any case: open the window for
        all of them, so that the client does not wait for credit."""
        reader, limits = self._reader, self._limits
        if size > LARGE_REQUEST_BYTES and reader.max_frame_bytes < limits.large_frame_bytes:
            # Not at the start: small requests need no large frames, and the first ones of a connection are small.
            reader.max_frame_bytes = limits.large_frame_bytes
            self._out.outgoing.append(frames.settings({Setting.MAX_FRAME_SIZE: limits.large_frame_bytes}))
        missing = min(size, MAX_WINDOW) - stream.receive_window
        if missing > 0 and stream.state is OPEN:
            self._grant(stream, missing)

    def _grant(self, stream: Stream[C], size: int) -> None:
        stream.uncredited -= size
        stream.receive_window += size
        self._out.outgoing.append(frames.window_update(stream.id, size))
