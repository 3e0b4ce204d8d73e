"""Run batches on an infer request, whose tensors are bound once."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import RunContext
from halimede.backends.openvino.errors import openvino_error
from halimede.backends.openvino.graph import Plan
from halimede.backends.openvino.runtime import runtime
from halimede.core.types import invalid

MOST_TEXT_BYTES = 2**31 - 2
"""All bytes of a string input together: OpenVINO counts them in 32 bits."""

BFLOAT16 = "bf16"


class OpenVinoInstance:
    """A TensorInstance over an infer request of its own. The compiled model is shared with other instances."""

    def __init__(self, compiled: Any, plan: Plan, fixed_rows: int, *, pads: bool, has_state: bool) -> None:
        """`fixed_rows` is the size of every batch, 0 for any; smaller ones are filled up if `pads`."""
        self._request = compiled.create_infer_request()
        self._fixed_rows = fixed_rows
        self._pads = pads
        self._has_state = has_state
        self._inputs: dict[str, _Input | _TextInput] = {}
        for name, indexes in plan.inputs.items():
            bound = [_Input(self._request, index, compiled.inputs[index].get_element_type()) for index in indexes]
            self._inputs[name] = bound[0] if len(bound) == 1 else _TextInput(name, *bound)
        self._outputs = dict(plan.outputs)
        self._bfloat16 = {
            index for index, each in enumerate(compiled.outputs) if each.get_element_type().get_type_name() == BFLOAT16
        }

    def run(
        self,
        inputs: Mapping[str, NDArray[Any]],
        outputs: Sequence[str],
        context: RunContext,  # noqa: ARG002  # the interface's
    ) -> dict[str, NDArray[Any]]:
        rows = self._check(inputs)
        try:
            for name, array in inputs.items():
                self._inputs[name].fill(_filled_up(array, self._fixed_rows) if rows else array)
            if self._has_state:
                # The states are another client's.
                self._request.reset_state()
            results = tuple(self._request.infer(None, share_outputs=True, decode_strings=False).values())
        except RuntimeError as error:
            raise openvino_error(error) from error
        return {name: self._take(results, self._outputs[name], rows) for name in outputs}

    def close(self) -> None:
        self._inputs.clear()
        self._request = None

    def _check(self, inputs: Mapping[str, NDArray[Any]]) -> int:
        """The rows of the batch if it has to be filled up, else 0. INVALID_ARG for what OpenVINO cannot answer."""
        if len(inputs) != len(self._inputs):
            # The request would run with the tensor of an earlier batch.
            missing = ", ".join(f"'{name}'" for name in self._inputs if name not in inputs)
            raise invalid(f"the model needs all its inputs, and the batch lacks {missing}")
        for name, array in inputs.items():
            if array.size == 0:
                raise invalid(
                    f"input '{name}' has the shape {list(array.shape)}, without an element: operations of OpenVINO may "
                    "then return the results of an earlier batch"
                )
        if not self._fixed_rows:
            return 0
        rows = len(next(iter(inputs.values())))
        if rows < self._fixed_rows and not self._pads:
            raise invalid(
                f"the batch has {rows} rows, and the model takes exactly {self._fixed_rows}; with the parameter "
                "ENABLE_BATCH_PADDING set to YES smaller batches are filled up"
            )
        return rows if rows < self._fixed_rows else 0

    def _take(self, results: Sequence[NDArray[Any]], indexes: Sequence[int], rows: int) -> NDArray[Any]:
        """A copy of the output: the next run overwrites the request's own tensors."""
        if len(indexes) > 1:
            begins, ends, text = (results[index] for index in indexes)
            return _texts(begins[:rows] if rows else begins, ends[:rows] if rows else ends, text.tobytes())
        value = results[indexes[0]]
        value = np.array(value[:rows] if rows else value)
        return value.view(np.uint16) if indexes[0] in self._bfloat16 else value


class _Input:
    """A tensor of the request, and an array with the same memory. Inputs are copied in: OpenVINO takes only arrays that
    it may write to."""

    __slots__ = ("_index", "_request", "_tensor", "_type", "_view")

    def __init__(self, request: Any, index: int, element_type: Any) -> None:
        self._request = request
        self._index = index
        self._type = element_type
        self._tensor: Any = None
        self._view: NDArray[Any] = np.empty(0)

    def fill(self, array: NDArray[Any]) -> None:
        if self._tensor is None or self._view.shape != array.shape:
            self._bind(array.shape)
        self._view[...] = array

    def _bind(self, shape: tuple[int, ...]) -> None:
        if self._tensor is None:
            self._tensor = runtime().Tensor(self._type, list(shape))
        else:
            self._tensor.shape = list(shape)
        self._request.set_input_tensor(self._index, self._tensor)
        # numpy has no bfloat16: OpenVINO shows it as float16.
        view = self._tensor.data
        self._view = view.view(np.uint16) if self._type.get_type_name() == BFLOAT16 else view


class _TextInput:
    """A string input as three arrays of numbers."""

    __slots__ = ("_begins", "_bytes", "_ends", "_name")

    def __init__(self, name: str, begins: _Input, ends: _Input, text: _Input) -> None:
        self._name = name
        self._begins = begins
        self._ends = ends
        self._bytes = text

    def fill(self, array: NDArray[Any]) -> None:
        elements = array.reshape(-1).tolist()
        ends = np.cumsum(np.fromiter(map(len, elements), np.int64, len(elements)))
        if ends[-1] > MOST_TEXT_BYTES:
            raise invalid(
                f"the strings of input '{self._name}' have {ends[-1]} bytes together; they may have {MOST_TEXT_BYTES}"
            )
        begins = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self._begins.fill(begins.reshape(array.shape))
        self._ends.fill(ends.reshape(array.shape))
        # One byte more, so that the tensor is not empty if all strings are.
        self._bytes.fill(np.frombuffer(b"".join((*elements, b"\0")), np.uint8))


def _texts(begins: NDArray[Any], ends: NDArray[Any], text: bytes) -> NDArray[Any]:
    elements = np.empty(begins.shape, dtype=object)
    positions = zip(begins.reshape(-1).tolist(), ends.reshape(-1).tolist(), strict=True)
    elements.reshape(-1)[:] = [text[begin:end] for begin, end in positions]
    return elements


def _filled_up(array: NDArray[Any], rows: int) -> NDArray[Any]:
    """The batch with its first row repeated at its end: a row that the model can compute."""
    return np.concatenate([array, np.repeat(array[:1], rows - len(array), axis=0)])
