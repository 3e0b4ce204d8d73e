"""Millions of short strings in one tensor: both protocols serve them, at bounded memory, without blocking the loop."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from support.background import in_background
from support.h2client import INFER
from support.models import add_identity, add_onnx_identity, write_config
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.served import add_python, parameter
from support.server import RunningServer, serving

THREAD_LIMIT = 1 << 20
TRIES = 3
MOST_EACH_BYTES = 100

HALF = """
answers = []
for request in requests:
    strings = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", strings[:, ::2])]))
return answers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident", datatype="BYTES", dims="-1", max_batch_size=0)
    add_onnx_identity(models, "onnx", "BYTES", [1, "N"])
    add_onnx_identity(models, "isolated", "BYTES", [1, "N"])
    write_config(models / "isolated", parameter("ISOLATION", "process"))
    add_python(models, "half", HALF, datatype="BYTES", max_batch_size=8)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models]) as running:
        yield running
    assert "Traceback" not in running.log


@pytest.fixture(params=[1 << 21, pytest.param(10_485_760, marks=pytest.mark.large)])
def most(request: pytest.FixtureRequest) -> int:
    """A number of strings in wire layout."""
    return request.param


@pytest.fixture(params=[1 << 19, pytest.param(1 << 21, marks=pytest.mark.large)])
def many(request: pytest.FixtureRequest) -> int:
    """A number of strings in a layout that takes longer to read."""
    return request.param


def wire(count: int, *, alike: bool = True) -> bytes:
    """Strings in wire layout: all empty, or every second one with one byte."""
    return bytes(4 * count) if alike else b"\0\0\0\0\1\0\0\0x" * (count // 2)


def message(model: str, shape: list[int], data: bytes) -> bytes:
    made = pb.ModelInferRequest(model_name=model, raw_input_contents=[data])
    made.inputs.add(name="IN", datatype="BYTES", shape=shape)
    return made.SerializeToString()


def ask(server: RunningServer, raw: bytes) -> pb.ModelInferResponse:
    with grpc.insecure_channel(server.grpc_url, options=[("grpc.max_receive_message_length", -1)]) as channel:
        return pb.ModelInferResponse.FromString(channel.unary_unary(INFER)(raw, timeout=120))


def check_others_during(server: RunningServer, count: int, work: Callable[[], Any]) -> Any:
    """The result of `work` with this number of strings. Checks other requests meanwhile, and the memory per string."""
    # Relative to the duration, because the machine may be busy: a loop that iterates over strings blocks most of it, each
    # time. A busy machine may delay one of the few requests of a short one.
    for _ in range(TRIES):
        before = resident_bytes(server)
        forget_peak(server)
        result, took, longest = longest_wait_during(server, work)
        each = (peak_bytes(server) - before) / count
        print(f"health took at most {longest * 1e3:.0f} ms of {took:.1f} s; {each:.0f} bytes a string")
        assert each < MOST_EACH_BYTES
        if longest < 0.4 * took:
            return result
    raise AssertionError(f"another request took {longest * 1e3:.0f} ms of {took:.1f} s, as in all {TRIES} tries")


def longest_wait_during(server: RunningServer, work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result of `work`, the seconds that it took, and those of the slowest other request meanwhile."""
    started = time.monotonic()
    call = in_background(work)
    waits = []
    while not call.done():
        begun = time.monotonic()
        assert server.get("/v2/health/live").status == 200
        waits.append(time.monotonic() - begun)
        time.sleep(0.02)
    return call.result(), time.monotonic() - started, max(waits)


@pytest.mark.parametrize("alike", [True, False], ids=["alike", "mixed"])
def test_millions_of_strings_over_grpc(server: RunningServer, most: int, alike: bool) -> None:
    data = wire(most, alike=alike)
    raw = message("ident", [most], data)
    assert check_others_during(server, most, lambda: ask(server, raw)).raw_output_contents[0] == data


def test_millions_of_strings_over_grpc_in_typed_contents(server: RunningServer, many: int) -> None:
    made = pb.ModelInferRequest(model_name="ident")
    made.inputs.add(name="IN", datatype="BYTES", shape=[many], contents={"bytes_contents": [b"a"] * many})
    raw = made.SerializeToString()
    assert check_others_during(server, many, lambda: ask(server, raw)).raw_output_contents[0] == b"\1\0\0\0a" * many


def test_millions_of_strings_over_http_in_binary(server: RunningServer, most: int) -> None:
    data = wire(most, alike=False)
    head = (
        b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"BYTES","parameters":{"binary_data_size":%d}}],'
        b'"parameters":{"binary_data_output":true}}' % (most, len(data))
    )
    fields = {"Inference-Header-Content-Length": str(len(head))}
    answer = check_others_during(server, most, lambda: server.post("/v2/models/ident/infer", head + data, fields))
    assert answer.body.endswith(data)


def test_millions_of_strings_over_http_in_json(server: RunningServer, many: int) -> None:
    data = b",".join([b'""'] * many)
    body = b'{"inputs":[{"name":"IN","shape":[%d],"datatype":"BYTES","data":[%b]}]}' % (many, data)
    answer = check_others_during(server, many, lambda: server.post("/v2/models/ident/infer", body))
    assert (answer.status, answer.body.count(b'""')) == (200, many)


def test_millions_of_strings_through_a_python_model(server: RunningServer, many: int) -> None:
    raw = message("half", [1, many], wire(many, alike=False))
    answer = check_others_during(server, many, lambda: ask(server, raw))
    assert answer.raw_output_contents[0] == bytes(4 * (many // 2))


def test_an_invalid_layout_is_found_among_millions_of_strings(server: RunningServer, most: int) -> None:
    data = bytearray(wire(most))
    data[4 * most // 2] = 4
    raw = message("ident", [most], bytes(data))
    with pytest.raises(grpc.RpcError) as caught:
        ask(server, raw)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"expected {most} string elements for inference input 'IN'" in caught.value.details()


def test_threads_convert_a_million_strings_and_processes_more(server: RunningServer) -> None:
    raw = message("onnx", [1, THREAD_LIMIT], wire(THREAD_LIMIT))
    assert len(ask(server, raw).raw_output_contents[0]) == 4 * THREAD_LIMIT
    count = THREAD_LIMIT + 2
    with pytest.raises(grpc.RpcError) as caught:
        ask(server, message("onnx", [1, count], wire(count)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == (
        f"[request id: <id_unknown>] input 'IN' has {count} string elements, and model 'onnx' takes at most 1048576 while"
        " it runs in a thread of the server. Its parameter 'ISOLATION' with the value 'process' lifts the limit."
    )
    answer = check_others_during(server, count, lambda: ask(server, message("isolated", [1, count], wire(count))))
    assert len(answer.raw_output_contents[0]) == 4 * count
