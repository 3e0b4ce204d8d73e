"""The functions that a worker process offers to the model's code.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import time
from collections.abc import Sequence

from halimede.backends.hosting import Answer, HostedRequest, Reply, WorkerSpec
from halimede.backends.service_calls import ResultT_co, ServiceCall
from halimede.channel.frames import ChannelFrame, encode_frame
from halimede.channel.json_frames import encode_blocks
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.core.types import InferenceRequest
from halimede.workers.frames.answers import encode_response
from halimede.workers.frames.kinds import LOG_LEVELS, MAX_LINE_BYTES, METRIC, METRIC_OPERATIONS, ORIGIN_END, WorkerFrame
from halimede.workers.host.calls import Calls, InferenceCall
from halimede.workers.host.requests import OpenRequests
from halimede.workers.host.services import ServiceCalls
from halimede.workers.host.states import States

LINES_PER_SECOND = 500
"""Maximum log lines that are sent in a second, so that a model that logs more does not slow the server down."""


class WorkerHost:
    """The `Host` of the model's code."""

    def __init__(self, channel: Channel, memory: Memory, spec: WorkerSpec, outputs: Sequence[str]) -> None:
        self._channel = channel
        self._memory = memory
        self.requests = OpenRequests(channel)
        self._services = ServiceCalls(channel)
        self.states = States(channel, self._services)
        self._model = spec.model
        self._verbose = spec.log_verbose > 0
        self._positions = {name: position for position, name in enumerate(outputs)}
        self._lines_since = 0.0
        self._lines = 0
        self.calls = Calls(channel, memory.store, memory.view_retained, memory.take_wanted)
        self.ending = ""
        """Why the process has to end after its batch, "" if it does not."""

    def is_cancelled(self, request: HostedRequest) -> bool:
        return self.requests.is_cancelled(request.key)

    def respond(self, request: HostedRequest, reply: Reply, final: bool) -> None:
        requests, key = self.requests, request.key
        opened = requests.open.get(key)
        if opened is None:
            return
        if not final and not requests.wait_for_room(key):
            return
        times = opened.begun_ns, time.monotonic_ns()
        response = encode_response(key, reply, final, times, self._positions, self._memory.store)
        if final:
            requests.open.pop(key, None)
        else:
            # Before it is sent: the client may acknowledge it before this thread runs again.
            requests.count(key, sum(map(len, (t.data for t in reply.outputs))) if isinstance(reply, Answer) else 0)
        self._channel.send(response)
        self.give_back()

    def log(self, level: str, message: str, origin: str = "") -> None:
        if level == "VERBOSE" and not self._verbose:
            return
        now = time.monotonic()
        if now - self._lines_since > 1:
            left_out = self._lines - LINES_PER_SECOND
            self._lines_since, self._lines = now, 0
            if left_out > 0:
                text = f"{left_out} lines of its log were left out: at most {LINES_PER_SECOND} are taken in a second"
                self._send_line("WARNING", text)
        self._lines += 1
        if self._lines > LINES_PER_SECOND:
            return
        self._send_line(level, message, origin)

    def _send_line(self, level: str, message: str, origin: str = "") -> None:
        if origin:
            message = f"{origin}{ORIGIN_END}{message}"
        text = message.encode("utf-8", "replace")[:MAX_LINE_BYTES]
        self._channel.send(encode_frame(WorkerFrame.LOG, bytes((LOG_LEVELS.index(level),)) + text))

    def end(self, why: str) -> None:
        self.ending = why

    def call(self, call: ServiceCall[ResultT_co]) -> ResultT_co:
        self.give_back()
        return self._services.call(call)

    def infer(self, request: InferenceRequest) -> InferenceCall:
        call = self.calls.infer(request)
        # After sending, so that the server works at the same time.
        if self._memory.inbound.released:
            self.give_back()
        return call

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        # Sent at once, because a batch may run for minutes. The page shows it before the batch's answers.
        packed = METRIC.pack(metric, METRIC_OPERATIONS.index(operation), value)
        self._channel.send(encode_frame(WorkerFrame.METRICS, packed))

    def give_back(self) -> None:
        """Report unused blocks to the server."""
        if self._memory.inbound.released:
            with self._memory.reporting:
                if unused := self._memory.unused():
                    self._channel.send(encode_blocks(ChannelFrame.UNUSED, unused))
