"""The requests of a worker process that are executed several times: they are bounded by the sequence slots."""

import socket
from collections.abc import Iterator

import pytest

from halimede.channel.process_end.channel import Channel
from halimede.core.types import InferenceRequest
from halimede.workers.frames.kinds import KEY, WORKER_FRAMES, WorkerFrame
from halimede.workers.host.requests import OpenRequests
from halimede.workers.worker import BatchItem
from support.child_channel import Server


@pytest.fixture
def requests() -> Iterator[OpenRequests]:
    server, worker = socket.socketpair()
    channel = Channel(worker.detach(), WORKER_FRAMES)
    yield OpenRequests(channel)
    channel.disconnect()
    server.close()


def item(key: int, sequence_slot: int = 0) -> BatchItem:
    return BatchItem(key, InferenceRequest("m"), 1, False, sequence_slot=sequence_slot)


def test_a_request_stays_open_between_its_executions(requests: OpenRequests) -> None:
    requests.add([item(1)], begun_ns=5)
    opened = requests.open[1]
    requests.count(1, 100)
    opened.cancelled = True
    requests.keep(item(1))
    requests.add([item(1)], begun_ns=9)
    assert requests.open == {1: opened}
    assert (opened.begun_ns, opened.cancelled, opened.unacknowledged_bytes) == (9, True, 100)


@pytest.mark.parametrize("is_early", [False, True])
def test_answers_are_sent_while_the_client_of_a_cancelled_request_reads_on(server: Server, is_early: bool) -> None:
    requests = server.requests
    if not is_early:
        requests.add([item(1)], begun_ns=5)
    server.send(WorkerFrame.ASK_CANCEL, KEY.pack(1))
    server.channel.poll()
    requests.add([item(1)] if is_early else [], begun_ns=5)
    assert (requests.is_cancelled(1), requests.wait_for_room(1)) == (True, True)
    server.cancel(1)
    server.send(WorkerFrame.ASK_CANCEL, KEY.pack(1))
    server.channel.poll()
    assert (requests.is_cancelled(1), requests.wait_for_room(1)) == (True, False)


def test_another_request_at_its_slot_ends_it(requests: OpenRequests) -> None:
    for key in range(1, 100):
        requests.add([item(key, sequence_slot=key % 2)], begun_ns=key)
        requests.keep(item(key, sequence_slot=key % 2))
    assert sorted(requests.open) == [98, 99]


def test_a_request_with_its_final_response_is_not_kept(requests: OpenRequests) -> None:
    requests.add([item(1)], begun_ns=5)
    del requests.open[1]
    requests.keep(item(1))
    requests.add([item(1)], begun_ns=9)
    assert requests.open[1].begun_ns == 9
