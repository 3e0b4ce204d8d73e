"""Invalid input over gRPC to real models, by a unary call and on a stream: one error of each part that checks.

The tables of all errors belong to the parts: see the tests of ModelInfer messages and of `RequestChecker`.
"""

import struct
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from support.h2client import INFER, STREAM_INFER
from support.server import RunningServer

DETAILS_LIMIT = 4096
ZEROS = bytes(64)
INVALID = grpc.StatusCode.INVALID_ARGUMENT
Stub = service_pb2_grpc.GRPCInferenceServiceStub


@pytest.fixture
def stub(server: RunningServer) -> Iterator[Stub]:
    with grpc.insecure_channel(server.grpc_url, options=[("grpc.max_receive_message_length", -1)]) as channel:
        yield Stub(channel)


def request(
    model: str = "ident",
    raw: tuple[bytes, ...] = (ZEROS,),
    *,
    version: str = "",
    outputs: tuple[str, ...] = (),
    **changes: object,
) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, model_version=version, id="id", raw_input_contents=raw)
    message.inputs.add(**{"name": "IN", "datatype": "FP32", "shape": [1, 16], **changes})
    for name in outputs:
        message.outputs.add(name=name)
    return message


@pytest.mark.parametrize(
    ("message", "code", "part"),
    [
        (request("nope"), grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'nope' is not found"),
        (request("m" * 1_000_000), grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'mmm"),
        (
            request(version="9"),
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'ident' version 9 is not found",
        ),
        # -1 means the latest version only in the steps of an ensemble.
        (
            request(version="-1"),
            INVALID,
            "invalid model version specified '-1' , version should be an integral value > 0",
        ),
        (request(raw=()), INVALID, "unable to find data for input tensor 'IN' for model 'ident' in request."),
        (
            request(raw=(), contents={"int_contents": [0] * 16}),
            INVALID,
            "unexpected explicit tensor data for input tensor 'IN' for model 'ident'",
        ),
        (request(raw=(), contents={"fp32_contents": [0] * 15}), INVALID, "'IN'"),
        (
            request("two", name="IN0"),
            INVALID,
            "expected 2 inputs but got 1 inputs for model 'two'. Got input(s) ['IN0'], but missing",
        ),
        (request(name="IN\0"), INVALID, "unexpected inference input 'IN\0' for model 'ident'"),
        (request(outputs=("ZZ",)), INVALID, "unexpected inference output 'ZZ' for model 'ident'"),
        (
            request(datatype="INT32"),
            INVALID,
            "inference input 'IN' data-type is 'INT32', but model 'ident' expects 'FP32'",
        ),
        (request(shape=[16]), INVALID, "Expected [-1,16], got [16]."),
        (request(shape=[1] * 100_000), INVALID, "unexpected shape for input 'IN' for model 'ident'. Expected [-1,16]"),
        (
            request(shape=[-1, 16]),
            INVALID,
            "All input dimensions should be specified for input 'IN' for model 'ident', got [-1,16]",
        ),
        (request("unbatched", shape=[2**62, 4]), INVALID, "'IN'"),
        (
            request("text", (struct.pack("<I", 100) + b"abcd",), datatype="BYTES", shape=[1, 1]),
            INVALID,
            "incomplete string data for inference input 'IN', expecting string of length 100 but only 4 bytes",
        ),
    ],
)
def test_an_invalid_request(stub: Stub, message: pb.ModelInferRequest, code: grpc.StatusCode, part: str) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.ModelInfer(message, timeout=20)
    assert (caught.value.code(), part in caught.value.details()) == (code, True), caught.value.details()
    assert len(caught.value.details()) <= DETAILS_LIMIT

    refused, answered = stub.ModelStreamInfer(iter([message, request()]), timeout=20)
    assert part in refused.error_message
    assert refused.infer_response.id == "id"
    assert answered.infer_response.raw_output_contents == [ZEROS]


def test_unusual_requests_are_accepted(stub: Stub) -> None:
    """Strings with nul bytes, a dimension of zero, and more bytes than gRPC's own default."""
    texts = struct.pack("<I", 3) + b"a\0b" + struct.pack("<I", 0)
    for message in (
        request("text", (texts,), datatype="BYTES", shape=[1, 2]),
        request("unbatched", (b"",), shape=[0]),
        request("unbatched", (bytes(16 << 20),), shape=[4 << 20]),
    ):
        answer = stub.ModelInfer(message, timeout=20)
        assert answer.outputs[0].shape == message.inputs[0].shape
        assert answer.raw_output_contents == message.raw_input_contents


def test_messages_that_cannot_be_parsed_end_unary_calls_and_streams(server: RunningServer) -> None:
    groups = b"\x0b" * 50_000 + b"\x0c" * 50_000
    not_utf8 = b"\x0a\x02\xff\xfe"
    endless_varint = b"\x08" + b"\xff" * 11
    with grpc.insecure_channel(server.grpc_url) as channel:
        for raw in (groups, not_utf8, endless_varint, b"\xff" * 40):
            for call in (
                lambda raw=raw: channel.unary_unary(INFER)(raw, timeout=20),
                lambda raw=raw: list(channel.stream_stream(STREAM_INFER)(iter([raw]), timeout=20)),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    call()
                assert caught.value.code() is grpc.StatusCode.INTERNAL
                assert caught.value.details().startswith("Unable to parse request")
