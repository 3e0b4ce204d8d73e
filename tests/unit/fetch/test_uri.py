"""URIs of models, and unsafe paths."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede_spec.uri import Scheme, Uri, parse_uri, path_problem


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://models/digits/", Uri(Scheme.S3, "s3://models/digits/", "models", "digits", True)),
        ("s3://models", Uri(Scheme.S3, "s3://models", "models", "", True)),
        ("s3://models/a b/net.onnx", Uri(Scheme.S3, "s3://models/a b/net.onnx", "models", "a b/net.onnx")),
        (
            "s3://https://minio:9000/models/digits",
            Uri(Scheme.S3, "s3://https://minio:9000/models/digits", "models", "digits", address="https://minio:9000"),
        ),
        (
            "s3://10.0.0.1:9000/models/digits",
            Uri(Scheme.S3, "s3://10.0.0.1:9000/models/digits", "models", "digits", address="http://10.0.0.1:9000"),
        ),
        ("gs://models/digits", Uri(Scheme.GS, "gs://models/digits", "models", "digits")),
        ("az://box/digits", Uri(Scheme.AZURE, "az://box/digits", "box", "digits")),
        ("as://shelf/box/digits", Uri(Scheme.AZURE, "as://shelf/box/digits", "box", "digits", account="shelf")),
        (
            "as://shelf.blob.core.windows.net/box/digits",
            Uri(Scheme.AZURE, "as://shelf.blob.core.windows.net/box/digits", "box", "digits", account="shelf"),
        ),
        (
            "https://host:8443/a/net.onnx?sig=x#there",
            Uri(
                Scheme.HTTP,
                "https://host:8443/a/net.onnx",
                "host:8443",
                "a/net.onnx",
                address="https://host:8443/a/net.onnx?sig=x",
            ),
        ),
        ("pvc://claim/digits", Uri(Scheme.PVC, "pvc://claim/digits", "claim", "digits")),
        ("pvc://claim", Uri(Scheme.PVC, "pvc://claim", "claim", "", True)),
        ("file:///models/net.onnx", Uri(Scheme.FILE, "file:///models/net.onnx", "", "models/net.onnx")),
    ],
)
def test_valid_uris_are_parsed(text: str, uri: Uri) -> None:
    assert parse_uri(text) == uri


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models/digits", "'models/digits' is not a URI of a model; use one of s3://"),
        ("ftp://host/x", "is not a URI of a model"),
        ("s3://", "'s3://' does not begin with the name of a bucket or container"),
        ("s3://a/../b", "has '.' or '..' in it"),
        ("s3://a/b//c", "has an empty part"),
        ("s3://a/b\\c", "has a backslash"),
        ("s3://a/b\nc", "without control characters"),
        ("as://SHELF/box/x", "does not begin with a storage account"),
        ("file://host/x", "expected file:///path"),
        ("https://host/", "does not name a file"),
        ("https:///net.onnx", "has no host"),
        ("https://host:port/net.onnx", "must have a valid host and port"),
        ("https://host/a b.onnx", "must be percent-encoded"),
    ],
)
def test_invalid_uris_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_uri(text)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "https://ann:hush@host/net.onnx",
        "https://ann:hush@host:port/x",
        "s3://ann:hush@b/x?hush",
        "odd://ann:hush@host/x?hush=hush#hush",
    ],
)
def test_problems_do_not_repeat_secrets(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        parse_uri(text)
    assert "hush" not in str(raised.value)


@given(st.text() | st.from_regex(r"(https?|s3|gs|as|az|file|pvc)://[^/]{0,9}/.{0,30}"))
def test_any_text_is_a_uri_or_a_problem(text: str) -> None:
    try:
        uri = parse_uri(text)
    except ValueError:
        return
    assert not uri.path or uri.scheme is Scheme.HTTP or path_problem(uri.path) is None


@given(st.text(alphabet=st.sampled_from("ab/.\\\x00\n~ü\ud800"), max_size=12))
def test_a_path_without_a_problem_stays_below_its_folder(path: str) -> None:
    import posixpath

    if path_problem(path) is None:
        assert posixpath.normpath(posixpath.join("/top", path)) == f"/top/{path}"
        assert path.encode().isascii() or "ü" in path
        assert "\0" not in path
