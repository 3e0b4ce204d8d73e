"""Assemble the module that models import, `triton_python_backend_utils`, with the names of `c_python_backend_utils`."""

import json
import struct
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np

from halimede.backends.python.utils import session
from halimede.backends.python.utils.calls import ResponseIterator
from halimede.backends.python.utils.config import (
    ModelConfig,
    get_input_config_by_name,
    get_output_config_by_name,
    using_decoupled_model_transaction_policy,
)
from halimede.backends.python.utils.datatypes import (
    TRITON_STRING_TO_NUMPY,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from halimede.backends.python.utils.errors import TritonError, TritonModelException
from halimede.backends.python.utils.logger import Logger, LogLevel
from halimede.backends.python.utils.metrics import Metric, MetricFamily, MetricKind
from halimede.backends.python.utils.models import get_model_dir, is_model_ready, load_model, unload_model
from halimede.backends.python.utils.request import (
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    SEQUENCE_END,
    SEQUENCE_START,
    InferenceRequest,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
    get_input_tensor_by_name,
)
from halimede.backends.python.utils.response import InferenceResponse, get_output_tensor_by_name
from halimede.backends.python.utils.sender import FINAL, InferenceResponseSender
from halimede.backends.python.utils.tensor import Tensor

_NATIVE: dict[str, Any] = {
    "InferenceRequest": InferenceRequest,
    "InferenceResponse": InferenceResponse,
    "InferenceResponseSender": InferenceResponseSender,
    "InferenceTrace": InferenceTrace,
    "LogLevel": LogLevel,
    "Logger": Logger,
    "MemoryType": MemoryType,
    "Metric": Metric,
    "MetricFamily": MetricFamily,
    "MetricKind": MetricKind,
    "PreferredMemory": PreferredMemory,
    "ResponseIterator": ResponseIterator,
    "TRITONSERVER_MEMORY_CPU": MemoryType.TRITONSERVER_MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": MemoryType.TRITONSERVER_MEMORY_GPU,
    "Tensor": Tensor,
    "TritonError": TritonError,
    "TritonModelException": TritonModelException,
    "get_model_dir": get_model_dir,
    "is_model_ready": is_model_ready,
    "load_model": load_model,
    "unload_model": unload_model,
}

CONTENTS: dict[str, Any] = _NATIVE | {
    "ModelConfig": ModelConfig,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": SEQUENCE_END,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": SEQUENCE_START,
    "TRITONSERVER_REQUEST_RELEASE_ALL": RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": RELEASE_RESCHEDULE,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": FINAL,
    "TRITON_STRING_TO_NUMPY": TRITON_STRING_TO_NUMPY,
    "deserialize_bytes_tensor": deserialize_bytes_tensor,
    "get_input_config_by_name": get_input_config_by_name,
    "get_input_tensor_by_name": get_input_tensor_by_name,
    "get_output_config_by_name": get_output_config_by_name,
    "get_output_tensor_by_name": get_output_tensor_by_name,
    # Existing models use the names that Triton's module imports.
    "json": json,
    "np": np,
    "numpy_to_triton_type": numpy_to_triton_type,
    "serialize_byte_tensor": serialize_byte_tensor,
    "struct": struct,
    "triton_string_to_numpy": triton_string_to_numpy,
    "triton_to_numpy_type": triton_to_numpy_type,
    "using_decoupled_model_transaction_policy": using_decoupled_model_transaction_policy,
}


def install(hosting: session.Session) -> None:
    """Make both modules importable in this process, for one hosted instance."""
    session.use(hosting)
    for name, contents in (("c_python_backend_utils", _NATIVE), ("triton_python_backend_utils", CONTENTS)):
        module = ModuleType(name)
        # Some libraries inspect the modules that use them, and fail at one without a spec.
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module
