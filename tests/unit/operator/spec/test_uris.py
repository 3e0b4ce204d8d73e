"""Parsing of model URIs, and which are refused."""

import pytest

from halimede_operator.core.spec.uris import Uri, is_below, read_uri


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://models/bert", Uri("s3", "models", "/bert")),
        ("s3://models", Uri("s3", "models", "")),
        ("s3://models/a b%20?#ü", Uri("s3", "models", "/a b%20?#ü")),
        ("s3://https://minio.example.com:9000/models/bert", Uri("s3", "models", "/bert")),
        ("s3://minio:9000/models", Uri("s3", "models", "")),
        ("s3://minio.example.com/models", Uri("s3", "minio.example.com", "/models")),
        ("gs://models/bert/", Uri("gs", "models", "/bert")),
        ("azure://$root/bert", Uri("azure", "$root", "/bert")),
        ("az://models/bert", Uri("az", "models", "/bert")),
        ("as://shelf.blob.core.windows.net/models/bert", Uri("as", "models", "/bert")),
        ("https://example.com:8443/bert.onnx?v=2", Uri("https", "example.com:8443", "/bert.onnx")),
        ("pvc://models", Uri("pvc", "models", "")),
        ("pvc://models/a/b/", Uri("pvc", "models", "/a/b")),
        ("file:///srv/models/bert", Uri("file", "", "/srv/models/bert")),
    ],
)
def test_what_a_uri_names(text: str, uri: Uri) -> None:
    assert read_uri(text) == uri


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be a URI"),
        ("bert", "must be a URI"),
        ("S3://models/bert", "must be a URI"),
        ("oci://models/bert", "must be a URI"),
        (f"s3://{'m' * 1024}", "must be a URI"),
        ("s3://models/a\n", "must not have control characters"),
        ("s3://models/\udc80", "must not have control characters"),
        ("s3:///bert", "must name the bucket after s3://"),
        ("s3://a b/bert", "must name the bucket after s3://"),
        ("s3://[::1]/bert", "must name the bucket after s3://"),
        ("s3://https://minio.example.com/", "must name the bucket after s3://"),
        ("az:///bert", "must name the container after az://"),
        ("as://shelf", "must name the container after the account"),
        ("as://SHELF/models/bert", "must name the storage account and the container"),
        ("pvc:///bert", "must name the PersistentVolumeClaim after pvc://"),
        ("https:///bert", "must name the host after https://"),
        ("https://example.com:x/bert", "must have a valid host and port"),
        ("https://me:secret@example.com/bert", "must not carry a user or a password"),
        ("https://me@example.com/bert", "must not carry a user or a password"),
        ("https://example.com/my bert", "must have spaces and characters other than ASCII percent-encoded"),
        ("https://example.com/ü", "must have spaces and characters other than ASCII percent-encoded"),
        ("https://example.com//", "must name a file"),
        ("https://example.com/a/..", "must have a path without"),
        ("file://srv/models", "must have three slashes"),
        ("file:///", "must name a folder or a file of the node"),
        ("file:////", "must name a folder or a file of the node"),
        ("file:///srv/../etc", "must have a path without"),
        ("file:///srv/./etc", "must have a path without"),
        ("pvc://models/..", "must have a path without"),
        ("s3://models//bert", "must have a path without"),
        ("s3://models/a\\b", "must have a path without"),
        (f"s3://models/{'m' * 256}", "must have names of at most 255 bytes"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    message = read_uri(text)
    assert isinstance(message, str)
    assert message.startswith(problem)


@pytest.mark.parametrize(
    ("path", "root", "answer"),
    [
        ("/srv/models/bert", "/srv/models", True),
        ("/srv/models/bert", "/srv/models/", True),
        ("/srv/models", "/srv/models", True),
        ("/srv/models", "/", True),
        ("/srv/models2/bert", "/srv/models", False),
        ("/srv", "/srv/models", False),
    ],
)
def test_is_below_compares_whole_path_segments(path: str, root: str, answer: bool) -> None:
    assert is_below(path, root) is answer
