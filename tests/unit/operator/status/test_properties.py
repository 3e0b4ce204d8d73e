"""Any snapshot gives a valid status, and an unchanged snapshot gives the same status."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import yaml
from hypothesis import given, settings

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.decided import ApplyFailure
from halimede_operator.core.labels import GENERATION, ROLLED_BACK
from halimede_operator.core.revisions.rollback import RolledBack
from halimede_operator.core.snapshot import Object, PodIndex, ServedVersion, Snapshot
from halimede_operator.core.spec.types import EnsembleSpec, Key, Problem, Spec, Workload
from halimede_operator.core.status.events import events_of
from support.examples import Draws, drawn
from support.operator_pods import (
    NEW,
    OLD,
    back_off,
    deployment,
    ended,
    fetch_failed,
    fetching,
    leaving,
    loading,
    lost_readiness,
    node_lost,
    pod,
    rejected,
    replica_set,
    serving,
    snapshot,
    stopped,
    unscheduled,
    waiting,
)
from support.operator_specs import ensemble_key, model_key, model_spec, search_spec
from support.operator_status import LATER, NOW, status_for

RECORD = RolledBack("inputs", "abcd", 2, "CrashLoop", "exited with code 3", OLD)
DECIDED: dict[str, Any] = {"revision": NEW, "rolled_back": RECORD}
SLOW = settings(deadline=None)
"""Load on the machine must not fail the test."""
CRDS = Path(__file__).parents[4] / "crds"

PODS = (
    pod(), pod(has_sandbox=False), fetching(), fetching(last=ended(11, "no key")), fetch_failed(10), fetch_failed(14, "a cat"),
    loading(), loading(last=ended(1, "E1122 09:12:25.747360 1 app.py:212] \"no\"")), serving(), serving(last=ended(137, reason="OOMKilled")),
    stopped(back_off("x"), last=ended(139)), stopped(waiting("ErrImagePull", "no")), stopped(waiting("CreateContainerConfigError", 'secret "x" not found')),
    lost_readiness(), node_lost(), rejected("Evicted", "low on memory"), rejected("UnexpectedAdmissionError", "devices unavailable"),
    unscheduled("1 Insufficient nvidia.com/gpu."), leaving(serving()),
)  # fmt: skip
SPECS = (None, model_spec(), model_spec(workload=Workload(replicas=3)), model_spec(workload=Workload(suspend=True)))
ANSWERS = (Meaning.FORBIDDEN, Meaning.OVER_QUOTA, Meaning.REFUSED, Meaning.TRANSIENT)


def version_of(draws: Draws) -> ServedVersion:
    return ServedVersion(
        draws.pick(("bert", "search", "tok", "pool", "\u202e")),
        draws.pick(("1", "2", "", "x", "9" * 40)),
        draws.pick(("READY", "UNAVAILABLE", "LOADING", "")),
        draws.pick(("", "unloaded", "Internal: no weights", "\x00" * 9)),
    )


def index_of(draws: Draws) -> PodIndex | None:
    match draws.below(3):
        case 0:
            return None
        case 1:
            return PodIndex(error=draws.pick(("refused", "", "timed out")))
        case _:
            return PodIndex(tuple(version_of(draws) for _ in range(draws.below(5))))


def failures_of(draws: Draws) -> list[ApplyFailure]:
    return [
        ApplyFailure("Service prod/bert", draws.pick(ANSWERS), draws.pick(("no", "bad"))) for _ in range(draws.below(3))
    ]


def snapshot_of(draws: Draws, key: Key) -> Snapshot:
    pods = []
    for number, made in enumerate(draws.some(PODS, 4)):
        named = copy.deepcopy(made)
        named["metadata"] |= {"name": f"bert-{number}", "uid": f"uid-bert-{number}"}
        named["metadata"]["labels"]["pod-template-hash"] = draws.pick((NEW, OLD))
        pods.append(named)
    asked = [index_of(draws) for _ in pods]
    child = None
    if draws.below(2):
        progress = draws.pick(("NewReplicaSetAvailable", "ReplicaSetUpdated", "ProgressDeadlineExceeded"))
        child = deployment(draws.below(4), generation=2, seen=1 + draws.below(2), progress=progress)
        texts = {GENERATION: "2", ROLLED_BACK: draws.pick((RECORD.text, "", "x"))}
        child["metadata"]["annotations"] = draws.pick(({}, texts))
    return snapshot(
        key,
        *pods,
        child=child,
        replica_sets=(replica_set(OLD, 9), replica_set(NEW, draws.pick((8, 10)))),
        indexes={f"bert-{number}": each for number, each in enumerate(asked) if each},
        generation=1 + draws.below(2),
        refused_pods=tuple(draws.some(('pods "a-12345" is forbidden: exceeded quota: q',), 1)),
        free_devices=draws.pick(("", "need 1x GPU; no device is free")),
        members={name: {"metadata": {"name": name, "generation": 1}} for name in draws.some(("tok", "pool"), 2)},
    )


STRANGE: tuple[Any, ...] = (
    None, True, -3, 7, 10**20, 1.5, float("nan"), "", "\ud800", "\x00\n", "1970-01-01T00:00:00Z", "9999-12-31T23:59:59-12:00", "9" * 50,
    "x" * 20000, "pods \"a", {}, [], [None], [[]], {"": []}, [{"type": "Ready", "status": "True"}] * 2,
)  # fmt: skip


def mutated(value: Any, chance: Random, how_often: int) -> Any:
    """The value with some parts replaced or removed."""
    if chance.randrange(how_often) == 0:
        return chance.choice(STRANGE)
    if isinstance(value, dict):
        return {key: mutated(inner, chance, how_often) for key, inner in value.items() if chance.randrange(how_often)}
    if isinstance(value, list):
        return [mutated(inner, chance, how_often) for inner in value]
    return value


def all_mutated(objects: tuple[Object, ...], chance: Random, how_often: int) -> tuple[Object, ...]:
    return tuple(each for each in (mutated(each, chance, how_often) for each in objects) if isinstance(each, dict))


def settled(
    seen: Snapshot, spec: Spec | None, problems: tuple[Problem, ...], failures: list[ApplyFailure], now: str, then: str
) -> tuple[Object, Object]:
    """A status, and the status of a second reconcile of the same snapshot."""
    obstacles = {"problems": problems, "failures": failures}
    first = status_for(seen, spec, now=now, **obstacles, **DECIDED)
    seen.object["status"] = json.loads(json.dumps(first))
    return first, status_for(seen, spec, now=then, **obstacles, **DECIDED)


@SLOW
@given(drawn(lambda draws: (snapshot_of(draws, model_key()), draws.pick(SPECS), failures_of(draws)), 140))
def test_an_unchanged_snapshot_gives_the_same_status(case: tuple[Snapshot, Spec | None, list[ApplyFailure]]):
    seen, spec, failures = case
    problems = (Problem("spec", "bad"),) if spec is None else ()
    before = copy.deepcopy(seen)
    first, second = settled(seen, spec, problems, failures, NOW, LATER)
    third = status_for(seen, spec, now=LATER, problems=problems, failures=failures, **DECIDED)

    assert (first, first) == (second, third)
    assert events_of(first, second) == ()
    assert first == status_for(before, spec, problems=problems, failures=failures, **DECIDED)
    assert_fits("inferencemodels", first)


@SLOW
@given(
    drawn(
        lambda draws: (snapshot_of(draws, ensemble_key()), draws.pick((None, search_spec())), failures_of(draws)), 140
    )
)
def test_an_unchanged_ensemble_gives_the_same_status(case: tuple[Snapshot, EnsembleSpec | None, list[ApplyFailure]]):
    seen, spec, failures = case
    first, second = settled(seen, spec, (Problem("spec", "bad"),) if spec is None else (), failures, NOW, LATER)

    assert first == second
    assert_fits("modelensembles", first)


@SLOW
@given(drawn(lambda draws: (snapshot_of(draws, model_key()), snapshot_of(draws, model_key()), draws.pick(SPECS)), 260))
def test_ready_is_true_only_where_the_newest_template_serves(case: tuple[Snapshot, Snapshot, Spec | None]):
    seen, before, spec = case
    seen.object["status"] = status_for(before, spec)
    status = status_for(seen, spec, now=LATER)
    if next(c for c in status["conditions"] if c["type"] == "Ready")["status"] != "True":
        return
    revision = {
        rs["metadata"]["labels"]["pod-template-hash"]: int(
            rs["metadata"]["annotations"]["deployment.kubernetes.io/revision"]
        )
        for rs in seen.replica_sets
    }
    live = [p for p in seen.pods if "deletionTimestamp" not in p["metadata"] and p["status"]["phase"] != "Failed"]
    ready = [p for p in live if any(c["type"] == "Ready" and c["status"] == "True" for c in p["status"]["conditions"])]
    wanted = spec.workload.replicas if spec else seen.children[0]["spec"]["replicas"]
    newest = max(revision, key=lambda name: revision[name])
    assert {p["metadata"]["labels"]["pod-template-hash"] for p in live} == {newest}
    (child,) = seen.children
    assert child["spec"]["template"]["metadata"]["labels"]["halimede.dev/revision"] == newest
    progress = child["status"]["conditions"][0]["reason"]
    # Without pods the former status has no `current`.
    was_ready = seen.object["status"].get("current", {}).get("templateHash") == newest and any(
        (c["type"], c["status"]) == ("Ready", "True") for c in seen.object["status"]["conditions"]
    )
    assert len(ready) > 0
    assert len(ready) >= wanted or progress == "NewReplicaSetAvailable" or was_ready


@SLOW
@given(
    drawn(
        lambda draws: (
            snapshot_of(draws, model_key()),
            draws.pick(SPECS),
            3 + draws.below(58),
            int.from_bytes(draws.raw(4)),
        ),
        140,
    )
)
def test_malformed_objects_never_raise_and_give_a_valid_status(case: tuple[Snapshot, Spec | None, int, int]):
    seen, spec, how_often, seed = case
    chance = Random(seed)
    object_ = mutated(seen.object, chance, how_often)
    strange = replace(
        seen,
        object={**(object_ if isinstance(object_, dict) else {})},
        members=dict(zip("ab", all_mutated(tuple(seen.members.values()), chance, how_often), strict=False)),
        children=all_mutated(seen.children, chance, how_often),
        replica_sets=all_mutated(seen.replica_sets, chance, how_often),
        pods=all_mutated(seen.pods, chance, how_often),
    )
    strange.object["status"] = mutated(status_for(seen, spec), chance, how_often)
    first, second = settled(strange, spec, (), [], NOW, LATER)

    assert first == second
    assert_fits("inferencemodels", first)


SCHEMAS = {
    plural: yaml.load((CRDS / f"{plural}.yaml").read_text(), yaml.CSafeLoader)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]
    for plural in ("inferencemodels", "modelensembles")
}  # fmt: skip


def assert_fits(plural: str, status: Object) -> None:
    """A part that the API server drops or refuses would be written again and again."""
    problems = list(misfits(status, SCHEMAS[plural], "status"))
    assert problems == []


def misfits(value: Any, schema: dict[str, Any], path: str) -> Any:
    types = {"object": dict, "array": list, "string": str, "integer": int}
    if schema["type"] == "boolean":
        assert isinstance(value, bool)
    elif type(value) is not types[schema["type"]]:
        yield f"{path}: {value!r} is not of type {schema['type']}"
    elif isinstance(value, dict):
        yield from (f"{path}: {name} is missing" for name in schema.get("required", ()) if name not in value)
        for name, inner in value.items():
            if name not in schema["properties"]:
                yield f"{path}.{name} is not in the CRD"
            else:
                yield from misfits(inner, schema["properties"][name], f"{path}.{name}")
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", 0):
            yield f"{path}: {len(value)} items"
        keys = schema.get("x-kubernetes-list-map-keys", ())
        if keys and len({tuple(item[key] for key in keys) for item in value}) < len(value):
            yield f"{path}: the same key twice"
        for number, item in enumerate(value):
            yield from misfits(item, schema["items"], f"{path}[{number}]")
    elif isinstance(value, str):
        if value not in schema.get("enum", [value]) or not schema.get("minLength", 0) <= len(value) <= schema.get(
            "maxLength", 1024
        ):
            yield f"{path}: {value!r}"
        value.encode()
    elif not schema.get("minimum", -(2**31)) <= value < 2 ** (31 if schema["format"] == "int32" else 63):
        yield f"{path}: {value}"


def test_the_schema_check_finds_invalid_values():
    status = {
        "phase": "Nice",
        "current": {"versions": ["1"]},
        "lastFailure": {"reason": "x"},
        "mood": 1,
        "replicas": -1,
    }

    assert list(misfits(status, SCHEMAS["inferencemodels"], "status")) == [
        "status.phase: 'Nice'",
        "status.current.versions[0]: '1' is not of type integer",
        "status.lastFailure: message is missing",
        "status.mood is not in the CRD",
        "status.replicas: -1",
    ]
