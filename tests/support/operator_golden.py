"""The operator's children of many objects, as text: the simplest of each kind in full, of all others the differences.

`PYTHONPATH=tests python -m support.operator_golden` writes the file that the test reads.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from halimede_operator.core.labels import APPLIED_HASH, REVISION_LABEL, TEMPLATE_HASH
from halimede_operator.core.objects import map_key
from halimede_operator.core.platform import Platform
from halimede_operator.core.revisions.revision import TEMPLATE_FILE
from halimede_operator.core.spec.ensemble import member_names
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Key, Kind, ModelSpec, Spec
from support.custom_resources import GOOD, model
from support.operator_desired import children_of_spec
from support.operator_specs import PLATFORM, UID

Json = dict[str, Any]

GOLDEN = Path(__file__).parents[1] / "unit" / "operator" / "children" / "golden.txt"
REGENERATE = "PYTHONPATH=tests python -m support.operator_golden"
_EXAMPLES = Path(__file__).parents[2] / "manifests" / "examples"
_OTHER_PLATFORMS = {
    "platform with server.nodeLostTolerationSeconds": replace(PLATFORM, node_lost_toleration_seconds=30),
    "platform with stores.s3.secretName": replace(PLATFORM, s3_secret="models-s3"),
}
"""Platforms for which the simplest model is written too."""
_PLAIN = {"InferenceModel": "the-simplest", "ModelEnsemble": "three-steps"}
_LONGEST_NAME = 40
_LEFT_OUT = {APPLIED_HASH, TEMPLATE_HASH, REVISION_LABEL, TEMPLATE_FILE}
"""Parts that are written anyway."""


def golden() -> str:
    """A part for each object: its name, the hash of its pod template, and a line for each value."""
    plain = {kind: _values(children_of(GOOD[name])) for kind, name in _PLAIN.items()}
    parts: list[str] = []
    for name, value in objects().items():
        parts.append(_part(name, children_of(value), plain[value["kind"]] if name not in _PLAIN.values() else {}))
    simplest = GOOD[_PLAIN["InferenceModel"]]
    for name, platform in _OTHER_PLATFORMS.items():
        parts.append(_part(name, children_of(simplest, platform), plain["InferenceModel"]))
    return "\n\n".join(parts) + "\n"


def _part(name: str, children: tuple[Json, ...], before: Mapping[str, str]) -> str:
    (deployment,) = (child for child in children if child["kind"] == "Deployment")
    lines = [f"  {line}" for line in _lines(before, _values(children))]
    return "\n".join([f"{name}: pod template {deployment['metadata']['annotations'][TEMPLATE_HASH]}", *lines])


def templates(text: str) -> dict[str, str]:
    """The hash of the pod template of each object in a golden text."""
    heads = (line.split(": pod template ", 1) for line in text.splitlines() if line and line[0] != " ")
    return dict(heads)


def objects() -> dict[str, Json]:
    examples = {f"example {path.stem}": yaml.safe_load(path.read_text()) for path in sorted(_EXAMPLES.glob("*.yaml"))}
    return {**{name: GOOD[name] for name in _PLAIN.values()}, **GOOD, **examples}


def children_of(value: Json, platform: Platform = PLATFORM) -> tuple[Json, ...]:
    """The children of an object; AssertionError if the platform refuses it."""
    kind, name = Kind(value["kind"]), value["metadata"]["name"]
    # One name for all, so that names do not differ, except for objects that test the name.
    key = Key(kind, "prod", name if len(name) > _LONGEST_NAME else "bert")
    members = {
        member: _spec(Key(Kind.INFERENCE_MODEL, "prod", member), model(member), platform)
        for member in member_names(value)
    }
    models = {member: spec for member, spec in members.items() if isinstance(spec, ModelSpec)}
    return children_of_spec(key, UID, _spec(key, value, platform), models, platform)


def _spec(key: Key, value: Json, platform: Platform) -> Spec:
    spec, problems = parse(key.kind, {**value, "metadata": {"namespace": key.namespace, "name": key.name}}, platform)
    assert spec is not None, problems
    return spec


def _values(children: tuple[Json, ...]) -> dict[str, str]:
    """Values by path. A list item with a name has the name in its path."""
    found: dict[str, str] = {}
    for child in children:
        suffix = child["metadata"]["name"].removeprefix("bert")
        # A plan's name contains the hash of its content, which is in the Deployment too.
        kind = child["kind"] if child["kind"] == "ConfigMap" else f"{child['kind']}{suffix}"
        found.update(_flat(kind, child, ""))
    return found


def _flat(path: str, value: Any, field: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, str) and value.startswith("{"):
        # The plan.
        value = json.loads(value)
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            if key not in _LEFT_OUT:
                yield from _flat(f"{path}.{key}", each, key)
        return
    if isinstance(value, list) and value and all(map_key(field, each) is not None for each in value):
        for each in value:
            key = map_key(field, each) or ()
            yield from _flat(f"{path}[{' '.join(map(str, key))}]", each, "")
        # A change of their order replaces pods too.
        names = ", ".join(str((map_key(field, each) or ("",))[0]) for each in value)
        yield f"{path}[]", names
        return
    yield path, json.dumps(value, sort_keys=True)


def _lines(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    gone = [f"- {path}" for path in before if path not in after]
    return gone + [f"{path} = {value}" for path, value in after.items() if before.get(path) != value]


if __name__ == "__main__":
    GOLDEN.write_text(golden())
