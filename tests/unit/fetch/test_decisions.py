"""Pure decisions of a fetch: meanings of responses, pauses, secrets, and valid plans."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.core.config.model_config import ModelConfig
from halimede.core.repository.file_kinds import FileKind, Look
from halimede.fetch.digest import folder_digest, listing_name
from halimede.fetch.errors import MAX_CAUSE_CHARS, FetchError, cause_of
from halimede.fetch.layout import Layout, archive_root, check_files, folder_layout, models_in, single_file
from halimede.fetch.plan import read_plan
from halimede.fetch.proxy import through_proxy
from halimede.fetch.report import MAX_FAILURE_BYTES, FetchedModel, done_lines, failure_text, success_text
from halimede.fetch.retry import LONGEST_PAUSE_SECS, pause_secs
from halimede.fetch.secrets import Secrets
from halimede.fetch.store_errors import Classified, OnError, classify_status, classify_text
from halimede.fetch.tree import RemoteFile
from halimede_spec.fetch_exit import FetchExit
from halimede_spec.fetch_plan import PlannedCache, PlannedModel, S3Defaults
from halimede_spec.uri import parse_uri


@pytest.mark.parametrize(
    ("status", "code", "action", "end"),
    [
        # S3
        (400, "ExpiredToken", OnError.FAIL, FetchExit.AUTH),
        (400, "ExpiredTokenException", OnError.FAIL, FetchExit.AUTH),
        (400, "RequestExpired", OnError.FAIL, FetchExit.AUTH),
        (400, "TokenRefreshRequired", OnError.FAIL, FetchExit.AUTH),
        (403, "AccessDenied", OnError.FAIL, FetchExit.AUTH),
        (403, "InvalidAccessKeyId", OnError.FAIL, FetchExit.AUTH),
        (400, "InvalidAccessKeyId", OnError.FAIL, FetchExit.AUTH),
        (400, "InvalidToken", OnError.FAIL, FetchExit.AUTH),
        (403, "SignatureDoesNotMatch", OnError.FAIL, FetchExit.AUTH),
        (403, "RequestTimeTooSkewed", OnError.FAIL, FetchExit.AUTH),
        (400, "AuthorizationHeaderMalformed", OnError.FAIL, FetchExit.NOT_FOUND),
        (400, "IllegalLocationConstraintException", OnError.FAIL, FetchExit.NOT_FOUND),
        (301, "PermanentRedirect", OnError.FAIL, FetchExit.NOT_FOUND),
        (404, "NoSuchKey", OnError.FAIL, FetchExit.NOT_FOUND),
        (404, "NoSuchBucket", OnError.FAIL, FetchExit.NOT_FOUND),
        (400, "RequestTimeout", OnError.RETRY, FetchExit.UNREACHABLE),
        (500, "InternalError", OnError.RETRY, FetchExit.UNREACHABLE),
        (503, "ServiceUnavailable", OnError.RETRY, FetchExit.UNREACHABLE),
        (503, "SlowDown", OnError.RETRY, FetchExit.UNREACHABLE),
        (400, "InvalidRequest", OnError.FAIL, FetchExit.UNREACHABLE),
        # Google
        (401, "AuthenticationRequired", OnError.FAIL, FetchExit.AUTH),
        (403, "InvalidSecurity", OnError.FAIL, FetchExit.AUTH),
        # Azure
        (403, "AuthenticationFailed", OnError.FAIL, FetchExit.AUTH),
        (403, "AuthorizationFailure", OnError.FAIL, FetchExit.AUTH),
        (400, "InvalidAuthenticationInfo", OnError.FAIL, FetchExit.AUTH),
        (409, "NoAuthenticationInformation", OnError.FAIL, FetchExit.AUTH),
        (500, "OperationTimedOut", OnError.RETRY, FetchExit.UNREACHABLE),
        (503, "ServerBusy", OnError.RETRY, FetchExit.UNREACHABLE),
        # All others
        (401, "", OnError.FAIL, FetchExit.AUTH),
        (403, "", OnError.FAIL, FetchExit.AUTH),
        (407, "", OnError.FAIL, FetchExit.AUTH),
        (301, "", OnError.FAIL, FetchExit.NOT_FOUND),
        (404, "", OnError.FAIL, FetchExit.NOT_FOUND),
        (410, "", OnError.FAIL, FetchExit.NOT_FOUND),
        (412, "PreconditionFailed", OnError.START_ANEW, FetchExit.UNREACHABLE),
        (408, "", OnError.RETRY, FetchExit.UNREACHABLE),
        (429, "", OnError.RETRY, FetchExit.UNREACHABLE),
        (500, "", OnError.RETRY, FetchExit.UNREACHABLE),
        (502, "", OnError.RETRY, FetchExit.UNREACHABLE),
        (599, "", OnError.RETRY, FetchExit.UNREACHABLE),
        (400, "", OnError.FAIL, FetchExit.UNREACHABLE),
    ],
)
def test_http_statuses_are_classified(status: int, code: str, action: OnError, end: FetchExit) -> None:
    classified = classify_status(status, code)

    assert (classified.action, classified.code) == (action, end)


@pytest.mark.parametrize(
    ("kind", "text", "classified"),
    [
        ("FileNotFoundError", "Object at location x not found", classify_status(404)),
        (
            "GenericError",
            "returned non-2xx status code: 403 Forbidden: <Error><Code>Odd</Code>",
            classify_status(403, "Odd"),
        ),
        ("PreconditionError", "", classify_status(412)),
        (
            "GenericError",
            "HTTP error: error sending request\n\nDebug: Os { ConnectionRefused }",
            Classified(OnError.RETRY, FetchExit.UNREACHABLE, "the store cannot be reached: connection refused"),
        ),
        (
            "GenericError",
            "Error performing GET https://user.example:9000/models?sig=x in 1s - Server returned non-2xx status code: 503",
            Classified(
                OnError.RETRY, FetchExit.UNREACHABLE, "the store https://user.example:9000 answers with an error (503)"
            ),
        ),
        (
            "GenericError",
            "Error performing GET https://[::1]:9000/models in 1s - HTTP error: error sending request: timed out",
            Classified(
                OnError.RETRY,
                FetchExit.UNREACHABLE,
                "the store https://[::1]:9000 cannot be reached: no answer in time",
            ),
        ),
        (
            "GenericError",
            "HTTP error: error sending request: InvalidMessage(InvalidContentType)",
            Classified(OnError.RETRY, FetchExit.UNREACHABLE, "the store cannot be reached: it does not speak TLS"),
        ),
        (
            "GenericError",
            "Error performing GET http://name:word@host/models in 1s - HTTP error: error sending request",
            Classified(OnError.RETRY, FetchExit.UNREACHABLE, "the store cannot be reached"),
        ),
        (
            "GenericError",
            "Error performing token request: HTTP error: error sending request: dns error",
            Classified(
                OnError.RETRY,
                FetchExit.AUTH,
                "the service that gives credentials cannot be reached: its name is not known",
            ),
        ),
    ],
)
def test_errors_of_the_store_library_are_classified(kind: str, text: str, classified: Classified) -> None:
    assert classify_text(kind, text) == classified


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_pauses_grow_to_a_bound(failures: int, jitter: float) -> None:
    assert 0.125 <= pause_secs(failures, jitter) <= LONGEST_PAUSE_SECS
    assert pause_secs(failures, 0) <= pause_secs(failures + 1, 0)


def test_secrets_are_hidden_in_every_form() -> None:
    account = json.dumps({"type": "service_account", "private_key": "-----\nMIIsecret\n-----", "client_email": "a@b"})
    secrets = Secrets(["wJalr/XUtn+FEMI", account, "abc"])

    for text in ("key wJalr/XUtn+FEMI.", "key wJalr%2FXUtn%2BFEMI.", "key wJalr/XUtn%2BFEMI."):
        assert secrets.hide(text) == "key ***."
    assert "MIIsecret" not in secrets.hide("said: -----\nMIIsecret\n----- and -----\\nMIIsecret\\n-----")
    assert secrets.hide("GET https://ann:hush@host/x?sig=1&b=2 failed") == "GET https://***@host/x?*** failed"
    # Three letters are in too many words.
    assert secrets.hide("abcdef service_account") == "abcdef service_account"


@given(st.text(alphabet=st.characters(codec="ascii", min_codepoint=33), min_size=8), st.text(), st.text())
def test_a_secret_never_remains(secret: str, before: str, after: str) -> None:
    hidden = Secrets([secret]).hide(f"{before}{secret}{after}")
    assert secret not in hidden or secret in "***"


def test_failure_text_is_short_and_has_no_control_characters() -> None:
    assert failure_text("a\x1b[31m\nb\u202e") == "a\\x1b[31m\nb\\u202e"
    long = failure_text("ü" * 2000)
    assert len(long.encode()) <= MAX_FAILURE_BYTES
    assert long.endswith("ü...")


def test_too_long_report_counts_the_omitted_models() -> None:
    models = [FetchedModel(f"model-{i}", "sha256:" + "0" * 64, 1, 1, "2026-11-22T08:00:00Z", False) for i in range(30)]

    document = json.loads(success_text(models))

    assert (len(document["models"]) + document["omitted"], "omitted" in json.loads(success_text(models[:2]))) == (
        30,
        False,
    )


def test_valid_plan_is_read() -> None:
    text = {
        "models": [{"name": "a", "uri": "s3://b/c", "config": None, "format": "onnx", "mount": None}],
        "ensembles": [],
        "stores": {"s3": {"endpoint": "http://minio:9000", "region": None}},
        "cache": {"path": "/cache", "size_limit_bytes": 5},
    }

    plan, problems = read_plan(json.dumps(text).encode())

    assert problems == []
    assert plan.models == (PlannedModel("a", parse_uri("s3://b/c"), "onnx"),)
    assert (plan.s3, plan.cache) == (S3Defaults("http://minio:9000"), PlannedCache("/cache", 5))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "models",
                        "name",
                        "uri",
                        "config",
                        "ensembles",
                        "stores",
                        "s3",
                        "cache",
                        "path",
                        "digest",
                        "input",
                        "x",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
    )
)
def test_any_document_is_a_plan_or_has_problems(document: object) -> None:
    plan, problems = read_plan(json.dumps(document).encode())

    assert problems or all(model.name and model.uri for model in plan.models)


@given(st.binary())
def test_any_bytes_are_a_plan_or_have_problems(text: bytes) -> None:
    _, problems = read_plan(text)

    assert problems or text.strip().startswith(b"{")


def test_layouts_are_recognized() -> None:
    assert folder_layout({"config.pbtxt", "1/model.onnx", "12/model.onnx", "labels/1"}, "") == Layout(
        (1, 12), "config.pbtxt"
    )
    assert folder_layout({"model.onnx", "model.onnx.data"}, "") == Layout((1,), into="1/")
    assert folder_layout({"model.savedmodel/saved_model.pb"}, "") == Layout((1,), into="1/")
    exported = {"saved_model.pb", "variables/variables.index"}
    assert folder_layout(exported, "") == Layout((1,), into="1/model.savedmodel/")
    assert archive_root({f"exported/{path}" for path in exported}) == "exported/"
    assert archive_root({"saved_model.pb"}) == ""
    assert models_in(["a/config.yaml", "b/1/x", "c/model.py", "d/x", "e", "f/saved_model.pb", "01/1/x"]) == (
        *("01", "a", "b", "c", "f"),
    )
    assert [
        archive_root(paths) for paths in ({"a/config.pbtxt"}, {"1/model.onnx"}, {"a/x", "b/x"}, {"model.py"}, {"a"})
    ] == ["a/", "", "", "", ""]


def test_the_only_folder_with_a_models_files_is_the_model() -> None:
    hugging_face = {"README.md", "config.json", "onnx/model.onnx", "onnx/model.onnx_data"}
    layout = folder_layout(hugging_face, "s3://b/bge/")
    assert layout == Layout((1,), into="1/", root="onnx/")
    assert [layout.target(path) for path in sorted(hugging_face)] == [None, None, "1/model.onnx", "1/model.onnx_data"]


@pytest.mark.parametrize(
    ("paths", "where", "text"),
    [
        ({"a/1/model.onnx"}, "s3://b/m", "s3://b/m holds the folder of a model; use the URI of one: s3://b/m/a/"),
        ({"a/model.onnx", "b/model.py"}, "s3://b/m/", "holds several models: a, b; use the URI of one: s3://b/m/a/"),
        ({"x"}, "http://h/m.tgz", "it holds x; pack the folder of one model by: tar -czf m.tgz -C MODEL_FOLDER ."),
    ],
)
def test_a_folder_of_models_is_refused_with_what_to_use(paths: set[str], where: str, text: str) -> None:
    with pytest.raises(FetchError) as raised:
        folder_layout(paths, where)
    assert raised.value.message.endswith(text)


def test_an_error_without_a_text_of_the_system_has_its_class_and_text() -> None:
    assert cause_of(OSError(2, "No such file")) == "No such file"
    assert (
        cause_of(OSError("Tunnel failed: https://h/x?signature=1 refused"))
        == "OSError: Tunnel failed: https://h/x?... refused"
    )
    assert cause_of(TimeoutError()) == "TimeoutError"
    assert cause_of(OSError("x" * 1000)) == "OSError: " + "x" * MAX_CAUSE_CHARS


@pytest.mark.parametrize(
    ("variables", "address", "text"),
    [
        ({"https_proxy": "http://me:secret@10.0.0.1:3128/"}, "https://h/x", ", through the proxy http://10.0.0.1:3128"),
        ({"https_proxy": "http://10.0.0.1:3128"}, "http://h/x", ""),
        ({"all_proxy": "10.0.0.1:3128"}, "http://h/x", ", through the proxy http://10.0.0.1:3128"),
        ({"http_proxy": "http://10.0.0.1:3128", "no_proxy": "h"}, "http://h/x", ""),
        ({"http_proxy": "http://10.0.0.1:3128"}, "", ""),
    ],
)
def test_the_environment_says_through_which_proxy_requests_go(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], address: str, text: str
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert through_proxy(address) == text


def test_people_read_where_the_models_are_and_how_to_serve_them() -> None:
    models = [
        FetchedModel("a", None, 3, 1, "", cached=True),
        FetchedModel("b", None, 12_345_678, 2, "", cached=False),
    ]
    assert done_lines(models, Path("my models")) == [
        "model 'a': 1 file, 3 bytes, in my models/a (nothing was downloaded)",
        "model 'b': 2 files, 12.3 MB, in my models/b",
        "Serve them by: halimede serve --model-repository 'my models'",
    ]


UNKNOWN = FileKind.UNKNOWN


@pytest.mark.parametrize(
    ("name", "form", "kind", "expected"),
    [
        ("resnet.onnx", None, UNKNOWN, "model.onnx"),
        ("program.py", None, UNKNOWN, "model.py"),
        ("traced.PT", None, UNKNOWN, "model.pt"),
        ("exported.pt2", "torch", UNKNOWN, "model.pt2"),
        ("resnet.plan", None, UNKNOWN, "model.plan"),
        ("resnet.engine", "tensorrt", UNKNOWN, "model.plan"),
        ("frozen.graphdef", None, UNKNOWN, "model.graphdef"),
        ("frozen.pb", "tensorflow", UNKNOWN, "model.graphdef"),
        ("booster.ubj", None, UNKNOWN, "xgboost.ubj"),
        ("forest.tl", None, UNKNOWN, "checkpoint.tl"),
        ("forest.joblib", None, UNKNOWN, "model.joblib"),
        ("forest.pkl", "sklearn", UNKNOWN, "model.pkl"),
        ("forest.pickle", "sklearn", FileKind.PICKLE, "model.joblib"),
        # Suffixes that other files have as well need the whole well-known name, or a format.
        ("xgboost.json", None, UNKNOWN, "xgboost.json"),
        ("model.txt", None, UNKNOWN, "model.txt"),
        ("booster.json", "fil", UNKNOWN, "xgboost.json"),
        ("booster.TXT", "fil", UNKNOWN, "model.txt"),
        # The content decides between the files of a format.
        ("booster.model", "fil", FileKind.XGBOOST_UBJ, "xgboost.ubj"),
        ("booster.model", "fil", FileKind.LIGHTGBM, "model.txt"),
        ("booster.bin", "fil", FileKind.TREELITE, "checkpoint.tl"),
        ("net.pth", "torch", FileKind.TORCHSCRIPT, "model.pt"),
        ("net.pth", "torch", FileKind.TORCH_EXPORT, "model.pt2"),
        # It does not decide on the backend: the load reports the contradiction.
        ("net.pth", "torch", FileKind.ONNX, "model.pt"),
    ],
)
def test_single_file_gets_a_well_known_name(name: str, form: str | None, kind: FileKind, expected: str) -> None:
    assert single_file(name, form, "s3://b/x", Look(kind)) == expected


@pytest.mark.parametrize(
    ("name", "form", "text"),
    [
        ("booster.json", None, "s3://b/x is not a model; use a model's folder"),
        (
            "booster.json",
            None,
            "one file that ends in .graphdef, .joblib, .onnx, .pkl, .plan, .pt, .pt2, .py, .tl, .ubj;",
        ),
        ("readme", None, "a file of another name needs a format"),
        ("audio.dali", None, "is not a model"),
        ("exported.savedmodel", None, "is not a model"),
        ("exported.savedmodel", "tensorflow", "is not a file of a model of format tensorflow"),
        ("resnet.pt", "onnx", "is not a file of a model of format onnx"),
        ("model.txt", "torch", "is not a file of a model of format torch"),
        ("model.py", "torch", "is not a file of a model of format torch"),
        ("resnet.xml", None, "use a folder with model.xml and model.bin"),
        ("resnet.ir", "openvino", "use a folder with model.xml and model.bin"),
    ],
)
def test_single_file_of_no_format_is_refused(name: str, form: str | None, text: str) -> None:
    with pytest.raises(FetchError) as refused:
        single_file(name, form, "s3://b/x", Look(FileKind.XGBOOST_JSON))
    assert (refused.value.code, text in str(refused.value)) == (FetchExit.NOT_A_MODEL, True), refused.value


@pytest.mark.parametrize(
    ("config", "files", "problem"),
    [
        ({"backend": "fil"}, {1: "xgboost.ubj", 2: "model.txt"}, None),
        ({"backend": "sklearn"}, {1: "model.joblib", 2: "model.pkl"}, None),
        ({"backend": "fil"}, {1: "model.onnx"}, "version 1 has no xgboost.ubj or xgboost.json or xgboost.model or"),
        ({"platform": "torch_aoti"}, {1: "model.pt"}, "version 1 has no model.pt2, which backend pytorch loads"),
        ({}, {1: "model.pt2", 2: "model.pt"}, "version 2 has no model.pt2, which backend pytorch loads"),
        ({"backend": "tensorrt"}, {1: "resnet.plan"}, "version 1 has no model.plan"),
        ({"backend": "tensorrt", "default_model_filename": "resnet.plan"}, {1: "resnet.plan"}, None),
        ({"platform": "pytorch_libtorch", "runtime": "model.py"}, {1: "model.py"}, None),
        ({"backend": "own"}, {1: "anything"}, None),
        ({}, {1: "saved_model.pb"}, "itself is a SavedModel: move its files into 'model.savedmodel'"),
    ],
)
def test_each_version_needs_a_file_of_the_backend(
    config: dict[str, str], files: dict[int, str], problem: str | None
) -> None:
    targets = [f"{version}/{name}" for version, name in files.items()]
    if problem is None:
        check_files(ModelConfig(**config), "m", targets, files.keys())
    else:
        with pytest.raises(FetchError, match=re.escape(problem)):
            check_files(ModelConfig(**config), "m", targets, files.keys())


def test_the_digest_of_a_folder_is_by_path_in_bytewise_order() -> None:
    one, two = "1" * 64, "2" * 64

    assert folder_digest({"b": one, "B": two, "a/b": one, "a-b": two}) == folder_digest(
        {"a-b": two, "B": two, "a/b": one, "b": one}
    )
    assert folder_digest({"a": one, "b": two}) != folder_digest({"a": two, "b": one})


def test_listing_name_changes_with_any_file() -> None:
    files = [RemoteFile("a", 1, "x"), RemoteFile("b", 2, "y")]
    names = {
        listing_name("s3://m", files),
        listing_name("s3://n", files),
        listing_name("s3://m", files[:1]),
        listing_name("s3://m", [RemoteFile("a", 1, "z"), files[1]]),
        listing_name("s3://m", [RemoteFile("a", 3, "x"), files[1]]),
    }

    assert len(names) == 5
    assert listing_name("s3://m", files[::-1]) in names
