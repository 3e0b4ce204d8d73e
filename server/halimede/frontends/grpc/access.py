"""The API category of each method, by the method's path (`--grpc-restricted-protocol`).

Reflection belongs to metadata: it does not expose the models, but it exposes the whole protocol.
"""

from halimede.core.types import ApiCategory

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_INFERENCE_METHODS = {
    **dict.fromkeys(("ServerLive", "ServerReady", "ModelReady"), ApiCategory.HEALTH),
    **dict.fromkeys(("ServerMetadata", "ModelMetadata"), ApiCategory.METADATA),
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), ApiCategory.INFERENCE),
    **{
        f"{kind}SharedMemory{action}": ApiCategory.SHARED_MEMORY
        for kind in ("System", "Cuda")
        for action in ("Status", "Register", "Unregister")
    },
    "ModelConfig": ApiCategory.MODEL_CONFIG,
    **dict.fromkeys(("RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"), ApiCategory.MODEL_REPOSITORY),
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
