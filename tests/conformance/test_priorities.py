"""Priorities, a batching strategy and a delayed scheduler, as clients of the running server see them."""

from collections.abc import Iterator

import pytest

from support.background import in_background
from support.calls import ONES, executing, metric, pending, unload
from support.models import ONE, add_identity, delay
from support.plugin import install_backend
from support.server import Answer, RunningServer, start_server, wait_until
from support.strategies import STRATEGY_GROUP, TENANTS
from support.unequal_models import PROCESS

LEVELS = (
    "dynamic_batching { preferred_batch_size: [ 1 ] priority_levels: 3 default_priority_level: 2 "
    "priority_queue_policy { key: 2 value { max_queue_size: 3 } } "
    "priority_queue_policy { key: 3 value { default_timeout_microseconds: 100000 } } }"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "levels", extra=f"{ONE} {delay(500)} {LEVELS}")
    add_identity(models, "levels_process", extra=f"{ONE} {delay(500)} {LEVELS} {PROCESS}")
    strategy = 'parameters { key: "BATCHING_STRATEGY" value { string_value: "tenants" } }'
    add_identity(models, "tenants", extra=f"{ONE} {delay(500)} dynamic_batching {{ }} {strategy}")
    environment = install_backend(tmp_path_factory.mktemp("site"), "tenants", TENANTS, "Tenants", group=STRATEGY_GROUP)
    running = start_server(tmp_path_factory.mktemp("log"), ["--model-repository", models], environment=environment)
    yield running
    running.stop()


def infer(server: RunningServer, model: str, **parameters: object) -> Answer:
    return server.post(f"/v2/models/{model}/infer", {**ONES, "parameters": parameters})


def batch_sizes(server: RunningServer, model: str) -> dict[int, int]:
    stats = server.get(f"/v2/models/{model}/stats").json["model_stats"][0]
    return {batch["batch_size"]: batch["compute_infer"]["count"] for batch in stats["batch_stats"]}


@pytest.mark.parametrize("model", ["levels", "levels_process"])
def test_each_request_waits_in_the_level_of_its_priority(server: RunningServer, model: str) -> None:
    ended: list[int] = []

    def call(priority: int) -> Answer:
        answer = infer(server, model, priority=priority)
        ended.append(priority)
        return answer

    calls = [in_background(lambda: call(0))]
    wait_until(lambda: executing(server, model) == 1, "the first request to run", server)
    # There is no level 9, so they are in the default level.
    calls += [in_background(lambda: call(9)) for _ in range(3)]
    wait_until(lambda: pending(server, model) == 3, "level 2 to be full", server)
    refused = infer(server, model, priority=2)
    assert (refused.status, refused.error) == (503, "[request id: <id_unknown>] Exceeds maximum queue size")
    calls.append(in_background(lambda: call(1)))
    late = infer(server, model, priority=3)
    assert (late.status, late.error) == (503, "Request timeout expired")
    assert {each.result(30).status for each in calls} == {200}
    assert ended == [0, 1, 9, 9, 9]
    assert metric(server, "nv_inference_request_failure", model, 'reason="REJECTED",') == 2


def test_a_strategy_decides_who_shares_a_batch(server: RunningServer) -> None:
    calls = [in_background(lambda: infer(server, "tenants", tenant="a"))]
    wait_until(lambda: executing(server, "tenants") == 1, "the first request to run", server)
    for count, tenant in enumerate(("a", "a", "b", "bad"), 1):
        calls.append(in_background(lambda tenant=tenant: infer(server, "tenants", tenant=tenant)))
        wait_until(lambda count=count: pending(server, "tenants") == count, "the request to be queued", server)

    answers = [call.result(30) for call in calls]
    assert [answer.status for answer in answers] == [200, 200, 200, 500, 500]
    assert answers[3].error == "batching strategy 'Tenants' failed in 'include': ValueError: no such tenant"
    assert batch_sizes(server, "tenants") == {1: 1, 2: 1}
    assert infer(server, "tenants", tenant="b").status == 200


@pytest.fixture(scope="module")
def delaying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its schedulers wait for four requests. Each test has a model."""
    models = tmp_path_factory.mktemp("delaying")
    for name in ("waits", "ends"):
        add_identity(models, name, extra=f"{ONE} dynamic_batching {{ }}")
    arguments = ["--model-repository", models, "--model-control-mode=explicit", "--load-model=*"]
    environment = {"TRITONSERVER_DELAY_SCHEDULER": "4"}
    running = start_server(tmp_path_factory.mktemp("log"), arguments, environment=environment)
    yield running
    running.stop()


def test_a_delayed_scheduler_waits_for_its_requests_once(delaying: RunningServer) -> None:
    calls = [in_background(lambda: infer(delaying, "waits")) for _ in range(3)]
    wait_until(lambda: pending(delaying, "waits") == 3, "three requests to wait", delaying)
    assert executing(delaying, "waits") == 0
    calls.append(in_background(lambda: infer(delaying, "waits")))
    assert {call.result(30).status for call in calls} == {200}
    assert batch_sizes(delaying, "waits") == {4: 1}
    assert infer(delaying, "waits").status == 200


def test_an_unloaded_model_does_not_wait_for_its_first_requests(delaying: RunningServer) -> None:
    call = in_background(lambda: infer(delaying, "ends"))
    wait_until(lambda: pending(delaying, "ends") == 1, "the request to wait", delaying)
    assert unload(delaying, "ends") == 200
    assert call.result(30).status == 200
