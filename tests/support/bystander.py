"""A well-behaved client of a server under attack: what it must not feel."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import grpc

from support.grpc_messages import message
from support.h2client import INFER
from support.latency import LOOSE_MS
from support.processes import forget_peak, peak_bytes, resident_bytes
from support.server import RunningServer, wait_until

ALONE_CALLS = 10
"""Calls before the attack, to compare with."""
AFTER_CALLS = 10
"""Calls that begin after it."""
PAUSE_S = 0.005
CALL_LIMIT_S = 20
PEAK_BYTES = 96 << 20
LEFT_BYTES = 32 << 20
"""More memory during the attack, and after it."""


class Bystander:
    """Calls a model of `add_identity` over gRPC, one call after the other on one connection, without retries."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._request = message(model).SerializeToString()
        self._is_over = threading.Event()
        self._changed = threading.Condition()
        self._latencies_ms: list[float] = []
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def latencies_ms(self, more_calls: int) -> list[float]:
        """Those since the last time, after as many further calls at least."""
        with self._changed:
            enough = len(self._latencies_ms) + more_calls
            assert self._changed.wait_for(lambda: self.failures or len(self._latencies_ms) >= enough, 60)
            taken, self._latencies_ms = self._latencies_ms, []
        return taken

    def _run(self) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        with grpc.insecure_channel(self._url, options) as channel:
            infer = channel.unary_unary(INFER)
            while not self._is_over.wait(PAUSE_S):
                begun = time.perf_counter()
                failure = ""
                try:
                    infer(self._request, timeout=CALL_LIMIT_S)
                except grpc.RpcError as error:
                    failure = str(error)
                with self._changed:
                    if failure:
                        self.failures.append(failure)
                    self._latencies_ms.append((time.perf_counter() - begun) * 1000)
                    self._changed.notify_all()


@contextmanager
def undisturbed(server: RunningServer, model: str) -> Iterator[None]:
    """Whatever happens within, another client's calls all succeed, about as fast as alone; and the server's memory stays
    within a bound, and returns."""
    with Bystander(server.grpc_url, model) as other:
        alone_ms = _p99(other.latencies_ms(ALONE_CALLS))
        before = resident_bytes(server)
        forget_peak(server)
        yield
        attacked_ms = _p99(other.latencies_ms(AFTER_CALLS))
    assert other.failures == []
    assert attacked_ms <= 2 * alone_ms + LOOSE_MS, (alone_ms, attacked_ms)
    assert peak_bytes(server) <= before + PEAK_BYTES, (peak_bytes(server), before)
    wait_until(lambda: resident_bytes(server) <= before + LEFT_BYTES, "the memory to return", server, 10)


def _p99(latencies_ms: list[float]) -> float:
    return sorted(latencies_ms)[len(latencies_ms) * 99 // 100]
