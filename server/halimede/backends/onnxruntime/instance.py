"""Run batches on a session, and convert strings and bfloat16, which numpy and ONNX Runtime represent differently."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import LostInstanceError, RunContext
from halimede.backends.onnxruntime.session import DATATYPES, TEXT_LIMIT, onnx_error, runtime
from halimede.backends.python.utils.errors import is_device_lost
from halimede.backends.texts import decode_texts
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_inputs, model_outputs
from halimede.core.types import DataType, ErrorCode, internal

ONNX_BFLOAT16 = 16
FATAL_SEVERITY = 4


class OnnxInstance:
    """A TensorInstance over a session that other instances may share."""

    def __init__(self, session: Any, config: ModelConfig, arena_shrinkage: str) -> None:
        self._session = session
        self._input_types = {each.name: each.data_type for each in model_inputs(config)}
        # Inputs that the server makes: their datatypes are in the file alone.
        self._made_types = {
            each.name: DATATYPES[each.type].dtype
            for each in session.get_inputs()
            if each.type in DATATYPES and each.name not in self._input_types
        }
        self._bfloat16_outputs = {each.name for each in model_outputs(config) if each.data_type is DataType.BF16}
        self._options = runtime().RunOptions()
        # Failures are raised and sent to the client; a line on stderr for each would let clients flood the log.
        self._options.log_severity_level = FATAL_SEVERITY
        if arena_shrinkage:
            self._options.add_run_config_entry("memory.enable_memory_arena_shrinkage", arena_shrinkage)

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        feed = {name: self._value(name, array, context) for name, array in inputs.items()}
        names = list(outputs)
        try:
            if not self._bfloat16_outputs.isdisjoint(names):
                return self._run_values(feed, names)
            return dict(zip(names, self._session.run(names, feed, self._options), strict=True))
        except Exception as error:
            converted = onnx_error(error)
            if is_device_lost(error):
                raise LostInstanceError(ErrorCode.INTERNAL, str(converted)[:TEXT_LIMIT]) from error
            raise converted from error

    def close(self) -> None:
        self._session = None

    def _value(self, name: str, array: NDArray[Any], context: RunContext) -> Any:
        """The array in the session's form: numpy's, or an OrtValue for types that numpy does not have."""
        datatype = self._input_types.get(name)
        if datatype is None:
            return array.astype(self._made_types[name], copy=False)
        if datatype is DataType.BYTES:
            return _text(name, array, context.elements.get(name, context.rows))
        if not array.flags.aligned:
            # The array is a view at any offset of a message, but kernels may require alignment.
            array = array.copy()
        if datatype is DataType.BF16:
            return runtime().OrtValue.ortvalue_from_numpy_with_onnx_type(array, ONNX_BFLOAT16)
        return array

    def _run_values(self, feed: dict[str, Any], names: list[str]) -> dict[str, NDArray[Any]]:
        """Run with OrtValues for all tensors: 30 us more per call, but the only way to get a bfloat16 output."""
        from_numpy = runtime().OrtValue.ortvalue_from_numpy
        values = {k: from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in feed.items()}
        results = self._session.run_with_ort_values(names, values, self._options)
        return {
            name: _bits(value) if name in self._bfloat16_outputs else value.numpy()
            for name, value in zip(names, results, strict=True)
        }


def _text(name: str, array: NDArray[Any], rows: Sequence[int]) -> NDArray[Any]:
    """The strings of a BYTES input. ONNX Runtime would accept `bytes` too, but read them as the text `b'x'`."""
    texts = np.empty(array.shape, dtype=object)
    texts.reshape(-1)[:] = decode_texts(name, array, rows, "ONNX Runtime")
    return texts


def _bits(value: Any) -> NDArray[Any]:
    """A copy of a bfloat16 value's bits. The runtime can only pass it to numpy by its address."""
    bits = np.empty(value.shape(), dtype=np.uint16)
    if value.device_name() != "cpu" or value.tensor_size_in_bytes() != bits.nbytes:
        raise internal(f"cannot read a bfloat16 output that lies on '{value.device_name()}'")
    ctypes.memmove(bits.ctypes.data, value.data_ptr(), bits.nbytes)
    return bits
