"""The memory that control groups, of version 1 or 2, allow this process: that of its container.

The limits of its group and of all groups above it apply. In a container the files of its own group are at the root of
/sys/fs/cgroup. The path in /proc/self/cgroup may be that on the host then, and does not exist here.

Standard library only, for any CPython from 3.10 on.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from halimede.core.accounts import MemoryBounds

UNLIMITED = 1 << 64
"""The limit of a group that has none."""

_VERSION_1_UNLIMITED = 1 << 62
"""Version 1 has a number for no limit, which is larger than this."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Limit and usage of a group in bytes. Of the usage the kernel frees `file_cache_bytes` on demand, the
    `inactive_file_bytes` among them first."""

    limit_bytes: int
    used_bytes: int
    inactive_file_bytes: int
    file_cache_bytes: int


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of the files and of the statistics in one version."""

    root: str
    limit: str
    usage: str
    inactive: str
    active: str
    events: str


_VERSION_1 = _Names(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
    "total_active_file",
    "memory.oom_control",
)
_VERSION_2 = _Names("", "memory.max", "memory.current", "inactive_file", "active_file", "memory.events")


class MemoryGroups:
    """The groups of this process, found once."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._names, self._folders = _find(proc, cgroup)
        limits = [(folder, self._limit(folder)) for folder in self._folders]
        self._limited = [(folder, limit) for folder, limit in limits if limit < _VERSION_1_UNLIMITED]

    @property
    def limit_bytes(self) -> int:
        """The smallest limit when this object was made, which may be above the machine's memory."""
        return min((limit for _, limit in self._limited), default=UNLIMITED)

    def has_free(self, size_bytes: int) -> bool:
        """Whether the process can use so many more bytes. True if the usage cannot be read. Takes some microseconds."""
        for folder, limit in self._limited:
            try:
                free = limit - _read_number(folder / self._names.usage)
                if free < size_bytes:
                    # Only then, because the kernel needs longer for the statistics.
                    use = self._use(folder)
                    free = limit - use.used_bytes + use.file_cache_bytes
            except (OSError, ValueError, KeyError):
                continue
            if free < size_bytes:
                return False
        return True

    def read(self) -> MemoryUse | None:
        """Limit and usage of the group with the smallest limit; without a limit those of the root, which is a container
        or the machine. None without groups."""
        limited = [folder for folder, _ in reversed(self._limited)]
        uses = []
        for folder in limited or self._folders[:1]:
            try:
                uses.append(self._use(folder))
            except (OSError, ValueError, KeyError):
                continue
        return min(uses, key=lambda use: use.limit_bytes, default=None)

    def oom_kills(self) -> int:
        """How many processes of this group the kernel has killed for lack of memory; 0 if it does not count them."""
        try:
            return _read_statistics(self._folders[-1] / self._names.events).get("oom_kill", 0)
        except (IndexError, OSError, ValueError):
            return 0

    def _use(self, folder: Path) -> MemoryUse:
        names = self._names
        statistics = _read_statistics(folder / "memory.stat")
        inactive = statistics[names.inactive]
        return MemoryUse(
            self._limit(folder),
            _read_number(folder / names.usage),
            inactive,
            inactive + statistics.get(names.active, 0),
        )

    def _limit(self, folder: Path) -> int:
        try:
            return _read_number(folder / self._names.limit)
        except (OSError, ValueError):  # no such file, or `max`
            return UNLIMITED


def machine_bytes() -> int:
    """The memory of the machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def memory_bounds() -> MemoryBounds:
    """The memory of this process's container, or of the machine."""
    groups, machine = own_groups(), machine_bytes()
    if groups.limit_bytes >= machine:
        return MemoryBounds(machine)
    return MemoryBounds(groups.limit_bytes, groups.has_free)


@cache
def own_groups() -> MemoryGroups:
    """The groups of this process, found at the first call."""
    return MemoryGroups()


def _find(proc: Path, cgroup: Path) -> tuple[_Names, list[Path]]:
    """The version, and the folders of the groups from the root on."""
    try:
        lines = os.fsdecode((proc / "self/cgroup").read_bytes()).splitlines()
    except OSError:
        lines = []
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    for names, path in ((_VERSION_2, paths.get("", "")), (_VERSION_1, paths.get("memory", ""))):
        folder = cgroup / names.root
        folders = [folder]
        for part in path.split("/"):
            folder = folder / part
            if part and part != ".." and _is_there(folder):
                folders.append(folder)
            elif part:
                break
        # The root of version 2 has no limit, unless it is that of a container.
        if any(_is_there(each / names.limit) for each in folders):
            return names, folders
    return _VERSION_2, []


def _is_there(path: Path) -> bool:
    """Whether the path exists, and this process may know it."""
    return os.access(path, os.F_OK)


def _read_number(file: Path) -> int:
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(descriptor, 64))
    finally:
        os.close(descriptor)


def _read_statistics(file: Path) -> Mapping[str, int]:
    """Lines of a name and a number."""
    return {name: int(number) for name, number in (line.split() for line in file.read_text().splitlines())}
