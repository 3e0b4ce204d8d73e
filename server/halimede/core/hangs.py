"""Decides whether a process hangs: it has shown no sign of life for a time limit.

Which signs count depends on the process. Front ends and zygotes send beats. A worker may compute or wait for as long as
its model likes, so that only the kernel's state T (stopped by a signal) counts against it.

Only time in which the watcher itself ran counts. If it was stopped, or the machine was suspended, other processes
probably were stopped too, and need a moment to show life again.
"""

from dataclasses import dataclass
from enum import Enum

_SECOND = 1_000_000_000
_LONGEST_INTERVAL_NS = _SECOND

BEAT_SECS = 0.25
"""How often a process that sends beats sends one."""

STOPPED = "T"
_TRACED = "t"
"""A debugger holds the process."""
_HELD_BY_THE_KERNEL = ("D", _TRACED)
"""The process waits for a disk, or a debugger holds it."""


class ProcessKind(Enum):
    """What a process of the server is for. The values are labels of metrics."""

    FRONT_END = "frontend"
    WORKER = "worker"
    ZYGOTE = "zygote"


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """The state of a process: the kernel's letter, and the CPU time it has used, in clock ticks."""

    letter: str
    cpu_ticks: int


def parse_stat(text: str) -> ProcessStat:
    """The content of `/proc/PID/stat`. ValueError, IndexError if it is anything else."""
    # The name of the process, in parentheses, may contain spaces and parentheses.
    fields = text[text.rindex(")") + 1 :].split()
    return ProcessStat(fields[0], int(fields[11]) + int(fields[12]))


def zygote_is_alive(before: ProcessStat, now: ProcessStat, *, has_beaten: bool) -> bool:
    """Whether a zygote has shown life between two checks. It sends no beats while it imports, which takes CPU time or
    waits for a disk; its end would end its workers too."""
    return has_beaten or now.cpu_ticks != before.cpu_ticks or now.letter in _HELD_BY_THE_KERNEL


def front_end_is_alive(now: ProcessStat, *, has_beaten: bool) -> bool:
    """Whether a front end, which beats, has shown life since the last check."""
    return has_beaten or now.letter == _TRACED


def check_interval_ns(limit_ns: int) -> int:
    """The time between two checks, for a time limit."""
    return min(_LONGEST_INTERVAL_NS, limit_ns // 4)


class Silence:
    """How long one process has shown no life."""

    __slots__ = ("_checked_ns", "_limit_ns", "ns")

    def __init__(self, limit_ns: int) -> None:
        self.ns = 0
        self._limit_ns = limit_ns
        self._checked_ns: int | None = None

    def __repr__(self) -> str:
        return f"<Silence {self.ns / _SECOND:.1f} s of {self._limit_ns / _SECOND:g} s>"

    def check(self, now_ns: int, *, is_alive: bool) -> bool:
        """Note a check, and return whether the process hangs. `is_alive`: it has shown life since the last check."""
        if is_alive or self._checked_ns is None:
            self.ns = 0
        else:
            # In a longer step the watcher did not run.
            self.ns += min(now_ns - self._checked_ns, 2 * check_interval_ns(self._limit_ns))
        self._checked_ns = now_ns
        return self.ns >= self._limit_ns
