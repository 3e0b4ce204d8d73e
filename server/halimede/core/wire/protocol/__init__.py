"""The protocol's messages, as classes in a descriptor pool of our own.

`descriptors.binpb` is the compiled form of the .proto files beside it:

    cd server/halimede/core/wire/protocol
    python -m grpc_tools.protoc -I. --include_imports --descriptor_set_out=descriptors.binpb *.proto

The pool is private because `tritonclient` puts files and messages of the same names into protobuf's default pool: with
generated modules, one process could not import both. A test compiles the files again and compares.
"""

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from halimede.core.types import InferenceError, internal

# The classes are made at import from descriptors, so no static type knows their fields.
ProtoMessage = Any
ProtoClass = Any

POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(files(__name__).joinpath("descriptors.binpb").read_bytes()).file:
    POOL.AddSerializedFile(_file.SerializeToString())


def message_class(full_name: str) -> ProtoClass:
    """The class of a message of the .proto files here, by its full name; KeyError for an unknown name."""
    return GetMessageClass(POOL.FindMessageTypeByName(full_name))


def parse(message: ProtoClass, raw: bytes | bytearray) -> ProtoMessage:
    """The message in `raw`, or INTERNAL as Triton answers it."""
    try:
        return message.FromString(raw)
    except DecodeError:
        raise not_parsed(message, len(raw)) from None


def not_parsed(message: ProtoClass, size: int) -> InferenceError:
    """The error for bytes that are no such message."""
    name = message.DESCRIPTOR.full_name
    return internal(f"Unable to parse request: its {size} bytes are no valid {name} message")


ModelInferRequest = message_class("inference.ModelInferRequest")
ModelInferResponse = message_class("inference.ModelInferResponse")
ModelStreamInferResponse = message_class("inference.ModelStreamInferResponse")
