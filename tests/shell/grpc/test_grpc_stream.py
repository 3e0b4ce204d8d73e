"""ModelStreamInfer: order, errors, decoupled models, backpressure and early ends."""

import asyncio
import queue

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb

from halimede.frontends.grpc.infer_stream import MAX_UNANSWERED
from halimede.frontends.grpc.limits import GrpcLimits
from halimede.frontends.grpc.options import Transport
from halimede.settings import Settings

INTERNAL_ERROR = "ModelStreamInfer failed by an internal error; the server's log has the cause"


def asking(model: str, request_id: str = "", elements: int = 1, **parameters: int | bool) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=model, id=request_id, raw_input_contents=[b"\0" * 4 * elements])
    message.inputs.add(name="IN", datatype="FP32", shape=[1, elements])
    for key, value in parameters.items():
        kind = "bool_param" if isinstance(value, bool) else "int64_param"
        setattr(message.parameters[key], kind, value)
    return message


class Stream:
    """A stream on which the test sends request by request."""

    def __init__(self, channel: grpc.Channel, **options) -> None:
        self._requests: queue.Queue = queue.Queue()
        rpc = channel.stream_stream(
            "/inference.GRPCInferenceService/ModelStreamInfer",
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=pb.ModelStreamInferResponse.FromString,
        )
        self.call = rpc(iter(self._requests.get, None), timeout=20, **options)

    def send(self, *messages: pb.ModelInferRequest | bytes) -> None:
        for message in messages:
            self._requests.put(message)

    def close(self) -> None:
        self._requests.put(None)

    def next(self) -> pb.ModelStreamInferResponse:
        return next(self.call)

    def rest(self) -> list[pb.ModelStreamInferResponse]:
        self.close()
        return list(self.call)

    def failure(self) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError):
            list(self.call)
        self.close()
        return self.call.code(), self.call.details()


def answer(request_id: str, model: str = "ident", final: bool = True) -> pb.ModelStreamInferResponse:
    inner = pb.ModelInferResponse(model_name=model, model_version="1", id=request_id, raw_output_contents=[b"\0" * 4])
    inner.outputs.add(name="OUT", datatype="FP32", shape=[1, 1])
    inner.parameters["triton_final_response"].bool_param = final
    return pb.ModelStreamInferResponse(infer_response=inner)


def refusal(request_id: str, text: str, model: str = "", final: bool = True) -> pb.ModelStreamInferResponse:
    inner = pb.ModelInferResponse(model_name=model, id=request_id)
    if model:
        inner.parameters["triton_final_response"].bool_param = final
    return pb.ModelStreamInferResponse(error_message=text, infer_response=inner)


def ids(responses: list[pb.ModelStreamInferResponse]) -> list[str]:
    return [response.infer_response.id for response in responses]


def test_answers_come_in_the_order_of_the_requests(served, channel) -> None:
    stream = Stream(channel)
    stream.send(*(asking("held", str(n)) for n in range(5)), asking("ident", "5"))
    served.core.wait_for(lambda core: len(core.held) == 5 and len(core.requests) == 6)
    served.do(lambda: served.core.release(newest_first=True))
    assert stream.rest() == [*(answer(str(n), "held") for n in range(5)), answer("5")]
    assert stream.call.code() is grpc.StatusCode.OK


def test_requests_are_answered_after_the_client_has_half_closed(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("held", "a"))
    stream.close()
    served.core.wait_for(lambda core: len(core.held) == 1)
    served.do(served.core.release)
    assert list(stream.call) == [answer("a", "held")]


def test_errors_are_answers_and_the_stream_continues(channel) -> None:
    stream = Stream(channel)
    wrong = asking("ident", "shape")
    wrong.inputs[0].shape[:] = [-1, 1]
    stream.send(asking("nope", "unknown"), wrong, asking("broken", "ran"), asking("ident", "after"))
    assert stream.rest() == [
        refusal("unknown", "Request for unknown model: 'nope' is not found"),
        refusal(
            "shape",
            "[request id: shape] All input dimensions should be specified for input 'IN' for model 'ident', got [-1,1]",
        ),
        refusal("ran", ("boom " * 5000)[:4092] + "...", "broken"),
        answer("after"),
    ]
    assert stream.call.code() is grpc.StatusCode.OK


def test_an_error_waits_for_the_answers_before_it(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("held", "a"), asking("nope", "b"))
    served.core.wait_for(lambda core: len(core.held) == 1)
    stream.send(asking("held", "c"))
    served.core.wait_for(lambda core: len(core.held) == 2)
    served.do(served.core.release)
    assert ids(stream.rest()) == ["a", "b", "c"]


def test_errors_end_the_stream_for_a_client_that_asks_for_it(served, channel) -> None:
    stream = Stream(channel, metadata=(("triton_grpc_error", "true"),))
    stream.send(asking("ident", "a"))
    assert stream.next() == answer("a")
    stream.send(asking("broken", "b"), asking("held", "c"))
    assert stream.failure() == (grpc.StatusCode.INTERNAL, ("boom " * 5000)[:4092] + "...")
    assert served.core.held == {}


def test_an_answer_that_cannot_be_encoded_is_an_error(channel, caplog) -> None:
    stream = Stream(channel)
    stream.send(asking("odd", "a"), asking("ident", "b"))
    assert stream.rest() == [refusal("a", INTERNAL_ERROR, "odd"), answer("b")]
    assert "UnicodeEncodeError" in caplog.text


def test_a_decoupled_model_answers_any_number_of_times(channel) -> None:
    stream = Stream(channel)
    stream.send(asking("repeat", "a", count=3), asking("repeat", "none", count=0), asking("ident", "b"))
    assert stream.rest() == [*[answer("a", "repeat", final=False)] * 3, answer("b")]


def test_only_clients_that_request_it_get_an_empty_final_answer(channel) -> None:
    stream = Stream(channel)
    stream.send(asking("repeat", "a", count=1, triton_enable_empty_final_response=True))
    last = pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(model_name="repeat", id="a"))
    last.infer_response.parameters["triton_final_response"].bool_param = True
    assert stream.rest() == [answer("a", "repeat", final=False), last]


def test_a_decoupled_model_does_not_wait_for_earlier_requests(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("held", "slow"), asking("repeat", "fast", count=2))
    assert ids([stream.next(), stream.next()]) == ["fast", "fast"]
    served.do(served.core.release)
    assert ids(stream.rest()) == ["slow"]


def test_the_stream_is_not_read_beyond_its_bound_of_unanswered_requests(served, channel) -> None:
    stream = Stream(channel)
    stream.send(*(asking("held", str(n)) for n in range(MAX_UNANSWERED + 44)))
    served.core.wait_for(lambda core: len(core.requests) == MAX_UNANSWERED)
    channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
    assert len(served.core.requests) == MAX_UNANSWERED

    served.do(lambda: served.core.release(40))
    assert ids([stream.next() for _ in range(40)]) == [str(n) for n in range(40)]
    served.core.wait_for(lambda core: len(core.requests) == MAX_UNANSWERED + 40)
    served.do(served.core.release)
    served.core.wait_for(lambda core: len(core.requests) == MAX_UNANSWERED + 44)
    served.do(served.core.release)
    assert ids(stream.rest()) == [str(n) for n in range(40, MAX_UNANSWERED + 44)]


def test_large_requests_are_read_as_their_model_answers(serve) -> None:
    """They are never too many for the connection's bound, although their client sends all at once."""
    served = serve(Transport(max_message_bytes=2 << 20), limits=GrpcLimits(max_connection_held_bytes=8 << 20))
    with grpc.insecure_channel(f"127.0.0.1:{served.port}") as channel:
        stream = Stream(channel)
        stream.send(*(asking("held", str(n), elements=256 << 10) for n in range(20)))
        for n in range(20):
            served.core.wait_for(lambda core: core.held)
            served.do(lambda: served.core.release(1))
            assert ids([stream.next()]) == [str(n)]
        assert ids(stream.rest()) == []


def test_requested_answers_beyond_the_limit_of_unsent_ones_are_all_sent(served, channel) -> None:
    stream = Stream(channel)
    stream.send(*(asking("held", str(n), elements=256 << 10) for n in range(120)))
    served.core.wait_for(lambda core: len(core.held) == 120)
    served.do(served.core.release)
    assert ids([stream.next() for _ in range(120)]) == [str(n) for n in range(120)]
    stream.send(asking("ident", "after"))
    assert ids(stream.rest()) == ["after"]


def test_answers_of_a_model_without_window_are_bounded(channel) -> None:
    stream = Stream(channel)
    stream.send(asking("repeat", "a", elements=256 << 10, count=270))
    assert stream.failure() == (
        grpc.StatusCode.CANCELLED,
        "the client left 256 MiB of responses unread on this stream",
    )


def test_an_error_among_a_decoupled_models_answers_is_not_the_last(channel) -> None:
    stream = Stream(channel)
    stream.send(asking("repeat", "a", count=1, fails=True, triton_enable_empty_final_response=True))
    first, error, last = stream.rest()
    assert (first, error) == (answer("a", "repeat", final=False), refusal("a", "no more", "repeat", final=False))
    assert last.infer_response.parameters["triton_final_response"].bool_param


def test_a_decoupled_model_continues_when_its_client_reads_answers(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("waiting", "a", count=50))
    assert ids(stream.rest()) == ["a"] * 50
    # Once per answer; the empty final answer does not count.
    assert served.core.acknowledged == [1] * 50


def test_a_decoupled_model_waits_for_a_client_that_does_not_read(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("waiting", "a", elements=256 << 10, count=100))
    served.core.wait_for(lambda core: core.acknowledged)
    # Answers of 1 MiB: the connection buffers far less than half of them.
    probe = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
    for _ in range(20):
        probe(b"")
    assert served.do(lambda: served.core.waiting[1].sent) < 50
    assert ids(stream.rest()) == ["a"] * 100


def test_answers_that_wait_for_earlier_ones_are_not_acknowledged(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("held", "first"), asking("turned", "second"))
    served.core.wait_for(lambda core: len(core.requests) == 2)
    assert served.core.acknowledged == []
    served.do(served.core.release)
    assert ids(stream.rest()) == ["first", "second", "second"]
    served.core.wait_for(lambda core: core.acknowledged == [2])


def test_a_stream_of_a_model_that_never_ends_stays_open_for_the_client(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("endless", "a"))
    assert stream.next() == answer("a", "endless", final=False)
    stream.close()
    stream.call.cancel()
    served.core.wait_for(lambda core: core.cancelled == [1])


def test_parameters_of_an_answer_are_sent(channel) -> None:
    stream = Stream(channel)
    stream.send(asking("parameters", "a"))
    (answer,) = stream.rest()
    parameters = answer.infer_response.parameters
    assert {key: parameters[key].WhichOneof("parameter_choice") for key in parameters} == {
        "flag": "bool_param",
        "count": "int64_param",
        "share": "double_param",
        "text": "string_param",
        "triton_final_response": "bool_param",
    }


def test_an_invalid_message_ends_the_stream_and_cancels_the_rest(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("held", "a"))
    served.core.wait_for(lambda core: len(core.held) == 1)
    stream.send(b"\xff" * 40)
    assert stream.failure() == (
        grpc.StatusCode.INTERNAL,
        "Unable to parse request: its 40 bytes are no valid inference.ModelInferRequest message",
    )
    assert served.core.cancelled == [1]


def test_a_client_that_disconnects_cancels_all_its_requests(served, channel) -> None:
    stream = Stream(channel)
    stream.send(asking("ident"), asking("held"), asking("held"))
    served.core.wait_for(lambda core: len(core.held) == 2)
    stream.call.cancel()
    served.core.wait_for(lambda core: len(core.cancelled) == 2)
    stream.close()
    assert sorted(served.core.cancelled) == [2, 3]


def test_tritonclients_streams(served, client) -> None:
    answers: queue.Queue = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error or result.get_response().id))
    tensor = triton.InferInput("IN", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
    for n in range(20):
        client.async_stream_infer("ident", [tensor], request_id=str(n))
    assert [answers.get(timeout=20) for _ in range(20)] == [str(n) for n in range(20)]
    client.async_stream_infer("nope", [tensor])
    assert answers.get(timeout=20).message() == "Request for unknown model: 'nope' is not found"
    client.async_stream_infer("held", [tensor])
    served.core.wait_for(lambda core: len(core.held) == 1)
    client.stop_stream(cancel_requests=True)
    served.core.wait_for(lambda core: core.cancelled == [21])


def test_tritonclients_asyncio_stream(served) -> None:
    async def requests():
        tensor = triton_aio.InferInput("IN", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
        for n in range(5):
            yield {"model_name": "ident", "inputs": [tensor], "request_id": str(n)}

    async def ask() -> list[str]:
        async with triton_aio.InferenceServerClient(served.url) as client:
            return [result.get_response().id async for result, _ in client.stream_infer(requests())]

    assert asyncio.run(ask()) == [str(n) for n in range(5)]


def test_the_response_pool_has_the_size_of_the_flag_and_its_default(serve) -> None:
    default = Settings().grpc_max_response_pool_size
    for served, size in ((serve(), default), (serve(max_response_pool_size=default + 50), default + 50)):
        with grpc.insecure_channel(served.url) as channel:
            stream = Stream(channel)
            stream.send(*(asking("held") for _ in range(size + 10)))
            served.core.wait_for(lambda core, size=size: len(core.requests) == size)
            channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
            assert len(served.core.requests) == size
            stream.call.cancel()
            stream.close()


def test_a_smaller_response_pool_reads_fewer_requests_ahead(serve) -> None:
    served = serve(max_response_pool_size=3)
    with grpc.insecure_channel(served.url) as channel:
        stream = Stream(channel)
        stream.send(*(asking("held", str(n)) for n in range(10)))
        served.core.wait_for(lambda core: len(core.requests) == 3)
        channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
        assert len(served.core.requests) == 3
        for _ in range(10):
            served.core.wait_for(lambda core: core.held)
            served.do(lambda: served.core.release(1))
        assert ids(stream.rest()) == [str(n) for n in range(10)]
