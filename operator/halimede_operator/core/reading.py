"""Reads untrusted input: objects of any shape and texts of any content become well-formed values.

Reading never raises for any content of an object. Texts in a status must
stay the same as long as nothing happens, or every reconcile would write the status. So the parts of a message that
change on every attempt (back-offs, request ids, times) are removed here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

MAX_MESSAGE_CHARACTERS = 1024
_MAX_READ_CHARACTERS = 8 * 1024
"""The rest of a longer text is ignored. Kubelets cut termination messages at 4 KiB."""

_MAX_DIGITS = 18


def at(value: object, *path: str) -> Any:
    """The value at a path of keys; None if there is none."""
    for key in path:
        # A check for Mapping takes five times as long, and objects with a thousand pods need half a million of them.
        if not isinstance(value, dict):
            return None
        value = value.get(key)
    return value


def text_at(value: object, *path: str) -> str:
    """The unchanged text at the path; "" if there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def name_at(value: object, *path: str) -> str:
    """A name at the path, as one line of at most 253 characters; "" if there is none."""
    return clean(text_at(value, *path), 253)


def integer_at(value: object, *path: str) -> int | None:
    """The integer at the path; None if there is none."""
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def objects_at(value: object, *path: str) -> list[Mapping[str, Any]]:
    """The objects in the list at the path; other items are ignored."""
    found = at(value, *path)
    if not isinstance(found, list):
        return []
    return [element for element in found if isinstance(element, dict)]


def texts_at(value: object, *path: str) -> list[str]:
    """The texts in the list at the path; other items are ignored."""
    found = at(value, *path)
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []


def moment_at(value: object, *path: str) -> str | None:
    """The time at the path in whole seconds of UTC, `2026-11-22T09:12:25Z`. These texts sort as the times do.

    None if there is none, and also for the values that mean "no time": 1970 in a kubelet's statuses, the year 1 in Go.
    """
    found = text_at(value, *path)
    if not 20 <= len(found) <= 40:
        return None
    try:
        when = datetime.fromisoformat(found)
        if when.tzinfo is None or when.year <= 1970:
            return None
        return when.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (ValueError, OverflowError):
        return None


def moment_of(time: datetime) -> str:
    """A UTC time in the format of `moment_at`."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_before(moment: str, seconds: float) -> str:
    """The moment this many seconds earlier, in the format of `moment_at`; "" for ""."""
    if not moment:
        return ""
    earlier = datetime.fromisoformat(moment) - timedelta(seconds=seconds)
    return earlier.strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds_between(begin: str, end: str) -> float:
    """Seconds between two moments in the format of `moment_at`."""
    return (datetime.fromisoformat(end) - datetime.fromisoformat(begin)).total_seconds()


def decimal(value: object) -> int | None:
    """A whole number >= 0, which may be given as text: a number of devices, a model's version. None otherwise."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS:
        return value
    return None


def condition(status_holder: object, type_: str) -> Mapping[str, Any]:
    """The condition of this type in an object's status; empty if there is none."""
    found = (c for c in objects_at(status_holder, "status", "conditions") if c.get("type") == type_)
    return next(found, {})


def clean(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """The text as one line without control characters, of at most `limit` characters; if cut, it ends with "…"."""
    text = text[:_MAX_READ_CHARACTERS]
    readable = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(readable.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


_AT_REST = (
    # "back-off 20s restarting failed container=server pod=digits-1_prod(uid)": the time differs on every attempt.
    (re.compile(r"\bback-off \S{1,20} restarting failed", re.IGNORECASE), "back-off restarting failed"),
    # ErrImagePull and ImagePullBackOff alternate; the second wraps the message of the first.
    (re.compile(r'^Back-off pulling image "[^"]{0,500}": (?:[A-Z]\w{0,60}: )?'), ""),
    # Kubelets write a pod as name_namespace(uid).
    (re.compile(r"\b([a-z0-9][a-z0-9.-]{0,252})_[a-z0-9-]{1,63}\([0-9a-f-]{1,64}\)"), r"\1"),
    # The pod's name differs on every attempt to create one.
    (re.compile(r'\bpods "([a-z0-9.-]{1,253}-)[a-z0-9]{5}" is forbidden'), r'pods "\1…" is forbidden'),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"), "<time>"),
    # Names of sandboxes; digests stay.
    (re.compile(r"(?<!sha256:)\b[0-9a-f]{64}\b"), "…"),
    (re.compile(r"^\(combined from similar events\): "), ""),
    # Addresses of objects in memory.
    (re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"), "0x…"),
    # The local port of a connection.
    (re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\]):\d{1,5}->"), r"\1->"),
    # Request ids of object stores, as XML, JSON, headers or words.
    (
        re.compile(
            r"\b(request[-_ ]?id|host[-_ ]?id|x-(?:amz|ms|goog)-[a-z0-9-]{1,40})\b"
            r"[\"']?[=:> ]{1,4}[\"']?[\w+/=.-]{4,200}",
            re.IGNORECASE,
        ),
        r"\1 …",
    ),
)


def at_rest(text: str) -> str:
    """The text without the parts that change on every attempt although nothing happens."""
    text = text[:_MAX_READ_CHARACTERS]
    for pattern, instead in _AT_REST:
        text = pattern.sub(instead, text)
    return text


_LOG_LINE = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d[.\d]{0,10} +\d{1,10} [^\s\]]{1,200}\] ?(.*)$")
_ISO_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ? ([IWEF])\w{0,10} +\d{1,10} [^\s\]]{1,200}\] ?(.*)$")
_TRACEBACK = "Traceback (most recent call last)"


_LOG_TAIL_BYTES = range(2048, 2056)
"""If a container left no message, kubelets take this much of its log's end. It may be a few bytes longer, because
invalid UTF-8 grows when it is replaced."""
_ERROR_LEVELS = frozenset({"ERROR", "FATAL", "CRITICAL"})


def root_cause(message: str) -> str:
    """Why a container ended, from its termination message.

    If the container wrote none, the message is the end of its log: the result is then the errors in it. If it has no
    errors, the result is the lines that are not log lines; of a Python traceback only the last line.
    """
    lines = _whole_lines(message)
    errors = list(dict.fromkeys(_without_traceback(text) for text in _errors(lines)))
    if errors:
        return at_rest("; ".join(errors))
    return at_rest(_without_traceback("\n".join(line for line in lines if _log_entry(line) is None)))


def last_error(message: str) -> str:
    """The last error in the end of a log; "" if no complete line of it is an error."""
    errors = [_without_traceback(text) for text in _errors(_whole_lines(message))]
    return at_rest(errors[-1]) if errors else ""


def _whole_lines(message: str) -> list[str]:
    lines = message.splitlines()
    is_cut = len(message) > _MAX_READ_CHARACTERS or len(message.encode(errors="replace")) in _LOG_TAIL_BYTES
    if is_cut and len(lines) > 1:
        lines = "\n".join(lines)[-_MAX_READ_CHARACTERS:].splitlines()[1:]
    return [line for line in lines if line.strip()]


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The messages of the error lines in a log of the server, whose format is text or JSON."""
    entries = (entry for line in lines if (entry := _log_entry(line)) is not None)
    return (message for is_error, message in entries if is_error and message)


def _log_entry(line: str) -> tuple[bool, str] | None:
    """Whether a log line is an error, and its message ("" if it was cut off). None if it is not a log line."""
    if line.startswith("{"):
        entry = json_object(line) or {}
        level = text_at(entry, "level").upper()
        return (level in _ERROR_LEVELS, text_at(entry, "message")) if level else None
    if match := _LOG_LINE.match(line) or _ISO_LOG_LINE.match(line):
        return match[1] in "EF", _unquoted(match[2].strip())
    return None


def _unquoted(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        found = json.loads(text)
    except ValueError:
        return ""
    return found if isinstance(found, str) else ""


def _without_traceback(text: str) -> str:
    head, traceback, tail = text.partition(_TRACEBACK)
    if not traceback:
        return text
    lines = [line for line in tail.splitlines() if line.strip()]
    return head + (lines[-1] if len(lines) > 1 else tail)


def json_object(text: str) -> Mapping[str, Any] | None:
    """Parse a JSON object; None if the text is not one, or is too long."""
    if len(text) > _MAX_READ_CHARACTERS:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
