"""Closed-loop clients: each thread has its own tritonclient and waits for every response."""

import json
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module

import numpy as np
from numpy.typing import NDArray

CALLERS = 16
WARM_UP_REQUESTS = 10
PROGRESS_INTERVAL_S = 0.1
REQUEST_TIMEOUT_S = 60

Ask = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Maps one image [1, 64] to its probabilities [1, 10]."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model that maps an image [64] to ten probabilities, and the names of these tensors."""

    model: str
    input: str
    output: str


@contextmanager
def connection(library: str, address: str, target: Target) -> Iterator[Ask]:
    """A client from `tritonclient.http` or `tritonclient.grpc`, whose interfaces are alike, for the calling thread."""
    triton = import_module(library)
    client = triton.InferenceServerClient(address)
    # The HTTP client has a timeout of 60 s by default, the gRPC client none.
    limit = {"client_timeout": REQUEST_TIMEOUT_S} if library.endswith("grpc") else {}

    def ask(image: NDArray[np.float32]) -> NDArray[np.float32]:
        tensor = triton.InferInput(target.input, list(image.shape), "FP32")
        tensor.set_data_from_numpy(image)
        answer: NDArray[np.float32] = client.infer(target.model, [tensor], **limit).as_numpy(target.output)
        return answer

    try:
        yield ask
    finally:
        client.close()


@dataclass(frozen=True, slots=True)
class Drive:
    """The measurements of the clients: a result [requests, 10] and a latency per request, and the server's batches.

    Request r sent image r modulo the number of images. `batches` counts executions by batch size.
    """

    answers: NDArray[np.float32]
    latencies_s: NDArray[np.float64]
    wall_s: float
    batches: Counter[int]


def drive(
    library: str,
    address: str,
    http_address: str,
    target: Target,
    images: NDArray[np.float32],
    passes: int,
    on_progress: Callable[[int], None],
) -> Drive:
    """Send every image `passes` times, each in its own request, from CALLERS threads at once."""
    total = passes * len(images)
    answers = np.zeros((total, 10), dtype=np.float32)
    latencies_s = np.zeros(total)
    answered = [0] * CALLERS
    started_s = 0.0
    batches_before: Counter[int] = Counter()

    def when_all_are_warm() -> None:
        nonlocal started_s, batches_before
        batches_before = batches_formed(http_address, target.model)
        started_s = time.perf_counter()

    start = threading.Barrier(CALLERS, action=when_all_are_warm, timeout=REQUEST_TIMEOUT_S)

    def call(caller: int) -> None:
        with connection(library, address, target) as ask:
            for _ in range(WARM_UP_REQUESTS):
                ask(images[:1])
            start.wait()
            for request in range(caller, total, CALLERS):
                at = request % len(images)
                asked_s = time.perf_counter()
                answers[request] = ask(images[at : at + 1])[0]
                latencies_s[request] = time.perf_counter() - asked_s
                answered[caller] += 1

    with ThreadPoolExecutor(CALLERS) as threads:
        calls: list[Future[None]] = [threads.submit(call, caller) for caller in range(CALLERS)]
        running = set(calls)
        while running:
            _, running = wait(running, timeout=PROGRESS_INTERVAL_S)
            on_progress(sum(answered))
        wall_s = time.perf_counter() - started_s
        # A thread that fails before the start breaks the barrier for the others: show its own error.
        errors = [error for each in calls if (error := each.exception())]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return Drive(answers, latencies_s, wall_s, batches_formed(http_address, target.model) - batches_before)


def batches_formed(http_address: str, model: str) -> Counter[int]:
    """Executions by batch size since the model was loaded, from the server's statistics."""
    with urllib.request.urlopen(f"http://{http_address}/v2/models/{model}/stats", timeout=REQUEST_TIMEOUT_S) as answer:
        (statistics,) = json.load(answer)["model_stats"]
    return Counter({each["batch_size"]: each["compute_infer"]["count"] for each in statistics["batch_stats"]})
