"""The connections of gRPC clients of several languages and libraries: compressed answers, TLS, pings, age, stop and start."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import support.server
from support.balancer import Balancer
from support.calls import metric
from support.grpc_clients import PYTHON_CLIENTS
from support.grpc_plans import Client, Plan, run
from support.models import add_identity, delay
from support.ports import free_port
from support.probe import GRPC_CLIENTS
from support.server import RunningServer, Start, serving, wait_until

PKI = Path(support.server.__file__).parent / "pki"
TLS = ("--grpc-use-ssl=true", f"--grpc-server-cert={PKI / 'server.pem'}", f"--grpc-server-key={PKI / 'server.key'}")
MUTUAL_TLS = (*TLS, "--grpc-use-ssl-mutual=true", f"--grpc-root-cert={PKI / 'root.pem'}")
MIB = 1 << 20
ONE_OF_PYTHON = [
    "grpcio",
    *(pytest.param(name, marks=pytest.mark.large) for name in PYTHON_CLIENTS if name != "grpcio"),
]
"""They share the code that sends pings."""

# Without fixtures: the first run builds the clients.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    add_identity(path, "ident", dims="-1")
    for name in GRPC_CLIENTS:
        add_identity(path, f"ident_{name}", dims="-1")
    add_identity(path, "pause", dims="-1", extra=delay(1500))
    add_identity(path, "long_pause", dims="-1", extra=delay(12_500))
    return path


@pytest.fixture(scope="module")
def pinging(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It pings ten times a second, permits as many pings, and closes connections whose client does not answer."""
    yield from served(
        models,
        tmp_path_factory,
        "--grpc-infer-response-compression-level=low",
        "--grpc-keepalive-time=100",
        "--grpc-keepalive-timeout=1000",
        "--grpc-keepalive-permit-without-calls=true",
        "--grpc-http2-min-recv-ping-interval-without-data=50",
    )


@pytest.fixture(scope="module")
def replacing(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """It closes connections that are older than a moment."""
    age = "--grpc-max-connection-age=75"
    yield from served(models, tmp_path_factory, age, "--grpc-infer-response-compression-level=high")


@pytest.fixture(scope="module", params=["low", "high"])
def compressing(request: pytest.FixtureRequest, pinging: RunningServer, replacing: RunningServer) -> RunningServer:
    """A server of each level; both servers are used by other tests too, because each start takes time."""
    return pinging if request.param == "low" else replacing


@pytest.fixture(scope="module")
def encrypted(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With TLS; and it closes the connection of a client at the third ping without data."""
    yield from served(models, tmp_path_factory, *TLS, "--grpc-http2-max-ping-strikes=1")


@pytest.fixture(scope="module")
def mutual(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    yield from served(models, tmp_path_factory, *MUTUAL_TLS)


@pytest.fixture(scope="module")
def unix(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server on a unix socket."""
    # The number at the end is read as the port.
    path = tmp_path_factory.mktemp("s") / "grpc:1"
    for _ in served(models, tmp_path_factory, f"--grpc-address=unix:{path}"):
        yield f"unix:{path}"
    assert not path.exists()


def served(models: Path, tmp_path_factory: pytest.TempPathFactory, *flags: str) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("log"), ["--model-repository", models, *flags]) as running:
        yield running
    assert "unexpected error" not in running.log


@pytest.mark.parametrize("action", ["infer", "stream"])
def test_compressed_answers(grpc_client: Client, compressing: RunningServer, action: str) -> None:
    with Balancer([compressing.grpc_port]) as balancer:
        result = run(grpc_client, Plan(balancer.url, action, elements=MIB))
    assert (result.code, [each.equal for each in result.answers]) == ("OK", [True])
    assert balancer.downstream_bytes < MIB < 4 * MIB <= balancer.upstream_bytes


def test_compressed_requests_and_answers(grpc_client: Client, compressing: RunningServer) -> None:
    for algorithm in grpc_client.compressions:
        with Balancer([compressing.grpc_port]) as balancer:
            plan = Plan(balancer.url, "stream", elements=MIB, requests=3, compression=algorithm)
            result = run(grpc_client, plan)
            assert (result.code, [each.equal for each in result.answers]) == ("OK", [True] * 3), algorithm
            assert max(balancer.upstream_bytes, balancer.downstream_bytes) < MIB, algorithm


@pytest.mark.parametrize("action", ["infer", "stream"])
def test_tls(grpc_client: Client, encrypted: RunningServer, action: str) -> None:
    address = f"localhost:{encrypted.grpc_port}"
    result = run(grpc_client, Plan(address, action, elements=4 * MIB, root=str(PKI / "root.pem")))
    assert (result.code, [each.equal for each in result.answers]) == ("OK", [True])


def test_a_client_with_another_root_does_not_call(grpc_client: Client, encrypted: RunningServer) -> None:
    result = run(
        grpc_client, Plan(f"localhost:{encrypted.grpc_port}", root=str(PKI / "stranger_root.pem"), deadline_ms=10_000)
    )
    assert result.code == "UNAVAILABLE"


def test_mutual_tls(grpc_client: Client, mutual: RunningServer) -> None:
    plan = {"target": f"localhost:{mutual.grpc_port}", "root": str(PKI / "root.pem"), "deadline_ms": 10_000}
    own = Plan(**plan, certificate=str(PKI / "client.pem"), key=str(PKI / "client.key"))
    strangers = Plan(**plan, certificate=str(PKI / "stranger.pem"), key=str(PKI / "stranger.key"))
    assert [run(grpc_client, each).code for each in (own, strangers, Plan(**plan))] == [
        "OK",
        "UNAVAILABLE",
        "UNAVAILABLE",
    ]


def test_clients_answer_the_servers_pings(grpc_client: Client, pinging: RunningServer) -> None:
    assert run(grpc_client, Plan(pinging.grpc_url, model="pause")).code == "OK"


@pytest.mark.parametrize("name", ONE_OF_PYTHON)
def test_the_server_answers_pings(name: str, pinging: RunningServer) -> None:
    """A client that gets no answer within a second gives up."""
    assert run(PYTHON_CLIENTS[name], Plan(pinging.grpc_url, model="pause", keepalive_ms=100)).code == "OK"


@pytest.mark.interop
def test_the_server_answers_pings_of_clients_that_send_one_in_ten_seconds(
    grpc_client: Client, pinging: RunningServer
) -> None:
    """grpc-go and grpc-java send no more."""
    assert run(grpc_client, Plan(pinging.grpc_url, model="long_pause", keepalive_ms=10_000)).code == "OK"


@pytest.mark.parametrize("name", ONE_OF_PYTHON)
def test_too_many_pings_end_the_connection(name: str, encrypted: RunningServer) -> None:
    """The call fails soon, although a client does not close a connection over TLS while it waits for an answer."""
    # grpcio pings at most once a second.
    plan = Plan(f"localhost:{encrypted.grpc_port}", model="long_pause", root=str(PKI / "root.pem"), keepalive_ms=100)
    began_at = time.monotonic()
    result = run(PYTHON_CLIENTS[name], plan)
    assert time.monotonic() - began_at < 10  # the goal is 4 s; the model would answer after 12.5 s
    assert (result.code, "too_many_pings" in result.message) == ("UNAVAILABLE", True), result


def test_no_call_is_lost_when_old_connections_are_closed(grpc_client: Client, replacing: RunningServer) -> None:
    """The connections are closed while the client calls without pause."""
    with Balancer([replacing.grpc_port]) as balancer:
        running = grpc_client.start(Plan(balancer.url, "repeat"))
        wait_until(lambda: balancer.connections >= 8, "connections to be replaced", replacing)
        running.tell()
        result = running.result()
    assert set(result.codes) == {"OK"}, result
    assert result.codes["OK"] > 8


def test_large_answers_end_before_an_old_connection_is_closed(grpc_client: Client, replacing: RunningServer) -> None:
    # grpc-js repeats a call that the connection's end refused only if it has at most a megabyte.
    with Balancer([replacing.grpc_port]) as balancer:
        running = grpc_client.start(Plan(balancer.url, "repeat", elements=200_000))
        wait_until(lambda: balancer.connections >= 4, "connections to be replaced", replacing)
        running.tell()
        result = running.result()
    assert set(result.codes) == {"OK"}, result


def test_clients_that_call_without_pause_through_a_stop_and_a_start(
    grpc_clients: Mapping[str, Client], start: Start, models: Path
) -> None:
    """They get answers or UNAVAILABLE, which a client may retry; a bare CANCELLED would look like its own doing.

    A server listens before it has loaded its models, so that some calls may get NOT_FOUND.
    """
    flags = ["--model-repository", models, f"--grpc-port={free_port()}"]
    first = start(*flags)
    callers = {f"ident_{name}": client for name, client in grpc_clients.items()}
    running = {model: client.start(Plan(first.grpc_url, "repeat", model)) for model, client in callers.items()}

    def all_call(server: RunningServer) -> None:
        calls = "nv_inference_request_success"
        wait_until(lambda: all(metric(server, calls, model) > 50 for model in callers), "calls of each client", server)

    all_call(first)
    assert first.stop() == 0, first.log
    second = start(*flags)
    all_call(second)
    for each in running.values():
        each.tell()
    results = {model: each.result() for model, each in running.items()}
    assert {frozenset(each.codes) - {"NOT_FOUND"} for each in results.values()} == {frozenset({"OK", "UNAVAILABLE"})}, (
        results
    )


def test_a_unix_socket(grpc_client: Client, unix: str) -> None:
    assert run(grpc_client, Plan(unix)).code == "OK"
    result = run(grpc_client, Plan(unix, "stream", elements=MIB, requests=3))
    assert (result.code, [each.equal for each in result.answers]) == ("OK", [True] * 3)
