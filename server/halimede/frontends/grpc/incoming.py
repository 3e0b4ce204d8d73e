"""Messages of one call that arrive in pieces, or that wait until their method takes them.

The usual call has one message that arrives in one piece, and needs none of this.
"""

from collections import deque
from typing import Protocol

from halimede.core.wire.grpc_messages import Message, MessageReader

WAITING_BYTES = 128
"""What a waiting message holds besides its content. An empty one is five bytes of DATA."""


class Recipient(Protocol):
    """What the messages are for: a call."""

    is_open: bool

    def deliver(self, message: Message) -> None:
        """Pass a message to the method."""

    def credit(self, size: int) -> None:
        """The client may send `size` more bytes of DATA."""

    def expect(self, size: int) -> None:
        """The client may send all of the next `size` bytes."""

    def count(self, size: int) -> None:
        """Count bytes that are held for the call. UNAVAILABLE when too many are held."""


class Incoming:
    """The DATA of one call. While paused, messages wait, and the client gets no credit for more.

    A message that comes in pieces is counted as it arrives, and one that waits as a whole. What was counted is passed
    on with the message.
    """

    __slots__ = ("_call", "_counted", "_reader", "_uncredited", "_waiting", "complete", "is_paused")

    def __init__(self, call: Recipient, reader: MessageReader) -> None:
        self._call = call
        self._reader = reader
        self._waiting: deque[Message] = deque()
        self._uncredited = 0
        self._counted = 0
        """Of the message in receipt."""
        self.is_paused = False
        self.complete = 0
        """How many messages have arrived."""

    @property
    def is_within(self) -> bool:
        """Whether a message is incomplete."""
        return self._reader.is_within

    @property
    def has_all_delivered(self) -> bool:
        """Whether no message waits, and none would."""
        return not self.is_paused and not self._waiting

    @property
    def received_bytes(self) -> int | None:
        """What has arrived of the message in receipt; None if no message is incomplete, or the client has no credit."""
        return self._reader.filled_bytes if self._reader.is_within and not self.is_paused else None

    @property
    def announced_bytes(self) -> int:
        """The size of the message in receipt; 0 while it is not known."""
        return self._reader.filled_bytes + self._reader.missing

    def take(self, data: memoryview, size: int) -> None:
        """DATA has arrived; `size` is to be credited when it is used."""
        reader = self._reader
        was_missing = reader.missing
        for message in reader.read(data):
            self._deliver(message)
        self._use(size)
        if reader.missing:
            self._count_up_to(reader.filled_bytes)
            if not was_missing:
                self._expect()

    def room(self) -> memoryview | None:
        """The memory of the message in receipt, to receive into; None if there is none."""
        return self._reader.room() if self._reader.missing else None

    def take_directly(self, size: int) -> None:
        """`size` bytes were received into `room`. Their credit was given with the first piece of their frame."""
        message = self._reader.received(size)
        if message is not None:
            self._deliver(message)
        else:
            self._count_up_to(self._reader.filled_bytes)

    def resume(self) -> None:
        """Deliver what has waited, and let the client send more. May be paused again when this returns."""
        self.is_paused = False
        while self._waiting and not self.is_paused and self._call.is_open:
            self._call.deliver(self._waiting.popleft())
        if self.is_paused or not self._call.is_open:
            return
        size, self._uncredited = self._uncredited, 0
        self._use(size)
        self._expect()

    def put_back(self, message: Message) -> None:
        """Deliver nothing until `resume`, and then this message first."""
        self.is_paused = True
        if not message.held_bytes:
            message.held_bytes = len(message.content) + WAITING_BYTES
            self._call.count(message.held_bytes)
        self._waiting.appendleft(message)

    def _deliver(self, message: Message) -> None:
        self.complete += 1
        size = len(message.content)
        if self._counted:
            self._count_up_to(size)
        if self.is_paused:
            self._count_up_to(size + WAITING_BYTES)
        message.held_bytes, self._counted = self._counted, 0
        if self.is_paused:
            self._waiting.append(message)
        else:
            self._call.deliver(message)

    def _count_up_to(self, size: int) -> None:
        """Count the message in receipt as `size` bytes."""
        more, self._counted = size - self._counted, size
        self._call.count(more)

    def _use(self, size: int) -> None:
        if self.is_paused:
            self._uncredited += size
        elif size and self._call.is_open:
            self._call.credit(size)

    def _expect(self) -> None:
        """Let the client send the whole of the message that it has begun."""
        if self._reader.missing and not self.is_paused:
            self._call.expect(self._reader.missing)
