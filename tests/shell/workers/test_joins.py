"""Who waits for whose work, with real threads: the one that works waits for the test in the midst of it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Executor, ThreadPoolExecutor, as_completed, wait
from typing import Any

import pytest

from halimede.workers.child.joins import waits_for

LIMIT_S = 20


class Work:
    """Something to do, on whichever thread, that takes until the test lets it end."""

    def __init__(self) -> None:
        self.thread = 0
        self.begun = threading.Event()
        self.may_end = threading.Event()

    def __call__(self, *_: object) -> None:
        self.thread = threading.get_ident()
        self.begun.set()
        assert self.may_end.wait(LIMIT_S)


def join(work: Work, _: Executor) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class Subclass(threading.Thread):
    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)


def join_of_a_subclass(work: Work, _: Executor) -> None:
    thread = Subclass(target=work)
    thread.start()
    thread.join()


def join_through_another(work: Work, pool: Executor) -> None:
    def join_then() -> None:
        join(work, pool)

    thread = threading.Thread(target=join_then)
    thread.start()
    thread.join()


def leave_executor(work: Work, _: Executor) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work)


WAITS: dict[str, Callable[[Work, Executor], Any]] = {
    "join": join,
    "join of a subclass": join_of_a_subclass,
    "join through another": join_through_another,
    "result": lambda work, pool: pool.submit(work).result(),
    "exception": lambda work, pool: pool.submit(work).exception(),
    "map": lambda work, pool: list(pool.map(work, [1])),
    "wait": lambda work, pool: wait([pool.submit(work)]),
    "as_completed": lambda work, pool: list(as_completed([pool.submit(work)])),
    "leave executor": leave_executor,
}


def join_for_a_time(work: Work, _: Executor) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(LIMIT_S)


def be_told(work: Work, _: Executor) -> None:
    told = threading.Event()
    threading.Thread(target=lambda: (work(), told.set())).start()
    told.wait()


ENDS_OTHERWISE: dict[str, Callable[[Work, Executor], Any]] = {
    "join for a time": join_for_a_time,
    "result in a time": lambda work, pool: pool.submit(work).result(LIMIT_S),
    "the first of several": lambda work, pool: wait([pool.submit(work)], return_when=FIRST_COMPLETED),
    "an event that somebody sets": be_told,
}


def seen(way: Callable[[Work, Executor], Any], for_secs: float) -> bool:
    """Whether a thread that does it is ever seen to wait for the work."""
    work = Work()
    with ThreadPoolExecutor(2) as pool:
        waiting = threading.Thread(target=way, args=(work, pool))
        waiting.start()
        try:
            assert work.begun.wait(LIMIT_S)
            until = time.monotonic() + for_secs
            found = False
            while not found and time.monotonic() < until:
                found = waits_for(waiting.ident or 0, work.thread)
                assert not waits_for(work.thread, waiting.ident or 0)
                time.sleep(0.005)
        finally:
            work.may_end.set()
            waiting.join()
    assert not waits_for(waiting.ident or 0, work.thread)
    return found


@pytest.mark.parametrize("way", WAITS)
def test_a_wait_that_only_the_others_end_ends_is_seen(way: str):
    assert seen(WAITS[way], LIMIT_S)


@pytest.mark.parametrize("way", ENDS_OTHERWISE)
def test_a_wait_that_may_end_otherwise_is_none(way: str):
    assert not seen(ENDS_OTHERWISE[way], 0.3)
