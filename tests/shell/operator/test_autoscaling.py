"""Scalers, the hand-over of replicas, and scaling to zero, in a reconciler with an API server."""

import asyncio
from typing import Any

from aiohttp import web

from halimede_operator.cluster.cache import entry_of
from halimede_operator.cluster.kinds import AUTOSCALERS
from halimede_operator.cluster.works import Works
from halimede_operator.core.process.workqueue import Failure
from halimede_operator.core.reading import moment_of
from halimede_operator.core.scaling.idle import kept_idle
from halimede_operator.queue import Done, Failed
from halimede_operator.reconcile.reconciler import CONFLICT_AGAIN_S
from support.kube_api import Fault
from support.operator_harness import DIGITS, SPEC, Harness, with_harness

SCALED = {**SPEC, "replicas": 3, "autoscaling": {"maxReplicas": 6}}
BY_KEDA = {
    **SPEC,
    "autoscaling": {
        "provider": "KEDA",
        "maxReplicas": 6,
        "prometheus": {"serverAddress": "http://prometheus:9090"},
    },
}
SLEEPY = {**SPEC, "autoscaling": {"maxReplicas": 6, "scaleToZero": {"idleFor": "10m"}}}


def spec(harness: Harness, value: dict[str, Any]) -> None:
    harness.api.put("inferencemodels", "prod", "digits", spec=value)


def replicas(harness: Harness) -> int:
    number: int = harness.api.objects["deployments", "prod", "digits"]["spec"]["replicas"]
    return number


def scale(harness: Harness, number: int) -> None:
    """By another client: the HPA, or kubectl."""
    known = harness.api.objects["deployments", "prod", "digits"]
    harness.api.put("deployments", "prod", "digits", spec={**known["spec"], "replicas": number})


def history(harness: Harness) -> list[int]:
    """The replicas that the Deployment asked for, without repetitions."""
    numbers = [value["spec"]["replicas"] for _, plural, _, value in harness.api.history if plural == "deployments"]
    return [number for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]


async def rest(harness: Harness) -> None:
    """Reconcile until nothing is written any more."""
    for _ in range(6):
        before = harness.api.version
        await harness.sync()
        if harness.api.version == before:
            return
    raise AssertionError("it does not come to rest")


@with_harness
async def test_replicas_are_handed_over_and_back(harness: Harness):
    spec(harness, {**SPEC, "replicas": 3})
    await rest(harness)
    spec(harness, SCALED)
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == {"digits"}
    assert history(harness) == [3]
    scale(harness, 5)
    await rest(harness)
    spec(harness, {**SCALED, "env": [{"name": "A", "value": "1"}]})
    harness.now += 60
    await rest(harness)
    assert history(harness) == [3, 5]
    spec(harness, {**SPEC, "replicas": 3, "env": [{"name": "A", "value": "1"}]})
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == set()
    assert history(harness) == [3, 5, 3]
    assert harness.digits()["status"].get("autoscaling") is None


@with_harness
async def test_number_that_changes_during_the_hand_over_is_not_overwritten(harness: Harness):
    spec(harness, {**SPEC, "replicas": 3})
    await rest(harness)
    spec(harness, SCALED)
    harness.relist()
    scale(harness, 4)
    # The cache has 3: the write names the version that was read.
    await harness.reconcile(DIGITS)
    assert replicas(harness) == 4
    await rest(harness)
    assert history(harness) == [3, 4]


@with_harness
async def test_suspend_wins_and_ends_with_min_replicas(harness: Harness):
    scaled = {**SPEC, "autoscaling": {"minReplicas": 2, "maxReplicas": 6}}
    spec(harness, scaled)
    await rest(harness)
    spec(harness, {**scaled, "suspend": True})
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == set()
    spec(harness, scaled)
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == {"digits"}
    assert history(harness) == [2, 0, 2]


@with_harness
async def test_external_scaler_keeps_its_number(harness: Harness):
    spec(harness, {**SPEC, "replicas": 3, "autoscaling": {"provider": "External", "maxReplicas": 6}})
    await rest(harness)
    scale(harness, 4)
    await rest(harness)
    assert replicas(harness) == 4
    assert harness.api.named("horizontalpodautoscalers") == set()
    assert harness.api.named("poddisruptionbudgets") == {"digits"}
    assert harness.digits()["status"]["desiredReplicas"] == 4


def hpa_status(desired: int, value: str) -> dict[str, Any]:
    current = {"averageValue": value}
    return {
        "conditions": [{"type": "ScalingActive", "status": "True", "reason": "ValidMetricFound"}],
        "desiredReplicas": desired,
        "currentMetrics": [
            {"type": "Pods", "pods": {"metric": {"name": "halimede_queue_requests"}, "current": current}}
        ],
    }


@with_harness
async def test_status_changes_with_a_decision_alone(harness: Harness):
    spec(harness, SCALED)
    await rest(harness)
    harness.api.put("horizontalpodautoscalers", "prod", "digits", status=hpa_status(1, "2"))
    await rest(harness)
    assert harness.digits()["status"]["autoscaling"]["lastDecision"] == "1: halimede_queue_requests 2 of 4"
    assert harness.condition("AutoscalingActive")["status"] == "True"

    later = harness.api.put("horizontalpodautoscalers", "prod", "digits", status=hpa_status(1, "3500m"))
    assert harness.cache.learn(entry_of(AUTOSCALERS, later)) == frozenset()
    before = harness.api.version
    await rest(harness)
    assert harness.api.version == before

    decided = harness.api.put("horizontalpodautoscalers", "prod", "digits", status=hpa_status(2, "5500m"))
    assert harness.cache.learn(entry_of(AUTOSCALERS, decided)) == {DIGITS}
    await rest(harness)
    found = harness.digits()["status"]["autoscaling"]
    assert (found["desiredReplicas"], found["lastDecision"]) == (2, "1 -> 2: halimede_queue_requests 5.5 of 4")


@with_harness
async def test_second_hpa_of_the_deployment_is_reported_and_left_alone(harness: Harness):
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "digits"}
    theirs = harness.api.put("horizontalpodautoscalers", "prod", "theirs", spec={"scaleTargetRef": target})
    spec(harness, SCALED)
    assert await harness.sync() == Done(again_in=CONFLICT_AGAIN_S)
    accepted = harness.condition("Accepted")
    assert accepted["reason"] == "Conflict"
    assert accepted["message"].startswith(
        "HorizontalPodAutoscaler theirs exists and belongs to somebody else, and scales Deployment digits"
    )
    assert harness.api.objects["horizontalpodautoscalers", "prod", "theirs"] == theirs
    harness.api.remove("horizontalpodautoscalers", "prod", "theirs")
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == {"digits"}
    assert harness.condition("Accepted")["status"] == "True"


@with_harness
async def test_hpa_of_the_same_name_is_reported_and_left_alone(harness: Harness):
    theirs = harness.api.put("horizontalpodautoscalers", "prod", "digits", spec={"scaleTargetRef": {}})
    spec(harness, SCALED)
    assert await harness.sync() == Done(again_in=CONFLICT_AGAIN_S)
    assert harness.condition("Accepted")["reason"] == "Conflict"
    assert harness.api.objects["horizontalpodautoscalers", "prod", "digits"] == theirs


def made_by_keda(harness: Harness) -> None:
    """The HPA that KEDA makes: with the labels of the ScaledObject, and the name that it asks for."""
    owner = harness.api.objects["scaledobjects", "prod", "digits"]
    reference = {"kind": "ScaledObject", "name": "digits", "uid": owner["metadata"]["uid"], "controller": True}
    metadata = {"labels": owner["metadata"]["labels"], "ownerReferences": [reference]}
    harness.api.put("horizontalpodautoscalers", "prod", "digits", spec={"scaleTargetRef": {}}, metadata=metadata)


@with_harness
async def test_keda_and_hpa_follow_each_other_and_never_overlap(harness: Harness):
    spec(harness, SCALED)
    await rest(harness)
    spec(harness, BY_KEDA)
    await rest(harness)
    assert harness.api.named("scaledobjects") == {"digits"}
    assert harness.api.named("horizontalpodautoscalers") == set()
    made_by_keda(harness)
    before = harness.api.version
    await rest(harness)
    assert harness.api.counted("(PATCH|DELETE).*horizontalpodautoscalers/digits") == 2, "ours, made and deleted"
    scale(harness, 4)

    spec(harness, SCALED)
    await rest(harness)
    assert harness.api.named("scaledobjects") == set()
    # KEDA's HPA is still there, until the garbage collector takes it.
    assert harness.condition("AutoscalingActive")["reason"] == "HandingOver"
    assert harness.condition("Accepted")["status"] == "True"
    harness.api.remove("horizontalpodautoscalers", "prod", "digits")
    await rest(harness)
    assert harness.api.named("horizontalpodautoscalers") == {"digits"}
    assert replicas(harness) == 4
    kinds = [
        (event, value["kind"])
        for version, plural, event, value in harness.api.history
        if version > before and plural in ("scaledobjects", "horizontalpodautoscalers") and event != "MODIFIED"
    ]
    assert kinds[-3:] == [
        ("DELETED", "ScaledObject"),
        ("DELETED", "HorizontalPodAutoscaler"),
        ("ADDED", "HorizontalPodAutoscaler"),
    ]


@with_harness
async def test_switching_keda_off_waits_for_its_hpa(harness: Harness):
    spec(harness, BY_KEDA)
    await rest(harness)
    made_by_keda(harness)
    scale(harness, 4)
    await rest(harness)
    spec(harness, {**SPEC, "replicas": 2})
    await rest(harness)
    assert replicas(harness) == 4, "KEDA's HPA would write its own number again"
    harness.api.remove("horizontalpodautoscalers", "prod", "digits")
    await rest(harness)
    assert replicas(harness) == 2


@with_harness
async def test_cluster_without_keda_is_reported(harness: Harness):
    harness.cache.set_unavailable({"ScaledObject": "the cluster does not serve ScaledObject of keda.sh/v1alpha1"})
    spec(harness, BY_KEDA)
    await rest(harness)
    assert harness.condition("AutoscalingActive")["reason"] == "FeatureUnavailable"
    assert harness.condition("Accepted")["reason"] == "FeatureUnavailable"
    assert "deployments" in {plural for plural, _, _ in harness.api.objects}


def metrics(requests: int, waiting: int) -> str:
    names = ("halimede_queue_requests", "halimede_executing_requests", "halimede_sequences_open")
    lines = [f'{name}{{model="digits",version="1"}} {waiting}' for name in names]
    return "\n".join([f'nv_inference_request_success{{model="digits",version="1"}} {requests}', *lines, ""])


class Pod:
    """The metrics port of a pod."""

    def __init__(self) -> None:
        self.page: str | None = metrics(1, 0)
        self.asked = 0
        self.port = 0

    async def answer(self, _request: web.Request) -> web.StreamResponse:
        self.asked += 1
        return web.Response(status=503) if self.page is None else web.Response(text=self.page)

    async def start(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        return runner

    def add(self, harness: Harness) -> None:
        """As a pod of the Deployment."""
        labels = {"app.kubernetes.io/managed-by": "halimede-operator", "halimede.dev/model": "digits"}

        def owned_by(plural: str, kind: str, name: str) -> dict[str, Any]:
            uid = harness.api.objects[plural, "prod", name]["metadata"]["uid"]
            return {"labels": labels, "ownerReferences": [{"kind": kind, "name": name, "uid": uid, "controller": True}]}

        template = {"spec": {"containers": [], "volumes": []}}
        owner = owned_by("deployments", "Deployment", "digits")
        harness.api.put("replicasets", "prod", "digits-1", metadata=owner, spec={"template": template})
        container = {"name": "server", "ports": [{"name": "metrics", "containerPort": self.port}]}
        harness.api.put(
            "pods",
            "prod",
            "digits-1-a",
            metadata=owned_by("replicasets", "ReplicaSet", "digits-1"),
            spec={"containers": [container]},
            status={
                "phase": "Running",
                "podIP": "127.0.0.1",
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "server", "restartCount": 0, "state": {"running": {}}}],
            },
        )


@with_harness
async def test_idle_object_falls_asleep_and_its_annotation_wakes_it(harness: Harness):
    pod = Pod()
    runner = await pod.start()
    spec(harness, SLEEPY)
    await rest(harness)
    pod.add(harness)
    await harness.sync()
    asking = asyncio.create_task(harness.works.run())

    async def asked() -> None:
        """A whole round of questions after this moment."""
        number = pod.asked
        await harness.api.until(lambda: pod.asked >= number + 3)
        await harness.sync()

    def pass_minutes(minutes: int) -> None:
        harness.today = harness.today.replace(minute=harness.today.minute + minutes)

    await asked()
    pass_minutes(6)
    pod.page = metrics(2, 0)
    await asked()
    pass_minutes(6)
    await asked()
    assert replicas(harness) == 1, "a request came after 6 minutes"
    assert harness.digits()["status"]["autoscaling"]["idle"]["since"] == "2030-01-01T00:06:00Z"
    restarted = Works(lambda _key: None, lambda: moment_of(harness.today), period_s=0.01)
    pods, kept = [harness.api.objects["pods", "prod", "digits-1-a"]], kept_idle(harness.digits())
    assert restarted.idle(DIGITS, pods, kept) is None, "not before its first look"
    again = asyncio.create_task(restarted.run())
    await harness.api.until(lambda: restarted.idle(DIGITS, pods, None) is not None)
    assert restarted.idle(DIGITS, pods, None) == kept, "another operator goes on from the status"
    again.cancel()
    await asyncio.wait({again})

    pod.page = None
    await asked()
    pass_minutes(20)
    await asked()
    assert replicas(harness) == 1, "a pod that cannot be asked is not idle"
    pod.page = metrics(2, 1)
    await asked()
    assert replicas(harness) == 1, "a pod that works is not idle"
    pod.page = metrics(2, 0)
    await asked()
    pass_minutes(10)
    await asked()
    assert replicas(harness) == 0
    harness.api.remove("pods", "prod", "digits-1-a")
    await rest(harness)
    active = harness.condition("AutoscalingActive")
    assert (active["status"], active["reason"]) == ("False", "ScaledToZero")
    assert "kubectl scale deployment/digits --replicas=1" in active["message"]
    assert harness.condition("Ready")["reason"] == "ScaledToZero"
    assert harness.api.named("horizontalpodautoscalers") == {"digits"}

    harness.api.put("inferencemodels", "prod", "digits", metadata={"annotations": {"halimede.dev/wake": "now"}})
    await rest(harness)
    assert replicas(harness) == 1
    asking.cancel()
    await asyncio.wait({asking})
    await runner.cleanup()


@with_harness
async def test_api_server_without_zero_gets_an_hpa_with_one(harness: Harness):
    message = "spec.minReplicas: Invalid value: 0: must be greater than or equal to 1"
    cause = {"reason": "FieldValueInvalid", "field": "spec.minReplicas", "message": message}
    refusal = Fault(
        "horizontalpodautoscalers/digits.*dryRun", status=422, reason="Invalid", message=message, causes=(cause,)
    )
    harness.api.faults.append(refusal)
    spec(harness, {**SPEC, "autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "10m", "zeroBy": "HPA"}}})
    assert await harness.sync() == Failed(Failure.CONFLICT, "the API server refuses an HPA with 0 as minReplicas")
    await rest(harness)
    hpa = harness.api.objects["horizontalpodautoscalers", "prod", "digits"]["spec"]
    assert hpa["minReplicas"] == 1
    assert hpa["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 600
    assert {metric["type"] for metric in hpa["metrics"]} == {"Object"}
    harness.api.put("horizontalpodautoscalers", "prod", "digits", status=hpa_status(1, "2"))
    await rest(harness)
    assert "minReplicas, because the API server refuses 0" in harness.condition("AutoscalingActive")["message"]

    # An upgrade of the API server is noticed later.
    harness.api.faults.clear()
    harness.now += 601
    await rest(harness)
    assert harness.api.objects["horizontalpodautoscalers", "prod", "digits"]["spec"]["minReplicas"] == 0
