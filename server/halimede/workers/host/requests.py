"""Requests without a final answer: which are cancelled, and how many more answers each may send.

Standard library only, for any CPython from 3.10 on.
"""

import threading
from collections import deque
from collections.abc import Iterable

from halimede.backends.hosting import HostedRequest
from halimede.channel.process_end.channel import Channel
from halimede.workers.frames.kinds import CREDIT, KEY, WINDOW_RESPONSES, WorkerFrame

_MAX_EARLY = 1024

WINDOW_BYTES = 8 << 20
"""A request that has sent so many bytes, or WINDOW_RESPONSES answers, waits until its client takes some of them. One
answer of any size may always be sent."""


class OpenRequest:
    """`begun_ns` is when the execution of the request began, in monotonic nanoseconds. Answers of a request that is
    `cancelled` are dropped, unless its client `reads_on`."""

    __slots__ = ("begun_ns", "cancelled", "reads_on", "unacknowledged", "unacknowledged_bytes")

    def __init__(self, begun_ns: int) -> None:
        self.begun_ns = begun_ns
        self.cancelled = False
        self.reads_on = True
        self.unacknowledged: deque[int] | None = None
        """The sizes in bytes of the answers that the client has not received."""
        self.unacknowledged_bytes = 0

    def cancel(self, *, reads_on: bool) -> None:
        self.cancelled = True
        self.reads_on &= reads_on

    def is_full(self) -> bool:
        """Whether the next answer has to wait."""
        if not self.unacknowledged:
            return False
        return len(self.unacknowledged) >= WINDOW_RESPONSES or self.unacknowledged_bytes >= WINDOW_BYTES


class OpenRequests:
    """Requests without a final answer, by key. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.open: dict[int, OpenRequest] = {}
        self.cancelled_early: dict[int, bool] = {}
        """Keys of requests that were cancelled before their EXECUTE frame was decoded, and whether clients read on."""
        self._rescheduled: dict[int, int] = {}
        """By sequence slot, the key of the request that is executed again. It stays open: its model may respond to it
        any time. If another request comes to the sequence slot, the server has ended it."""
        self._counting = threading.Lock()
        channel.handle(WorkerFrame.CANCEL, self._on_cancel)
        channel.handle(WorkerFrame.ASK_CANCEL, self._on_ask_cancel)
        channel.handle(WorkerFrame.CREDIT, self._on_credit)

    def add(self, requests: Iterable[HostedRequest], begun_ns: int) -> None:
        """The execution of these requests begins."""
        opened, early, rescheduled = self.open, self.cancelled_early, self._rescheduled
        for each in requests:
            if rescheduled and self._is_resumed(each, begun_ns):
                continue
            opened[each.key] = request = OpenRequest(begun_ns)
            if early and each.key in early:
                request.cancel(reads_on=early[each.key])

    def keep(self, request: HostedRequest) -> None:
        """The model wants to execute this request again."""
        self._rescheduled[request.sequence_slot] = request.key

    def _is_resumed(self, request: HostedRequest, begun_ns: int) -> bool:
        """Whether the request has been executed before, and is still open."""
        key = self._rescheduled.pop(request.sequence_slot, None)
        if key is None:
            return False
        if key != request.key:
            self.open.pop(key, None)
            return False
        opened = self.open.get(key)
        if opened is not None:
            opened.begun_ns = begun_ns
        return opened is not None

    def is_cancelled(self, key: int) -> bool:
        """Whether the request is cancelled, or answered."""
        request = self.open.get(key)
        if request is None:
            return True
        if not request.cancelled:
            self._channel.poll()
        return request.cancelled

    def wait_for_room(self, key: int) -> bool:
        """Wait until another answer of this request may be sent; False once nobody reads it. ServerGoneError."""
        request = self.open.get(key)
        if request is None:
            return False
        if request.is_full() and request.reads_on:
            self._channel.wait_for(lambda: not (request.reads_on and request.is_full()))
        return request.reads_on

    def count(self, key: int, size_bytes: int) -> None:
        """Count an answer that the client has not received."""
        request = self.open.get(key)
        if request is not None:
            with self._counting:
                if request.unacknowledged is None:
                    request.unacknowledged = deque()
                request.unacknowledged.append(size_bytes)
                request.unacknowledged_bytes += size_bytes

    def _on_cancel(self, body: memoryview) -> None:
        self._cancel(body, reads_on=False)

    def _on_ask_cancel(self, body: memoryview) -> None:
        self._cancel(body, reads_on=True)

    def _cancel(self, body: memoryview, *, reads_on: bool) -> None:
        (key,) = KEY.unpack(body)
        if key not in self.open:
            early = self.cancelled_early
            early[key] = reads_on and early.get(key, True)
            if len(early) > _MAX_EARLY:
                early.pop(next(iter(early)), None)
        # The main thread may have added it since the check above.
        request = self.open.get(key)
        if request is not None:
            request.cancel(reads_on=reads_on)

    def _on_credit(self, body: memoryview) -> None:
        key, count = CREDIT.unpack(body)
        request = self.open.get(key)
        if request is not None and request.unacknowledged is not None:
            # Another thread may count an answer at the same time.
            with self._counting:
                for _ in range(min(count, len(request.unacknowledged))):
                    request.unacknowledged_bytes -= request.unacknowledged.popleft()
