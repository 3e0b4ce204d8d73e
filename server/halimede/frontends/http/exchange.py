"""What a handler has of a connection: one request, and the ways to answer it."""

from collections.abc import Callable, Sequence
from typing import Protocol

from halimede.core.types import Buffer
from halimede.frontends.http.framing import Head


class Conversation(Protocol):
    """The connection of an exchange, as the exchange sees it. Only calls for the exchange in work have an effect."""

    exchange: "Exchange | None"
    """The one in work."""

    @property
    def has_room(self) -> bool: ...

    def count(self, exchange: "Exchange", size: int) -> None: ...

    def answer(self, exchange: "Exchange", status: int, fields: bytes, chunks: Sequence[Buffer]) -> None: ...

    def begin(self, exchange: "Exchange", status: int, fields: bytes) -> "Stream": ...

    def send_part(self, stream: "Stream", opening: bytes, part: Sequence[Buffer], *, is_last: bool) -> None: ...

    def hold(self, stream: "Stream", size: int) -> None: ...

    def abort(self) -> None: ...


class Exchange:
    """One whole request, and the way to answer it.

    `body` is valid as long as it is referenced. `on_gone` is called once if the client leaves before the answer.
    `model`, `version` and `request_id` are for the access log: those of an inference, once they are known.
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
        """Whether an answer is still wanted: none was given, and the client is there."""
        return self._connection.exchange is self

    def count(self, size: int) -> None:
        """So many bytes more are held for this request: they count with its body. UNAVAILABLE for too many."""
        self._connection.count(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:
        """Answer. `fields` are whole header lines; the body is `chunks` in order, referenced until it is sent.

        Only the first call has an effect, and no call after the client has disconnected.
        """
        self._connection.answer(self, status, fields, chunks)

    def stream(self, status: int, fields: bytes = b"") -> "Stream":
        """Answer in parts, as the one answer that there is. Nothing is sent before the first part.

        The stream takes the place of the exchange, `on_gone` included.
        """
        return self._connection.begin(self, status, fields)

    def __repr__(self) -> str:
        return f"<Exchange {self.head.method.decode('latin-1')} {self.head.target.decode('latin-1')}>"


class Stream(Exchange):
    """An answer of unknown length: a chunk per part, or to HTTP/1.0 until the connection closes.

    `on_room` is called each time that `has_room` has become true again. `failure` is why the answer ends as an error,
    for the access log: the status says that it began well.
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
        """Whether the client takes what is sent; else it is better to wait than to send more."""
        return self._connection.has_room

    def send(self, part: Sequence[Buffer], *, is_last: bool = False) -> None:
        """Send a part, at once; its buffers are referenced until they are sent. Nothing happens once it has ended."""
        opening, self._opening = self._opening, b""
        self._connection.send_part(self, opening, part, is_last=is_last)

    def hold(self, size: int) -> None:
        """So many bytes wait elsewhere for room here: they count with what is unsent."""
        self._connection.hold(self, size)

    def respond(self, status: int, fields: bytes = b"", chunks: Sequence[Buffer] = ()) -> None:  # noqa: ARG002
        """It is too late for another answer: the client sees that this one is cut off."""
        if self.is_open:
            self._connection.abort()
