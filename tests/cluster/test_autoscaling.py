"""Autoscaling with a real Prometheus, the metrics API that the chart installs, and the real controller of HPAs."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.control import QUICK, HpaTiming
from cluster.hpa_objects import autoscaler, pods_metric
from cluster.installed import Platform, Tenant
from cluster.metrics import ClusterPrometheus
from cluster.models import START_LIMIT_S, apply, model
from cluster.scaling import History, OfferedLoad, PlayedPods, played_model
from cluster.spaces import eventually
from halimede_operator.core.spec.types import Preset
from support.hpa_simulation import Served
from support.served import add_python

# Minutes of a whole cluster: not in CI.
pytestmark = [pytest.mark.load, pytest.mark.usefixtures("second_node")]

NAME = "played"
SCALE_LIMIT_S = 60.0
STAYS_S = 20.0
"""How long nothing must happen; the controller looks every second."""
DOWN_SOON = {"scaleDown": {"stabilizationWindowSeconds": 10}}
ONE_BUSY = {"queue": 11, "executing": 1, "busy": 1.0}
"""Of one pod: three are needed."""
QUIET = {"queue": 0, "executing": 0, "busy": 0.1}


@pytest.fixture
def pods(tenant: Tenant, metrics: ClusterPrometheus) -> PlayedPods:
    return PlayedPods(tenant, NAME)


def scaling(**more: object) -> dict[str, object]:
    return {"maxReplicas": 6, "behavior": DOWN_SOON, **more}


@contextmanager
def serving(tenant: Tenant, pods: PlayedPods, scaled: str, **fields: object) -> Iterator[History]:
    """A played model with its first pod, and the history of its replicas from then on."""
    apply(tenant, played_model(NAME, scaled, scaling(), **fields))
    eventually(pods.running, "the first pod", START_LIMIT_S)
    with History(tenant, NAME) as history:
        yield history


def has(pods: PlayedPods, count: int) -> None:
    eventually(lambda: len(pods.running()) == count, f"{count} pods", START_LIMIT_S)


def stays(history: History, *turns: int) -> None:
    """The turns are these, and no other value follows."""
    deadline = time.monotonic() + STAYS_S
    while time.monotonic() < deadline:
        assert history.turns == list(turns)
        time.sleep(0.5)


def hpa_condition(tenant: Tenant, kind: str) -> dict[str, str]:
    """The HPA's condition of this type; an empty one if the HPA or the condition does not exist."""
    hpas = tenant.get("hpa", f"--field-selector=metadata.name={NAME}")["items"]
    conditions = [each for hpa in hpas for each in hpa.get("status", {}).get("conditions", ())]
    return next((each for each in conditions if each["type"] == kind), {})


def has_metrics(tenant: Tenant) -> None:
    try:
        eventually(lambda: hpa_condition(tenant, "ScalingActive").get("status") == "True", "metrics", START_LIMIT_S)
    except AssertionError as error:
        raise AssertionError(f"{error}: {hpa_condition(tenant, 'ScalingActive')}") from None


def test_replicas_follow_metrics_and_come_back(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        has_metrics(tenant)
        pods.show_all(**ONE_BUSY)
        has(pods, 3)
        # 11 requests in three pods are near enough to the target.
        stays(history, 1, 3)
        assert tenant.get(f"im/{NAME}")["status"]["autoscaling"]["lastDecision"].startswith("1 -> 3: ")
        pods.show_all(**QUIET)
        has(pods, 1)
        assert history.turns == [1, 3, 1]
        active = tenant.condition(f"im/{NAME}", "AutoscalingActive")
        assert active["status"] == "True", active


@pytest.mark.timeout(600, func_only=True)
def test_bad_metrics_change_nothing(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        pods.show_all(**ONE_BUSY)
        has(pods, 3)
        pods.show_all(queue=4, executing=1, busy=0.8)
        first, *others = pods.running()
        # A pod without samples counts as one at its target.
        for bad in ({"queue": "NaN", "busy": "NaN"}, {"queue": "+Inf"}, {"queue": -5, "busy": -1}, {}):
            pods.show(first, **bad)
            stays(history, 1, 3)
        # Where no pod has any, nothing is removed.
        for pod in (first, *others):
            pods.show(pod, queue="NaN", executing=0, busy=0.1)
        stays(history, 1, 3)
        # Samples of another time: the pods' clocks are an hour late, or early.
        for hours in (-1, 1):
            at_ms = int((time.time() + 3600 * hours) * 1000)
            for pod in (first, *others):
                pods.post(pod, f'halimede_queue_requests{{model="m",version="1"}} 0 {at_ms}\n')
            stays(history, 1, 3)


@pytest.mark.timeout(600, func_only=True)
def test_a_lying_pod_adds_at_most_max_replicas(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        pods.show_all(queue=1_000_000, executing=1, busy=1.0)
        has(pods, 6)
        pods.show_all(**QUIET)
        has(pods, 1)
        assert max(history.values) == 6


@pytest.mark.timeout(600, func_only=True)
def test_replicas_by_hand_are_corrected_by_the_hpa(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        pods.show_all(**ONE_BUSY)
        has(pods, 3)
        pods.show_all(queue=4, executing=1, busy=0.8)
        tenant.kubectl("scale", f"deployment/{NAME}", "--replicas=5")
        # Five pods, three of them with 4 requests: 12 / 4.
        eventually(lambda: history.turns == [1, 5, 3], "three pods again", SCALE_LIMIT_S)
        has(pods, 3)
        # A busy pod may be among those that end, as on a node with more of them.
        pods.show_all(queue=4, executing=1, busy=0.8)
        stays(history, 1, 5, 3)


def test_switching_autoscaling_changes_no_replicas(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    document = played_model(NAME, scaled, scaling(), replicas=3)
    without = json.loads(json.dumps(document))
    del without["spec"]["autoscaling"]
    apply(tenant, without)
    has(pods, 3)
    pods.show_all(queue=4, executing=1, busy=0.8)
    with History(tenant, NAME) as history:
        apply(tenant, document)
        has_metrics(tenant)
        stays(history, 3)
        pods.show_all(queue=6, executing=1, busy=0.8)
        has(pods, 5)
        # Off: from the HPA's number to that of the spec, without another one in between.
        tenant.kubectl("patch", f"im/{NAME}", "--type=json", '--patch=[{"op": "remove", "path": "/spec/autoscaling"}]')
        has(pods, 3)
        counts = history.values
        assert counts[-2:] == [5, 3], counts
        assert min(counts) == 3, counts
        stays(history, *history.turns)
        assert tenant.names("hpa") == set()


@pytest.mark.timeout(600, func_only=True)
def test_suspend_and_rollout_during_autoscaling(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        pods.show_all(**ONE_BUSY)
        has(pods, 3)
        pods.show_all(queue=4, executing=1, busy=0.8)
        # A rollout: its new pods begin at 0, and 3 stay, since the busy ones among them count.
        old = set(pods.running())
        change = {"spec": {"serving": {"drainTimeout": "7s"}}}
        tenant.kubectl("patch", f"im/{NAME}", "--type=merge", f"--patch={json.dumps(change)}")

        def keep_busy_until_replaced() -> bool:
            pods.show_all(queue=4, executing=1, busy=0.8)
            now = pods.running()
            return len(now) == 3 and not old & set(now)

        eventually(keep_busy_until_replaced, "three new pods", START_LIMIT_S)
        assert history.turns == [1, 3]
        tenant.kubectl("patch", f"im/{NAME}", "--type=merge", '--patch={"spec": {"suspend": true}}')
        has(pods, 0)
        stays(history, 1, 3, 0)
        tenant.kubectl("patch", f"im/{NAME}", "--type=merge", '--patch={"spec": {"suspend": false}}')
        has(pods, 1)
        assert history.turns == [1, 3, 0, 1]


@pytest.mark.timeout(600, func_only=True)
def test_a_second_autoscaler_is_reported(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    with serving(tenant, pods, scaled) as history:
        second = autoscaler(NAME, [pods_metric("halimede_queue_requests", "4")], maxReplicas=9)
        second["metadata"]["name"] = "second"
        apply(tenant, second)

        def is_told() -> bool:
            active = tenant.condition(f"im/{NAME}", "AutoscalingActive")
            return active["status"] == "False" and "second" in active["message"]

        eventually(is_told, "AutoscalingActive to name the second one", SCALE_LIMIT_S)
        # The controller itself lets neither of both scale.
        pods.show_all(**ONE_BUSY)
        stays(history, 1)
        tenant.kubectl("delete", "hpa", "second")
        has(pods, 3)


@pytest.mark.timeout(600, func_only=True)
def test_operator_scales_to_zero_and_wakes(tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    apply(tenant, played_model(NAME, scaled, scaling(scaleToZero={"idleFor": "10s"})))
    eventually(pods.running, "the first pod", START_LIMIT_S)
    with History(tenant, NAME) as history:
        # One long request.
        pods.show_all(queue=0, executing=1, busy=0)
        stays(history, 1)
        # Without metrics it is unknown whether it is idle.
        pods.show(pods.running()[0])
        stays(history, 1)
        pods.show_all(queue=0, executing=0, busy=0)
        has(pods, 0)
        stays(history, 1, 0)
        tenant.kubectl("scale", f"deployment/{NAME}", "--replicas=1")
        has(pods, 1)


@pytest.mark.timeout(600, func_only=True)
def test_hpa_scales_to_zero(platform: Platform, tenant: Tenant, pods: PlayedPods, scaled: str) -> None:
    by_hpa = {"maxReplicas": 6, "scaleToZero": {"idleFor": "10s", "zeroBy": "HPA"}}
    platform.cluster.set_autoscaling(QUICK, ["HPAScaleToZero=true"])
    try:
        # Its pods have no metrics until they are set: for zeros the HPA may take a pod away before others are set.
        apply(tenant, played_model(NAME, scaled, by_hpa, page=""))
        eventually(pods.running, "the first pod", START_LIMIT_S)
        with History(tenant, NAME) as history:
            pods.show_all(**QUIET | {"busy": 0})
            has(pods, 0)
            stays(history, 1, 0)
            # Without pods there is no metric: somebody has to start one, and the HPA goes on from there.
            tenant.kubectl("scale", f"deployment/{NAME}", "--replicas=1")
            has(pods, 1)
            pods.show_all(**ONE_BUSY)
            has(pods, 3)
            assert history.turns == [1, 0, 3]
    finally:
        platform.cluster.set_autoscaling()
    # Without the feature gate. After a refusal the operator does not ask again for minutes, so this comes last.
    apply(tenant, played_model("refused", scaled, by_hpa))

    def is_told() -> bool:
        active = tenant.condition("im/refused", "AutoscalingActive")
        return active.get("status") == "True" and "the API server refuses 0" in active["message"]

    eventually(is_told, "AutoscalingActive to tell of the refusal", SCALE_LIMIT_S)
    assert tenant.get("hpa", "refused")["spec"]["minReplicas"] == 1


@pytest.mark.timeout(900, func_only=True)
def test_replicas_stay_while_prometheus_is_stopped(
    tenant: Tenant, pods: PlayedPods, metrics: ClusterPrometheus, scaled: str
) -> None:
    with serving(tenant, pods, scaled) as history:
        pods.show_all(**ONE_BUSY)
        has(pods, 3)
        metrics.stop()
        pods.show_all(**QUIET)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            assert history.turns == [1, 3]
            time.sleep(1)
        assert hpa_condition(tenant, "ScalingActive")["status"] == "False"
        assert tenant.condition(f"im/{NAME}", "AutoscalingActive")["status"] == "False"
        metrics.start()
        has(pods, 1)
        assert history.turns == [1, 3, 1]


SLEEPS_S = 0.25
SLEEPS = f"""
import time
time.sleep({SLEEPS_S})
return [answer(request) for request in requests]
"""


ONE_LOAD = 2.4
"""Requests per second that one pod can answer, with room."""
NEEDED = Served(service_s=SLEEPS_S).needed(4 * ONE_LOAD)
THREE_BUSY = 8.0
"""Requests per second that two pods can only just answer, so that an HPA wants three."""
NEEDS_THREE = 1.7
"""The sum of the busy fractions from which on it does, with its tolerance. Of THREE_BUSY it is 2."""
WANTED_S = {Preset.QUEUE: 60.0, Preset.CONCURRENCY: 60.0, Preset.GPU: 120.0}
"""How soon so many replicas are wanted; the busy fraction is at most 1, so that `gpu` needs a decision more."""


def offered(tenant: Tenant, name: str) -> OfferedLoad:
    """Of requests to a model that sleeps."""
    address = tenant.cluster.forward(f"service/{name}", 8000, tenant.namespace)
    body = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]}]}
    return OfferedLoad(address, "/v2/models/sleeps/infer", body)


@pytest.fixture
def sleeps(platform: Platform, tmp_path: Path) -> str:
    """The URI of the model that sleeps."""
    add_python(tmp_path, "sleeps", SLEEPS, max_batch_size=0, dims="4")
    return platform.store.put("sleeps", tmp_path / "sleeps")


def sleeping(name: str, uri: str, **fields: object) -> dict[str, object]:
    document = model(name, uri, **fields)
    document["spec"]["model"]["name"] = "sleeps"
    return document


@pytest.mark.timeout(900, func_only=True)
def test_switching_autoscaling_under_load_fails_no_request(
    tenant: Tenant, pods: PlayedPods, metrics: ClusterPrometheus, sleeps: str
) -> None:
    off = sleeping(NAME, sleeps, replicas=3)
    on = sleeping(NAME, sleeps, replicas=3, autoscaling=scaling(preset="queue"))
    busy = f'halimede_instance_busy_ratio{{namespace="{tenant.namespace}"}}'
    apply(tenant, off)
    has(pods, 3)
    tenant.infer(NAME, {"IN": ("FP32", [4], [1, 2, 3, 4])}, served="sleeps")
    with (
        History(tenant, NAME) as wanted,
        History(tenant, NAME, "status.readyReplicas") as ready,
        offered(tenant, NAME) as load,
    ):
        load.offer(THREE_BUSY)
        eventually(lambda: sum(metrics.query(busy).values()) > NEEDS_THREE, "the load in the metrics")

        def keeps_three() -> None:
            """The HPA may want more for a while, when this machine is slow."""
            deadline = time.monotonic() + STAYS_S
            while time.monotonic() < deadline:
                assert (min(wanted.values), min(ready.values)) == (3, 3), (wanted.values, ready.values)
                assert len(pods.running()) >= 3
                time.sleep(0.5)

        for _ in range(2):
            apply(tenant, on)
            has_metrics(tenant)
            keeps_three()
            apply(tenant, off)
            eventually(lambda: tenant.names("hpa") == set(), "the end of the HPA")
            has(pods, 3)
            keeps_three()
            assert wanted.values[-1] == 3, wanted.values
    print(f"\nswitched: {wanted.values} replicas, {ready.values} Ready; {load.answered} answers")
    assert load.failed == []


def follow(tenant: Tenant, preset: Preset) -> None:
    """Offer 1x, 4x and 1x to the model of this name; print what its replicas did."""
    name = str(preset)

    def has_capacity() -> bool:
        return bool(tenant.get("deployment", name)["status"].get("readyReplicas", 0) >= NEEDED)

    with offered(tenant, name) as load, History(tenant, name) as history:
        load.offer(ONE_LOAD)
        time.sleep(60)
        assert history.values == [1], name
        load.offer(4 * ONE_LOAD)
        begun = time.monotonic()
        eventually(lambda: max(history.values) >= NEEDED, f"{NEEDED} replicas of {name}", WANTED_S[preset])
        wanted_s = time.monotonic() - begun
        eventually(has_capacity, f"capacity of {name}", 300)
        ready_s = time.monotonic() - begun
        time.sleep(90)
        load.offer(ONE_LOAD)
        eventually(lambda: history.values[-1] == 1, f"one replica of {name} again", 900)
        counts = history.values
        assert history.turns == [1, max(counts), 1], (name, counts)
    times = f"{NEEDED} wanted after {wanted_s:.0f} s, Ready after {ready_s:.0f} s"
    print(f"\n{name}: {times}; {counts}, {load.answered} answers")
    assert load.failed == []


@pytest.mark.timeout(1500, func_only=True)
def test_replicas_follow_offered_load(
    platform: Platform, tenant: Tenant, metrics: ClusterPrometheus, sleeps: str
) -> None:
    """A model that sleeps, for each preset at the same time, with the timing of Kubernetes; the times are printed."""
    platform.cluster.set_autoscaling(HpaTiming())
    try:
        for preset in Preset:
            apply(tenant, sleeping(preset, sleeps, autoscaling={"maxReplicas": 6, "preset": preset}))
        for preset in Preset:
            tenant.wait_ready(f"im/{preset}", START_LIMIT_S)
        with ThreadPoolExecutor() as pool:
            followed = [pool.submit(follow, tenant, preset) for preset in Preset]
        for each in followed:
            each.result()
    finally:
        platform.cluster.set_autoscaling()
