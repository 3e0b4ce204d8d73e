"""Where a model's files are, as text: `s3://models/bert`.

What is taken here the fetcher takes too: a URI that it would refuse is told before there is a pod.
"""

import re
import unicodedata
from dataclasses import dataclass
from urllib.parse import urlsplit

SCHEMES = ("s3", "gs", "azure", "http", "https", "pvc", "file")
MOUNTED = ("pvc", "file")
"""Whose files are read from a volume of the pod; all others are fetched over the network."""

_MAX_LENGTH = 1024
_MAX_NAME_BYTES = 255

_CONTAINER = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]{0,254}", re.ASCII)
_S3_SERVER = re.compile(r"((?:https?://)?(?:[A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?)/(.*)", re.ASCII)
_CONTAINERS = {"s3": "bucket", "gs": "bucket", "azure": "container", "pvc": "PersistentVolumeClaim"}


@dataclass(frozen=True, slots=True)
class Uri:
    scheme: str
    authority: str
    """Bucket, container, host or claim; '' for `file`."""
    path: str
    """With its leading '/' and without one at the end; '' without any."""


def read_uri(text: str) -> Uri | str:
    """The URI, or what is wrong with it."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES or len(text.encode(errors="replace")) > _MAX_LENGTH:
        return (
            f"must be a URI such as s3://models/bert of at most {_MAX_LENGTH} bytes, with one of {', '.join(SCHEMES)}"
        )
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        return "must not have control characters"
    if scheme in ("http", "https"):
        return _read_http(scheme, text)
    if scheme == "file":
        if not rest.startswith("/"):
            return "must have three slashes, as file:///models/bert: the file is on the node itself"
        if not rest.strip("/"):
            return "must name a folder or a file of the node, as file:///models/bert"
        return _with_path(scheme, "", rest)
    server = _S3_SERVER.fullmatch(rest) if scheme == "s3" else None
    # Without a port and without a scheme the first part is a bucket.
    if server is not None and ":" in server[1]:
        rest = server[2]
    container, slash, path = rest.partition("/")
    if not _CONTAINER.fullmatch(container):
        return f"must name the {_CONTAINERS[scheme]} after {scheme}://, of letters, digits, '.', '_', '-' and '$'"
    return _with_path(scheme, container, slash + path)


def _read_http(scheme: str, text: str) -> Uri | str:
    try:
        parts = urlsplit(text)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "must have a valid host and port"
    if not host:
        return f"must name the host after {scheme}://"
    if parts.username is not None or parts.password is not None:
        return "must not carry a user or a password; they belong into a Secret that credentials.secretRef names"
    if " " in text or not text.isascii():
        return "must have characters percent-encoded that are no ASCII, and spaces"
    path = parts.path.strip("/")
    if not path:
        return "must name a file: over http there are no folders to list"
    problem = _part_problem(path.rpartition("/")[2])
    return problem or Uri(scheme, parts.netloc, parts.path)


def _with_path(scheme: str, authority: str, path: str) -> Uri | str:
    inside = path.removeprefix("/").removesuffix("/")
    problems = [_part_problem(part) for part in inside.split("/")] if inside else []
    return next((problem for problem in problems if problem), Uri(scheme, authority, f"/{inside}" if inside else ""))


def _part_problem(part: str) -> str | None:
    if part in ("", ".", "..") or "\\" in part:
        return "must have a path without '.', '..', '//' and '\\'"
    if len(part.encode()) > _MAX_NAME_BYTES:
        return f"must have names of at most {_MAX_NAME_BYTES} bytes in its path"
    return None


def is_below(path: str, root: str) -> bool:
    """Whether a path is the folder `root` or within it; both absolute and without '..'."""
    parts = [part for part in root.split("/") if part not in ("", ".")]
    return [part for part in path.split("/") if part][: len(parts)] == parts
