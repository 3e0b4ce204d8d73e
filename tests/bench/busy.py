"""How busy an instance is whose queue is never empty, and how far its rate is from a bare loop of the same batches."""

import json
import statistics
import time
import urllib.request
from dataclasses import dataclass

import models
import numpy as np
import onnxruntime
import perf_analyzer

from halimede.demo.process import ServerProcess

SETTLING_S = 1.5
WINDOW_S = 3.0
ROUNDS = 3
BARE_RUNS = 200


@dataclass(frozen=True, slots=True)
class Busy:
    """`busy` is the compute time of an instance over wall time. `ratio` is the rate over that of a bare loop of full
    batches. `p99` is the p99 latency over the time that the callers' batches take one after the other in a bare loop,
    or for a model that computes over the mean latency. All by round."""

    model: str
    busy: list[float]
    ratio: list[float]
    p99: list[float]
    rows: float
    """Rows of a batch, on the average."""


def measured(server: ServerProcess) -> list[Busy]:
    """Each of models.FULL_QUEUE with its closed-loop callers over HTTP."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    p99: dict[str, list[float]] = {}
    address = server.address("http")
    for _ in range(ROUNDS):
        bare = bare_batch_s()
        for model, how in models.FULL_QUEUE.items():
            found.setdefault(model, []).append(_one(address, model, how, how.wait_ms / 1000 or bare))
            latency = perf_analyzer.latency(model, address, how.callers, how.rows)
            in_turn_s = how.callers * how.rows / models.FULL_BATCH / how.instances * how.wait_ms / 1000
            p99.setdefault(model, []).append(latency.p99_s / (in_turn_s or latency.mean_s))
    return [
        Busy(
            model,
            [busy for busy, _, _ in each],
            [ratio for _, ratio, _ in each],
            p99[model],
            statistics.mean(rows for _, _, rows in each),
        )
        for model, each in found.items()
    ]


def bare_batch_s() -> float:
    """Median seconds of a full batch of the wide model in a bare loop, with one thread like the server's instance."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    model = models.wide_onnx().SerializeToString()
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    x = np.ones((models.FULL_BATCH, models.WIDE), dtype=np.float32)
    taken = []
    for _ in range(BARE_RUNS):
        start = time.perf_counter()
        session.run(None, {"x": x})
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _one(address: str, model: str, how: models.FullQueue, bare_s: float) -> tuple[float, float, float]:
    with perf_analyzer.loading(model, "http", address, how.callers, how.rows):
        time.sleep(SETTLING_S)
        start, before = time.perf_counter(), _computed(address, model)
        time.sleep(WINDOW_S)
        took, after = time.perf_counter() - start, _computed(address, model)
    infer_ns, executions, rows = (later - earlier for later, earlier in zip(after, before, strict=True))
    return infer_ns / 1e9 / took / how.instances, rows / took / (models.FULL_BATCH / bare_s), rows / executions


def _computed(address: str, model: str) -> tuple[int, int, int]:
    """Nanoseconds of computing, executions and rows since the load."""
    with urllib.request.urlopen(f"http://{address}/v2/models/{model}/stats", timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    nanoseconds = sum(each["compute_infer"]["ns"] for each in found["batch_stats"])
    return nanoseconds, found["execution_count"], found["inference_count"]
