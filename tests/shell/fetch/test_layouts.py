"""How the objects of a bucket become a model repository."""

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from halimede.fetch.store_repository import StoreRepository
from halimede_spec.uri import parse_uri
from shell.fetch.conftest import Store
from support.stores import COMMAND, Fetch, WebServer, tree


def test_only_the_latest_version_and_common_files_are_fetched(store: Store) -> None:
    store.put(
        {
            "digits/": b"",
            "digits/config.pbtxt": b"max_batch_size: 4",
            "digits/labels.txt": b"a\nb",
            "digits/2/model.onnx": b"two",
            "digits/10/": b"",
            "digits/10/model.onnx": b"ten",
            "digits/10/weights/part-0": b"0",
            "digits2/1/model.onnx": b"of another model",
        }
    )

    fetching = store.fetching("digits")
    fetched = fetching.end(fetching.start(program=COMMAND))

    assert (fetched.code, tree(store.models)) == (
        0,
        {
            "digits/config.pbtxt": b"max_batch_size: 4",
            "digits/labels.txt": b"a\nb",
            "digits/10/model.onnx": b"ten",
            "digits/10/weights/part-0": b"0",
        },
    )
    assert store.gets("digits/2/model.onnx") == 0
    assert [{**model, "fetched_at": "", "digest": ""} for model in fetched.models] == [
        {"name": "digits", "digest": "", "size_bytes": 24, "files": 4, "fetched_at": "", "cached": False}
    ]


def test_version_policy_of_the_plan_overrides_the_configuration(store: Store) -> None:
    store.put(
        {
            "digits/config.pbtxt": b"version_policy { all { } }",
            **{f"digits/{version}/model.onnx": bytes([version]) for version in (1, 2, 3)},
        }
    )

    store.fetch(config={"version_policy": {"specific": {"versions": [1, 3]}}})

    assert sorted(path.name for path in (store.models / "digits").iterdir()) == ["1", "3", "config.pbtxt"]
    assert store.gets("digits/2/model.onnx") == 0


def test_a_folder_of_a_models_files_is_version_one(store: Store) -> None:
    store.put({"digits/model.py": b"code", "digits/tokens/vocab.txt": b"a", "digits/config.json": b"{}"})

    assert store.fetch(format="python").code == 0

    assert tree(store.models) == {
        "digits/1/model.py": b"code",
        "digits/1/tokens/vocab.txt": b"a",
        "digits/1/config.json": b"{}",
        "digits/config.pbtxt": b'backend: "python"\n',
    }


def test_single_file_is_version_one_with_its_backends_name(store: Store) -> None:
    store.put({"digits/resnet50-v2.onnx": b"onnx", "digits/model.py": b"other"})

    assert store.fetch("digits/resnet50-v2.onnx", name="resnet").code == 0

    assert tree(store.models) == {"resnet/1/model.onnx": b"onnx"}


def test_format_names_the_single_file_and_its_backend(store: Store) -> None:
    store.put({"digits/booster.model": b"{L\0\0\0\0\0\0\0\x07learner}"})

    assert store.fetch("digits/booster.model").code == 14
    assert store.gets("digits/booster.model") == 0
    assert store.fetch("digits/booster.model", format="fil", process="again").code == 0

    assert tree(store.models) == {
        "digits/1/xgboost.ubj": b"{L\0\0\0\0\0\0\0\x07learner}",
        "digits/config.pbtxt": b'backend: "fil"\n',
    }


def test_the_only_folder_with_a_models_files_is_version_one(store: Store) -> None:
    store.put(
        {
            "digits/README.md": b"# A model of Hugging Face",
            "digits/config.json": b"{}",
            "digits/model.safetensors": b"weights",
            "digits/onnx/model.onnx": b"onnx",
            "digits/onnx/model.onnx_data": b"data",
            "digits/onnx/._model.onnx": b"of macOS",
            "digits/__MACOSX/onnx/model.onnx": b"of macOS",
        }
    )

    fetched = store.fetch()

    assert (fetched.code, tree(store.models)) == (
        0,
        {"digits/1/model.onnx": b"onnx", "digits/1/model.onnx_data": b"data"},
    ), fetched.log
    assert store.gets("digits/model.safetensors") == 0
    assert f"model 'digits': 2 files, 8 bytes, in {store.models}/digits\n" in fetched.log
    assert fetched.log.endswith(f"Serve them by: halimede serve --model-repository {store.models}\n")


def test_a_saved_models_folder_is_version_one(store: Store) -> None:
    store.put({"digits/saved_model.pb": b"graph", "digits/variables/variables.index": b"x"})

    assert store.fetch().code == 0

    assert tree(store.models / "digits/1/model.savedmodel") == {
        "saved_model.pb": b"graph",
        "variables/variables.index": b"x",
    }


def test_plan_configuration_overrides_the_folders_by_field(store: Store) -> None:
    store.put(
        {
            "digits/config.yaml": b"name: elsewhere\nmax_batch_size: 4\nparameters: {a: {string_value: '1'}, b: {string_value: '1'}}\n"
            b"sequence_batching: {max_sequence_idle_microseconds: 5}\n",
            "digits/1/model.onnx": b"x",
        }
    )

    store.fetch(config={"max_batch_size": 0, "dynamic_batching": {}, "parameters": {"b": {"string_value": "2"}}})

    assert tree(store.models / "digits") == {
        "1/model.onnx": b"x",
        "config.pbtxt": b"""name: "digits"
max_batch_size: 0
dynamic_batching { }
parameters {
  key: "a"
  value {
    string_value: "1"
  }
}
parameters {
  key: "b"
  value {
    string_value: "2"
  }
}
""",
    }


def test_ensemble_of_the_plan_gets_an_empty_version_folder(store: Store) -> None:
    step = {"model_name": "digits", "model_version": -1, "input_map": {"x": "IN"}, "output_map": {"y": "OUT"}}
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    config = {
        "input": [{"name": "IN", **tensor}],
        "output": [{"name": "OUT", **tensor}],
        "ensemble_scheduling": {"step": [step]},
    }

    assert Fetch(store.folder, {"ensembles": [{"name": "text", "config": config}]}).run().code == 0

    files = tree(store.models)
    assert sorted(files) == ["text/1", "text/config.pbtxt"]
    assert b'model_name: "digits"' in (files["text/config.pbtxt"] or b"")


def test_an_ensembles_folder_in_a_store_needs_no_version(store: Store) -> None:
    store.put({"text/config.pbtxt": b'platform: "ensemble"', "text/1/": b""})

    assert store.fetch("text/", name="text").code == 0

    assert tree(store.models) == {"text/1": None, "text/config.pbtxt": b'platform: "ensemble"'}


@pytest.mark.parametrize(
    ("objects", "fields", "text"),
    [
        (
            {"digits/a/1/model.onnx": b"", "digits/b/model.py": b"", "digits/c/config.pbtxt": b"x"},
            {},
            "holds several models: a, b, c; use the URI of one: s3://",
        ),
        ({"digits/a/1/model.onnx": b"x"}, {}, "/digits/ holds the folder of a model; use the URI of one: s3://"),
        ({"digits/readme.md": b"x"}, {}, "is not a model: it holds readme.md; use a model's folder"),
        (
            {"digits/config.pbtxt": b"max_batch_size: 1", "digits/model.onnx": b"x"},
            {},
            "model.onnx is beside config.pbtxt; move it to 1/model.onnx",
        ),
        ({"digits/config.pbtxt": b"max_batch_size: 1"}, {}, "holds no version: add a numbered folder"),
        (
            {"digits/config.pbtxt": b"max_batch_size: 'x'\nnonsense: 1", "digits/1/model.onnx": b"x"},
            {},
            "config.pbtxt:1:17: max_batch_size",
        ),
        (
            {"digits/config.pbtxt": b"", "digits/config.yaml": b"", "digits/1/model.onnx": b"x"},
            {},
            "there are both config.pbtxt and config.yaml; keep one of them",
        ),
        (
            {"digits/config.pbtxt": b'backend: "python"', "digits/1/model.onnx": b"x"},
            {},
            "version 1 has no model.py, which backend python loads; it has model.onnx",
        ),
        (
            {"digits/config.pbtxt": b'platform: "onnxruntime_onnx"', "digits/1/model.onnx": b"x"},
            {"format": "python"},
            "its configuration says onnxruntime, and the format python means backend python",
        ),
        (
            {"digits/1/model.onnx": b"x", "digits/3/model.onnx": b"x"},
            {"config": {"version_policy": {"specific": {"versions": [2]}}}},
            "at least one version must be available",
        ),
    ],
)
def test_invalid_model_is_refused_with_a_hint(
    store: Store, objects: dict[str, bytes], fields: dict[str, Any], text: str
) -> None:
    store.put(objects)

    fetched = store.fetch(**fields)

    assert (fetched.code, text in fetched.report) == (14, True), fetched.report
    assert tree(store.models) == {}


@pytest.mark.parametrize(
    "key", ["digits/../passwd", "digits/a//b", "digits/a\\b", "digits/\x01", "digits/./a", f"digits/{'n' * 256}"]
)
def test_keys_that_escape_the_folder_are_refused_by_name(store: Store, key: str) -> None:
    store.put({"digits/1/model.onnx": b"x", key: b"evil"})

    fetched = store.fetch()

    assert (fetched.code, "cannot be files" in fetched.report) == (14, True), fetched.report
    assert (
        ascii(key.removeprefix("digits/")[:20])[1:-1] in fetched.report
        or key[:20].encode("unicode_escape").decode() in fetched.report
    )
    assert tree(store.models) == {}


def test_key_that_is_file_and_folder_is_refused(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x", "digits/1": b""})
    assert store.fetch().code == 0

    store.put({"digits/1": b"not empty"})
    fetched = store.fetch(process="again")

    assert (fetched.code, "'1' is both a file and a folder" in fetched.report) == (14, True)


def test_digest_of_a_folder_is_what_the_documented_command_prints(store: Store, tmp_path: Path) -> None:
    files = {
        "config.pbtxt": b"",
        "2/model.onnx": b"two",
        "10/model.onnx": b"ten",
        "10/Weights": b"w",
        "a-b": b"1",
        "a/b": b"2",
    }
    for path, content in files.items():
        (tmp_path / "made" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "made" / path).write_bytes(content)
    store.put({f"digits/{path}": content for path, content in files.items()})
    command = r"find . -type f | sed 's,^\./,,' | LC_ALL=C sort | xargs sha256sum | sha256sum"
    printed = subprocess.run(
        command, shell=True, cwd=tmp_path / "made", capture_output=True, check=True, text=True
    ).stdout
    digest = "sha256:" + printed.split()[0]

    fetched = store.fetch(digest=digest)

    # The digest covers the whole folder; the policy selects the served versions.
    assert (fetched.code, fetched.models[0]["digest"]) == (0, digest), fetched.report
    assert sorted(tree(store.models / "digits")) == ["10/Weights", "10/model.onnx", "a-b", "a/b", "config.pbtxt"]


def test_wrong_digest_leaves_nothing_and_names_both(store: Store) -> None:
    store.put({"digits/model.onnx": b"x"})
    wanted, found = "sha256:" + "0" * 64, "sha256:" + hashlib.sha256(b"x").hexdigest()

    fetched = store.fetch("digits/model.onnx", digest=wanted)

    assert (fetched.code, tree(store.models)) == (12, {})
    assert fetched.report == f"{store.uri('digits/model.onnx')} has the digest {found}, but {wanted} was requested"
    assert store.fetch("digits/model.onnx", digest=found, process="again").code == 0


@pytest.mark.parametrize(
    ("folder", "text"),
    [
        ("models/one", "contains '1' and looks like a model itself; give the folder above as the repository"),
        ("other", "contains no model: a model is a folder with a version in it, such as {uri}/MODEL/1/model.onnx"),
        ("models", ""),
    ],
)
def test_a_repository_that_is_another_folder_than_meant_is_warned_of(folder: str, text: str) -> None:
    with WebServer({}).running() as web:
        web.put("bucket", {"models/one/1/model.onnx": b"x", "other/readme": b"x"})
        uri = f"s3://{web.url}/bucket/{folder}"
        repository = StoreRepository((), (parse_uri(uri),), "", {})
        try:
            warnings = repository.scan().warnings
        finally:
            repository.close()

    assert warnings == ((f"repository '{uri}' {text.format(uri=uri)}",) if text else ())
