"""Failing stores, simulated by a proxy that injects faults."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shell.fetch.conftest import Store
from support.stores import (
    COMMAND,
    KEY,
    SECRET,
    Asked,
    Fault,
    Fetch,
    Proxy,
    numbered_bytes,
    s3_error,
    tree,
    write_credentials,
)

MB = 1 << 20


def test_transient_errors_are_retried(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = lambda asked: s3_error(503, "SlowDown") if asked.number in (0, 1, 3) else None

    fetched = store.fetch()

    assert (fetched.code, tree(store.models)) == (0, {"digits/1/model.onnx": b"x"})
    report = f"the store {store.proxy.url} answers with an error (503 SlowDown); trying again in"
    assert fetched.log.count(report) == 3


def test_cut_connection_resumes_at_the_same_offset(large_store: Store) -> None:
    store, content = large_store, numbered_bytes(20 * MB)
    store.put({"digits/1/model.onnx": content})
    store.proxy.rule = lambda asked: Fault(cut_after=3 * MB + 5) if asked.start is not None else None

    assert store.fetch().code == 0

    assert tree(store.models) == {"digits/1/model.onnx": content}
    # Received bytes are kept, except the piece that was cut: each of the eight cuts repeats less than a megabyte.
    assert store.sent("digits/1/model.onnx") <= 20 * MB + 8 * MB


def test_fetch_from_a_store_that_stays_down_fails_within_the_timeout(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = lambda _: s3_error(500, "InternalError")

    fetched = store.fetch(timeout=3)

    report = f"{store.uri('digits/')}: the store {store.proxy.url} answers with an error (500 InternalError)"
    assert (fetched.code, fetched.report) == (15, report)


def test_a_slow_store_may_take_longer_than_the_timeout(store: Store) -> None:
    content = os.urandom(8 * MB)
    store.put({"digits/1/model.onnx": content})
    store.proxy.rule = lambda asked: Fault(bytes_per_sec=2 * MB) if asked.start is not None else None

    begun = time.monotonic()
    fetched = store.fetch(timeout=1)

    assert (fetched.code, tree(store.models)) == (0, {"digits/1/model.onnx": content}), fetched.report
    assert time.monotonic() - begun > 4


def test_fetch_from_a_silent_store_fails_and_the_next_run_continues(large_store: Store) -> None:
    store, content = large_store, numbered_bytes(40 * MB)
    store.put({"digits/1/model.onnx": content})
    store.proxy.rule = lambda asked: Fault(silent_after=0) if asked.start in (0, 8 * MB) else None

    fetched = store.fetch(timeout=3)

    report = f"{store.uri('digits/')}: the store {store.proxy.url} cannot be reached: no answer in time"
    assert (fetched.code, fetched.report, tree(store.models)) == (15, report, {})
    store.proxy.rule = lambda _: None
    before = store.sent("digits/1/model.onnx")
    assert store.fetch(process="again").code == 0
    assert tree(store.models) == {"digits/1/model.onnx": content}
    assert store.sent("digits/1/model.onnx") - before <= 40 * MB - 3 * 8 * MB


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (s3_error(403, "AccessDenied"), "access was denied (403 AccessDenied)"),
        (s3_error(403, "InvalidAccessKeyId"), "access was denied (403 InvalidAccessKeyId)"),
        (s3_error(401, ""), "access was denied (401)"),
        (s3_error(400, "ExpiredToken"), "the credentials have expired (400 ExpiredToken)"),
    ],
)
def test_permanent_errors_are_not_retried(store: Store, fault: Fault, text: str) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = lambda _: fault

    fetched = store.fetch()

    assert (fetched.code, fetched.report) == (10, f"{store.uri('digits/')}: {text}")
    assert len(store.proxy.asked) == 1


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken", "RequestExpired"])
def test_status_400_names_its_cause_although_head_has_no_body(store: Store, code: str) -> None:
    """A URI that may be a single object is first requested with HEAD."""
    store.proxy.rule = lambda _: s3_error(400, code)

    fetched = store.fetch("digits/model.onnx")

    assert (fetched.code, f"(400 {code})" in fetched.report) == (10, True), fetched.report
    assert [asked.method for asked in store.proxy.asked] == ["HEAD", "GET"]


def test_credentials_that_expire_during_the_fetch(large_store: Store) -> None:
    store = large_store
    store.put({"digits/1/model.onnx": bytes(20 * MB)})
    store.proxy.rule = lambda asked: s3_error(400, "ExpiredToken") if asked.start == 8 * MB else None

    fetched = store.fetch()

    assert (fetched.code, "1/model.onnx: the credentials have expired" in fetched.report) == (10, True)
    assert tree(store.models) == {}


@pytest.mark.parametrize("path", ["nothing/", "nothing", "nothing/model.onnx"])
def test_missing_object_is_reported(store: Store, path: str) -> None:
    store.put({"digits/1/model.onnx": b"x"})

    fetched = store.fetch(path)

    assert (fetched.code, fetched.report) == (11, f"{store.uri(path)}: no file exists under it")


def test_missing_bucket_is_reported(store: Store) -> None:
    fetched = store.fetch()

    assert (fetched.code, fetched.report) == (11, f"{store.uri('digits/')}: it does not exist (404 NoSuchBucket)")


def test_an_object_that_is_replaced_meanwhile_is_fetched_anew(store: Store) -> None:
    old, new = os.urandom(17 * MB), os.urandom(17 * MB)
    store.put({"digits/1/model.onnx": old})

    def replace(asked: Asked) -> None:
        if asked.start == 16 * MB and not replaced.is_set():
            replaced.set()
            store.put({"digits/1/model.onnx": new})

    replaced = threading.Event()
    store.proxy.rule = replace

    fetched = store.fetch()

    assert (fetched.code, "changes while it is fetched: starting anew" in fetched.log) == (0, True), fetched.log
    assert tree(store.models) == {"digits/1/model.onnx": new}


def test_fetch_fails_if_the_tags_always_change(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = lambda asked: Fault(headers={"ETag": f'"{asked.number}"'}) if asked.start is not None else None

    fetched = store.fetch()

    assert (fetched.code, "was replaced 5 times while it was fetched" in fetched.report) == (15, True), fetched.report


def test_next_fetch_resumes_a_killed_one(large_store: Store) -> None:
    store, content = large_store, numbered_bytes(80 * MB)
    store.put({"digits/1/model.onnx": content})
    # The last two of ten ranges come so slowly that the kill finds them under way.
    store.proxy.rule = lambda asked: Fault(bytes_per_sec=MB) if (asked.start or 0) >= 64 * MB else None
    fetching = store.fetching()
    process = fetching.start(program=COMMAND)
    while store.sent("digits/1/model.onnx") < 66 * MB:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert fetching.end(process).code == -signal.SIGKILL
    assert tree(store.models) == {}

    store.proxy.rule = lambda _: None
    before = store.gets("digits/1/model.onnx")
    fetched = store.fetch(process="again")

    assert (fetched.code, tree(store.models)) == (0, {"digits/1/model.onnx": content})
    again = store.proxy.gets(f"/{store.bucket}/digits/1/model.onnx")[before:]
    assert sorted((asked.start, asked.stop) for asked in again) == [(at * MB, (at + 8) * MB) for at in (64, 72)]


def test_restart_with_a_complete_model_fetches_nothing(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    first = store.fetch()

    again = store.fetch(process="again")

    assert (again.code, store.gets("digits/1/model.onnx")) == (0, 1)
    assert again.models == [{**first.models[0], "cached": True}]


def test_a_changed_store_or_plan_replaces_the_folder(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x", "digits/1/other": b"o"})
    store.fetch()

    store.put({"digits/1/model.onnx": b"y"})
    store.fetch(process="again")
    assert tree(store.models) == {"digits/1/model.onnx": b"y", "digits/1/other": b"o"}

    store.fetch(process="third", config={"max_batch_size": 3})
    assert tree(store.models)["digits/config.pbtxt"] == b"max_batch_size: 3\n"


def test_public_objects_need_no_credentials(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"}, acl="public-read")

    fetched = store.fetch(credentials=None)

    assert fetched.code == 0, fetched.log
    assert not any("authorization" in asked.headers for asked in store.proxy.asked)


def test_credentials_of_the_plan_are_not_mixed_with_those_of_the_environment(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    environment = {
        "AWS_ACCESS_KEY_ID": "AKIAOFENVIRONMENT",
        "AWS_SECRET_ACCESS_KEY": "of-the-environment",
        "AWS_SESSION_TOKEN": "token-of-the-environment",
        "AWS_REGION": "eu-elsewhere-1",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
    }

    assert store.fetching().run(environment).code == 0

    report = {
        (a.headers.get("authorization", "").partition("/s3/")[0], a.headers.get("x-amz-security-token"))
        for a in store.proxy.asked
    }
    assert len(report) == 1
    ((authorization, token),) = report
    assert "AKIATESTTESTTESTTEST/" in authorization
    assert "us-east-1" in authorization
    assert token is None


def signed_by(store: Store) -> set[str]:
    """The access keys of all requests; "" for those without a signature."""
    authorizations = (asked.headers.get("authorization", "") for asked in store.proxy.asked)
    return {each.partition("Credential=")[2].partition("/")[0] for each in authorizations}


@pytest.mark.parametrize("own", [False, True])
def test_default_credentials_of_s3_are_for_models_without_any(store: Store, own: bool) -> None:
    """A private bucket; with `own` the model has other credentials."""
    store.put({"digits/1/model.onnx": b"x"})
    default = write_credentials(store.folder / "default", AWS_ACCESS_KEY_ID="AKIADEFAULT", AWS_SECRET_ACCESS_KEY=SECRET)
    plan = store.plan(credentials=store.credentials if own else None)
    plan["stores"]["s3"]["credentials"] = default

    fetched = Fetch(store.folder, plan).run({"AWS_ACCESS_KEY_ID": "AKIAENVIRONMENT", "AWS_SECRET_ACCESS_KEY": "x"})

    assert fetched.code == 0, fetched.log
    assert signed_by(store) == {KEY if own else "AKIADEFAULT"}


@pytest.mark.parametrize("is_mounted", [False, True])
def test_default_credentials_may_be_missing(store: Store, is_mounted: bool) -> None:
    """A missing optional Secret is an empty folder with the kubelet's files for updates."""
    store.put({"digits/1/model.onnx": b"x"}, acl="public-read")
    folder = store.folder / "default"
    if is_mounted:
        (folder / "..2026_11_23_08_00_00.1").mkdir(parents=True)
        (folder / "..data").symlink_to("..2026_11_23_08_00_00.1")
    plan = store.plan(credentials=None)
    plan["stores"]["s3"]["credentials"] = str(folder)

    fetched = Fetch(store.folder, plan).run()

    assert (fetched.code, signed_by(store)) == (0, {""}), fetched.log


def test_default_credentials_without_a_known_key_are_an_error(store: Store) -> None:
    plan = store.plan(credentials=None)
    plan["stores"]["s3"]["credentials"] = write_credentials(store.folder / "default", accesskey="x")

    fetched = Fetch(store.folder, plan).run()

    assert (fetched.code, "have none of the keys AWS_ACCESS_KEY_ID" in fetched.report) == (10, True), fetched.report


def test_credentials_of_the_environment_are_used_without_others(store: Store) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    environment = {
        "AWS_ACCESS_KEY_ID": "AKIAOFENVIRONMENT",
        "AWS_SECRET_ACCESS_KEY": "s3cr3t-value",
        "AWS_SESSION_TOKEN": "t0ken-value",
    }

    fetched = store.fetching(credentials=None).run(environment)

    assert fetched.code == 0, fetched.log
    assert {a.headers.get("x-amz-security-token") for a in store.proxy.asked} == {"t0ken-value"}


@pytest.mark.parametrize(
    "rule",
    [
        lambda _: s3_error(403, "AccessDenied"),
        lambda asked: Fault(
            400, f"<Error><Code>Odd</Code><Message>{SECRET} {asked.headers}</Message></Error>".encode()
        ),
        lambda asked: Fault(503, f"{asked.headers} {SECRET}".encode()),
        lambda _: Fault(200, f"<no listing>{SECRET}".encode()),
        lambda _: Fault(404, SECRET.encode()),
    ],
)
def test_no_output_contains_a_secret(store: Store, rule: Callable[[Asked], Fault]) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    store.proxy.rule = rule
    token = "session-token-that-nobody-may-see"
    write_credentials(
        store.folder / "credentials",
        AWS_ACCESS_KEY_ID="AKIASECRETSECRETSECR",
        AWS_SECRET_ACCESS_KEY=SECRET,
        AWS_SESSION_TOKEN=token,
    )

    fetched = store.fetch(timeout=1)

    assert fetched.code != 0
    for hidden in (SECRET, token, "AKIASECRETSECRETSECR", "Signature="):
        assert hidden not in fetched.report + fetched.log
    assert 0 < len(fetched.report.encode()) <= 1500


@pytest.mark.parametrize(
    ("variable", "uri", "code", "text"),
    [
        (
            "all_proxy",
            "http://models.test/m.onnx",
            10,
            "http://models.test/m.onnx: access was denied (403), through the proxy {proxy}: blocked by policy 7",
        ),
        (
            "https_proxy",
            "https://models.test/m.onnx",
            15,
            "the server cannot be reached, through the proxy {proxy}: OSError: Tunnel connection failed: 501 Unsupported "
            "method ('CONNECT')",
        ),
        (
            "http_proxy",
            "s3://http://models.test/bucket/m/",
            10,
            "access was denied (403), through the proxy {proxy}: Forbidden: blocked by policy 7",
        ),
        (
            "all_proxy",
            "s3://https://models.test/bucket/m/",
            15,
            "the store https://models.test cannot be reached: the proxy refuses to connect to it, through the proxy {proxy}",
        ),
    ],
)
def test_an_error_of_a_proxy_has_its_text_and_its_address(
    tmp_path: Path, variable: str, uri: str, code: int, text: str
) -> None:
    plan = {"models": [{"name": "digits", "uri": uri}]}
    with Proxy("http://127.0.0.1", lambda _: Fault(403, b"blocked by policy 7\n")).running() as proxy:
        through = proxy.url.replace("http://", "http://user:pass@")
        fetched = Fetch(tmp_path, plan, timeout=1).run({variable: through})

    assert (fetched.code, text.format(proxy=proxy.url) in fetched.report) == (code, True), fetched.report
