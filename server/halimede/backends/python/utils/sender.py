"""`InferenceResponseSender`: responses to one request, from any thread, during `execute` or after it.

| model | send | what the client gets |
|---|---|---|
| decoupled | responses, then one FINAL with or without a response | each at once, and the end |
| other | one response, FINAL with it or afterwards | the response, at once |
"""

import threading

from halimede.backends.hosting import HostedRequest, Reply
from halimede.backends.python.utils.arguments import instance_of, integer_of
from halimede.backends.python.utils.errors import TritonModelException
from halimede.backends.python.utils.response import InferenceResponse, reply_of
from halimede.backends.python.utils.session import Session
from halimede.core.types import InferenceError

FINAL = 1


class InferenceResponseSender:
    """Created by a request; usable as long as the model wants, independently of the request object."""

    __module__ = "c_python_backend_utils"
    __slots__ = ("__weakref__", "_answered", "_closed", "_last", "_lock", "_request", "_session", "_wanted")

    def __init__(self, session: Session, request: HostedRequest, wanted: tuple[str, ...]) -> None:
        self._session = session
        self._request = request
        self._wanted = wanted
        # Held while a response is handed over, so that responses of several threads leave in the order of their checks.
        self._lock = threading.Lock()
        self._answered = False
        self._closed = False
        self._last: Reply = None
        """Set by `finish`; the thread that holds the lock then sends it."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, the end, or both. TritonModelException if that is not, or no longer, allowed."""
        if response is not None:
            instance_of(response, InferenceResponse, "send", "response")
        if integer_of(flags, "send", "flags", 0, 0xFFFFFFFF) not in (0, FINAL):
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and flags == 0:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        reply = None if response is None else reply_of(response, self._wanted, self._session)
        with self._lock:
            self._check(response)
            self._closed = bool(flags)
            if self._session.decoupled:
                self._answered = self._closed
                self._respond(reply, self._closed)
            elif not self._answered:
                # There is only one response, so the client need not wait for the flag.
                self._answered = True
                self._respond(reply, True)
        if self._last is not None and (last := finish(self, self._last)) is not None:
            self._respond(last, True)

    @property
    def has_ended(self) -> bool:
        """Whether the request has had its last response."""
        return self._answered

    def continue_with(self, request: HostedRequest) -> None:
        """The request is executed again: responses from now on belong to this execution."""
        self._request = request

    def is_cancelled(self) -> bool:
        """True once the request's client has disconnected."""
        return self._session.host.is_cancelled(self._request)

    def _check(self, response: InferenceResponse | None) -> None:
        if not self._session.decoupled and response is not None and self._answered:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send more than one response."
            )
        if not self._session.decoupled and response is None and not self._answered:
            raise TritonModelException(
                "Unable to send response. Non-decoupled model cannot send complete final before sending a response."
            )
        if self._closed:
            raise TritonModelException("Unable to send response. Response sender has been closed.")

    def _respond(self, reply: Reply, final: bool) -> None:
        try:
            self._session.host.respond(self._request, reply, final)
        except InferenceError as error:
            raise TritonModelException(f"Unable to send response. {error.message}") from None


def finish(sender: InferenceResponseSender, reply: Reply) -> Reply:
    """End the request with `reply`, after which nothing can be sent. Returns the reply if the caller must give it.

    Returns None if the request has already ended, or if another thread is sending: that thread then gives the reply.
    It may be waiting for a slow client, and the caller must not wait with it, because it may be the thread that reads
    the messages of the server.
    """
    sender._last = reply
    if not sender._lock.acquire(blocking=False):
        return None
    try:
        sender._last = None
        if sender._answered:
            return None
        sender._answered = sender._closed = True
        return reply
    finally:
        sender._lock.release()
