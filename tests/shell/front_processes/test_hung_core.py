"""A core that is stopped by a signal: what its front ends still answer, and what goes on when it runs again."""

import signal
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from support.background import in_background
from support.calls import ONES_JSON
from support.front_ends import TWO, Connection, connections_to_each, grpc_client, grpc_clients_of_each
from support.models import add_identity
from support.server import Answer, RunningServer, serving, wait_until

LIMIT_S = 1
WIDTH = 3000
"""As large as requests that travel in the channel are: in shared memory are larger ones."""
MANY = 100
"""So many of them fill the channel."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    add_identity(repository, "quick")
    add_identity(repository, "wide", dims=str(WIDTH), max_batch_size=0)
    arguments = [TWO, f"--hang-timeout-secs={LIMIT_S}", "--model-repository", repository]
    with serving(tmp_path_factory.mktemp("log"), arguments) as running:
        yield running


@pytest.fixture
def fronts(server: RunningServer) -> Iterator[list[Connection]]:
    """Two connections or more to each front end. Both know the model 'quick'."""
    with connections_to_each(server, each=2) as found:
        for front in found:
            assert front.post("/v2/models/quick/infer", ONES_JSON).status == 200
        yield found


@pytest.fixture
def stopped(server: RunningServer, fronts: list[Connection]) -> Iterator[RunningServer]:
    """The server with a core that does not run."""
    server.process.send_signal(signal.SIGSTOP)
    yield server
    go_on(server)


def go_on(server: RunningServer) -> None:
    server.process.send_signal(signal.SIGCONT)


def of_each(fronts: list[Connection]) -> Iterator[tuple[Connection, Connection]]:
    """Two connections to each front end."""
    for pid in dict.fromkeys(front.pid for front in fronts):
        first, second, *_ = (front for front in fronts if front.pid == pid)
        yield first, second


def statuses(fronts: list[Connection], path: str) -> set[int]:
    return {front.get(path).status for front in fronts}


def test_it_is_not_live_within_the_limit_until_it_runs_again(stopped: RunningServer, fronts: list[Connection]):
    wait_until(lambda: statuses(fronts, "/v2/health/live") == {400}, "the hang to be seen", limit_s=LIMIT_S + 10)
    assert statuses(fronts, "/v2/health/ready") == {400}
    assert statuses(fronts, "/v2") == {200}
    with grpc_client(stopped.grpc_url) as client:
        assert (client.is_server_live(), client.is_server_ready()) == (False, False)

    go_on(stopped)

    for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/quick"):
        wait_until(lambda path=path: statuses(fronts, path) == {200}, f"200 at {path}", stopped)


def test_who_waits_for_it_holds_up_no_other_of_the_front_end(stopped: RunningServer, fronts: list[Connection]):
    waiting: list[Future[Answer]] = []
    for first, second in of_each(fronts):
        waiting.append(in_background(lambda first=first: first.get("/v2/models/none")))
        assert (second.get("/v2").status, second.get("/v2/models/quick").status) == (200, 200)
        waiting.append(in_background(lambda second=second: second.post("/v2/models/quick/infer", ONES_JSON)))
    assert not any(each.done() for each in waiting)

    go_on(stopped)

    assert [each.result(30).status for each in waiting] == [404, 200] * 2


def tensor(value: int) -> grpcclient.InferInput:
    made = grpcclient.InferInput("IN", [WIDTH], "FP32")
    made.set_data_from_numpy(np.full(WIDTH, value, np.float32))
    return made


def test_more_requests_than_the_channel_takes_hold_up_nothing(server: RunningServer, fronts: list[Connection]):
    with grpc_clients_of_each(server) as clients:
        for client in clients:
            client.infer("wide", [tensor(0)])
        server.process.send_signal(signal.SIGSTOP)
        try:
            got: list[tuple[Any, Any]] = []
            for client in clients:
                for number in range(MANY):
                    client.async_infer("wide", [tensor(number)], lambda result, error: got.append((result, error)))
            # Behind them on the same connections.
            assert [client.get_server_metadata(client_timeout=30).name for client in clients] == ["triton"] * len(
                clients
            )
            assert statuses(fronts, "/v2") == {200}
            assert got == []
        finally:
            go_on(server)
        wait_until(lambda: len(got) == MANY * len(clients), "all answers", server)
    assert [error for _, error in got if error is not None] == []
    values = sorted(result.as_numpy("OUT")[-1] for result, _ in got)
    assert values == sorted(list(range(MANY)) * len(clients))
