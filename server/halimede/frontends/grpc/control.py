"""The RPCs of GRPCInferenceService other than inference: health, metadata, statistics, repository."""

from collections.abc import Awaitable, Callable, Mapping

from halimede.core.config.model_view import ModelView
from halimede.core.types import ErrorCode, InferenceError, unsupported
from halimede.core.wire.grpc_control import (
    check_repository_name,
    decode_load_parameters,
    decode_unload_dependents,
    encode_index,
    encode_model_config,
    encode_model_metadata,
    encode_server_metadata,
    encode_statistics,
)
from halimede.core.wire.protocol import ProtoMessage, message_class
from halimede.core.wire.shared_memory import unknown_region
from halimede.facade.server import Server

Handler = Callable[[ProtoMessage], Awaitable[ProtoMessage]]

VIEW_ANSWERS: Mapping[str, Callable[[ModelView], ProtoMessage]] = {
    "ModelMetadata": encode_model_metadata,
    "ModelConfig": lambda view: encode_model_config(view.config),
}
"""The responses of the RPCs that are answered from a model's view, by name."""

_ServerLiveResponse = message_class("inference.ServerLiveResponse")
_ServerReadyResponse = message_class("inference.ServerReadyResponse")
_ModelReadyResponse = message_class("inference.ModelReadyResponse")
_RepositoryModelLoadResponse = message_class("inference.RepositoryModelLoadResponse")
_RepositoryModelUnloadResponse = message_class("inference.RepositoryModelUnloadResponse")

_NOT_AVAILABLE = {
    "SystemSharedMemoryRegister": "system shared memory",
    "CudaSharedMemoryRegister": "CUDA shared memory",
    "TraceSetting": "tracing",
    "LogSettings": "changing log settings",
}


class Control:
    """The handlers of control RPCs over one server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def answers(self) -> dict[str, Handler]:
        """The handler of each RPC, by its name."""
        answers: dict[str, Handler] = {name: _not_available(name, what) for name, what in _NOT_AVAILABLE.items()}
        answers |= {
            "SystemSharedMemoryStatus": _no_regions("system", "SystemSharedMemoryStatus"),
            "SystemSharedMemoryUnregister": _unregistered("SystemSharedMemoryUnregister"),
            "CudaSharedMemoryStatus": _no_regions("cuda", "CudaSharedMemoryStatus"),
            "CudaSharedMemoryUnregister": _unregistered("CudaSharedMemoryUnregister"),
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
            "RepositoryModelLoad": self._load,
            "RepositoryModelUnload": self._unload,
        }
        return answers

    async def _server_live(self, _request: ProtoMessage) -> ProtoMessage:
        return _ServerLiveResponse(live=self._server.is_live())

    async def _server_ready(self, _request: ProtoMessage) -> ProtoMessage:
        return _ServerReadyResponse(ready=self._server.is_ready())

    async def _model_ready(self, request: ProtoMessage) -> ProtoMessage:
        try:
            is_ready = await self._server.is_model_ready(request.name, request.version)
        except InferenceError as error:
            # Clients poll `is_model_ready` of tritonclient before the model is known, and it must return False.
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            is_ready = False
        return _ModelReadyResponse(ready=is_ready)

    async def _server_metadata(self, _request: ProtoMessage) -> ProtoMessage:
        return encode_server_metadata(self._server.metadata())

    async def _model_statistics(self, request: ProtoMessage) -> ProtoMessage:
        # A version without a name is ignored, as in Triton.
        return encode_statistics(await self._server.statistics(request.name, request.version if request.name else ""))

    async def _repository_index(self, request: ProtoMessage) -> ProtoMessage:
        check_repository_name(request)
        return encode_index(await self._server.repository_index(request.ready))

    async def _load(self, request: ProtoMessage) -> ProtoMessage:
        check_repository_name(request)
        await self._server.load_model(request.model_name, decode_load_parameters(request))
        return _RepositoryModelLoadResponse()

    async def _unload(self, request: ProtoMessage) -> ProtoMessage:
        check_repository_name(request)
        await self._server.unload_model(request.model_name, decode_unload_dependents(request))
        return _RepositoryModelUnloadResponse()


def _no_regions(kind: str, name: str) -> Handler:
    """The response of a status RPC: no regions can be registered, so the list is empty."""
    response = message_class(f"inference.{name}Response")

    async def status(request: ProtoMessage) -> ProtoMessage:
        if request.name:
            raise unknown_region(kind, request.name)
        return response()

    return status


def _unregistered(name: str) -> Handler:
    """The response of an unregister RPC: nothing can be registered, so it always succeeds."""
    response = message_class(f"inference.{name}Response")

    async def unregister(_request: ProtoMessage) -> ProtoMessage:
        return response()

    return unregister


def _not_available(name: str, what: str) -> Handler:
    async def refuse(_request: ProtoMessage) -> ProtoMessage:
        raise unsupported(f"{name}: {what} is not available yet in this server")

    return refuse
