"""Evaluates an object's pods: what is wanted, which pods exist, and which failure is the worst."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from halimede_operator.core.api_errors import is_over_quota
from halimede_operator.core.labels import REVISION_LABEL
from halimede_operator.core.pods.failure import Failure, Reason, Stage, joined
from halimede_operator.core.pods.memory import Memory, measured
from halimede_operator.core.pods.read import read_pod
from halimede_operator.core.pods.view import PodView
from halimede_operator.core.reading import (
    at,
    at_rest,
    clean,
    condition,
    decimal,
    integer_at,
    name_at,
    seconds_before,
    text_at,
)
from halimede_operator.core.scaling.replicas import present_of
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import EnsembleSpec, ModelSpec, Spec, Workload
from halimede_operator.core.subject import Subject

REVISION = "deployment.kubernetes.io/revision"


@dataclass(frozen=True, slots=True)
class Observed:
    """An object with its pods evaluated."""

    subject: Subject
    """Without a spec if that has problems. The pods are then those of an earlier spec."""
    served: str
    """The name under which clients request the model or ensemble."""
    template_hash: str
    """Of the Deployment's newest ReplicaSet; "" if there is none yet."""
    desired: int
    """Replicas that should serve, 0 while suspended."""
    is_newest_of_spec: bool
    """The newest ReplicaSet has the pod template of the Deployment: that of the spec, or after a rollback that of the
    revision before."""
    is_settled: bool
    """The whole Deployment is as it should be, and its controller has seen it."""
    is_paused: bool
    """A user has set `paused` in the Deployment: its controller creates no pods of a new template."""
    newest: tuple[PodView, ...]
    """Active pods of the newest template, oldest first."""
    older: tuple[PodView, ...]
    """Active pods of older templates."""
    is_unplaced: bool
    """No node has devices that fit, so that there are no pods of this spec; `worst` says why."""
    worst: Failure | None
    """Why fewer replicas than desired of the newest template serve, and why waiting will not help."""
    deadline: str
    """The Deployment's message that the rollout takes too long, not counting fetches; "" otherwise."""
    memory: Memory | None
    """The memory that the pods of a template needed, as far as it was measured."""

    @property
    def generation(self) -> int:
        return decimal(at(self.subject.snapshot.object, "metadata", "generation")) or 0

    @property
    def is_deleting(self) -> bool:
        return at(self.subject.snapshot.object, "metadata", "deletionTimestamp") is not None

    @property
    def active(self) -> tuple[PodView, ...]:
        return self.newest + self.older

    @property
    def serving(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.active if pod.stage == Stage.SERVING)

    @property
    def serving_newest(self) -> tuple[PodView, ...]:
        return tuple(pod for pod in self.newest if pod.stage == Stage.SERVING)

    @property
    def slowest(self) -> PodView | None:
        """The newest template's pod with the lowest stage; None if all serve."""
        behind = [pod for pod in self.newest if pod.stage < Stage.SERVING]
        return min(behind, key=lambda pod: (pod.stage, pod.age), default=None)

    @property
    def is_same_template(self) -> bool:
        """Whether the old status is about pods of this template."""
        described = text_at(self.subject.status, "current", "templateHash")
        return described != "" and described == self.template_hash

    @property
    def shown(self) -> PodView | None:
        """The pod to describe: a serving one of the newest template, else any serving one, else one of the newest."""
        return next(iter(self.serving_newest or self.serving or self.newest), None)

    @property
    def was_rolled_out(self) -> bool:
        """Whether all replicas of the newest template were once available together. Scaling does not change it."""
        progress = condition(self.subject.deployment, "Progressing")
        return progress.get("reason") == "NewReplicaSetAvailable" or self.was_ready

    @property
    def was_ready(self) -> bool:
        """Whether Ready was True for this template. Then one failed read of a pod's index does not change it."""
        return self.is_same_template and condition({"status": self.subject.status}, "Ready").get("status") == "True"


def observe(subject: Subject, now: str, unplaced: str = "") -> Observed:
    """Evaluate the pods.

    now: UTC time as `reading.moment_at` writes it. unplaced: why the pods can have no devices; "" if they can.
    """
    snapshot, spec, deployment = subject.snapshot, subject.spec, subject.deployment
    served = _served_name(snapshot, spec)
    pods = sorted((_read(snapshot, pod, served, now) for pod in snapshot.pods), key=lambda pod: pod.age)
    pods = [replace(pod, failure=_with_hint(pod.failure, snapshot.free_devices)) for pod in pods]
    active = [pod for pod in pods if pod.is_active]
    template_hash, revision = _newest_template(snapshot.replica_sets)
    wanted = name_at(deployment, "spec", "template", "metadata", "labels", REVISION_LABEL)
    is_newest_of_spec = template_hash != "" and revision == wanted
    newest = tuple(pod for pod in active if template_hash in {"", pod.template_hash})
    asked = at(deployment, "spec", "replicas")
    desired = (decimal(asked) or 0) if spec is None else _desired(spec.workload, deployment)
    ended = [p for p in pods if p.has_ended and not p.is_terminating and p.template_hash == template_hash]
    serving = [pod for pod in newest if pod.stage == Stage.SERVING]
    return Observed(
        subject=subject,
        served=served,
        template_hash=template_hash,
        desired=desired,
        is_newest_of_spec=is_newest_of_spec,
        is_settled=_is_nothing(snapshot, deployment) or (is_newest_of_spec and _has_seen(deployment, desired)),
        is_paused=at(deployment, "spec", "paused") is True,
        newest=newest,
        older=tuple(pod for pod in active if template_hash not in {"", pod.template_hash}),
        is_unplaced=bool(unplaced),
        worst=(
            Failure(Reason.INSUFFICIENT_DEVICES, clean(unplaced), Stage.PLACED)
            if unplaced
            else _worst(newest, active, ended, desired, snapshot.refused_pods)
        ),
        deadline=_deadline(deployment, newest, now),
        memory=measured(subject.status, spec, serving, template_hash, now),
    )


def _desired(workload: Workload, deployment: Object | None) -> int:
    if workload.suspend:
        return 0
    is_scaled = workload.autoscaling is not None and deployment is not None
    return present_of(deployment) if is_scaled and deployment is not None else workload.replicas


def _deadline(deployment: Object | None, newest: Sequence[PodView], now: str) -> str:
    """The Deployment's message if the rollout is late and no pod is fetching; "" otherwise.

    A Deployment counts the time of a fetch as time without progress, but large models may take longer than its
    deadline. So a pod gets the time of the deadline again from the end of its fetch.
    """
    progress = condition(deployment, "Progressing")
    if progress.get("reason") != "ProgressDeadlineExceeded":
        return ""
    since = seconds_before(now, decimal(at(deployment, "spec", "progressDeadlineSeconds")) or 0)
    if any((pod.is_fetching and pod.failure is None) or pod.fetch_ended > since for pod in newest):
        return ""
    return clean(at_rest(text_at(progress, "message")) or "the rollout takes too long")


def _served_name(snapshot: Snapshot, spec: Spec | None) -> str:
    match spec:
        case ModelSpec():
            return spec.model.name
        case EnsembleSpec():
            return spec.name
        case None:
            return text_at(snapshot.object, "spec", "model", "name") or snapshot.key.name


def _read(snapshot: Snapshot, pod: Object, served: str, now: str) -> PodView:
    uid = text_at(pod, "metadata", "uid")
    short = snapshot.shortages.get(text_at(pod, "spec", "nodeName"), ())
    index, events = snapshot.indexes.get(uid), snapshot.kubelet_events.get(uid, ())
    return read_pod(pod, index, served, now, events, short, snapshot.volume_claims)


def _newest_template(replica_sets: Sequence[Object]) -> tuple[str, str]:
    """The template hash and our revision label of the ReplicaSet with the highest revision.

    The highest revision and not the youngest object: a rollback gives an old ReplicaSet a new revision.
    """
    numbered = [
        (revision, rs)
        for rs in replica_sets
        if (revision := decimal(at(rs, "metadata", "annotations", REVISION))) is not None
    ]
    _, newest = max(numbered, key=lambda pair: pair[0], default=(0, None))
    labels = at(newest, "metadata", "labels")
    return name_at(labels, "pod-template-hash"), name_at(labels, REVISION_LABEL)


def _is_nothing(snapshot: Snapshot, deployment: Object | None) -> bool:
    """Whether the Deployment wants no pods and never had any. Nothing is to be expected of its controller then, and an
    object that is created with 0 replicas needs no second status."""
    is_first = at(deployment, "metadata", "generation") == 1
    return is_first and at(deployment, "spec", "replicas") == 0 and not snapshot.pods


def _has_seen(deployment: Object | None, desired: int) -> bool:
    """Whether the Deployment has the replicas of the spec, and its controller has seen the newest generation."""
    generation = integer_at(deployment, "metadata", "generation") or 0
    seen = integer_at(deployment, "status", "observedGeneration") or 0
    return seen >= generation and decimal(at(deployment, "spec", "replicas")) == desired


def _worst(
    newest: Sequence[PodView], active: Sequence[PodView], ended: Sequence[PodView], desired: int, refused: Sequence[str]
) -> Failure | None:
    """The failure to report: the worst reason, and of equal ones that of the oldest pod.

    Pods of older templates count only if there is none of the newest, because they are being replaced anyway. A pod
    that has ended counts until a later pod has started: by then its ReplicaSet has replaced it.
    """
    if sum(pod.stage == Stage.SERVING for pod in newest) >= desired:
        return None
    started = max((pod.created for pod in newest if pod.has_started), default="")
    counted = [*(newest or active), *(pod for pod in ended if pod.created >= started)]
    failures = [pod.failure for pod in counted if pod.failure is not None]
    if len(newest) < desired:
        failures += [_refusal(message) for message in refused]
    return min(failures, key=lambda failure: failure.order[0], default=None)


def _refusal(message: str) -> Failure:
    reason = Reason.QUOTA_EXCEEDED if is_over_quota(message) else Reason.PODS_REFUSED
    return Failure(reason, clean(at_rest(message)), Stage.PLACED)


_HINT_ROOM = 500


def _with_hint(failure: Failure | None, free_devices: str) -> Failure | None:
    """The failure; if a pod that requests devices has no node, its message also says which devices are free."""
    waits = failure is not None and failure.reason in {Reason.INSUFFICIENT_DEVICES, Reason.UNSCHEDULABLE}
    if failure is None or not waits or not free_devices:
        return failure
    scheduler = clean(failure.message, _HINT_ROOM)
    if failure.reason is Reason.UNSCHEDULABLE:
        return replace(failure, message=clean(joined(scheduler, free_devices)))
    # What is free is what a person needs to know; which nodes the scheduler counted is a detail.
    said = scheduler.removeprefix(f"pod {failure.pod}: ")
    return replace(
        failure, message=clean(f"pod {failure.pod}: {free_devices}"), detail=clean(f"{said} {failure.detail}")
    )
