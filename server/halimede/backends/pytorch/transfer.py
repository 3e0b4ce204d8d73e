"""Arrays to tensors on the instance's device and back, without a copy on the CPU."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import RunContext
from halimede.backends.pytorch.runtime import datatype_of, runtime
from halimede.backends.texts import decode_texts
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import added_inputs, model_inputs
from halimede.core.types import DataType
from halimede.core.types.error import clip, internal


class Transfer:
    """The transfer between the server's arrays and one device; None for a model that chooses its devices itself.

    On the CPU a tensor is a view of its array, and an output's array is a view of its tensor. For CUDA each tensor is
    copied once into pinned memory, from or to which the device copies without the CPU.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: Any | None,  # Any: a torch.device
        *,
        is_writing: bool,
        made: Mapping[str, DataType] = MappingProxyType({}),
    ) -> None:
        """`is_writing`: the model may write to its inputs. Then it gets copies of controls and states, which are used
        again; the inputs of requests are not. `made` has the datatypes that the model needs of inputs that the server
        makes."""
        self._made = made
        self._device = device
        self._is_cpu = device is None or device.type == "cpu"
        self._datatypes = {each.name: each.data_type for each in model_inputs(config)}
        self._copied = frozenset(each.tensor.name for each in added_inputs(config)) if is_writing else frozenset()
        self._batches = config.max_batch_size > 0

    def values(self, inputs: Mapping[str, NDArray[Any]], context: RunContext) -> dict[str, Any]:  # Any: torch.Tensor
        """The inputs as tensors, those of strings as lists. RefusedRequestsError for strings that are not UTF-8."""
        return {name: self._value(name, array, context) for name, array in inputs.items()}

    def arrays(self, outputs: Mapping[str, Any]) -> dict[str, NDArray[Any]]:  # Any: torch.Tensor
        """The outputs as arrays. Waits for the device, so that an error of a kernel belongs to this batch."""
        torch = runtime()
        on_device: set[Any] = set() if self._is_cpu or self._device is None else {self._device}
        host: dict[str, Any] = {}
        for name, value in outputs.items():
            if getattr(value, "is_cuda", False):
                on_device.add(value.device)
                tensor = value.detach().contiguous()
                pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                host[name] = pinned.copy_(tensor, non_blocking=True)
            else:
                host[name] = value
        for device in on_device:
            torch.cuda.synchronize(device)
        return {name: self._array(name, value) for name, value in host.items()}

    def _value(self, name: str, array: NDArray[Any], context: RunContext) -> Any:
        datatype = self._datatypes.get(name)
        if datatype is DataType.BYTES:
            return decode_texts(name, array, context.elements.get(name, context.rows), "PyTorch")
        torch = runtime()
        if datatype is None and name in self._made:
            array = array.astype(self._made[name].dtype, copy=False)
        if name in self._copied or not array.flags.aligned:
            array = array.copy()
        # torch's kernels need memory in the order of the dimensions no more than numpy's, but negative strides.
        tensor = torch.from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        if datatype is DataType.BF16:
            tensor = tensor.view(torch.bfloat16)
        if self._is_cpu:
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)

    def _array(self, name: str, value: Any) -> NDArray[Any]:
        torch = runtime()
        if not isinstance(value, torch.Tensor):
            return self._texts(name, value)
        try:
            # Almost always possible: a tensor in the host's memory, of a datatype that numpy has.
            found: NDArray[Any] = value.numpy()
        except (RuntimeError, TypeError):
            return self._other_array(name, value)
        return found

    def _other_array(self, name: str, value: Any) -> NDArray[Any]:
        """The array of a tensor that has to be converted."""
        torch = runtime()
        if value.layout != torch.strided or value.is_quantized:
            raise internal(f"output '{name}': the model returned a tensor of layout {value.layout}; make it dense")
        datatype = datatype_of(value.dtype)
        if datatype is None:
            raise internal(f"output '{name}': the model returned {value.dtype}, which no answer can carry")
        tensor = value.detach().resolve_conj().resolve_neg().cpu()
        array: NDArray[Any] = (tensor.view(torch.uint16) if datatype is DataType.BF16 else tensor).numpy()
        return array

    def _texts(self, name: str, value: Any) -> NDArray[Any]:
        if not isinstance(value, (list, tuple)) or not all(isinstance(each, str) for each in value):
            kind = type(value).__name__
            raise internal(f"output '{name}': the model returned a {clip(kind)}, not a tensor or a list of strings")
        texts = np.empty(len(value), dtype=object)
        texts[:] = value
        return texts.reshape(-1, 1) if self._batches else texts
