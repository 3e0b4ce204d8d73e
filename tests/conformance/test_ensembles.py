"""Ensembles of python, identity and ONNX models over HTTP, gRPC and streams."""

import queue
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from support.calls import DECOUPLED_OVER_HTTP, canceled, executing, index, load, metric, pending, unload
from support.ensemble_models import Step, Tensors, add_ensemble, add_plus, chain
from support.models import add_identity, add_scaled
from support.served import add_python, body, infer, parameter
from support.server import RunningServer, start_server, wait_until

REPEAT = """
for request in requests:
    sender = request.get_response_sender()
    array = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
    for number in range(int(array.flat[0])):
        if sender.is_cancelled():
            break
        values = np.full_like(array, number)
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", values)]))
    sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


WORDS = """
words = pb_utils.Tensor("OUT", np.array(["a", "b", "c"], object))
return [pb_utils.InferenceResponse([words]) for request in requests]
"""


def write_models(models: Path) -> None:
    add_plus(models, "plus")
    add_identity(models, "ident", dims="4")
    add_scaled(models, "scaled", 3)
    add_python(models, "repeat", REPEAT, dims="4", decoupled=True)
    add_identity(models, "slow", dims="4", extra=parameter("execute_delay_ms", "300"))
    add_identity(
        models,
        "narrow",
        dims="4",
        extra=parameter("execute_delay_ms", "30")
        + "instance_group { count: 1 } dynamic_batching { default_queue_policy { max_queue_size: 1 } }",
    )
    add_identity(models, "named", dims="4", max_batch_size=4)
    config = models / "named" / "config.pbtxt"
    config.write_text(config.read_text().replace('name: "OUT"', 'name: "OUT" label_filename: "labels.txt"'))
    (models / "named" / "labels.txt").write_text("zero\none\ntwo\nthree\n")

    add_ensemble(models, "pipe", chain("plus", "ident", "scaled"))
    add_ensemble(models, "nested", chain("pipe", "plus"))
    branches = [
        Step("plus", {"IN": "IN"}, {"OUT": "left"}),
        Step("scaled", {"IN": "IN"}, {"OUT": "right"}),
        Step("plus", {"IN": "left"}, {"OUT": "PLUS_TWO"}),
        Step("ident", {"IN": "right"}, {"OUT": "TIMES_THREE"}),
    ]
    add_ensemble(models, "branches", branches, outputs=Tensors(["PLUS_TWO", "TIMES_THREE"]))
    add_ensemble(models, "stream", chain("repeat", "plus"))
    add_ensemble(models, "streams", chain("plus", "stream"))
    add_ensemble(models, "flat", chain("plus", "scaled"), max_batch_size=0)
    add_ensemble(models, "labelled", chain("plus", "named"))
    # The last step is slow, so the first step has already sent its final flag.
    add_ensemble(models, "late", chain("repeat", "slow"))
    add_ensemble(models, "sending", chain("plus", "repeat"))
    add_identity(models, "square", dims="2, 1, 2")
    add_identity(models, "unbatched", dims="2, 1, 2", max_batch_size=0)
    reshape = "reshape { shape: [ 2, 1, 2 ] }"
    shapes = {"inputs": Tensors(extra={"IN": reshape}), "outputs": Tensors(["OUT"], extra={"OUT": reshape})}
    add_ensemble(models, "reshaped", chain("square"), **shapes)
    add_ensemble(models, "reshaped_flat", chain("square"), max_batch_size=0, **shapes)
    add_ensemble(models, "reshaped_one", chain("unbatched"), **shapes)
    add_ensemble(models, "reshaped_in", chain("reshaped", "plus"))
    add_ensemble(models, "waiting", chain("ident", "slow"))
    add_python(models, "words", WORDS, datatype="BYTES")
    texts = {"inputs": Tensors(datatype="BYTES", dims="-1"), "outputs": Tensors(["OUT"], "BYTES", "-1")}
    add_ensemble(models, "texts", chain("words"), **texts)
    add_ensemble(models, "tight", chain("ident", "narrow"))
    add_ensemble(models, "capped", chain("ident", "slow"), max_inflight_requests=1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ensembles") / "models"
    path.mkdir()
    write_models(path)
    return path


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    arguments = ["--model-repository", models, "--model-control-mode=explicit", "--load-model=*"]
    running = start_server(tmp_path_factory.mktemp("log"), arguments)
    yield running
    for name in (
        "pipe",
        "nested",
        "branches",
        "stream",
        "streams",
        "flat",
        "labelled",
        "late",
        "sending",
        "waiting",
        "tight",
        "capped",
    ):
        wait_until(lambda name=name: executing(running, name) == 0, f"nothing in flight in '{name}'", running)
    assert running.stop() == 0, running.log


def row(value: float = 1.0, rows: int = 1, *, batch: bool = True, client: Any = triton) -> list[Any]:
    array = np.full((rows, 4) if batch else (4,), value, np.float32)
    made = client.InferInput("IN", list(array.shape), "FP32")
    made.set_data_from_numpy(array)
    return [made]


def counted(server: RunningServer, *names: str) -> list[int]:
    return [int(metric(server, "nv_inference_request_success", name)) for name in names]


def reason(name: str) -> str:
    return f'reason="{name}",'


def failures(server: RunningServer, model: str, why: str) -> float:
    return metric(server, "nv_inference_request_failure", model, reason(why))


class Answers:
    """A gRPC stream, with one method to read the next answer."""

    def __init__(self, server: RunningServer) -> None:
        self.client = triton.InferenceServerClient(server.grpc_url)
        self.queue: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self.client.start_stream(lambda result, error: self.queue.put((result, error)))

    def __enter__(self) -> "Answers":
        return self

    def __exit__(self, *_: object) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()

    def next(self) -> Any:
        result, error = self.queue.get(timeout=20)
        assert error is None, error
        return result

    def values_to_the_end(self) -> list[float]:
        values = []
        while True:
            result = self.next()
            if result.as_numpy("OUT") is not None:
                values.append(float(result.as_numpy("OUT").flat[0]))
            if result.get_response().parameters["triton_final_response"].bool_param:
                return values


def test_three_steps_give_one_answer_over_every_protocol(server: RunningServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as http:
        over_http = http.infer("pipe", row(rows=3, client=triton_http), request_id="mine")
        assert over_http.as_numpy("OUT").tolist() == [[6.0] * 4] * 3
        document = over_http.get_response()
        assert (document["model_name"], document["model_version"], document["id"]) == ("pipe", "1", "mine")
        assert document["parameters"]["sequence_end"] is False
    with triton.InferenceServerClient(server.grpc_url) as grpc:
        over_grpc = grpc.infer("pipe", row(rows=3), request_id="mine")
        assert over_grpc.as_numpy("OUT").tolist() == [[6.0] * 4] * 3
        assert (over_grpc.get_response().model_name, over_grpc.get_response().id) == ("pipe", "mine")
        metadata = grpc.get_model_metadata("pipe")
        assert (metadata.platform, [each.name for each in metadata.inputs]) == ("ensemble", ["IN"])
    with Answers(server) as stream:
        for value in range(20):
            stream.client.async_stream_infer("pipe", row(value), request_id=f"{value}")
        found = {(each := stream.next()).get_response().id: each.as_numpy("OUT").flat[0] for _ in range(20)}
        assert found == {f"{value}": (value + 1) * 3 for value in range(20)}


def test_branches_run_in_parallel_and_only_for_requested_outputs(server: RunningServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as client:
        result = client.infer("branches", row(5, client=triton_http))
        assert (result.as_numpy("PLUS_TWO").flat[0], result.as_numpy("TIMES_THREE").flat[0]) == (7, 15)
        before = counted(server, "plus", "scaled", "ident")
        wanted = [triton_http.InferRequestedOutput("TIMES_THREE")]
        result = client.infer("branches", row(5, client=triton_http), outputs=wanted)
        assert (result.as_numpy("PLUS_TWO"), result.as_numpy("TIMES_THREE").flat[0]) == (None, 15)
        after = counted(server, "plus", "scaled", "ident")
        assert [now - was for was, now in zip(before, after, strict=True)] == [0, 1, 1]


def test_an_ensemble_can_be_a_step(server: RunningServer) -> None:
    assert infer(server, "nested", 1, 1, 1, 1) == (200, [7.0] * 4)


def test_a_decoupled_step_makes_the_ensemble_decoupled(server: RunningServer) -> None:
    config = server.get("/v2/models/streams/config").json
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert server.get("/v2/models/pipe/config").json["model_transaction_policy"] == {"decoupled": False}
    assert infer(server, "stream", 1, 1, 1, 1) == (
        501,
        DECOUPLED_OVER_HTTP,
    )
    with Answers(server) as stream:
        for count in (3, 0):
            stream.client.async_stream_infer("stream", row(count), enable_empty_final_response=True)
            assert stream.values_to_the_end() == [number + 1 for number in range(count)]
        # More answers than the window allows, through an ensemble of ensembles.
        stream.client.async_stream_infer("streams", row(299), enable_empty_final_response=True)
        assert stream.values_to_the_end() == [number + 1 for number in range(300)]


@pytest.mark.parametrize("asks", [False, True])
def test_last_answer_of_a_decoupled_ensemble_is_marked_as_final(server: RunningServer, asks: bool) -> None:
    with Answers(server) as stream:
        for count in (1, 3):
            stream.client.async_stream_infer("late", row(count), enable_empty_final_response=asks)
            results = [stream.next() for _ in range(count)]
            assert [each.as_numpy("OUT").flat[0] for each in results] == list(range(count))
            finals = [each.get_response().parameters["triton_final_response"].bool_param for each in results]
            assert finals == [False] * (count - 1) + [True]
        # No answer follows a final one.
        stream.client.async_stream_infer("pipe", row(1))
        assert stream.next().get_response().model_name == "pipe"


def test_ensemble_without_answers_sends_a_final_one_on_request(server: RunningServer) -> None:
    with Answers(server) as stream:
        stream.client.async_stream_infer("late", row(0), enable_empty_final_response=True)
        assert stream.values_to_the_end() == []


def test_late_end_of_a_last_step_is_an_empty_final_answer_on_request(server: RunningServer) -> None:
    with Answers(server) as stream:
        for asks in (True, False):
            stream.client.async_stream_infer("sending", row(1), enable_empty_final_response=asks)
            finals = [stream.next().get_response().parameters["triton_final_response"].bool_param for _ in range(2)]
            assert finals == [False, False]
            if asks:
                assert stream.values_to_the_end() == []


@pytest.mark.parametrize("model", ["reshaped", "reshaped_one", "reshaped_flat"])
def test_steps_of_an_ensemble_see_its_reshaped_inputs(server: RunningServer, model: str) -> None:
    shape = [4] if model == "reshaped_flat" else [1, 4]
    given = {"name": "IN", "shape": shape, "datatype": "FP32", "data": [1, 2, 3, 4]}
    answer = server.post(f"/v2/models/{model}/infer", {"inputs": [given]})
    assert answer.status == 200, answer.body
    (output,) = answer.json["outputs"]
    assert (output["shape"], output["data"]) == (shape, [1, 2, 3, 4])
    assert server.get(f"/v2/models/{model}").json["inputs"][0]["shape"] == ([4] if len(shape) == 1 else [-1, 4])


def test_reshaped_ensemble_batches_and_is_a_step(server: RunningServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as client:
        assert client.infer("reshaped", row(2, 3, client=triton_http)).as_numpy("OUT").tolist() == [[2.0] * 4] * 3
    assert infer(server, "reshaped_in", 1, 2, 3, 4) == (200, [2, 3, 4, 5])


@pytest.mark.parametrize("missing", ["input_map", "output_map"])
def test_error_for_a_step_without_a_map_has_its_number(server: RunningServer, models: Path, missing: str) -> None:
    maps = {"input_map": {"IN": "IN"}, "output_map": {"OUT": "OUT"}, missing: {}}
    first = Step("plus", {"IN": "IN"}, {"OUT": "between1"})
    add_ensemble(models, "unmapped", [first, Step("plus", maps["input_map"], maps["output_map"])])
    status, text = load(server, "unmapped")
    shutil.rmtree(models / "unmapped")
    assert status == 500
    assert text.endswith(f": must specify '{missing}' in step 1 of ensemble 'unmapped'"), text


def test_a_disconnected_client_ends_a_stream_of_answers(server: RunningServer) -> None:
    with Answers(server) as stream:
        stream.client.async_stream_infer("stream", row(1_000_000))
        stream.next()
    wait_until(lambda: executing(server, "stream") == executing(server, "repeat") == 0, "both to end", server)
    assert canceled(server, "stream") >= 1


def test_a_disconnected_client_ends_the_running_step(server: RunningServer) -> None:
    before = canceled(server, "waiting")
    request = b"POST /v2/models/waiting/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s"
    content = b'{"inputs":[{"name":"IN","shape":[1,4],"datatype":"FP32","data":[1,1,1,1]}]}'
    with socket.create_connection(("127.0.0.1", server.http_port)) as client:
        client.sendall(request % (len(content), content))
        wait_until(lambda: executing(server, "slow") == 1, "the second step to run", server)
    wait_until(lambda: executing(server, "waiting") == 0, "the end of the request", server)
    assert canceled(server, "waiting") == before + 1


@pytest.mark.parametrize("rows", [1, 2])
def test_output_has_the_shape_that_its_step_made(server: RunningServer, rows: int) -> None:
    text = triton.InferInput("IN", [rows, 1], "BYTES").set_data_from_numpy(np.full((rows, 1), "x", object))
    with triton.InferenceServerClient(server.grpc_url) as client:
        shapes = {name: client.infer(name, [text]).as_numpy("OUT").shape for name in ("words", "texts")}
    assert shapes == {"words": (3,), "texts": (3,)}


def test_the_batch_dimension_is_added_and_removed_between_steps(server: RunningServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as client:
        assert client.infer("flat", row(1, batch=False, client=triton_http)).as_numpy("OUT").tolist() == [6.0] * 4


def test_classes_have_the_labels_of_the_model_of_the_output(server: RunningServer) -> None:
    with triton_http.InferenceServerClient(server.http_url) as client:
        inputs = [triton_http.InferInput("IN", [1, 4], "FP32")]
        inputs[0].set_data_from_numpy(np.array([[1, 9, 5, 3]], np.float32))
        outputs = [triton_http.InferRequestedOutput("OUT", class_count=2)]
        classes = client.infer("labelled", inputs, outputs=outputs).as_numpy("OUT")
        assert classes.tolist() == [[b"10.000000:1:one", b"6.000000:2:two"]]


def test_a_failed_step_is_the_answer_and_counts_once_per_ensemble(server: RunningServer) -> None:
    before = [failures(server, "pipe", "OTHER"), counted(server, "scaled")]
    assert infer(server, "pipe", -1, 0, 0, 0) == (500, "in ensemble 'pipe', negative")
    assert infer(server, "nested", -1, 0, 0, 0) == (500, "in ensemble 'nested', in ensemble 'pipe', negative")
    # The later steps did not run.
    assert [failures(server, "pipe", "OTHER"), counted(server, "scaled")] == [before[0] + 2, before[1]]


def test_fifty_requests_for_a_step_with_a_queue_of_one_are_all_answered(server: RunningServer) -> None:
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: infer(server, "tight", 1, 1, 1, 1), range(50)))
    errors = {answer for status, answer in answers if status == 503}
    assert errors == {"in ensemble 'tight', [request id: <id_unknown>] Exceeds maximum queue size"}
    assert {status for status, _ in answers} == {200, 503}
    assert [executing(server, name) for name in ("tight", "narrow")] == [0, 0]
    assert metric(server, "nv_inference_pending_request_count", "tight") == 0


def test_a_cap_on_calls_of_a_step_delays_and_never_refuses_requests(server: RunningServer) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(infer, server, "capped", 1, 1, 1, 1) for _ in range(3)]
        # Waiting requests are pending at the cap of the second step, because the first step takes no time.
        wait_until(lambda: pending(server, "capped") == 2, "two requests to wait at the cap", server)
        answers = [each.result() for each in asked]
    assert [status for status, _ in answers] == [200] * 3
    assert time.monotonic() - begun > 0.8  # in sequence, 300 ms each
    assert metric(server, "nv_inference_queue_duration_us", "capped") > 500_000


def test_the_queue_timeout_applies_while_a_request_waits_at_the_cap(server: RunningServer) -> None:
    request = {**body(1, 1, 1, 1), "parameters": {"timeout": 50_000}}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(infer, server, "capped", 1, 1, 1, 1)
        wait_until(lambda: executing(server, "slow") == 1, "the first one's second step", server)
        answer = pool.submit(server.post, "/v2/models/capped/infer", request).result()
        assert (answer.status, answer.error) == (
            503,
            "in ensemble 'capped', [request id: <id_unknown>] Request timeout expired",
        )
        assert first.result()[0] == 200


def test_statistics_count_ensemble_requests_and_the_compute_of_steps(server: RunningServer) -> None:
    def figures(name: str) -> Any:
        return server.get(f"/v2/models/{name}/stats").json["model_stats"][0]

    before, steps = figures("flat"), figures("plus")
    with triton_http.InferenceServerClient(server.http_url) as client:
        for _ in range(3):
            client.infer("flat", row(1, batch=False, client=triton_http))
    after = figures("flat")
    for name in ("inference_count", "execution_count"):
        assert after[name] - before[name] == 3
    success = after["inference_stats"]["success"]
    assert success["count"] - before["inference_stats"]["success"]["count"] == 3
    assert success["ns"] > before["inference_stats"]["success"]["ns"]
    assert after["inference_stats"]["queue"]["count"] == success["count"]
    assert figures("plus")["inference_count"] - steps["inference_count"] == 3
    computed = after["inference_stats"]["compute_infer"]
    assert computed["count"] == success["count"]
    spent = figures("plus")["inference_stats"]["compute_infer"]["ns"] - steps["inference_stats"]["compute_infer"]["ns"]
    assert computed["ns"] - before["inference_stats"]["compute_infer"]["ns"] >= spent > 0
    assert after["last_inference"] >= before["last_inference"] > 0 or before["last_inference"] == 0


def test_unloading_a_step_under_load_fails_requests_with_a_clear_error(models: Path, server: RunningServer) -> None:
    add_identity(models, "loose", dims="4", max_batch_size=4)
    add_ensemble(models, "flowing", chain("plus", "loose", "plus"))
    assert load(server, "flowing") == (200, "")
    ends = threading.Event()
    answers: list[tuple[int, object]] = []

    def flow() -> None:
        while not ends.is_set():
            answers.append(infer(server, "flowing", 1, 1, 1, 1))

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(flow)
        try:
            for _ in range(3):
                there = len(answers)
                wait_until(lambda there=there: len(answers) > there + 30, "some answers", server)
                assert unload(server, "loose") == 200
                assert load(server, "loose") == (200, "")
        finally:
            ends.set()
    gone = "Request for unknown model: 'flowing' has no available versions"
    assert {(status, answer if status != 200 else 3.0) for status, answer in answers if status != 404} == {(200, 3.0)}
    assert {answer for status, answer in answers if status == 404} <= {gone}
    assert infer(server, "flowing", 1, 1, 1, 1) == (200, [3.0] * 4)
    assert executing(server, "flowing") == 0
    assert (
        server.post("/v2/repository/models/flowing/unload", {"parameters": {"unload_dependents": True}}).status == 200
    )
    # Both were loaded by name, not as steps of the ensemble.
    assert [index(server)[name, "1"] for name in ("loose", "plus")] == [("READY", "")] * 2
    unload(server, "loose")


def test_a_step_does_not_wait_for_its_delay_at_an_unload(models: Path, server: RunningServer) -> None:
    delay = f"dynamic_batching {{ max_queue_delay_microseconds: {2**64 - 1} }}"
    add_identity(models, "patient", dims="4", max_batch_size=4, extra=delay)
    add_ensemble(models, "hurried", chain("patient", "plus"))
    assert load(server, "patient") == load(server, "hurried") == (200, "")
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(infer, server, "hurried", 1, 1, 1, 1)
        wait_until(lambda: pending(server, "patient") == 1, "the request of the step", server)
        assert unload(server, "patient") == 200
        assert call.result(20)[0] == 200


def test_an_ensemble_follows_its_step_and_the_server_stays_ready(models: Path, server: RunningServer) -> None:
    add_identity(models, "member", dims="4", max_batch_size=4)
    add_ensemble(models, "club", chain("member"))
    assert load(server, "club") == (200, "")
    assert unload(server, "member") == 200
    wait_until(lambda: index(server)["club", "1"] == ("UNAVAILABLE", "unloaded"), "the ensemble to be unloaded", server)
    assert infer(server, "club", 1, 1, 1, 1) == (404, "Request for unknown model: 'club' has no available versions")
    assert server.get("/v2/models/club/ready").status == 400
    assert server.get("/v2/health/ready").status == 200
    assert load(server, "club") == (200, "")
    assert index(server)["member", "1"] == ("READY", "")
    assert infer(server, "club", 1, 1, 1, 1) == (200, [1.0] * 4)
    unload(server, "club")
    unload(server, "member")


def test_an_unknown_output_is_refused_by_the_ensemble(server: RunningServer) -> None:
    with (
        triton.InferenceServerClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="unexpected inference output 'NOPE' for model 'pipe'"),
    ):
        client.infer("pipe", row(), outputs=[triton.InferRequestedOutput("NOPE")])
