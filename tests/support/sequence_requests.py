"""Requests and policies of sequence models, for tests of their scheduler."""

from collections.abc import Hashable

from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.sequences.policy import DirectPolicy, SequencePolicy, oldest_policy

MODEL = "m"


def in_sequence(
    key: int, correlation: int | str, flags: str = "", *, shape: Hashable = (), timeout_us: int = 0, rows: int = 1
) -> Pending:
    """A request of a sequence. `flags` has S for START and E for END."""
    return Pending(
        key,
        rows,
        4,
        shape,
        timeout_us=timeout_us,
        correlation=correlation,
        sequence_start="S" in flags,
        sequence_end="E" in flags,
    )


def direct(
    sequence_slots: int = 2, *, delay_ns: int = 0, utilization: float = 0.0, idle_ns: int = 10**9
) -> SequencePolicy:
    return SequencePolicy(MODEL, sequence_slots, sequence_slots, DirectPolicy(delay_ns, utilization), idle_ns)


def oldest(
    sequence_slots: int = 6,
    max_batch_size: int = 4,
    *,
    preferred: tuple[int, ...] = (),
    delay_ns: int = 0,
    idle_ns: int = 10**9,
    iterative: bool = False,
) -> SequencePolicy:
    strategy = oldest_policy(max_batch_size, preferred, delay_ns)
    return SequencePolicy(MODEL, max_batch_size, sequence_slots, strategy, idle_ns, iterative=iterative)
