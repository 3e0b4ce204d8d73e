"""One error class with a code; only `core.wire.status_map` knows HTTP and gRPC numbers."""

import errno
from dataclasses import dataclass
from enum import Enum
from typing import cast


class ErrorCode(Enum):
    """Triton's error codes, under its names; the value is how load errors print the code (`Internal: …`)."""

    UNKNOWN = "Unknown"
    INTERNAL = "Internal"
    NOT_FOUND = "Not found"
    INVALID_ARG = "Invalid argument"
    UNAVAILABLE = "Unavailable"
    UNSUPPORTED = "Unsupported"
    ALREADY_EXISTS = "Already exists"
    CANCELLED = "Cancelled"


class InferenceError(Exception):
    """An error for the caller: a code, and a text with the problem, its place, and the expected value.

    `is_refusal` is set where a front end in a process of its own gets an error that the core gave before it accepted
    the request. Within one process such an error comes before the call of `infer` returns.
    """

    def __init__(self, code: ErrorCode, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.is_refusal = is_refusal

    def __repr__(self) -> str:
        return f"<InferenceError {self.code.name} {self.message!r}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, InferenceError) and (self.code, self.message) == (other.code, other.message)

    def __hash__(self) -> int:
        return hash((self.code, self.message))


def invalid(message: str) -> InferenceError:
    """The error of a request, file or setting that its author has to change."""
    return InferenceError(ErrorCode.INVALID_ARG, message)


def internal(message: str) -> InferenceError:
    """The error of a fault of the server, a model or a backend."""
    return InferenceError(ErrorCode.INTERNAL, message)


def unavailable(message: str) -> InferenceError:
    """The error of what may succeed later, or on another server."""
    return InferenceError(ErrorCode.UNAVAILABLE, message)


def unsupported(message: str) -> InferenceError:
    """The error of what this server, backend or model cannot do."""
    return InferenceError(ErrorCode.UNSUPPORTED, message)


class EndedSequenceError(InferenceError):
    """The error of a request that could not be executed without ending its sequence: the state is dropped."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem in a file that a user wrote.

    `path` names the field (`dynamic_batching.preferred_batch_size[1]`), "" for the file as a whole. `line` and `column`
    count from 1; they are 0 if the position is unknown.
    """

    message: str
    path: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.line}:{self.column}: {self.message}" if self.line else self.message


def shortage_of(error: BaseException | None) -> InferenceError | None:
    """What a client gets for an error that says that the server lacks memory or a thread; None for other errors.

    It is UNAVAILABLE, because the same request may succeed later. The log has it without a traceback: the code
    that asked for memory is not at fault.
    """
    # No `isinstance`, because it runs code of a model's exception class.
    kind = type(error)
    if issubclass(kind, MemoryError) or (kind is OSError and cast("OSError", error).errno == errno.ENOMEM):
        return unavailable("the server has not enough memory for this")
    if kind is RuntimeError and str(error) == "can't start new thread":
        return unavailable("the server cannot start a thread for this")
    return None


CLIENT_TEXT_LIMIT = 256


def of_request(request_id: str, message: str) -> str:
    """The text of an error that Triton reports from its core and not from its front end: it names the request."""
    return f"[request id: {clip(request_id) or '<id_unknown>'}] {message}"


def clip(text: str) -> str:
    """Client data for an error message: cut at 256 bytes of UTF-8, with `...` if it was cut.

    A longer text overflows the trailer of a gRPC status, and the client then sees a different error.
    """
    raw = text.encode("utf-8", "replace")
    if len(raw) <= CLIENT_TEXT_LIMIT:
        return text
    return raw[:CLIENT_TEXT_LIMIT].decode("utf-8", "ignore") + "..."


TEXT_LIMIT = 1024
"""Maximum characters of a model's own error text in a response, which has to fit into a gRPC trailer."""


def describe(error: BaseException) -> str:
    """The text of a model's exception for a response: without traceback, at most TEXT_LIMIT characters."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # a model's exception class may fail to print
        text = type(error).__name__
    text = text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "..."
    # File names that are not UTF-8 contain lone surrogates, which a response cannot carry.
    return text.encode("utf-8", "replace").decode()
