"""The row dimension of a tensor on its way from the model that made it to the one that uses it, or to the client.

As in Triton, it changes only between a side that batches and one that does not. Between two sides that batch, a tensor
keeps the shape with which it was made. Beyond Triton, a row is added for a step that needs it (`with_one_row`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fit:
    """How one side expects a tensor. `rank` counts `dims` and the row dimension, if the side `batches`. `differs` is
    whether the side that makes the tensor batches when this one does not, or the other way round."""

    dims: tuple[int, ...]
    batches: bool
    rank: int
    differs: bool


def make_fit(dims: tuple[int, ...], *, batches: bool, made_in_batches: bool) -> Fit:
    """`dims` are without rows; -1 stands for any size."""
    return Fit(dims, batches, len(dims) + batches, batches != made_in_batches)


def match(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a tensor can have both shapes; -1 stands for any size."""
    return len(one) == len(other) and all(a == b or -1 in (a, b) for a, b in zip(one, other, strict=True))


def passed_shape(fit: Fit, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape for a side whose `fit` differs. A row dimension of 1 is added to dims that fit without one, and is
    removed from a shape that does not fit with it."""
    fits = match(fit.dims, shape)
    if fit.batches:
        return (1, *shape) if fits else shape
    return shape[1:] if not fits and shape[:1] == (1,) else shape


def with_one_row(fit: Fit, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape for a step that batches, of a tensor that was made for one row. A row dimension that a model which
    batches has left out is added, because the step would refuse the tensor without it."""
    return (1, *shape) if fit.batches and match(fit.dims, shape) else shape
