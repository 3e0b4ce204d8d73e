"""The requests of a worker process that are executed several times: they are bounded by the seats."""

import socket
from collections.abc import Iterator

import pytest

from halimede.core.types import InferenceRequest
from halimede.workers.child.channel import Channel
from halimede.workers.child.requests import OpenRequests
from halimede.workers.worker import BatchItem


@pytest.fixture
def requests() -> Iterator[OpenRequests]:
    server, worker = socket.socketpair()
    channel = Channel(worker.detach())
    yield OpenRequests(channel)
    channel.disconnect()
    server.close()


def item(key: int, seat: int = 0) -> BatchItem:
    return BatchItem(key, InferenceRequest("m"), 1, False, seat=seat)


def test_a_request_stays_open_between_its_executions(requests: OpenRequests) -> None:
    requests.add([item(1)], begun_ns=5)
    opened = requests.open[1]
    requests.count(1, 100)
    opened.cancelled = True
    requests.keep(item(1))
    requests.add([item(1)], begun_ns=9)
    assert requests.open == {1: opened}
    assert (opened.begun_ns, opened.cancelled, opened.unacknowledged_bytes) == (9, True, 100)


def test_another_request_at_its_seat_ends_it(requests: OpenRequests) -> None:
    for key in range(1, 100):
        requests.add([item(key, seat=key % 2)], begun_ns=key)
        requests.keep(item(key, seat=key % 2))
    assert sorted(requests.open) == [98, 99]


def test_a_request_with_its_final_response_is_not_kept(requests: OpenRequests) -> None:
    requests.add([item(1)], begun_ns=5)
    del requests.open[1]
    requests.keep(item(1))
    requests.add([item(1)], begun_ns=9)
    assert requests.open[1].begun_ns == 9
