"""Any object becomes a spec or problems whose paths exist."""

import re
from typing import Any

from hypothesis import HealthCheck, given, settings

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Kind
from support.custom_resources import GOOD, Json, changed, parts_of, schema_of
from support.examples import Draws, drawn, examples, json_of

PLATFORM = Platform("server", "gpu-server", schemes=frozenset({"s3", "file"}), file_roots=("/srv",))

WORDS = ("GPU", "MIG", "PVC", "http", "8Gi", "5ms", "s3://a/b", "tok.ids", "request.TEXT", "x" * 2000, 10**30)
KEYS = (
    "model",
    "uri",
    "spec",
    "metadata",
    "name",
    "steps",
    "inputs",
    "outputs",
    "containers",
    "securityContext",
    "env",
)


def scalar(draws: Draws) -> Any:
    match draws.below(6):
        case 0:
            return draws.pick((None, True, False))
        case 1:
            return draws.integer(-(2**70), 2**70)
        case 2:
            return draws.float(64)
        case 3:
            return draws.text(8)
        case _:
            return draws.pick(WORDS)


def key(draws: Draws) -> str:
    return draws.pick(KEYS) if draws.below(2) else draws.text(4)


def value(draws: Draws) -> Any:
    return json_of(draws, scalar, key)


def kind_and_spec(draws: Draws) -> tuple[Kind, Json]:
    return draws.pick(tuple(Kind)), {key(draws): value(draws) for _ in range(draws.below(6))}


def places(value: Any, path: str = "") -> list[str]:
    """All paths of an example below its spec."""
    if isinstance(value, dict):
        inner = {
            f"{path}.{key}" if re.fullmatch(r"\w+", key) else f"{path}[{key}]": each for key, each in value.items()
        }
    else:
        inner = {f"{path}[{i}]": each for i, each in enumerate(value)} if isinstance(value, list) else {}
    return [*inner, *(place for way, each in inner.items() for place in places(each, way))]


def is_known(kind: str, path: str) -> bool:
    """Whether the schema has this path."""
    node: Json = schema_of(kind)
    for part in parts_of(path):
        if node.get("x-kubernetes-preserve-unknown-fields") or path.startswith("metadata."):
            return True
        following = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        following = following or node.get("additionalProperties")
        if following is None:
            return False
        node = following
    return True


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(drawn(kind_and_spec, 150))
def test_any_object_gives_a_spec_or_problems(case: tuple[Kind, Json]) -> None:
    kind, value = case
    for example in (value, {"metadata": {"name": "m"}, "spec": value}):
        spec, problems = parse(kind, example, PLATFORM)
        assert (spec is None) is bool(problems)


CASES = [(example, f"spec{place}") for example in GOOD.values() for place in places(example["spec"])]


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(drawn(lambda draws: (draws.pick(CASES), value(draws)), 100))
def test_a_valid_object_with_any_value_in_one_field_does_not_raise(case: tuple[tuple[Json, str], Any]) -> None:
    (example, path), value = case
    spec, problems = parse(Kind(example["kind"]), changed(example, {path: value}), PLATFORM)
    assert (spec is None) is bool(problems)
    for problem in problems:
        # A key of the user's own, which the mutation put there, may hold anything, brackets among it.
        assert is_known(example["kind"], problem.path) or problem.path.startswith(path), problem
        assert "\n" not in problem.message
        assert len(problem.message) < 1000
