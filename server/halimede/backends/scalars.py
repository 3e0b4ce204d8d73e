"""Scalars of models that do not batch: clients see one element, because a configuration has no tensor without dims."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import RunContext, TensorInstance
from halimede.core.config.autocomplete import Scalars


def with_scalars(instance: TensorInstance, scalars: Scalars) -> TensorInstance:
    """The instance, which sees scalars where clients see one element."""
    return ScalarInstance(instance, scalars) if scalars.inputs or scalars.outputs else instance


class ScalarInstance:
    """A TensorInstance around one whose model has scalars."""

    def __init__(self, instance: TensorInstance, scalars: Scalars) -> None:
        self._instance = instance
        self._scalars = scalars

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        scalars = self._scalars
        given = {name: array.reshape(()) if name in scalars.inputs else array for name, array in inputs.items()}
        found = self._instance.run(given, outputs, context)
        return {name: _shown(array, scalars.outputs.get(name)) for name, array in found.items()}

    def close(self) -> None:
        self._instance.close()


def _shown(array: NDArray[Any], dims: tuple[int, ...] | None) -> NDArray[Any]:
    # An output that is no scalar, against the model file, is left for the check of the answer.
    return array if dims is None or np.ndim(array) else np.reshape(array, dims)
