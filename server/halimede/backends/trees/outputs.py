"""From the sums of a forest to the output of Triton's FIL backend. Pure; numpy only."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from halimede.backends.trees.forest import Forest
from halimede.backends.trees.options import TreeOptions

Floats = NDArray[np.float32]

DEFAULT_THRESHOLD = 0.5


class Kind(Enum):
    """What `output__0` has, by the number of columns that the configuration asks for."""

    VALUES = auto()
    """One column per output of the forest."""
    CLASS = auto()
    """The number of the class, one column."""
    PAIR = auto()
    """Two columns for a forest with one probability: that of class 0 and that of class 1."""
    SECOND = auto()
    """One column for a forest with two probabilities: that of class 1."""


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """`columns` is the width of the output, before the configuration's dims are applied."""

    kind: Kind
    columns: int
    threshold: float | None


def output_plans(forest: Forest, options: TreeOptions) -> tuple[OutputPlan, ...]:
    """The possible outputs; the first one completes a configuration without outputs."""
    if options.gives_class and forest.targets == 1:
        return (OutputPlan(Kind.CLASS, 1, options.threshold),)
    values = OutputPlan(Kind.VALUES, forest.outputs, None)
    if forest.targets > 1:
        return (values,)
    if forest.outputs == 1 and gives_probability(forest):
        return (values, OutputPlan(Kind.PAIR, 2, None))
    if forest.outputs == 2:
        return (values, OutputPlan(Kind.SECOND, 1, None))
    return (values,)


def gives_probability(forest: Forest) -> bool:
    """Whether the one output of a forest is a probability, as far as the file says."""
    return forest.outputs == 1 and (forest.postprocessor == "sigmoid" or forest.task == 0)


def make_output(plan: OutputPlan, values: Floats) -> Floats:
    """The output [rows, columns] from the forest's values [rows, outputs]."""
    match plan.kind:
        case Kind.VALUES:
            return values
        case Kind.PAIR:
            return np.concatenate([1 - values, values], axis=1)
        case Kind.SECOND:
            return np.ascontiguousarray(values[:, 1:2])
        case Kind.CLASS:
            return _classes(plan.threshold, values)


def _classes(threshold: float | None, values: Floats) -> Floats:
    outputs = values.shape[1]
    if outputs == 1 or (outputs == 2 and threshold is not None):
        limit = np.float32(DEFAULT_THRESHOLD if threshold is None else threshold)
        return np.asarray(values[:, -1:] > limit, np.float32)
    return np.asarray(values.argmax(axis=1), np.float32)[:, None]


def postprocess(forest: Forest) -> Callable[[Floats], Floats]:
    """The function from sums to values, both [rows, outputs]; the result may be the argument itself."""
    alpha, ratio = np.float32(forest.sigmoid_alpha), np.float32(forest.ratio_c)
    functions: dict[str, Callable[[Floats], Floats]] = {
        "identity": lambda sums: sums,
        "identity_multiclass": lambda sums: sums,
        "sigmoid": lambda sums: _sigmoid(sums, alpha),
        "multiclass_ova": lambda sums: _sigmoid(sums, alpha),
        "softmax": lambda sums: _softmax(forest, sums),
        "exponential": _exponential,
        "exponential_standard_ratio": lambda sums: np.exp2(-sums / ratio),
        "logarithm_one_plus_exp": lambda sums: np.logaddexp(np.float32(0), sums),
        "hinge": lambda sums: (sums > 0).astype(np.float32),
        "signed_square": lambda sums: np.copysign(sums * sums, sums),
    }
    return functions[forest.postprocessor]


def _exponential(sums: Floats) -> Floats:
    with np.errstate(over="ignore"):
        powers: Floats = np.exp(sums)
    return powers


def _sigmoid(sums: Floats, alpha: np.float32) -> Floats:
    # Infinity is right for exp of a large number: the result is 0.
    with np.errstate(over="ignore"):
        values: Floats = np.reciprocal(1 + np.exp(sums * -alpha))
    return values


def _softmax(forest: Forest, sums: Floats) -> Floats:
    """Over the classes of each target; classes that a target does not have are 0."""
    values = np.zeros((len(sums), forest.targets, forest.classes), np.float32)
    for target, count in enumerate(forest.class_counts.tolist()):
        own = sums.reshape(values.shape)[:, target, :count]
        powers = np.exp(own - own.max(axis=1, keepdims=True))
        values[:, target, :count] = powers / powers.sum(axis=1, keepdims=True)
    return values.reshape(sums.shape)
