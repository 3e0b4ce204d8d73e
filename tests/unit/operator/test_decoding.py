"""Documents of the API server in which somebody nested as deep, or wrote as much, as it lets them."""

import json

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.cluster.cache import MAX_SPEC_BYTES, Cache, entry_of
from halimede_operator.cluster.decoding import MAX_LEVELS, decode, decode_list
from halimede_operator.cluster.kinds import ENSEMBLES, MODELS
from halimede_operator.core.api.parse import parse
from halimede_operator.core.api.spec import Key, Kind
from halimede_operator.core.platform import Platform

PLATFORM = Platform("server:1", "gpu:1")
NESTED = (33, 70, 300, 2_000, 9_000)
"""Levels: past what a spec may have, past what is read, and past what orjson writes, and what it reads."""

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def model(name: str, pod: str = "{}", **metadata: str) -> bytes:
    """`pod` is JSON, of the overlay's spec."""
    head = json.dumps({"name": name, "namespace": "prod", "uid": name, "resourceVersion": "7", **metadata})
    spec = f'{{"model":{{"uri":"s3://models/m"}},"podTemplate":{{"spec":{pod}}}}}'
    return b'{"metadata":%s,"spec":%s}' % (head.encode(), spec.encode())


def nested(levels: int, opening: str = '{"a":', closing: str = "}") -> str:
    return opening * levels + "1" + closing * levels


def listed(*items: bytes) -> bytes:
    return b'{"kind":"List","metadata":{"resourceVersion":"9"},"items":[%s]}\n' % b",".join(items)


@pytest.mark.parametrize("levels", NESTED)
@pytest.mark.parametrize("brackets", [('{"a":', "}"), ("[", "]")])
def test_one_deep_object_of_a_list_is_refused_by_itself(levels: int, brackets: tuple[str, str]):
    pod = f'{{"x":{nested(levels, *brackets)}}}'
    head, items = decode_list(listed(model("good"), model("deep", pod), model("other")))
    entries = [entry_of(MODELS, decode(item)) for item in items]
    assert (head["metadata"], [entry.name for entry in entries]) == (
        {"resourceVersion": "9"},
        ["good", "deep", "other"],
    )
    problems = [parse(Kind.INFERENCE_MODEL, entry.object, PLATFORM)[1] for entry in entries]
    assert [[problem.path for problem in each] for each in problems] == [[], ["spec.podTemplate.spec"], []]
    assert "within one another" in problems[1][0].message


# Names that look as if they closed what was opened, and opened what is closed.
@pytest.mark.parametrize("brackets", [('{"a":', "}"), (r'{"\"}\"":', r',"\"{\"":0}')])
def test_what_is_not_too_deep_is_left_as_it_is_and_the_rest_is_null(brackets: tuple[str, str]):
    whole = nested(MAX_LEVELS, *brackets)
    assert decode(whole.encode()) == orjson.loads(whole)
    deeper = f'{{"a":{nested(MAX_LEVELS, *brackets)},"b":[{nested(MAX_LEVELS - 1, *brackets)},2]}}'
    cut = deeper.replace("1".join(brackets), "null")
    assert decode(deeper.encode()) == orjson.loads(cut)


@given(JSON)
def test_any_document_is_read_as_it_is(value: object):
    assert decode(json.dumps(value).encode()) == value
    assert decode(json.dumps(value, ensure_ascii=False, indent=1).encode()) == value


@given(st.lists(st.dictionaries(st.text(), JSON)), st.dictionaries(st.text().filter(lambda key: key != "items"), JSON))
def test_a_list_is_taken_apart_whatever_is_in_it(items: list[object], rest: dict[str, object]):
    head, texts = decode_list(json.dumps({**rest, "items": items, "after": rest}).encode())
    assert ([decode(text) for text in texts], {**head, "items": None}) == (
        items,
        {**rest, "items": None, "after": rest},
    )


@pytest.mark.parametrize("data", [b"", b"{", b'{"items":[{', b'{"items":[{"a":"', b"<html>", b"\xff", b'{"items":[{}}'])
def test_what_is_no_json_is_an_error(data: bytes):
    for read in (decode, decode_list):
        with pytest.raises(orjson.JSONDecodeError):
            read(data)


def test_a_list_without_items():
    for items in (b"null", b"[]"):
        assert decode_list(b'{"metadata":{},"items":%s}' % items)[1] == []


def test_a_string_without_an_end_is_looked_at_once():
    """Not once from each of its characters: that would not end."""
    with pytest.raises(orjson.JSONDecodeError):
        decode(b'{"a":"' + b"x" * 5_000_000)


def test_of_a_spec_that_is_too_large_only_that_is_known():
    cache = Cache()
    entry = entry_of(MODELS, decode(model("large", json.dumps({"x": "x" * MAX_SPEC_BYTES}))))
    cache.learn(entry)
    assert len(entry.json) < 1000
    # Also of what the cache has, and of what kopf hands on of it.
    for value in (entry.object, entry_of(MODELS, entry.object).object):
        spec, problems = parse(Kind.INFERENCE_MODEL, value, PLATFORM)
        assert spec is None
        assert [(problem.path, "at most 262144 are read" in problem.message) for problem in problems] == [
            ("spec", True)
        ]


def test_an_ensemble_that_is_too_large_waits_for_no_model():
    steps = [{"name": f"s{n}", "modelRef": {"name": f"m{n}"}, "when": "x" * 1000} for n in range(300)]
    head = {"name": "chain", "namespace": "prod", "uid": "chain", "resourceVersion": "7"}
    assert entry_of(ENSEMBLES, {"metadata": head, "spec": {"steps": steps}}).uses == frozenset()


def test_of_our_own_kinds_metadata_what_others_wrote_is_not_kept():
    head = {"name": "m", "namespace": "prod", "uid": "1", "resourceVersion": "7", "generation": 2}
    loud = {"annotations": {"a": "x" * 262_144}, "labels": {f"l{n}": "v" for n in range(9999)}, "finalizers": ["a/b"]}
    entry = entry_of(MODELS, {"metadata": {**head, **loud}, "spec": {}})
    assert (entry.object["metadata"], entry.key) == (head, Key(Kind.INFERENCE_MODEL, "prod", "m"))
