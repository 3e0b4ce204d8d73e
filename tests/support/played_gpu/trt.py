"""TensorRT without a GPU, under the names and with the arguments of its Python package.

A plan is the header of a real one and a JSON document: tensors, profiles, and a numpy expression for each output (see
`support.plans`). Its execution reads and writes the memory of the played CUDA runtime, as work of a stream.
`tests/conformance/test_tensorrt_api.py` compares the names and arguments here with those of the real package.
"""

import json
import os
from enum import Enum, IntEnum
from math import prod
from pathlib import Path

import numpy as np

from support.played_gpu import cudart
from support.played_gpu.cudart import MACHINE

__version__ = "11.4.0.106"

DataType = Enum("DataType", "FLOAT HALF BF16 INT8 INT32 INT64 BOOL UINT8 FP8 INT4 FP4 E8M0")
TensorFormat = Enum("TensorFormat", "LINEAR CHW2 HWC8 CHW4 CHW16 CHW32")
TensorLocation = Enum("TensorLocation", "DEVICE HOST")
TensorIOMode = Enum("TensorIOMode", "NONE INPUT OUTPUT")
ExecutionContextAllocationStrategy = Enum("ExecutionContextAllocationStrategy", "STATIC ON_PROFILE_CHANGE USER_MANAGED")

NUMPY = {
    "FLOAT": np.float32,
    "HALF": np.float16,
    "BF16": np.uint16,
    "INT8": np.int8,
    "INT32": np.int32,
    "INT64": np.int64,
    "BOOL": np.bool_,
    "UINT8": np.uint8,
}


class Dims(tuple):
    """A shape."""


class ILogger:
    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None:
        self.is_made = True

    def log(self, severity, msg):
        raise NotImplementedError


class IOutputAllocator:
    def __init__(self) -> None:
        self.is_made = True


class IPluginRegistry:
    def __init__(self) -> None:
        self.names: set[str] = set()

    def load_library(self, plugin_path):
        """A played library is a text file with the names of its plugins."""
        try:
            self.names |= set(Path(plugin_path).read_text().split())
        except OSError:
            _log(ILogger.Severity.ERROR, f"Unable to load library: {plugin_path}")
            return None
        return object()


_registry = IPluginRegistry()
_loggers: list[ILogger] = []
strategies: list[str] = []
"""The allocation strategies of the contexts that were made."""


def get_plugin_registry():
    return _registry


def init_libnvinfer_plugins(logger, namespace):
    assert logger.is_made
    assert namespace == ""
    _loggers[:] = [logger]
    return True


def _log(severity, text) -> None:
    _loggers[0].log(severity, text)


def _fail(text) -> bool:
    _log(ILogger.Severity.ERROR, text)
    return False


class Runtime:
    def __init__(self, logger):
        assert logger.is_made
        self.engine_host_code_allowed = False

    def deserialize_cuda_engine(self, serialized_engine):
        head, body = serialized_engine[:28], serialized_engine[28:]
        made_by = ".".join(map(str, head[24:28]))
        plan = json.loads(body) if body.startswith(b"{") and body.endswith(b"}") else None
        if plan is None:
            return _fail("Serialization assertion failed: the plan is damaged") or None
        if made_by.rsplit(".", 1)[0] != __version__.rsplit(".", 1)[0] and not plan.get("version_compatible"):
            return _fail(f"The engine plan file is not compatible: expecting {__version__}, got {made_by}") or None
        if plan.get("version_compatible") and not self.engine_host_code_allowed:
            return _fail("Cannot deserialize an engine with host code without permission") or None
        if (plugin := plan.get("plugin")) and plugin not in _registry.names:
            return _fail(f"Cannot find plugin: {plugin}") or None
        if plan.get("device", MACHINE.physical_device) != MACHINE.physical_device:
            return _fail(f"The engine was built for device {plan['device']}") or None
        return ICudaEngine(plan)


class ICudaEngine:
    def __init__(self, plan) -> None:
        self.plan = plan
        self.tensors = {each["name"]: each for each in plan["tensors"]}
        self.num_optimization_profiles = plan["profiles"]
        self.num_io_tensors = len(self.tensors)

    def get_tensor_name(self, index):
        return list(self.tensors)[index]

    def get_tensor_mode(self, name):
        return TensorIOMode.INPUT if self.tensors[name]["input"] else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name):
        return DataType[self.tensors[name]["dtype"]]

    def get_tensor_shape(self, name):
        return Dims(self.tensors[name]["shape"])

    def get_tensor_location(self, name):
        return TensorLocation.HOST if self.tensors[name]["host"] else TensorLocation.DEVICE

    def get_tensor_format(self, name, profile_index):
        assert 0 <= profile_index < self.num_optimization_profiles
        return TensorFormat[self.tensors[name]["format"]]

    def get_tensor_format_desc(self, name, profile_index):
        return f"Layout {self.tensors[name]['format']}"

    def get_aliased_input_tensor(self, name):
        return self.tensors[name].get("aliases", "")

    def is_shape_inference_io(self, name):
        return self.tensors[name]["host"]

    def get_tensor_profile_shape(self, name, profile_index):
        assert self.tensors[name]["input"]
        assert -1 in self.tensors[name]["shape"], "the shape is fixed"
        return [Dims(each) for each in self.tensors[name]["ranges"][profile_index]]

    def get_tensor_profile_values(self, name, profile_index):
        # The real binding has the names of its two arguments the wrong way round.
        assert isinstance(name, int)
        assert self.tensors[profile_index]["host"], "not a shape tensor"
        return [list(each) for each in self.tensors[profile_index]["values"][name]]

    def create_execution_context(self, strategy):
        assert isinstance(strategy, ExecutionContextAllocationStrategy)
        strategies.append(strategy.name)
        if self.plan.get("no_context"):
            return _fail("Cannot allocate device memory for the context") or None
        return IExecutionContext(self)


class IExecutionContext:
    def __init__(self, engine) -> None:
        self.engine = engine
        self.device = MACHINE.device
        self.active_optimization_profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._values: dict[str, np.ndarray] = {}
        self._allocators: dict[str, IOutputAllocator] = {}
        self._is_prepared = False

    def set_optimization_profile_async(self, profile_index, stream_handle):
        cudart.stream_of(stream_handle)
        if not 0 <= profile_index < self.engine.num_optimization_profiles:
            return _fail(f"no profile {profile_index}")
        self.active_optimization_profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name, shape):
        assert isinstance(shape, tuple | list | Dims)
        low, _, high = self.engine.tensors[name]["ranges"][self.active_optimization_profile]
        if len(shape) != len(low) or not all(a <= b <= c for a, b, c in zip(low, shape, high, strict=True)):
            return _fail(f"shape {shape} of {name} is not in profile {self.active_optimization_profile}")
        self._shapes[name] = tuple(shape)
        self._is_prepared = False
        return True

    def set_tensor_address(self, name, memory):
        assert isinstance(memory, int)
        assert memory
        self._addresses[name] = memory
        tensor = self.engine.tensors[name]
        if tensor["host"] and tensor["input"]:
            # The values are those at the time of this call.
            dtype = np.dtype(NUMPY[tensor["dtype"]])
            raw, is_pinned = MACHINE.host(memory, prod(self._shapes[name]) * dtype.itemsize)
            assert not is_pinned
            self._values[name] = raw.copy().view(dtype).reshape(self._shapes[name])
        return True

    def set_output_allocator(self, name, output_allocator):
        assert output_allocator.is_made
        self._allocators[name] = output_allocator
        return True

    def get_tensor_shape(self, name):
        tensor = self.engine.tensors[name]
        if tensor["input"]:
            return Dims(self._shapes.get(name, tensor["shape"]))
        if tensor["open"]:
            return Dims(tensor["shape"])
        zeros = {each: self._value(each, np.zeros) for each, t in self.engine.tensors.items() if t["input"]}
        return Dims(np.shape(self._compute(name, zeros)))

    def execute_async_v3(self, stream_handle):
        stream = cudart.stream_of(stream_handle)
        assert self.device == stream.device
        plan, tensors = self.engine.plan, self.engine.tensors
        missing = [name for name, each in tensors.items() if each["input"] and name not in self._shapes]
        missing += [name for name in tensors if name not in self._addresses and name not in self._allocators]
        if missing:
            return _fail(f"IExecutionContext::enqueueV3: {missing[0]} is not set")
        if stream.recording is not None and not self._is_prepared:
            return _fail("the first execution after a change of shapes cannot be captured")
        self._is_prepared = True
        fault = plan.get("fault", "")
        if fault and any(t["input"] and np.prod(self._shapes[n]) == plan["fault_size"] for n, t in tensors.items()):
            if fault == "exit":
                os._exit(9)
            if fault == "refuse":
                return _fail("the tactic failed")
            stream.add(_illegal_access)
        addresses, shapes, values = dict(self._addresses), dict(self._shapes), dict(self._values)
        names = [name for name, each in tensors.items() if each["input"]]

        def read() -> dict[str, np.ndarray]:
            arrays = {}
            for name in names:
                dtype = np.dtype(NUMPY[tensors[name]["dtype"]])
                size = prod(shapes[name]) * dtype.itemsize
                arrays[name] = values.get(name)
                if arrays[name] is None:
                    raw = MACHINE.on_device(addresses[name], size)
                    arrays[name] = raw.copy().view(dtype).reshape(shapes[name])
            return arrays

        def write(name: str, address: int) -> None:
            result = self._compute(name, read())
            MACHINE.on_device(address, result.nbytes)[...] = np.ascontiguousarray(result).reshape(-1).view(np.uint8)

        for name, each in tensors.items():
            if each["input"]:
                continue
            if each["host"]:
                result = self._compute(name, read())
                MACHINE.host(addresses[name], result.nbytes)[0][...] = result.reshape(-1).view(np.uint8)
            elif name in self._allocators:
                # An output of open size: TensorRT waits for the inputs to know how much memory it needs.
                stream.run(len(stream.work))
                result = self._compute(name, read())
                allocator = self._allocators[name]
                at = allocator.reallocate_output_async(name, addresses.get(name, 0), result.nbytes, 256, stream_handle)
                if not at:
                    return _fail(f"cannot reallocate output {name}")
                allocator.notify_shape(name, Dims(result.shape))
                stream.add(lambda name=name, at=at: write(name, at))
            else:
                stream.add(lambda name=name: write(name, addresses[name]))
        return True

    def _value(self, name, make):
        dtype = np.dtype(NUMPY[self.engine.tensors[name]["dtype"]])
        return self._values[name] if name in self._values else make(self._shapes[name], dtype)

    def _compute(self, name, inputs):
        tensor = self.engine.tensors[name]
        result = eval(tensor["formula"], {"np": np}, dict(inputs))
        return np.asarray(result).astype(NUMPY[tensor["dtype"]])


def _illegal_access() -> None:
    raise cudart.Fault("illegal address")
