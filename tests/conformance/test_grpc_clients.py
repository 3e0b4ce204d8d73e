"""gRPC clients of several languages and libraries against the running server: the same calls and results with each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.balancer import Balancer
from support.calls import canceled
from support.grpc_models import write_models
from support.grpc_plans import Answer, Client, Plan, run
from support.served import notes_file
from support.server import RunningServer, serving, wait_until

MIB = 1 << 20

# Without fixtures: the first run builds the clients.
pytestmark = pytest.mark.timeout(120, func_only=True)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repository") / "models"
    path.mkdir()
    write_models(path)
    return path


@pytest.fixture(scope="module")
def server(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ["--model-repository", models, "--grpc-header-forward-pattern=x-.*"]
    with serving(tmp_path_factory.mktemp("log"), flags) as running:
        yield running
    assert "unexpected error" not in running.log


def notes(models: Path, name: str) -> list[str]:
    """What a model has noted."""
    path = notes_file(models, name)
    return path.read_text().splitlines() if path.exists() else []


def test_a_unary_call(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url))
    assert (result.code, result.answers) == ("OK", [Answer("0", equal=True)])


def test_an_error_has_its_code_and_its_text(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, model="näpe"))
    assert (result.code, result.message) == ("NOT_FOUND", "Request for unknown model: 'näpe' is not found")


def test_a_stream_answers_in_order_and_ends_when_the_client_has_sent_all(
    grpc_client: Client, server: RunningServer
) -> None:
    result = run(grpc_client, Plan(server.grpc_url, "stream", requests=20))
    assert (result.code, result.message) == ("OK", "")
    assert [(each.id, each.equal, each.error) for each in result.answers] == [(str(n), True, "") for n in range(20)]


def test_a_decoupled_model_answers_each_request_three_times(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, "stream", "repeat", requests=4, parameters={"count": 3}))
    assert result.code == "OK"
    for number in range(4):
        own = [each for each in result.answers if each.id == str(number)]
        assert [(each.equal, each.parameters["number"]) for each in own] == [(True, 0), (True, 1), (True, 2)]
    assert len(result.answers) == 12


def test_the_error_of_a_request_is_an_answer_of_its_stream(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, "stream", "nope", requests=2))
    assert result.code == "OK"
    assert [each.error for each in result.answers] == ["Request for unknown model: 'nope' is not found"] * 2


def test_a_cancelled_call_is_cancelled_in_its_model(grpc_client: Client, server: RunningServer, models: Path) -> None:
    before, lines = canceled(server, "patient"), notes(models, "patient")
    running = grpc_client.start(Plan(server.grpc_url, model="patient", cancel="line"))
    wait_until(lambda: notes(models, "patient") == [*lines, "begun"], "the execution", server)
    running.tell()
    assert running.result().code == "CANCELLED"
    wait_until(lambda: notes(models, "patient") == [*lines, "begun", "cancelled"], "the model to see it", server)
    wait_until(lambda: canceled(server, "patient") == before + 1, "the metric", server)


def test_a_deadline_cancels_the_request_in_its_model(grpc_client: Client, server: RunningServer, models: Path) -> None:
    before, lines = canceled(server, "patient"), notes(models, "patient")
    result = run(grpc_client, Plan(server.grpc_url, model="patient", deadline_ms=500))
    assert result.code == "DEADLINE_EXCEEDED"
    wait_until(lambda: notes(models, "patient") == [*lines, "begun", "cancelled"], "the model to see it", server)
    wait_until(lambda: canceled(server, "patient") == before + 1, "the metric", server)


def test_a_cancelled_stream_is_cancelled_in_its_model(grpc_client: Client, server: RunningServer, models: Path) -> None:
    lines = notes(models, "endless")
    result = run(grpc_client, Plan(server.grpc_url, "stream", "endless", cancel="first"))
    assert (result.code, result.answers[0].equal) == ("CANCELLED", True)
    wait_until(lambda: notes(models, "endless") == [*lines, "cancelled"], "the model to see it", server)


def test_a_streams_deadline_cancels_its_requests(grpc_client: Client, server: RunningServer, models: Path) -> None:
    lines = notes(models, "endless")
    result = run(grpc_client, Plan(server.grpc_url, "stream", "endless", deadline_ms=500))
    assert (result.code, result.answers[0].equal) == ("DEADLINE_EXCEEDED", True)
    wait_until(lambda: notes(models, "endless") == [*lines, "cancelled"], "the model to see it", server)


def test_metadata_become_parameters_except_binary_ones(grpc_client: Client, server: RunningServer) -> None:
    text = {"x-one": "a b", "x-two": "~!", "other": "1", "x-" + "n" * 60: "v" * 4000}
    # Lengths whose base64 has no padding, one sign, and two.
    binary = {"x-empty-bin": b"", "x-a-bin": b"\0\xff,", "x-b-bin": b"\0\xff,,", "x-c-bin": bytes(range(256))}
    plan = Plan(server.grpc_url, model="mirror", metadata=text, binary_metadata=binary, parameters={"mine": 7})
    result = run(grpc_client, plan)
    assert (result.code, result.message) == ("OK", "")
    expected = {name: value for name, value in text.items() if name.startswith("x-")}
    assert result.answers == [Answer("0", equal=True, parameters={**expected, "mine": 7})]


def test_forty_megabytes_both_ways(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, elements=10 * MIB))
    assert (result.code, result.message) == ("OK", "")
    assert result.answers == [Answer("0", equal=True)]


def test_large_messages_of_a_stream(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, "stream", elements=MIB, requests=6))
    assert (result.code, result.answers) == (
        "OK",
        [Answer(str(number), equal=True, parameters={"triton_final_response": True}) for number in range(6)],
    )


def test_a_message_over_the_limit_is_refused(grpc_client: Client, server: RunningServer) -> None:
    result = run(grpc_client, Plan(server.grpc_url, elements=17 * MIB))
    assert (result.code, "--grpc-max-input-size" in result.message) == ("RESOURCE_EXHAUSTED", True)


@pytest.mark.parametrize("action", ["infer", "stream"])
def test_compressed_requests(grpc_client: Client, server: RunningServer, action: str) -> None:
    for algorithm in grpc_client.compressions:
        with Balancer([server.grpc_port]) as balancer:
            result = run(grpc_client, Plan(balancer.url, action, elements=MIB, compression=algorithm))
            assert (result.code, [each.equal for each in result.answers]) == ("OK", [True]), algorithm
            assert balancer.upstream_bytes < MIB < 4 * MIB <= balancer.downstream_bytes, algorithm
