"""One request of a connection and its answer, as a handler sees them."""

from collections.abc import Callable, Sequence
from typing import Protocol

from halimede.core.types import Buffer
from halimede.frontends.http.framing import Head


class Conversation(Protocol):
    """The connection of an exchange. A call for an exchange that is not the current one has no effect."""

    exchange: "Exchange | None"
    """The current exchange."""

    @property
    def has_room(self) -> bool: ...

    def count(self, exchange: "Exchange", size: int) -> None: ...

    def answer(self, exchange: "Exchange", status: int, fields: bytes, chunks: Sequence[Buffer]) -> None: ...

    def begin(self, exchange: "Exchange", status: int, fields: bytes) -> "Stream": ...

    def send_part(self, stream: "Stream", opening: bytes, part: Sequence[Buffer], *, is_last: bool) -> None: ...

    def hold(self, stream: "Stream", size: int) -> None: ...

    def fail(self, exchange: "Exchange", error: BaseException) -> None: ...

    def abort(self) -> None: ...


class Exchange:
    """One complete request, and the way to answer it.

    `body` is valid as long as it is referenced. `on_gone` is called once if the client disconnects before the answer.
    `model`, `version` and `request_id` of an inference are set for the access log when they are known.
    """

    __slots__ = ("_connection", "body", "head", "model", "on_gone", "request_id", "version")

    def __init__(self, connection: Conversation, head: Head, body: Buffer) -> None:
        self._connection = connection
        self.head = head
        self.body = body
        self.on_gone: Callable[[], None] | None = None
        self.model = ""
        self.version = ""
        self.request_id = ""

    @property
    def is_open(self) -> bool:
        """Whether an answer can still be sent: none was given, and the client is connected."""
        return self._connection.exchange is self

    def count(self, size: int) -> None:
        """Count more bytes held for this request, with its body. UNAVAILABLE when too many are held."""
        self._connection.count(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:
        """Answer. `fields` are whole header lines; the body is `chunks` in order, referenced until it is sent.

        Only the first call has an effect, and none after the client has disconnected.
        """
        self._connection.answer(self, status, fields, chunks)

    def break_off(self, error: Exception) -> None:
        """Log an internal fault, and answer without its details."""
        self._connection.fail(self, error)

    def stream(self, status: int, fields: bytes = b"") -> "Stream":
        """Answer in parts. Nothing is sent before the first part.

        The stream replaces the exchange, including `on_gone`.
        """
        return self._connection.begin(self, status, fields)

    def __repr__(self) -> str:
        return f"<Exchange {self.head.method.decode('latin-1')} {self.head.target.decode('latin-1')}>"


class Stream(Exchange):
    """An answer of unknown length: a chunk per part; for HTTP/1.0 it ends with the connection.

    `on_room` is called each time `has_room` becomes true again. `failure` is the error that the answer ended with, for
    the access log: its status is the one that it began with.
    """

    __slots__ = ("_opening", "failure", "on_room", "status")

    def __init__(self, connection: Conversation, exchange: Exchange, opening: bytes, status: int) -> None:
        super().__init__(connection, exchange.head, b"")
        self.on_gone = exchange.on_gone
        self.model = exchange.model
        self.version = exchange.version
        self.request_id = exchange.request_id
        self.status = status
        self.failure = ""
        self.on_room: Callable[[], None] | None = None
        self._opening = opening

    @property
    def has_room(self) -> bool:
        """Whether the client reads what is sent. If not, the sender should wait."""
        return self._connection.has_room

    def send(self, part: Sequence[Buffer], *, is_last: bool = False) -> None:
        """Send a part at once; its buffers are referenced until they are sent. No effect after the end."""
        opening, self._opening = self._opening, b""
        self._connection.send_part(self, opening, part, is_last=is_last)

    def hold(self, size: int) -> None:
        """Count bytes that wait elsewhere for room here, with the unsent ones."""
        self._connection.hold(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:  # noqa: ARG002
        """End an answer that has begun: the client sees that it is incomplete."""
        if self.is_open:
            self._connection.abort()
