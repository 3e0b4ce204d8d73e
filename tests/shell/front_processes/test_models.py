"""Loads and unloads over one connection, as the connections of all front-end processes see them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from support.background import in_background
from support.calls import ONES_JSON, index, load, unload
from support.front_ends import TWO, Connection, connections_to_each, grpc_clients_of_each
from support.models import add_identity
from support.served import add_python, notes_file, workers
from support.server import RunningServer, serving, wait_until

WAITS = """
def initialize(self, args):
    note("begun")
    while not os.path.exists(NOTES + ".go"):
        time.sleep(0.005)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stage") / "models"
    path.mkdir()
    add_identity(path, "steady")
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[RunningServer]:
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=steady"]
    with serving(tmp_path_factory.mktemp("log"), [TWO, *arguments]) as running:
        yield running


@pytest.fixture(scope="module")
def fronts(server: RunningServer) -> Iterator[list[Connection]]:
    """At least 20 connections, ten or more of them to each process."""
    with connections_to_each(server, each=10) as found:
        yield found


@pytest.fixture(scope="module")
def clients(server: RunningServer) -> Iterator[list[Any]]:
    with grpc_clients_of_each(server) as found:
        yield found


def infer(connection: Connection, model: str) -> int:
    return connection.post(f"/v2/models/{model}/infer", ONES_JSON).status


def change(repository: Path, name: str, max_batch_size: int) -> None:
    """Write another configuration, of another length, so that also a coarse clock shows that it is another file."""
    add_identity(repository, name, max_batch_size=max_batch_size, extra="#" * max_batch_size)


def test_a_load_is_seen_on_every_connection_at_once(server: RunningServer, repository: Path, fronts: Any, clients: Any):
    add_identity(repository, "new")
    assert {infer(front, "new") for front in fronts} == {404}
    for round_ in range(5):
        loader = fronts[round_ % len(fronts)]
        assert loader.post("/v2/repository/models/new/load").status == 200
        assert [infer(front, "new") for front in fronts] == [200] * len(fronts)
        assert all(client.is_model_ready("new") for client in clients)
        assert {front.get("/v2/models/new").status for front in fronts} == {200}
        assert loader.post("/v2/repository/models/new/unload").status == 200
        assert {infer(front, "new") for front in fronts} <= {400, 404, 503}
        assert {front.get("/v2/models/new").status for front in fronts} <= {400, 404, 503}
        for client in clients:
            with pytest.raises(InferenceServerException):
                client.get_model_metadata("new")


def test_a_changed_configuration_is_seen_on_every_connection(
    server: RunningServer, repository: Path, fronts: Any, clients: Any
):
    add_identity(repository, "changing", max_batch_size=32)
    assert load(server, "changing") == (200, "")
    for size in range(1, 6):
        change(repository, "changing", size)
        assert clients[size % len(clients)].load_model("changing") is None
        for front in fronts:
            assert front.get("/v2/models/changing/config").json["max_batch_size"] == size
        for client in clients:
            assert client.get_model_config("changing").config.max_batch_size == size
            assert client.get_model_metadata("changing").inputs[0].shape[1:] == [16]
    assert unload(server, "changing") == 200


def test_requests_are_checked_against_the_configuration_that_serves(
    server: RunningServer, repository: Path, fronts: Any
):
    """Each front end checks shapes itself, by what it knows of the model."""
    for dims, status in (("16", 200), ("15", 400), ("16", 200)):
        add_identity(repository, "checked", dims=dims, extra="#" * int(dims))
        assert load(server, "checked") == (200, "")
        assert [infer(front, "checked") for front in fronts] == [status] * len(fronts)
    assert unload(server, "checked") == 200


def test_other_models_are_served_during_loads(server: RunningServer, repository: Path, fronts: Any):
    add_identity(repository, "coming")
    is_over = threading.Event()

    def use(front: Connection) -> set[int]:
        found = set()
        while not is_over.is_set():
            found.add(infer(front, "steady"))
        return found

    users = [in_background(lambda front=front: use(front)) for front in (*fronts[:2], *fronts[-2:])]
    for _ in range(15):
        assert load(server, "coming") == (200, "")
        assert unload(server, "coming") == 200
    is_over.set()
    assert [user.result(30) for user in users] == [{200}] * 4


def test_a_model_that_loads_is_reported_as_loading(server: RunningServer, repository: Path, fronts: Any):
    add_python(repository, "slow", methods=WAITS)
    assert {front.get("/v2/models/slow").error for front in fronts} == {
        "Request for unknown model: 'slow' is not found"
    }
    loading = in_background(lambda: load(server, "slow"))
    wait_until(notes_file(repository, "slow").exists, "the load to begin", server)

    assert {front.get("/v2/models/slow").error for front in fronts} == {"Request for unknown model: 'slow' is loading"}

    notes_file(repository, "slow").with_name("slow.notes.go").touch()
    assert loading.result(60) == (200, "")
    assert {front.get("/v2/models/slow").status for front in fronts} == {200}
    assert unload(server, "slow") == 200


def test_a_server_whose_models_process_ends_is_not_ready_until_it_is_back(
    server: RunningServer, repository: Path, fronts: Any, clients: Any
):
    def is_ready() -> set[bool]:
        return {front.get("/v2/health/ready").status == 200 for front in fronts} | {
            client.is_server_ready() for client in clients
        }

    add_python(repository, "back", methods=WAITS)
    may_go_on = notes_file(repository, "back").with_name("back.notes.go")
    may_go_on.touch()
    assert load(server, "back") == (200, "")
    assert is_ready() == {True}
    may_go_on.unlink()
    for worker in workers(server, "back"):
        worker.kill()
    wait_until(lambda: is_ready() == {False}, "the end to be seen", server)
    may_go_on.touch()
    wait_until(lambda: is_ready() == {True}, "the process to be back", server)
    assert unload(server, "back") == 200


def test_a_load_that_fails_has_its_reason_on_every_connection(server: RunningServer, repository: Path, fronts: Any):
    add_identity(repository, "wrong", extra="nonsense: 1")
    status, text = load(server, "wrong")
    assert status == 500
    assert "nonsense" in text
    for front in fronts[:: len(fronts) - 1]:
        answer = front.post("/v2/repository/models/wrong/load")
        assert (answer.status, answer.error) == (status, text)
    assert infer(fronts[0], "steady") == 200


def test_parameters_of_a_load_are_refused_by_their_name(fronts: Any, clients: Any):
    for front in (fronts[0], fronts[-1]):
        answer = front.post("/v2/repository/models/steady/load", '{"parameters": {"config": "{}"}}')
        assert "load parameter 'config' is not supported yet" in answer.error
        assert infer(front, "steady") == 200
    for client in clients:
        # The map of a message has no order, and the first parameter is named.
        with pytest.raises(InferenceServerException, match=r"load parameter '(config|file:1/m)' is not supported yet"):
            client.load_model("steady", config="{}", files={"file:1/m": bytes(range(256))})


def test_concurrent_loads_over_all_connections_all_succeed(server: RunningServer, repository: Path, fronts: Any):
    for number in range(len(fronts)):
        add_identity(repository, f"one{number}")
    calls = [
        in_background(lambda number=number, front=front: front.post(f"/v2/repository/models/one{number}/load").status)
        for number, front in enumerate(fronts)
    ]
    assert {call.result(60) for call in calls} == {200}
    states = index(server)
    assert {states[f"one{number}", "1"][0] for number in range(len(fronts))} == {"READY"}
    for number, front in enumerate(reversed(fronts)):
        assert infer(front, f"one{number}") == 200
