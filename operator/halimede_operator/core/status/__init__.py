"""From a snapshot to an object's status: pure, and the same for the same input.

What is told is what was seen. A status that says nothing new is equal to the one before, so that nothing is written
while nothing happens: times change with what they are about alone, and no text has a counter in it that runs at rest.

The snapshot's children are to be those of after the applies (the API server's answers in place of what was observed):
a Deployment whose controller has not seen its newest generation yet is then known to be one, and Ready is not told of
pods of the spec before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from halimede_operator.core.api.conditions import TRUE, Condition, merged
from halimede_operator.core.api.spec import EnsembleSpec, Kind, ModelSpec, Problem, Spec
from halimede_operator.core.events import EventDraft, EventLimit, events_of
from halimede_operator.core.labels import selector_of
from halimede_operator.core.names import child_name
from halimede_operator.core.pods import DIGEST, SERVER, Calm, Failure, FetchedModel, PodView, Reason, Stage
from halimede_operator.core.reading import (
    at,
    clean,
    decimal,
    integer_at,
    moment_at,
    name_at,
    objects_at,
    text_at,
)
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.status.scene import Scene, scene_of
from halimede_operator.core.status.steps import Member, MemberState, members_of
from halimede_operator.core.status.verdicts import ApplyFailure, Obstacles, TakenName, conditions_of, versions_of

__all__ = ["ApplyFailure", "EventDraft", "EventLimit", "TakenName", "events_of", "status_of"]

MAX_PLACEMENTS = 64


def status_of(
    snapshot: Snapshot,
    spec: Spec | None,
    problems: Sequence[Problem],
    failures: Sequence[ApplyFailure],
    conflicts: Sequence[TakenName],
    now: str,
    *,
    is_postponed: bool = False,
) -> Object:
    """The whole status, without nulls. `now`, RFC 3339, is the time of what has no time of its own. `is_postponed`: the
    Deployment that stands is not that of the spec, and will be soon."""
    scene = scene_of(snapshot, spec)
    if is_postponed:
        scene = replace(scene, is_settled=False)
    members = _members(scene)
    conditions = conditions_of(scene, Obstacles(problems, failures, conflicts), members)
    return _without_nothing({
        "observedGeneration": scene.generation,
        "conditions": merged(objects_at(scene.old, "conditions"), conditions, now),
        "phase": _phase(scene, {condition.type: condition for condition in conditions}),
        **_addresses(scene),
        "replicas": len(scene.live),
        "readyReplicas": len(scene.serving),
        "selector": ",".join(f"{label}={value}" for label, value in selector_of(snapshot.key).items()),
        "current": _current(scene),
        "effective": _effective(scene),
        "model": _model(scene) if members is None else None,
        "members": _members_json(members),
        "readySteps": _ready_steps(scene, members),
        **_placements(scene),
        "lastFailure": _last_failure(scene, now),
    })  # fmt: skip


def _without_nothing(found: Mapping[str, Any]) -> Object:
    return {key: value for key, value in found.items() if value is not None}


def _members(scene: Scene) -> tuple[Member, ...] | None:
    """None for an InferenceModel; () for an ensemble whose steps are not known."""
    if scene.snapshot.key.kind != Kind.MODEL_ENSEMBLE:
        return None
    return members_of(scene, scene.spec) if isinstance(scene.spec, EnsembleSpec) else ()


_PHASE_OF_STAGE = {
    Stage.MADE: "Scheduling",
    Stage.PLACED: "Fetching",
    Stage.FETCHED: "Loading",
    Stage.LOADED: "Loading",
    Stage.SERVING: "Serving",
}
_WAITS_FOR_ROOM = {Reason.INSUFFICIENT_DEVICES, Reason.UNSCHEDULABLE, Reason.QUOTA_EXCEEDED}


def _phase(scene: Scene, conditions: Mapping[str, Condition]) -> str:
    ready = conditions["Ready"]
    if ready.reason in {Calm.SUSPENDED, Calm.SCALED_TO_ZERO}:
        return "Suspended"
    if ready.status == TRUE:
        return "Serving"
    if conditions["Degraded"].status == TRUE and scene.serving:
        return "Degraded"
    if "Stalled" in conditions:
        return "Failed"
    if scene.worst is not None:
        return "Scheduling" if scene.worst.reason in _WAITS_FOR_ROOM else "Failed"
    if scene.serving:
        return "Serving"
    return _PHASE_OF_STAGE[scene.slowest.stage] if scene.slowest else "Pending"


def _addresses(scene: Scene) -> Mapping[str, Any]:
    """What does not depend on pods; as it was where the spec does not tell."""
    if scene.spec is None:
        listed = [
            {"type": name_at(address, "type"), "value": clean(text_at(address, "value"), 512)}
            for address in objects_at(scene.old, "addresses")[:8]
        ]
        return {"url": clean(text_at(scene.old, "url"), 512) or None, "addresses": listed or None}
    serving = scene.spec.workload.serving
    host = f"{child_name(scene.snapshot.key.name)}.{scene.snapshot.key.namespace}.svc"
    http = f"http://{host}:{serving.http_port}"
    listed = [{"type": "http", "value": http}] if serving.http else []
    listed += [{"type": "grpc", "value": f"{host}:{serving.grpc_port}"}] if serving.grpc else []
    return {"url": f"{http}/v2/models/{scene.served}" if serving.http else None, "addresses": listed or None}


def _shown(scene: Scene) -> PodView | None:
    """What serves: the newest template's pods where one of them does, else those before; else what should."""
    return next(iter(scene.serving_newest or scene.serving or scene.newest), None)


def _current(scene: Scene) -> Object | None:
    shown = _shown(scene)
    if shown is None:
        return None
    return _without_nothing({
        "versions": versions_of(scene) or None,
        "templateHash": shown.template_hash or None,
        "image": shown.image or None,
    })  # fmt: skip


def _effective(scene: Scene) -> Object | None:
    template = at(scene.deployment, "spec", "template", "spec")
    images = (clean(text_at(c, "image"), 512) for c in objects_at(template, "containers") if c.get("name") == SERVER)
    found = {
        "format": scene.spec.model.format if isinstance(scene.spec, ModelSpec) else None,
        "resourceName": scene.spec.workload.accelerator.resource_name if scene.spec else None,
        "serverImage": next(images, None),
    }
    if scene.spec is None:
        found |= {key: name_at(scene.old, "effective", key) or None for key in ("format", "resourceName")}
    return _without_nothing(found) or None


def _model(scene: Scene) -> Object | None:
    """What the pods fetched: as the oldest that serves says it, else the oldest of all."""
    for pod in (*scene.serving_newest, *scene.newest):
        if pod.fetched:
            named = (model for model in pod.fetched if model.name == scene.served)
            return _fetched_json(next(named, pod.fetched[0])) or None
    shown = _shown(scene)
    is_told_of = scene.is_same_template and shown is not None and shown.template_hash == scene.template_hash
    if not is_told_of or not any(pod.stage >= Stage.FETCHED for pod in scene.newest):
        return None
    # A kubelet forgets what an init container said when it forgets the container; the pods are still those.
    old = at(scene.old, "model")
    digest = text_at(old, "digest")
    kept = FetchedModel(
        name="",
        digest=digest if DIGEST.fullmatch(digest) else None,
        size_bytes=decimal(at(old, "sizeBytes")),
        fetched_at=moment_at(old, "fetchedAt"),
    )
    return _fetched_json(kept) or None


def _fetched_json(model: FetchedModel) -> Object:
    return _without_nothing({"digest": model.digest, "sizeBytes": model.size_bytes, "fetchedAt": model.fetched_at})


def _members_json(members: Sequence[Member] | None) -> list[Object] | None:
    if not members:
        return None
    return [{"name": member.name, **(_fetched_json(member.fetched) if member.fetched else {})} for member in members]


def _ready_steps(scene: Scene, members: Sequence[Member] | None) -> str | None:
    if members is None or not isinstance(scene.spec, EnsembleSpec):
        return None
    ready = sum(len(member.steps) for member in members if member.state == MemberState.READY)
    return f"{ready}/{len(scene.spec.steps)}"


def _placements(scene: Scene) -> Mapping[str, Any]:
    placed = sorted({pod.name: pod.node for pod in scene.live if pod.node and pod.name}.items())
    listed = [{"pod": pod, "node": node} for pod, node in placed[:MAX_PLACEMENTS]]
    return {"placements": listed or None, "placementsTruncated": True if len(placed) > MAX_PLACEMENTS else None}


def _last_failure(scene: Scene, now: str) -> Object | None:
    """What is wrong now; else the newest that is known, kept after recovery."""
    old = _old_failure(scene)
    if scene.worst is not None:
        return _failure_json(scene.worst, old, now)
    past = [pod.past for pod in scene.live if pod.past is not None and pod.past.time is not None]
    newest = max(past, key=lambda failure: (failure.time or "", failure.pod), default=None)
    if newest is not None and (newest.time or "") > text_at(old, "time"):
        return _failure_json(newest, old, now)
    return old


def _failure_json(failure: Failure, old: Object | None, now: str) -> Object:
    found = _without_nothing({
        "reason": str(failure.reason),
        "message": failure.message,
        "pod": failure.pod or None,
        "container": failure.container or None,
        "exitCode": failure.exit_code,
    })  # fmt: skip
    is_same = old is not None and {key: value for key, value in old.items() if key != "time"} == found
    return {**found, "time": failure.time or (text_at(old, "time") if is_same else "") or now}


def _old_failure(scene: Scene) -> Object | None:
    """The last failure of the status before, as far as it is well-formed: anybody may have written there."""
    old = at(scene.old, "lastFailure")
    reason, time = name_at(old, "reason"), moment_at(old, "time")
    code = integer_at(old, "exitCode")
    if not reason or time is None:
        return None
    return _without_nothing({
        "reason": reason,
        "message": clean(text_at(old, "message")),
        "pod": name_at(old, "pod") or None,
        "container": name_at(old, "container") or None,
        "exitCode": code if code is not None and abs(code) < 2**31 else None,
        "time": time,
    })  # fmt: skip
