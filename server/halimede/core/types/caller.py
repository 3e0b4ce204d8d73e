"""The origin of an inference from inside the server: a step of an ensemble, or a call by a model's code (BLS)."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_DEPTH = 32
"""Maximum nesting of calls; stops a model that calls itself, and a cycle of ensembles."""


class RunningBatch(NamedTuple):
    """A running batch: its model and its first request, which is in only one running batch."""

    model: str
    version: str
    first: int


class Answers(NamedTuple):
    """The answers to the requests of a batch, during the batch or afterwards: its instance does not wait for them."""

    batch: RunningBatch


class Beside(NamedTuple):
    """The code of an instance outside its batches: it is unknown which requests wait for it."""

    model: str
    version: str
    ordinal: int


@dataclass(slots=True)
class Computed:
    """Total compute time of the calls, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns


@dataclass(slots=True)
class Caller:
    """`depth` is the nesting level of this call, 1 for the first.

    `waiter` identifies what blocks until the call is answered: the batch of the calling model, the responses to a
    batch's requests, or the ticket of an ensemble's request for which one of these waits, directly or through others;
    if that is unknown, the instance whose code calls. None if no model's code waits: the steps of an ensemble that a
    client called.

    `model` is the model whose code waits, "" if none does; each call for it, also a step of an ensemble that it
    calls, may be queued for `queue_timeout_ns`, 0 for no limit.

    `computed` adds up the compute times of successful calls: the statistics of an ensemble are the sums of its steps.
    None if they are not needed.
    """

    depth: int
    waiter: Hashable = None
    computed: Computed | None = field(default=None, compare=False)
    model: str = ""
    queue_timeout_ns: int = 0
