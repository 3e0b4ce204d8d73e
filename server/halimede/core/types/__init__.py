"""Values that every layer shares: tensors, requests, responses, errors, statistics, devices."""

from halimede.core.types.access import ApiCategory, Restrictions, Secret
from halimede.core.types.datatype import DataType
from halimede.core.types.device import (
    Device,
    DeviceKind,
    DeviceMemory,
    DeviceReport,
    DeviceState,
    PlacedInstances,
    Placement,
)
from halimede.core.types.error import (
    ErrorCode,
    InferenceError,
    Problem,
    internal,
    invalid,
    shortage_of,
    unavailable,
    unsupported,
)
from halimede.core.types.request import InferenceRequest, InferenceResponse, ParameterValue, RequestForm
from halimede.core.types.server import ModelIndexEntry, ModelReadyState, ServerMetadata
from halimede.core.types.tensor import Buffer, RegionSlice, Tensor

__all__ = [
    "ApiCategory",
    "Buffer",
    "DataType",
    "Device",
    "DeviceKind",
    "DeviceMemory",
    "DeviceReport",
    "DeviceState",
    "ErrorCode",
    "InferenceError",
    "InferenceRequest",
    "InferenceResponse",
    "ModelIndexEntry",
    "ModelReadyState",
    "ParameterValue",
    "PlacedInstances",
    "Placement",
    "Problem",
    "RegionSlice",
    "RequestForm",
    "Restrictions",
    "Secret",
    "ServerMetadata",
    "Tensor",
    "internal",
    "invalid",
    "shortage_of",
    "unavailable",
    "unsupported",
]
