"""The unary RPCs of the inference service, called by tritonclient and with raw messages."""

import asyncio
import queue
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from halimede.core.types import DataType, InferenceRequest, Tensor
from halimede.core.wire.protocol import POOL
from halimede.frontends.grpc.options import Transport

X = np.arange(16, dtype=np.float32).reshape(2, 8)


def tensor(array: np.ndarray = X, name: str = "IN") -> triton.InferInput:
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def ignore(*_: object) -> None:
    """Callback that ignores the answer of an asynchronous call."""


def refused(call: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as caught:
        call()
    return caught.value.status(), caught.value.message()


def status(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    return caught.value.code(), caught.value.details()


def test_an_inference(served, client) -> None:
    result = client.infer("ident", [tensor()], request_id="seven", model_version="1", parameters={"mine": 3})
    assert result.as_numpy("OUT").tolist() == X.tolist()
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == ("ident", "1", "seven")
    assert served.core.requests == [
        InferenceRequest(
            "ident",
            "1",
            "seven",
            [Tensor("IN", DataType.FP32, (2, 8), X.tobytes())],
            parameters={"mine": 3},
        )
    ]


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "O"])
def test_every_numpy_datatype_makes_the_round_trip(client, dtype: str) -> None:
    array = np.array([[b"a\0b", b""]], dtype=object) if dtype == "O" else np.array([[0, 1]], dtype=dtype)
    assert client.infer("ident", [tensor(array)]).as_numpy("OUT").tolist() == array.tolist()


def test_sixteen_megabytes_make_the_round_trip(client) -> None:
    array = np.arange(4 << 20, dtype=np.float32).reshape(1, -1)
    assert np.array_equal(client.infer("ident", [tensor(array)]).as_numpy("OUT"), array)


def test_asynchronous_inferences(client) -> None:
    answers: queue.Queue = queue.Queue()
    for n in range(20):
        done = partial(lambda n, result, error: answers.put((n, error or result.as_numpy("OUT").tolist())), n)
        client.async_infer("ident", [tensor(X + n)], done)
    got = sorted(answers.get(timeout=20) for _ in range(20))
    assert got == [(n, (X + n).tolist()) for n in range(20)]


def test_the_asyncio_client(served) -> None:
    async def ask() -> list[float]:
        async with triton_aio.InferenceServerClient(served.url) as client:
            results = await asyncio.gather(*(client.infer("ident", [tensor(X + n)]) for n in range(8)))
            return [float(result.as_numpy("OUT")[0, 0]) for result in results]

    assert asyncio.run(ask()) == list(range(8))


def test_classification(client) -> None:
    wanted = triton.InferRequestedOutput("OUT", class_count=2)
    scores = np.array([[0.5, 2, 1], [9, 8, 7]], np.float32)
    result = client.infer("ident", [tensor(scores)], outputs=[wanted])
    assert result.as_numpy("OUT").tolist() == [
        [b"2.000000:1:dog", b"1.000000:2:cow"],
        [b"9.000000:0:cat", b"8.000000:1:dog"],
    ]
    assert client.infer("flat", [tensor(scores[0])], outputs=[wanted]).as_numpy("OUT").tolist() == [
        b"2.000000:1",
        b"1.000000:2",
    ]
    code, text = refused(lambda: client.infer("ident", [tensor(scores.astype(np.float16))], outputs=[wanted]))
    assert code == "StatusCode.INVALID_ARGUMENT"
    assert text.startswith("class result not available for output due to unsupported type 'FP16'")


def test_invalid_requests_are_refused_with_their_status(client) -> None:
    assert refused(lambda: client.infer("nope", [tensor()])) == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'nope' is not found",
    )
    assert refused(lambda: client.infer("ident", [tensor()], model_version="abc")) == (
        "StatusCode.INVALID_ARGUMENT",
        "failed to get model version from specified version string 'abc' (details: stol), version should be an integral"
        " value > 0",
    )
    assert refused(lambda: client.infer("repeat", [tensor()])) == (
        "StatusCode.UNIMPLEMENTED",
        "ModelInfer RPC doesn't support models with decoupled transaction policy",
    )
    # Not decoupled when its configuration was read; decoupled since.
    assert refused(lambda: client.infer("turned", [tensor()])) == (
        "StatusCode.INTERNAL",
        "expected a single response, got more",
    )
    assert refused(lambda: client.infer("ident", [tensor()], priority=2**63, timeout=-1)) == (
        "StatusCode.INVALID_ARGUMENT",
        "invalid value for 'timeout', expected value >= 0.",
    )


def test_a_long_error_of_a_model_is_cut_but_arrives(client) -> None:
    assert refused(lambda: client.infer("broken", [tensor()])) == (
        "StatusCode.INTERNAL",
        ("boom " * 5000)[:4092] + "...",
    )


def test_the_error_of_an_answer_that_cannot_be_encoded_has_no_cause(client, caplog) -> None:
    assert refused(lambda: client.infer("odd", [tensor()])) == (
        "StatusCode.INTERNAL",
        "ModelInfer failed by an internal error; the server's log has the cause",
    )
    assert "UnicodeEncodeError" in caplog.text


def test_invalid_messages_and_unknown_rpcs(channel) -> None:
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    for raw in (b"\xff" * 40, b"\x0b" * 50_000, b"\x2a\xff\xff\xff\xff\x0f"):
        assert status(lambda raw=raw: infer(raw)) == (
            grpc.StatusCode.INTERNAL,
            f"Unable to parse request: its {len(raw)} bytes are no valid inference.ModelInferRequest message",
        )
    code, text = status(lambda: channel.unary_unary("/inference.GRPCInferenceService/ModelReady")(b"\xff"))
    assert (code, text) == (
        grpc.StatusCode.INTERNAL,
        "Unable to parse request: its 1 bytes are no valid inference.ModelReadyRequest message",
    )
    for path in ("/inference.GRPCInferenceService/Nope", "/nope", "/inference.Nope/ModelInfer"):
        assert status(lambda path=path: channel.unary_unary(path)(b""))[0] is grpc.StatusCode.UNIMPLEMENTED


def test_a_name_with_a_nul_is_not_cut(channel) -> None:
    infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", pb.ModelInferRequest.SerializeToString)
    assert status(lambda: infer(pb.ModelInferRequest(model_name="id\0ent"))) == (
        grpc.StatusCode.NOT_FOUND,
        "Request for unknown model: 'id\0ent' is not found",
    )


def test_a_message_over_the_limit(serve) -> None:
    with triton.InferenceServerClient(serve(Transport(max_message_bytes=1000)).url) as client:
        code, _ = refused(lambda: client.infer("ident", [tensor(np.zeros((1, 1000), np.float32))]))
        assert code == "StatusCode.RESOURCE_EXHAUSTED"
        assert client.infer("ident", [tensor()]).as_numpy("OUT").tolist() == X.tolist()


def test_a_deadline_cancels_the_request(served, client) -> None:
    code, _ = refused(lambda: client.infer("held", [tensor()], client_timeout=0.3))
    assert code == "StatusCode.DEADLINE_EXCEEDED"
    served.core.wait_for(lambda core: core.cancelled == [1])
    assert served.core.held == {}


def test_a_client_that_disconnects_cancels_its_request(served) -> None:
    client = triton.InferenceServerClient(served.url)
    context = client.async_infer("held", [tensor()], ignore)
    served.core.wait_for(lambda core: len(core.held) == 1)
    context.cancel()
    served.core.wait_for(lambda core: bool(core.cancelled))
    client.close()
    assert served.core.cancelled == [1]


def test_an_answer_for_a_disconnected_client_is_dropped(served, client) -> None:
    context = client.async_infer("held", [tensor()], ignore)
    served.core.wait_for(lambda core: len(core.held) == 1)
    held = dict(served.core.held)
    served.core.held.clear()
    context.cancel()
    served.core.wait_for(lambda core: core.cancelled == [1])
    served.do(lambda: served.core.answer(*held[1]))
    assert client.infer("ident", [tensor()]).as_numpy("OUT").tolist() == X.tolist()


def test_metadata_of_the_server_and_of_its_models(served, client) -> None:
    assert (client.is_server_live(), client.is_server_ready()) == (True, True)
    served.core.is_up = False
    assert (client.is_server_live(), client.is_server_ready()) == (True, False)
    asked = [("ident", ""), ("ident", "1"), ("ident", "2"), ("broken", ""), ("nope", ""), ("nope", "1"), ("", "")]
    assert [client.is_model_ready(*each) for each in asked] == [True, True, False, False, False, False, False]
    assert refused(lambda: client.is_model_ready("ident", "x"))[0] == "StatusCode.INVALID_ARGUMENT"
    assert client.get_server_metadata(as_json=True) == {
        "name": "triton",
        "version": "9.9",
        "extensions": ["parameters", "statistics"],
    }
    assert client.get_model_metadata("ident", as_json=True) == {
        "name": "ident",
        "versions": ["1"],
        "platform": "identity",
        "inputs": [{"name": "IN", "datatype": "FP32", "shape": ["-1", "-1"]}],
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": ["-1", "-1"]}],
    }
    configuration = client.get_model_config("ident").config
    assert (configuration.name, configuration.max_batch_size) == ("ident", 8)
    assert not configuration.HasField("model_transaction_policy")
    assert refused(lambda: client.get_model_config("nope"))[0] == "StatusCode.NOT_FOUND"
    assert [each.name for each in client.get_inference_statistics("", "7").model_stats] == list(served.core.views)
    assert refused(lambda: client.get_inference_statistics("nope")) == (
        "StatusCode.INVALID_ARGUMENT",
        "requested model 'nope' is not available",
    )


def test_the_repository(served, client) -> None:
    assert client.get_model_repository_index(as_json=True) == {
        "models": [{"name": "ident", "version": "1", "state": "READY"}, {"name": "new"}]
    }
    client.load_model("new", config="{}", files={"file:1/model.bin": b"\0\1"})
    client.unload_model("new")
    client.unload_model("new", unload_dependents=True)
    assert served.core.loads == [
        ("new", {"config": "{}", "file:1/model.bin": b"\0\1"}),
        ("new", False),
        ("new", True),
    ]
    assert refused(lambda: client.load_model("nope")) == (
        "StatusCode.INTERNAL",
        "failed to load 'nope', failed to poll from model repository",
    )


def test_a_long_load_does_not_delay_other_calls(served, client, channel) -> None:
    served.do(served.core.load_may_end.clear)
    load = channel.unary_unary("/inference.GRPCInferenceService/RepositoryModelLoad")
    loading = load.future(pb.RepositoryModelLoadRequest(model_name="new").SerializeToString())
    served.core.wait_for(lambda core: core.loads == [("new", {})])
    assert client.is_server_live()
    assert client.infer("ident", [tensor()]).as_numpy("OUT").tolist() == X.tolist()
    assert not loading.done()
    served.do(served.core.load_may_end.set)
    assert loading.result(20) == b""


def test_unavailable_calls_are_refused_by_name(channel) -> None:
    statuses = {}
    for method in POOL.FindServiceByName("inference.GRPCInferenceService").methods:
        if method.name.endswith(("MemoryRegister", "Setting", "Settings")):
            path = f"/inference.GRPCInferenceService/{method.name}"
            statuses[method.name] = status(lambda path=path: channel.unary_unary(path)(b""))
    unimplemented = grpc.StatusCode.UNIMPLEMENTED
    assert statuses == {
        f"{kind}SharedMemoryRegister": (
            unimplemented,
            f"{kind}SharedMemoryRegister: {what} shared memory is not available yet in this server",
        )
        for kind, what in (("System", "system"), ("Cuda", "CUDA"))
    } | {
        "TraceSetting": (unimplemented, "TraceSetting: tracing is not available yet in this server"),
        "LogSettings": (unimplemented, "LogSettings: changing log settings is not available yet in this server"),
    }


def test_shared_memory_lists_are_empty_and_unregister_succeeds(client) -> None:
    for kind in ("system", "cuda"):
        listed = getattr(client, f"get_{kind}_shared_memory_status")
        unregister = getattr(client, f"unregister_{kind}_shared_memory")
        assert len(listed().regions) == 0
        with pytest.raises(InferenceServerException) as caught:
            listed("r")
        assert (caught.value.status(), caught.value.message()) == (
            "StatusCode.NOT_FOUND",
            f"Unable to find {kind} shared memory region: 'r'",
        )
        unregister()
        unregister("r")


def test_every_rpc_of_the_service_has_a_handler(channel) -> None:
    missing = (grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    assert status(lambda: channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")) == missing
    methods = POOL.FindServiceByName("inference.GRPCInferenceService").methods
    without = []
    for method in methods:
        call = channel.stream_stream(f"/inference.GRPCInferenceService/{method.name}")(iter([b""]))
        with suppress(grpc.RpcError):
            list(call)
        if (call.code(), call.details()) == missing:
            without.append(method.name)
    assert (len(methods), without) == (20, [])
