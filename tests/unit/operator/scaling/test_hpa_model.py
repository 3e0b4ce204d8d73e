"""The model of the HPA's algorithm decides as the real controller did; `tests/cluster/record_hpa.py` records that."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.hpa import Autoscaler, Behavior, Controller, Kind, Metric, Phase, Pod, Target

RECORDINGS = sorted((Path(__file__).parent / "hpa_recordings").glob("*.json"))


def test_there_are_five_recordings() -> None:
    assert [path.stem for path in RECORDINGS] == ["behavior", "failures", "missing", "steps", "zero"]


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_model_decides_as_the_real_controller(path: Path) -> None:
    recording = json.loads(path.read_text())
    spec = Autoscaler.parse(recording["spec"])
    controller = Controller(down_window_s=recording["downscale_stabilization_s"], can_scale_to_zero=True)
    decided = [
        controller.decide(spec, target(sync), sync["samples"], now_s=sync["at_s"]) for sync in recording["syncs"]
    ]
    assert decided == [sync["decided"] for sync in recording["syncs"]]
    assert len(set(decided)) >= 3, "a recording without decisions shows nothing"


def target(sync: dict[str, Any]) -> Target:
    pods = tuple(
        Pod(pod["name"], Phase(pod["phase"]), is_ready=pod["is_ready"], is_deleting=pod["is_deleting"])
        for pod in sync["pods"]
    )
    return Target(sync["replicas"], sync["seen"], pods)


def running(*names: str) -> Target:
    return Target(len(names), len(names), tuple(Pod(name) for name in names))


def test_deleted_and_failed_pods_do_not_count() -> None:
    spec = Autoscaler((Metric("load", 4000),), max_replicas=10)
    pods = (Pod("a"), Pod("b", is_deleting=True), Pod("c", Phase.FAILED))
    samples = {"load": {"a": 8000, "b": 90_000, "c": 90_000}}
    assert Controller().decide(spec, Target(1, 1, pods), samples, now_s=0) == 2


def test_average_is_rounded_down_to_a_thousandth() -> None:
    # 4.4004 on average is 4.400, which is still within the tolerance of 4.
    spec = Autoscaler((Metric("load", 4000),), max_replicas=10)
    assert Controller().decide(spec, running("a", "b"), {"load": {"a": 4400, "b": 4401}}, now_s=0) == 2


def test_nothing_is_removed_while_a_metric_fails() -> None:
    spec = Autoscaler((Metric("queue", 4000), Metric("busy", 800)), max_replicas=10)
    samples = {"queue": None, "busy": {"a": 0, "b": 0}}
    controller = Controller(down_window_s=0)
    assert [controller.decide(spec, running("a", "b"), samples, now_s=at) for at in (0, 15, 30)] == [2, 2, 2]


def test_only_the_one_that_went_to_zero_comes_back() -> None:
    spec = Autoscaler((Metric("waiting", 4000, Kind.AVERAGE),), max_replicas=10, min_replicas=0)
    nothing, some = {"waiting": 0}, {"waiting": 9000}
    went = Controller(down_window_s=0, can_scale_to_zero=True)
    assert went.decide(spec, running("a"), nothing, now_s=0) == 1, "its first recommendation is what it found"
    assert went.decide(spec, running("a"), nothing, now_s=15) == 0
    assert went.decide(spec, running(), some, now_s=30) == 3
    found = Controller(down_window_s=0, can_scale_to_zero=True)
    assert found.decide(spec, running(), some, now_s=30) == 0


def test_a_pod_that_somebody_starts_goes_at_its_first_zero() -> None:
    # After an hour at 0 no recommendation above 0 is left in the window.
    behavior = Behavior.parse({"scaleDown": {"stabilizationWindowSeconds": 600}})
    spec = Autoscaler((Metric("waiting", 4000, Kind.AVERAGE),), 10, min_replicas=0, behavior=behavior)
    controller = Controller(can_scale_to_zero=True)
    assert [controller.decide(spec, running("a"), {"waiting": 0}, now_s=at) for at in (0, 590, 610)] == [1, 1, 0]
    assert controller.decide(spec, running(), {"waiting": None}, now_s=4000) == 0
    assert controller.decide(spec, running("b"), {"waiting": None}, now_s=4015) == 1
    assert controller.decide(spec, running("b"), {"waiting": 0}, now_s=4030) == 0


def test_behavior_limits_each_period_not_each_sync() -> None:
    samples = {"load": {"a": 400_000}}
    free = Autoscaler((Metric("load", 4000),), max_replicas=100)
    limited = Autoscaler(free.metrics, max_replicas=100, behavior=Behavior())
    for spec, expected in ((free, [4, 8]), (limited, [5, 5])):
        controller = Controller()
        first = controller.decide(spec, running("a"), samples, now_s=0)
        again = controller.decide(spec, running(*"abcdefgh"[:first]), samples, now_s=1)
        assert [first, again] == expected
