"""What takes long says so on standard error: what is being made, whom it waits for, how long it took.

Whatever is over within `SILENT_S` says nothing, so a run on a machine that has everything is silent.
"""

import fcntl
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

SILENT_S = 3.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def phase(what: str) -> Iterator[None]:
    """Say what is being done, and at its end how long it took."""
    begun = time.monotonic()
    announced = threading.Timer(SILENT_S, say, (f"{what} ...",))
    announced.daemon = True
    announced.start()
    try:
        yield
    except BaseException:
        announced.cancel()
        raise
    announced.cancel()
    if (took_s := time.monotonic() - begun) >= SILENT_S:
        say(f"{what}: {took_s:.0f} s")


@contextmanager
def only_one(lock: Path, what: str) -> Iterator[None]:
    """Make `what` while nobody else does, in this process or another. Whoever waits is told for which process."""
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            with phase(f"Waiting for process {file.read()}, which is busy with {what}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def shown(config: pytest.Config) -> AbstractContextManager[None]:
    """What is said meanwhile is seen at once, although pytest captures the rest."""
    manager = config.pluginmanager.getplugin("capturemanager")
    assert manager is not None
    disabled: AbstractContextManager[None] = manager.global_and_fixture_disabled()
    return disabled
