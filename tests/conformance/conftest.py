"""A shared server for tests that do not change it, another one for models of the tests (`stage`), and `start`.

`start` is for tests that stop their server, that give it flags, or that count its processes, files or memory.
"""

import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.grpc_clients import PYTHON_CLIENTS
from support.grpc_plans import Client
from support.models import add_identity, add_onnx_identity, add_scaled, add_simple, add_simple_string
from support.probe import CI_CLIENTS, INTEROP_CLIENTS, make_client, provided
from support.served import Stage, add_python, infer, workers
from support.server import RunningServer, Start, serving, start_server


@pytest.fixture(scope="session", params=["thread", "process"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Every test runs twice: with all models on threads of the server, and with all models in worker processes."""
    repository = tmp_path_factory.mktemp("models")
    write_repository(repository)
    if request.param == "process":
        isolate(repository)
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", repository]) as running:
        yield running


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """An empty repository."""
    path = tmp_path / "models"
    path.mkdir()
    return path


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start_server`; the servers are killed when the test ends."""
    running: list[RunningServer] = []

    def begin(*arguments: str | Path, **options: Any) -> RunningServer:
        running.append(start_server(tmp_path, arguments, **options))
        return running[-1]

    yield begin
    for each in running:
        each.kill()


def isolate(repository: Path) -> None:
    """Make every model's instances run in worker processes."""
    for directory in repository.iterdir():
        with (directory / "config.pbtxt").open("a") as config:
            config.write('\nparameters { key: "ISOLATION" value { string_value: "process" } }\n')


def write_repository(repository: Path) -> None:
    add_simple(repository)
    add_simple_string(repository)
    add_identity(repository, "ident")
    add_identity(repository, "two", inputs=2, max_batch_size=4)
    add_identity(repository, "unbatched", max_batch_size=0, dims="-1")
    add_identity(repository, "text", datatype="BYTES", dims="-1")
    add_identity(repository, "slow", extra='parameters { key: "execute_delay_ms" value { string_value: "2000" } }')
    for datatype in (
        "BOOL",
        "UINT8",
        "INT8",
        "UINT16",
        "INT16",
        "UINT32",
        "INT32",
        "UINT64",
        "INT64",
        "FP16",
        "FP32",
        "FP64",
        "BYTES",
        "BF16",
    ):
        add_identity(repository, f"ident_{datatype.lower()}", datatype=datatype, dims="-1")
    add_onnx_identity(repository, "auto", "FP32", ["N", 4])
    add_scaled(repository, "scaled", 2.0, version=1)
    add_scaled(repository, "scaled", 3.0, version=3)
    (repository / "scaled" / "config.pbtxt").write_text("version_policy { all { } }")


@pytest.fixture(scope="session")
def python_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    repository = tmp_path_factory.mktemp("python") / "models"
    repository.mkdir()
    add_python(repository, "bystander")
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=bystander"]
    # Some tests unload models that hang while they load.
    arguments += ["--unload-wait-secs=5"]
    with serving(tmp_path_factory.mktemp("log"), arguments, forked=False) as running:
        yield Stage(running, repository)


@pytest.fixture
def stage(python_server: Stage) -> Iterator[Stage]:
    """A server for the test's python models. They must not affect another model, `bystander`."""
    server = python_server.server
    before = workers(server, "bystander")
    yield python_server
    python_server.clear()
    assert infer(server, "bystander", 1.0, 2.0) == (200, [1.0, 2.0])
    assert workers(server, "bystander") == before, f"the bystander's process was replaced\n{server.log}"


@pytest.fixture(
    scope="session", params=[*CI_CLIENTS, *(pytest.param(name, marks=pytest.mark.interop) for name in INTEROP_CLIENTS)]
)
def grpc_client(request: pytest.FixtureRequest) -> Client:
    """Every test runs with each gRPC client; `make interop` runs them with further ones."""
    return provided(request.config, partial(make_client, request.param))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`make test` runs each test of `grpc_client` with Go's client and one of Python's, `make test-all` with the others.

    The clients of Python share the code below their calls, so that the server sees the same of each.
    """
    for item in items:
        client = item.callspec.params.get("grpc_client") if hasattr(item, "callspec") else None
        if client in PYTHON_CLIENTS and not item.get_closest_marker("interop"):
            test = item.nodeid.replace(client, "")
            if client != sorted(PYTHON_CLIENTS)[zlib.crc32(test.encode()) % len(PYTHON_CLIENTS)]:
                item.add_marker("large")


@pytest.fixture(scope="session", params=["ci", pytest.param("interop", marks=pytest.mark.interop)])
def grpc_clients(request: pytest.FixtureRequest) -> dict[str, Client]:
    """All gRPC clients at once."""
    names = CI_CLIENTS if request.param == "ci" else INTEROP_CLIENTS
    return {name: provided(request.config, partial(make_client, name)) for name in names}
