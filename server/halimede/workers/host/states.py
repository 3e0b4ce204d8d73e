"""What this process may keep for sequences: its share of the server's bound.

The server gives bytes on request and gets them back unasked. Both are amounts and no totals, so that the order of
messages of several threads does not matter. A share grows and shrinks in steps, so that few changes of a state need a
message.

Standard library only, for any CPython from 3.10 on.
"""

import threading

from halimede.backends.service_calls import TakeState
from halimede.channel.frames import encode_frame
from halimede.channel.process_end.channel import Channel
from halimede.workers.frames.kinds import STATE_FREED, WorkerFrame
from halimede.workers.host.services import ServiceCalls

STEP_BYTES = 64 << 10
"""A process with states has up to two steps more than it needs."""


class States:
    """Implements `core.sequences.rows.StateBytes`."""

    def __init__(self, channel: Channel, services: ServiceCalls) -> None:
        self._channel = channel
        self._services = services
        self.lock = threading.Lock()
        self._held_bytes = 0
        self._share_bytes = 0

    def try_take(self, size_bytes: int) -> bool:
        with self.lock:
            if self._held_bytes + size_bytes <= self._share_bytes:
                self._held_bytes += size_bytes
                return True
        more = -(-size_bytes // STEP_BYTES) * STEP_BYTES
        # Without the lock: the thread that reads the result may give back at the same time.
        if not self._services.call(TakeState(more)):
            # The server may have less than a step left.
            more = size_bytes
            if not self._services.call(TakeState(more)):
                return False
        with self.lock:
            self._share_bytes += more
            self._held_bytes += size_bytes
        return True

    def give_back(self, size_bytes: int) -> None:
        with self.lock:
            self._held_bytes -= size_bytes
            unused = self._share_bytes - self._held_bytes
            if self._held_bytes and unused < 2 * STEP_BYTES:
                return
            if self._held_bytes:
                unused = unused // STEP_BYTES * STEP_BYTES - STEP_BYTES
            self._share_bytes -= unused
        if unused:
            self._channel.send(encode_frame(WorkerFrame.STATE_FREED, STATE_FREED.pack(unused)))
