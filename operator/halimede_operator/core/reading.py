"""Reading what others wrote: objects of any shape, and texts of any content, into values that cannot surprise.

Whatever the API server, a kubelet, a pod or somebody's hand put into an object, reading it never raises. Texts that a
status shows must be the same as long as nothing happens, or each look at a pod would write: what a kubelet counts or
times on every attempt (back-offs, request ids, clocks) is taken out here.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

MAX_MESSAGE_CHARACTERS = 1024
_MAX_READ_CHARACTERS = 8 * 1024
"""More of a text is not looked at: kubelets cut termination messages at 4 KiB."""

_MAX_DIGITS = 18


def at(value: object, *path: str) -> Any:
    """What stands at the path of keys; None where there is nothing."""
    for key in path:
        if not isinstance(value, Mapping):
            return None
        value = value.get(key)
    return value


def text_at(value: object, *path: str) -> str:
    """The text at the path as it is; "" where there is none."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def name_at(value: object, *path: str) -> str:
    """A name at the path: one line of at most 253 characters; "" where there is none."""
    return clean(text_at(value, *path), 253)


def integer_at(value: object, *path: str) -> int | None:
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def objects_at(value: object, *path: str) -> list[Mapping[str, Any]]:
    """The objects of the list at the path, without what else may be in it."""
    found = at(value, *path)
    if not isinstance(found, Sequence) or isinstance(found, str | bytes):
        return []
    return [element for element in found if isinstance(element, Mapping)]


def moment_at(value: object, *path: str) -> str | None:
    """The time at the path in whole seconds of UTC, `2026-11-22T09:12:25Z`: such texts sort as the times do.

    None also for the beginnings of time that stand for none, 1970 in a kubelet's statuses and the year 1 in Go.
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


def seconds_before(moment: str, seconds: float) -> str:
    """An earlier moment, as `moment_at` writes them; "" before ""."""
    if not moment:
        return ""
    earlier = datetime.fromisoformat(moment) - timedelta(seconds=seconds)
    return earlier.strftime("%Y-%m-%dT%H:%M:%SZ")


def decimal(value: object) -> int | None:
    """A whole number, not negative, that may be written as a text: a quantity of devices, a model's version."""
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= _MAX_DIGITS:
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**_MAX_DIGITS:
        return value
    return None


def condition(status_holder: object, type_: str) -> Mapping[str, Any]:
    """The condition of this type in an object's status; empty where there is none."""
    found = (c for c in objects_at(status_holder, "status", "conditions") if c.get("type") == type_)
    return next(found, {})


def clean(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """One line without control characters, of at most so many characters; what is cut ends with an ellipsis."""
    text = text[:_MAX_READ_CHARACTERS]
    readable = text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(readable.split())
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


_AT_REST = (
    # "back-off 20s restarting failed container=server pod=digits-1_prod(uid)", on every attempt another time.
    (re.compile(r"\bback-off \S{1,20} restarting failed", re.IGNORECASE), "back-off restarting failed"),
    # ErrImagePull and ImagePullBackOff take turns; the second wraps what the first said.
    (re.compile(r'^Back-off pulling image "[^"]{0,500}": (?:[A-Z]\w{0,60}: )?'), ""),
    # How kubelets write a pod: name_namespace(uid).
    (re.compile(r"\b([a-z0-9][a-z0-9.-]{0,252})_[a-z0-9-]{1,63}\([0-9a-f-]{1,64}\)"), r"\1"),
    # A new name on every attempt to make a pod.
    (re.compile(r'\bpods "([a-z0-9.-]{1,253}-)[a-z0-9]{5}" is forbidden'), r'pods "\1…" is forbidden'),
    (re.compile(r"\b\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?: ?(?:Z|UTC|[+-]\d\d:?\d\d))?"), "<time>"),
    # The port from which a connection was tried.
    (re.compile(r"(\d{1,3}(?:\.\d{1,3}){3}|\]):\d{1,5}->"), r"\1->"),
    # What object stores say of a request, as XML, JSON, headers or words.
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
    """The text without what changes on every attempt though nothing happens."""
    text = text[:_MAX_READ_CHARACTERS]
    for pattern, instead in _AT_REST:
        text = pattern.sub(instead, text)
    return text


_LOG_LINE = re.compile(r"^([IWEF])\d{4} \d\d:\d\d:\d\d[.\d]{0,10} +\d{1,10} [^\s\]]{1,200}\] ?(.*)$")
_ISO_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ? ([IWEF])\w{0,10} +\d{1,10} [^\s\]]{1,200}\] ?(.*)$")
_TRACEBACK = "Traceback (most recent call last)"


def root_cause(message: str) -> str:
    """What a container died of, from its termination message.

    A container that wrote none has the end of its log there instead: then the errors in it count, and of a Python
    traceback its last line.
    """
    lines = [line for line in message[-_MAX_READ_CHARACTERS:].splitlines() if line.strip()]
    errors = list(dict.fromkeys(_last_words(text) for text in _errors(lines)))
    return at_rest("; ".join(errors) if errors else _last_words("\n".join(lines)))


def _errors(lines: Sequence[str]) -> Iterator[str]:
    """The messages of the lines that are errors in a log of the server, as text or as JSON."""
    for line in lines:
        if line.startswith("{"):
            if (entry := json_object(line)) and text_at(entry, "level").upper() in {"ERROR", "FATAL", "CRITICAL"}:
                yield text_at(entry, "message")
        elif (match := _LOG_LINE.match(line) or _ISO_LOG_LINE.match(line)) and match[1] in "EF":
            said = match[2].strip()
            quoted = len(said) > 1 and said[0] == said[-1] == '"'
            yield said[1:-1] if quoted else said


def _last_words(text: str) -> str:
    head, traceback, tail = text.partition(_TRACEBACK)
    if not traceback:
        return text
    lines = [line for line in tail.splitlines() if line.strip()]
    return head + (lines[-1] if len(lines) > 1 else tail)


def json_object(text: str) -> Mapping[str, Any] | None:
    """The JSON object that the text is; None where it is none."""
    if len(text) > _MAX_READ_CHARACTERS:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
