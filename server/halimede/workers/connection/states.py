"""The server's end of the states of sequences that one process keeps."""

from halimede.channel.frames import FrameError, encode_frame, unpack
from halimede.channel.server_end.channel import Channel
from halimede.workers.frames.kinds import FORGET, STATE_FREED, WorkerFrame
from halimede.workers.states import HeldStates


class States:
    """The bytes that one process may keep. All methods are called on the event loop's thread."""

    def __init__(self, channel: Channel, states: HeldStates) -> None:
        self._channel = channel
        self._account = states
        self._share_bytes = 0
        channel.handle(WorkerFrame.STATE_FREED, self._on_freed)

    def try_take(self, size_bytes: int) -> bool:
        """Give the process more bytes."""
        if not self._account.try_take(size_bytes):
            return False
        self._share_bytes += size_bytes
        return True

    def forget(self, sequence_slot: int) -> None:
        """Have the process drop the state of a sequence slot."""
        self._channel.send(encode_frame(WorkerFrame.FORGET, FORGET.pack(sequence_slot)))

    def close(self) -> None:
        """The process has ended."""
        size, self._share_bytes = self._share_bytes, 0
        self._account.give_back(size)

    def _on_freed(self, body: memoryview) -> None:
        (size,) = unpack(STATE_FREED, body, WorkerFrame.STATE_FREED)
        if size > self._share_bytes:
            raise FrameError(f"{size} bytes of states given back, of {self._share_bytes} that it has")
        self._share_bytes -= size
        self._account.give_back(size)
