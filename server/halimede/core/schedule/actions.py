"""What a scheduler decides: values that the pump performs in order."""

from dataclasses import dataclass

from halimede.core.types import InferenceError
from halimede.core.types.statistics import FailureReason


@dataclass(slots=True)
class Execute:
    """Run these requests, in this order, as one batch on this instance. The instance is busy until `completed`."""

    instance: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer this request with this error; it left the queue and will never run."""

    request: int
    error: InferenceError
    reason: FailureReason


Action = Execute | Fail
