"""Clients without retries during updates: they lose nothing, and little where a pod or a node is lost."""

import json
import threading

import pytest

from cluster.faults import Faults
from cluster.installed import NAMESPACE, Platform, Tenant
from cluster.models import QUESTION, START_LIMIT_S, apply, model
from cluster.spaces import eventually
from support.steady import CLIENTS, PAUSE_S, SteadyClients

pytestmark = pytest.mark.usefixtures("second_node")

NAME = "twice"
WITHDRAWN_S = 2.0
"""By then no Service leads to a container that was killed."""
CALLERS = 2 * (CLIENTS + 1)
"""Clients of both protocols, those with fresh connections among them."""


@pytest.mark.large
@pytest.mark.timeout(600, func_only=True)
def test_clients_lose_nothing_in_three_updates(tenant: Tenant, scaled: str) -> None:
    clients_lose_nothing(tenant, scaled, updates=3)


@pytest.mark.load
@pytest.mark.timeout(3000, func_only=True)
def test_clients_lose_nothing_in_twenty_updates(tenant: Tenant, scaled: str) -> None:
    clients_lose_nothing(tenant, scaled, updates=20)


@pytest.mark.load
@pytest.mark.timeout(900, func_only=True)
def test_the_operator_may_die_in_an_update(platform: Platform, tenant: Tenant, faults: Faults, scaled: str) -> None:
    clients = serve(tenant, scaled)
    with clients:
        before = begin_update(tenant, 1)
        [operator] = tenant.cluster.kubectl(
            "get", "pods", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/component=operator", "-o", "name"
        ).split()
        faults.kill(NAMESPACE, operator.removeprefix("pod/"))
        wait_until_replaced(tenant, before)
    assert clients.lost == []
    tenant.wait_ready(f"im/{NAME}", START_LIMIT_S)


@pytest.mark.load
@pytest.mark.timeout(900, func_only=True)
def test_a_pod_that_dies_in_an_update_costs_only_a_moment(tenant: Tenant, faults: Faults, scaled: str) -> None:
    clients = serve(tenant, scaled)
    with clients:
        before = begin_update(tenant, 1)
        faults.kill(tenant.namespace, min(before).removeprefix("pod/"), "server")
        wait_until_replaced(tenant, before)
        assert settles(clients)
    # Of each client the call in flight, and those of the time until the kubelet sees it and the endpoint is withdrawn.
    assert len(clients.lost) <= WITHDRAWN_S / PAUSE_S * CALLERS, clients.lost


@pytest.mark.load
@pytest.mark.timeout(900, func_only=True)
def test_an_update_ends_although_a_node_is_lost(
    platform: Platform, tenant: Tenant, faults: Faults, scaled: str
) -> None:
    clients = serve(tenant, scaled)
    home = tenant.cluster.kubectl(
        "get", "pods", f"--namespace={NAMESPACE}", "--selector=app.kubernetes.io/component=operator",
        "-o", "jsonpath={.items[0].spec.nodeName}",
    )  # fmt: skip
    lost = "node-2" if home == "node-1" else "node-1"
    with clients:
        begin_update(tenant, 1)
        faults.cut_off(lost)

        def are_on_the_other_node() -> bool:
            pods = [pod for pod in tenant.get("pods")["items"] if pod["spec"].get("nodeName") != lost]
            return len(pods) >= 2 and tenant.get(f"im/{NAME}")["status"]["readyReplicas"] == 2

        eventually(are_on_the_other_node, "both replicas on the node that is left", 400)
        assert settles(clients)
    faults.rejoin(lost)
    assert tenant.infer(NAME, QUESTION) == {"OUT": [2, 4, 6, 8]}


def clients_lose_nothing(tenant: Tenant, scaled: str, updates: int) -> None:
    """All pods are replaced several times, and at the end a node is drained."""
    with serve(tenant, scaled) as clients:
        for number in range(updates):
            wait_until_replaced(tenant, begin_update(tenant, number))
            assert clients.lost == []
        last = tenant.names("pods")
        node = tenant.get(min(last))["spec"]["nodeName"]
        there = {pod for pod in last if tenant.get(pod)["spec"]["nodeName"] == node}
        selected = (f"--pod-selector=halimede.dev/model={NAME}", "--delete-emptydir-data", "--timeout=100s")
        try:
            tenant.cluster.kubectl("drain", node, *selected, limit_s=110)
            wait_until_replaced(tenant, there)
        finally:
            tenant.cluster.kubectl("uncordon", node)
    assert clients.lost == []
    assert min(clients.answered.values()) > 500


def serve(tenant: Tenant, scaled: str) -> SteadyClients:
    """Two replicas that serve, and clients that call them from the beginning of the `with` on."""
    apply(tenant, model(NAME, scaled, replicas=2))
    tenant.wait_ready(f"im/{NAME}", START_LIMIT_S)
    wait_until_replaced(tenant, set())
    assert tenant.infer(NAME, QUESTION) == {"OUT": [2, 4, 6, 8]}
    addresses = (tenant.cluster.forward(f"service/{NAME}", port, tenant.namespace) for port in (8001, 8000))
    return SteadyClients(*addresses, NAME, 4, with_fresh=True)


def begin_update(tenant: Tenant, number: int) -> set[str]:
    """Change something that needs new pods. Returns the pods before."""
    before = tenant.names("pods")
    changed = {"spec": {"serving": {"drainTimeout": f"{20 + number}s"}}}
    tenant.kubectl("patch", f"im/{NAME}", "--type=merge", f"--patch={json.dumps(changed)}")
    return before


def wait_until_replaced(tenant: Tenant, gone: set[str]) -> None:
    def is_whole() -> bool:
        pods = tenant.names("pods")
        return len(pods) == 2 and not pods & gone and tenant.get(f"im/{NAME}")["status"]["readyReplicas"] == 2

    eventually(is_whole, "two replicas", START_LIMIT_S)


def settles(clients: SteadyClients) -> bool:
    """Whether the clients lose nothing more within ten seconds, at last."""
    pause = threading.Event()
    for _ in range(6):
        before = len(clients.lost)
        pause.wait(10)
        if len(clients.lost) == before:
            return True
    return False
