"""The conditions of both kinds. Each one is a small decision about what was observed.

Ready means that the newest spec is served. For an object that is accepted and wants replicas:

    of the newest spec's replicas serve    was rolled out before    Ready                   Degraded
    all, and no pod of another spec        (any)                    True                    a device or worker is ill
    all, and pods of the spec before       (any)                    False, Progressing      False
    some                                   yes                      True, "3/5 replicas"    a replica fails
    some                                   no                       False, with the cause   a replica fails
    none                                   (any)                    False, with the cause   a replica fails, and pods
                                                                                            of the spec before serve

A spec is rolled out once all replicas of its pod template were available at the same time. So Ready waits for all
replicas of a new spec, and stays True when the object is scaled or a pod is lost, as long as one replica serves. Ready
is False with 0 replicas: clients that wait for Ready send requests next, and no pod would answer them.

After a rollback the table is about the revision that was restored. Degraded and Stalled are True with the reason
RolledBack, because the newest spec is not served.

Ready is always present. While the object serves, or is at rest without replicas, the others are present only if they
say something that Ready does not (`is_usual`). Degraded is present only while it is True.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.children.diff import Conflict
from halimede_operator.core.decided import ApplyFailure
from halimede_operator.core.pods.failure import NormalReason, Stage
from halimede_operator.core.pods.memory import memory_advice
from halimede_operator.core.pods.observed import Observed
from halimede_operator.core.pods.placements import placements_text
from halimede_operator.core.pods.view import PodView
from halimede_operator.core.reading import at, clean, condition, integer_at, name_at, text_at
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.rollout.strategy import Strategy
from halimede_operator.core.scaling.idle import WAKE
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import Autoscaling, Problem, UpgradePolicy
from halimede_operator.core.status.conditions import FALSE, TRUE, UNKNOWN, Condition
from halimede_operator.core.status.steps import Member, MemberState


@dataclass(frozen=True, slots=True)
class ConditionState:
    status: str
    reason: str
    message: str
    is_usual: bool = False
    """It says what Ready implies: all is as it should be, or there are no replicas."""

    def of(self, type_: str) -> Condition:
        return Condition(type_, self.status, str(self.reason), clean(self.message))


@dataclass(frozen=True, slots=True)
class Obstacles:
    """Why the cluster does not match the spec."""

    problems: Sequence[Problem]
    failures: Sequence[ApplyFailure]
    conflicts: Sequence[Conflict]


def conditions_of(
    observed: Observed, obstacles: Obstacles, members: Sequence[Member] | None, rolled_back: RolledBack | None
) -> list[Condition]:
    """The conditions to report, in the order in which they are shown. members: None for an InferenceModel. rolled_back:
    what was rolled back, if the Deployment has an earlier revision than that of the spec."""
    accepted = accepted_state(obstacles)
    steps = None if members is None else steps_state(observed, members)
    stuck = next((v for v in (accepted, _member_problem(members)) if v is not None and v.status == FALSE), None)
    ready = ready_state(observed, stuck, obstacles)
    states = {
        # First, because `kubectl describe` shows them in this order.
        "Ready": ready,
        "Accepted": accepted,
        "StepsReady": steps,
        "ModelFetched": fetched_state(observed),
        "Placed": placed_state(observed),
        "ModelLoaded": loaded_state(observed),
        "Available": available_state(observed, ready),
        "Progressing": progressing_state(observed, stuck),
        "Degraded": degraded_state(observed, stuck, ready, obstacles),
        **_for_kstatus(observed, stuck, ready),
    }
    if rolled_back is not None and stuck is None and not observed.is_deleting:
        states = _after_rollback(rolled_back, states)
    return [state.of(type_) for type_, state in _informative(states).items()]


def _informative(states: Mapping[str, ConditionState | None]) -> dict[str, ConditionState]:
    """The conditions to report: while Ready is True, or no replicas are wanted, not the usual ones."""
    present = {type_: state for type_, state in states.items() if state is not None}
    ready = present["Ready"]
    if ready.status != TRUE and not ready.is_usual:
        return present
    # Without replicas nothing else says that the spec is valid.
    stay = {"Ready"} if ready.status == TRUE else {"Ready", "Accepted"}
    return {type_: state for type_, state in present.items() if type_ in stay or not state.is_usual}


def _after_rollback(
    record: RolledBack, states: Mapping[str, ConditionState | None]
) -> dict[str, ConditionState | None]:
    """The conditions while the revision before is served instead of the spec's."""
    failed = f"revision {record.name} of generation {record.generation}"
    cause = (
        f"{failed} did not become ready, and revision {record.former} was restored: {record.reason}: {record.message}"
    )
    rolled_back = ConditionState(TRUE, ROLLED_BACK, cause)
    changed: dict[str, ConditionState | None] = {"Degraded": rolled_back}
    if (progressing := states["Progressing"]) is not None and progressing.reason == COMPLETE:
        text = f"all pods are of revision {record.former}; {failed} was rolled back"
        changed["Progressing"] = ConditionState(FALSE, ROLLED_BACK, text)
    if (ready := states["Ready"]) is not None and ready.status == TRUE:
        changed["Ready"] = ConditionState(TRUE, ready.reason, f"{ready.message}; {failed} was rolled back")
    kept = {type_: state for type_, state in states.items() if type_ not in {"Reconciling", "Stalled"}}
    return {**kept, **changed, "Stalled": rolled_back}


def upgrade_state(observed: Observed, changed: Sequence[str]) -> ConditionState:
    until = "their template changes, or none of them is ready"
    spec = observed.subject.spec
    if spec is not None and spec.workload.rollout.upgrade_policy is UpgradePolicy.MANUAL:
        until = "spec.rollout.upgradePolicy is no longer Manual"
    text = f"the operator would now make other pods (changed: {', '.join(changed)})"
    return ConditionState(TRUE, "PlatformChanged", f"{text}; the pods keep what they were made with until {until}")


def unread_state(read: int) -> ConditionState:
    text = f"the object has more pods than the {read} that the operator reads, and this status is of these alone"
    return ConditionState(TRUE, "TooManyPods", f"{text}; scale it down, or raise --max-replicas of the operator")


def strategy_state(strategy: Strategy | None, observed: Observed) -> ConditionState | None:
    """How old pods are replaced; None while none are. The text stays what it was when the rollout began."""
    if strategy is None or not strategy.reason:
        return None
    status = observed.subject.status
    old = condition({"status": status}, "RolloutStrategy")
    is_told = old.get("reason") == strategy.policy and integer_at(status, "observedGeneration") == observed.generation
    return ConditionState(TRUE, strategy.policy, text_at(old, "message") if is_told else strategy.reason)


def accepted_state(obstacles: Obstacles) -> ConditionState:
    if obstacles.problems:
        text = "; ".join(f"{problem.path}: {problem.message}" for problem in obstacles.problems)
        return ConditionState(FALSE, "InvalidSpec", text)
    if obstacles.conflicts:
        text = "; ".join(
            f"{_ref_of(taken.object)} exists and belongs to {taken.owner or 'somebody else'}"
            for taken in obstacles.conflicts
        )
        return ConditionState(FALSE, "Conflict", f"{text}; rename this object, or delete what is in its way")
    if refused := [failure for failure in obstacles.failures if failure.meaning.is_refusal]:
        text = "; ".join(f"{failure.object_ref}: {failure.message}" for failure in refused)
        return ConditionState(FALSE, refused[0].meaning.value, text)
    return ConditionState(TRUE, "Valid", "the spec is valid", is_usual=True)


def _ref_of(object_: Object) -> str:
    return f"{name_at(object_, 'kind')} {name_at(object_, 'metadata', 'name')}"


def _member_problem(members: Sequence[Member] | None) -> ConditionState | None:
    for state, reason in ((MemberState.MISSING, "ModelMissing"), (MemberState.INVALID, "ModelInvalid")):
        if affected := [member for member in members or () if member.state == state]:
            text = "; ".join(f"step {', '.join(member.steps)}: {member.message}" for member in affected)
            return ConditionState(FALSE, reason, text)
    return None


def steps_state(observed: Observed, members: Sequence[Member]) -> ConditionState:
    if affected := _member_problem(members):
        return affected
    if observed.subject.spec is None:
        return ConditionState(UNKNOWN, "InvalidSpec", "the steps are not known while the spec has problems")
    if observed.desired == 0:
        return _idle(observed)
    if behind := [member for member in members if member.state != MemberState.READY]:
        text = "; ".join(f"step {', '.join(member.steps)}: {member.message}" for member in behind)
        return ConditionState(FALSE, NormalReason.LOADING, text)
    return ConditionState(TRUE, "Loaded", "the models of all steps are loaded", is_usual=True)


def placed_state(observed: Observed) -> ConditionState:
    placements = placements_text(observed)
    done = f"every replica has a node: {placements}" if placements else "every replica has a node"
    state = _stage_state(observed, Stage.PLACED, NormalReason.SCHEDULING, "Scheduled", done)
    memory = observed.memory
    if memory is None or memory.template_hash != observed.template_hash or observed.subject.spec is None:
        return state
    advice = memory_advice(memory, observed.subject.spec.workload.accelerator)
    if state.status != TRUE or not advice:
        return state
    return ConditionState(TRUE, "OtherMemoryFits", f"{done}; {advice}")


def fetched_state(observed: Observed) -> ConditionState:
    return _stage_state(
        observed, Stage.FETCHED, NormalReason.FETCHING, "Fetched", "every replica has the model's files"
    )


def loaded_state(observed: Observed) -> ConditionState:
    done = "every replica has loaded " + _versions_text(observed)
    state = _stage_state(observed, Stage.LOADED, NormalReason.LOADING, "Loaded", done)
    unasked = [pod for pod in observed.newest if pod.stage >= Stage.LOADED and pod.is_unknown]
    if state.status != TRUE or not unasked:
        return state
    if observed.was_ready:
        return ConditionState(TRUE, "Loaded", "; ".join(_unread_index(pod) for pod in unasked))
    return _unread_indexes(unasked)


def _unread_indexes(pods: Sequence[PodView]) -> ConditionState:
    """The state of a condition that depends on what these pods serve. A pod that has just become ready is loading."""
    is_new = any(pod.is_newly_ready for pod in pods)
    text = "; ".join(_unread_index(pod) for pod in pods)
    return ConditionState(UNKNOWN, NormalReason.LOADING if is_new else "IndexUnreachable", text)


def _unread_index(pod: PodView) -> str:
    why = pod.index.error if pod.index is not None else None
    return f"pod {pod.name}: what it serves is not known: {why or 'it was not asked yet'}"


def _stage_state(observed: Observed, stage: Stage, coming: NormalReason, reached: str, done: str) -> ConditionState:
    """Whether the newest template's pods have all reached this stage."""
    if observed.worst is not None and observed.worst.stage == stage:
        return ConditionState(FALSE, observed.worst.reason, observed.worst.text)
    if observed.desired == 0:
        return _idle(observed)
    behind = [pod for pod in observed.newest if pod.stage < stage]
    failed = [pod for pod in behind if pod.failure is not None and pod.failure.stage == stage]
    if failed:
        failure = min((pod.failure for pod in failed if pod.failure), key=lambda f: f.order[0])
        return ConditionState(FALSE, failure.reason, failure.text)
    if behind:
        slowest = min(behind, key=lambda pod: (pod.stage, pod.age))
        is_next = slowest.stage == stage - 1
        return ConditionState(
            FALSE if is_next else UNKNOWN, coming if is_next else NormalReason.PENDING, slowest.waits_for
        )
    if not observed.newest:
        return ConditionState(UNKNOWN, NormalReason.PENDING, "there are no pods yet")
    return ConditionState(TRUE, reached, done, is_usual=True)


def _idle(observed: Observed) -> ConditionState:
    """The state of a condition if no replicas are wanted."""
    if observed.subject.spec is not None and observed.subject.spec.workload.suspend:
        return ConditionState(
            UNKNOWN, NormalReason.SUSPENDED, "spec.suspend is true: there are no replicas", is_usual=True
        )
    if observed.subject.spec is not None and observed.subject.spec.workload.autoscaling is not None:
        name = name_at(observed.subject.deployment, "metadata", "name")
        text = f"the Deployment has 0 replicas; {how_to_wake(observed.subject.spec.workload.autoscaling, name)}"
        return ConditionState(UNKNOWN, NormalReason.SCALED_TO_ZERO, text, is_usual=True)
    return ConditionState(UNKNOWN, NormalReason.SCALED_TO_ZERO, "spec.replicas is 0", is_usual=True)


def how_to_wake(scaling: Autoscaling, deployment: str) -> str:
    """How users start the first pod of an object without any."""
    by_annotation = f", or another value of the annotation {WAKE}," if scaling.sleeps else ""
    return f"kubectl scale deployment/{deployment} --replicas=1{by_annotation} starts the first one"


def available_state(observed: Observed, ready: ConditionState) -> ConditionState:
    if count := len(observed.serving):
        return ConditionState(TRUE, "Serving", f"{_replicas(count)} serving", is_usual=ready.status == TRUE)
    return replace(ready, status=FALSE)


def progressing_state(observed: Observed, stuck: ConditionState | None) -> ConditionState:
    """True while pods of the newest spec are rolled out. A replica that fails later does not make it True again."""
    if stuck is not None:
        return ConditionState(FALSE, stuck.reason, stuck.message)
    if observed.is_paused and not (observed.is_newest_of_spec and _is_complete(observed)):
        return ConditionState(FALSE, ROLLOUT_PAUSED, _paused_text(observed))
    rolling_out = ConditionState(
        TRUE, "RollingOut", f"{len(observed.serving_newest)}/{observed.desired} replicas of the newest spec serving"
    )
    if not observed.is_settled:
        applying = ConditionState(TRUE, "Applying", "the Deployment is not yet that of the spec")
        return applying if observed.active or observed.desired == 0 else rolling_out
    if observed.desired == 0:
        if observed.active:
            return ConditionState(TRUE, "ScalingDown", f"{_replicas(len(observed.active))} stopping")
        return replace(_idle(observed), status=FALSE)
    if observed.deadline:
        return ConditionState(FALSE, "ProgressDeadlineExceeded", observed.deadline)
    reason = text_at(condition(observed.subject.deployment, "Progressing"), "reason")
    is_done = reason == "NewReplicaSetAvailable" or len(observed.serving_newest) >= observed.desired
    if is_done and not observed.older:
        return ConditionState(FALSE, COMPLETE, "all pods are of the newest spec", is_usual=True)
    return rolling_out


def degraded_state(
    observed: Observed, stuck: ConditionState | None, ready: ConditionState, obstacles: Obstacles
) -> ConditionState | None:
    """None if nothing fails beside replicas that serve: the condition is present only while it is True."""
    not_allowed = {Meaning.FORBIDDEN, Meaning.OVER_QUOTA}
    if any(failure.meaning in not_allowed for failure in obstacles.failures) and stuck is not None:
        return ConditionState(TRUE, stuck.reason, stuck.message)
    if (
        observed.serving
        and ready.status != TRUE
        and ready.reason not in {*NormalReason, "IndexUnreachable", Meaning.TRANSIENT.value}
    ):
        return ConditionState(TRUE, ready.reason, ready.message)
    if observed.serving_newest and ready.status == TRUE and observed.worst is not None:
        return ConditionState(TRUE, observed.worst.reason, f"{_serving_text(observed)}: {observed.worst.message}")
    if problem := next(
        (pod.failure_while_serving for pod in observed.serving if pod.failure_while_serving is not None), None
    ):
        return ConditionState(TRUE, problem.reason, problem.message)
    return None


def ready_state(observed: Observed, stuck: ConditionState | None, obstacles: Obstacles) -> ConditionState:
    if observed.is_deleting:
        return ConditionState(FALSE, NormalReason.DELETING, "the object is being deleted")
    if stuck is not None:
        return stuck
    if obstacles.failures:
        text = "; ".join(f"{failure.object_ref}: {failure.message}" for failure in obstacles.failures)
        return ConditionState(FALSE, Meaning.TRANSIENT.value, f"{text}; it is tried again")
    if observed.desired == 0:
        return replace(_idle(observed), status=FALSE)
    serves = _serving_text(observed)
    if observed.is_unplaced and observed.worst is not None:
        return ConditionState(FALSE, observed.worst.reason, f"{serves}: {observed.worst.message}")
    if not observed.is_newest_of_spec:
        if observed.is_paused:
            return ConditionState(FALSE, ROLLOUT_PAUSED, _paused_text(observed))
        if not observed.active:
            return ConditionState(FALSE, NormalReason.PENDING, f"{serves}: {_MORE_PODS}")
        return ConditionState(FALSE, NormalReason.PROGRESSING, "the Deployment is not yet that of the spec")
    if observed.was_rolled_out and observed.serving_newest and not observed.older:
        return _ready_while_served(observed, serves)
    if observed.worst is not None:
        return ConditionState(FALSE, observed.worst.reason, f"{serves}: {observed.worst.message}")
    if observed.is_paused and not _is_complete(observed):
        return ConditionState(FALSE, ROLLOUT_PAUSED, f"{serves}: {_paused_text(observed)}")
    if len(observed.serving_newest) < observed.desired:
        return _unfinished(observed, serves)
    if observed.older:
        return ConditionState(FALSE, NormalReason.PROGRESSING, f"{serves}: those of the spec before are about to go")
    return _ready_while_served(observed, serves)


def _ready_while_served(observed: Observed, serves: str) -> ConditionState:
    """Ready for a newest spec that is served, by all replicas or by some of them."""
    unasked = [pod for pod in observed.serving_newest if pod.is_unknown]
    if unasked and not observed.was_ready:
        return _unread_indexes(unasked)
    text = f"{serves} {_versions_text(observed)}"
    if _is_complete(observed):
        return ConditionState(TRUE, "Serving", text)
    why = observed.worst.message if observed.worst else observed.slowest.waits_for if observed.slowest else _MORE_PODS
    return ConditionState(TRUE, "Serving", f"{text}: {why}")


ROLLOUT_PAUSED = "RolloutPaused"
ROLLED_BACK = "RolledBack"
COMPLETE = "Complete"
_MORE_PODS = "the pods are being made"


def _is_complete(observed: Observed) -> bool:
    """All replicas serve the newest spec, and no other pod serves."""
    return len(observed.serving_newest) >= observed.desired and not observed.older


def _paused_text(observed: Observed) -> str:
    if observed.subject.spec is not None and observed.subject.spec.workload.rollout.paused:
        return "spec.rollout.paused is true, so that the new spec is not rolled out; false lets it go on"
    name = name_at(observed.subject.deployment, "metadata", "name")
    return (
        f"spec.paused of Deployment {name} is true, so that the new spec is not rolled out; "
        f"kubectl rollout resume deployment/{name} lets it go on"
    )


_NORMAL_REASONS = {
    Stage.CREATED: NormalReason.SCHEDULING,
    Stage.PLACED: NormalReason.FETCHING,
    Stage.FETCHED: NormalReason.LOADING,
    Stage.LOADED: NormalReason.LOADING,
}


def _unfinished(observed: Observed, serves: str) -> ConditionState:
    """Ready if fewer replicas than desired serve and none failed."""
    slowest = observed.slowest
    if observed.deadline:
        text = f"{observed.deadline} {slowest.waits_for}" if slowest else observed.deadline
        return ConditionState(FALSE, "ProgressDeadlineExceeded", f"{serves}: {text}")
    if slowest is None:
        return ConditionState(
            FALSE, NormalReason.PROGRESSING if observed.active else NormalReason.PENDING, f"{serves}: {_MORE_PODS}"
        )
    reason = NormalReason.PROGRESSING if observed.serving else _NORMAL_REASONS[slowest.stage]
    return ConditionState(FALSE, reason, f"{serves}: {slowest.waits_for}")


def _for_kstatus(observed: Observed, stuck: ConditionState | None, ready: ConditionState) -> dict[str, ConditionState]:
    """Conditions for generic tools (kstatus). They are present only while they are True."""
    if stuck is not None:
        return {"Stalled": ConditionState(TRUE, stuck.reason, stuck.message)}
    if ready.reason == "ProgressDeadlineExceeded" or (
        observed.deadline and ready.status != TRUE and observed.is_settled
    ):
        return {"Stalled": ConditionState(TRUE, "ProgressDeadlineExceeded", ready.message)}
    if ready.reason == ROLLOUT_PAUSED:
        return {"Stalled": ConditionState(TRUE, ready.reason, ready.message)}
    is_served = ready.status == TRUE and observed.is_settled and _is_complete(observed)
    is_at_rest = is_served or (observed.desired == 0 and observed.is_settled and not observed.active)
    return {} if is_at_rest else {"Reconciling": ConditionState(TRUE, ready.reason, ready.message)}


def _serving_text(observed: Observed) -> str:
    text = f"{len(observed.serving_newest)}/{observed.desired} replicas serving"
    older = sum(pod.stage == Stage.SERVING for pod in observed.older)
    return f"{text}, {older} of the spec before" if older else text


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _versions_text(observed: Observed) -> str:
    """`version 1` or `versions 1, 2`; `the model` if the versions are not known."""
    known = versions_of(observed)
    if not known:
        return "the model"
    return f"version{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"


MAX_VERSIONS = 64


def versions_of(observed: Observed) -> list[int]:
    """Versions that are served by every serving pod; if no pod's index can be read, those of the old status."""
    known = [pod.versions(observed.served) for pod in observed.serving if not pod.is_unknown]
    if known:
        return sorted(frozenset.intersection(*known))[:MAX_VERSIONS]
    shown = observed.shown if observed.serving else None
    if shown is None or text_at(observed.subject.status, "current", "templateHash") != shown.template_hash:
        return []
    old = at(observed.subject.status, "current", "versions")
    kept = old if isinstance(old, list) else []
    return sorted({v for v in kept if isinstance(v, int) and not isinstance(v, bool)})[:MAX_VERSIONS]
