"""The restart policy of one instance's worker process: when it is restarted, and when it is parked.

A worker that ran for a long time is restarted at once, because its death was a rare event. After a short life the
restart waits 0.1 s, then twice as long each time, up to 10 s. Five deaths within a minute park the worker: a model that
crashes on every start or every request would otherwise use a processor and fill the log forever. A death while starting
counts like any other, and so does an `initialize` that fails on a restart. Older deaths are forgotten. Five such deaths
in a row park the worker, however long each start takes: requests would otherwise wait forever.

A parked worker is tried again after 60 s, because the cause may have passed. If it dies within a minute of this start,
it is parked again, for twice as long each time, up to 10 min.

A start that the machine prevents (FAULTED: no file, no process, no memory) is no death of the model. It is repeated
after 0.1 s, then after twice as long each time, up to 10 s, and parks nothing.

Transitions by state; `-` cannot happen and is an internal error:

    state     STARTED   DIED               FAULTED    TIMER               STOP
    STARTING  READY     WAITING or PARKED  WAITING    (nothing)           STOPPING, Kill
    READY     -         WAITING, PARKED    -          (nothing)           STOPPING, Finish
                        or STARTING
    WAITING   -         -                  -          STARTING when due   STOPPED
    PARKED    -         -                  -          STARTING when due   STOPPED
    STOPPING  (nothing) STOPPED            -          Kill when due       -
    STOPPED   -         -                  -          (nothing)           -
"""

import errno
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.error import clip, internal
from halimede.core.types.server import WorkerHealth

_SECOND = 1_000_000_000

LONG_LIFE_NS = 60 * _SECOND
FIRST_PAUSE_NS = _SECOND // 10
LONGEST_PAUSE_NS = 10 * _SECOND
MAX_DEATHS = 5
DEATHS_WINDOW_NS = 60 * _SECOND
FIRST_RETRY_NS = 60 * _SECOND
LONGEST_RETRY_NS = 10 * 60 * _SECOND
"""How long a worker is parked."""
BRIEF_FAULT_PAUSES_SECS = (0.1, 0.2, 0.4, 0.8)
"""The pauses between the starts of a worker's first process while the machine has brief faults. Then the load fails."""
REPORT_RECOVERY_NS = 5 * 60 * _SECOND
"""How long a worker's death is reported after the restart. The time is long enough for occasional readers, and a worker
that dies every few minutes is reported all the time."""
FINISH_GRACE_NS = 5 * _SECOND
"""How long a worker may take to finish and end by itself (`finalize`) before it is killed."""

_LAST_PAUSE_DOUBLING = 16

_BRIEF_ERRORS = frozenset(
    {errno.EAGAIN, errno.ENOMEM, errno.EFAULT, errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ETOOMANYREFS}
)


class StartFaultError(InferenceError):
    """The machine, and not the model, prevented the start of a worker. `is_brief`: it may pass within seconds."""

    def __init__(self, code: ErrorCode, message: str, *, is_brief: bool = False) -> None:
        super().__init__(code, message)
        self.is_brief = is_brief


def is_brief_fault(error: BaseException) -> bool:
    """Whether the system lacks something that others may soon free: memory, processes, threads, descriptors."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _BRIEF_ERRORS)


def is_fault_of_machine(error: InferenceError) -> bool:
    """Whether the machine prevented what failed with this error: something is not there, or the system refused.

    The error's cause counts, and not its text: an OSError is an answer of the system, also to a model's own call.
    """
    cause = error.__cause__ or error.__context__
    return error.code is ErrorCode.UNAVAILABLE or isinstance(cause, OSError | MemoryError)


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a worker process ended: by an exit code, by a signal, or it never ran, and `error` is the reason.

    `out_of_memory` is set if the kernel killed a process for lack of memory meanwhile, possibly this one. `hang` is set
    if the server ended it because it, or the process that started it, hung. `is_brief` belongs to `error`: see
    `StartFaultError`.
    """

    code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    error: str = ""
    hang: str = ""
    is_brief: bool = False


def describe_exit(exit_: ProcessExit) -> str:
    """`exit code 3`, `signal 11`, `signal 9 (possibly out of memory)`, `signal 9 (it hung for 10.2 s)`, or why no
    process was started."""
    if exit_.error:
        return exit_.error
    if exit_.signal is None:
        return f"exit code {exit_.code}"
    if exit_.hang:
        return f"signal {exit_.signal} ({exit_.hang})"
    return f"signal {exit_.signal}{_OUT_OF_MEMORY if exit_.out_of_memory else ''}"


_OUT_OF_MEMORY = " (possibly out of memory)"


@dataclass(frozen=True, slots=True)
class Recovery:
    """When a worker was ready again, and why it had been down."""

    at_ns: int
    reason: str


def health_of(downs: Sequence[str], last: Recovery | None, now_ns: int) -> WorkerHealth:
    """The health of a version's workers: why some are down, or recently were."""
    failure = next(iter(downs), "")
    if not failure and last is not None and now_ns - last.at_ns < REPORT_RECOVERY_NS:
        failure = last.reason
    return WorkerHealth(failure, _OUT_OF_MEMORY in failure)


class SupervisorState(Enum):
    """The state of a worker, from its first start to its end."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    PARKED = "parked"
    STOPPING = "stopping"
    STOPPED = "stopped"


class SupervisorEvent(Enum):
    """An event of a worker.

    DIED or FAULTED comes once for each start. DIED: the process ended, by itself or as requested, or reported that
    `initialize` failed. FAULTED: the machine prevented the start.
    """

    STARTED = "started"
    DIED = "died"
    FAULTED = "faulted"
    TIMER = "timer"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Nothing:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process; STARTED, DIED or FAULTED follows."""


@dataclass(frozen=True, slots=True)
class WaitUntil:
    """Send TIMER at this time."""

    at_ns: int


@dataclass(frozen=True, slots=True)
class Park:
    """Do not restart it before this time: send TIMER then. The reason is for users."""

    reason: str
    until_ns: int


@dataclass(frozen=True, slots=True)
class Finish:
    """Ask the worker to finish and to exit; send TIMER at `kill_at_ns` if it has not."""

    kill_at_ns: int


@dataclass(frozen=True, slots=True)
class Kill:
    """Kill the process."""


Action = Nothing | Start | WaitUntil | Park | Finish | Kill


class Supervision:
    """The state of one worker and its recent deaths; made when its first process starts.

    `first_retry_ns` is how long it is parked the first time. This policy does not cover a first start that fails: then
    the load fails, and nothing is restarted.
    """

    def __init__(self, first_retry_ns: int = FIRST_RETRY_NS) -> None:
        self.state = SupervisorState.STARTING
        self.reason = ""
        """Why it is down, in WAITING, in PARKED and during a restart."""
        self.is_unstartable = False
        """Whether the machine prevents its starts for so long that requests should not wait for it."""
        self._deaths: deque[int] = deque(maxlen=MAX_DEATHS)
        self._short_lives = 0
        self._failed_starts = 0
        """Starts since it last ran that ended in a death."""
        self._faults = 0
        """Starts in a row that the machine prevented."""
        self._faulted_since_ns = 0
        self._parkings = 0
        """How often it was parked since it last ran for long."""
        self._first_retry_ns = first_retry_ns
        self._ready_ns = 0
        self._due_ns = 0

    def __repr__(self) -> str:
        return f"<Supervision {self.state.name} deaths={len(self._deaths)}{f' {self.reason}' if self.reason else ''}>"

    def on(self, event: SupervisorEvent, now_ns: int, why: str = "") -> Action:
        """The action to take after the event.

        `why` belongs to DIED (`describe_exit`, or the error of `initialize`) and to FAULTED (the machine's error).
        InferenceError INTERNAL if the event cannot happen in this state.
        """
        match self.state, event:
            case SupervisorState.STARTING, SupervisorEvent.STARTED:
                self.state, self._ready_ns, self.reason = SupervisorState.READY, now_ns, ""
                self._failed_starts = self._faults = 0
                self.is_unstartable = False
                return Nothing()
            case SupervisorState.STARTING, SupervisorEvent.DIED:
                self._failed_starts += 1
                return self._died(now_ns, 0, why)
            case SupervisorState.STARTING, SupervisorEvent.FAULTED:
                return self._faulted(now_ns, why)
            case SupervisorState.READY, SupervisorEvent.DIED:
                return self._died(now_ns, now_ns - self._ready_ns, why)
            case SupervisorState.STARTING, SupervisorEvent.STOP:
                self.state = SupervisorState.STOPPING
                # It serves no requests yet, and `initialize` may take minutes.
                self._due_ns = now_ns
                return Kill()
            case SupervisorState.READY, SupervisorEvent.STOP:
                self.state, self._due_ns = SupervisorState.STOPPING, now_ns + FINISH_GRACE_NS
                return Finish(self._due_ns)
            case ((SupervisorState.WAITING | SupervisorState.PARKED), SupervisorEvent.STOP):
                self.state = SupervisorState.STOPPED
                return Nothing()
            case ((SupervisorState.WAITING | SupervisorState.PARKED), SupervisorEvent.TIMER):
                return self._start() if now_ns >= self._due_ns else WaitUntil(self._due_ns)
            case SupervisorState.STOPPING, SupervisorEvent.TIMER:
                return Kill() if now_ns >= self._due_ns else WaitUntil(self._due_ns)
            case SupervisorState.STOPPING, SupervisorEvent.DIED:
                self.state = SupervisorState.STOPPED
                return Nothing()
            # STARTED may arrive after the request to stop, and a timer may fire after it is no longer needed.
            case (SupervisorState.STOPPING, SupervisorEvent.STARTED) | (_, SupervisorEvent.TIMER):
                return Nothing()
        raise internal(f"a worker that is {self.state.value} cannot take {event.name}")

    def _died(self, now_ns: int, life_ns: int, why: str) -> Action:
        while self._deaths and now_ns - self._deaths[0] >= DEATHS_WINDOW_NS:
            self._deaths.popleft()
        self._deaths.append(now_ns)
        self._faults, self.is_unstartable = 0, False
        self.reason = f"worker exited: {clip(why)}"
        if life_ns >= LONG_LIFE_NS:
            self._short_lives = self._parkings = 0
            return self._start()
        if self._parkings or MAX_DEATHS in (self._failed_starts, len(self._deaths)):
            return self._park(now_ns, why)
        self.state, self._due_ns = SupervisorState.WAITING, now_ns + _pause_ns(self._short_lives)
        self._short_lives += 1
        return WaitUntil(self._due_ns)

    def _park(self, now_ns: int, why: str) -> Park:
        doublings = min(self._parkings, _LAST_PAUSE_DOUBLING)
        self.reason = f"worker exited {MAX_DEATHS + self._parkings} times (last: {clip(why)})"
        self._parkings += 1
        self.state = SupervisorState.PARKED
        self._due_ns = now_ns + min(self._first_retry_ns << doublings, LONGEST_RETRY_NS)
        return Park(self.reason, self._due_ns)

    def _faulted(self, now_ns: int, why: str) -> WaitUntil:
        pause_ns = _pause_ns(self._faults)
        if not self._faults:
            self._faulted_since_ns = now_ns
        self._faults += 1
        # Not by their number, because each start may take minutes. A worker that was parked refused requests until now.
        self.is_unstartable = now_ns - self._faulted_since_ns >= LONGEST_PAUSE_NS or self._parkings > 0
        self.reason = f"worker cannot be started: {clip(why)}"
        self.state, self._due_ns = SupervisorState.WAITING, now_ns + pause_ns
        return WaitUntil(self._due_ns)

    def _start(self) -> Start:
        self.state = SupervisorState.STARTING
        return Start()


def _pause_ns(earlier: int) -> int:
    return min(FIRST_PAUSE_NS << min(earlier, _LAST_PAUSE_DOUBLING), LONGEST_PAUSE_NS)
