"""One inference whose answers are sent as server-sent events, one event each, as the model makes them.

The head is sent with the first answer. An error that comes first has its own status; in `generate_stream` it is an
event. A later error is the last event. An answer is acknowledged to its model when the connection has room for more, so
that a client that does not read stalls only that model. Answers that come nevertheless wait here, and count as unsent.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from halimede.core.types import Buffer, InferenceError, InferenceRequest, InferenceResponse
from halimede.core.wire.sse import MEDIA_TYPE, error_event, event
from halimede.core.wire.status_map import HTTP_STATUS
from halimede.core.wire.steps import Steps, run
from halimede.facade.server import Server
from halimede.frontends.http.answers import IN_STEPS_ABOVE, respond_infer_error, retry_fields, size_of
from halimede.frontends.http.exchange import Exchange, Stream
from halimede.frontends.steps import StepQueue
from halimede.frontends.stream_session import StreamAnswer, StreamSession

# Proxies must not cache an answer, nor buffer it.
_FIELDS = f"Content-Type: {MEDIA_TYPE}; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n".encode()

Encode = Callable[[InferenceResponse], Steps[list[Buffer]]]
"""Makes the JSON of an event, in chunks."""

Part = list[Buffer] | tuple[()]


class EventCall:
    """One inference, from `start` to the last event."""

    def __init__(
        self,
        server: Server,
        steps: StepQueue,
        exchange: Exchange,
        encode: Encode,
        *,
        is_decoupled: bool,
        sends_empty_final: bool = False,
        sends_errors: bool = False,
        find_fields: Callable[[Callable[[bytes], None]], None] = lambda use: use(b""),
    ) -> None:
        """`find_fields` passes on further header lines, now or later, when the answer begins.

        `sends_errors`: an error as the first answer is an event too, as in Triton's `generate_stream`. An error before
        the request is accepted is not.
        """
        self._server = server
        self._steps = steps
        self._exchange = exchange
        self._encode = encode
        self._is_decoupled = is_decoupled
        self._sends_empty_final = sends_empty_final
        self._sends_errors = sends_errors
        self._find_fields = find_fields
        self._stream: Stream | None = None
        self._session: StreamSession[InferenceResponse] = StreamSession(server)
        self._slot = self._session.open(is_ordered=False)
        self._is_waiting = False
        """For an event that is encoded in steps, or for the fields of the head."""

    def start(self, request: InferenceRequest) -> None:
        self._exchange.request_id = request.id
        self._session.started(self._slot, self._server.infer(request, self._take))
        if not self._session.is_over:
            (self._stream or self._exchange).on_gone = self._end
            self._acknowledge()

    def _take(self, response: InferenceResponse) -> None:
        self._session.put(self._slot, response, size_of(response), is_final=response.final)
        if self._session.is_over:
            return
        if response.model_version:
            (self._stream or self._exchange).version = response.model_version
        self._go_on()

    def _go_on(self) -> None:
        """Send waiting events while there is room, and let other requests run after each step."""
        session = self._session
        sent_bytes = 0
        try:
            self._acknowledge()
            while session.unsent and self._has_room() and not self._is_waiting:
                if sent_bytes > IN_STEPS_ABOVE:
                    asyncio.get_running_loop().call_soon(self._go_on)
                    break
                answer = session.take()
                sent_bytes += answer.size_bytes
                self._pass_on(answer)
        except Exception as error:  # noqa: BLE001 -- it must fail this request, not the batch that it was part of
            self._crash(error)
        if self._stream is not None:
            self._stream.hold(session.unsent_bytes)

    def _has_room(self) -> bool:
        return self._stream is None or self._stream.has_room

    def _pass_on(self, answer: StreamAnswer[InferenceResponse]) -> None:
        response = answer.content
        if response.error is not None:
            self._fail(response.error)
            return
        # An empty answer is the answer of a model that is not decoupled, and the end of a decoupled model's answers.
        is_end = response.final and response.is_empty and (self._is_decoupled or self._stream is not None)
        if is_end and not self._sends_empty_final:
            self._send(answer, ())
            return
        if answer.size_bytes <= IN_STEPS_ABOVE:
            try:
                json = run(self._encode(response))
            except InferenceError as error:
                self._fail(error)
            else:
                self._send(answer, event(json))
            return
        self._is_waiting = True
        work = self._stream or self._exchange
        self._steps.run(work, self._encode_steps(response), partial(self._encoded, answer), self._fail)

    def _encode_steps(self, response: InferenceResponse) -> Steps[list[Buffer]]:
        try:
            return (yield from self._encode(response))
        except InferenceError:
            raise
        except Exception as error:  # noqa: BLE001 -- the inference must end, whatever it was
            self._crash(error)
            return []

    def _encoded(self, answer: StreamAnswer[InferenceResponse], json: list[Buffer]) -> None:
        if self._session.is_over:
            return
        self._is_waiting = False
        self._send(answer, event(json))
        self._go_on()

    def _send(self, answer: StreamAnswer[InferenceResponse], part: Part) -> None:
        if self._stream is not None:
            self._write(self._stream, answer, part)
        else:
            self._is_waiting = True
            self._find_fields(partial(self._open, answer, part))

    def _open(self, answer: StreamAnswer[InferenceResponse], part: Part, fields: bytes) -> None:
        """Send the head with the first event."""
        if self._session.is_over:
            return
        self._is_waiting = False
        stream = self._stream = self._exchange.stream(200, _FIELDS + fields)
        stream.on_room = self._go_on
        self._write(stream, answer, part)
        self._go_on()

    def _write(self, stream: Stream, answer: StreamAnswer[InferenceResponse], part: Part) -> None:
        stream.send(part, is_last=answer.is_final)
        self._session.sent(answer, has_room=stream.has_room)
        if answer.is_final:
            self._end()

    def _acknowledge(self) -> None:
        if self._session.unacknowledged and self._has_room():
            self._session.acknowledge()

    def _fail(self, error: InferenceError) -> None:
        if self._session.is_over:
            return
        is_accepted = self._slot.ticket != 0 and not error.is_refusal
        if self._stream is None and not (self._sends_errors and is_accepted):
            respond_infer_error(self._exchange, error)
            self._end()
            return
        stream = self._stream
        if stream is None:
            stream = self._exchange.stream(HTTP_STATUS[error.code], _FIELDS + retry_fields(error))
        stream.failure = error.message or error.code.value
        stream.send(error_event(error.message), is_last=True)
        self._end()

    def _crash(self, error: Exception) -> None:
        (self._stream or self._exchange).break_off(error)
        self._end()

    def _end(self) -> None:
        """The client has disconnected, or has got the last event."""
        if self._session.is_over:
            return
        self._session.end()
        if not self._slot.has_ended:
            # Later: the server may be delivering an answer now.
            asyncio.get_running_loop().call_soon(self._session.cancel)
