"""Whether one thread waits for what another one does, as their stacks tell: for its end, or for a future it works on.

What is seen is what has no end of its own: `Thread.join`, `Future.result` and `exception`, `concurrent.futures.wait`
for all and `as_completed`, without a timeout; so also `Executor.map`, and an executor that is shut down. An event, a
queue or a lock tells nobody who will set, fill or release it.
"""

import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, Future, as_completed, thread
from concurrent.futures import wait as wait_for_futures
from types import CodeType, FrameType
from typing import Any

_JOIN = threading.Thread.join.__code__
_OF_A_FUTURE = (Future.result.__code__, Future.exception.__code__)
_OF_FUTURES = (wait_for_futures.__code__, as_completed.__code__)
# A Python that names it otherwise has executors whose futures tell nothing here, and all the rest.
_WORK = getattr(getattr(getattr(thread, "_WorkItem", None), "run", None), "__code__", None)


def waits_for(waiting: int, worked_on: int) -> bool:
    """Whether thread `waiting` waits for thread `worked_on`, directly or through others; both by their `ident`."""
    stacks = sys._current_frames()
    workers = {id(each): ident for ident in stacks for each in _futures_of(stacks, ident)}
    seen: set[int] = set()
    pending = [waiting]
    while pending:
        ident = pending.pop()
        if ident == worked_on:
            return True
        if ident not in seen:
            seen.add(ident)
            pending.extend(_waited_for(stacks, ident, workers))
    return False


def _stack(stacks: Mapping[int, FrameType], ident: int) -> Iterator[tuple[CodeType, FrameType]]:
    """From the innermost frame on."""
    frame = stacks.get(ident)
    while frame is not None:
        yield frame.f_code, frame
        frame = frame.f_back


def _futures_of(stacks: Mapping[int, FrameType], ident: int) -> list["Future[Any]"]:
    """Those that the thread works on."""
    return [frame.f_locals["self"].future for code, frame in _stack(stacks, ident) if code is _WORK]


def _waited_for(stacks: Mapping[int, FrameType], ident: int, workers: Mapping[int, int]) -> list[int]:
    """The threads that the thread waits for."""
    for code, frame in _stack(stacks, ident):
        if code is not _JOIN and code not in _OF_A_FUTURE and code not in _OF_FUTURES:
            continue
        inside = frame.f_locals
        if inside.get("timeout") is not None or inside.get("return_when", ALL_COMPLETED) != ALL_COMPLETED:
            return []
        if code is _JOIN:
            return [inside["self"].ident]
        futures = [inside["self"]] if code in _OF_A_FUTURE else inside["fs"]
        return [workers[id(each)] for each in futures if id(each) in workers]
    return []
