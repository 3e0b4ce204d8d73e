"""The account of the states of sequences, which the threads of instances and the event loop use."""

from threading import Lock

from halimede.core.accounts import Account, ByteKind

MAX_STATE_BYTES = 1 << 30


class HeldStates:
    """What is kept for sequences. Implements `core.sequences.rows.StateBytes`."""

    def __init__(self, limit_bytes: int = MAX_STATE_BYTES) -> None:
        self.account = Account(ByteKind.STATE, limit_bytes)
        self.lock = Lock()

    def try_take(self, size_bytes: int) -> bool:
        account = self.account
        with self.lock:
            if account.held_bytes + size_bytes > account.limit_bytes:
                return False
            account.take(size_bytes)
            return True

    def give_back(self, size_bytes: int) -> None:
        with self.lock:
            self.account.give_back(size_bytes)

    def __repr__(self) -> str:
        return f"<HeldStates {self.account!r}>"
