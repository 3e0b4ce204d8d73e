"""Which requests a sequence model refuses, and the texts of all errors. Texts are Triton's where Triton has one."""

from halimede.core.schedule.scheduler import Pending
from halimede.core.schedule.sequences.policy import SequencePolicy
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.error import clip, internal, invalid, unavailable

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")
EXPIRED = unavailable("timeout of the corresponding sequence has been expired")


def check_request(pending: Pending, policy: SequencePolicy) -> None:
    """Raise INVALID_ARG for a request that fits no sequence of the model. The checks run in Triton's order."""
    correlation, control = pending.correlation, policy.correlation
    if correlation and pending.batch_size == 1 and (control is None or type(correlation) is control.identity_type):
        return
    model = clip(policy.model)
    if control is not None and correlation and not policy.iterative:
        given = DataType.BYTES if isinstance(correlation, str) else DataType.UINT64
        if (given is DataType.BYTES) is not (control.datatype is DataType.BYTES):
            raise invalid(
                f"sequence batching control '{clip(control.name)}' data-type is '{given.name}', but model '{model}' "
                f"expects '{control.datatype.name}'"
            )
    if pending.batch_size > 1:
        text = f"inference request to model '{model}' must specify batch-size 1 due to requirements of sequence batcher"
        raise invalid(text)
    if not correlation and not policy.iterative:
        raise invalid(f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID")


def queue_full() -> InferenceError:
    return unavailable("Exceeds maximum queue size")


def missing_start(correlation: int | str, policy: SequencePolicy) -> InferenceError:
    """The error of a request that belongs to no sequence and does not begin one."""
    return invalid(
        f"inference request for sequence {clip(str(correlation))} to model '{clip(policy.model)}' must specify the "
        "START flag on the first request of the sequence"
    )


def conflict(correlation: int | str, policy: SequencePolicy) -> str:
    """The warning about a sequence that begins before the last one with its correlation id has ended."""
    return (
        f"sequence {clip(str(correlation))} for model '{clip(policy.model)}' has a conflict. The previous sequence did "
        "not end before this sequence start. Previous sequence will be terminated early."
    )


def ended(correlation: int | str, policy: SequencePolicy) -> InferenceError:
    """The error of requests that are queued behind the one that ended their sequence."""
    return unavailable(
        f"sequence {clip(str(correlation))} for model '{clip(policy.model)}' has ended: an earlier request's new state "
        "would exceed the memory that the server has for the states of sequences; begin the sequence again with the "
        "START flag"
    )


def lost_state(correlation: int | str, policy: SequencePolicy) -> InferenceError:
    """The error of requests whose sequence had its state at an instance that has ended."""
    model = clip(policy.model)
    if policy.iterative:
        text = f"inference request to model '{model}' has lost its state: its instance has ended; send it again"
    else:
        text = (
            f"sequence {clip(str(correlation))} for model '{model}' has lost its state: its instance has ended; begin "
            "the sequence again with the START flag"
        )
    return internal(text)
