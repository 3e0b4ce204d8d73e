"""What a queue policy and priority levels cost: throughput of a model that sleeps, against the same model without them.

Triton serves such a model at a third of the throughput, because it looks for a free instance twice a second.
"""

import http.client
import time
from concurrent.futures import ThreadPoolExecutor

import models
import numpy as np

PAIRS = 9
REQUESTS = 100
"""Of each caller, for each sample."""


def throughput_ratios(address: str, model: str, callers: int) -> list[float]:
    """Throughput of `model` over that of the model without a policy, one ratio for each of PAIRS pairs of runs."""
    requests_per_second(address, models.SLEEPER, callers)
    requests_per_second(address, model, callers)
    ratios = []
    for pair in range(PAIRS):
        order = (model, models.SLEEPER) if pair % 2 else (models.SLEEPER, model)
        rates = {name: requests_per_second(address, name, callers) for name in order}
        ratios.append(rates[model] / rates[models.SLEEPER])
    return ratios


def requests_per_second(address: str, model: str, callers: int) -> float:
    """The throughput of closed-loop callers over HTTP, who are threads."""
    body, header_length = models.binary_request("INPUT0", np.ones((1, 16), dtype=np.float32))
    headers = {"Inference-Header-Content-Length": str(header_length)}

    def call() -> None:
        connection = http.client.HTTPConnection(address, timeout=30)
        for _ in range(REQUESTS):
            connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != http.client.OK:
                raise RuntimeError(f"{model} answered {answer.status}")
        connection.close()

    start = time.perf_counter()
    with ThreadPoolExecutor(callers) as threads:
        for done in [threads.submit(call) for _ in range(callers)]:
            done.result()
    return callers * REQUESTS / (time.perf_counter() - start)
