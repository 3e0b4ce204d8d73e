"""What a pod's repository index reports: versions that fail, and worker processes that died."""

from dataclasses import replace

import pytest

from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion
from halimede_operator.core.status.events import events_of
from support.operator_pods import (
    deployment,
    fetched,
    index,
    loading,
    lost_readiness,
    pod,
    second,
    serving,
    snapshot,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import NAME, ON, condition_state, conditions, ready_state, status_for


def test_ready_versions_of_a_pod_that_does_not_run_do_not_count():
    ended_ = serving()
    ended_["status"]["phase"] = "Pending"
    status = status_for(snapshot(model_key(), ended_, child=deployment()), model_spec())

    assert (ready_state(status)[1], status["readyReplicas"]) == ("Loading", 0)


def test_an_index_from_before_a_restart_is_not_used():
    seen = snapshot(
        model_key(), pod(fetch=fetched()), child=deployment(), indexes={NAME: index(("bert", "1", "READY", ""))}
    )

    assert (
        ready_state(status_for(seen, model_spec()))[2]
        == f"0/1 replicas serving: {ON} starts the server and loads the model"
    )


def test_a_load_failure_is_reported_from_the_index():
    pod_index = index(
        ("bert", "1", "UNAVAILABLE", "Internal: no weights"),
        ("bert", "2", "READY", ""),
        ("bert", "0", "UNAVAILABLE", "unloaded"),
    )
    seen = snapshot(model_key(), loading(), child=deployment(), indexes={NAME: pod_index})
    status = status_for(seen, model_spec())

    expected = f"pod {NAME}: model bert version 1: Internal: no weights"
    assert ready_state(status) == ("False", "ModelLoadFailed", f"0/1 replicas serving: {expected}")


MEMORY = "worker exited: signal 9 (possibly out of memory)"
PARKED = "worker exited 5 times (last: signal 11)"


def worker(state: str, failure: str = "", *, out_of_memory: bool = False, reason: str = "") -> PodIndex:
    return PodIndex((ServedVersion("bert", "1", state, reason, True, failure, out_of_memory),))


def looked_at(made: Object, pod_index: PodIndex, limit: str = "400Mi") -> Object:
    made["spec"]["containers"][0]["resources"] = {"limits": {"memory": limit}} if limit else {}
    return status_for(snapshot(model_key(), made, child=deployment(), indexes={NAME: pod_index}), model_spec())


WORKERS = {
    "out of memory": (
        worker("READY", MEMORY, out_of_memory=True),
        "400Mi",
        "OutOfMemory",
        f"{MEMORY}; the limit is 400Mi, raise spec.resources.limits.memory",
    ),
    "out of memory without a limit": (worker("READY", MEMORY, out_of_memory=True), "", "OutOfMemory", MEMORY),
    "a crash": (worker("READY", "worker exited: signal 11"), "400Mi", "WorkerCrashed", "worker exited: signal 11"),
    "one of several that is not started again": (worker("READY", PARKED), "400Mi", "WorkerCrashed", PARKED),
}


@pytest.mark.parametrize("case", WORKERS)
def test_a_worker_that_dies_under_a_serving_server_is_reported(case: str):
    pod_index, limit, reason, text = WORKERS[case]
    status = looked_at(serving(), pod_index, limit)

    assert ready_state(status)[:2] == ("True", "Serving")
    degraded = next(c for c in status["conditions"] if c["type"] == "Degraded")
    expected = f"pod {NAME}: model bert version 1: {text}"
    assert (degraded["status"], degraded["reason"], degraded["message"]) == ("True", reason, expected)


def test_a_recovered_worker_is_not_reported():
    assert "Degraded" not in conditions(looked_at(serving(), worker("READY")))


def test_a_model_whose_workers_stay_down_is_reported_with_the_cause():
    pod_index = worker("UNAVAILABLE", PARKED, reason=f"Unavailable: model 'bert' is not ready: {PARKED}")
    for made in (serving(), lost_readiness()):
        assert ready_state(looked_at(made, pod_index)) == (
            "False",
            "WorkerCrashed",
            f"0/1 replicas serving: pod {NAME}: model bert version 1: {PARKED}",
        )


def test_a_dead_worker_is_reported_before_the_failing_probe():
    assert ready_state(looked_at(lost_readiness(), worker("READY", MEMORY, out_of_memory=True)))[1] == "OutOfMemory"


def test_an_unloadable_version_beside_a_serving_one_is_not_degraded():
    both = index(("bert", "1", "READY", ""), ("bert", "2", "UNAVAILABLE", "Internal: no weights"))

    assert "Degraded" not in conditions(looked_at(serving(), both))


def test_a_pod_that_is_ready_without_the_model_does_not_serve():
    seen = snapshot(model_key(), serving(), child=deployment(), indexes={NAME: index(("other", "1", "READY", ""))})
    status = status_for(seen, model_spec())

    expected = f"pod {NAME}: it is ready, but no version of model bert is ready"
    assert ready_state(status) == ("False", "ModelLoadFailed", f"0/1 replicas serving: {expected}")
    assert status["readyReplicas"] == 0


def test_an_unreadable_index_does_not_make_an_object_ready():
    silent = PodIndex(error="connection refused")
    seen = snapshot(model_key(), serving(), child=deployment(), indexes={NAME: silent})
    status = status_for(seen, model_spec())

    expected = f"pod {NAME}: what it serves is not known: connection refused"
    assert ready_state(status) == ("Unknown", "IndexUnreachable", expected)
    assert condition_state(status, "ModelLoaded") == ("Unknown", "IndexUnreachable")
    assert condition_state(status, "Available") == ("True", "Serving")
    assert "versions" not in status["current"]


def test_one_failed_index_read_does_not_make_a_ready_object_unready():
    before = status_for(snapshot(model_key(), serving(), child=deployment()), model_spec())
    silent = {NAME: PodIndex(error="timed out")}
    seen = snapshot(model_key(), serving(), child=deployment(), status=before, indexes=silent)
    after = status_for(seen, model_spec())

    assert ready_state(after) == ("True", "Serving", "1/1 replicas serving version 1")
    assert after["current"] == before["current"]
    loaded = next(c for c in after["conditions"] if c["type"] == "ModelLoaded")
    assert (loaded["status"], loaded["message"]) == ("True", f"pod {NAME}: what it serves is not known: timed out")


def just_ready(*, seconds: int, pod_index: PodIndex | None) -> Object:
    """The status so long after the pod became ready, with its last index."""
    seen = snapshot(model_key(), serving(since=8), child=deployment())
    indexes = {} if pod_index is None else {f"uid-{NAME}": pod_index}
    return status_for(replace(seen, indexes=indexes), model_spec(), now=second(8 + seconds))


STALE = {
    "not asked": (None, ("Unknown", "IndexUnreachable")),
    "asked before its port was open": (PodIndex(error="connection refused"), ("Unknown", "IndexUnreachable")),
    "asked while it was loading": (index(("bert", "1", "LOADING", "")), ("False", "ModelLoadFailed")),
}


@pytest.mark.parametrize("case", STALE)
def test_the_index_of_a_pod_that_is_newly_ready_may_be_old(case: str):
    pod_index, state = STALE[case]
    for seconds in (0, 9):
        new = just_ready(seconds=seconds, pod_index=pod_index)
        assert ready_state(new)[1] == "Loading"
        assert condition_state(new, "ModelLoaded")[1] == "Loading"
        assert events_of(None, new) == ()
    later = just_ready(seconds=10, pod_index=pod_index)
    assert ready_state(later)[:2] == state
    assert [(event.type, event.reason) for event in events_of(new, later)] == [("Warning", state[1])]
