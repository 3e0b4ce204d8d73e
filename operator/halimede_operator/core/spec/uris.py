"""Where a model's files are, as text: `s3://models/bert`.

`halimede_spec.uri` reads it, as in the fetcher: a URI that it would refuse is reported before a pod exists.
"""

from dataclasses import dataclass

from halimede_spec.uri import MAX_NAME_BYTES, SCHEMES, UriError, UriFault, parse_uri

MOUNTED = ("pvc", "file")
"""Schemes whose files are read from a volume of the pod; files of all others are fetched over the network."""

_MAX_LENGTH = 1024

_CONTAINERS = {"s3": "bucket", "gs": "bucket", "pvc": "PersistentVolumeClaim"}


@dataclass(frozen=True, slots=True)
class Uri:
    scheme: str
    authority: str
    """Bucket, container, host or claim; '' for `file`."""
    path: str
    """With a leading '/', without a trailing '/'; '' if the URI has no path."""


def read_uri(text: str) -> Uri | str:
    """The URI, or what is wrong with it."""
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in SCHEMES or len(text.encode(errors="replace")) > _MAX_LENGTH:
        return (
            f"must be a URI such as s3://models/bert of at most {_MAX_LENGTH} bytes, with one of {', '.join(SCHEMES)}"
        )
    # The fetcher accepts a node's whole disk; a pod must not have it.
    if scheme == "file" and rest and not rest.strip("/"):
        return "must name a folder or a file of the node, as file:///models/bert"
    try:
        uri = parse_uri(text)
    except UriError as error:
        return _problem(error.fault, scheme)
    return Uri(scheme, uri.container, f"/{uri.path}" if uri.path else "")


def _problem(fault: UriFault, scheme: str) -> str:
    match fault:
        case UriFault.CHARACTERS:
            return "must not have control characters"
        case UriFault.SLASHES:
            return "must have three slashes, as file:///models/bert: the file is on the node itself"
        case UriFault.CONTAINER:
            what = _CONTAINERS.get(scheme, "container")
            prefix = "the account" if scheme == "as" else f"{scheme}://"
            return f"must name the {what} after {prefix}, of letters, digits, '.', '_', '-' and '$'"
        case UriFault.PATH:
            return "must have a path without '.', '..', '//' and '\\'"
        case UriFault.LONG_NAME:
            return f"must have names of at most {MAX_NAME_BYTES} bytes in its path"
        case UriFault.HOST_AND_PORT:
            return "must have a valid host and port"
        case UriFault.NO_HOST:
            return f"must name the host after {scheme}://"
        case UriFault.USER:
            return "must not carry a user or a password; they belong in a Secret that credentials.secretRef names"
        case UriFault.NOT_ENCODED:
            return "must have spaces and characters other than ASCII percent-encoded"
        case UriFault.NO_FILE:
            return "must name a file: over http, folders cannot be listed"
        case UriFault.ACCOUNT:
            return "must name the storage account and the container, as as://account/container/path"
        case UriFault.SCHEME:
            raise AssertionError(f"{fault} of scheme {scheme}, which is not one of {SCHEMES}")


def is_below(path: str, root: str) -> bool:
    """Whether a path is the folder `root` or within it; both absolute and without '..'."""
    parts = [part for part in root.split("/") if part not in ("", ".")]
    return [part for part in path.split("/") if part][: len(parts)] == parts
