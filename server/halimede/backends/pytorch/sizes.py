"""Check the sizes of a batch against a program's dynamic dimensions. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halimede.backends.pytorch.exported import ExportedTensor
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip


@dataclass(frozen=True, slots=True)
class _Place:
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
        by_place = {at: name for name, at in names.items()}
        self._places = [
            _Place(by_place.get(at, tensor.path), at, axis, size.symbol, size.least or 0, size.most)
            for at, tensor in enumerate(tensors)
            for axis, size in enumerate(tensor.dimensions)
            if size.size == -1
        ]

    def check(self, shapes: Sequence[Sequence[int]]) -> None:
        """`shapes` of all tensors. INVALID_ARG for the first size that does not fit."""
        sizes: dict[str, tuple[int, _Place]] = {}
        for place in self._places:
            size = shapes[place.at][place.axis]
            if size < place.least or (place.most is not None and size > place.most):
                bounds = (
                    f"at least {place.least}" if place.most is None or size < place.least else f"at most {place.most}"
                )
                raise _invalid(f"{_dimension(place)} is {size}; the model takes {bounds}")
            if not place.symbol:
                continue
            known, other = sizes.setdefault(place.symbol, (size, place))
            if known != size:
                raise _invalid(
                    f"{_dimension(place)} is {size}, and {_dimension(other)} is {known}; the model needs equal sizes"
                )


def _dimension(place: _Place) -> str:
    return f"dimension {place.axis} of input '{clip(place.name)}'"


def _invalid(message: str) -> InferenceError:
    return InferenceError(ErrorCode.INVALID_ARG, message)
