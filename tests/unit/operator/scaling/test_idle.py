"""When an object falls asleep, and when it wakes."""

from typing import Any

import pytest

from halimede_operator.core.scaling.idle import (
    ASLEEP,
    WAKE,
    Work,
    asleep,
    falls_asleep,
    idle_json,
    idle_of,
    kept_idle,
    may_sleep,
    read_work,
    wakes,
)
from halimede_operator.core.snapshot import Idle
from halimede_operator.core.spec.types import Autoscaling, ScaleToZero, ZeroBy

BEGAN, LATER = "2030-01-01T00:00:00Z", "2030-01-01T00:00:10Z"
SCALING = Autoscaling(max_replicas=4, scale_to_zero=ScaleToZero(600))
PAGE = b"""# TYPE nv_inference_request_success counter
nv_inference_request_success{model="a",version="1"} 3
nv_inference_request_success{model="b",version="1"} 2.0
nv_inference_request_failure{model="a",reason="REJECTED",version="1"} 1
halimede_queue_requests{model="a",version="1"} 0
halimede_queue_requests{model="b",version="1"} 2
halimede_executing_requests{model="a",version="1"} 1
halimede_sequences_open{model="a",version="1"} 4
"""


def pod(uid: str = "a", *, ready: str = "True", restarts: int = 0, phase: str = "Running", **meta: Any) -> Any:
    return {
        "metadata": {"uid": uid, **meta},
        "status": {
            "phase": phase,
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": "server", "restartCount": restarts}],
        },
    }


def test_work_is_summed_over_all_models():
    assert read_work(PAGE) == Work(requests=6, waiting=7)


@pytest.mark.parametrize(
    "name", ["halimede_queue_requests", "halimede_executing_requests", "nv_inference_request_success"]
)
def test_page_without_a_needed_metric_is_no_report(name):
    lines = [line for line in PAGE.splitlines(keepends=True) if not line.startswith(name.encode())]
    assert read_work(b"".join(lines)) is None


def test_only_models_with_sequences_have_open_ones():
    page = PAGE.replace(b'halimede_sequences_open{model="a",version="1"} 4\n', b"")
    assert read_work(page) == Work(requests=6, waiting=3)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "1e999", "-1", "x"])
@pytest.mark.parametrize("line", [b'executing_requests{model="a",version="1"} 1', b'open{model="a",version="1"} 4'])
def test_impossible_values_are_no_report(value, line):
    page = PAGE.replace(line, line[:-1] + value.encode())
    assert read_work(page) is None


def test_idle_since_the_first_look_without_a_request():
    first = idle_of([pod()], {"a": Work(5, 0)}, None, BEGAN)
    assert first is not None
    assert first.since == BEGAN
    assert idle_of([pod()], {"a": Work(5, 0)}, first, LATER) == first
    again = idle_of([pod()], {"a": Work(6, 0)}, first, LATER)
    assert again is not None
    assert again.since == LATER


@pytest.mark.parametrize(
    ("pods", "works"),
    [
        ([], {}),
        ([pod()], {}),
        ([pod()], {"a": Work(5, 1)}),
        ([pod(ready="False")], {"a": Work(5, 0)}),
        ([pod(deletionTimestamp=BEGAN)], {"a": Work(5, 0)}),
        ([pod(), pod("b")], {"a": Work(5, 0)}),
        ([pod(), pod("b")], {"a": Work(5, 0), "b": Work(0, 1)}),
    ],
)
def test_unknown_or_busy_is_not_idle(pods, works):
    known = idle_of([pod()], {"a": Work(5, 0)}, None, BEGAN)
    assert idle_of(pods, works, known, LATER) is None


@pytest.mark.parametrize("changed", [[pod(restarts=1)], [pod("b")]])
def test_restart_or_another_pod_begins_anew(changed):
    known = idle_of([pod()], {"a": Work(0, 0)}, None, BEGAN)
    now = idle_of(changed, {"a": Work(0, 0), "b": Work(0, 0)}, known, LATER)
    assert now is not None
    assert now.since == LATER


def test_pods_that_ended_do_not_count():
    assert idle_of([pod(), pod("b", phase="Failed")], {"a": Work(5, 0)}, None, BEGAN) is not None


def test_falls_asleep_after_idle_for():
    idle = Idle("2030-01-01T00:00:00Z", "x")
    assert not falls_asleep(SCALING, idle, 1, "2030-01-01T00:09:59Z")
    assert falls_asleep(SCALING, idle, 1, "2030-01-01T00:10:00Z")
    assert not falls_asleep(SCALING, idle, 0, "2030-01-01T00:10:00Z")
    assert not falls_asleep(SCALING, None, 1, "2030-01-01T00:10:00Z")
    by_hpa = Autoscaling(max_replicas=4, min_replicas=0, scale_to_zero=ScaleToZero(600, ZeroBy.HPA))
    assert not falls_asleep(by_hpa, idle, 1, "2030-01-01T00:10:00Z")
    assert not falls_asleep(Autoscaling(max_replicas=4), idle, 1, "2030-01-01T00:10:00Z")


def test_status_keeps_a_long_idleness_for_the_next_operator():
    idle = Idle("2030-01-01T00:00:00Z", "x")
    assert idle_json(idle, SCALING, "2030-01-01T00:04:59Z") is None
    kept = idle_json(idle, SCALING, "2030-01-01T00:05:00Z")
    assert kept_idle({"status": {"autoscaling": {"idle": kept}}}) == idle
    for broken in ({}, {"status": {"autoscaling": {"idle": {"since": "soon", "of": "x"}}}}, {"status": 1}):
        assert kept_idle(broken) is None


def test_an_idleness_that_begins_later_than_now_is_not_believed():
    of = idle_of([pod()], {"a": Work(5, 0)}, None, BEGAN)
    assert of is not None
    assert idle_of([pod()], {"a": Work(5, 0)}, Idle(LATER, of.of), BEGAN) == of


def test_only_a_new_value_of_the_annotation_wakes():
    def value(text: str | None) -> Any:
        return {"metadata": {"annotations": {WAKE: text} if text is not None else {}}}

    def deployment(of: Any) -> Any:
        return {"metadata": {"annotations": dict(asleep(of))}}

    assert not wakes(SCALING, value(None), deployment(value(None)))
    assert wakes(SCALING, value("1"), deployment(value(None)))
    assert not wakes(SCALING, value("1"), deployment(value("1")))
    assert wakes(SCALING, value("2"), deployment(value("1")))
    assert not wakes(SCALING, value(None), deployment(value("1")))
    assert wakes(SCALING, value("1"), {"metadata": {}})
    assert not wakes(SCALING, value("1"), {"metadata": {"annotations": {ASLEEP: '{"wake":"1"}'}}})


def test_pods_are_asked_only_for_objects_that_the_operator_may_set_to_zero():
    def object_(**zero: Any) -> Any:
        return {"spec": {"autoscaling": {"scaleToZero": {"idleFor": "1m", **zero}}}}

    assert may_sleep(object_())
    assert may_sleep(object_(zeroBy="Operator"))
    assert not may_sleep(object_(zeroBy="KEDA"))
    assert not may_sleep({"spec": {"autoscaling": {"maxReplicas": 1}}})
    assert not may_sleep({"spec": {}})
