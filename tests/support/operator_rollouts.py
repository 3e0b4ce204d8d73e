"""An object with its children, and the parts of Kubernetes that roll out a Deployment, without a cluster."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from halimede_operator.core.children.diff import Apply, Delete
from halimede_operator.core.decide import decide, strategy_now
from halimede_operator.core.decided import Decided, EventDraft, Performed
from halimede_operator.core.labels import REVISION_LABEL
from halimede_operator.core.placement.choice import Devices, choose
from halimede_operator.core.placement.ledger import Ledger
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.history import read_history
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Key
from halimede_operator.core.status import status_of
from halimede_operator.core.status.events import events_of
from halimede_operator.core.subject import Subject
from support.device_nodes import inventory, node
from support.operator_pods import DEADLINE, READY, deployment, ended, fetched, pod, second, serving, stopped
from support.operator_specs import UID, model_key
from support.operator_status import LOG

NODE = node("a", ("1g.10gb", "2g.20gb", "3g.40gb"))
PLATFORM = Platform(server_image="server:1", gpu_server_image="gpu:1", s3_endpoint="https://store.example")
STEPS = {
    "inputs": [{"name": "image", "dataType": "FP32", "shape": [-1]}],
    "outputs": [{"name": "label", "dataType": "INT64", "shape": [1], "from": "read.label"}],
    "steps": [
        {"name": "read", "modelRef": {"name": "digits"}, "inputs": {"x": "request.image"}, "outputs": {"y": "label"}}
    ],
}
"""An ensemble with one step, which is the model `digits`."""
SPEC: Object = {"model": {"uri": "s3://models/bert"}}
NUMBER = "deployment.kubernetes.io/revision"
LATE = "ProgressDeadlineExceeded"
DONE = "NewReplicaSetAvailable"


class World:
    """One reconcile after the other, each followed by what Kubernetes' controllers do."""

    def __init__(
        self, spec: Object = SPEC, key: Key | None = None, members: Mapping[str, Object] | None = None
    ) -> None:
        self.key = key or model_key()
        self.platform = PLATFORM
        self.members = dict(members or {})
        self.now = second(DEADLINE + 300)
        self.children: dict[tuple[str, str], Object] = {}
        self.replica_sets: dict[str, Object] = {}
        """By revision."""
        self.pods: list[Object] = []
        self.refused_pods: tuple[str, ...] = ()
        """What ReplicaSets say about pods that they may not make."""
        self.progress = "ReplicaSetUpdated"
        self.object: Object = {
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": str(self.key.kind),
            "metadata": {"name": self.key.name, "namespace": self.key.namespace, "uid": UID, "generation": 1},
            "spec": _copy(spec),
        }

    # What users do.

    def edit(self, **spec: Any) -> None:
        """Change fields of the spec; None removes one."""
        self.object["spec"] |= spec
        self.object["spec"] = {name: value for name, value in self.object["spec"].items() if value is not None}
        self.object["metadata"]["generation"] += 1

    def undo(self, revision: str) -> None:
        """`kubectl rollout undo deployment/NAME --to-revision`: the template and all annotations are the ReplicaSet's."""
        replica_set = self.replica_sets[revision]
        self.deployment["spec"]["template"] = _copy(replica_set["spec"]["template"])
        self.deployment["metadata"]["annotations"] = _copy(replica_set["metadata"]["annotations"])
        self._control()

    # The operator.

    def decide(self) -> Decided:
        return self._decide(Subject.of(self.snapshot(), self.platform))

    def _decide(self, subject: Subject) -> Decided:
        """With the smallest slice of one node for each need."""
        devices = Devices()
        if subject.spec is not None and subject.spec.workload.accelerator.is_wanted:
            assert subject.demand is not None
            kept = subject.failed_placement or subject.kept_placement
            devices = Devices(kept or choose(subject.demand, Ledger(inventory([NODE]))))
        return decide(subject, devices, self.now)

    def reconcile(self) -> list[EventDraft]:
        """Reconcile until nothing changes. Returns the events."""
        events: list[EventDraft] = []
        written = self._written()
        for _ in range(9):
            subject, before = Subject.of(self.snapshot(), self.platform), written
            decided = self._decide(subject)
            for change in decided.changes:
                self._make(change)
            events += decided.events
            subject = subject.seen(self.snapshot())
            decided = replace(decided, strategy=strategy_now(subject, decided, self.now))
            status = status_of(subject, decided, Performed(), self.now)
            events += events_of(self.object.get("status"), status)
            self.object["status"] = _copy(status)
            self._control()
            written = self._written()
            if written == before:
                assert decided.changes == decided.events == ()
                return events
        raise AssertionError("it does not come to rest")

    def _written(self) -> str:
        """All objects as text: to compare texts takes less time than to copy objects."""
        return json.dumps([list(self.children.values()), self.object, self.replica_sets])

    def _make(self, change: object) -> None:
        match change:
            case Apply(value):
                where = value["kind"], value["metadata"]["name"]
                known = self.children.get(where, {"metadata": {}})
                made = _copy({**known, **value, "metadata": {**known["metadata"], **value["metadata"]}})
                made["metadata"] |= {"uid": f"uid of {where}", "resourceVersion": "7"}
                self.children[where] = made
            case Delete(_, kind, _, name):
                del self.children[kind, name]
            case _:
                raise AssertionError(change)

    # Kubernetes' controllers.

    def serve(self, *revisions: str) -> None:
        """Of each of these revisions one pod serves; there are no others."""
        self.have(*(serving(f"bert-{name}-a", template=name) for name in revisions))
        self.progress = DONE if len(revisions) == 1 else "ReplicaSetUpdated"
        self._control()

    def have(self, *pods: Object) -> None:
        self.pods = [_copy(each) for each in pods]
        for each in self.pods:
            each["metadata"]["labels"][REVISION_LABEL] = each["metadata"]["labels"]["pod-template-hash"]

    def _control(self) -> None:
        live = self.deployment
        name = live["spec"]["template"]["metadata"]["labels"][REVISION_LABEL]
        numbers = [int(each["metadata"]["annotations"][NUMBER]) for each in self.replica_sets.values()]
        known = self.replica_sets.get(name)
        number = numbers and known and int(known["metadata"]["annotations"][NUMBER]) == max(numbers) and max(numbers)
        self.replica_sets[name] = {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "metadata": {
                "name": f"bert-{name}",
                "namespace": "prod",
                "labels": {"pod-template-hash": name, REVISION_LABEL: name},
                "annotations": {**live["metadata"]["annotations"], NUMBER: str(number or max(numbers, default=0) + 1)},
            },
            "spec": {"template": live["spec"]["template"]},
        }
        for each, replica_set in self.replica_sets.items():
            ready = sum(
                pod_["metadata"]["labels"]["pod-template-hash"] == each and _is_ready(pod_) for pod_ in self.pods
            )
            replica_set["status"] = {"readyReplicas": ready}
        live["metadata"]["generation"] = 1
        live["status"] = deployment(progress=self.progress)["status"]

    # What one sees.

    @property
    def deployment(self) -> Object:
        return self.children["Deployment", self.key.name]

    @property
    def revision(self) -> str:
        return str(self.deployment["spec"]["template"]["metadata"]["labels"][REVISION_LABEL])

    @property
    def image(self) -> str:
        return str(self.deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    def annotation(self, name: str) -> str:
        return str(self.deployment["metadata"]["annotations"][name])

    @property
    def status(self) -> Object:
        status: Object = self.object["status"]
        return status

    def condition(self, type_: str) -> str:
        found = next((each for each in self.status["conditions"] if each["type"] == type_), None)
        return f"{found['status']} {found['reason']}" if found else ""

    def message(self, type_: str) -> str:
        return str(next(each["message"] for each in self.status["conditions"] if each["type"] == type_))

    def outcomes(self) -> list[str]:
        """`REVISION GENERATION OUTCOME REASON` of each revision."""
        found = read_history(self.status)
        return [f"{each.revision} {each.generation} {each.outcome} {each.reason}".strip() for each in found]

    def snapshot(self) -> Snapshot:
        return Snapshot(
            key=self.key,
            object=self.object,
            members=self.members,
            children=tuple(self.children.values()),
            replica_sets=tuple(self.replica_sets.values()),
            pods=tuple(self.pods),
            indexes={each["metadata"]["uid"]: READY for each in self.pods if _is_ready(each)},
            refused_pods=self.refused_pods,
        )


def _copy(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _is_ready(pod_: Object) -> bool:
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod_["status"].get("conditions", ()))


def hanging(revision: str) -> Object:
    """A pod whose server has run since long before the deadline, and is not ready."""
    return pod(f"bert-{revision}-a", template=revision, fetch=fetched(finished=2), server=None)


def served_world(spec: Object = SPEC, **options: Any) -> World:
    """A world with a revision that serves."""
    world = World(spec, **options)
    world.reconcile()
    world.serve(world.revision)
    world.reconcile()
    return world


BROKEN = {"uri": "s3://models/broken"}
FIXED = {"uri": "s3://models/fixed"}
CAUSE = "failed to load 'bert' version 1: Internal: no weights"


def load_failed(name: str) -> Object:
    return stopped(ended(1, LOG), name=f"bert-{name}-a", template=name)


def failed_update(world: World | None = None, pod: Any = load_failed) -> tuple[World, str, str]:
    """A world, whose spec became a broken one, up to its deadline; the revision before, and the broken one."""
    world = world or served_world()
    before = world.revision
    world.edit(model=BROKEN)
    world.reconcile()
    broken = world.revision
    world.have(serving(f"bert-{before}-a", template=before), pod(broken))
    world.reconcile()
    assert world.revision == broken
    world.progress = LATE
    world._control()
    return world, before, broken
