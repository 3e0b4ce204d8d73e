"""Invalid input over gRPC, with tritonclient's messages and channel."""

import struct
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.h2client import INFER, STREAM_INFER
from support.models import add_identity
from support.server import RunningServer, start_server

DETAILS_LIMIT = 4096


@pytest.fixture
def stub(server: RunningServer):
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def request(model: str = "ident", **changes) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="IN", datatype="FP32", shape=[1, 16])
    for key, value in changes.items():
        if key == "shape":
            tensor.shape[:] = value
        elif key == "raw":
            message.raw_input_contents.extend(value)
        elif key == "fp32":
            tensor.contents.fp32_contents.extend(value)
        elif key == "ints":
            tensor.contents.int_contents.extend(value)
        elif key == "version":
            message.model_version = value
        else:
            setattr(tensor, key, value)
    return message


def refused(stub, message: pb.ModelInferRequest) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=20)
    details = caught.value.details()
    assert len(details) <= DETAILS_LIMIT
    return caught.value.code(), details


INVALID = grpc.StatusCode.INVALID_ARGUMENT


def test_an_unknown_model_or_version(stub) -> None:
    assert refused(stub, request("nope", fp32=[0] * 16)) == (
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'nope' is not found",
    )
    assert refused(stub, request(version="9", fp32=[0] * 16)) == (
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'ident' version 9 is not found",
    )
    assert refused(stub, request(version="abc", fp32=[0] * 16)) == (
        INVALID,
        "failed to get model version from specified version string 'abc' (details: stol), "
        "version should be an integral value > 0",
    )
    # -1 means the latest version only in the steps of an ensemble.
    assert refused(stub, request(version="-1", fp32=[0] * 16)) == (
        INVALID,
        "invalid model version specified '-1' , version should be an integral value > 0",
    )


def test_a_name_with_a_nul_is_not_cut(stub) -> None:
    code, _ = refused(stub, request("ident\0x", fp32=[0] * 16))
    assert code in {grpc.StatusCode.NOT_FOUND, INVALID}


def test_invalid_messages_and_unknown_methods(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc_url) as channel:
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for raw in (b"\xff" * 40, b"\x0b" * 50_000, b"\x2a\xff\xff\xff\xff\x0f"):
            with pytest.raises(grpc.RpcError) as caught:
                infer(raw, timeout=20)
            assert caught.value.code() in {grpc.StatusCode.INTERNAL, INVALID}
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"", timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_negative_dimensions(stub) -> None:
    code, details = refused(stub, request(shape=[-1, 16], fp32=[0] * 16))
    assert code is INVALID
    assert details.endswith("All input dimensions should be specified for input 'IN' for model 'ident', got [-1,16]")
    assert refused(stub, request(shape=[-(2**63), 16], fp32=[0] * 16))[0] is INVALID


@pytest.mark.parametrize("shape", [[2**32, 2**32], [2**62, 4], [2**63 - 1, 16], [2**40]])
def test_shapes_that_overflow_or_announce_much_data(stub, shape: list[int]) -> None:
    for model in ("ident", "unbatched"):
        assert refused(stub, request(model, shape=shape, raw=[b"\0" * 4]))[0] is INVALID


def test_conflicting_or_missing_data_of_an_input(stub) -> None:
    zeros = b"\0" * 64
    assert refused(stub, request(fp32=[0] * 16, raw=[zeros])) == (
        INVALID,
        "contents field must not be specified when using raw_input_contents for 'IN' for model 'ident'",
    )
    assert refused(stub, request()) == (
        INVALID,
        "unable to find data for input tensor 'IN' for model 'ident' in request.",
    )
    code, details = refused(stub, request(ints=[0] * 16))
    assert code is INVALID
    assert "unexpected explicit tensor data for input tensor 'IN' for model 'ident'" in details
    assert refused(stub, request(raw=[zeros, zeros]))[0] is INVALID
    assert refused(stub, request(fp32=[0] * 15))[0] is INVALID


def test_long_client_data_do_not_hide_the_error(stub) -> None:
    code, _ = refused(stub, request(shape=[1] * 100_000, raw=[b"\0" * 64]))
    assert code is INVALID
    code, _ = refused(stub, request(name="x" * 1_000_000, raw=[b"\0" * 64]))
    assert code is INVALID
    code, _ = refused(stub, request("m" * 1_000_000, raw=[b"\0" * 64]))
    assert code is grpc.StatusCode.NOT_FOUND


def test_parameters(stub) -> None:
    message = request(fp32=[0] * 16)
    message.parameters["priority"].int64_param = -1
    assert refused(stub, message)[0] is INVALID
    message = request(fp32=[0] * 16)
    message.parameters["triton_x"].bool_param = True
    assert refused(stub, message)[0] is INVALID
    message = request(fp32=[0] * 16)
    message.parameters["sequence_id"].double_param = 1
    assert refused(stub, message) == (
        INVALID,
        "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
    )


def test_a_message_larger_than_grpcs_own_default_is_accepted(server: RunningServer) -> None:
    with grpc.insecure_channel(server.grpc_url, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answer = stub.ModelInfer(request("unbatched", shape=[4 << 20], raw=[b"\0" * (16 << 20)]), timeout=20)
    assert len(answer.raw_output_contents[0]) == 16 << 20


def test_unsupported_features_are_errors(stub) -> None:
    for call in (
        lambda: stub.SystemSharedMemoryRegister(pb.SystemSharedMemoryRegisterRequest()),
        lambda: stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest()),
        lambda: stub.TraceSetting(pb.TraceSettingRequest()),
        lambda: stub.LogSettings(pb.LogSettingsRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call()
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details()


def test_a_message_over_the_limit(tmp_path: Path) -> None:
    add_identity(tmp_path / "models", "ident")
    server = start_server(tmp_path, ["--model-repository", tmp_path / "models", "--grpc-max-input-size=10000"])
    try:
        with grpc.insecure_channel(server.grpc_url) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            code, _ = refused(stub, request(raw=[b"\0" * 20_000]))
            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert stub.ModelInfer(request(raw=[b"\0" * 64])).raw_output_contents == [b"\0" * 64]
    finally:
        assert server.stop() == 0


ZEROS = b"\0" * 64
Input = tuple[str, str, list[int], bytes]
GOOD: Input = ("IN", "FP32", [1, 16], ZEROS)


def two(*names: str) -> list[Input]:
    return [(name, "FP32", [1, 16], ZEROS) for name in names]


def text(payload: bytes, count: int) -> list[Input]:
    return [("IN", "BYTES", [1, count], payload)]


@pytest.mark.parametrize("is_streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize(
    ("model", "inputs", "outputs", "part"),
    [
        (
            "two",
            two("IN0"),
            [],
            "expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['IN0'], but missing",
        ),
        ("two", two("IN0", "ZZ"), [], "unexpected inference input 'ZZ' for model 'two'"),
        ("two", two("IN0", "IN0"), [], "input 'IN0' already exists in request"),
        ("two", two("IN0", "IN1"), ["ZZ"], "unexpected inference output 'ZZ' for model 'two'"),
        ("two", two("IN0", "IN1"), ["OUT0", "OUT0"], "output 'OUT0' already exists in request"),
        ("ident", [], [], "expected 1 inputs but got 0 inputs for model 'ident'"),
        ("ident", two("IN\0"), [], "unexpected inference input 'IN\0' for model 'ident'"),
        (
            "ident",
            [("IN", "INT32", [1, 16], ZEROS)],
            [],
            "inference input 'IN' data-type is 'INT32', but model 'ident' expects 'FP32'",
        ),
        ("ident", [("IN", "FLOAT", [1, 16], ZEROS)], [], "invalid datatype for input IN: 'FLOAT' is none of BOOL, "),
        ("ident", [("IN", "", [1, 16], ZEROS)], [], "invalid datatype for input IN: '' is none of BOOL, "),
        (
            "ident",
            [("IN", "FP32", [1, 15], b"\0" * 60)],
            [],
            "unexpected shape for input 'IN' for model 'ident'. Expected [-1,16], got [1,15].",
        ),
        ("ident", [("IN", "FP32", [16], ZEROS)], [], "Expected [-1,16], got [16]."),
        (
            "ident",
            [("IN", "FP32", [], b"\0" * 4)],
            [],
            "input 'IN' has no shape but model requires batch dimension for 'ident'",
        ),
        (
            "ident",
            [("IN", "FP32", [33, 16], b"\0" * 33 * 64)],
            [],
            "inference request batch-size must be <= 32 for 'ident'",
        ),
        ("ident", [("IN", "FP32", [1, 16], b"\0" * 63)], [], "'IN'"),
        ("ident", [("IN", "FP32", [1, 16], b"\0" * 68)], [], "'IN'"),
        ("ident", [("IN", "FP32", [1, 16], b"")], [], "'IN'"),
        (
            "text",
            text(struct.pack("<I", 100) + b"abcd", 1),
            [],
            "incomplete string data for inference input 'IN', expecting string of length 100 but only 4 bytes",
        ),
        (
            "text",
            text(struct.pack("<I", 0xFFFFFFFF) + b"abcd", 1),
            [],
            "incomplete string data for inference input 'IN', expecting string of length 4294967295",
        ),
        ("text", text(b"\1\0", 1), [], "incomplete string length indicator for inference input 'IN' for model 'text'"),
        ("text", text(struct.pack("<I", 1) + b"a", 2), [], "expected 2 string elements for inference input 'IN'"),
        (
            "text",
            text((struct.pack("<I", 1) + b"a") * 2, 1),
            [],
            "unexpected number of string elements 2 for inference input 'IN'",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    server: RunningServer, is_streamed: bool, model: str, inputs: list[Input], outputs: list[str], part: str
) -> None:
    message = pb.ModelInferRequest(model_name=model, id="id")
    for name, datatype, shape, raw in inputs:
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    for name in outputs:
        message.outputs.add(name=name)
    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        if not is_streamed:
            code, details = refused(stub, message)
            assert code is INVALID
            assert part in details
            return
        answers = list(stub.ModelStreamInfer(iter([message, request(raw=[ZEROS])]), timeout=20))
    assert part in answers[0].error_message
    assert answers[0].infer_response.id == "id"
    assert answers[1].infer_response.raw_output_contents == [ZEROS]


def test_strings_with_nuls_and_zero_dimensions_are_accepted(stub) -> None:
    payload = struct.pack("<I", 3) + b"a\0b" + struct.pack("<I", 0)
    message = pb.ModelInferRequest(model_name="text", raw_input_contents=[payload])
    message.inputs.add(name="IN", datatype="BYTES", shape=[1, 2])
    assert stub.ModelInfer(message, timeout=20).raw_output_contents == [payload]
    answer = stub.ModelInfer(request("unbatched", shape=[0], raw=[b""]), timeout=20)
    assert (list(answer.outputs[0].shape), list(answer.raw_output_contents)) == ([0], [b""])


@pytest.mark.parametrize(
    ("model", "field", "values"),
    [
        ("ident_uint8", "uint_contents", [300]),
        ("ident_int8", "int_contents", [128]),
        ("ident_int16", "int_contents", [-32769]),
        ("ident_uint16", "uint_contents", [65536]),
        ("ident_fp16", "fp32_contents", [1.0]),
        ("ident_bf16", "fp32_contents", [1.0]),
        ("ident_bool", "int_contents", [1]),
        ("ident_bytes", "int_contents", [1]),
    ],
)
def test_typed_contents_of_a_wrong_range_or_field_are_refused(
    stub, model: str, field: str, values: list[float]
) -> None:
    message = pb.ModelInferRequest(model_name=model)
    tensor = message.inputs.add(name="IN", datatype=model.removeprefix("ident_").upper(), shape=[1, 1])
    getattr(tensor.contents, field).extend(values)
    assert refused(stub, message)[0] is INVALID


def test_messages_that_cannot_be_parsed_end_unary_calls_and_streams(server: RunningServer) -> None:
    groups = b"\x0b" * 50_000 + b"\x0c" * 50_000
    not_utf8 = b"\x0a\x02\xff\xfe"
    endless_varint = b"\x08" + b"\xff" * 11
    with grpc.insecure_channel(server.grpc_url) as channel:
        for raw in (groups, not_utf8, endless_varint, b"\xff" * 40):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(INFER)(raw, timeout=20)
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            assert caught.value.details().startswith("Unable to parse request")
            with pytest.raises(grpc.RpcError) as caught:
                list(channel.stream_stream(STREAM_INFER)(iter([raw]), timeout=20))
            assert caught.value.code() is grpc.StatusCode.INTERNAL
