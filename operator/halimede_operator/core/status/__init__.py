"""Computes an object's status from what was observed, decided and performed. Pure: equal input gives an equal status.

The status reports only what was observed. If nothing changed, the new status equals the old one, so that nothing is
written while nothing happens: a time changes only together with what it belongs to, and no text contains a counter that
runs at rest.

The snapshot's children must be those after the applies: the API server's answers replace what was observed before. Then
it is visible that a Deployment's controller has not seen the newest generation yet, and Ready is not reported for pods
of the spec before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halimede_operator.core.decided import Decided, Performed
from halimede_operator.core.labels import GENERATION, PLACEMENT, selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.placement.inventory import shown_profile
from halimede_operator.core.pods.failure import Failure, NormalReason, Reason, Stage
from halimede_operator.core.pods.fields import SERVER
from halimede_operator.core.pods.memory import memory_json
from halimede_operator.core.pods.observed import Observed, observe
from halimede_operator.core.pods.placements import MAX_PLACEMENTS, old_placements, placement_of
from halimede_operator.core.pods.start import startup_text
from halimede_operator.core.pods.view import DIGEST, FetchedModel
from halimede_operator.core.reading import (
    at,
    clean,
    condition,
    decimal,
    integer_at,
    json_object,
    moment_at,
    name_at,
    objects_at,
    text_at,
)
from halimede_operator.core.revisions.history import Entry, Outcome, read_history, with_current
from halimede_operator.core.revisions.revision import revision_label
from halimede_operator.core.revisions.rollback import rolled_back_in
from halimede_operator.core.snapshot import Object
from halimede_operator.core.spec.types import EnsembleSpec, Kind
from halimede_operator.core.status.conditions import TRUE, Condition, merged
from halimede_operator.core.status.rules import (
    Obstacles,
    conditions_of,
    strategy_state,
    unread_state,
    upgrade_state,
    versions_of,
)
from halimede_operator.core.status.scaler import scaling_json, scaling_state
from halimede_operator.core.status.steps import Member, MemberState, members_of
from halimede_operator.core.subject import Subject

MAX_NODES_NAMED = 4


def status_of(subject: Subject, decided: Decided, performed: Performed, now: str) -> Object:
    """The whole status as JSON, without nulls. subject: after the changes.

    now: RFC 3339, used for everything that has no time of its own.
    """
    observed = observe(subject, now, decided.unplaced)
    if performed.is_postponed or decided.unplaced:
        observed = replace(observed, is_newest_of_spec=False, is_settled=False)
    failures = [*decided.failures, *([performed.failure] if performed.failure is not None else ())]
    obstacles = Obstacles(subject.problems, failures, decided.conflicts)
    rolled_back = decided.rolled_back if decided.rolled_back == rolled_back_in(subject.deployment) else None
    members = _members(observed)
    conditions = conditions_of(observed, obstacles, members, rolled_back)
    ready = next(each for each in conditions if each.type == "Ready")
    if decided.waiting:
        conditions.append(upgrade_state(observed, decided.waiting).of("UpgradeAvailable"))
    if (state := scaling_state(observed)) is not None:
        conditions.append(state.of("AutoscalingActive"))
    if subject.snapshot.has_more_pods:
        conditions.append(unread_state(len(subject.snapshot.pods)).of("PodsUnread"))
    if (state := strategy_state(decided.strategy, observed)) is not None:
        conditions.append(state.of("RolloutStrategy"))
    return _without_none({
        "observedGeneration": observed.generation,
        "conditions": merged(objects_at(observed.subject.status, "conditions"), conditions, now),
        "phase": _phase(observed, {condition.type: condition for condition in conditions}),
        **_addresses(observed),
        "replicas": len(observed.active),
        "readyReplicas": len(observed.serving),
        "desiredReplicas": None if subject.spec is None and subject.deployment is None else observed.desired,
        "selector": ",".join(f"{label}={value}" for label, value in selector_of(subject.snapshot.key).items()),
        "current": _current(observed),
        "effective": _effective(observed),
        "model": _model(observed) if members is None else None,
        "members": _members_texts(members),
        "readySteps": _ready_steps(observed, members),
        **_placements(observed),
        "revisions": _revisions(observed, decided.revision, ready),
        "upgradeAvailable": True if decided.waiting else None,
        "autoscaling": scaling_json(observed, now),
        "startup": startup_text(observed),
        "memory": memory_json(observed.memory),
        "lastFailure": _last_failure(observed, now),
    })  # fmt: skip


def _without_none(found: Mapping[str, Any]) -> Object:
    return {key: value for key, value in found.items() if value is not None}


def _members(observed: Observed) -> tuple[Member, ...] | None:
    """None for an InferenceModel; () for an ensemble whose steps are not known."""
    if observed.subject.snapshot.key.kind != Kind.MODEL_ENSEMBLE:
        return None
    return members_of(observed, observed.subject.spec) if isinstance(observed.subject.spec, EnsembleSpec) else ()


_PHASE_OF_STAGE = {
    Stage.CREATED: "Scheduling",
    Stage.PLACED: "Fetching",
    Stage.FETCHED: "Loading",
    Stage.LOADED: "Loading",
    Stage.SERVING: "Serving",
}
_WAITS_FOR_ROOM = {Reason.INSUFFICIENT_DEVICES, Reason.UNSCHEDULABLE, Reason.CLAIM_UNBOUND, Reason.QUOTA_EXCEEDED}


def _phase(observed: Observed, conditions: Mapping[str, Condition]) -> str:
    ready = conditions["Ready"]
    if ready.reason in {NormalReason.SUSPENDED, NormalReason.SCALED_TO_ZERO}:
        return "Suspended"
    if "Degraded" in conditions and observed.serving:
        return "Degraded"
    if ready.status == TRUE:
        return "Serving"
    if "Stalled" in conditions:
        return "Failed"
    if observed.worst is not None:
        return "Scheduling" if observed.worst.reason in _WAITS_FOR_ROOM else "Failed"
    if observed.serving:
        return "Serving"
    return _PHASE_OF_STAGE[observed.slowest.stage] if observed.slowest else "Pending"


def _addresses(observed: Observed) -> Mapping[str, Any]:
    """URL and addresses by protocol. They do not depend on pods. If the spec is not valid, the old ones stay."""
    if observed.subject.spec is None:
        old = {name: clean(text_at(observed.subject.status, "addresses", name), 512) for name in ("http", "grpc")}
        found = {name: address for name, address in old.items() if address}
        return {"url": clean(text_at(observed.subject.status, "url"), 512) or None, "addresses": found or None}
    serving = observed.subject.spec.workload.serving
    host = f"{child_name(observed.subject.snapshot.key.name)}.{observed.subject.snapshot.key.namespace}.svc"
    http = f"http://{host}:{serving.http_port}"
    addresses = {"http": http} if serving.http else {}
    addresses |= {"grpc": f"{host}:{serving.grpc_port}"} if serving.grpc else {}
    return {"url": f"{http}/v2/models/{observed.served}" if serving.http else None, "addresses": addresses or None}


def _current(observed: Observed) -> Object | None:
    shown = observed.shown
    if shown is None:
        return None
    return _without_none({
        "versions": versions_of(observed) or None,
        "templateHash": shown.template_hash or None,
        "image": shown.image or None,
    })  # fmt: skip


def _effective(observed: Observed) -> Object | None:
    template = at(observed.subject.deployment, "spec", "template", "spec")
    images = (clean(text_at(c, "image"), 512) for c in objects_at(template, "containers") if c.get("name") == SERVER)
    placement = json_object(text_at(observed.subject.deployment, "metadata", "annotations", PLACEMENT))
    wanted, served = next(images, None), observed.shown.image if observed.shown is not None else None
    resource, profile = name_at(placement, "resource"), shown_profile(name_at(placement, "profile"))
    found = {
        "resourceName": resource or None,
        "deviceClassName": name_at(placement, "claim", "class") or None,
        "profile": profile if profile and not resource.endswith(f"-{profile}") else None,
        "nodes": _nodes(observed),
        "serverImage": wanted if wanted != served else None,
    }
    return _without_none(found) or None


def _nodes(observed: Observed) -> str | None:
    """The nodes of the pods, for a column of `kubectl get`."""
    names = sorted({pod.node for pod in observed.active if pod.node})
    more = [f"and {len(names) - MAX_NODES_NAMED} more"] if len(names) > MAX_NODES_NAMED else []
    return clean(", ".join([*names[:MAX_NODES_NAMED], *more]), 512) or None


def _model(observed: Observed) -> Object | None:
    """The fetched model, as reported by the oldest pod that serves, else by the oldest pod."""
    for pod in (*observed.serving_newest, *observed.newest):
        if pod.fetched:
            named = (model for model in pod.fetched if model.name == observed.served)
            return _fetched_json(next(named, pod.fetched[0])) or None
    shown = observed.shown
    describes_these_pods = (
        observed.is_same_template and shown is not None and shown.template_hash == observed.template_hash
    )
    if not describes_these_pods or not any(pod.stage >= Stage.FETCHED for pod in observed.newest):
        return None
    # A kubelet forgets an init container's message when it removes the container. The pods are still the same, so the
    # old report stays.
    old = at(observed.subject.status, "model")
    digest = text_at(old, "digest")
    kept = FetchedModel(
        name="",
        digest=digest if DIGEST.fullmatch(digest) else None,
        size_bytes=decimal(at(old, "sizeBytes")),
        fetched_at=moment_at(old, "fetchedAt"),
    )
    return _fetched_json(kept) or None


def _fetched_json(model: FetchedModel) -> Object:
    return _without_none({"digest": model.digest, "sizeBytes": model.size_bytes, "fetchedAt": model.fetched_at})


def _members_texts(members: Sequence[Member] | None) -> list[str] | None:
    """Each member with its files, `bert: sha256:90ab…, 438 bytes, fetched at 2026-11-22T09:00:04Z`."""
    return [f"{each.name}: {_fetched_text(each.fetched)}".removesuffix(": ") for each in members or ()] or None


def _fetched_text(model: FetchedModel | None) -> str:
    if model is None:
        return ""
    size = "" if model.size_bytes is None else f"{model.size_bytes} bytes"
    time = f"fetched at {model.fetched_at}" if model.fetched_at else ""
    return ", ".join(filter(None, (model.digest, size, time)))


def _ready_steps(observed: Observed, members: Sequence[Member] | None) -> str | None:
    if members is None or not isinstance(observed.subject.spec, EnsembleSpec):
        return None
    ready = sum(len(member.steps) for member in members if member.state == MemberState.READY)
    return f"{ready}/{len(observed.subject.spec.steps)}"


def _placements(observed: Observed) -> Mapping[str, Any]:
    placed = sorted({pod.name: pod for pod in observed.active if pod.node and pod.name}.items())
    old = old_placements(observed)
    listed = [
        placement_of(pod, observed.subject.snapshot, old.get(name)).as_text() for name, pod in placed[:MAX_PLACEMENTS]
    ]
    return {"placements": listed or None, "placementsTruncated": True if len(placed) > MAX_PLACEMENTS else None}


def _revisions(observed: Observed, wanted: str | None, ready: Condition) -> list[str] | None:
    history = read_history(observed.subject.status)
    name = revision_label(observed.subject.deployment)
    if name and name == wanted:
        generation = decimal(at(observed.subject.deployment, "metadata", "annotations", GENERATION)) or 0
        outcome, reason = Outcome.ROLLING_OUT, ""
        if ready.status == TRUE:
            outcome = Outcome.SERVING
        elif observed.deadline and observed.is_settled and observed.desired:
            outcome, reason = Outcome.FAILED, ready.reason
        current = Entry(name, generation, outcome, reason)
        history = with_current(history, current, rolled_back_in(observed.subject.deployment))
    return [entry.as_text() for entry in history] or None


def _last_failure(observed: Observed, now: str) -> Object | None:
    """The current failure; if there is none, the newest known one, which is kept after recovery."""
    old = _old_failure(observed)
    if observed.worst is not None:
        found = _failure_json(observed.worst, now)
        # A container that fails repeatedly keeps the time of its first failure.
        before = observed.subject.snapshot.object
        reported = {name_at(condition(before, type_), "reason") for type_ in _FAILURE_CONDITIONS}
        is_same = old is not None and {**old, "time": ""} == {**found, "time": ""}
        return old if is_same and (found["reason"] in reported or observed.worst.time is None) else found
    past = [
        pod.past_failure
        for pod in observed.active
        if pod.past_failure is not None and pod.past_failure.time is not None
    ]
    newest = max(past, key=lambda failure: (failure.time or "", failure.pod), default=None)
    if newest is not None and (newest.time or "") > text_at(old, "time"):
        return _failure_json(newest, now)
    return old


_FAILURE_CONDITIONS = ("Ready", "Degraded")
"""Conditions that carry the reason of the current failure."""


def _failure_json(failure: Failure, now: str) -> Object:
    return _without_none({
        "reason": str(failure.reason),
        "message": failure.message,
        "pod": failure.pod or None,
        "container": failure.container or None,
        "exitCode": _exit_code(failure.exit_code),
        "time": failure.time or now,
    })  # fmt: skip


def _exit_code(code: int | None) -> int | None:
    """None if the CRD does not allow it."""
    return code if code is not None and abs(code) < 2**31 else None


def _old_failure(observed: Observed) -> Object | None:
    """The last failure of the old status; malformed parts are dropped, because any user may have written it."""
    old = at(observed.subject.status, "lastFailure")
    reason, time = name_at(old, "reason"), moment_at(old, "time")
    if not reason or time is None:
        return None
    return _without_none({
        "reason": reason,
        "message": clean(text_at(old, "message")),
        "pod": name_at(old, "pod") or None,
        "container": name_at(old, "container") or None,
        "exitCode": _exit_code(integer_at(old, "exitCode")),
        "time": time,
    })  # fmt: skip
