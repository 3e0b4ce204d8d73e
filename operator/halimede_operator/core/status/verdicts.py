"""The conditions of both kinds, each a small decision about the scene.

Ready is the answer to "does it do what was asked": every replica serves the newest spec. It is False while pods of the
spec before still serve, which Available tells, and False for replicas 0: whoever waits for Ready sends requests next,
and nothing would answer them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from halimede_operator.core.api.conditions import FALSE, TRUE, UNKNOWN, Condition
from halimede_operator.core.api.spec import Problem
from halimede_operator.core.pods import Calm, PodView, Reason, Stage
from halimede_operator.core.reading import clean, condition, name_at, text_at
from halimede_operator.core.snapshot import Object
from halimede_operator.core.status.scene import Scene
from halimede_operator.core.status.steps import Member, MemberState


@dataclass(frozen=True, slots=True)
class ApplyFailure:
    """A child that the API server did not take."""

    object_ref: str
    """`Deployment prod/digits`."""
    code: int
    """HTTP's number; 0 where there was no answer."""
    reason: str
    message: str


class TakenName(Protocol):
    """A child that could not be made since somebody else's object has its name."""

    @property
    def object(self) -> Object: ...
    @property
    def owner(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    status: str
    reason: str
    message: str

    def of(self, type_: str, generation: int) -> Condition:
        return Condition(type_, self.status, str(self.reason), clean(self.message), generation)


@dataclass(frozen=True, slots=True)
class Obstacles:
    """Why the spec is not what the cluster has."""

    problems: Sequence[Problem]
    failures: Sequence[ApplyFailure]
    conflicts: Sequence[TakenName]


def conditions_of(scene: Scene, obstacles: Obstacles, members: Sequence[Member] | None) -> list[Condition]:
    """All conditions in the order in which they are shown. `members` is None for an InferenceModel."""
    accepted = accepted_verdict(obstacles)
    steps = None if members is None else steps_verdict(scene, members)
    stuck = next((v for v in (accepted, _lacks_members(members)) if v is not None and v.status == FALSE), None)
    ready = ready_verdict(scene, stuck, obstacles)
    verdicts = {
        "Accepted": accepted,
        "StepsReady": steps,
        "ModelFetched": fetched_verdict(scene),
        "Placed": placed_verdict(scene),
        "ModelLoaded": loaded_verdict(scene),
        "Available": available_verdict(scene, ready),
        "Progressing": progressing_verdict(scene, stuck),
        "Degraded": degraded_verdict(scene, stuck, ready, obstacles),
        "Ready": ready,
        **_for_kstatus(scene, stuck, ready),
    }
    return [verdict.of(type_, scene.generation) for type_, verdict in verdicts.items() if verdict is not None]


def accepted_verdict(obstacles: Obstacles) -> Verdict:
    if obstacles.problems:
        told = "; ".join(f"{problem.path}: {problem.message}" for problem in obstacles.problems)
        return Verdict(FALSE, "InvalidSpec", told)
    if obstacles.conflicts:
        told = "; ".join(
            f"{_ref_of(taken.object)} exists and belongs to {_owner(taken.owner)}" for taken in obstacles.conflicts
        )
        return Verdict(FALSE, "Conflict", f"{told}; rename this object, or delete what is in its way")
    if refused := [failure for failure in obstacles.failures if _is_refusal(failure)]:
        told = "; ".join(f"{failure.object_ref}: {failure.message}" for failure in refused)
        if any("exceeded quota" in failure.message for failure in refused):
            return Verdict(FALSE, Reason.QUOTA_EXCEEDED, told)
        is_forbidden = any(failure.code == 403 for failure in refused)
        return Verdict(FALSE, "Forbidden" if is_forbidden else "ApplyRefused", told)
    return Verdict(TRUE, "Valid", "the spec is valid")


def _is_refusal(failure: ApplyFailure) -> bool:
    """The same request would be refused again. Nothing is wrong where the whole namespace is going."""
    return 400 <= failure.code < 500 and failure.code not in {408, 409, 425, 429} and not _is_going(failure)


def _is_going(failure: ApplyFailure) -> bool:
    return failure.code in {403, 404, 409} and "being terminated" in failure.message


def _ref_of(object_: Object) -> str:
    return f"{name_at(object_, 'kind')} {name_at(object_, 'metadata', 'name')}"


def _owner(owner: object) -> str:
    if isinstance(owner, str):
        return owner or "somebody else"
    return f"{name_at(owner, 'kind')} {name_at(owner, 'name')}".strip() or "somebody else"


def _lacks_members(members: Sequence[Member] | None) -> Verdict | None:
    for state, reason in ((MemberState.MISSING, "ModelMissing"), (MemberState.INVALID, "ModelInvalid")):
        if lacking := [member for member in members or () if member.state == state]:
            told = "; ".join(f"step {', '.join(member.steps)}: {member.message}" for member in lacking)
            return Verdict(FALSE, reason, told)
    return None


def steps_verdict(scene: Scene, members: Sequence[Member]) -> Verdict:
    if lacking := _lacks_members(members):
        return lacking
    if scene.spec is None:
        return Verdict(UNKNOWN, "InvalidSpec", "the steps are not known while the spec has problems")
    if scene.desired == 0:
        return _idle(scene)
    if behind := [member for member in members if member.state != MemberState.READY]:
        told = "; ".join(f"step {', '.join(member.steps)}: {member.message}" for member in behind)
        return Verdict(FALSE, Calm.LOADING, told)
    return Verdict(TRUE, "Loaded", "the models of all steps are loaded")


def placed_verdict(scene: Scene) -> Verdict:
    return _stage_verdict(scene, Stage.PLACED, Calm.SCHEDULING, "Scheduled", "every replica has a node")


def fetched_verdict(scene: Scene) -> Verdict:
    return _stage_verdict(scene, Stage.FETCHED, Calm.FETCHING, "Fetched", "every replica has the model's files")


def loaded_verdict(scene: Scene) -> Verdict:
    done = "every replica has loaded " + _what(scene)
    verdict = _stage_verdict(scene, Stage.LOADED, Calm.LOADING, "Loaded", done)
    unasked = [pod for pod in scene.newest if pod.stage >= Stage.LOADED and pod.is_unknown]
    if verdict.status != TRUE or not unasked:
        return verdict
    told = "; ".join(_unasked(pod) for pod in unasked)
    return Verdict(TRUE if scene.was_ready else UNKNOWN, "Loaded" if scene.was_ready else "IndexUnreachable", told)


def _unasked(pod: PodView) -> str:
    why = pod.index.error if pod.index is not None else None
    return f"pod {pod.name}: what it serves is not known: {why or 'it was not asked yet'}"


def _stage_verdict(scene: Scene, stage: Stage, coming: Calm, reached: str, done: str) -> Verdict:
    """Whether the newest template's pods have come as far as this stage."""
    if scene.worst is not None and scene.worst.stage == stage:
        return Verdict(FALSE, scene.worst.reason, scene.worst.message)
    if scene.desired == 0:
        return _idle(scene)
    behind = [pod for pod in scene.newest if pod.stage < stage]
    failed = [pod for pod in behind if pod.failure is not None and pod.failure.stage == stage]
    if failed:
        failure = min((pod.failure for pod in failed if pod.failure), key=lambda f: f.order[0])
        return Verdict(FALSE, failure.reason, failure.message)
    if behind:
        slowest = min(behind, key=lambda pod: (pod.stage, pod.age))
        is_next = slowest.stage == stage - 1
        return Verdict(FALSE if is_next else UNKNOWN, coming if is_next else Calm.PENDING, slowest.waits_for)
    if not scene.newest:
        return Verdict(UNKNOWN, Calm.PENDING, "there are no pods yet")
    return Verdict(TRUE, reached, done)


def _idle(scene: Scene) -> Verdict:
    """What can be said of pods that nobody wants."""
    if scene.spec is not None and scene.spec.workload.suspend:
        return Verdict(UNKNOWN, Calm.SUSPENDED, "spec.suspend is true: there are no replicas")
    return Verdict(UNKNOWN, Calm.SCALED_TO_ZERO, "spec.replicas is 0")


def available_verdict(scene: Scene, ready: Verdict) -> Verdict:
    if count := len(scene.serving):
        return Verdict(TRUE, "Serving", f"{_replicas(count)} serving")
    return Verdict(FALSE, ready.reason, ready.message)


def progressing_verdict(scene: Scene, stuck: Verdict | None) -> Verdict:
    """True while pods are on their way to the newest spec; a replica that fails later does not make it True again."""
    if stuck is not None:
        return Verdict(FALSE, stuck.reason, stuck.message)
    if not scene.is_settled:
        return Verdict(TRUE, "Applying", "the Deployment is not yet that of the spec")
    if scene.desired == 0:
        if scene.live:
            return Verdict(TRUE, "ScalingDown", f"{_replicas(len(scene.live))} stopping")
        return Verdict(FALSE, _idle(scene).reason, _idle(scene).message)
    if scene.deadline:
        return Verdict(FALSE, "ProgressDeadlineExceeded", scene.deadline)
    reason = text_at(condition(scene.deployment, "Progressing"), "reason")
    serves = len(scene.serving_newest)
    if not scene.older and (reason == "NewReplicaSetAvailable" or serves >= scene.desired):
        return Verdict(FALSE, "Complete", "all pods are of the newest spec")
    return Verdict(TRUE, "RollingOut", f"{serves}/{scene.desired} replicas of the newest spec serving")


def degraded_verdict(scene: Scene, stuck: Verdict | None, ready: Verdict, obstacles: Obstacles) -> Verdict:
    if any(failure.code == 403 and _is_refusal(failure) for failure in obstacles.failures) and stuck is not None:
        return Verdict(TRUE, stuck.reason, stuck.message)
    if scene.serving and ready.status != TRUE and ready.reason not in {*Calm, "IndexUnreachable", "ApplyFailed"}:
        return Verdict(TRUE, ready.reason, ready.message)
    if ill := next((pod.ailment for pod in scene.serving if pod.ailment is not None), None):
        return Verdict(TRUE, ill.reason, ill.message)
    return Verdict(FALSE, "AsExpected", "no replica fails beside others that serve")


def ready_verdict(scene: Scene, stuck: Verdict | None, obstacles: Obstacles) -> Verdict:
    if scene.is_deleting:
        return Verdict(FALSE, Calm.DELETING, "the object is being deleted")
    if stuck is not None:
        return stuck
    if retried := [failure for failure in obstacles.failures if not _is_going(failure)]:
        told = "; ".join(f"{failure.object_ref}: {failure.message}" for failure in retried)
        return Verdict(FALSE, "ApplyFailed", f"{told}; it is tried again")
    if scene.desired == 0:
        return Verdict(FALSE, _idle(scene).reason, _idle(scene).message)
    if scene.deployment is None:
        return Verdict(FALSE, Calm.PENDING, "the Deployment is being made")
    if not scene.is_settled:
        return Verdict(FALSE, Calm.PROGRESSING, "the Deployment is not yet that of the spec")
    serves = _serves(scene)
    if scene.worst is not None:
        return Verdict(FALSE, scene.worst.reason, f"{serves}: {scene.worst.message}")
    if len(scene.serving_newest) < scene.desired:
        return _unfinished(scene, serves)
    if scene.older:
        return Verdict(FALSE, Calm.PROGRESSING, f"{serves}: those of the spec before are about to go")
    unasked = [pod for pod in scene.serving_newest if pod.is_unknown]
    if unasked and not scene.was_ready:
        return Verdict(UNKNOWN, "IndexUnreachable", "; ".join(_unasked(pod) for pod in unasked))
    return Verdict(TRUE, "Serving", f"{serves} {_what(scene)}")


_CALM_AT = {
    Stage.MADE: Calm.SCHEDULING,
    Stage.PLACED: Calm.FETCHING,
    Stage.FETCHED: Calm.LOADING,
    Stage.LOADED: Calm.LOADING,
}


def _unfinished(scene: Scene, serves: str) -> Verdict:
    """Fewer replicas than desired, and none that failed."""
    slowest = scene.slowest
    if scene.deadline:
        told = f"{scene.deadline} {slowest.waits_for}" if slowest else scene.deadline
        return Verdict(FALSE, "ProgressDeadlineExceeded", f"{serves}: {told}")
    if slowest is None:
        return Verdict(
            FALSE, Calm.PROGRESSING if scene.live else Calm.PENDING, f"{serves}: the other pods are being made"
        )
    calm = Calm.PROGRESSING if scene.serving else _CALM_AT[slowest.stage]
    return Verdict(FALSE, calm, f"{serves}: {slowest.waits_for}")


def _for_kstatus(scene: Scene, stuck: Verdict | None, ready: Verdict) -> dict[str, Verdict]:
    """Conditions that generic tools read, there only while they are true."""
    if stuck is not None:
        return {"Stalled": Verdict(TRUE, stuck.reason, stuck.message)}
    if ready.reason == "ProgressDeadlineExceeded" or (scene.deadline and ready.status != TRUE and scene.is_settled):
        return {"Stalled": Verdict(TRUE, "ProgressDeadlineExceeded", ready.message)}
    is_at_rest = ready.status == TRUE or (scene.desired == 0 and scene.is_settled and not scene.live)
    return {} if is_at_rest else {"Reconciling": Verdict(TRUE, ready.reason, ready.message)}


def _serves(scene: Scene) -> str:
    told = f"{len(scene.serving_newest)}/{scene.desired} replicas serving"
    older = sum(pod.stage == Stage.SERVING for pod in scene.older)
    return f"{told}, {older} of the spec before" if older else told


def _replicas(count: int) -> str:
    return "1 replica" if count == 1 else f"{count} replicas"


def _what(scene: Scene) -> str:
    """`version 1` or `versions 1, 2`; the model where the versions are not known."""
    known = versions_of(scene)
    if not known:
        return "the model"
    return f"version{'s' if len(known) > 1 else ''} {', '.join(map(str, known))}"


MAX_VERSIONS = 64


def versions_of(scene: Scene) -> list[int]:
    """Which versions every pod serves that serves; where no pod can be asked, as it was."""
    known = [pod.versions(scene.served) for pod in scene.serving if not pod.is_unknown]
    if known:
        return sorted(frozenset.intersection(*known))[:MAX_VERSIONS]
    if not (scene.serving and scene.was_ready):
        return []
    old = scene.old["current"].get("versions") if isinstance(scene.old, dict) else ()
    kept = old if isinstance(old, list) else []
    return sorted({v for v in kept if isinstance(v, int) and not isinstance(v, bool)})[:MAX_VERSIONS]
