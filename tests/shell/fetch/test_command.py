"""The command line of `halimede fetch`: arguments, reports and exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from shell.fetch.conftest import Store
from support.stores import COMMAND, Fault, Fetch, Served, WebServer, tree, write_credentials


def test_all_problems_of_a_plan_are_reported_at_once(tmp_path: Path) -> None:
    plan = {
        "model": [],
        "models": [
            {"name": "a/b", "uri": "s3:/x", "digest": "sha256:1", "config": {"max_batch": 1}, "format": "tf"},
            {"name": "c", "uri": "pvc://claim/x", "sha": 1},
        ],
        "cache": {"path": "relative", "size_limit_bytes": -1},
    }

    fetched = Fetch(tmp_path, plan).run()

    assert (fetched.code, fetched.report.splitlines()) == (
        2,
        [
            "the plan cannot be used:",
            "'model': is unknown; use one of version, models, ensembles, stores, cache",
            "models[0].name: model name 'a/b' must not contain '/'",
            "models[0].uri: 's3:/x' is not a URI of a model; use one of s3://, gs://, az://, as://, azure://, http://, https://, pvc://, file://",
            "models[0].format: use one of onnx, python, torch, tensorflow, openvino, tensorrt, fil, sklearn",
            "models[0].digest: expected sha256: and 64 of the digits 0 to 9 and a to f",
            "models[0].config: max_batch: unknown field of ModelConfig; did you mean max_batch_size?",
            "models[1].'sha': is unknown; use one of name, uri, format, digest, config, credentials, ca_bundle, mount",
            "models[1].mount: pvc://claim/x needs the folder where the claim is mounted",
            "cache.path: expected an absolute path",
            "cache.size_limit_bytes: expected a positive number of bytes",
        ],
    )
    assert not fetched.log.startswith("Traceback")
    assert fetched.report in fetched.log


@pytest.mark.parametrize(
    ("text", "report"),
    [
        ("{", "the plan is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("[]", "expected an object"),
        ('{"models": 1}', "models: expected a list"),
        ('{"models": [], "models": []}', "given twice: 'models'"),
        ('{"version": 2}', "version: expected 1"),
    ],
)
def test_missing_plan_is_reported(tmp_path: Path, text: str, report: str) -> None:
    fetched = Fetch(tmp_path, text).run()

    assert (fetched.code, fetched.report) == (2, f"the plan cannot be used:\n{report}")


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "halimede", "fetch", "--into", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, "Missing option '--plan'" in ended.stderr) == (2, True)


def test_uncreatable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")

    fetched = Fetch(tmp_path, {"models": []}).run()

    assert (fetched.code, "models: File exists" in fetched.report) == (2, True)


def test_missing_termination_log_is_not_an_error(tmp_path: Path) -> None:
    fetching = Fetch(tmp_path, {"models": []})
    fetching.arguments[-1] = "/nowhere/at/all"

    assert fetching.run().code == 0


def test_too_long_report_counts_omitted_models(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"x")
    models = [{"name": f"{i}-" + "n" * 150, "uri": f"file://{tmp_path}/m.onnx"} for i in range(40)]

    fetched = Fetch(tmp_path, {"models": models}).run()

    document = json.loads(fetched.report)
    assert (fetched.code, len(fetched.report.encode()) <= 4096) == (0, True)
    assert len(document["models"]) + document["omitted"] == 40


@pytest.mark.parametrize("beyond", [0, 1 << 60])
def test_full_disk_is_detected_before_the_fetch(tmp_path: Path, beyond: int) -> None:
    disk = os.statvfs(tmp_path)
    size = disk.f_blocks * disk.f_frsize + beyond
    with WebServer({"/models/digits/1/model.onnx": Served(size=size)}).running() as web:
        model = {"name": "digits", "uri": f"s3://{web.url}/models/digits/"}
        fetched = Fetch(tmp_path, {"models": [model]}).run()

    assert (fetched.code, fetched.report.startswith(f"model 'digits' needs {size} bytes, and ")) == (13, True), (
        fetched.report
    )
    assert [asked for asked in web.asked if asked.start is not None] == []


def test_disk_that_fills_up_during_the_fetch_is_reported(tmp_path: Path) -> None:
    # A limit of the file size acts like a full disk, but cannot be detected before.
    with WebServer({"/models/digits/1/model.onnx": Served(size=8 << 20)}).running() as web:
        model = {"name": "digits", "uri": f"s3://{web.url}/models/digits/"}
        limited = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
        limited += (
            "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); from halimede.cli import main; main()"
        )
        fetching = Fetch(tmp_path, {"models": [model]})
        fetched = fetching.end(fetching.start(program=[sys.executable, "-c", limited, "fetch"]))

    assert (fetched.code, fetched.report) == (13, "model 'digits': the disk is full: File too large")


def test_sigterm_ends_the_fetch_at_once(store: Store) -> None:
    store.put({"digits/1/model.onnx": bytes(1 << 20)})
    store.proxy.rule = lambda _: Fault(bytes_per_sec=1 << 14)
    fetching = store.fetching()
    process = fetching.start(program=COMMAND)
    while not store.sent("digits/1/model.onnx"):
        time.sleep(0.02)

    process.send_signal(signal.SIGTERM)

    assert fetching.end(process).code == 143


@pytest.mark.parametrize(
    ("values", "report"),
    [
        (None, "does not exist"),
        ({"aws_access_key_id": "x"}, "have none of the keys AWS_ACCESS_KEY_ID"),
    ],
)
def test_invalid_credentials_are_reported(tmp_path: Path, values: dict[str, str] | None, report: str) -> None:
    folder = tmp_path / "credentials"
    if values is not None:
        write_credentials(folder, **values)
    model = {"name": "digits", "uri": "s3://models/digits/", "credentials": str(folder)}

    fetched = Fetch(tmp_path, {"models": [model]}).run()

    assert (fetched.code, report in fetched.report) == (10, True), fetched.report


def test_a_claim_is_linked_and_not_copied(tmp_path: Path) -> None:
    claim = tmp_path / "claim"
    for path in ("net/config.pbtxt", "net/1/model.onnx", "net/2/model.onnx"):
        (claim / path).parent.mkdir(parents=True, exist_ok=True)
        (claim / path).write_text(path if path.endswith("onnx") else "max_batch_size: 2")
    model: dict[str, Any] = {
        "name": "digits",
        "uri": "pvc://claim/net",
        "mount": str(claim),
        "config": {"max_batch_size": 3},
    }

    fetched = Fetch(tmp_path, {"models": [model]}).run()

    assert fetched.code == 0
    assert tree(tmp_path / "models") == {
        "digits/config.pbtxt": b"max_batch_size: 3\n",
        "digits/2/model.onnx": b"net/2/model.onnx",
    }
    assert os.readlink(tmp_path / "models/digits/2/model.onnx") == str(claim / "net/2/model.onnx")
    assert fetched.models[0]["digest"] is None
    absent = Fetch(tmp_path, {"models": [{**model, "uri": "pvc://claim/other"}]}).run()
    assert (absent.code, absent.report) == (11, f"pvc://claim/other: {claim}/other does not exist")


def test_a_mounted_file_with_a_digest_is_checked(tmp_path: Path) -> None:
    import hashlib

    (tmp_path / "net.onnx").write_bytes(b"x")
    model = {
        "name": "digits",
        "uri": f"file://{tmp_path}/net.onnx",
        "digest": "sha256:" + hashlib.sha256(b"x").hexdigest(),
    }

    assert Fetch(tmp_path, {"models": [model]}).run().code == 0
    assert tree(tmp_path / "models") == {"digits/1/model.onnx": b"x"}
    (tmp_path / "net.onnx").write_bytes(b"y")
    assert Fetch(tmp_path, {"models": [model]}).run().code == 12
