"""URIs of models: in stores, on web servers, in persistent volume claims and in folders. Pure.

`s3://bucket/key`, `s3://https://host:port/bucket/key` (Triton's form for servers other than Amazon's),
`gs://bucket/key`, `az://container/key` and `azure://container/key`, `as://account/container/key` (Triton's form),
`http(s)://…`, `pvc://claim/path` and `file:///path`. A path that ends in `/` is always a folder.
"""

import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from urllib.parse import urlsplit, urlunsplit

MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1024
"""S3's own limit of a key."""


class Scheme(Enum):
    S3 = "s3"
    GS = "gs"
    AZURE = "az"
    HTTP = "http"
    FILE = "file"
    PVC = "pvc"


@dataclass(frozen=True, slots=True)
class Uri:
    """`container` is the bucket, the container, the claim or the host; `path` has no slash at either end.

    `display` is the text for users: without user, password and query. `address` is the whole URI for http, and for s3
    the server that the URI names; "" for Amazon's. `account` is Azure's.
    """

    scheme: Scheme
    display: str
    container: str = ""
    path: str = ""
    is_folder: bool = False
    account: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]

    def child(self, name: str) -> "Uri":
        """The subfolder of this name."""
        path = f"{self.path}/{name}" if self.path else name
        display = f"{self.display.rstrip('/')}/{name}/"
        return Uri(self.scheme, display, self.container, path, True, self.account, self.address)


class UriFault(Enum):
    CHARACTERS = "characters"
    SCHEME = "scheme"
    ACCOUNT = "account"
    SLASHES = "slashes"
    CONTAINER = "container"
    PATH = "path"
    LONG_NAME = "long name"
    HOST_AND_PORT = "host and port"
    NO_HOST = "no host"
    USER = "user"
    NOT_ENCODED = "not encoded"
    NO_FILE = "no file"


class UriError(ValueError):
    """The text is not a URI of a model. The message never repeats a password or a query."""

    def __init__(self, fault: UriFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


STORES = ("s3", "gs", "az", "as", "azure")
SCHEMES = (*STORES, "http", "https", "pvc", "file")

_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._$-]{0,254}", re.ASCII)
_ACCOUNT = re.compile(r"([a-z0-9]{3,24})(?:\.blob\.core\.windows\.net)?", re.ASCII)
_S3_SERVER = re.compile(r"(https?://)?([A-Za-z0-9.-]+|\[[0-9a-f:.]+\])(:\d{1,5})?/(.*)", re.ASCII | re.DOTALL)


def parse_uri(text: str) -> Uri:
    """Parse a URI of a model. Raises UriError."""
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in text):
        raise UriError(UriFault.CHARACTERS, "a URI must be valid UTF-8 without control characters")
    scheme, separator, rest = text.partition("://")
    match scheme if separator else "":
        case "s3":
            return _s3(text, rest)
        case "gs":
            return _in_container(Scheme.GS, text, rest)
        case "az" | "azure":
            return _in_container(Scheme.AZURE, text, rest)
        case "as":
            account, _, inside = rest.partition("/")
            found = _ACCOUNT.fullmatch(account)
            if found is None:
                raise UriError(
                    UriFault.ACCOUNT,
                    f"{_shown(text)!r} does not begin with a storage account; use as://account/container/path",
                )
            return _in_container(Scheme.AZURE, text, inside, account=found[1])
        case "http" | "https":
            return _http(text)
        case "pvc":
            return _in_container(Scheme.PVC, text, rest)
        case "file":
            if not rest.startswith("/"):
                raise UriError(UriFault.SLASHES, f"{_shown(text)!r}: expected file:///path")
            return Uri(Scheme.FILE, text, "", _path(text, rest), rest.endswith("/"))
        case _:
            raise UriError(
                UriFault.SCHEME, f"{_shown(text)!r} is not a URI of a model; use one of {'://, '.join(SCHEMES)}://"
            )


def _shown(text: str) -> str:
    """A text that is not a URI, without the parts that may be secret."""
    scheme, separator, rest = text.partition("://")
    if separator:
        head, slash, tail = rest.partition("/")
        rest = head.rpartition("@")[2] + slash + tail
    return (scheme + separator + rest).partition("?")[0].partition("#")[0]


def _s3(text: str, rest: str) -> Uri:
    server = _S3_SERVER.fullmatch(rest)
    # The first part is a bucket, unless it has a port or a scheme.
    if server is None or not (server[1] or server[3]):
        return _in_container(Scheme.S3, text, rest)
    return _in_container(Scheme.S3, text, server[4], address=f"{server[1] or 'http://'}{server[2]}{server[3] or ''}")


def _in_container(scheme: Scheme, text: str, rest: str, *, account: str = "", address: str = "") -> Uri:
    container, slash, path = rest.partition("/")
    if _BUCKET.fullmatch(container) is None:
        what = "claim" if scheme is Scheme.PVC else "bucket or container"
        raise UriError(UriFault.CONTAINER, f"{_shown(text)!r} does not begin with the name of a {what}")
    is_folder = not path or path.endswith("/")
    return Uri(scheme, text, container, _path(text, slash + path), is_folder, account, address)


def _path(text: str, path: str) -> str:
    inside = path.removeprefix("/").removesuffix("/")
    if inside:
        _check_path(inside, _shown(text))
    return inside


def _check_path(path: str, shown: str) -> None:
    if problem := path_problem(path):
        is_long = any(len(part.encode(errors="replace")) > MAX_NAME_BYTES for part in path.split("/"))
        raise UriError(UriFault.LONG_NAME if is_long else UriFault.PATH, f"{shown!r}: {problem}")


def _http(text: str) -> Uri:
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UriError(UriFault.HOST_AND_PORT, "an http URI must have a valid host and port") from None
    authority = f"[{host}]" if host and ":" in host else host or ""
    authority += f":{port}" if port is not None else ""
    display = urlunsplit((parts.scheme, authority, parts.path, "", ""))
    if not host:
        raise UriError(UriFault.NO_HOST, f"{display!r} has no host")
    if parts.username is not None or parts.password is not None:
        raise UriError(
            UriFault.USER, f"{display!r} has a user name; use credentials instead, because lists of objects show URIs"
        )
    if " " in text or not text.isascii():
        raise UriError(UriFault.NOT_ENCODED, f"{display!r} has characters that must be percent-encoded")
    path = parts.path.strip("/")
    name = path.rpartition("/")[2]
    if not name:
        raise UriError(
            UriFault.NO_FILE,
            f"{display!r} does not name a file; http cannot list folders: use a model file or an archive",
        )
    _check_path(name, display)
    return Uri(Scheme.HTTP, display, authority, path, False, "", urlunsplit(parts._replace(fragment="")))


def path_problem(path: str) -> str | None:
    """Why this relative path must not be used on disk; None for a valid one."""
    if path.startswith("/"):
        return "is an absolute path"
    if "\\" in path:
        return "has a backslash"
    if any(unicodedata.category(each) in ("Cc", "Cs") for each in path):
        return "is not UTF-8 or has control characters"
    parts = path.split("/")
    if ".." in parts or "." in parts:
        return "has '.' or '..' in it"
    if "" in parts:
        return "has an empty part"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    if any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        return f"has a part longer than {MAX_NAME_BYTES} bytes"
    return None
