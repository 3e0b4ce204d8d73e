"""Objects with more pods than anybody wants: the operator reads a limited number of them."""

import asyncio
from typing import Any

from halimede_operator.cluster.cache import entry_of
from halimede_operator.cluster.kinds import PODS
from halimede_operator.core.snapshot import Object
from support.operator_harness import DIGITS, PLATFORM, Harness, create_pod, with_harness

MOST = 2 * PLATFORM.max_replicas


async def with_pods(harness: Harness, count: int, phase: str) -> None:
    """A model whose pods are in the cache: one that waits, and `count` others."""
    await harness.sync()
    create_pod(harness, "digits-1-aaaaa")
    harness.relist()
    (first,) = [value for (plural, _, _), value in harness.api.objects.items() if plural == "pods"]
    for number in range(count):
        metadata = {"name": f"digits-1-{number}", "uid": f"pod-{number}", "resourceVersion": str(10_000 + number)}
        value = {**first, "metadata": {**first["metadata"], **metadata}, "status": {"phase": phase}}
        harness.cache.learn(entry_of(PODS, value), listed=True)


def types_of(model: dict[str, Any]) -> dict[str, Object]:
    return {condition["type"]: condition for condition in model["status"]["conditions"]}


@with_harness
async def test_the_status_says_that_it_is_not_about_all_pods(harness: Harness):
    await with_pods(harness, MOST + 100, "Pending")
    await harness.reconcile(DIGITS)
    status = harness.digits()["status"]
    assert status["replicas"] == MOST
    unread = types_of(harness.digits())["PodsUnread"]
    assert unread["reason"] == "TooManyPods"
    assert f"more pods than the {MOST} that the operator reads" in unread["message"]


@with_harness
async def test_pods_that_have_ended_hide_no_others(harness: Harness):
    """A pod that a kubelet refuses stays; Kubernetes deletes these only when there are 12,500."""
    await with_pods(harness, MOST + 100, "Failed")
    await harness.reconcile(DIGITS)
    assert harness.digits()["status"]["replicas"] == 1
    assert "PodsUnread" not in types_of(harness.digits())


@with_harness
async def test_a_reconcile_lets_others_go_in_between(harness: Harness):
    await with_pods(harness, 10, "Pending")
    await harness.reconcile(DIGITS)
    turns = 0

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await harness.reconcile(DIGITS)
    other.cancel()
    # Nothing changed, so it waited for no answer.
    assert turns == 2
