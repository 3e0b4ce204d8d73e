"""The compiled messages: they match the .proto files, and coexist with tritonclient's messages of the same names."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc

import halimede.core.wire.protocol as protocol
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.protocol import POOL, ModelInferRequest, message_class, parse
from support.refusals import error_of

DIRECTORY = Path(protocol.__file__).parent


def test_the_compiled_descriptors_are_those_of_the_proto_files(tmp_path: Path) -> None:
    compiled = tmp_path / "descriptors.binpb"
    sources = sorted(path.name for path in DIRECTORY.glob("*.proto"))
    arguments = ["protoc", f"-I{DIRECTORY}", "--include_imports", f"--descriptor_set_out={compiled}", *sources]
    assert protoc.main(arguments) == 0
    shipped = FileDescriptorSet.FromString((DIRECTORY / "descriptors.binpb").read_bytes())
    expected = FileDescriptorSet.FromString(compiled.read_bytes())
    assert {file.name: file for file in shipped.file} == {file.name: file for file in expected.file}


@pytest.mark.parametrize("first", ["halimede.core.wire.grpc_request", "tritonclient.grpc"])
def test_tritonclient_can_be_imported_before_and_after(first: str) -> None:
    second = {"halimede.core.wire.grpc_request", "tritonclient.grpc"} - {first}
    program = f"""
import {first}, {second.pop()}
from halimede.core.wire.protocol import ModelInferRequest
from tritonclient.grpc import service_pb2
clients = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
own = ModelInferRequest(model_name="m", raw_input_contents=[b"x"])
assert type(own) is not type(clients)
assert own.SerializeToString() == clients.SerializeToString()
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_tritonclients_messages_have_the_same_fields_and_numbers() -> None:
    from tritonclient.grpc import model_config_pb2, service_pb2

    compared = 0
    for module in (model_config_pb2, service_pb2):
        for name, clients in module.DESCRIPTOR.message_types_by_name.items():
            own = POOL.FindMessageTypeByName(f"inference.{name}")
            shape = _shape(own)
            if name == "ModelEnsembling":
                assert shape["Step"][""].pop("when")[0] == 1000
            assert _shape(clients) == shape, name
            compared += 1
    assert compared > 60


def _shape(message) -> dict:
    fields = {}
    for field in message.fields:
        enum = {value.name: value.number for value in field.enum_type.values} if field.enum_type else None
        of = field.message_type.full_name if field.message_type else enum
        oneof = field.containing_oneof.name if field.containing_oneof else None
        fields[field.name] = (field.number, field.type, field.label, of, oneof)
    return {"": fields} | {nested.name: _shape(nested) for nested in message.nested_types}


@pytest.mark.parametrize("raw", [b"\xff" * 40, b"\x0b" * 50_000, b"\x2a\xff\xff\xff\xff\x0f", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_not_a_message_are_refused(raw: bytes) -> None:
    assert error_of(parse, ModelInferRequest, raw) == InferenceError(
        ErrorCode.INTERNAL,
        f"Unable to parse request: its {len(raw)} bytes are no valid inference.ModelInferRequest message",
    )


def test_a_message_that_does_not_exist_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        message_class("inference.Nope")
