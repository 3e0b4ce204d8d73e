"""Requests of the model's code to the server other than inferences: the worker's end.

Standard library and numpy only, for any CPython from 3.10 on.
"""

import threading
from typing import cast

from halimede.backends.service_calls import ResultT_co, ServiceCall, ServiceResult
from halimede.channel.process_end.channel import Channel
from halimede.core.types import InferenceError, invalid
from halimede.workers.frames.kinds import MAX_CALLS, WorkerFrame
from halimede.workers.frames.services import decode_service_result, encode_service_call, service_call_frame


class ServiceCalls:
    """The calls of this process that the server has not answered. Thread-safe."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._last = 0
        self._open: set[int] = set()
        self._results: dict[int, ServiceResult | InferenceError] = {}
        self._lock = threading.Lock()
        channel.handle(WorkerFrame.SERVICE_RESULT, self._on_result)

    def call(self, call: ServiceCall[ResultT_co]) -> ResultT_co:
        """Send a call and wait for its result. InferenceError.

        Before that, waits while MAX_CALLS calls of this process are in flight.
        """
        try:
            encoded = encode_service_call(call)
        except ValueError as error:
            raise invalid(f"{call.NAME}: {error}") from error
        channel, opened, results = self._channel, self._open, self._results
        while (number := self._try_open()) is None:
            channel.wait_for(lambda: len(opened) < MAX_CALLS)
        channel.send(service_call_frame(number, encoded))
        channel.wait_for(lambda: number in results)
        result = results.pop(number)
        if isinstance(result, InferenceError):
            raise result
        return cast("ResultT_co", result)

    def _try_open(self) -> int | None:
        """The number of the next call; None while MAX_CALLS calls are in flight."""
        with self._lock:
            if len(self._open) >= MAX_CALLS:
                return None
            self._last = number = (self._last + 1) & 0xFFFFFFFF
            self._open.add(number)
            return number

    def _on_result(self, body: memoryview) -> None:
        number, result = decode_service_result(body)
        self._results[number] = result
        self._open.discard(number)
