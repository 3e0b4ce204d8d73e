"""The responses of one model version's requests, made from the events of its workers.

The end of a batch answers most requests. A request becomes open if its worker sends a response separately from the end
of the batch, or if the batch ends without a response to it. It stays open until its final response. A model may take
any time for that, so an open request whose client has disconnected is finished as soon as its batch is over.
"""

from halimede.core.config.check_request import RequestChecker
from halimede.core.types import ErrorCode, InferenceError, InferenceResponse, internal
from halimede.core.types.caller import Computed
from halimede.core.types.statistics import FailureReason, ResponseOutcome
from halimede.runtime.batches import RunningBatches
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.requests import CANCELLED, LOST_STATE, InFlight, Open, Sent, VersionRequests
from halimede.workers.worker import BatchDone, ResponseSent


class BatchAnswers:
    __slots__ = ("_batches", "_checker", "_has_null_rows", "_requests", "_reshapes")

    def __init__(
        self, requests: VersionRequests, batches: RunningBatches, checker: RequestChecker, *, has_null_rows: bool
    ) -> None:
        """`has_null_rows` as that of the scheduler."""
        self._requests = requests
        self._batches = batches
        self._checker = checker
        self._reshapes = checker.reshapes_outputs
        self._has_null_rows = has_null_rows

    def on_batch_end(self, done: BatchDone) -> None:
        """Answer the requests of a batch that ends, and count the execution."""
        times, requests = done.times, self._requests
        computed = Computed(
            times.input_end - times.start, times.output_start - times.input_end, times.end - times.output_start
        )
        rows = 0
        for at, (item, reply) in enumerate(zip(done.items, done.replies, strict=True)):
            rows += item.rows
            flight = requests.find(item.key)
            if flight is None:
                continue
            if not isinstance(reply, list) or flight.opened is not None:
                self._answer_otherwise(flight, at, done, computed)
                continue
            if self._reshapes:
                try:
                    self._checker.reshape_outputs(reply, flight.rows)
                except InferenceError as error:
                    self._fail_executed(flight, error, computed)
                    continue
            response = InferenceResponse(requests.name, requests.version, flight.request.id, reply, {}, None, True)
            if done.parameters and at in done.parameters:
                response.parameters = dict(done.parameters[at])
            requests.finish(flight, response, computed, max(0, times.start - flight.queued_ns))
        if not done.failed:
            if self._has_null_rows:
                # The items are in the order of their sequence slots. A null row is as large as the first of them.
                rows += (done.items[-1].sequence_slot + 1 - len(done.items)) * done.items[0].rows
            requests.stats.record_execution(rows, computed.input_ns, computed.infer_ns, computed.output_ns)

    def is_open(self, response: ResponseSent) -> bool:
        """Whether this worker has the request open."""
        flight = self._requests.find(response.key)
        return flight is not None and flight.opened is not None and flight.opened.worker is response.worker

    def on_response(self, response: ResponseSent) -> None:
        """Handle a response that is separate from the end of its batch. Ignored if another worker has the request."""
        flight = self._requests.find(response.key)
        if flight is None:
            return
        opened = flight.opened
        if opened is None:
            found = self._batches.find(response.key)
            if found is None or found[0].instance != response.worker.ordinal:
                return
            opened = flight.opened = Open(response.worker, found[1][0].key, Sent(response.times.input_end))
        if opened.worker is not response.worker or (flight.cancelled and not response.final):
            return
        self._pass_on(flight, opened.sent, response)

    def abandon(self, flight: InFlight) -> None:
        """Finish an open request whose client has disconnected, if its batch is over. Its model may never finish it."""
        opened = flight.opened
        if opened is None or not opened.batch_is_over:
            return
        waited_ns = max(0, monotonic_ns() - opened.sent.last_ns)
        response = self._requests.failure(flight, CANCELLED)
        self._requests.record_response(flight, opened.sent, response, waited_ns, 0)
        self._requests.finish(flight, response, None, reason=FailureReason.CANCELED)

    def _answer_otherwise(self, flight: InFlight, at: int, done: BatchDone, computed: Computed) -> None:
        """Answer a request with an error, or leave it to its later responses."""
        reply = done.replies[at]
        if reply is None and at in done.again and not flight.cancelled:
            return  # it is queued, or runs already
        if isinstance(reply, InferenceError) and flight.opened is None:
            self._fail_executed(flight, reply, computed)
        else:
            self._end_open(flight, at, done)

    def _fail_executed(self, flight: InFlight, error: InferenceError, computed: Computed) -> None:
        """Answer a request with an error that is its first and only response."""
        response = self._requests.failure(flight, error)
        self._requests.record_response(flight, Sent(0), response, computed.infer_ns, computed.output_ns)
        is_cancelled = error.code is ErrorCode.CANCELLED
        reason = FailureReason.CANCELED if is_cancelled else FailureReason.BACKEND
        self._requests.finish(flight, response, None, reason=reason)

    def _end_open(self, flight: InFlight, at: int, done: BatchDone) -> None:
        """Handle the end of the batch in which the request was number `at`. The request is open, or becomes open."""
        opened = flight.opened
        if opened is None:
            opened = flight.opened = Open(done.worker, done.items[0].key, Sent(done.times.input_end))
        reply = done.replies[at]
        if reply is not None:
            parameters = done.parameters.get(at, {})
            self._pass_on(
                flight, opened.sent, ResponseSent(done.worker, flight.key, reply, True, done.times, parameters)
            )
            return
        opened.batch_is_over = True
        if flight.cancelled:
            self.abandon(flight)

    def _pass_on(self, flight: InFlight, sent: Sent, made: ResponseSent) -> None:
        """Count a response and send it to the client."""
        requests, times = self._requests, made.times
        response = self._response(flight, sent, made)
        since = max(times.input_end, sent.last_ns)
        output_start = max(times.output_start, since)
        outcome = requests.record_response(flight, sent, response, output_start - since, times.end - output_start)
        # Not the time of arrival: the model computes the next response while this one is in transit.
        sent.last_ns = output_start
        if not made.final:
            requests.send(flight, response)
        elif sent.has_failed:
            is_cancelled = outcome is ResponseOutcome.CANCEL
            reason = FailureReason.CANCELED if is_cancelled else FailureReason.BACKEND
            requests.finish(flight, response, None, reason=reason)
        else:
            computed = Computed(
                times.input_end - times.start, times.output_start - times.input_end, times.end - times.output_start
            )
            requests.finish(flight, response, computed, max(0, times.start - flight.queued_ns))

    def _response(self, flight: InFlight, sent: Sent, made: ResponseSent) -> InferenceResponse:
        """The response for the client: an error if the model's response is invalid."""
        requests, reply = self._requests, made.reply
        if reply is None and not sent.count and not requests.stats.decoupled:
            reply = internal("expected a single response, got 0")
        if flight.cancelled and requests.stats.decoupled and not isinstance(reply, InferenceError):
            # Responses before this one were not sent to the client: the answer is incomplete.
            reply = CANCELLED
        if isinstance(reply, list):
            try:
                self._checker.reshape_outputs(reply, flight.rows)
            except InferenceError as error:
                reply = error
        if isinstance(reply, InferenceError):
            if flight.opened is not None and flight.opened.has_lost_state:
                reply = InferenceError(reply.code, reply.message + LOST_STATE)
            return requests.failure(flight, reply, final=made.final)
        return InferenceResponse(
            requests.name, requests.version, flight.request.id, reply or [], dict(made.parameters), final=made.final
        )
