"""The worker's end of the channel, used by several threads; the test plays the server."""

import os
import random
import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest

from halimede.backends.service_calls import LoadModel, MetricValue
from halimede.channel.frames import MAX_CONTROL_BYTES, OUTBOUND, SEGMENT, ChannelFrame, encode_frame
from halimede.channel.json_frames import encode_blocks
from halimede.channel.process_end.reader import ServerGoneError
from halimede.channel.segments import make_segment
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import KEY, WINDOW_RESPONSES, WorkerFrame
from halimede.workers.host.requests import WINDOW_BYTES
from support.child_channel import Follower, Server, open_request
from support.refusals import error_of


def test_work_of_any_size_arrives_complete_and_in_order(server: Server):
    sizes = [0, 1, 100, 200_000, 3, 131_065, 131_064, 131_063, 5_000_000, 262_136, 262_137, 0, 70_000] * 3
    bodies = [random.Random(at).randbytes(size) for at, size in enumerate(sizes)]
    sending = Follower(lambda: [server.send(WorkerFrame.EXECUTE, body) for body in bodies])

    for body in bodies:
        kind, got = server.channel.receive()
        assert kind is WorkerFrame.EXECUTE
        assert got == body
        assert not got.readonly
    sending.ended()
    assert server.channel.received() is None


def test_work_may_arrive_byte_by_byte(server: Server):
    stream = (
        encode_frame(WorkerFrame.EXECUTE, b"one")
        + encode_frame(WorkerFrame.ASK_READY)
        + encode_frame(WorkerFrame.EXECUTE, b"two")
    )

    def drip() -> None:
        for at in range(len(stream)):
            server.socket.sendall(stream[at : at + 1])

    dripping = Follower(drip)

    assert [server.channel.receive() for _ in range(3)] == [
        (WorkerFrame.EXECUTE, b"one"),
        (WorkerFrame.ASK_READY, b""),
        (WorkerFrame.EXECUTE, b"two"),
    ]
    dripping.ended()


def test_later_work_does_not_change_earlier_work(server: Server):
    server.send(WorkerFrame.EXECUTE, b"first")
    _, first = server.channel.receive()
    server.send(WorkerFrame.EXECUTE, b"second")
    server.channel.receive()
    assert first == b"first"
    first[:] = b"mine!"


def test_a_segment_arrives_with_its_descriptor(server: Server):
    for number in range(1, 12):
        descriptor = make_segment(4096)
        assert descriptor is not None
        frame = encode_frame(ChannelFrame.SEGMENT, SEGMENT.pack(number, number % 2))
        # Around it, so that reads may end anywhere.
        server.send(WorkerFrame.CANCEL, KEY.pack(9))
        socket.send_fds(server.socket, [frame[:3]], [descriptor])
        server.socket.sendall(frame[3:] + encode_frame(WorkerFrame.EXECUTE, b"x" * (number * 3_000)))
        os.close(descriptor)
        server.channel.receive()

    assert server.memory.inbound.sizes() == dict.fromkeys(range(2, 12, 2), 4096)
    assert server.memory.outbound.map.sizes() == dict.fromkeys(range(1, 12, 2), 4096)


def test_many_descriptors_arrive_with_one_frame(server: Server):
    """Those of a front-end process: the log, the page and all listening sockets."""
    descriptors = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    socket.send_fds(server.socket, [encode_frame(ChannelFrame.START)], descriptors)
    server.channel.receive()
    arrived = [server.channel.take_descriptor() for _ in descriptors]
    for each in descriptors + [each for each in arrived if each is not None]:
        os.close(each)

    assert None not in arrived


def test_a_cancel_is_seen_while_the_main_thread_executes(server: Server):
    open_request(server)
    assert not server.requests.is_cancelled(1)
    server.cancel(1)
    assert server.requests.is_cancelled(1)
    assert server.requests.is_cancelled(2), "what is over needs no answer"


def test_a_cancel_that_arrives_with_its_batch_is_kept(server: Server):
    server.socket.sendall(encode_frame(WorkerFrame.EXECUTE, b"batch") + encode_frame(WorkerFrame.CANCEL, KEY.pack(5)))
    server.channel.receive()
    assert 5 in server.requests.cancelled_early


def test_cancels_of_ended_requests_are_not_kept_forever(server: Server):
    sending = Follower(lambda: [server.cancel(key) for key in range(5_000)] and server.send(WorkerFrame.EXECUTE))
    server.channel.receive()
    sending.ended()
    assert len(server.requests.cancelled_early) <= 1024


@pytest.mark.parametrize("is_receiving", [True, False], ids=["the main thread receives", "the main thread executes"])
def test_a_thread_waits_for_credit(server: Server, is_receiving: bool):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)
    receiving = Follower(server.channel.receive) if is_receiving else None
    waiting = Follower(lambda: server.requests.wait_for_room(1))
    waiting.join(0.05)
    assert waiting.is_alive(), "nothing came yet"

    server.credit(1, 1)

    assert waiting.ended() is True
    if receiving is not None:
        server.send(WorkerFrame.EXECUTE, b"work")
        assert receiving.ended() == (WorkerFrame.EXECUTE, b"work")


def test_work_that_a_waiting_thread_reads_reaches_the_main_thread(server: Server):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)
    waiting = Follower(lambda: server.requests.wait_for_room(1))
    receiving = Follower(server.channel.receive)

    for at in range(200):
        server.send(WorkerFrame.EXECUTE, b"%d" % at)
        assert receiving.ended() == (WorkerFrame.EXECUTE, b"%d" % at)
        receiving = Follower(server.channel.receive)

    server.credit(1, 5)
    assert waiting.ended() is True
    server.send(ChannelFrame.STOP)
    receiving.ended()


def test_the_window_limits_answers_and_bytes(server: Server):
    request = open_request(server)
    for _ in range(WINDOW_RESPONSES - 1):
        server.requests.count(1, 0)
    assert not request.is_full()
    server.requests.count(1, 0)
    assert request.is_full()

    by_bytes = open_request(server, 2)
    assert server.requests.wait_for_room(2)
    server.requests.count(2, WINDOW_BYTES * 10)
    assert by_bytes.is_full(), "one goes always, then not another"
    server.credit(2, 1)
    assert server.requests.wait_for_room(2)
    assert by_bytes.unacknowledged_bytes == 0
    server.requests.count(2, WINDOW_BYTES - 1)
    assert not by_bytes.is_full()
    server.requests.count(2, 1)
    assert by_bytes.is_full()
    server.credit(2, 1_000)
    assert server.requests.wait_for_room(2)


def test_a_cancel_wakes_threads_that_wait_to_send(server: Server):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)
    waiting = [Follower(lambda: server.requests.wait_for_room(1)) for _ in range(4)]

    server.cancel(1)

    assert [each.ended() for each in waiting] == [False] * 4
    assert server.requests.wait_for_room(1) is False


def test_ended_requests_cannot_send_answers(server: Server):
    assert server.requests.wait_for_room(7) is False
    server.requests.count(7, 10)


def test_each_thread_gets_the_result_of_its_own_call(server: Server):
    def calls(first: int) -> list[Any]:
        return [server.services.call(MetricValue(first + at)) for at in range(50)]

    threads = [Follower(lambda first=first: calls(first)) for first in range(0, 400, 50)]
    for _ in range(400):
        server.answer_call()

    for at, thread in enumerate(threads):
        assert thread.ended() == [at * 50 + n for n in range(50)]


def test_a_refused_call_raises_the_servers_error(server: Server):
    refusal = InferenceError(ErrorCode.NOT_FOUND, "no such model")
    answering = Follower(lambda: server.answer_call(refusal))

    error = error_of(server.services.call, MetricValue(1))

    answering.ended()
    assert error == InferenceError(ErrorCode.NOT_FOUND, "no such model")


def test_a_call_that_is_too_large_is_the_models_error(server: Server):
    error = error_of(server.services.call, LoadModel("m", "", {"f": bytes(MAX_CONTROL_BYTES + 1)}))

    assert error.code is ErrorCode.INVALID_ARG
    assert "at most 16777216 are taken" in error.message


def test_unused_blocks_are_reported(server: Server):
    descriptor = make_segment(4096)
    assert descriptor is not None
    socket.send_fds(server.socket, [encode_frame(ChannelFrame.SEGMENT, SEGMENT.pack(1, OUTBOUND))], [descriptor])
    os.close(descriptor)
    server.send(WorkerFrame.EXECUTE)
    server.channel.receive()
    free_bytes = server.memory.outbound.blocks.free_bytes
    block = server.memory.store(bytes(100))
    assert block is not None
    assert server.memory.outbound.blocks.free_bytes < free_bytes

    server.socket.sendall(encode_blocks(ChannelFrame.RELEASE, [block]))
    server.send(ChannelFrame.STOP)
    server.channel.receive()

    assert server.memory.outbound.blocks.free_bytes == free_bytes


WAYS: dict[str, Callable[[Server], Any]] = {
    "receive": lambda server: server.channel.receive(),
    "is_cancelled": lambda server: server.requests.is_cancelled(1),
    "poll": lambda server: server.channel.poll(),
    "wait_for_room": lambda server: server.requests.wait_for_room(1),
    "call": lambda server: server.services.call(MetricValue(1)),
    "send": lambda server: [server.channel.send(bytes(1 << 20)) for _ in range(10)],
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("frame", [b"", struct.pack("<II", 1 << 20, 2) + bytes(1_000)], ids=["between", "in a frame"])
def test_every_method_raises_once_the_server_has_closed_the_channel(
    server: Server, way: Callable[[Server], Any], frame: bytes
):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)
    server.socket.sendall(frame)
    server.close()

    with pytest.raises(ServerGoneError):
        way(server)


def test_waiting_threads_raise_once_the_server_has_closed_the_channel(server: Server):
    open_request(server)
    for _ in range(WINDOW_RESPONSES):
        server.requests.count(1, 10)
    channel = server.channel
    works: list[Callable[[], Any]] = [
        channel.receive,
        lambda: server.requests.wait_for_room(1),
        lambda: server.requests.wait_for_room(1),
        lambda: server.services.call(MetricValue(1)),
    ]
    threads = [Follower(work) for work in works]
    server.receive()

    server.socket.shutdown(socket.SHUT_RDWR)

    for thread in threads:
        with pytest.raises(ServerGoneError):
            thread.ended()
