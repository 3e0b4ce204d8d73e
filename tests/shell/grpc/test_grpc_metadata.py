"""Metadata that become parameters, and metadata that give access to restricted protocols."""

import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.grpc import service_pb2 as pb

from halimede.core.types import ApiCategory, Secret
from halimede.core.wire.forwarding import compile_pattern
from support.h2client import INFER, STREAM_INFER, H2Client, grpc_message

RESERVED = "Header 'priority' is reserved for Triton usage and cannot be forwarded."


def request(**parameters: str) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="ident", raw_input_contents=[b"\0" * 4])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, 1])
    for name, value in parameters.items():
        message.parameters[name].string_param = value
    return message


def ask(served, metadata: list[tuple[str, str | bytes]], **parameters: str) -> dict:
    """The parameters of the request as it reached the server."""
    with grpc.insecure_channel(served.url) as channel:
        channel.unary_unary(INFER)(request(**parameters).SerializeToString(), metadata=metadata, timeout=20)
    return served.core.requests[-1].parameters


def test_metadata_become_parameters_if_their_whole_name_matches(serve) -> None:
    served = serve(forward=compile_pattern("X-.*|user-agent"))
    assert ask(served, [("x-one", "1"), ("x-two", "zwei"), ("ax-three", "3"), ("other", "4")]).keys() == {
        "x-one",
        "x-two",
        "user-agent",
    }


def test_parameters_of_the_message_override_metadata(serve) -> None:
    served = serve(forward=compile_pattern("x.*"))
    assert ask(served, [("x", "from metadata"), ("xy", "new")], x="from message") == {"x": "from message", "xy": "new"}


def test_binary_metadata_are_not_forwarded(serve) -> None:
    served = serve(forward=compile_pattern("x-.*"))
    assert ask(served, [("x-raw-bin", b"\0\xff"), ("x-text", "t")]) == {"x-text": "t"}


def test_space_around_a_value_is_kept(serve) -> None:
    served = serve(forward=compile_pattern("x-.*"))
    with H2Client(("127.0.0.1", served.port)) as client:
        call = client.call(INFER, grpc_message(request().SerializeToString()), [("x-a", " b c\t"), ("x-none", " ")])
        assert client.finish(call)["grpc-status"] == "0"
    assert served.core.requests[-1].parameters == {"x-a": " b c\t", "x-none": " "}


def test_nothing_is_forwarded_without_a_pattern(served) -> None:
    assert ask(served, [("x", "1")]) == {}


def test_reserved_names_are_refused(serve) -> None:
    served = serve(forward=compile_pattern(".*"))
    with grpc.insecure_channel(served.url) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(INFER)(request().SerializeToString(), metadata=[("priority", "1")], timeout=20)
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, RESERVED)
        with pytest.raises(grpc.RpcError) as caught:
            list(channel.stream_stream(STREAM_INFER)(iter([b""]), metadata=[("priority", "1")], timeout=20))
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, RESERVED)
    assert served.core.requests == []


def test_a_streams_metadata_apply_to_each_of_its_requests(serve) -> None:
    served = serve(forward=compile_pattern("x-tenant"))
    answers: queue.Queue = queue.Queue()
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
    with triton.InferenceServerClient(served.url) as client:
        client.start_stream(lambda result, error: answers.put(error or result), headers={"x-tenant": "a"})
        for number in range(3):
            client.async_stream_infer("ident", [tensor], parameters={"number": number})
        for _ in range(3):
            assert not isinstance(answers.get(timeout=20), Exception)
    assert [each.parameters for each in served.core.requests] == [{"x-tenant": "a", "number": n} for n in range(3)]


def test_a_restricted_call_is_refused_before_any_of_it_is_read(serve) -> None:
    secret = Secret("triton-grpc-protocol-key", "value")
    served = serve(restricted={ApiCategory.INFERENCE: secret})
    with H2Client(("127.0.0.1", served.port)) as client:
        for path in (INFER, STREAM_INFER):
            for metadata in ([], [(secret.header, "valu")], [("key", "value")]):
                fields = client.finish(client.call(path, None, metadata))
                assert fields["grpc-status"] == str(grpc.StatusCode.UNAVAILABLE.value[0])
                assert fields["grpc-message"] == (
                    "This protocol is restricted, expecting header 'triton-grpc-protocol-key'"
                )
    assert ask(served, [(secret.header, "value")]) == {}


def test_metadata_with_secrets_are_not_forwarded_by_a_wildcard(serve) -> None:
    secret = Secret("triton-grpc-protocol-key", "value")
    metadata = [(secret.header, "value"), ("authorization", "Bearer token"), ("x-a", "1")]
    restricted = {ApiCategory.INFERENCE: secret}
    served = serve(restricted=restricted, forward=compile_pattern(".*"))
    found = ask(served, metadata)
    assert (found["x-a"], "authorization" in found, secret.header in found) == ("1", False, False)
    served = serve(restricted=restricted, forward=compile_pattern(f"authorization|{secret.header}"))
    assert ask(served, metadata) == {"authorization": "Bearer token", secret.header: "value"}
