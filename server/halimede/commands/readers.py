"""Readers of flag values that need the server: text in, value out, and a ValueError that states the expected form.

All others are in `halimede_spec.flag_values`. Readers that need the serving libraries (restricted APIs, header
patterns) import them only when such a flag is given, so that --help and a mistyped flag answer quickly.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halimede.backends.access import denied
from halimede_spec import uri
from halimede_spec.flag_values import Words

if TYPE_CHECKING:
    from ipaddress import IPv4Network, IPv6Network

    from halimede.core.types import ApiCategory, Restrictions, Secret

STORES = tuple(f"{scheme}://" for scheme in uri.STORES)
UNIX = "unix:"
MAX_SOCKET_PATH_BYTES = 107
"""Size of the path in Linux's sockaddr_un, without the terminating zero."""

METADATA_PREFIX = "triton-grpc-protocol-"

_CACHE_SETTING = re.compile(r"[^,=]+,[^,=]+=.*", re.DOTALL)
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
_METADATA_KEY = re.compile(r"[0-9A-Za-z_.-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


@dataclass(frozen=True, slots=True)
class Choice:
    """A reader of one of an enum's values, in upper or lower case."""

    members: type[Enum]

    @property
    def words(self) -> Words:
        return Words(tuple(each.value for each in self.members))

    def __call__(self, text: str) -> Enum:
        return self.members(self.words(text))


def read_compute_capability(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([0-9]{1,3})(?:\.([0-9]))?", text)
    if found is None:
        raise ValueError(f"Invalid option value. Got {text}; expected <major>.<minor>, for example 7.5")
    return int(found[1]), int(found[2] or 0)


# File checks use os.path, because pathlib raises if a directory may not be entered.


def read_repository(text: str) -> Path | str:
    """A directory, which may not exist yet, or the URI of a store."""
    if text.startswith(STORES):
        uri.parse_uri(text)
        return text
    if "://" in text:
        raise ValueError(
            f"{text.partition('://')[0]}:// names no repository; expected a directory, {', '.join(STORES)}…"
        )
    if not text:
        raise ValueError("repository path is not a valid directory: it is empty")
    return Path(text)


def read_directory(text: str) -> Path:
    """A directory, which may not exist; it then counts as empty."""
    if not text:
        raise ValueError("directory is empty; expected a path")
    return Path(text)


def read_config_name(text: str) -> str:
    if "/" in text or "\0" in text:
        raise ValueError(f"Invalid option value. Got {text}; expected a name: <name> for configs/<name>.pbtxt")
    return text


def read_file(text: str) -> Path:
    """A file that is readable now; its content is checked elsewhere."""
    if problem := denied(Path(text)):
        raise ValueError(problem)
    if not os.path.exists(text):
        raise ValueError(f"file does not exist: {text}")
    if os.path.isdir(text):
        raise ValueError(f"is a directory, expected a file: {text}")
    return Path(text)


def read_log_file(text: str) -> Path | None:
    """A file that can be created or appended to; empty means standard error."""
    if not text:
        return None
    path = Path(text)
    if os.path.isdir(path):
        raise ValueError(f"is a directory, expected a file: {text}")
    if not os.path.isdir(path.parent):
        raise ValueError(f"directory does not exist: {path.parent}")
    return path


def read_networks(text: str) -> "tuple[IPv4Network | IPv6Network, ...]":
    """Addresses and networks, separated by commas."""
    from ipaddress import ip_network

    try:
        return tuple(ip_network(each.strip()) for each in text.split(",") if each.strip())
    except ValueError as error:
        what = "expected addresses or networks, such as 10.0.0.0/8"
        raise ValueError(f"Invalid option value. Got {text}; {what} ({error})") from None


def read_address(text: str) -> str:
    """A host or `unix:<path>`. The server checks whether it is usable when it binds it."""
    if not text:
        raise ValueError(f"address is empty; expected a host, an IP address or {UNIX}<path>")
    if text.startswith(UNIX):
        path = text.removeprefix(UNIX)
        size = len(path.encode("utf-8", "surrogateescape"))
        if not path:
            raise ValueError(f"path of the unix socket is empty; expected {UNIX}<path>")
        if size > MAX_SOCKET_PATH_BYTES:
            raise ValueError(
                f"path of a unix socket has at most {MAX_SOCKET_PATH_BYTES} bytes, this one has {size}: {path}"
            )
    return text


def read_header_pattern(text: str) -> re.Pattern[str] | None:
    """A regular expression; an empty one forwards nothing."""
    from halimede.core.wire.forwarding import compile_pattern

    return compile_pattern(text) if text else None


def read_origin(text: str) -> str:
    """The origin of a site as browsers send it, in lower case and without the scheme's own port, or `*`."""
    origin = text.lower()
    if origin != "*" and not _ORIGIN.fullmatch(origin):
        raise ValueError(f"Invalid option value. Got {text}; expected <scheme>://<host>[:<port>] without a path, or *")
    for scheme, port in (("http://", ":80"), ("https://", ":443")):
        if origin.startswith(scheme):
            return origin.removesuffix(port)
    return origin


@dataclass(frozen=True, slots=True)
class BackendOption:
    """One `--backend-config`; `backend` is "" for a setting for all backends."""

    backend: str
    key: str
    value: str


def read_backend_option(text: str) -> BackendOption:
    # The value may contain commas and equals signs, so the name ends at a comma before the first equals sign.
    setting, equals, value = text.partition("=")
    backend, comma, key = setting.rpartition(",")
    if not equals or not key or (comma and not backend):
        raise ValueError(f"option format is '<backend name>,<setting>=<value>' or '<setting>=<value>'. Got {text}")
    return BackendOption(backend, key, value)


def merge_backend_options(options: Sequence[BackendOption]) -> Mapping[str, Mapping[str, str]]:
    """Settings by backend; if one is given twice the last value counts."""
    merged: dict[str, dict[str, str]] = {}
    for option in options:
        merged.setdefault(option.backend, {})[option.key] = option.value
    return merged


def read_cache_setting(text: str) -> str:
    # It may contain a cache's password, so the error does not repeat it.
    if not _CACHE_SETTING.fullmatch(text):
        raise ValueError("option format is '<cache>,<setting>=<value>'")
    return text


@dataclass(frozen=True, slots=True)
class Restriction:
    """One group of restricted APIs, and its secret."""

    categories: "tuple[ApiCategory, ...]"
    secret: "Secret"


def read_http_restriction(text: str) -> Restriction:
    return _read_restriction(text, _HEADER_NAME, "")


def read_grpc_restriction(text: str) -> Restriction:
    return _read_restriction(text, _METADATA_KEY, METADATA_PREFIX)


def _read_restriction(text: str, key_form: re.Pattern[str], prefix: str) -> Restriction:
    # No message repeats text that may be the secret: many people can read standard error and logs.
    from halimede.core.types import ApiCategory, Secret

    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    if not (names and colon and key and equals) or "=" in names:
        raise ValueError("option format is '<api>[,<api>]*:<key>=<value>'")
    if not key_form.fullmatch(key):
        raise ValueError(f"'{key}' cannot be the name of a header")
    if not _HEADER_VALUE.fullmatch(value):
        raise ValueError(
            f"the value of '{key}' cannot be sent in a header; expected visible ASCII characters, spaces between them"
        )
    known = {category.value: category for category in ApiCategory}
    unknown = [name for name in names.split(",") if name not in known]
    if unknown:
        raise ValueError(f"unknown restricted api '{unknown[0]}'; expected {', '.join(known)}")
    return Restriction(tuple(known[name] for name in names.split(",")), Secret(f"{prefix}{key}".lower(), value))


def merge_restrictions(restrictions: Sequence[Restriction]) -> "Restrictions":
    """The secret of each category; ValueError if a category is in two groups: only one would protect it."""
    merged: dict[ApiCategory, Secret] = {}
    for restriction in restrictions:
        for category in restriction.categories:
            if category in merged:
                raise ValueError(f"api '{category.value}' is in two groups; expected one, as only one secret counts")
            merged[category] = restriction.secret
    return merged


@dataclass(frozen=True, slots=True)
class Setting:
    """One `[<part>,]<name>=<value>` of a flag with several settings."""

    name: str
    value: Any  # as the setting's own reader makes it


def settings_reader(readers: Mapping[str, Callable[[str], object]]) -> Callable[[str], Setting]:
    """A reader of `<setting>=<value>`; `readers` maps each setting to the reader of its value.

    A setting whose name ends in `*` stands for all settings with that prefix.
    """
    open_ended = {name.removesuffix("*"): read for name, read in readers.items() if name.endswith("*")}
    right = ", ".join(f"{name}=<value>" for name in readers)

    def read(text: str) -> Setting:
        name, equals, value = text.partition("=")
        reader = readers.get(name) or next((each for start, each in open_ended.items() if name.startswith(start)), None)
        if not equals or reader is None or name.endswith((",", "*")):
            raise ValueError(f"Invalid option value. Got {text}; expected {right}")
        try:
            return Setting(name, reader(value))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    return read
