"""The rules for shapes in a model configuration."""

from collections.abc import Iterator, Sequence
from math import prod

from halimede.core.types import Problem

MAX_RANK = 63
"""Maximum number of dimensions of one tensor without the batch dimension; numpy's limit is 64."""

_DIMS_RULE = "must be integer >= 1, or -1 to indicate a variable-size dimension"


def dims_problems(dims: Sequence[int], called: str, of: str, path: str) -> Iterator[Problem]:
    """At most one problem of each kind, because Triton's text does not name the dimension. `of` ends the texts."""
    invalid = next((i for i, dim in enumerate(dims) if dim < 1 and dim != -1), None)
    if invalid is not None:
        yield Problem(f"{called} {_DIMS_RULE}{of}", f"{path}[{invalid}]")
    if len(dims) > MAX_RANK:
        yield Problem(f"{called} count must be <= {MAX_RANK}, got {len(dims)}{of}", path)


def fixed_dims_problems(dims: Sequence[int], called: str, path: str) -> Iterator[Problem]:
    for i, dim in enumerate(dims):
        if dim < 1:
            yield Problem(f"{called} must have fixed dims of at least 1, got {dim}", f"{path}[{i}]")


def reshape_problem(dims: Sequence[int], shape: Sequence[int]) -> str | None:
    """Why a tensor of shape `dims` cannot be reshaped to `shape`; None if it can.

    Variable dimensions correspond in order, and the fixed dimensions between them must have equal element counts.
    """
    dims_runs, shape_runs = _runs(dims), _runs(shape)
    # The number of variable dimensions is compared only if both sides have one, as in Triton.
    if len(dims_runs) > 1 and len(shape_runs) > 1 and len(dims_runs) != len(shape_runs):
        return "has different number of variable-size dimensions for dims and reshape"
    if dims_runs != shape_runs:
        return "has different size for dims and reshape"
    return None


def _runs(dims: Sequence[int]) -> list[int]:
    """Element counts of the fixed dimensions before, between and after the variable ones."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]
