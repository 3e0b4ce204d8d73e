"""Models with known durations, and the durations that a client and the server measure of them."""

import time
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.calls import load, metric
from support.models import write_config
from support.served import Stage, body
from support.server import RunningServer, wait_until

QUEUE = 0.2
"""Seconds that each request waits in the queue for a fuller batch."""


COMPUTE = 0.3
"""Compute seconds of a model that answers once."""


INITIALIZE = 1.0
"""Seconds that a model takes to initialize: more than the rest of its load."""


FIRST, SECOND, LAST = 0.2, 0.3, 0.1
"""Seconds before each of a model's two answers, and before its final flag."""
DELAY = f"dynamic_batching {{ max_queue_delay_microseconds: {round(QUEUE * 1e6)} }}"


HEAD = f"""
import asyncio

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def send_pair(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    time.sleep({SECOND})
    sender.send(answer(request))
    time.sleep({LAST})
    sender.send(flags=FINAL)


async def send_pair_async(request):
    sender = request.get_response_sender()
    await asyncio.sleep({FIRST})
    sender.send(answer(request))
    await asyncio.sleep({SECOND})
    sender.send(answer(request))
    await asyncio.sleep({LAST})
    sender.send(flags=FINAL)


def send_one(request):
    sender = request.get_response_sender()
    time.sleep({COMPUTE})
    sender.send(answer(request), FINAL)


def wait_for_go():
    time.sleep({COMPUTE})
    while not os.path.exists(NOTES.replace(".notes", ".go")):
        time.sleep(0.005)


def send_after_go(request):
    sender = request.get_response_sender()
    wait_for_go()
    sender.send(answer(request), FINAL)


def send_until_cancelled(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    while not request.is_cancelled():
        time.sleep(0.005)
    sender.send(flags=FINAL)


def send_and_die(request):
    sender = request.get_response_sender()
    time.sleep({FIRST})
    sender.send(answer(request))
    time.sleep({SECOND})
    os._exit(3)


def on_threads(work, requests):
    for request in requests:
        threading.Thread(target=work, args=[request]).start()


def call(model, request):
    tensor = pb_utils.get_input_tensor_by_name(request, "IN")
    called = pb_utils.InferenceRequest(model_name=model, inputs=[tensor], requested_output_names=["OUT"])
    return pb_utils.InferenceResponse(called.exec().output_tensors())
"""


ANSWER = f"time.sleep({COMPUTE})\nreturn [answer(request) for request in requests]"


STREAMING = {
    "in execute": {"execute": "for request in requests: send_pair(request)"},
    "on a thread": {"execute": "on_threads(send_pair, requests)"},
    "on a loop": {"execute": "for request in requests: await send_pair_async(request)", "how": "async def"},
}


ENSEMBLE = """
    name: "{name}"
    platform: "ensemble"
    max_batch_size: 8
    input [ {{ name: "IN" data_type: TYPE_FP32 dims: [ -1 ] }} ]
    output [ {{ name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] }} ]
    ensemble_scheduling {{ step [
      {{ model_name: "{first}" model_version: -1
         input_map {{ key: "IN" value: "IN" }} output_map {{ key: "OUT" value: "between" }} }},
      {{ model_name: "{second}" model_version: -1
         input_map {{ key: "IN" value: "between" }} output_map {{ key: "OUT" value: "OUT" }} }}
    ] }}
"""


def deploy(stage: Stage, name: str, execute: str, *, extra: str = DELAY, **how: object) -> None:
    stage.deploy(name, execute, head=HEAD, extra=extra, **how)


def deploy_ensemble(stage: Stage, name: str, first: str, second: str) -> None:
    (stage.repository / name / "1").mkdir(parents=True)
    write_config(stage.repository / name, ENSEMBLE.format(name=name, first=first, second=second))
    assert load(stage.server, name) == (200, "")


def ask(server: RunningServer, model: str, status: int = 200) -> float:
    """The duration of one request over HTTP, in seconds."""
    begun = time.monotonic()
    answer = server.post(f"/v2/models/{model}/infer", body(1.0))
    took = time.monotonic() - begun
    assert answer.status == status, answer.body
    return took


class Stream:
    """One request on a gRPC stream, with its answers and the time of each."""

    def __init__(self, server: RunningServer, model: str) -> None:
        self.answers: list[tuple[str, float]] = []
        self.is_over = False
        self._server = server
        self._client = grpcclient.InferenceServerClient(server.grpc_url)
        self._client.start_stream(self._on_answer)
        tensor = grpcclient.InferInput("IN", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
        self.begun = time.monotonic()
        self._client.async_stream_infer(model, [tensor], enable_empty_final_response=True)

    def _on_answer(self, result: grpcclient.InferResult | None, error: Exception | None) -> None:
        now = time.monotonic()
        if result is None:
            self.answers.append(("error", now))
            self.is_over = True
            return
        response = result.get_response()
        self.answers.append(("data" if response.outputs else "empty", now))
        self.is_over = response.parameters["triton_final_response"].bool_param

    def wait(self, answers: int = 0) -> None:
        """Wait for this number of answers, or for the last one."""
        wait_until(lambda: len(self.answers) >= answers if answers else self.is_over, "the answers", self._server)

    def cancel(self) -> None:
        self._client.stop_stream(cancel_requests=True)

    def close(self) -> None:
        self._client.close()


def ask_stream(server: RunningServer, model: str) -> tuple[float, list[str]]:
    """The seconds until the last answer of one request over a gRPC stream, and the answers."""
    stream = Stream(server, model)
    stream.wait()
    stream.close()
    return stream.answers[-1][1] - stream.begun, [what for what, _ in stream.answers]


COMPUTES = ("compute_input", "compute_infer", "compute_output")


PARTS = ("queue", *COMPUTES)


IN_US = {
    f"nv_inference_{name}_duration_us": part
    for name, part in {"request": "success", **dict(zip(PARTS, PARTS, strict=True))}.items()
}


IN_SECONDS = {"halimede_request_duration_seconds_sum": ("success", "")}
IN_SECONDS_OF_MODELS = {**IN_SECONDS, "halimede_queue_duration_seconds_sum": ("queue", 'outcome="success",')}
"""Part and further labels of each metric. An ensemble has no queue."""


class Figures:
    """All durations that the server reports for one model, in seconds. They must agree with one another."""

    def __init__(self, server: RunningServer, model: str, *, is_ensemble: bool = False) -> None:
        in_seconds = IN_SECONDS if is_ensemble else IN_SECONDS_OF_MODELS
        # A decoupled model's answers arrive before its batch is counted: read until two reads in sequence are equal.
        after = statistics(server, model)
        while True:
            self.stats = after
            metrics = {name: metric(server, name, model) for name in IN_US}
            metrics |= {name: metric(server, name, model, labels) for name, (_, labels) in in_seconds.items()}
            over_grpc = grpc_statistics(server, model)
            if (after := statistics(server, model)) == self.stats:
                break
        self.counts = {name: each["count"] for name, each in self.stats["inference_stats"].items()}
        ns = {name: each["ns"] for name, each in self.stats["inference_stats"].items()}
        self.secs = {name: each / 1e9 for name, each in ns.items()}
        by_index = self.stats.get("response_stats", {})
        self.responses = [
            {name: each["ns"] / 1e9 for name, each in by_index[key].items() if each["count"]}
            for key in sorted(by_index, key=int)
        ]
        for name, part in IN_US.items():
            assert metrics[name] == ns[part] // 1000
        for name, (part, _) in in_seconds.items():
            assert metrics[name] == pytest.approx(self.secs[part])
        check_grpc(over_grpc, self.stats)

    def check(self, took: float, **least: float) -> None:
        """One request: each part took its minimum at least, and at most the rest of the whole."""
        whole = sum(least.values())
        assert {self.counts[part] for part in ("success", *PARTS)} == {1}
        for part in PARTS:
            known = least.get(part, 0)
            assert known <= self.secs[part] <= took - whole + known, (part, took, self.secs)
        assert min(self.secs[part] for part in COMPUTES) > 0
        assert sum(self.secs[part] for part in PARTS) <= self.secs["success"] <= took

    def check_batch(self) -> None:
        """One execution, with the same durations as its request."""
        [batch] = self.stats["batch_stats"]
        assert {part: batch[part] for part in COMPUTES} == {
            part: self.stats["inference_stats"][part] for part in COMPUTES
        }

    def check_failure(self, took: float, least: float) -> None:
        assert (self.counts["success"], self.counts["fail"]) == (0, 1)
        assert least <= self.secs["fail"] <= took
        assert {self.secs[part] for part in ("success", *PARTS)} == {0}


def statistics(server: RunningServer, model: str) -> Any:
    [stats] = server.get(f"/v2/models/{model}/stats").json["model_stats"]  # type: ignore[index]
    return stats


def grpc_statistics(server: RunningServer, model: str) -> Any:
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        [stats] = client.get_inference_statistics(model).model_stats
    return stats


def check_grpc(grpc: Any, stats: Any) -> None:
    """Check that gRPC reports the same as HTTP."""
    pairs = [(stats["inference_stats"], grpc.inference_stats)]
    pairs += [(each, grpc.response_stats[key]) for key, each in stats.get("response_stats", {}).items()]
    pairs += list(zip(stats["batch_stats"], grpc.batch_stats, strict=True))
    for over_http, over_grpc in pairs:
        for name, duration in over_http.items():
            if name != "batch_size":
                other = getattr(over_grpc, name)
                assert (other.count, other.ns) == (duration["count"], duration["ns"]), name
