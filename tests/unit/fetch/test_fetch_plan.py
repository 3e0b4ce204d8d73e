"""The errors of `halimede_spec.fetch_plan`, with simple rules for names and configurations."""

import json
from typing import Any

import pytest

from halimede_spec.fetch_plan import FetchPlan, PlannedModel, S3Defaults, read_plan, write_plan
from halimede_spec.uri import parse_uri

DIGEST = "sha256:" + "0" * 64


class Rules:
    """Names are lower case, and a configuration is its `name`, which `!` makes wrong."""

    def name_problem(self, name: str) -> str | None:
        return None if name.islower() else "must be lower case"

    def read_config(self, document: dict[str, Any]) -> tuple[str | None, list[str]]:
        name = document.get("name", "")
        return (None, ["cannot be read"]) if name == "!" else (name, [])

    def name_of(self, config: str) -> str:
        return config

    def ensemble_problems(self, config: str, name: str) -> list[str]:
        return [] if config == name else ["is not an ensemble"]


def problems(document: object) -> list[str]:
    return read_plan(json.dumps(document).encode(), Rules())[1]


def model_problems(**fields: object) -> list[str]:
    """The problems of a plan with one model, without their path."""
    found = problems({"models": [{"name": "m", "uri": "s3://bucket/m", **fields}]})
    return [each.removeprefix("models[0].") for each in found]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        (None, ["expected an object"]),
        (["models"], ["expected an object"]),
        ({"model": []}, ["'model': is unknown; use one of version, models, ensembles, stores, cache"]),
        ({"version": 2}, ["version: expected 1"]),
        ({"version": True}, ["version: expected 1"]),
        ({"models": {}, "ensembles": 1}, ["models: expected a list", "ensembles: expected a list"]),
        ({"models": [1]}, ["models[0]: expected an object", "models[0].name: is missing", "models[0].uri: is missing"]),
        ({"stores": []}, ["stores: expected an object"]),
        ({"stores": {"s3": "x"}}, ["stores.s3: expected an object"]),
        (
            {"stores": {"s3": {"bucket": "b"}}},
            ["stores.s3.'bucket': is unknown; use one of endpoint, region, credentials"],
        ),
        ({"stores": {"s3": {"region": ""}}}, ["stores.s3.region: expected a string that is not empty"]),
        ({"stores": {"s3": {"credentials": "s"}}}, ["stores.s3.credentials: expected an absolute path"]),
        ({"cache": "/c"}, ["cache: expected an object", "cache.path: is missing"]),
        ({"cache": {}}, ["cache.path: is missing"]),
        ({"cache": {"path": 1}}, ["cache.path: expected a string that is not empty"]),
        ({"cache": {"path": "c"}}, ["cache.path: expected an absolute path"]),
    ],
)
def test_wrong_parts_of_a_plan_are_named(document: object, expected: list[str]) -> None:
    assert problems(document) == expected


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "1"])
def test_size_limit_is_a_positive_whole_number(limit: object) -> None:
    found = problems({"cache": {"path": "/c", "size_limit_bytes": limit}})
    assert found == ["cache.size_limit_bytes: expected a positive number of bytes"]


@pytest.mark.parametrize("endpoint", ["s3.local", "ftp://host", "http://", "http://user@host", "http://[::1"])
def test_endpoint_is_an_http_server_without_a_user(endpoint: str) -> None:
    found = problems({"stores": {"s3": {"endpoint": endpoint}}})
    assert found == ["stores.s3.endpoint: expected http:// or https:// and a host"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": None}, ["name: is missing"]),
        ({"name": 1}, ["name: expected a string that is not empty"]),
        ({"name": "M"}, ["name: must be lower case"]),
        ({"uri": None}, ["uri: is missing"]),
        ({"uri": ""}, ["uri: expected a string that is not empty"]),
        ({"uri": "s3://b/../m"}, ["uri: 's3://b/../m': has '.' or '..' in it"]),
        ({"format": "tf"}, ["format: use one of onnx, python, torch, tensorflow, openvino, tensorrt, fil, sklearn"]),
        ({"digest": DIGEST.upper()}, ["digest: expected sha256: and 64 of the digits 0 to 9 and a to f"]),
        ({"config": 1}, ["config: expected an object, a model configuration"]),
        ({"config": {"name": "!"}}, ["config: cannot be read"]),
        ({"config": {"name": "n"}}, ["config.name: expected the model's name 'm', or no name"]),
        (
            {"credentials": "c", "ca_bundle": "/a\0"},
            ["credentials: expected an absolute path", "ca_bundle: expected an absolute path"],
        ),
        ({"mount": "/mnt"}, ["mount: s3://bucket/m is not mounted; leave it out"]),
        ({"uri": "pvc://claim/m"}, ["mount: pvc://claim/m needs the folder where the claim is mounted"]),
    ],
)
def test_wrong_fields_of_a_model_are_named(fields: dict[str, object], expected: list[str]) -> None:
    assert model_problems(**fields) == expected


@pytest.mark.parametrize(
    ("ensemble", "expected"),
    [
        ({"config": {}}, ["name: is missing"]),
        ({"name": "e"}, ["config: is missing"]),
        ({"name": "e", "config": []}, ["config: expected an object, a model configuration"]),
        ({"name": "e", "config": {"name": "!"}}, ["config: cannot be read"]),
        ({"name": "e", "config": {"name": "f"}}, ["config: is not an ensemble"]),
        ({"name": "e", "config": {"name": "e"}}, []),
    ],
)
def test_wrong_fields_of_an_ensemble_are_named(ensemble: dict[str, object], expected: list[str]) -> None:
    found = problems({"ensembles": [ensemble]})
    assert [each.removeprefix("ensembles[0].") for each in found] == expected


def test_every_problem_is_reported_in_the_order_of_the_document() -> None:
    found = problems(
        {
            "models": [{"name": "m", "uri": "s3://b/m"}, {"name": "N", "uri": "x"}],
            "ensembles": [{"name": "m", "config": {"name": "m"}}],
            "cache": {},
        }
    )
    assert found == [
        "models[1].name: must be lower case",
        "models[1].uri: 'x' is not a URI of a model; use one of s3://, gs://, az://, as://, azure://, http://, https://, pvc://, "
        "file://",
        "cache.path: is missing",
        "the name 'm' is given to two models",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"{", "the plan is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (b"\xff", "the plan is not JSON: it is not UTF-8, or nested too deeply"),
        (b"[" * 100_000, "the plan is not JSON: it is not UTF-8, or nested too deeply"),
        (b'{"cache": {"path": "/a", "path": "/b"}, "cache": null}', "given twice: 'path'"),
    ],
)
def test_text_that_is_not_one_document_is_refused(text: bytes, problem: str) -> None:
    assert read_plan(text, Rules())[1][0] == problem


def test_repeated_key_is_reported_beside_other_problems() -> None:
    assert read_plan(b'{"models": [], "models": 1}', Rules())[1] == ["given twice: 'models'", "models: expected a list"]


def test_null_counts_as_absent() -> None:
    assert read_plan(b'{"version": null, "models": null, "stores": {"s3": null}, "cache": null}', Rules()) == (
        FetchPlan(),
        [],
    )


def test_written_plan_is_read_back() -> None:
    text = write_plan(
        {
            "version": 1,
            "models": [{"name": "m", "uri": "pvc://claim/m", "digest": DIGEST, "mount": "/mnt"}],
            "stores": {"s3": {"endpoint": "https://host:9000", "region": "eu", "credentials": "/s3"}},
        }
    )
    assert " " not in text
    assert read_plan(text.encode(), Rules()) == (
        FetchPlan(
            (PlannedModel("m", parse_uri("pvc://claim/m"), digest=DIGEST, mount="/mnt"),),
            s3=S3Defaults("https://host:9000", "eu", "/s3"),
        ),
        [],
    )
