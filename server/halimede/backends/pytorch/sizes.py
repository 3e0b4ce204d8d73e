"""Check the sizes of a batch against a program's dynamic dimensions. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halimede.backends.pytorch.exported import ExportedTensor
from halimede.core.types.error import clip, invalid


@dataclass(frozen=True, slots=True)
class _Dim:
    name: str
    at: int
    axis: int
    symbol: str
    least: int
    most: int | None


class SizeCheck:
    """Checks that dimensions with the same symbol have the same size, and that sizes are within their bounds."""

    def __init__(self, tensors: Sequence[ExportedTensor], names: Mapping[str, int]) -> None:
        """`names` are the configured names, by position among the tensors."""
        by_position = {at: name for name, at in names.items()}
        self._dims = [
            _Dim(by_position.get(at, tensor.path), at, axis, size.symbol, size.least or 0, size.most)
            for at, tensor in enumerate(tensors)
            for axis, size in enumerate(tensor.dimensions)
            if size.size == -1
        ]

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """`shapes` of all tensors. INVALID_ARG for the first size that does not fit."""
        sizes: dict[str, tuple[int, _Dim]] = {}
        for dim in self._dims:
            size = shapes[dim.at][dim.axis]
            if size < dim.least or (dim.most is not None and size > dim.most):
                bounds = f"at least {dim.least}" if dim.most is None or size < dim.least else f"at most {dim.most}"
                raise invalid(f"{_dimension(dim)} is {size}; the model takes {bounds}")
            if not dim.symbol:
                continue
            known, other = sizes.setdefault(dim.symbol, (size, dim))
            if known != size:
                raise invalid(
                    f"{_dimension(dim)} is {size}, and {_dimension(other)} is {known}; the model needs equal sizes"
                )


def _dimension(dim: _Dim) -> str:
    return f"dimension {dim.axis} of input '{clip(dim.name)}'"
