"""Control groups with a limit of memory, as containers have."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.server import wait_until

_NUMBERS = itertools.count()


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """The folder of a new group, of version 1 or 2; it is removed when its processes have ended.

    Skips the test where groups cannot be made.
    """
    group = _make(f"halimede-test-{os.getpid()}-{next(_NUMBERS)}", limit_bytes)
    if group is None:
        pytest.skip("control groups with a limit of memory cannot be made here")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), "the group to be empty")
        group.rmdir()


def joining(group: Path) -> str:
    """Python code with which a process joins the group."""
    return f"open({str(group / 'cgroup.procs')!r}, 'w').write('0')"


def oom_kills(group: Path) -> int:
    """How many processes of the group the kernel has killed for lack of memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            lines = dict(line.split() for line in (group / name).read_text().splitlines())
            return int(lines["oom_kill"])
    raise AssertionError(f"{group} has no count of kills")


def _make(name: str, limit_bytes: int) -> Path | None:
    for root, limit in (("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")):
        if not Path(root, "cgroup.procs").exists():
            continue
        group = Path(root, name)
        try:
            group.mkdir()
            Path(group, limit).write_text(str(limit_bytes))
        except OSError:
            if group.exists():
                group.rmdir()
            continue
        return group
    return None
