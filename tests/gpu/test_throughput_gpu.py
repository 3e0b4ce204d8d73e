"""The throughput of a model's instances on a real GPU beside a bare loop of PyTorch over the same network."""

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from support.gpus import ON_CPU, TORCH_DEVICE, instance_group, needs_device, needs_torch
from support.server import start_server

pytestmark = [needs_device, needs_torch]

# About a millisecond per batch on either device.
WIDTH, DEPTH = (256, 4) if ON_CPU else (2048, 48)
ROWS, INPUTS = 32, 64
SECONDS = 1.0 if ON_CPU else 5.0
CLIENTS = 8
LEAST_RATIO = 0.0 if ON_CPU else 0.05
"""Far below what is measured: a lower one shows a fault, such as instances that wait for each other."""

NETWORK = f"""
import torch

class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        wide = (layer for _ in range({DEPTH}) for layer in (torch.nn.Linear({WIDTH}, {WIDTH}), torch.nn.ReLU()))
        self.layers = torch.nn.Sequential(torch.nn.Linear({INPUTS}, {WIDTH}), *wide, torch.nn.Linear({WIDTH}, 4))

    def forward(self, x):
        return self.layers(x)
"""
BARE = f"""
import time
{NETWORK}
with torch.inference_mode():
    network, x = Network().to("{TORCH_DEVICE}"), torch.ones({ROWS}, {INPUTS})
    for _ in range(10):
        network(x.to("{TORCH_DEVICE}")).cpu()
    count, begun = 0, time.monotonic()
    while time.monotonic() - begun < {SECONDS}:
        network(x.to("{TORCH_DEVICE}")).cpu()
        count += 1
    print(count / (time.monotonic() - begun))
"""


def add_network(repository: Path, name: str, count: int) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(NETWORK)
    (folder.parent / "config.pbtxt").write_text(f"""
        backend: "pytorch"
        runtime: "model.py"
        max_batch_size: {ROWS}
        input {{ name: "x" data_type: TYPE_FP32 dims: {INPUTS} }}
        output {{ name: "y" data_type: TYPE_FP32 dims: 4 }}
        {instance_group(count)}
    """)


def request_body() -> tuple[bytes, dict[str, str]]:
    data = np.ones((ROWS, INPUTS), np.float32).tobytes()
    parameters = {"binary_data_size": len(data)}
    tensor = {"name": "x", "shape": [ROWS, INPUTS], "datatype": "FP32", "parameters": parameters}
    head = json.dumps({"inputs": [tensor]}).encode()
    return head + data, {"Inference-Header-Content-Length": str(len(head))}


def throughput(port: int, model: str) -> float:
    """Batches per second that clients get, each of which sends the next request when it has an answer."""
    content, headers = request_body()
    counts, failed = [0] * CLIENTS, list[int]()
    warm, begin = threading.Barrier(CLIENTS + 1), threading.Barrier(CLIENTS + 1)
    until = [0.0]

    def client(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def ask() -> None:
            connection.request("POST", f"/v2/models/{model}/infer", content, headers)
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                failed.append(answer.status)

        ask()
        warm.wait(60)
        begin.wait(60)
        while time.monotonic() < until[0]:
            ask()
            counts[number] += 1
        connection.close()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    warm.wait(60)
    begun = time.monotonic()
    until[0] = begun + SECONDS
    begin.wait(60)
    for thread in threads:
        thread.join()
    assert failed == []
    return sum(counts) / (time.monotonic() - begun)


def test_instances_on_one_gpu_beside_a_bare_loop(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    bare = float(subprocess.check_output([sys.executable, "-c", BARE], text=True))
    record_property("bare batches/s", round(bare))
    for count in (1, 2):
        repository = tmp_path / str(count)
        add_network(repository, "network", count)
        server = start_server(tmp_path, ["--model-repository", repository])
        try:
            served = throughput(server.http_port, "network")
        finally:
            server.kill()
        record_property(f"{count} instances", f"{served / bare:.2f} of it")
        assert served > LEAST_RATIO * bare
