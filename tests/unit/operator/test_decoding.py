"""Decoding of documents that are as deep, or as large, as the API server allows."""

import json
import tracemalloc

import orjson
import pytest
from hypothesis import given

from halimede_operator.api_server.decoding import MAX_LEVELS, decode, decode_list
from halimede_operator.cluster.cache import MAX_SPEC_BYTES, Cache, entry_of
from halimede_operator.cluster.kinds import ENSEMBLES, MODELS
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Key, Kind
from support.examples import Draws, drawn, json_of

PLATFORM = Platform("server:1", "gpu:1")
NESTED = (33, 70, 300, 2_000, 9_000)
"""Levels beyond the limit of a spec, of decoding, of orjson's writer, and of its reader."""


def scalar(draws: Draws) -> object:
    match draws.below(4):
        case 0:
            return draws.pick((None, False, True))
        case 1:
            return draws.integer(-(2**53), 2**53)
        case _:
            return draws.text(12)


def key(draws: Draws) -> str:
    return draws.text(8)


def value(draws: Draws) -> object:
    return json_of(draws, scalar, key, levels=4)


def object_of(draws: Draws) -> dict[str, object]:
    return {key(draws): value(draws) for _ in range(draws.below(4))}


def items_and_rest(draws: Draws) -> tuple[list[dict[str, object]], dict[str, object]]:
    return [object_of(draws) for _ in range(draws.below(4))], object_of(draws)


def kept(item: object) -> object:
    return item


def model(name: str, pod: str = "{}", **metadata: str) -> bytes:
    """pod: JSON of the overlay's spec."""
    head = json.dumps({"name": name, "namespace": "prod", "uid": name, "resourceVersion": "7", **metadata})
    spec = f'{{"model":{{"uri":"s3://models/m"}},"podTemplate":{{"spec":{pod}}}}}'
    return b'{"metadata":%s,"spec":%s}' % (head.encode(), spec.encode())


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


def listed(*items: bytes) -> bytes:
    return b'{"kind":"List","metadata":{"resourceVersion":"9"},"items":[%s]}\n' % b",".join(items)


@pytest.mark.parametrize("levels", NESTED)
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]")])
def test_a_deep_object_in_a_list_affects_only_itself(levels: int, brackets: tuple[str, str]):
    pod = f'{{"x":{nested(levels, *brackets)}}}'
    found = decode_list(listed(model("good"), model("deep", pod), model("other")), kept)
    entries = [entry_of(MODELS, item) for item in found["items"]]
    assert (found["metadata"], [entry.name for entry in entries]) == (
        {"resourceVersion": "9"},
        ["good", "deep", "other"],
    )
    problems = [parse(Kind.INFERENCE_MODEL, entry.object, PLATFORM)[1] for entry in entries]
    assert [[problem.path for problem in each] for each in problems] == [[], ["spec.podTemplate.spec"], []]
    assert "within one another" in problems[1][0].message


# Names that look as if they closed what was opened, and opened what is closed.
@pytest.mark.parametrize("brackets", [('{"a":', "}"), (r'{"\"}\"":', r',"\"{\"":0}')])
def test_only_parts_that_are_too_deep_become_null(brackets: tuple[str, str]):
    whole = nested(MAX_LEVELS, *brackets)
    assert decode(whole.encode()) == orjson.loads(whole)
    deeper = f'{{"a":{nested(MAX_LEVELS, *brackets)},"b":[{nested(MAX_LEVELS - 1, *brackets)},2]}}'
    cut = deeper.replace("1".join(brackets), "null")
    assert decode(deeper.encode()) == orjson.loads(cut)


@given(drawn(value, 200))
def test_any_document_within_the_limits_is_decoded_unchanged(value: object):
    assert decode(json.dumps(value).encode()) == value
    assert decode(json.dumps(value, ensure_ascii=False, indent=1).encode()) == value


@given(drawn(items_and_rest, 300))
def test_a_list_with_any_items_is_decoded(case: tuple[list[dict[str, object]], dict[str, object]]):
    items, rest = case
    # As the API server writes a list: nothing of the same name is nested before its items.
    assert decode_list(json.dumps({"items": items, "after": rest}).encode(), kept) == {"items": items, "after": rest}
    indented = json.dumps({"kind": "List", "items": items, "after": rest}, ensure_ascii=False, indent=1).encode()
    assert decode_list(indented, kept) == {"kind": "List", "items": items, "after": rest}


def test_large_items_of_a_page_are_in_memory_one_at_a_time():
    """Items that each take 3 MB when decoded."""
    page = listed(*[model("wide", f"[{','.join(['[]'] * 50_000)}]")] * 10)
    tracemalloc.start()
    decode_list(page, lambda item: entry_of(MODELS, item).object["metadata"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 15_000_000


@pytest.mark.parametrize("data", [b"", b"{", b'{"items":[{', b'{"items":[{"a":"', b"<html>", b"\xff", b'{"items":[{}}'])
def test_invalid_json_is_an_error(data: bytes):
    with pytest.raises(orjson.JSONDecodeError):
        decode(data)
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        decode_list(data, kept)


def test_a_list_without_items_is_decoded():
    for text in (b'{"metadata":{},"items":null}', b'{"metadata":{},"items":[]}', b'{"metadata":{}}'):
        assert decode_list(text, kept) == {"metadata": {}, "items": []}


def test_an_item_is_replaced_by_its_kept_parts():
    found = decode_list(listed(model("small"), model("large")), lambda item: item["metadata"]["name"])
    assert found["items"] == ["small", "large"]


def test_an_unterminated_string_is_scanned_once():
    """A scan from each of its characters would take quadratic time and never end."""
    with pytest.raises(orjson.JSONDecodeError):
        decode(b'{"a":"' + b"x" * 5_000_000)


def test_a_spec_that_is_too_large_is_not_cached():
    cache = Cache()
    entry = entry_of(MODELS, decode(model("large", json.dumps({"x": "x" * MAX_SPEC_BYTES}))))
    cache.learn(entry)
    assert len(entry.json) < 1000
    # Also of what the cache has, and of what kopf hands on of it.
    for value in (entry.object, entry_of(MODELS, entry.object).object):
        spec, problems = parse(Kind.INFERENCE_MODEL, value, PLATFORM)
        assert spec is None
        assert [(problem.path, "at most 65536 are read" in problem.message) for problem in problems] == [("spec", True)]


def test_an_ensemble_that_is_too_large_uses_no_model():
    steps = [{"name": f"s{n}", "modelRef": {"name": f"m{n}"}, "when": "x" * 1000} for n in range(300)]
    head = {"name": "chain", "namespace": "prod", "uid": "chain", "resourceVersion": "7"}
    assert entry_of(ENSEMBLES, {"metadata": head, "spec": {"steps": steps}}).uses == frozenset()


def test_only_used_metadata_of_our_own_kinds_is_cached():
    head = {"name": "m", "namespace": "prod", "uid": "1", "resourceVersion": "7", "generation": 2}
    loud = {"annotations": {"a": "x" * 262_144}, "labels": {f"l{n}": "v" for n in range(9999)}, "finalizers": ["a/b"]}
    entry = entry_of(MODELS, {"metadata": {**head, **loud}, "spec": {}})
    assert (entry.object["metadata"], entry.key) == (head, Key(Kind.INFERENCE_MODEL, "prod", "m"))
