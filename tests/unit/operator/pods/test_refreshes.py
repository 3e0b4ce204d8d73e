"""Pods whose kubelet is made to read Secrets and ConfigMaps again, and how often."""

import pytest

from halimede_operator.core.pods.refreshes import (
    MOST_REFRESHED,
    REFRESH_S,
    REFRESHED,
    REFRESHED_FOR_S,
    failing_for_its_volumes,
    to_refresh,
)
from halimede_operator.core.snapshot import Object
from support.operator_pods import (
    container,
    ended,
    fetch_failed,
    fetching,
    leaving,
    loading,
    pod,
    second,
    serving,
    waiting,
)

CONFIG_ERROR = waiting("CreateContainerConfigError", 'secret "words" not found')
UNTRUSTED = "https://store: its certificate is not trusted; a private authority's goes into a CA bundle"
REPAIRED_BY_A_SECRET: dict[str, Object] = {
    "denied": fetch_failed(10, "access was denied"),
    "denied, and tried again": fetching(last=ended(10, "access was denied")),
    "untrusted certificate": fetching(last=ended(15, UNTRUSTED)),
    "no certificate": fetch_failed(15, "https://store: its CA bundle holds no certificate"),
    "variable of fetch": pod(fetch=container("fetch", CONFIG_ERROR)),
    "variable of server": loading() | {"status": pod(server=container("server", CONFIG_ERROR))["status"]},
}
OTHERS: dict[str, Object] = {
    "unreachable": fetching(last=ended(15, "connection refused")),
    "not found": fetch_failed(11, "it does not exist"),
    "first fetch": fetching(),
    "loading after a failed fetch": loading(),
    "serving": serving(),
    "waits for its restart": pod(fetch=container("fetch", waiting("CrashLoopBackOff"), ended(10, "access was denied"))),
    "ends": leaving(fetch_failed(10, "access was denied")),
}


@pytest.mark.parametrize("kind", REPAIRED_BY_A_SECRET)
def test_pods_that_a_secret_or_config_map_may_repair_are_refreshed(kind: str):
    value = REPAIRED_BY_A_SECRET[kind]
    assert failing_for_its_volumes([value], second(20)) == [value]


@pytest.mark.parametrize("kind", OTHERS)
def test_other_pods_are_not_refreshed(kind: str):
    assert failing_for_its_volumes([OTHERS[kind]], second(20)) == []


@pytest.mark.parametrize("state", [ended(10, "denied", finished=0), CONFIG_ERROR], ids=["fetch", "variable"])
def test_refreshes_of_a_failure_are_few_and_end(state: Object):
    value = pod(fetch=container("fetch", state))
    written = []
    for now in range(3600):
        for each in to_refresh(failing_for_its_volumes([value], second(now)), second(now)):
            each["metadata"]["annotations"] = {REFRESHED: second(now)}
            written.append(now)
    assert written == list(range(int(REFRESH_S), int(REFRESHED_FOR_S), int(REFRESH_S)))
    assert len(written) < 75


def test_many_pods_take_turns():
    pods = [fetch_failed(10, "access was denied", f"bert-{number}") for number in range(MOST_REFRESHED + 8)]
    first = to_refresh(pods, second(20))
    for each in first:
        each["metadata"]["annotations"] = {REFRESHED: second(20)}
    assert len(first) == MOST_REFRESHED
    assert to_refresh(pods, second(21)) == [each for each in pods if each not in first]
    assert to_refresh(pods, second(28))[:8] == [each for each in pods if each not in first]
