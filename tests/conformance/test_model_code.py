"""Code of a model runs in worker processes only: not in the server, nor in a command that looks at the model.

Every installed backend that has a canary is covered: see `support.canaries`.
"""

import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from halimede.backends.discover import backend_names
from support.canaries import CANARIES, TENSORS, exported_program, install_pickler, write_careless, write_python
from support.forked import start_python
from support.model_files import SAMPLES
from support.models import write_config
from support.server import RunningServer, start_server, wait_until

LIMIT_S = 300.0
pytestmark = pytest.mark.timeout(900)
INSTALLED = sorted({*backend_names(), "pickler"} & CANARIES.keys())


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install_pickler(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a canary of each backend, and one that the server itself executes."""
    folder = tmp_path_factory.mktemp("canaries")
    for name in INSTALLED:
        CANARIES[name].write(folder / "models" / name, folder / f"{name}.served")
    write_careless(folder / "models" / "careless", folder / "careless.served")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, environment: dict[str, str]) -> Iterator[RunningServer]:
    arguments = ["--model-repository", folder / "models", "--model-control-mode=explicit"]
    running = start_server(folder, arguments, environment=environment)
    yield running
    running.kill()


def load(server: RunningServer, model: str) -> tuple[int, str]:
    """The status of a load call, and the error. A worker that imports a large library may take long."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=LIMIT_S)
    try:
        connection.request("POST", f"/v2/repository/models/{model}/load")
        response = connection.getresponse()
        body = response.read()
        return response.status, json.loads(body)["error"] if body else ""
    finally:
        connection.close()


def pids(marker: Path) -> set[int]:
    """The processes that executed the canary."""
    return {int(line) for line in marker.read_text().split()} if marker.exists() else set()


@pytest.mark.parametrize("backend", INSTALLED)
def test_server_executes_nothing_of_a_model(backend: str, server: RunningServer, folder: Path) -> None:
    load(server, backend)
    found = pids(folder / f"{backend}.served")
    assert server.process.pid not in found
    assert found or not CANARIES[backend].executes, server.log


def test_server_that_executes_a_model_is_found(server: RunningServer, folder: Path) -> None:
    load(server, "careless")
    assert server.process.pid in pids(folder / "careless.served")


SLOW = ("openvino", "sklearn")
"""Backends whose worker takes a second to start."""
COMMANDS = [
    pytest.param(
        backend,
        command,
        marks=[pytest.mark.large] * (backend in SLOW or (command == "check" and backend not in ("python", "pickler"))),
    )
    for backend in INSTALLED
    for command in ("explain-config", "check")
]
"""Both commands, and a server's load, ask a backend for the same."""


@pytest.mark.parametrize(("backend", "command"), COMMANDS)
def test_commands_execute_nothing_of_a_model(
    command: str, backend: str, tmp_path: Path, environment: dict[str, str]
) -> None:
    CANARIES[backend].write(tmp_path / "models" / backend, tmp_path / "marker")
    target = tmp_path / "models" / backend if command == "explain-config" else tmp_path / "models"
    pid = run("-m", "halimede", command, str(target), environment=environment)
    assert pid not in pids(tmp_path / "marker")
    assert pids(tmp_path / "marker") or not CANARIES[backend].executes


def run(*arguments: str, environment: dict[str, str]) -> int:
    """Run Python, and return the process's number."""
    with open(os.devnull, "wb") as nothing:
        process = start_python(*arguments, stdout=nothing, stderr=nothing, environment={**os.environ, **environment})
    process.wait(LIMIT_S)
    return process.pid


def test_single_file_is_executed_by_a_worker(tmp_path: Path, environment: dict[str, str]) -> None:
    write_python(tmp_path / "m", tmp_path / "marker")
    file = tmp_path / "m" / "1" / "model.py"
    pid = run("-m", "halimede", "explain-config", str(file), environment=environment)
    explained = pids(tmp_path / "marker")
    assert explained
    assert pid not in explained
    server = start_server(tmp_path, [file, "--exit-on-error=false"], ready=False, environment=environment)
    try:
        wait_until(lambda: pids(tmp_path / "marker") > explained, "the load of the model", server)
    finally:
        server.stop()
    assert server.process.pid not in pids(tmp_path / "marker")


BYPASSES = {"code": "code/x", "constants": "constants.pkl", "aoti": "xaotinductor/y"}
"""Members that make a program of torch.export look like a file of another kind, which has no pickles."""


def test_server_without_pickles_refuses_them_before_they_are_read(tmp_path: Path, environment: dict[str, str]) -> None:
    CANARIES["pickler"].write(tmp_path / "models" / "pickler", tmp_path / "marker")
    for name, member in BYPASSES.items():
        (tmp_path / "models" / name / "1").mkdir(parents=True)
        exported_program(tmp_path / "models" / name / "1" / "model.pt", tmp_path / "marker", {member: ""})
        write_config(tmp_path / "models" / name, f'backend: "pytorch"\n{TENSORS}')
    # What a worker is told: this file is no pickle when the server looks at it.
    replaced = tmp_path / "models" / "replaced"
    (replaced / "1").mkdir(parents=True)
    (replaced / "1" / "model.pkl").write_bytes(SAMPLES["xgboost json"][1])
    write_config(replaced, f'backend: "pickler"\n{TENSORS}')
    arguments = ["--model-repository", tmp_path / "models", "--model-control-mode=explicit", "--allow-pickle=false"]
    server = start_server(tmp_path, arguments, environment=environment)
    try:
        status, text = load(server, "pickler")
        bypasses = {name: load(server, name) for name in BYPASSES}
        later = load(server, "replaced")
    finally:
        server.kill()
    assert status == 400
    assert text.startswith(
        "load failed for model 'pickler': version 1 is at UNAVAILABLE state: Unsupported: model 'pickler': 'model.pkl' is "
        "a pickle, and a pickle can execute any code while the backend 'pickler' loads it. The server runs with "
        "--allow-pickle=false."
    )
    for name, (status, text) in bypasses.items():
        expected = f"model '{name}': 'model.pt' contains pickles: it is an archive of torch.export"
        assert (status, expected in text) == (400, True), text
    assert "it may have been replaced by a pickle" in later[1]
    assert pids(tmp_path / "marker") == set()
