"""Who asks for an inference from inside the server: a step of an ensemble, or a model's own code."""

from collections.abc import Hashable
from dataclasses import dataclass, field

MAX_DEPTH = 32
"""Calls that may lie within one another: a model that calls itself, or an ensemble of ensembles, ends there."""


@dataclass(slots=True)
class Computed:
    """What calls have taken to compute, in nanoseconds."""

    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0

    def add(self, input_ns: int, infer_ns: int, output_ns: int) -> None:
        self.input_ns += input_ns
        self.infer_ns += infer_ns
        self.output_ns += output_ns


@dataclass(slots=True)
class Caller:
    """`depth` is how many calls lie within one another with this one, 1 for the first.

    `waiter` is what cannot go on before the answer: the batch of the model whose code calls, the answers to a batch's
    requests, or the ticket of an ensemble's request that one of these waits for, directly or through others; where
    nobody knows which, the code of the instance as such. None where no model's code waits: the steps of an ensemble
    that a client called.

    `computed` adds up what successful calls took: the statistics of an ensemble have the sums of its steps. None where
    they are not needed.
    """

    depth: int
    waiter: Hashable = None
    computed: Computed | None = field(default=None, compare=False)
