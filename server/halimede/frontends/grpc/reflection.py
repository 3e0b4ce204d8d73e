"""Server reflection: the server's services and their descriptors, for tools such as grpcurl."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from halimede.core.types import ErrorCode
from halimede.core.types.error import clip
from halimede.core.wire.grpc_messages import Message
from halimede.core.wire.protocol import POOL, ProtoMessage, message_class
from halimede.core.wire.status_map import GRPC_STATUS
from halimede.frontends.grpc.call import Call, shutting_down
from halimede.frontends.grpc.opening import parse_small

# The messages of v1alpha are the same on the wire.
_Request = message_class("grpc.reflection.v1.ServerReflectionRequest")
_Response = message_class("grpc.reflection.v1.ServerReflectionResponse")

_NOT_FOUND = GRPC_STATUS[ErrorCode.NOT_FOUND]
_INVALID_ARGUMENT = GRPC_STATUS[ErrorCode.INVALID_ARG]


class Reflection:
    """ServerReflectionInfo for the services with the given names."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = tuple(services)

    def begin(self, call: Call) -> None:
        """Send one response for each request of the stream, until the client closes its side."""
        call.on_message = partial(self._take, call)
        call.on_half_closed = call.finish
        call.on_room = call.resume
        call.on_drain = partial(call.fail, shutting_down())

    def _take(self, call: Call, message: Message) -> None:
        answer = self.answer(parse_small(call, _Request, message)).SerializeToString()
        call.send((answer,), len(answer))
        if not call.has_room:
            call.pause()

    def answer(self, request: ProtoMessage) -> ProtoMessage:
        """The response to one request; errors such as "not found" are part of the response."""
        response = _Response(valid_host=request.host, original_request=request)
        try:
            match request.WhichOneof("message_request"):
                case "list_services":
                    for name in self._services:
                        response.list_services_response.service.add(name=name)
                case "file_by_filename":
                    _add_file(response, POOL.FindFileByName(request.file_by_filename))
                case "file_containing_symbol":
                    _add_file(response, _file_of(request.file_containing_symbol))
                case "file_containing_extension":
                    raise KeyError(request.file_containing_extension.containing_type)
                case "all_extension_numbers_of_type":
                    POOL.FindMessageTypeByName(request.all_extension_numbers_of_type)
                    response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
                case _:
                    response.error_response.error_code = _INVALID_ARGUMENT
                    response.error_response.error_message = "the reflection request asks for nothing that is known here"
        except KeyError as missing:
            response.error_response.error_code = _NOT_FOUND
            response.error_response.error_message = f"not found: {clip(str(missing.args[0]))}"
        return response


def _file_of(symbol: str) -> Any:  # a FileDescriptor, of protobuf's own types
    try:
        return POOL.FindFileContainingSymbol(symbol)
    except KeyError:
        # The pool finds types and services by that call, but not methods.
        return POOL.FindMethodByName(symbol).containing_service.file


def _add_file(response: ProtoMessage, file: Any) -> None:  # a FileDescriptor: its stub has no `dependencies`
    """Add the file, then those that it imports. Clients such as ghz take the first one as the answer."""
    response.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)
    for dependency in file.dependencies:
        _add_file(response, dependency)
