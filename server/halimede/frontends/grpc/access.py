"""The API category of each method, by the method's path (`--grpc-restricted-protocol`).

Reflection belongs to metadata: it does not expose the models, but it exposes the whole protocol.
"""

from halimede.core.types import ApiCategory

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_INFERENCE_METHODS = {
    "ServerLive": ApiCategory.HEALTH,
    "ServerReady": ApiCategory.HEALTH,
    "ModelReady": ApiCategory.HEALTH,
    "ServerMetadata": ApiCategory.METADATA,
    "ModelMetadata": ApiCategory.METADATA,
    "ModelInfer": ApiCategory.INFERENCE,
    "ModelStreamInfer": ApiCategory.INFERENCE,
    "SystemSharedMemoryStatus": ApiCategory.SHARED_MEMORY,
    "SystemSharedMemoryRegister": ApiCategory.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryStatus": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryRegister": ApiCategory.SHARED_MEMORY,
    "CudaSharedMemoryUnregister": ApiCategory.SHARED_MEMORY,
    "ModelConfig": ApiCategory.MODEL_CONFIG,
    "RepositoryIndex": ApiCategory.MODEL_REPOSITORY,
    "RepositoryModelLoad": ApiCategory.MODEL_REPOSITORY,
    "RepositoryModelUnload": ApiCategory.MODEL_REPOSITORY,
    "ModelStatistics": ApiCategory.STATISTICS,
    "TraceSetting": ApiCategory.TRACE,
    "LogSettings": ApiCategory.LOGGING,
}

CATEGORIES: dict[str, ApiCategory] = {
    **{f"/{INFERENCE}/{name}": category for name, category in _INFERENCE_METHODS.items()},
    f"/{HEALTH}/Check": ApiCategory.HEALTH,
    f"/{HEALTH}/Watch": ApiCategory.HEALTH,
    **{f"/{service}/ServerReflectionInfo": ApiCategory.METADATA for service in REFLECTIONS},
}
"""All served methods."""
