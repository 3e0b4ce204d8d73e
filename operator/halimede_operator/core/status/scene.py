"""What a status is told of: the snapshot, sorted into what was asked, what is there, and what is in the way."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from halimede_operator.core.api.spec import EnsembleSpec, ModelSpec, Spec
from halimede_operator.core.pods import Failure, PodView, Reason, Stage, read_pod
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    decimal,
    integer_at,
    name_at,
    text_at,
)
from halimede_operator.core.snapshot import Object, Snapshot

REVISION = "deployment.kubernetes.io/revision"


@dataclass(frozen=True, slots=True)
class Scene:
    snapshot: Snapshot
    spec: Spec | None
    """None where it has problems: the pods are those of a spec before it."""
    old: object
    """The status as it was."""
    served: str
    """The name that clients ask for."""
    deployment: Object | None
    template_hash: str
    """Of the Deployment's newest ReplicaSet; "" while there is none."""
    desired: int
    """Replicas that should serve, 0 while suspended."""
    is_settled: bool
    """The Deployment is the one of the spec, and its controller has seen it."""
    newest: tuple[PodView, ...]
    """Live pods of the newest template, oldest first."""
    older: tuple[PodView, ...]
    """Live pods of the templates before."""
    worst: Failure | None
    """Why there are fewer replicas of the newest template than desired, and will be."""
    deadline: str
    """What the Deployment says of a rollout that takes too long; "" otherwise."""

    @property
    def generation(self) -> int:
        return decimal(at(self.snapshot.object, "metadata", "generation")) or 0

    @property
    def is_deleting(self) -> bool:
        return at(self.snapshot.object, "metadata", "deletionTimestamp") is not None

    @property
    def live(self) -> tuple[PodView, ...]:
        return self.newest + self.older

    @property
    def serving(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.live if pod.stage == Stage.SERVING)

    @property
    def serving_newest(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.newest if pod.stage == Stage.SERVING)

    @property
    def slowest(self) -> PodView | None:
        """The newest template's pod that has come least far; None where all serve."""
        behind = [pod for pod in self.newest if pod.stage < Stage.SERVING]
        return min(behind, key=lambda pod: (pod.stage, pod.age), default=None)

    @property
    def is_same_template(self) -> bool:
        """What the status before said, it said of the pods of this template."""
        return self.template_hash != "" and text_at(self.old, "current", "templateHash") == self.template_hash

    @property
    def was_ready(self) -> bool:
        """Of this template. What one pod's index was is then not doubted because it cannot be asked for once."""
        return self.is_same_template and condition({"status": self.old}, "Ready").get("status") == "True"


def scene_of(snapshot: Snapshot, spec: Spec | None) -> Scene:
    deployment = next((c for c in snapshot.children if c.get("kind") == "Deployment"), None)
    served = _served_name(snapshot, spec)
    pods = sorted((_read(snapshot, pod, served) for pod in snapshot.pods), key=lambda pod: pod.age)
    pods = [replace(pod, failure=_with_hint(pod.failure, snapshot.nodes)) for pod in pods]
    live = [pod for pod in pods if pod.is_live]
    template_hash = _newest_template(snapshot.replica_sets)
    newest = tuple(pod for pod in live if template_hash in {"", pod.template_hash})
    asked = at(deployment, "spec", "replicas")
    desired = (decimal(asked) or 0) if spec is None else 0 if spec.workload.suspend else spec.workload.replicas
    over = [p for p in pods if p.is_over and not p.is_leaving and p.template_hash == template_hash]
    progress = condition(deployment, "Progressing")
    is_late = progress.get("reason") == "ProgressDeadlineExceeded"
    return Scene(
        snapshot=snapshot,
        spec=spec,
        old=at(snapshot.object, "status"),
        served=served,
        deployment=deployment,
        template_hash=template_hash,
        desired=desired,
        is_settled=_is_settled(deployment, desired),
        newest=newest,
        older=tuple(pod for pod in live if template_hash not in {"", pod.template_hash}),
        worst=_worst(newest, live, over, desired, snapshot.quota_messages),
        deadline=clean(at_rest(text_at(progress, "message")) or "the rollout takes too long") if is_late else "",
    )


def _served_name(snapshot: Snapshot, spec: Spec | None) -> str:
    match spec:
        case ModelSpec():
            return spec.model.name
        case EnsembleSpec():
            return spec.name
        case None:
            return text_at(snapshot.object, "spec", "model", "name") or snapshot.key.name


def _read(snapshot: Snapshot, pod: Object, served: str) -> PodView:
    uid = text_at(pod, "metadata", "uid")
    short = snapshot.shortages.get(text_at(pod, "spec", "nodeName"), ())
    return read_pod(pod, snapshot.indexes.get(uid), served, snapshot.mount_events.get(uid, ()), short)


def _newest_template(replica_sets: Sequence[Object]) -> str:
    """The template hash of the ReplicaSet of the highest revision: a rollback gives an old one a new number."""
    numbered = [
        (revision, name_at(rs, "metadata", "labels", "pod-template-hash"))
        for rs in replica_sets
        if (revision := decimal(at(rs, "metadata", "annotations", REVISION))) is not None
    ]
    return max(numbered, default=(0, ""))[1]


def _is_settled(deployment: Object | None, desired: int) -> bool:
    generation = integer_at(deployment, "metadata", "generation") or 0
    seen = integer_at(deployment, "status", "observedGeneration") or 0
    return deployment is not None and seen >= generation and decimal(at(deployment, "spec", "replicas")) == desired


def _worst(
    newest: Sequence[PodView], live: Sequence[PodView], over: Sequence[PodView], desired: int, refused: Sequence[str]
) -> Failure | None:
    """The failure to tell: by reason, then of the oldest pod.

    Pods of templates before count only while there is none of the newest: they go anyway. A pod that is over counts
    until a later one has begun: its ReplicaSet has replaced it by then.
    """
    if sum(pod.stage == Stage.SERVING for pod in newest) >= desired:
        return None
    begun = max((pod.created for pod in newest if pod.has_begun), default="")
    standing = [*(newest or live), *(pod for pod in over if pod.created >= begun)]
    failures = [pod.failure for pod in standing if pod.failure is not None]
    if len(newest) < desired:
        failures += [_refusal(message) for message in refused]
    return min(failures, key=lambda failure: failure.order[0], default=None)


def _refusal(message: str) -> Failure:
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in message else Reason.PODS_REFUSED
    return Failure(reason, clean(at_rest(message)), Stage.PLACED)


_ASKED = re.compile(r"Insufficient (nvidia\.com/[\w-]{1,64}(?:\.[\w-]{1,64}){0,4})")
_HINT_ROOM = 600


def _with_hint(failure: Failure | None, nodes: Sequence[Object]) -> Failure | None:
    """Says beside a lack of devices which ones the nodes have."""
    if failure is None or failure.reason != Reason.INSUFFICIENT_DEVICES or not nodes:
        return failure
    offered: Counter[str] = Counter()
    for node in nodes:
        allocatable = at(node, "status", "allocatable")
        names = [n for n in allocatable if isinstance(n, str)] if isinstance(allocatable, dict) else []
        offered.update({n: decimal(allocatable[n]) or 0 for n in names if n.startswith("nvidia.com/")})
    listed = ", ".join(f"{clean(name, 128)} ({count})" for name, count in sorted((+offered).items()))
    missing = [name for name in dict.fromkeys(_ASKED.findall(failure.message)) if not offered[name]]
    hint = f"No node has {' or '.join(missing)}. " if missing else ""
    hint += f"The nodes have in all: {listed}" if listed else "The nodes have no such devices at all"
    return replace(failure, message=clean(f"{clean(failure.message, _HINT_ROOM)} {hint}"))
