"""A front-end process's end of the channel, before a core that the test plays."""

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from halimede.channel.frames import HEADER
from halimede.channel.process_end.channel import Channel
from halimede.channel.process_end.memory import Memory
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceError, InferenceRequest, InferenceResponse, ServerMetadata
from halimede.front_processes.asks import MODEL, AnyQuestion, decode_ask, encode_told
from halimede.front_processes.core_life import CoreLife
from halimede.front_processes.frames import ANSWERS, FRONT_FRAMES, INFERS, FrontFrame
from halimede.front_processes.groups import decode_infers
from halimede.front_processes.page import Page
from halimede.front_processes.remote import RemoteServer
from support.loop_thread import LoopThread

LIMIT_SECS = 2.0


def view(name: str, version: str = "1") -> ModelView:
    return ModelView(name, version, (version,), ModelConfig(name=name), {})


@dataclass
class PlayedCore:
    """`server` is the front end's, on a loop in a thread. The core reads when the test calls `frames`."""

    thread: LoopThread
    page: Page = field(init=False)
    life: CoreLife = field(init=False)
    server: RemoteServer = field(init=False)

    def __post_init__(self) -> None:
        descriptor = Page.create(1)
        self.page = Page(descriptor, 1)
        os.close(descriptor)
        self.life = CoreLife(self.page, LIMIT_SECS)
        self._socket, front_end = socket.socketpair()
        self._socket.settimeout(20)
        self._unread = bytearray()
        self._channel = Channel(front_end.detach(), FRONT_FRAMES)
        self.thread.call(self._start)

    def _start(self) -> None:
        loop = self.thread.loop
        memory = Memory(self._channel)
        self.server = RemoteServer(self._channel, memory, self.page, self.life, ServerMetadata("", "", ()), loop)
        self._channel.read_on_loop(loop, self._take)

    def _take(self) -> None:
        while (work := self._channel.received()) is not None:
            kind, body = work
            if kind == ANSWERS:
                self.server.on_answers(body)

    def close(self) -> None:
        self._socket.close()
        self.thread.stop()
        self._channel.disconnect()

    def frame(self) -> tuple[IntEnum, memoryview]:
        """The next frame of the front end."""
        body = memoryview(self._read(HEADER.size))
        length, kind = HEADER.unpack(body)
        return FRONT_FRAMES[kind], memoryview(self._read(length))

    def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            self._unread += self._socket.recv(1 << 16)
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    def asked(self) -> tuple[int, AnyQuestion, tuple[Any, ...]]:
        """The next frame, which is an ASK: its number, the question and its arguments."""
        kind, body = self.frame()
        assert kind is FrontFrame.ASK
        return decode_ask(body)

    def requests(self) -> list[InferenceRequest]:
        """The requests of the next frame."""
        kind, body = self.frame()
        assert kind == INFERS
        return self.decoded(body)

    def decoded(self, body: memoryview) -> list[InferenceRequest]:
        """The requests of an INFERS frame."""
        return [request for _, request in decode_infers(body, lambda *_: memoryview(b""))]

    def tell(self, number: int, answer: ModelView | InferenceError) -> None:
        """Answer a question for a model, or fail any other."""
        self._socket.sendall(encode_told(number, MODEL, answer))

    def infer(self, request: InferenceRequest, on_response: Callable[[InferenceResponse], None]) -> int:
        ticket: int = self.thread.call(lambda: self.server.infer(request, on_response))
        return ticket
