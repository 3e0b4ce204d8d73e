"""Random concurrent operations from many threads, with a seed: one valid answer for each call, and nothing left."""

import http.client
import json
import os
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from support.models import add_identity, add_scaled, add_simple, save_onnx
from support.processes import holding_no_more, resident_bytes
from support.server import RunningServer, Start, wait_until

STATES = {"LOADING", "READY", "UNLOADING", "UNAVAILABLE", None}
GONE = {
    404: re.compile(r"Request for unknown model: '\w+' (is not found|has no available versions)"),
    503: re.compile(r"Request for unknown model: '\w+' is loading"),
}
NOT_AVAILABLE = re.compile(r"requested model '\w+' is not available")


@pytest.fixture
def repository(repository: Path) -> Path:
    for number in range(3):
        add_scaled(repository, f"scaled{number}", 2)
    slow = 'parameters { key: "execute_delay_ms" value { string_value: "5" } } dynamic_batching { }'
    add_identity(repository, "slow", dims="4", max_batch_size=4, extra=slow)
    return repository


@pytest.fixture
def server(start: Start, repository: Path) -> RunningServer:
    return start("--model-repository", repository, "--model-control-mode=explicit")


class Caller:
    """One kept connection; calls are never repeated."""

    def __init__(self, server: RunningServer) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, object]:
        self._connection.request(method, path, None if body is None else json.dumps(body))
        response = self._connection.getresponse()
        text = response.read()
        return response.status, json.loads(text) if text else None

    def close(self) -> None:
        self._connection.close()


@dataclass
class RandomOperations:
    """Operations of many threads on the models, and the wrong answers. `seed` determines the threads' choices."""

    server: RunningServer
    repository: Path
    seed: int
    models: tuple[str, ...] = ("scaled0", "scaled1", "scaled2", "slow")
    wrong: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)

    def run(self, threads: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        actors = [threading.Thread(target=self._act, args=(number, until)) for number in range(threads)]
        for actor in actors:
            actor.start()
        for actor in actors:
            actor.join()

    def _act(self, number: int, until: float) -> None:
        chance = random.Random(f"{self.seed} {number}")
        caller = Caller(self.server)
        steps: list[tuple[Callable[[Caller, str, random.Random], str | None], int]] = [
            (self._infer, 8),
            (self._load, 2),
            (self._unload, 1),
            (self._touch_and_load, 1),
            (self._index, 1),
            (self._ready, 1),
            (self._statistics, 1),
        ]
        while time.monotonic() < until:
            (step,) = chance.choices([step for step, _ in steps], [weight for _, weight in steps])
            model = chance.choice(self.models)
            try:
                problem = step(caller, model, chance)
            except Exception as error:
                problem = repr(error)
                caller = Caller(self.server)
            self.done[step.__name__] += 1
            if problem:
                self.wrong.append(f"{step.__name__} {model}: {problem}")
            time.sleep(chance.random() * 0.01)
        caller.close()

    def _infer(self, caller: Caller, model: str, chance: random.Random) -> str | None:
        value = chance.randrange(1000)
        tensor = {"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [value] * 4}
        status, answer = caller("POST", f"/v2/models/{model}/infer", {"id": str(value), "inputs": [tensor]})
        if status == 200:
            factor = 1 if model == "slow" else 2
            right = answer["id"] == str(value) and answer["outputs"][0]["data"] == [factor * value] * 4
            self.done["answered"] += right
            return None if right else str(answer)
        return None if status in GONE and GONE[status].fullmatch(answer["error"]) else f"{status} {answer}"

    def _load(self, caller: Caller, model: str, _: random.Random) -> str | None:
        status, answer = caller("POST", f"/v2/repository/models/{model}/load")
        return None if status == 200 else f"{status} {answer}"

    def _unload(self, caller: Caller, model: str, _: random.Random) -> str | None:
        status, answer = caller("POST", f"/v2/repository/models/{model}/unload")
        return None if status == 200 else f"{status} {answer}"

    def _touch_and_load(self, caller: Caller, model: str, chance: random.Random) -> str | None:
        os.utime(
            self.repository / model / "config.pbtxt" if model == "slow" else self._file(model),
            ns=(0, chance.getrandbits(40)),
        )
        return self._load(caller, model, chance)

    def _file(self, model: str) -> Path:
        return self.repository / model / "1" / "model.onnx"

    def _index(self, caller: Caller, _: str, __: random.Random) -> str | None:
        status, entries = caller("POST", "/v2/repository/index")
        names = [(entry["name"], entry.get("version")) for entry in entries]
        well = (
            status == 200
            and names == sorted(set(names), key=lambda pair: (pair[0], pair[1] or ""))
            and {name for name, _ in names} == set(self.models)
            and all(entry.get("state") in STATES for entry in entries)
        )
        return None if well else f"{status} {entries}"

    def _ready(self, caller: Caller, model: str, _: random.Random) -> str | None:
        # Readiness considers requested models, and a reloading model serves: no load may make the server unready.
        statuses = caller("GET", "/v2/health/ready")[0], caller("GET", "/v2/health/live")[0]
        asked = caller("GET", f"/v2/models/{model}/ready")[0]
        return None if statuses == (200, 200) and asked in {200, 400, 404} else f"{statuses} {asked}"

    def _statistics(self, caller: Caller, model: str, _: random.Random) -> str | None:
        if caller("GET", "/v2/models/stats")[0] != 200:
            return "no statistics of all models"
        status, answer = caller("GET", f"/v2/models/{model}/stats")
        return None if status == 200 or NOT_AVAILABLE.fullmatch(answer["error"]) else f"{status} {answer}"


def in_flight(server: RunningServer) -> float:
    lines = server.metrics().splitlines()
    gauges = ("halimede_executing_requests{", "nv_inference_pending_request_count{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(gauges))


def unload_all(server: RunningServer, models: tuple[str, ...]) -> None:
    for model in models:
        assert server.post(f"/v2/repository/models/{model}/unload").status == 200

    def idle() -> bool:
        entries = server.post("/v2/repository/index").json
        return all((e.get("state"), e.get("reason")) in {("UNAVAILABLE", "unloaded"), (None, None)} for e in entries)

    wait_until(idle, "every unload", server)


@pytest.mark.parametrize(
    ("threads", "seconds"),
    [
        (16, 1.5),
        pytest.param(16, 8.0, marks=pytest.mark.large),
        pytest.param(32, 60.0, marks=[pytest.mark.load, pytest.mark.timeout(300)]),
    ],
)
def test_random_operations_get_one_valid_answer_for_each_call(
    server: RunningServer, repository: Path, threads: int, seconds: float
) -> None:
    operations = RandomOperations(server, repository, seed=1)
    for model in operations.models:
        assert server.post(f"/v2/repository/models/{model}/load").status == 200
        assert server.get(f"/v2/models/{model}/ready").status == 200
    unload_all(server, operations.models)
    with holding_no_more(server.process.pid, threads=0):
        operations.run(threads, seconds)

        assert operations.wrong == []
        assert min(operations.done.values()) > 0
        unload_all(server, operations.models)
        assert in_flight(server) == 0
    assert server.get("/v2/health/ready").status == 200
    assert "Traceback" not in server.log
    assert server.stop() == 0


@pytest.mark.parametrize(
    "calls",
    [
        6,
        pytest.param(32, marks=pytest.mark.large),
        pytest.param(1024, marks=[pytest.mark.load, pytest.mark.timeout(1200)]),
    ],
)
def test_one_model_loaded_and_unloaded_from_32_threads(server: RunningServer, repository: Path, calls: int) -> None:
    outcomes: Counter[tuple[int, str]] = Counter()

    def ask(number: int) -> None:
        caller = Caller(server)
        for turn in range(calls):
            what = "load" if (number + turn) % 2 else "unload"
            status, answer = caller("POST", f"/v2/repository/models/scaled0/{what}")
            outcomes[status, "" if status == 200 else answer["error"]] += 1
        caller.close()

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(outcomes) == {(200, "")}
    assert sum(outcomes.values()) == 32 * calls
    assert server.post("/v2/repository/models/scaled0/load").status == 200
    assert server.get("/v2/models/scaled0/ready").status == 200
    unload_all(server, ("scaled0",))
    assert server.stop() == 0


def cycle(server: RunningServer, model: str, body: object, times: int) -> list[int]:
    """Load, call and unload a model `times` times; the server's resident bytes after each unload."""
    caller = Caller(server)
    resident: list[int] = []
    for _ in range(times):
        assert caller("POST", f"/v2/repository/models/{model}/load")[0] == 200
        assert caller("POST", f"/v2/models/{model}/infer", body)[0] == 200
        unload_all(server, (model,))
        resident.append(resident_bytes(server))
    caller.close()
    return resident


def test_a_hundred_loads_and_unloads_leave_no_memory_behind(server: RunningServer, repository: Path) -> None:
    add_simple(repository)
    inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16} for name in ("INPUT0", "INPUT1")]
    resident = cycle(server, "simple", {"inputs": inputs}, 130)
    # Memory is returned just after the unload, so that some of the figures still include the model.
    grown = min(resident[120:]) - min(resident[20:30])
    assert grown <= 2 << 20, f"100 loads and unloads kept {grown / (1 << 20):.1f} MiB"


@pytest.mark.parametrize("times", [30, pytest.param(60, marks=pytest.mark.large)])
def test_unloading_a_large_model_frees_its_memory(server: RunningServer, repository: Path, times: int) -> None:
    weights = np.ones((1024, 1024), np.float32)
    save_onnx(
        repository / "big" / "1" / "model.onnx",
        [helper.make_node("MatMul", ["IN", "weights"], ["OUT"])],
        [("IN", "FP32", ["N", 1024])],
        [("OUT", "FP32", ["N", 1024])],
        [helper.make_tensor("weights", TensorProto.FLOAT, weights.shape, weights.tobytes(), raw=True)],
    )
    body = {"inputs": [{"name": "IN", "shape": [1, 1024], "datatype": "FP32", "data": [1] * 1024}]}
    resident = cycle(server, "big", body, times)
    # The rest varies by a few buffers of 4 MiB, without growth; models that stay in memory would use 80 MiB and more.
    grown = min(resident[times * 5 // 6 :]) - min(resident[times // 6 : times // 3])
    assert grown <= 24 << 20, f"{times * 2 // 3} loads and unloads kept {grown / (1 << 20):.1f} MiB"
