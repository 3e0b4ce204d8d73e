"""The worker's end of the channel, read by an event loop or by several threads at once."""

import asyncio
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any

import pytest

from halimede.backends.service_calls import MetricValue
from halimede.channel.frames import ChannelFrame, encode_frame
from halimede.channel.process_end.reader import ServerGoneError
from halimede.workers.frames.kinds import CREDIT, WINDOW_RESPONSES, WorkerFrame
from support.child_channel import LIMIT_S, Follower, Server, open_request


def on_loop(
    server: Server, work: Callable[[asyncio.AbstractEventLoop], Any], until: IntEnum = ChannelFrame.STOP
) -> list[bytes]:
    """The work that arrives until STOP, while `work` runs on another thread."""
    taken: list[bytes] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def on_work() -> None:
            while (received := server.channel.received()) is not None:
                kind, body = received
                if kind is until:
                    stopped.set()
                else:
                    taken.append(bytes(body))

        server.channel.read_on_loop(loop, on_work)
        other = Follower(lambda: work(loop))
        await asyncio.wait_for(stopped.wait(), LIMIT_S)
        await asyncio.to_thread(other.ended)

    asyncio.run(main())
    return taken


def test_a_loop_gets_its_work(server: Server):
    def work(_: Any) -> None:
        for at in range(300):
            server.send(WorkerFrame.EXECUTE, b"%d" % at)
        server.send(ChannelFrame.STOP)

    assert on_loop(server, work) == [b"%d" % at for at in range(300)]


def test_threads_wait_call_and_read_while_a_loop_runs(server: Server):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)

    def work(_: Any) -> None:
        waiting = Follower(lambda: server.requests.wait_for_room(1))
        calling = [Follower(lambda at=at: server.services.call(MetricValue(at))) for at in range(5)]
        for at in range(5):
            server.answer_call()
            server.send(WorkerFrame.EXECUTE, b"%d" % at)
        server.credit(1, 3)
        assert waiting.ended() is True
        assert [each.ended() for each in calling] == list(range(5))
        server.send(ChannelFrame.STOP)

    assert on_loop(server, work) == [b"%d" % at for at in range(5)]


def test_a_thread_is_served_while_the_loop_is_blocked(server: Server):
    """A coroutine that blocks its loop while it waits for a thread still ends."""

    def work(loop: asyncio.AbstractEventLoop) -> None:
        held, let_go = threading.Event(), threading.Event()
        loop.call_soon_threadsafe(lambda: (held.set(), let_go.wait(LIMIT_S)))
        assert held.wait(LIMIT_S)
        calling = Follower(lambda: server.services.call(MetricValue(1)))
        server.answer_call()
        assert calling.ended() == 1
        let_go.set()
        server.send(ChannelFrame.STOP)

    on_loop(server, work)


def test_a_loop_gets_stop_when_the_server_closes_the_channel(server: Server):
    def work(_: Any) -> None:
        waiting = Follower(lambda: server.services.call(MetricValue(1)))
        server.receive()
        server.socket.shutdown(socket.SHUT_RDWR)
        with pytest.raises(ServerGoneError):
            waiting.ended()

    began = time.thread_time()
    on_loop(server, work)
    assert time.thread_time() - began < 1, "a closed socket is always readable: the loop must not turn and turn"


def test_threads_may_call_when_the_loop_has_ended(server: Server):
    on_loop(server, lambda _: server.send(ChannelFrame.STOP))
    calling = Follower(lambda: server.services.call(MetricValue(1)))
    server.send(WorkerFrame.EXECUTE, b"late")
    server.answer_call()
    assert calling.ended() == 1


@pytest.fixture
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("quick_switches")
def test_concurrent_counts_and_credits_add_up(server: Server):
    request = open_request(server)
    paid = encode_frame(WorkerFrame.CREDIT, CREDIT.pack(1, 20)) * 50

    def count() -> None:
        for _ in range(50_000):
            server.requests.count(1, 1)

    counting = Follower(count)
    while counting.is_alive():
        server.socket.sendall(paid)
        server.channel.poll()
    counting.ended()

    assert request.unacknowledged_bytes == len(request.unacknowledged or ())


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("seed", range(3))
def test_eight_threads_and_random_frames_lose_nothing(server: Server, seed: int):
    """Threads that send within a window, call, or poll, while the main thread receives and executes."""
    chance = random.Random(seed)
    keys = (1, 2, 3, 4)
    responses, calls, batches = 300, 100, 300
    channel = server.channel
    requests = {key: open_request(server, key) for key in keys}

    def respond(key: int) -> int:
        for at in range(responses):
            assert server.requests.wait_for_room(key)
            size = at * 37 % 1_000
            server.requests.count(key, size)
            channel.send(
                [
                    encode_frame(WorkerFrame.METRICS, b""),
                    encode_frame(WorkerFrame.RESPONSE, struct.pack("<QI", key, size)),
                ]
            )
        return responses

    def call(first: int) -> list[Any]:
        return [server.services.call(MetricValue(first + at)) for at in range(calls)]

    def look() -> int:
        for _ in range(1_000):
            assert not server.requests.is_cancelled(1)
        return 0

    threads = [Follower(lambda key=key: respond(key)) for key in keys]
    threads += [Follower(lambda first=first: call(first)) for first in (1_000, 2_000, 3_000)]
    threads += [Follower(look)]

    def receive() -> list[bytes]:
        got = []
        while (work := channel.receive())[0] is WorkerFrame.EXECUTE:
            got.append(bytes(work[1]))
            if len(got) % 7 == 0:
                time.sleep(0.0005)  # it executes
        return got

    receiving = Follower(receive)
    bodies = [chance.randbytes(chance.choice([0, 10, 1_000, 100_000, 400_000])) for _ in range(batches)]
    feeding = Follower(lambda: [server.send(WorkerFrame.EXECUTE, body) for body in bodies])

    sent = dict.fromkeys(keys, 0)
    unpaid = dict.fromkeys(keys, 0)
    answered = 0
    while answered < 3 * calls or sum(sent.values()) < responses * len(keys):
        kind, body = server.receive()
        if kind is WorkerFrame.RESPONSE:
            key, _ = struct.unpack("<QI", body)
            sent[key] += 1
            unpaid[key] += 1
            assert unpaid[key] <= WINDOW_RESPONSES
            if chance.random() < 0.3 or unpaid[key] == WINDOW_RESPONSES:
                server.credit(key, unpaid[key])
                unpaid[key] = 0
        elif kind is WorkerFrame.SERVICE_CALL:
            server.answer(body)
            answered += 1
    for key in keys:
        server.credit(key, unpaid[key])
    feeding.ended()
    server.send(ChannelFrame.STOP)

    assert receiving.ended() == bodies
    results = [thread.ended() for thread in threads]
    assert results[4:7] == [[first + at for at in range(calls)] for first in (1_000, 2_000, 3_000)]
    assert sent == dict.fromkeys(keys, responses)
    for request in requests.values():
        assert (len(request.unacknowledged or ()), request.unacknowledged_bytes) == (0, 0), "no byte is counted wrong"
