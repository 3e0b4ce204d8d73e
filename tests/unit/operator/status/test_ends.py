"""Containers that ended: which end is the current cause, and how it is reported."""

import pytest

from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Workload
from support.operator_pods import (
    IMAGE,
    back_off,
    container,
    deployment,
    ended,
    fetched,
    node_lost,
    pod,
    running,
    serving,
    snapshot,
    stopped,
    waiting,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import status_for

NOW = "2026-11-22T10:00:00Z"
OLD_CRASH = ended(137, "Killed", reason="OOMKilled", started=5, finished=50)
SERVER = f"pod bert-7f9c66d5b8-aaaaa: container server (image {IMAGE})"
KILLED = (
    "killed by SIGKILL (exit code 137): the kernel sends it for lack of memory, "
    "the kubelet after failed liveness probes, or a person"
)


def status_with(*pods: Object, replicas: int = 1) -> Object:
    spec = model_spec(workload=Workload(replicas=replicas))
    return status_for(snapshot(model_key(), *pods, child=deployment(replicas)), spec)


def ready_of(status: Object) -> tuple[str, str]:
    return next((c["reason"], c["message"]) for c in status["conditions"] if c["type"] == "Ready")


def said_of(pod_: Object) -> str:
    """The reported state of the server's container."""
    return ready_of(status_with(pod_))[1].partition(f"{SERVER}: ")[2]


def with_server(state: Object, last: Object, *, lost: int | None, started: bool = True) -> Object:
    """A pod whose `ContainersReady` became False at the second `lost`; None: at its creation."""
    server = {**container("server", state, last), "started": started}
    return pod(fetch=fetched(), server=server, unready_since=lost)


def with_proxy(state: Object) -> Object:
    """The server is ready and recovered from a crash long ago; another container of the pod is not ready."""
    made = serving(last=OLD_CRASH, since=60)
    made["status"]["containerStatuses"].append(container("proxy", state))
    for each in made["status"]["conditions"][2:4]:
        each |= {"status": "False", "lastTransitionTime": "2026-11-22T09:05:00Z"}
    return made


def initializing_again() -> Object:
    """After a restart of the node, the fetch runs before the server."""
    fetch, server = container("fetch", running(200), ended(0, "{}")), container("server", waiting(), OLD_CRASH)
    return pod(fetch=fetch, server=server, unready_since=190)


ENDS = {
    # The module's table: the container, when readiness was lost, what is reported.
    "it has ended": (with_server(OLD_CRASH, {}, lost=50), "OutOfMemory"),
    "it waits to be started again": (with_server(back_off("x"), OLD_CRASH, lost=50), "OutOfMemory"),
    "it never was ready, and has ended": (with_server(OLD_CRASH, {}, lost=None), "OutOfMemory"),
    "it was ready after an end, and has ended again": (
        with_server(ended(3, started=52, finished=90), OLD_CRASH, lost=91),
        "CrashLoop",
    ),
    "it waits for the init containers": (initializing_again(), "Fetching"),
    "it is ready, another container is not": (with_proxy(ended(3, "no config")), "CrashLoop"),
    "it is ready, another container starts": (with_proxy(running(301)), "Loading"),
    "it is ready, its node is gone": (node_lost(last=OLD_CRASH), "NodeLost"),
    "it was ready since it runs": (with_server(running(52), OLD_CRASH, lost=150), "ProbeFailed"),
    "it was ready a second after it began to run": (with_server(running(52), OLD_CRASH, lost=53), "ProbeFailed"),
    "readiness was lost in the second of its start": (with_server(running(52), OLD_CRASH, lost=52), "OutOfMemory"),
    "readiness was lost by the end": (with_server(running(52), OLD_CRASH, lost=50), "OutOfMemory"),
    "it was ready in the run before, and lost that before its end": (
        with_server(running(52), OLD_CRASH, lost=30),
        "OutOfMemory",
    ),
    "it never was ready, and loads": (with_server(running(52), OLD_CRASH, lost=None, started=False), "OutOfMemory"),
}


@pytest.mark.parametrize("case", ENDS)
def test_only_an_end_after_the_last_readiness_is_the_cause_of_failure(case: str):
    pod_, reason = ENDS[case]

    assert ready_of(status_with(pod_))[0] == reason


def test_the_unready_container_is_reported_not_one_that_recovered():
    assert "container proxy" in ready_of(status_with(with_proxy(ended(3, "no config"))))[1]


def test_a_failing_probe_of_another_container_is_reported():
    made = with_proxy({**running(100)})
    made["status"]["containerStatuses"][1]["started"] = True

    reason, message = ready_of(status_with(made))

    assert (reason, "container proxy" in message) == ("ProbeFailed", True)


def test_a_serving_pod_reports_its_newest_container_end():
    made = serving(last=OLD_CRASH, since=90)
    newer = ended(3, "no config", started=60, finished=80)
    made["status"]["containerStatuses"].append(container("proxy", running(81), newer, is_ready=True))

    assert status_with(made)["lastFailure"]["container"] == "proxy"


LOG = (
    'ne] \\"cut off\\""\n'
    'I1122 09:12:25.737360 1 app.py:200] "starting"\n'
    'E1122 09:12:25.747360 1 model.py:9] "first"\n'
    'E1122 09:12:26.747360 1 model.py:9] "batch of \\"x\\" failed"\n'
    'I1122 09:12:27.737360 1 app.py:200] "goes on"\n'
)
JSON_LOG = (
    '9,"message":"table of Backend, Path, Config","table":[]}\n'
    '{"time":"2026-11-22T09:12:28.209Z","level":"ERROR","pid":1,"file":"a.py","line":1,"message":"no more"}\n'
    '{"time":"2026-11-22T09:12:28.218Z","level":"INFO","pid":1,"file":"a.py","line":1,"message":"goes on"}\n'
)
QUIET = '{"time":"2026-11-22T09:12:28.218Z","level":"INFO","message":"table of Option, Value"}\n'


def padded(log: str) -> str:
    """As long as the part of a log's end that kubelets keep: its first line is cut."""
    return "x" * (2048 - len(log)) + log


SAID_AFTER_KILL = {
    "nothing": ("", ""),
    "no error": (QUIET, ""),
    "lines of the model's own": ("Killed\nloading shard 3\n", ""),
    "text": (padded(LOG), ": the last error in its log is: batch of \"x\" failed"),
    "JSON": (padded(JSON_LOG), ": the last error in its log is: no more"),
    "a last line that is cut": ('E1122 09:12:26.747360 1 model.py:9] "batch of', ""),
    "a last line of JSON that is cut": ('{"time":"2026-11-22T09:12:28.209Z","level":"ERROR","mess', ""),
}  # fmt: skip


@pytest.mark.parametrize("case", SAID_AFTER_KILL)
def test_after_a_kill_only_a_complete_log_error_is_reported(case: str):
    message, expected = SAID_AFTER_KILL[case]

    assert said_of(stopped(ended(137, message))) == KILLED + expected


def test_the_first_line_of_a_log_that_kubelets_cut_is_dropped():
    first = 'E1122 09:12:26.7 1 a.py:9] "' + "x" * (2048 - 28 - 2 - len(QUIET)) + '"\n'
    assert len(first + QUIET) == 2048

    assert said_of(stopped(ended(137, first + QUIET))) == KILLED


def test_a_containers_own_message_is_reported_from_its_first_line():
    """Kubelets keep 4 KiB of a message and 2 KiB of a log."""
    text = "bert: no weights\n" + "more of it\n" * 300

    assert said_of(stopped(ended(1, text))).startswith("exited with code 1: bert: no weights")


def test_log_lines_without_errors_are_no_cause():
    assert said_of(stopped(ended(3, QUIET + 'I1122 09:12:25.7 1 a.py:2] "on and on"\n'))) == "exited with code 3"
    assert said_of(stopped(ended(3, QUIET + "no config\n"))) == "exited with code 3: no config"


def limited(code: int, message: str = "", **resources: object) -> Object:
    made = stopped(ended(code, message, reason="OOMKilled"))
    made["spec"]["containers"][0]["resources"] = resources
    return made


OUT_OF_MEMORY = {
    "at its limit": (
        limited(137, QUIET, limits={"memory": "512Mi"}),
        "killed by the kernel: out of memory; its limit is 512Mi, raise spec.resources.limits.memory",
    ),
    "a limit in bytes": (
        limited(137, limits={"memory": 536870912}),
        "killed by the kernel: out of memory; its limit is 536870912, raise spec.resources.limits.memory",
    ),
    "no limit": (limited(137), "killed by the kernel: out of memory; it has no memory limit of its own"),
    "another process was the victim": (
        limited(1, "failed to load 'bert'", limits={"memory": "1Gi"}),
        "exited with code 1 after the kernel killed a process in it: out of memory; its limit is 1Gi, "
        "raise spec.resources.limits.memory: failed to load 'bert'",
    ),
}


@pytest.mark.parametrize("case", OUT_OF_MEMORY)
def test_out_of_memory_is_reported_with_the_limit(case: str):
    pod_, expected = OUT_OF_MEMORY[case]

    assert ready_of(status_with(pod_))[0] == "OutOfMemory"
    assert said_of(pod_) == expected


def test_a_kill_without_oom_report_is_not_reported_as_out_of_memory():
    made = stopped(ended(137))
    made["spec"]["containers"][0]["resources"] = {"limits": {"memory": "512Mi"}}

    assert ready_of(status_with(made)) == ("CrashLoop", f"0/1 replicas serving: {SERVER}: {KILLED}")
