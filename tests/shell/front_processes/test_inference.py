"""Inferences of all kinds, over connections to both front-end processes."""

import gzip
import json
import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.calls import ONES_JSON
from support.front_ends import TWO, Connection, connections_to_each, front_ends, grpc_clients_of_each
from support.models import add_identity, add_simple_string
from support.served import add_python
from support.server import RunningServer, serving

KIB, MIB = 1 << 10, 1 << 20
FILL = """
size = int(value(requests[0]))
return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(size, size, np.float32))])]
"""
REPEAT = """
for request in requests:
    sender = request.get_response_sender()
    for number in range(int(value(request))):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.full(number % 3 * 5000 + 1, number, np.float32))]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SUM = """
replies = []
for request in requests:
    control = {name: pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0] for name in ("START", "ID")}
    sums = self.__dict__.setdefault("sums", {})
    sums[control["ID"]] = (0 if control["START"] else sums[control["ID"]]) + value(request)
    tensor = pb_utils.Tensor("OUT", np.array([[sums[control["ID"]]]], np.float32))
    replies.append(pb_utils.InferenceResponse([tensor]))
return replies
"""
CONTROLS = """
sequence_batching {
  oldest { }
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "quick")
    add_identity(repository, "wide", dims="-1", max_batch_size=0)
    add_identity(repository, "text", datatype="BYTES", dims="-1", max_batch_size=0)
    add_simple_string(repository)
    add_python(repository, "fill", FILL, max_batch_size=0)
    add_python(repository, "repeat", REPEAT, max_batch_size=0, decoupled=True)
    add_python(repository, "sum", SUM, dims="1", extra=CONTROLS)
    with serving(tmp_path_factory.mktemp("log"), [TWO, "--model-repository", repository]) as running:
        yield running


@pytest.fixture(scope="module")
def fronts(server: RunningServer) -> Iterator[list[Connection]]:
    with connections_to_each(server) as found:
        yield found


@pytest.fixture(scope="module")
def clients(server: RunningServer) -> Iterator[list[grpcclient.InferenceServerClient]]:
    with grpc_clients_of_each(server) as found:
        yield found


def posted(front: Connection, model: str, array: Any, **fields: Any) -> np.ndarray[Any, Any]:
    """OUT of an inference whose tensors are sent as binary data."""
    data = array.tobytes()
    tensor = {
        "name": "IN",
        "shape": list(array.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(data)},
    }
    header = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}} | fields).encode()
    answer = front.post(
        f"/v2/models/{model}/infer", header + data, {"Inference-Header-Content-Length": str(len(header))}
    )
    assert answer.status == 200, answer.body
    return np.frombuffer(answer.body[int(answer.headers["inference-header-content-length"]) :], np.float32)


def tensor(array: Any, datatype: str = "FP32") -> grpcclient.InferInput:
    made = grpcclient.InferInput("IN", list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def random(size_bytes: int) -> Any:
    return np.random.default_rng(size_bytes).random(size_bytes // 4, np.float32)


@pytest.mark.parametrize("size_bytes", [4, 16 * KIB, 16 * KIB + 4, 600 * KIB, 20 * MIB])
def test_each_size_arrives_over_http_and_grpc(fronts: Any, clients: Any, size_bytes: int):
    array = random(size_bytes)
    for front in fronts:
        assert np.array_equal(posted(front, "wide", array), array)
    for client in clients:
        assert np.array_equal(client.infer("wide", [tensor(array)]).as_numpy("OUT"), array)


def test_requests_of_all_sizes_at_once_get_their_own_answers(server: RunningServer):
    sizes = [64, 40 * KIB, 3 * MIB, 600 * KIB, 1024]

    def ask(number: int) -> None:
        array = random(4 * (number + 1) + sizes[number % len(sizes)])
        with connections_to_each(server, 1) as [front]:
            for _ in range(5):
                assert np.array_equal(posted(front, "wide", array), array)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(ask, range(20)))


def test_pipelined_requests_are_answered_in_order(fronts: Any):
    """A large request is copied on a thread; the small ones behind it are not answered before it."""
    for front in fronts:
        raw = front.http.sock
        bodies = []
        for number, count in enumerate((1, 500_000, 2, 3)):
            document = {
                "id": str(number),
                "inputs": [
                    {"name": "IN", "shape": [count], "datatype": "FP32", "parameters": {"binary_data_size": 4 * count}}
                ],
                "outputs": [{"name": "OUT", "parameters": {"classification": 1}}],
            }
            header = json.dumps(document).encode()
            head = (
                f"POST /v2/models/wide/infer HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: {len(header)}\r\n"
            )
            bodies.append(
                f"{head}Content-Length: {len(header) + 4 * count}\r\n\r\n".encode() + header + bytes(4 * count)
            )
        raw.sendall(b"".join(bodies))
        got = b""
        while got.count(b'"outputs"') < len(bodies):
            part = raw.recv(1 << 16)
            assert part
            got += part
        places = [got.index(f'"id":"{number}"'.encode()) for number in range(len(bodies))]
        assert places == sorted(places)


def test_texts_arrive(fronts: Any, clients: Any):
    texts = np.array([b"", "größe ✓".encode(), b"x" * 100_000, b"\0\xff"], object)
    for client in clients:
        assert client.infer("text", [tensor(texts, "BYTES")]).as_numpy("OUT").tolist() == texts.tolist()
    document = {"inputs": [{"name": "IN", "shape": [2], "datatype": "BYTES", "data": ["", "größe ✓" * 10_000]}]}
    for front in fronts:
        answer = front.post("/v2/models/text/infer", json.dumps(document))
        assert answer.json["outputs"][0]["data"] == document["inputs"][0]["data"]


def test_compressed_requests_and_answers(fronts: Any, clients: Any):
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "gzip"}
    for front in fronts:
        plain = front.post("/v2/models/quick/infer", ONES_JSON)
        answer = front.post("/v2/models/quick/infer", gzip.compress(ONES_JSON.encode()), headers)
        assert (answer.status, answer.headers["content-encoding"]) == (200, "gzip")
        assert gzip.decompress(answer.body) == plain.body
    array = np.zeros(100_000, np.float32)
    for client in clients:
        got = client.infer("wide", [tensor(array)], compression_algorithm="gzip").as_numpy("OUT")
        assert np.array_equal(got, array)


def test_classification_reaches_each_front_end(fronts: Any):
    document = json.loads(ONES_JSON) | {"outputs": [{"name": "OUT", "parameters": {"classification": 2}}]}
    for front in fronts:
        answer = front.post("/v2/models/quick/infer", json.dumps(document))
        assert answer.json["outputs"][0]["data"] == ["1.000000:0", "1.000000:1"]


def test_events_of_a_decoupled_model_are_streamed(fronts: Any):
    for front in fronts:
        answer = front.post("/v2/models/repeat/generate_stream", b'{"IN": 7}')
        events = [json.loads(line.removeprefix("data:")) for line in answer.body.decode().split("\n\n") if line]
        assert [np.ravel(event["OUT"])[0] for event in events] == [0, 1, 2, 3, 4, 5, 6]


def test_answers_of_a_decoupled_model_arrive_in_order(clients: Any):
    """More answers than the window, of which some are in shared memory; all clients at once."""
    answers: list[queue.Queue[tuple[Any, Any]]] = [queue.Queue() for _ in clients]
    for client, mine in zip(clients, answers, strict=True):
        client.start_stream(lambda result, error, mine=mine: mine.put((result, error)))
        for request in ("a", "b"):
            client.async_stream_infer("repeat", [tensor(np.array([100], np.float32))], request_id=request)
    for client, mine in zip(clients, answers, strict=True):
        got: dict[str, list[float]] = {"a": [], "b": []}
        for _ in range(200):
            result, error = mine.get(timeout=60)
            assert error is None
            data = result.as_numpy("OUT")
            assert len(data) == int(data[0]) % 3 * 5000 + 1
            got[result.get_response().id].append(data[0])
        client.stop_stream()
        assert got == {"a": list(range(100)), "b": list(range(100))}


def test_a_sequence_goes_on_over_connections_to_both(fronts: Any, clients: Any):
    def post(front: Connection, number: float, sequence: int, **flags: bool) -> float:
        document = {
            "inputs": [{"name": "IN", "shape": [1, 1], "datatype": "FP32", "data": [number]}],
            "parameters": {"sequence_id": sequence, **flags},
        }
        answer = front.post("/v2/models/sum/infer", json.dumps(document))
        assert answer.status == 200, answer.body
        return float(answer.json["outputs"][0]["data"][0])

    first, *_, second = fronts
    assert post(first, 1, 5, sequence_start=True) == 1
    assert post(second, 100, 6, sequence_start=True) == 100
    for number in range(2, 6):
        assert post((first, second)[number % 2], number, 5) == sum(range(number + 1))
        assert post((first, second)[(number + 1) % 2], 100, 6) == 100 * number
    one = tensor(np.array([[10]], np.float32))
    for number, client in enumerate(clients, 1):
        assert client.infer("sum", [one], sequence_id=5).as_numpy("OUT")[0, 0] == 15 + 10 * number
    assert post(second, 1, 6, sequence_end=True) == 501
    assert post(first, 1, 5, sequence_end=True) == 16 + 10 * len(clients)


def shared_bytes(pid: int) -> int:
    """The shared memory that a process has mapped."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:halimede" in line:
            start, end = line.split()[0].split("-")
            total += int(end, 16) - int(start, 16)
    return total


@pytest.mark.parametrize("direction", ["requests", "answers"])
def test_memory_of_large_tensors_comes_back(server: RunningServer, fronts: Any, direction: str):
    """Three times as many tensors need hardly more memory. The first ones need it: a front end may report a free block
    only after some answers, and its memory doubles each time."""
    # Copied on a thread, as tensors above 8 MiB are.
    size_bytes = 9 * MIB
    array = random(size_bytes)

    def ask(times: int) -> None:
        for number in range(times):
            front = fronts[number % 2]
            if direction == "requests":
                assert np.array_equal(posted(front, "wide", array), array)
            else:
                data = posted(front, "fill", np.array([len(array)], np.float32))
                assert (len(data), data[0], data[-1]) == (len(array), len(array), len(array))

    def sizes() -> list[int]:
        return [shared_bytes(pid) for pid in (server.process.pid, *(each.pid for each in front_ends(server)))]

    ask(12)
    before = sizes()
    ask(24)
    grown = [after - was for after, was in zip(sizes(), before, strict=True)]
    assert max(grown) <= 4 * size_bytes, (before, grown)
