"""PyTorch models in a real server, asked by tritonclient."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from torch import nn
from tritonclient.utils import InferenceServerException

from support.canaries import exported_program
from support.processes import holding_no_more
from support.served import workers, zygotes
from support.server import RunningServer, start_server, wait_until
from support.torch_models import Network, export, trace

pytestmark = pytest.mark.timeout(900)  # each process imports torch, which takes long on a busy machine

STARTED_WITHIN_S = 600.0
ROWS = np.random.default_rng(5).standard_normal((8, 8)).astype(np.float32)


class Sums(nn.Module):
    """Adds what a sequence has sent; the state counts its requests."""

    def forward(
        self, x: torch.Tensor, total: torch.Tensor, count: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return x + total, x + total, count + 1


SUMS = """
max_batch_size: 4
input { name: "INPUT__0" data_type: TYPE_FP32 dims: 2 }
output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: 2 }
output { name: "RESULT[2]" data_type: TYPE_INT64 dims: 1 }
sequence_batching {
  oldest { max_candidate_sequences: 4 }
  state { input_name: "ARGS[1]" output_name: "RESULT[1]" data_type: TYPE_FP32 dims: 2 }
  state { input_name: "INPUT__2" output_name: "RESULT[2]" data_type: TYPE_INT64 dims: 1 }
}
"""

SHAKY = """
import os
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x):
        if x.min() < 0:
            os.abort()
        return {"y": x * self.scale, "process": torch.full_like(x, os.getpid(), dtype=torch.int64)}
"""
SHAKY_CONFIG = """
backend: "pytorch"
runtime: "model.py"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: 1 }
output { name: "process" data_type: TYPE_INT64 dims: 1 }
"""


def version(repository: Path, model: str, config: str = "") -> Path:
    directory = repository / model / "1"
    directory.mkdir(parents=True)
    if config:
        (repository / model / "config.pbtxt").write_text(config)
    return directory


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("pytorch") / "models"
    trace(Network(), (torch.zeros(2, 8),), version(repository, "network") / "model.pt")
    shaky = version(repository, "shaky", SHAKY_CONFIG)
    (shaky / "model.py").write_text(SHAKY)
    torch.save({"scale": torch.tensor([3.0])}, shaky / "model.pt")
    torch.save(Network().state_dict(), version(repository, "weights") / "model.pt")
    (version(repository, "truncated") / "model.pt").write_bytes(b"PK\x03\x04 the rest is lost")
    yield from serving(repository, tmp_path_factory.mktemp("log"), "network", "shaky")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a program of torch.export and a model of the other kind. The zygote of each takes seconds."""
    repository = tmp_path_factory.mktemp("exported") / "models"
    trace(Network(), (torch.zeros(2, 8),), version(repository, "network") / "model.pt")
    rows = {0: torch.export.Dim("rows", min=1, max=8)}
    example = torch.zeros(2, 2), torch.ones(2, 2), torch.zeros(2, 1, dtype=torch.int64)
    path = version(repository, "sums", SUMS) / "model.pt2"
    export(Sums(), example, path, dynamic={"x": rows, "total": rows, "count": rows})
    yield from serving(repository, tmp_path_factory.mktemp("log"), "network", "sums")


def serving(repository: Path, log: Path, *models: str, arguments: Sequence[str] = ()) -> Iterator[RunningServer]:
    loads = [f"--load-model={name}" for name in models]
    running = start_server(
        log, ["--model-repository", repository, "--model-control-mode=explicit", *loads, *arguments], ready=False
    )
    try:
        wait_until(
            lambda: running.get("/v2/health/ready").status == 200, "the models", running, limit_s=STARTED_WITHIN_S
        )
        yield running
        assert running.stop() == 0, running.log
    finally:
        running.kill()


def check_shared_memory(server: RunningServer, *names: str, count: int) -> None:
    own_mib = {each.name(): each.memory_full_info().uss >> 20 for each in workers(server)}
    assert own_mib.keys() == set(names)
    # Measured: 18 and 61 MiB; 300 and 390 MiB for processes that import the modules themselves.
    assert max(own_mib.values()) < 160, own_mib
    # A fork of a process with several threads may hang.
    assert [each.num_threads() for each in zygotes(server)] == [1] * count


def test_workers_share_the_memory_of_pytorch(server: RunningServer) -> None:
    check_shared_memory(server, "network_0", "shaky_0", count=1)


@pytest.mark.large
def test_workers_of_exported_programs_share_its_memory(exported: RunningServer) -> None:
    """They need more modules, so they have a zygote of their own."""
    check_shared_memory(exported, "network_0", "sums_0", count=2)


def ask(server: RunningServer, model: str, name: str, array: np.ndarray) -> httpclient.InferResult:
    with httpclient.InferenceServerClient(server.http_url, network_timeout=300.0) as client:
        tensor = httpclient.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor])


def test_a_traced_model_without_configuration_answers_the_same_bits(server: RunningServer) -> None:
    with torch.inference_mode():
        network = Network().eval()
        whole = network(torch.from_numpy(ROWS[:4].copy())).numpy()
    assert ask(server, "network", "x", ROWS[:4]).as_numpy("OUTPUT__0").tobytes() == whole.tobytes()
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        tensor = grpcclient.InferInput("x", [4, 8], "FP32")
        tensor.set_data_from_numpy(ROWS[:4])
        assert client.infer("network", [tensor]).as_numpy("OUTPUT__0").tobytes() == whole.tobytes()


KEYS = ("platform", "backend", "default_model_filename", "max_batch_size")


def test_the_configuration_that_was_found_is_shown(server: RunningServer) -> None:
    with httpclient.InferenceServerClient(server.http_url) as client:
        config = client.get_model_config("network")
    assert [config[key] for key in KEYS] == ["pytorch_libtorch", "pytorch", "model.pt", 4]


@pytest.mark.large
def test_the_configuration_of_an_exported_program_is_shown(exported: RunningServer) -> None:
    with httpclient.InferenceServerClient(exported.http_url) as client:
        config = client.get_model_config("sums")
    assert [config[key] for key in KEYS] == ["torch_aoti", "pytorch", "model.pt2", 4]


def test_requests_that_share_a_batch_get_their_own_rows(server: RunningServer) -> None:
    with torch.inference_mode():
        expected = Network().eval()(torch.from_numpy(ROWS.copy())).numpy()
    with ThreadPoolExecutor(len(ROWS)) as pool:
        answers = list(pool.map(lambda at: ask(server, "network", "x", ROWS[at : at + 1]), range(len(ROWS))))
    found = np.concatenate([answer.as_numpy("OUTPUT__0") for answer in answers])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.large
def test_sequences_of_an_exported_program_keep_their_states(exported: RunningServer) -> None:
    totals: dict[int, list[tuple[list[float], list[int]]]] = {1: [], 2: []}
    with grpcclient.InferenceServerClient(exported.grpc_url) as client:
        for step in range(3):
            for sequence in (1, 2):
                tensor = grpcclient.InferInput("INPUT__0", [1, 2], "FP32")
                tensor.set_data_from_numpy(np.full((1, 2), sequence * 10**step, np.float32))
                ends = {"sequence_start": step == 0, "sequence_end": step == 2}
                answer = client.infer("sums", [tensor], sequence_id=sequence, **ends)
                row = answer.as_numpy("OUTPUT__0")[0].tolist(), answer.as_numpy("RESULT[2]")[0].tolist()
                totals[sequence].append(row)
    assert totals == {
        1: [([1, 1], [1]), ([11, 11], [2]), ([111, 111], [3])],
        2: [([2, 2], [1]), ([22, 22], [2]), ([222, 222], [3])],
    }


def test_a_module_that_crashes_costs_one_batch(server: RunningServer) -> None:
    before = ask(server, "shaky", "x", np.ones((1, 1), np.float32))
    assert before.as_numpy("y").tolist() == [[3.0]]
    with pytest.raises(InferenceServerException, match="ended by signal 6"):
        ask(server, "shaky", "x", -np.ones((1, 1), np.float32))
    after = ask(server, "shaky", "x", np.ones((1, 1), np.float32))
    assert after.as_numpy("y").tolist() == [[3.0]]
    assert after.as_numpy("process").tolist() != before.as_numpy("process").tolist()


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("weights", "model.pt has weights alone (a state_dict), written by torch.save, without the model's code"),
        ("truncated", "it is incomplete; copy it again"),
    ],
)
def test_a_file_without_a_model_is_one_error_at_load(server: RunningServer, model: str, problem: str) -> None:
    answer = server.post(f"/v2/repository/models/{model}/load")
    assert (answer.status, problem in answer.error) == (400, True), answer.error


@pytest.mark.large
def test_a_file_that_is_replaced_after_the_look_is_not_unpickled(tmp_path: Path) -> None:
    path = version(tmp_path / "models", "m") / "model.pt"
    trace(Network(), (torch.zeros(2, 8),), path)
    log = tmp_path / "log"
    log.mkdir()
    with contextmanager(serving)(tmp_path / "models", log, "m", arguments=["--allow-pickle=false"]) as server:
        exported_program(path.with_suffix(".new"), tmp_path / "marker").rename(path)
        # The process that takes its place loads the file again, and the server does not look at it again.
        workers(server)[0].kill()
        wait_until(lambda: "'model.pt' contains pickles" in server.log, "the refusal", server, 60)
    assert not (tmp_path / "marker").exists()


@pytest.mark.load
def test_loads_and_unloads_leave_nothing_behind(server: RunningServer) -> None:
    def cycle(times: int) -> None:
        for _ in range(times):
            assert server.post("/v2/repository/models/network/unload").status == 200
            wait_until(lambda: server.get("/v2/models/network/ready").status != 200, "the unload", server)
            assert server.post("/v2/repository/models/network/load").status == 200

    cycle(10)
    with holding_no_more(server.process.pid, growth_bytes=8 << 20):
        cycle(90)
