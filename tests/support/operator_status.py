"""Statuses for snapshots, and parts of them."""

from collections.abc import Sequence
from typing import Any

from halimede_operator.core.children.diff import Conflict
from halimede_operator.core.decided import ApplyFailure, Decided, Performed
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Problem, Spec, Workload
from halimede_operator.core.status import status_of
from halimede_operator.core.subject import Subject
from support.operator_pods import IMAGE, NEW, deployment, serving, snapshot
from support.operator_specs import PLATFORM, model_key, model_spec

NOW, LATER = "2026-11-22T10:00:00Z", "2026-11-22T11:00:00Z"
NAME = f"bert-{NEW}-aaaaa"
SERVER = f"pod {NAME}: container server (image {IMAGE})"
FETCH = f"pod {NAME}: container fetch (image {IMAGE})"
ON = f"pod {NAME} on node node-1"
NO_GPU = (
    "0/2 nodes are available: 2 Insufficient nvidia.com/mig-1g.5gb. no new claims to deallocate, "
    "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod."
)
REJECTED = "Pod was rejected: Allocate failed due to requested number of devices unavailable for nvidia.com/gpu. Requested: 1, Available: 0, which is unexpected"
LOG = (
    "I1122 09:12:25.737360 1 app.py:200] \"starting\"\n"
    "E1122 09:12:25.747360 1 lifecycle.py:945] \"failed to load 'bert' version 1: Internal: no weights\"\n"
    'E1122 09:12:25.747360 1 app.py:212] "creating server: Internal - failed to load all models: bert"\n'
    'I1122 09:12:25.747395 1 app.py:313] "Waiting for in-flight requests to complete."\n'
)  # fmt: skip
TWO = model_spec(workload=Workload(replicas=2))
PROBLEM = Problem("spec.model.uri", "must be a URI")


def ready_state(status: Object) -> tuple[str, str, str]:
    return next((c["status"], c["reason"], c["message"]) for c in status["conditions"] if c["type"] == "Ready")


def condition_state(status: Object, type_: str) -> tuple[str, str]:
    return next((c["status"], c["reason"]) for c in status["conditions"] if c["type"] == type_)


def status_for(
    seen: Snapshot,
    spec: Spec | None = TWO,
    *,
    now: str = NOW,
    problems: Sequence[Problem] = (),
    failures: Sequence[ApplyFailure] = (),
    conflicts: Sequence[Conflict] = (),
    is_postponed: bool = False,
    **decided: Any,
) -> Object:
    """decided: further parts of a `Decided`."""
    subject = Subject(seen, PLATFORM, spec, tuple(problems))
    given = Decided(tuple(conflicts), failures=tuple(failures), **decided)
    return status_of(subject, given, Performed(is_postponed), now)


def conditions(status: Object) -> dict[str, str]:
    return {c["type"]: f"{c['status']} {c['reason']}" for c in status["conditions"]}


def message(status: Object, type_: str = "Ready") -> str:
    return next(c["message"] for c in status["conditions"] if c["type"] == type_)


def two_serving(**fields: object) -> Snapshot:
    return snapshot(model_key(), serving("bert-1-a"), serving("bert-1-b", node="node-2"), child=deployment(2), **fields)
