"""One call of gRPC: its messages in and out, its deadline, its end. Everything runs on the event loop's thread."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol

from halimede.core.observe.access_lines import Access, AccessLog, access_kind
from halimede.core.observe.access_lines import Protocol as LoggedProtocol
from halimede.core.types import ApiCategory, Buffer, InferenceError, internal, invalid, shortage_of, unavailable
from halimede.core.wire.grpc_call import IDENTITY, OK_TRAILERS, CallHead, opening, trailers, trailers_only
from halimede.core.wire.grpc_messages import (
    PREFIX_BYTES,
    Message,
    MessageReader,
    MessageTooLarge,
    pack_prefix,
    unpack_prefix,
)
from halimede.core.wire.grpc_response import status_message
from halimede.core.wire.http2.connection import Http2Connection
from halimede.core.wire.http2.streams import Stream
from halimede.core.wire.status_map import GRPC_STATUS
from halimede.frontends.grpc.incoming import Incoming
from halimede.frontends.grpc.limits import HeldBytes

# Numbers of grpc's statuses that no error code of the server has.
CANCELLED = 1
DEADLINE_EXCEEDED = 4
RESOURCE_EXHAUSTED = 8
UNIMPLEMENTED = 12
INTERNAL = 13
UNAVAILABLE = 14

_HANDLERS = {"ModelInfer", "ModelStreamInfer"}
"""The methods whose names Triton's log has with this suffix."""
_EXPIRED = DEADLINE_EXCEEDED, "Deadline Exceeded"
NO_ROOM = "the server holds as many bytes of request messages as it can, try again later"
FREE_CALLS = 8
"""So many open calls of a connection count only with their messages, if their metadata are small."""

SMALL_HEAD_BYTES = 1 << 10
CALL_BYTES = 3 << 10
"""What an open call holds besides its metadata. One that does nothing may stay for as long as its client likes."""

_FOREVER_SECS = 10 * 24 * 3600.0
"""Deadlines that are later than this need no timer."""

log = logging.getLogger(__name__)


def shutting_down() -> InferenceError:
    """The error of calls that draining cuts short."""
    return unavailable("GRPC server is shutting down and has stopped accepting new requests.")


def crashed(what: str, error: Exception) -> InferenceError:
    """The error for an unexpected exception, which is logged here: the client does not get its details."""
    log.error("%s failed", what, exc_info=error)
    text = f"{what} failed by an internal error; the server's log has the cause"
    return shortage_of(error) or internal(text)


@dataclass(frozen=True, slots=True)
class Method:
    """One RPC. `begin` gets each call, and sets its callbacks. `is_unary`: clients send one message. Messages above
    `max_bytes` are refused by the error that `too_large` makes of their size."""

    name: str
    category: ApiCategory | None
    begin: Callable[["Call"], None]
    is_unary: bool
    max_bytes: int
    too_large: Callable[[int | str], InferenceError]


@dataclass(frozen=True, slots=True)
class Route:
    """What becomes of the calls with one head. `encoding` is that of their answers' messages."""

    head: CallHead
    method: Method
    encoding: bytes


class CallTurns(Protocol):
    """The turns of a connection's calls."""

    def admits_message(self, call: "Call") -> bool:
        """Whether a message of a stream may be handled now. Otherwise the call waits, and then takes its turn."""


class Conversation(Protocol):
    """What a call uses of its connection."""

    @property
    def h2(self) -> "Http2Connection[Route, Call]": ...

    @property
    def access_log(self) -> AccessLog | None: ...

    @property
    def held(self) -> HeldBytes: ...

    @property
    def turn(self) -> CallTurns: ...

    @property
    def client(self) -> str:
        """The client's address for the access log."""

    def flush_later(self) -> None:
        """Write what is outgoing at the end of the loop's turn."""


@dataclass(slots=True)
class Noted:
    """What the access log says of a call, or of one request of a stream, filled in as it becomes known.

    `found` means that an inference's model was found. Only then do failures have a rate limit per model.
    """

    began_at: float
    model: str = ""
    version: str = ""
    request_id: str = ""
    found: bool = False


class Call:
    """One call, from its header block to its end.

    The method sets the callbacks that it needs: `on_message` gets each message, `on_half_closed` is called when the
    client sends no more, `on_room` when all that was sent is written, `on_drain` when the server wants calls without
    work to end, and `on_gone` once if the call ends by something else than the method's own answer.
    """

    __slots__ = (
        "_conversation",
        "_deadline",
        "_has_begun",
        "_is_opened",
        "_stream",
        "_waiting_bytes",
        "_waits_for_turn",
        "encoding",
        "has_half_closed",
        "head",
        "held_bytes",
        "incoming",
        "is_open",
        "method",
        "noted",
        "on_drain",
        "on_gone",
        "on_half_closed",
        "on_message",
        "on_room",
    )

    def __init__(self, conversation: Conversation, stream: "Stream[Call]", route: Route) -> None:
        self._conversation = conversation
        self._stream = stream
        self.head = route.head
        self.method = route.method
        self.encoding = route.encoding
        self.noted = Noted(monotonic())
        self.is_open = True
        self.has_half_closed = False
        self._has_begun = False
        self._is_opened = False
        self.incoming: Incoming | None = None
        """None while all messages have arrived in one piece."""
        self.held_bytes = 0
        """What the call counts with its connection: mostly its messages in progress."""
        self._waiting_bytes = 0
        self._waits_for_turn = False
        self._deadline: asyncio.TimerHandle | None = None
        self.on_message: Callable[[Message], None] | None = None
        self.on_half_closed: Callable[[], None] | None = None
        self.on_room: Callable[[], None] | None = None
        self.on_drain: Callable[[], None] | None = None
        self.on_gone: Callable[[], None] | None = None

    def begin(self) -> None:
        """Start the deadline, and the method."""
        self._has_begun = True
        if log.isEnabledFor(logging.DEBUG):
            name = self.method.name
            log.debug("Process for %s, rpc_ok=1, 0 step START", f"{name}Handler" if name in _HANDLERS else name)
        timeout_s = self.head.timeout_s
        if timeout_s is not None and timeout_s < _FOREVER_SECS:
            if timeout_s <= 0:
                self.cut_off(*_EXPIRED)
                return
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self.cut_off, *_EXPIRED)
        try:
            head_bytes = self.head.size_bytes
            if head_bytes > SMALL_HEAD_BYTES or len(self._conversation.h2.table.open) > FREE_CALLS:
                self.count(head_bytes + CALL_BYTES)
            self.method.begin(self)
        except InferenceError as error:
            self.fail(error)

    # Messages in.

    def take_data(self, data: memoryview, size: int, *, is_end: bool) -> None:
        """DATA has arrived; `size` is to be credited when it is used."""
        try:
            if self.incoming is None and len(data) >= PREFIX_BYTES:
                # The usual case: one message in one piece.
                flag, length = unpack_prefix(data)
                if length + PREFIX_BYTES == len(data) and flag <= 1 and length <= self.method.max_bytes:
                    if not is_end:
                        self.credit(size)
                    self.deliver(Message(bytes(data[PREFIX_BYTES:]), flag == 1))
                    if is_end:
                        self._half_close()
                    return
            self._take(data, size)
            if is_end:
                self._half_close()
        except Exception as error:  # noqa: BLE001 -- whatever it was, the client gets an answer
            self.break_off(error)

    def _take(self, data: memoryview, size: int) -> None:
        if self.on_message is None and self._has_begun:
            # The rest of a call that is answered or refused.
            self.credit(size)
            return
        self._make_incoming().take(data, size)

    def _make_incoming(self) -> Incoming:
        if self.incoming is None:
            self.incoming = Incoming(self, MessageReader(self.method.max_bytes, self.method.too_large))
        return self.incoming

    def take_directly(self, size: int, *, is_end: bool) -> None:
        """`size` bytes were received into the room of `incoming`."""
        if self.incoming is None:
            return
        try:
            self.incoming.take_directly(size)
            if is_end:
                self._half_close()
        except Exception as error:  # noqa: BLE001 -- as in take_data
            self.break_off(error)

    def credit(self, size: int) -> None:
        """The client may send `size` more bytes of DATA."""
        self._conversation.h2.credit.use(self._stream, size)

    def expect(self, size: int) -> None:
        """The client may send all of the next `size` bytes."""
        self._conversation.h2.credit.expect(self._stream, size)

    def deliver(self, message: Message) -> None:
        """Pass a message to the method, which may `take_held`. One of a stream may have to wait for its turn."""
        if self.on_message is not None:
            if not self.method.is_unary and not self._conversation.turn.admits_message(self):
                self._waits_for_turn = True
                self._make_incoming().put_back(message)
                return
            self.on_message(message)
        if message.held_bytes:
            self.release(message.take_held())

    def _half_close(self) -> None:
        self.has_half_closed = True
        incoming = self.incoming
        if incoming is not None and incoming.is_within:
            raise invalid("the call ended before a whole request came")
        if (incoming is None or incoming.has_all_delivered) and self.on_half_closed is not None:
            self.on_half_closed()

    def pause(self) -> None:
        """Deliver no further messages. Those that have arrived wait, and their client gets no credit for more."""
        self._make_incoming().is_paused = True

    def resume(self, *, is_turn: bool = False) -> None:
        """Deliver messages again. If one waits for its turn, only when `is_turn`."""
        self._waits_for_turn = self._waits_for_turn and not is_turn
        incoming = self.incoming
        if incoming is None or not incoming.is_paused or self._waits_for_turn:
            return
        try:
            incoming.resume()
            if incoming.is_paused or not self.is_open:
                return
            self._conversation.flush_later()
            if self.has_half_closed and self.on_half_closed is not None:
                self.on_half_closed()
        except Exception as error:  # noqa: BLE001 -- as in take_data
            self.break_off(error)

    @property
    def is_awaiting(self) -> bool:
        """Whether no message of the client is incomplete or in progress, and none was answered: it may never come."""
        return self.on_message is not None and not self.has_half_closed

    def count(self, size: int) -> None:
        """Count bytes held for the call, until `release` or its end. UNAVAILABLE when too many are held."""
        if not self.is_open:
            return
        self.held_bytes += size
        if not self._conversation.held.hold(size):
            raise unavailable(NO_ROOM)

    def release(self, size: int) -> None:
        """Give back bytes that were counted. No effect if the call has ended, which gives back all of them."""
        if not self.is_open:
            return
        self.held_bytes -= size
        self._conversation.held.release(size)

    # Messages out.

    @property
    def has_room(self) -> bool:
        """Whether all that was sent is written: the client takes its answers."""
        return not self._stream.unsent_bytes

    @property
    def compresses(self) -> bool:
        return self.encoding is not IDENTITY

    def answer(self, parts: Sequence[Buffer], size: int, *, is_compressed: bool = False) -> None:
        """Send one message of `size` bytes, and OK. No effect if the call has ended."""
        if not self.is_open:
            return
        stream, conversation = self._stream, self._conversation
        self._end(0)
        data = (pack_prefix(is_compressed, size), *parts)
        conversation.h2.out.answer(stream, opening(self.encoding), data, size + PREFIX_BYTES, OK_TRAILERS)
        conversation.flush_later()

    def send(self, parts: Sequence[Buffer], size: int, *, is_compressed: bool = False) -> None:
        """Send one message of several. No effect if the call has ended."""
        if not self.is_open:
            return
        out, stream = self._conversation.h2.out, self._stream
        if not self._is_opened:
            self._is_opened = True
            out.respond(stream, opening(self.encoding))
        out.send(stream, (pack_prefix(is_compressed, size), *parts), size + PREFIX_BYTES)
        self._conversation.flush_later()

    def wait(self, size: int) -> None:
        """`size` bytes of answers wait elsewhere for room here: they count with the unsent ones."""
        if size != self._waiting_bytes:
            self._conversation.held.wait(size - self._waiting_bytes)
            self._waiting_bytes = size

    # The end.

    def finish(self) -> None:
        """All messages are sent: the status is OK."""
        self.end(0, "")

    def fail(self, error: InferenceError) -> None:
        """End the call by an error."""
        # The caller keeps the error, and its traceback would keep the caller's frame with the received message alive.
        error.__traceback__ = None
        self.end(RESOURCE_EXHAUSTED if isinstance(error, MessageTooLarge) else GRPC_STATUS[error.code], error.message)

    def end(self, status: int, text: str) -> None:
        """End the call with a status. No effect if it has ended."""
        if not self.is_open:
            return
        text = status_message(text)
        stream, conversation = self._stream, self._conversation
        self._end(status, text)
        if self._is_opened:
            conversation.h2.out.finish(stream, trailers(status, text))
        else:
            conversation.h2.out.respond(stream, trailers_only(status, text), is_end=True)
        conversation.flush_later()

    def break_off(self, error: Exception) -> None:
        """End the call by an error that its method does not know of."""
        on_gone = self.on_gone
        if isinstance(error, InferenceError):
            self.fail(error)
        else:
            self.fail(crashed(self.method.name, error))
        self._tell(on_gone)

    def leave(self, text: str) -> None:
        """The client has left, or cannot be answered any more."""
        if not self.is_open:
            return
        on_gone = self.on_gone
        self._end(CANCELLED, text)
        self._tell(on_gone)

    def cut_off(self, status: int, text: str) -> None:
        """End the call, whatever its method is doing."""
        on_gone = self.on_gone
        self.end(status, text)
        self._tell(on_gone)

    def _tell(self, on_gone: Callable[[], None] | None) -> None:
        if on_gone is None:
            return
        try:
            on_gone()
        except Exception:
            log.exception("%s failed after the end of its call", self.method.name)

    def _end(self, status: int, text: str = "") -> None:
        if self.held_bytes:
            self.release(self.held_bytes)
        self.is_open = False
        self._stream.call = None
        if self._deadline is not None:
            self._deadline.cancel()
        self.wait(0)
        # The callbacks refer to the call, and would keep it until a garbage collection.
        self.on_message = self.on_half_closed = self.on_room = self.on_drain = self.on_gone = None
        self.incoming = None
        self.note(self.noted, status, text)

    def note(self, noted: Noted, status: int, error: str = "") -> None:
        """Report to the access log that the call, or one request of its stream, has ended."""
        access_log = self._conversation.access_log
        if access_log is None or not (status or access_log.successes):
            return
        if self.method.category is ApiCategory.HEALTH and status in (0, CANCELLED):
            return  # Probes repeat at intervals, so their success is not logged.
        kind = access_kind(LoggedProtocol.GRPC, status, noted.model if noted.found else "")
        if access_log.admits(kind):
            seconds = monotonic() - noted.began_at
            about = (noted.model, noted.version, noted.request_id)
            access_log.note(Access(kind, self.method.name, "", seconds, self._conversation.client, *about, error))

    def __repr__(self) -> str:
        return f"<Call {self.method.name} {'open' if self.is_open else 'ended'}>"


class Holding:
    """What is counted for one message of a stream, or for one of its answers, until `release` or the call's end.

    `on_gone` is called if the client leaves while steps of the message wait for a permit.
    """

    __slots__ = ("_call", "_size", "on_gone")

    def __init__(self, call: Call, size: int = 0) -> None:
        """`size` bytes are counted already."""
        self._call = call
        self._size = size
        self.on_gone: Callable[[], None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the call is."""
        return self._call.is_open

    def count(self, size: int) -> None:
        """Count more bytes. UNAVAILABLE when too many are held."""
        self._size += size
        self._call.count(size)

    def release(self) -> None:
        """Give back all of them. A second call has no effect."""
        size, self._size = self._size, 0
        self._call.release(size)

    def leave(self) -> None:
        """The call has ended. A second call has no effect."""
        on_gone, self.on_gone = self.on_gone, None
        if on_gone is not None:
            on_gone()

    def break_off(self, error: Exception) -> None:
        """End the call by an error that its method does not know of."""
        self._call.break_off(error)
