"""The schemas in crds/ agree with the operator: a field is in both or in neither."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from halimede.core.config.read import read_json
from halimede.fetch.credentials import KEYS
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import UNREAD, Kind, ModelSpec, Spec
from halimede_operator.core.spec.uris import read_uri
from halimede_spec.fetch_plan import FORMATS
from halimede_spec.uri import SCHEMES, parse_uri
from support.bad_custom_resources import BAD, Bad
from support.custom_resources import ABSENT, BY_METRICS, CRDS, FULL, FULL_MODEL, GOOD, MORE, Json, changed, schema_of
from support.examples import Draws, drawn
from support.image import REPOSITORY_ROOT

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")
KINDS = tuple(CRDS)
EXAMPLES = sorted((REPOSITORY_ROOT / "manifests" / "examples").glob("*.yaml"))
OWN_FIELDS = {"InferenceModel": {"model"}, "ModelEnsemble": {"maxBatchSize", "inputs", "outputs", "steps", "placement"}}
OWN_STATUS = {"InferenceModel": {"model"}, "ModelEnsemble": {"members", "readySteps"}}


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Every field with its path, `spec.env[].name`, `spec.resources.limits[*]`."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}[*]")


def fields(kind: str, *parts: str) -> list[tuple[str, Json]]:
    return [(path, node) for path, node in nodes(schema_of(kind)) if path.split(".")[0] in parts]


def leaves(kind: str) -> list[tuple[str, Json]]:
    inner = ("properties", "items", "additionalProperties")
    return [(path, node) for path, node in fields(kind, "spec") if not any(key in node for key in inner)]


def spec_of(example: Json) -> Spec:
    spec, problems = parse(Kind(example["kind"]), example, PLATFORM)
    assert spec is not None, problems
    return spec


def test_the_schema_has_all_formats_of_model_files() -> None:
    formats = next(node for path, node in nodes(schema_of("InferenceModel")) if path == "spec.model.format")
    assert formats["enum"] == list(FORMATS)


def test_fields_for_pods_are_the_same_in_both_kinds() -> None:
    def shared(part: str, own: Mapping[str, set[str]]) -> list[Json]:
        parts = [(kind, schema_of(kind)["properties"][part]["properties"]) for kind in KINDS]
        return [{name: node for name, node in all_.items() if name not in own[kind]} for kind, all_ in parts]

    of_model, of_ensemble = shared("spec", OWN_FIELDS)
    assert of_model == of_ensemble
    assert len(of_model) == 15
    of_model, of_ensemble = shared("status", OWN_STATUS)
    assert of_model == of_ensemble


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described_in_short_sentences(kind: str) -> None:
    texts = {path: node.get("description", "") for path, node in fields(kind, "spec", "status")}
    assert [path for path, text in texts.items() if not text.endswith(".") or not 5 < len(text) <= 420] == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_spec_is_bounded_so_that_rules_are_cheap(kind: str) -> None:
    unbounded = []
    for path, node in fields(kind, "spec"):
        is_list, is_map = node.get("type") == "array", "additionalProperties" in node
        is_text = node.get("type") == "string" or node.get("x-kubernetes-int-or-string")
        if (
            (is_list and not {"maxItems", "x-kubernetes-list-type"} <= node.keys())
            or (is_map and "maxProperties" not in node)
            or (is_text and not {"maxLength", "enum"} & node.keys())
            or (node.get("type") == "integer" and "format" not in node)
        ):
            unbounded.append(path)
    assert unbounded == []


@pytest.mark.parametrize("kind", KINDS)
def test_every_rule_has_a_message(kind: str) -> None:
    rules = [rule for _, node in nodes(schema_of(kind)) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 30
    assert [rule for rule in rules if not rule.get("message")] == []


METRICS = BY_METRICS["metrics"]
Changes = Mapping[str, Any]
_BY_MEMORY: Changes = {"spec.accelerator": {"type": "MIG", "mig": {"minMemory": "9Gi"}}}
OTHER: Mapping[str, Changes | tuple[Changes, Changes]] = {
    "spec.model.digest": {"spec.model.digest": f"sha256:{'1' * 64}"},
    "spec.model.versionPolicy.all": {"spec.model.versionPolicy": {"latest": 1}},
    "spec.model.config": {"spec.model.config.maxBatchSize": 33},
    "spec.accelerator.type": {"spec.accelerator": {"type": "MIG", "mig": {"profile": "1g.10gb"}}},
    "spec.accelerator.count": ({"spec.accelerator": {"type": "GPU", "count": 1}}, {"spec.accelerator.count": 2}),
    "spec.accelerator.moveAfter": {"spec.accelerator.moveAfter": "6m"},
    "spec.accelerator.mig.profile": {"spec.accelerator.mig.profile": "1g.10gb+me"},
    "spec.accelerator.mig.minMemory": (_BY_MEMORY, {"spec.accelerator.mig.minMemory": "10Gi"}),
    "spec.accelerator.mig.allowWhole": (_BY_MEMORY, {"spec.accelerator.mig.allowWhole": True}),
    "spec.accelerator.gpu.minMemory": {"spec.accelerator.gpu.minMemory": "41Gi"},
    "spec.accelerator.gpu.minComputeCapability": {"spec.accelerator.gpu.minComputeCapability": "9.0"},
    "spec.accelerator.shared.resourceName": (
        {"spec.accelerator": {"type": "Shared"}},
        {"spec.accelerator.shared": {"resourceName": "nvidia.com/gpu"}},
    ),
    "spec.accelerator.dra.deviceClassName": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu.nvidia.com"}}},
        {"spec.accelerator.dra.deviceClassName": "mig.nvidia.com"},
    ),
    "spec.accelerator.dra.selectors[]": (
        {"spec.accelerator": {"type": "DRA", "dra": {"deviceClassName": "gpu.nvidia.com", "selectors": ["true"]}}},
        {"spec.accelerator.dra.selectors": ["false"]},
    ),
    **{
        f"spec.accelerator.dra.additionalRequests[].{field}": (
            {
                "spec.accelerator": {
                    "type": "DRA",
                    "dra": {
                        "deviceClassName": "gpu.nvidia.com",
                        "additionalRequests": [{"name": "nic", "deviceClassName": "rdma", "selectors": ["true"]}],
                    },
                }
            },
            {f"spec.accelerator.dra.additionalRequests[0].{field.removesuffix('[]')}": other},
        )
        for field, other in (("name", "disk"), ("deviceClassName", "x"), ("selectors[]", ["false"]), ("count", 2))
    },
    "spec.resources.requests[*]": {"spec.resources.requests[cpu]": 1},
    "spec.resources.limits[*]": {"spec.resources.limits[memory]": "9Gi"},
    "spec.scheduling.tolerations[].operator": {"spec.scheduling.tolerations[0].operator": ABSENT},
    "spec.scheduling.tolerations[].effect": {"spec.scheduling.tolerations[1].effect": "NoSchedule"},
    "spec.scheduling.affinity.nodeAffinity": {"spec.scheduling.affinity.nodeAffinity": {}},
    "spec.scheduling.affinity.podAffinity": {"spec.scheduling.affinity.podAffinity": {}},
    "spec.scheduling.affinity.podAntiAffinity": {"spec.scheduling.affinity.podAntiAffinity": {}},
    "spec.serving.protocols[]": {"spec.serving.protocols": ["http"]},
    "spec.serving.ports.http": {"spec.serving.ports.http": 9100},
    "spec.serving.ports.grpc": {"spec.serving.ports.grpc": 9100},
    "spec.serving.maxMessageSize": {"spec.serving.maxMessageSize": "65Mi"},
    "spec.serving.drainTimeout": {"spec.serving.drainTimeout": "60s"},
    "spec.serving.args[]": {"spec.serving.args": ["--log-verbose=2"]},
    "spec.rollout.progressDeadline": {"spec.rollout.progressDeadline": "2h"},
    "spec.podTemplate.spec": {"spec.podTemplate.spec": {"terminationGracePeriodSeconds": 5}},
    "spec.disruption.maxUnavailable": {"spec.disruption.maxUnavailable": 3},
    "spec.networkPolicy.enabled": ({"spec.networkPolicy": {"enabled": True}}, {"spec.networkPolicy.enabled": False}),
    "spec.networkPolicy.allowFrom[].ipBlock.cidr": {"spec.networkPolicy.allowFrom[1].ipBlock.cidr": "10.0.0.0/9"},
    "spec.networkPolicy.allowFrom[].ipBlock.except[]": {
        "spec.networkPolicy.allowFrom[1].ipBlock.except": ["10.2.0.0/16"]
    },
    "spec.cache.medium": ({"spec.cache": {"medium": "HostPath"}}, {"spec.cache.medium": "EmptyDir"}),
    "spec.cache.sizeLimit": {"spec.cache.sizeLimit": "51Gi"},
    "spec.autoscaling.provider": (
        {"spec.autoscaling": {"maxReplicas": 4}},
        {"spec.autoscaling.provider": "External"},
    ),
    "spec.autoscaling.target": {"spec.autoscaling.target": 7},
    "spec.autoscaling.scaleToZero.idleFor": {"spec.autoscaling.scaleToZero.idleFor": "11m"},
    "spec.autoscaling.scaleToZero.zeroBy": (
        {"spec.autoscaling": {"maxReplicas": 4, "scaleToZero": {"idleFor": "10m"}}},
        {"spec.autoscaling.scaleToZero.zeroBy": "HPA"},
    ),
    "spec.autoscaling.behavior": {"spec.autoscaling.behavior": {"scaleUp": {"selectPolicy": "Min"}}},
    "spec.autoscaling.metrics[].type": {"spec.autoscaling": BY_METRICS, "spec.autoscaling.metrics[0]": METRICS[3]},
    **{
        f"spec.autoscaling.metrics[].{field}": (
            {"spec.autoscaling": {"maxReplicas": 4, "metrics": [METRICS[i]]}},
            {f"spec.autoscaling.metrics[0].{field}.other": 1},
        )
        for i, field in enumerate(("pods", "object", "external", "resource", "containerResource"))
    },
    "spec.inputs[].name": {"spec.inputs[0].name": "WORDS", "spec.steps[0].inputs[text]": "request.WORDS"},
    "spec.outputs[].from": {"spec.steps[2].outputs[v]": "vec", "spec.outputs[0].from": "pool.vec"},
    "spec.steps[].name": {"spec.steps[2].name": "pooling", "spec.outputs[0].from": "pooling.vector"},
    "spec.steps[].inputs[*]": {"spec.steps[1].inputs[ids]": "request.TEXT"},
    "spec.steps[].outputs[*]": {"spec.steps[2].outputs[v]": "vec", "spec.outputs[0].from": "pool.vec"},
    "spec.steps[].when": {"spec.steps[2].when": "not parameters.fast"},
}
"""Another value of a field, where the generated one is invalid; the first of a pair changes other fields before."""

OF_ONE_VALUE = {"spec.placement.mode"}


def places(value: Any, path: str, way: str = "") -> Iterator[tuple[str, Any]]:
    """The paths of a field in an example, with the values."""
    match = re.match(r"\.?([^.\[]+)|(\[\])|(\[\*\])", path)
    if match is None:
        yield way, value
        return
    rest = path[match.end() :]
    if match[1] is not None:
        if isinstance(value, dict) and match[1] in value:
            yield from places(value[match[1]], rest, f"{way}.{match[1]}" if way else match[1])
        return
    entries = enumerate(value) if match[2] else value.items()
    for key, inner in entries:
        yield from places(inner, rest, f"{way}[{key}]")


def another(node: Json, value: Any) -> Any:
    if "enum" in node:
        return node["enum"][(node["enum"].index(value) + 1) % len(node["enum"])]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else f"{value}x"


LEAVES = [(kind, path, node) for kind in KINDS for path, node in leaves(kind)]


def changes_of(kind: str, path: str, node: Json) -> tuple[Json, Json]:
    """An example with the field, and the same example with another value of it."""
    if path in OTHER:
        other = OTHER[path]
        before, after = other if isinstance(other, tuple) else ({}, other)
    examples = [example for example in (FULL[kind], MORE[kind], *GOOD.values()) if example["kind"] == kind]
    found = [(example, place, value) for example in examples for place, value in places(example, path)]
    if path not in OTHER:
        assert found, f"no example has {path}"
        before, after = {}, {found[0][1]: another(node, found[0][2])}
    example = changed(found[0][0] if found else examples[0], before)
    return example, changed(example, after)


@pytest.mark.parametrize(("kind", "path", "node"), LEAVES, ids=[f"{kind}-{path}" for kind, path, _ in LEAVES])
def test_a_field_that_is_accepted_is_honoured(kind: str, path: str, node: Json) -> None:
    if path in OF_ONE_VALUE:
        assert len(node["enum"]) == 1
        return
    before, after = changes_of(kind, path, node)
    assert spec_of(before) != spec_of(after)


class Recorded(dict[str, Any]):
    """An object that records which of its fields are read."""

    def __init__(self, values: Json, path: str, asked: set[str]) -> None:
        super().__init__({key: recorded(value, f"{path}.{key}".strip("."), asked) for key, value in values.items()})
        self.path, self.asked = path, asked

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(f"{self.path}.{key}".strip("."))
        return super().get(key, default)


def recorded(value: Any, path: str, asked: set[str]) -> Any:
    if isinstance(value, dict):
        return Recorded(value, path, asked)
    return [recorded(entry, f"{path}[]", asked) for entry in value] if isinstance(value, list) else value


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_that_the_operator_reads_is_in_the_schema(kind: str) -> None:
    known = {path for path, _ in nodes(schema_of(kind))}
    asked: set[str] = set()
    for example in (*GOOD.values(), *(bad.object for bad in BAD)):
        if example["kind"] == kind:
            parse(Kind(kind), recorded(example, "", asked), PLATFORM)
    kinds_of_metrics = ("pods", "object", "external", "resource", "containerResource")
    metrics = (f"spec.autoscaling.metrics[].{metric}." for metric in kinds_of_metrics)
    free = ("spec.podTemplate.spec.", "spec.model.config.", "spec.autoscaling.behavior.", *metrics)
    unknown = {path for path in asked if path not in known and not path.startswith(free)}
    # The operator's cache sets this for objects that are too large; the API server would remove it.
    assert unknown == {"metadata.name", "metadata.namespace", UNREAD}
    assert {path for path, node in leaves(kind) if "[" not in path and path not in asked} == set()


@pytest.mark.parametrize("example", GOOD.values(), ids=GOOD)
def test_good_objects_have_no_problems(example: Json) -> None:
    spec_of(example)


@pytest.mark.parametrize("bad", BAD, ids=[bad.name for bad in BAD])
def test_the_operator_refuses_what_the_schema_refuses(bad: Bad) -> None:
    spec, problems = parse(Kind(bad.object["kind"]), bad.object, PLATFORM)
    assert spec is None
    assert any(problem.path.startswith(bad.path) or bad.path.startswith(problem.path) for problem in problems), problems


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_named_after_its_kind_and_feature(path: Path) -> None:
    (example,) = yaml.safe_load_all(path.read_text())
    kind, _, feature = path.stem.partition("-")
    assert kind == example["kind"].lower()
    assert feature == "" or example["metadata"]["name"].endswith(feature)


def test_the_server_reads_the_configuration_of_a_spec() -> None:
    spec = spec_of(FULL_MODEL)
    assert isinstance(spec, ModelSpec)
    read = read_json(json.dumps(spec.model.config))
    assert read.problems == ()
    batching = read.config.dynamic_batching
    assert batching is not None
    assert batching.default_queue_policy is not None
    assert batching.max_queue_delay_microseconds == 500
    assert batching.default_queue_policy.default_timeout_microseconds == 2_000_000
    assert read.config.version_policy is not None
    assert read.config.version_policy.latest is not None
    assert read.config.version_policy.latest.num_versions == 2
    assert read.config.instance_group[0].kind.name == "KIND_GPU"
    assert read.config.parameters["intra_op_thread_count"].string_value == "4"


def test_the_keys_of_credentials_are_those_that_the_fetcher_reads() -> None:
    texts = dict(fields("InferenceModel", "spec"))
    named = re.findall(r"[A-Z][A-Z_]{3,}", texts["spec.model.credentials.secretRef"]["description"])
    assert sorted(named) == sorted(KEYS)


STARTS = (
    "models",
    "models/",
    "models/bert",
    "minio:9000/models",
    "https://minio/models",
    "/srv/models",
    "",
    "a b",
    "https:",
)
PARTS = ("/", "/", "bert.onnx", "a b", ".", "..", "\\", "?v=2", "#x", "@", "ü", "%2e", ":80")


def uri_of(draws: Draws) -> str:
    parts = [draws.pick(PARTS) if draws.below(2) else draws.text(2) for _ in range(draws.below(5))]
    return f"{draws.pick(SCHEMES)}://{draws.pick(STARTS)}{''.join(parts)}"


@settings(max_examples=500)
@given(drawn(uri_of, 40))
def test_the_fetcher_accepts_every_uri_that_the_operator_accepts(text: str) -> None:
    uri = read_uri(text)
    if not isinstance(uri, str):
        fetched = parse_uri(text)
        assert fetched.path == uri.path.strip("/")
        assert fetched.container == uri.authority or uri.scheme in ("http", "https")


def test_schema_chart_and_page_have_the_schemes_of_the_fetcher() -> None:
    uri = dict(nodes(schema_of("InferenceModel")))["spec.model.uri"]
    rule, message = uri["x-kubernetes-validations"][0]["rule"], uri["x-kubernetes-validations"][0]["message"]
    pattern = re.compile(rule.removeprefix("self.matches(r'").removesuffix("')"))
    examples = {scheme: f"{scheme}://models/bert/1.onnx" for scheme in SCHEMES} | {"file": "file:///models/bert"}
    assert [text for text in examples.values() if isinstance(read_uri(text), str) or not pattern.fullmatch(text)] == []
    named = re.findall(r"[a-z0-9]+", message.partition("schemes ")[2])
    assert tuple(name for name in named if name != "and") == SCHEMES
    values = json.loads((REPOSITORY_ROOT / "helm" / "halimede" / "values.schema.json").read_text())
    assert values["properties"]["models"]["properties"]["schemes"]["items"]["enum"] == list(SCHEMES)
    chart = yaml.safe_load((REPOSITORY_ROOT / "helm" / "halimede" / "values.yaml").read_text())
    assert set(chart["models"]["schemes"]) == set(PLATFORM.schemes)
    page = (REPOSITORY_ROOT / "docs" / "pages" / "model-stores.md").read_text()
    assert [scheme for scheme in SCHEMES if f"`{scheme}://" not in page and scheme != "http"] == []
