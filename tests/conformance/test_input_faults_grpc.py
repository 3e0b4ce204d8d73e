"""Bad input over gRPC, against the running server, through tritonclient's own messages and channel."""

from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

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


def test_a_name_with_a_nul_is_not_cut(stub) -> None:
    code, _ = refused(stub, request("ident\0x", fp32=[0] * 16))
    assert code in {grpc.StatusCode.NOT_FOUND, INVALID}


def test_bytes_that_are_no_message_and_an_rpc_that_is_none(server: RunningServer) -> None:
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
def test_shapes_that_overflow_or_promise_much(stub, shape: list[int]) -> None:
    for model in ("ident", "unbatched"):
        assert refused(stub, request(model, shape=shape, raw=[b"\0" * 4]))[0] is INVALID


def test_where_the_data_are(stub) -> None:
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


def test_features_that_are_not_there_say_so(stub) -> None:
    for call in (
        lambda: stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest()),
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
