"""Chooses the revision that the Deployment should have.

The Deployment keeps its revision as long as its inputs are the same (`revisions.inputs`), so that an upgrade of the
operator, or changed settings of the platform, replace no pod:

    inputs               upgradePolicy   a pod of it is ready    the Deployment gets
    changed, or first    Manual          (any)                   what is built with the settings that its pods have
    changed, or first    (others)        (any)                   what is built
    the same             Manual          (any)                   its revision
    the same             OnSpecChange    yes                     its revision
    the same             OnSpecChange    no                      what is built: it may be the repair
    the same             Auto            (any)                   what is built

A revision is rolled back if it has not become ready within the progress deadline, and the cause is not one that the
revision before would have too: a lack of nodes, devices or quota. Its inputs are not tried again, until the object has
had other inputs.

`kubectl rollout undo` gives the Deployment the template of an older ReplicaSet, and its annotations. The inputs of the
object are then those of another ReplicaSet, whose revision is the newest one in `status.revisions`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from halimede_operator.core.labels import INPUTS, PLACEMENT, POD_SETTINGS, REVISION_LABEL
from halimede_operator.core.platform import Platform
from halimede_operator.core.pods.failure import Reason, Stage
from halimede_operator.core.pods.observed import REVISION, observe
from halimede_operator.core.reading import at, condition, decimal, seconds_before, text_at
from halimede_operator.core.revisions.history import Outcome, read_history
from halimede_operator.core.revisions.pod_settings import changed_settings, read
from halimede_operator.core.revisions.revision import Revision, applied, revision_label
from halimede_operator.core.revisions.rollback import RolledBack, rolled_back_in
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Rollout, UpgradePolicy
from halimede_operator.core.subject import Subject

OTHER_VERSION = "version"
"""What changed, if the operator builds another template from the same settings."""

_CAUSES_OF_THE_CLUSTER = frozenset(
    {
        Reason.DEVICE_LOST,
        Reason.DEVICE_UNHEALTHY,
        Reason.EVICTED,
        Reason.INSUFFICIENT_DEVICES,
        Reason.NODE_LOST,
        Reason.POD_FAILED,
        Reason.QUOTA_EXCEEDED,
        Reason.UNSCHEDULABLE,
        Reason.CLAIM_UNBOUND,
    }
)
"""No reasons to roll back."""


@dataclass(frozen=True, slots=True)
class Choice:
    revision: Revision
    rolled_back: RolledBack | None = None
    """What was rolled back to this revision, if it is not that of the spec."""
    waiting: tuple[str, ...] = ()
    """What changed in the operator that the object's pods do not have yet; empty if they have everything."""
    undone: str = ""
    """The name of an older revision that a user has set, against the spec; "" if none has."""


def choose(subject: Subject, origin: Mapping[str, str], build: Callable[[Platform], Revision], now: str) -> Choice:
    """subject: with a valid spec. origin: the annotations that tell from which inputs a revision is made. build: from
    these inputs."""
    platform, deployment = subject.platform, subject.deployment
    built = build(platform)
    if deployment is None or subject.spec is None:
        return Choice(built)
    rollout = subject.spec.workload.rollout
    known = _Known(subject, deployment)
    live = known.live
    if (restored := _restored(known, rollout, origin, built)) is not None:
        return restored
    current, undone = live, ""
    if live is None or not live.has(origin):
        current, undone = _before_undo(known, origin)
    elif revision_label(deployment) not in ("", live.name):
        undone = known.named(revision_label(deployment))
    if current is None:
        kept = text_at(deployment, "metadata", "annotations", POD_SETTINGS)
        is_manual = rollout.upgrade_policy is UpgradePolicy.MANUAL
        current = build(read(kept, platform)) if is_manual else built
    elif _takes_upgrade(rollout, current, subject.snapshot.pods) and built.hash != current.hash:
        current = built
    elif (
        rollout.auto_rollback
        and not undone
        and (cause := _cause_to_roll_back(known, current, now)) is not None
        and (target := known.last_ready(but=current)) is not None
    ):
        return Choice(target, _record(origin, current, cause, target))
    if current.hash == built.hash:
        return Choice(current, undone=undone)
    changed = changed_settings(current.annotations.get(POD_SETTINGS, ""), platform)
    return Choice(current, waiting=changed or (OTHER_VERSION,), undone=undone)


def _record(origin: Mapping[str, str], failed: Revision, cause: tuple[str, str], target: Revision) -> RolledBack:
    placement = failed.annotations.get(PLACEMENT, "")
    return RolledBack(origin[INPUTS], failed.hash, failed.generation, *cause, target.name, placement)


class _Known:
    """The revisions that exist in the cluster."""

    def __init__(self, subject: Subject, deployment: Object) -> None:
        self.subject = subject
        self.deployment = deployment
        self.history = read_history(subject.status)
        self._replica_sets = subject.snapshot.replica_sets
        self._config_maps = [each for each in subject.snapshot.children if each["kind"] == "ConfigMap"]
        self.live = applied(deployment, self._config_maps)

    def of_replica_sets(self) -> list[tuple[Object, Revision]]:
        """ReplicaSets with their revisions, without those that a hand edit has given annotations of another one."""
        found = ((each, applied(each, self._config_maps)) for each in self._replica_sets)
        return [
            (each, revision)
            for each, revision in found
            if revision is not None and text_at(each, "metadata", "labels", REVISION_LABEL) == revision.name
        ]

    def named(self, name: str) -> str:
        """The name, if a ReplicaSet has this revision; "" otherwise."""
        names = (text_at(each, "metadata", "labels", REVISION_LABEL) for each in self._replica_sets)
        return name if name in names else ""

    def last_ready(self, *, but: Revision) -> Revision | None:
        """The newest revision, other than `but`, that was ready once."""
        ranks = {each.revision: rank for rank, each in enumerate(self.history) if each.was_ready}

        def is_ready(replica_set: Object) -> bool:
            return (decimal(at(replica_set, "status", "readyReplicas")) or 0) > 0

        found = [
            (ranks.get(revision.name, len(ranks)), -(decimal(_number(replica_set)) or 0), revision)
            for replica_set, revision in self.of_replica_sets()
            if revision.hash != but.hash and (revision.name in ranks or is_ready(replica_set))
        ]
        return min(found, key=lambda each: each[:2])[2] if found else None


def _number(replica_set: Object) -> str:
    return text_at(replica_set, "metadata", "annotations", REVISION)


def _restored(known: _Known, rollout: Rollout, origin: Mapping[str, str], built: Revision) -> Choice | None:
    """The choice after a rollback: the revision before stays, until the object has other inputs."""

    def is_held(record: RolledBack | None) -> bool:
        if record is None or not rollout.auto_rollback or record.inputs != origin[INPUTS]:
            return False
        # With Auto, another version of the operator is another attempt.
        return rollout.upgrade_policy is not UpgradePolicy.AUTO or record.hash == built.hash

    record = rolled_back_in(known.deployment)
    if record is not None and is_held(record) and known.live is not None:
        label = revision_label(known.deployment)
        return Choice(known.live, record, undone=known.named(label) if label != known.live.name else "")
    newest = known.history[0] if known.history else None
    live = known.live
    if live is None or newest is None or (newest.revision, newest.outcome) != (live.name, Outcome.ROLLED_BACK):
        return None
    # `kubectl rollout undo` has brought back what was rolled back, and removed the record with it.
    for replica_set, revision in known.of_replica_sets():
        record = rolled_back_in(replica_set)
        if record is not None and is_held(record) and record.hash == live.hash:
            return Choice(revision, record, undone=live.name)
    return None


def _before_undo(known: _Known, origin: Mapping[str, str]) -> tuple[Revision | None, str]:
    """The revision that the Deployment had before `kubectl rollout undo`, and the name of the one it has now.

    None if the object has other inputs than the Deployment because a user changed the object.
    """
    label = revision_label(known.deployment)
    if not known.history or known.history[0].outcome is Outcome.ROLLED_BACK or known.history[0].revision == label:
        return None, ""
    newest = known.history[0].revision
    found = next((each for _, each in known.of_replica_sets() if each.name == newest and each.has(origin)), None)
    return found, label if found is not None else ""


def _takes_upgrade(rollout: Rollout, revision: Revision, pods: Sequence[Object]) -> bool:
    match rollout.upgrade_policy:
        case UpgradePolicy.MANUAL:
            return False
        case UpgradePolicy.ON_SPEC_CHANGE:
            return not any(_is_ready(pod, revision.name) for pod in pods)
        case UpgradePolicy.AUTO:
            return True


def _is_ready(pod: Object, revision: str) -> bool:
    is_of_revision = at(pod, "metadata", "labels", REVISION_LABEL) == revision
    is_ready = condition(pod, "Ready").get("status") == "True"
    return is_of_revision and is_ready and "deletionTimestamp" not in pod["metadata"]


def _cause_to_roll_back(known: _Known, revision: Revision, now: str) -> tuple[str, str] | None:
    """Reason and message of why the Deployment's revision does not become ready; None if it was, or may be yet."""
    if condition(known.deployment, "Progressing").get("reason") != "ProgressDeadlineExceeded":
        return None
    if any((each.revision, each.outcome) == (revision.name, Outcome.SERVING) for each in known.history):
        return None
    seen = observe(known.subject, now)
    if not seen.deadline or not seen.is_settled or len(seen.serving_newest) >= seen.desired:
        return None
    worst = seen.worst
    if worst is not None and worst.reason is Reason.PODS_REFUSED:
        return str(worst.reason), worst.message
    # The deadline may have passed while the pod waited for a device: each pod has the whole time once it has a node.
    since = seconds_before(now, decimal(at(known.deployment, "spec", "progressDeadlineSeconds")) or 0)
    tried = [pod for pod in seen.newest if pod.placed and pod.placed <= since and pod.stage < Stage.SERVING]
    failures = [pod.failure for pod in tried if pod.failure and pod.failure.reason not in _CAUSES_OF_THE_CLUSTER]
    if failures:
        own = min(failures, key=lambda failure: failure.order)
        return str(own.reason), own.message
    if worst is None and seen.slowest is not None and seen.slowest in tried:
        return "ProgressDeadlineExceeded", f"{seen.deadline} {seen.slowest.waits_for}"
    return None
