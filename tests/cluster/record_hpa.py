"""Records decisions of the real controller of HorizontalPodAutoscalers: `python tests/cluster/record_hpa.py`.

It runs the scenarios below in a cluster of their own, with played metrics, and writes one JSON file for each. A unit
test replays them with the model of the algorithm. Record again when the cluster's version of Kubernetes changes.
"""

import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster.control import HpaTiming
from cluster.hpa_objects import autoscaler, fake_deployment, object_metric, pods_metric
from cluster.metrics import PlayedMetrics
from cluster.operators import crds
from cluster.own import OwnCluster
from cluster.spaces import eventually
from support.hpa import milli

NAME = "target"
FOLDER = Path(__file__).parents[1] / "unit" / "operator" / "autoscaling" / "hpa_recordings"
CONTROLLER = "system:serviceaccount:kube-system:horizontal-pod-autoscaler"
TIMING = HpaTiming(sync_period_s=4, downscale_stabilization_s=18, initial_readiness_delay_s=1)
SETTLED_S = 0.5
"""A state that does not change for so long is what the controller sees too."""
SYNC_LIMIT_S = 30.0
Object = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """syncs: how many decisions it lasts. values: by metric the quantity of an object, or those of the running pods in
    order, the last one for all others; None: no sample, or of a whole metric an error. scale: by hand at its beginning.
    """

    syncs: int
    values: dict[str, str | Sequence[str | None] | None]
    scale: int | None = None


@dataclass(frozen=True)
class Scenario:
    name: str
    spec: Object
    steps: tuple[Step, ...]
    cpu: str = "10m"
    replicas: int = 1


def load(*values: str | None) -> dict[str, str | Sequence[str | None] | None]:
    return {"load": values}


LOAD = pods_metric("load", "4")
QUEUE_AND_BUSY = [pods_metric("queue", "4"), pods_metric("busy", "800m")]
BEHAVIOR = {
    "scaleUp": {
        "stabilizationWindowSeconds": 10,
        "tolerance": "0.05",
        "policies": [
            {"type": "Pods", "value": 1, "periodSeconds": 6},
            {"type": "Percent", "value": 50, "periodSeconds": 18},
        ],
    },
    "scaleDown": {
        "stabilizationWindowSeconds": 6,
        "tolerance": "0.2",
        "selectPolicy": "Min",
        "policies": [
            {"type": "Pods", "value": 2, "periodSeconds": 10},
            {"type": "Percent", "value": 40, "periodSeconds": 14},
        ],
    },
}
OF_OBJECT = [
    object_metric("waiting", "InferenceModel", NAME, "4"),
    object_metric("busy", "InferenceModel", NAME, "800m"),
]
OF_OBJECT[1]["object"]["target"] = {"type": "Value", "value": "800m"}
SCENARIOS = (
    Scenario(
        "steps",
        {"metrics": [LOAD], "maxReplicas": 10},
        (
            *(Step(2, load("4")), Step(3, load("12")), Step(2, load("4")), Step(2, load("4.3")), Step(2, load("4.5"))),
            *(Step(8, load("1")), Step(1, load("20")), Step(2, load("3.2")), Step(8, load("0"))),
        ),
    ),
    # Three pods have room.
    Scenario(
        "missing",
        {"metrics": [LOAD], "maxReplicas": 8},
        (
            *(Step(2, load("4")), Step(2, load("10")), Step(2, load("10", None)), Step(2, load(None))),
            *(Step(2, load("20")), Step(3, load("5", "4")), Step(7, load("1", "1", None)), Step(6, load("0.2", None))),
            *(Step(2, load("6", None)), Step(2, load("9", "9"))),
        ),
        cpu="20",
    ),
    Scenario(
        "behavior",
        {"metrics": [LOAD], "maxReplicas": 12, "behavior": BEHAVIOR},
        (
            *(Step(2, load("4")), Step(1, load("12")), Step(1, load("4")), Step(7, load("12")), Step(2, load("4.3"))),
            *(Step(3, load("3.3")), Step(1, load("1")), Step(1, load("5")), Step(10, load("0.5")), Step(3, load("9"))),
        ),
    ),
    Scenario(
        "failures",
        {"metrics": QUEUE_AND_BUSY, "maxReplicas": 6, "minReplicas": 2},
        (
            Step(1, {"queue": ["0"], "busy": ["0.1"]}),
            Step(2, {"queue": ["9"], "busy": ["1"]}),
            Step(2, {"queue": ["2"], "busy": ["0.8"]}),
            Step(7, {"queue": None, "busy": ["0.2"]}),
            Step(2, {"queue": None, "busy": ["0.95"]}),
            Step(2, {"queue": None, "busy": None}),
            Step(2, {"queue": ["3"], "busy": ["0.7"]}, scale=12),
            Step(3, {"queue": ["3"], "busy": ["0.7"]}, scale=0),
            Step(3, {"queue": ["3"], "busy": ["0.7"]}, scale=1),
            Step(7, {"queue": ["0"], "busy": ["0.1"]}),
        ),
    ),
    Scenario(
        "zero",
        {"metrics": OF_OBJECT, "maxReplicas": 6, "minReplicas": 0},
        (
            Step(2, {"waiting": "4", "busy": "0.8"}),
            Step(2, {"waiting": "11", "busy": "1"}),
            Step(2, {"waiting": "12.9", "busy": "0.5"}),
            Step(8, {"waiting": "0", "busy": "0"}),
            Step(2, {"waiting": "0", "busy": None}),
            Step(3, {"waiting": "5", "busy": None}),
            Step(7, {"waiting": "0", "busy": "0"}),
            Step(2, {"waiting": "9", "busy": "0"}),
            Step(3, {"waiting": "9", "busy": "0"}, scale=0),
            Step(3, {"waiting": "9", "busy": "0"}, scale=1),
        ),
    ),
)


class Syncs:
    """When the controller began to look at which namespace's target, from the audit log."""

    def __init__(self, log: Path) -> None:
        self.began_s: defaultdict[str, list[float]] = defaultdict(list)
        threading.Thread(target=self._follow, args=(log,), daemon=True).start()

    def _follow(self, log: Path) -> None:
        rest = ""
        with log.open() as file:
            while True:
                *lines, rest = (rest + file.read()).split("\n")
                for line in lines:
                    if CONTROLLER in line and '"subresource":"scale"' in line and '"verb":"get"' in line:
                        event = json.loads(line)
                        began = datetime.fromisoformat(event["requestReceivedTimestamp"])
                        self.began_s[event["objectRef"]["namespace"]].append(began.timestamp())
                time.sleep(0.05)

    def wait_for_next(self, namespace: str, after: int) -> float:
        """The time of the sync that follows the first `after` ones."""
        eventually(lambda: len(self.began_s[namespace]) > after, f"a sync in {namespace}", SYNC_LIMIT_S)
        return self.began_s[namespace][after]


@dataclass
class Recorder:
    cluster: OwnCluster
    played: PlayedMetrics
    syncs: Syncs
    scenario: Scenario
    _rows: list[Object] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return self.scenario.name

    def record(self) -> None:
        """AssertionError where the machine was too slow for a trustworthy record."""
        api = self.cluster.api
        api.create("/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        api.create(self._deployments, fake_deployment(NAME, self.scenario.replicas, self.scenario.cpu))
        self._prepare(self.scenario.steps[0])
        hpas = f"/apis/autoscaling/v2/namespaces/{self.namespace}/horizontalpodautoscalers"
        document = autoscaler(NAME, **self.scenario.spec)
        api.create(hpas, document)
        for step in self.scenario.steps:
            if step.scale is not None:
                api.patch(f"{self._deployments}/{NAME}", {"spec": {"replicas": step.scale}})
            for _ in range(step.syncs):
                self._record_sync(step)
        FOLDER.mkdir(parents=True, exist_ok=True)
        recording = {
            "downscale_stabilization_s": TIMING.downscale_stabilization_s,
            "spec": document["spec"],
            "syncs": self._rows,
        }
        lines = ",\n  ".join(json.dumps(row) for row in self._rows)
        text = json.dumps({**recording, "syncs": []}, indent=1).replace('"syncs": []', f'"syncs": [\n  {lines}\n ]')
        (FOLDER / f"{self.scenario.name}.json").write_text(text + "\n")

    @property
    def _deployments(self) -> str:
        return f"/apis/apps/v1/namespaces/{self.namespace}/deployments"

    def _record_sync(self, step: Step) -> None:
        done = len(self._rows)
        before, samples = self._prepare(step)
        assert len(self.syncs.began_s[self.namespace]) == done, f"{self.namespace}: too slow for sync {done}"
        at_s = self.syncs.wait_for_next(self.namespace, done)
        time.sleep(2 * SETTLED_S)
        decided = self.cluster.api.get(f"{self._deployments}/{NAME}")["spec"]["replicas"]
        self._rows.append({"at_s": round(at_s, 3), **before, "samples": samples, "decided": decided})

    def _prepare(self, step: Step) -> tuple[Object, Object]:
        """Set the metrics of a settled state; return the state and the samples in thousandths."""
        before = self._settled()
        running = [pod["name"] for pod in before["pods"] if pod["phase"] == "Running"]
        values: dict[str, dict[str, str] | None] = {}
        samples: Object = {}
        for metric, given in step.values.items():
            match given:
                case None:
                    values[metric] = samples[metric] = None
                case str():
                    values[metric] = {f"inferencemodels.halimede.dev/{NAME}": given}
                    samples[metric] = milli(given)
                case _:
                    by_pod = {pod: given[min(number, len(given) - 1)] for number, pod in enumerate(running)}
                    values[metric] = {pod: each for pod, each in by_pod.items() if each is not None}
                    samples[metric] = {pod: milli(each) for pod, each in by_pod.items() if each is not None}
        self.played.play(self.namespace, values)
        return before, samples

    def _settled(self) -> Object:
        last = self._state()
        while True:
            time.sleep(SETTLED_S)
            now = self._state()
            if now == last and now["seen"] == now["replicas"] == len(now["pods"]):
                return now
            last = now

    def _state(self) -> Object:
        deployment = self.cluster.api.get(f"{self._deployments}/{NAME}")
        listed = self.cluster.api.get(f"/api/v1/namespaces/{self.namespace}/pods")["items"]
        pods = [
            {
                "name": pod["metadata"]["name"],
                "phase": pod["status"]["phase"],
                "is_ready": any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"]),
                "is_deleting": "deletionTimestamp" in pod["metadata"],
            }
            for pod in sorted(listed, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))
            if "conditions" in pod["status"]
        ]
        return {
            "replicas": deployment["spec"]["replicas"],
            "seen": deployment["status"].get("replicas", 0),
            "pods": pods,
        }


def main() -> None:
    cluster = OwnCluster.start()
    try:
        cluster.set_autoscaling(TIMING, ["HPAScaleToZero=true"])
        for crd in crds():
            cluster.kubectl("apply", "--server-side", f"--filename={crd}")
        cluster.fake_nodes.add(1)
        played = PlayedMetrics(cluster)
        played.start()
        syncs = Syncs(cluster.state / "audit.log")
        wanted = [each for each in SCENARIOS if each.name in (sys.argv[1:] or [one.name for one in SCENARIOS])]
        with ThreadPoolExecutor(len(wanted)) as pool:
            running = [pool.submit(Recorder(cluster, played, syncs, scenario).record) for scenario in wanted]
        for each in running:
            each.result()
    finally:
        cluster.stop()


if __name__ == "__main__":
    main()
