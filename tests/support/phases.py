"""Progress messages of slow set-up steps on standard error: the step, the process that it waits for, and its duration.

Steps that end within `SILENT_S` print nothing, so a run with full caches is silent.
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
    """Print the step, and at its end its duration."""
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
    """Run the block in one process at a time. A process that waits prints the id of the running one."""
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
    """Show messages immediately, although pytest captures all other output."""
    manager = config.pluginmanager.getplugin("capturemanager")
    assert manager is not None
    disabled: AbstractContextManager[None] = manager.global_and_fixture_disabled()
    return disabled
