"""The worker's end of a channel with its frame handlers; the test acts as the server at the other end."""

import socket
import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from halimede.backends.service_calls import MetricValue
from halimede.channel.frames import HEADER, encode_frame
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.core.types import InferenceError
from halimede.workers.frames.kinds import CREDIT, KEY, WORKER_FRAMES, WorkerFrame
from halimede.workers.frames.services import decode_service_call, encode_service_result
from halimede.workers.host.requests import OpenRequest, OpenRequests
from halimede.workers.host.services import ServiceCalls

LIMIT_S = 30.0


class Server:
    """The server's end, with blocking calls."""

    def __init__(self) -> None:
        self.socket, worker_end = socket.socketpair()
        self.socket.settimeout(LIMIT_S)
        self._saying = threading.Lock()
        self.channel = Channel(worker_end.detach(), WORKER_FRAMES)
        self.memory = Memory(self.channel)
        self.requests = OpenRequests(self.channel)
        self.services = ServiceCalls(self.channel)
        self._file = self.socket.makefile("rb")

    def send(self, kind: IntEnum, body: bytes = b"") -> None:
        with self._saying:
            self.socket.sendall(encode_frame(kind, body))

    def cancel(self, key: int) -> None:
        self.send(WorkerFrame.CANCEL, KEY.pack(key))

    def credit(self, key: int, count: int) -> None:
        self.send(WorkerFrame.CREDIT, CREDIT.pack(key, count))

    def receive(self) -> tuple[IntEnum, bytes]:
        length, number = HEADER.unpack(self._file.read(HEADER.size))
        return WORKER_FRAMES[number], self._file.read(length)

    def answer_call(self, error: InferenceError | None = None) -> None:
        """Answer the next call with the number of its metric."""
        kind, body = self.receive()
        assert kind is WorkerFrame.SERVICE_CALL
        self.answer(body, error)

    def answer(self, body: bytes, error: InferenceError | None = None) -> None:
        number, call = decode_service_call(body)
        assert isinstance(call, MetricValue)
        with self._saying:
            self.socket.sendall(encode_service_result(number, error or float(call.metric)))

    def close(self) -> None:
        self._file.close()
        self.socket.close()


class Follower(threading.Thread):
    """A thread of the model, with the result of its work."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:
            self.error = error

    def ended(self) -> Any:
        self.join(LIMIT_S)
        assert not self.is_alive(), "the thread did not end"
        if self.error is not None:
            raise self.error
        return self.result


def open_request(server: Server, key: int = 1) -> OpenRequest:
    request = server.requests.open[key] = OpenRequest(begun_ns=1)
    return request
