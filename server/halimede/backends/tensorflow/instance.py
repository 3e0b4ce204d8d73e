"""Run batches on a session, and convert bfloat16, scalars and made inputs."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import RunContext
from halimede.backends.tensorflow.session import as_inference_errors, error_text, runtime
from halimede.core.config.made_inputs import made_inputs
from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import DataType, internal

log = logging.getLogger(__name__)

CALLABLES = 64
"""Each combination of inputs and outputs is compiled when it is first asked for; of more, the oldest is dropped."""


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """The tensors of the graph (`x:0`) by their names in the configuration, and the datatypes of the inputs.

    `keeps_inputs`: the graph may keep an input's memory or write a state.
    """

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    input_types: Mapping[str, DataType]
    keeps_inputs: bool


class TensorFlowInstance:
    """A TensorInstance over a session of its own, which it closes."""

    def __init__(self, session: Any, config: ModelConfig, tensors: GraphTensors, *, runs_in_caller: bool) -> None:
        self._session = session
        self._tensors = tensors
        self._runs_in_caller = runs_in_caller
        self._bfloat16 = _bfloat16()
        self._callables: dict[tuple[tuple[str, ...], tuple[str, ...]], Callable[..., list[Any]]] = {}
        self._bfloat16_outputs = {each.name for each in model_outputs(config) if each.data_type is DataType.BF16}

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        context: RunContext,  # noqa: ARG002
    ) -> dict[str, NDArray[Any]]:
        # Clients give inputs in any order; each order would be another combination.
        given = tuple(name for name in self._tensors.inputs if name in inputs)
        arrays = [self._fed(name, inputs[name]) for name in given]
        try:
            values = self._callable(given, tuple(outputs))(*arrays)
        except Exception as error:
            raise internal(f"TensorFlow error {error_text(error)}") from error
        return {name: self._fetched(name, value, arrays) for name, value in zip(outputs, values, strict=True)}

    def prepare(self, config: ModelConfig, model: str, scalars: Collection[str]) -> None:
        """Compile the graph for all its outputs and run it once, because TensorFlow does much at the first run.

        `scalars` are the inputs that the graph takes as scalars. The run has zeros and no request, so its failure says
        nothing; a graph with a state is not run.
        """
        inputs = [each for each in model_inputs(config) if not each.optional]
        made = made_inputs(config)
        given = {each.name for each in inputs} | {each.name for each in made}
        names = tuple(name for name in self._tensors.inputs if name in given)
        with as_inference_errors(f"model '{model}' cannot run"):
            call = self._callable(names, tuple(each.name for each in model_outputs(config)))
        # Inputs that the server makes must fit the others.
        if self._tensors.keeps_inputs or made:
            return
        try:
            zeros = {each.name: _zeros(each, config.max_batch_size > 0) for each in inputs}
            zeros |= {name: zeros[name].reshape(()) for name in scalars if name in zeros}
            call(*(self._fed(name, zeros[name]) for name in names))
        except Exception as error:  # noqa: BLE001  # a model may refuse zeros
            log.info("model '%s': the first run, with zeros, failed: %s", model, error_text(error))

    def close(self) -> None:
        self._callables.clear()
        self._session.close()

    def _callable(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Callable[..., list[Any]]:
        """The call that computes these outputs."""
        call = self._callables.get((inputs, outputs))
        if call is not None:
            return call
        options = runtime().config.CallableOptions(
            feed=[self._tensors.inputs[name] for name in inputs],
            fetch=[self._tensors.outputs[name] for name in outputs],
        )
        if self._runs_in_caller:
            options.run_options.inter_op_thread_pool = -1
        if len(self._callables) >= CALLABLES:
            del self._callables[next(iter(self._callables))]
        # Ten times faster than `make_callable` of the public interface, which takes the feeds apart in Python.
        made: Callable[..., list[Any]] = self._session._make_callable_from_options(options)
        self._callables[inputs, outputs] = made
        return made

    def _fed(self, name: str, array: NDArray[Any]) -> NDArray[Any]:
        """The array in TensorFlow's form. TensorFlow reads an aligned one in place."""
        datatype = self._tensors.input_types[name]
        if datatype is DataType.BYTES:
            return array
        if self._tensors.keeps_inputs:
            # The memory belongs to the requests, which end before a state in the graph does.
            array = array.copy()
        if datatype is DataType.BF16:
            return array.view(self._bfloat16)
        return array.astype(datatype.dtype, copy=False)

    def _fetched(self, name: str, value: Any, inputs: Sequence[NDArray[Any]]) -> NDArray[Any]:
        """The output as an array: scalars come as numbers and bytes. An output that is an input is copied."""
        if isinstance(value, bytes):
            scalar = np.empty((), dtype=object)
            scalar[()] = value
            return scalar
        output: NDArray[Any] = np.asarray(value)
        if any(np.may_share_memory(output, array) for array in inputs):
            output = output.copy()
        return output.view(np.uint16) if name in self._bfloat16_outputs else output


def _bfloat16() -> Any:  # Any: mypy takes this dtype for none of numpy's
    import ml_dtypes  # TensorFlow needs it

    return np.dtype(ml_dtypes.bfloat16)


def _zeros(tensor: ModelInput, batches: bool) -> NDArray[Any]:
    """An input of one row with the least sizes, all zeros or empty strings."""
    dims = (tensor.dims if tensor.reshape is None else tensor.reshape.shape) if not tensor.allow_ragged_batch else (1,)
    batch = (1,) if batches and not tensor.allow_ragged_batch else ()
    shape = (*batch, *(max(1, size) for size in dims))
    if tensor.data_type is DataType.BYTES:
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, dtype=tensor.data_type.dtype)
