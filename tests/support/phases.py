"""Progress messages of slow set-up steps on standard error: the step, the process that it waits for, and its duration.

Steps that end within `SILENT_S` print nothing, so a run with full caches is silent. Those that take long print that they
are still busy.
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
TELL_EVERY_S = 30.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def phase(what: str, expect: str = "") -> Iterator[None]:
    """Print the step, now and then for how long it has been busy, and at its end its duration.

    expect: how long it may take, or how much it downloads.
    """
    begun = time.monotonic()
    ended = threading.Event()
    threading.Thread(target=_tell, args=(what, expect, begun, ended), daemon=True).start()
    try:
        yield
    finally:
        ended.set()
    if (took_s := time.monotonic() - begun) >= SILENT_S:
        say(f"{what}: {took_s:.0f} s")


def _tell(what: str, expect: str, begun: float, ended: threading.Event) -> None:
    if ended.wait(SILENT_S):
        return
    say(f"{what}{f' ({expect})' if expect else ''} ...")
    while not ended.wait(TELL_EVERY_S):
        say(f"{what} ... busy for {time.monotonic() - begun:.0f} s")


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
