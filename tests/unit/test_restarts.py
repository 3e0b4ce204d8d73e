import errno
from itertools import product

import pytest

from halimede.core.restarts import (
    MAX_DEATHS,
    Action,
    Finish,
    Kill,
    Nothing,
    Park,
    ProcessExit,
    Recovery,
    Start,
    Supervision,
    SupervisorEvent,
    SupervisorState,
    WaitUntil,
    describe_exit,
    health_of,
    is_brief_fault,
    is_fault_of_machine,
)
from halimede.core.types import ErrorCode, InferenceError
from halimede.core.types.server import WorkerHealth
from support.refusals import error_of

SECOND = 1_000_000_000
STARTED, DIED, FAULTED, TIMER, STOP = SupervisorEvent


def ready(now_ns: int = 0) -> Supervision:
    supervision = Supervision()
    assert supervision.on(STARTED, now_ns) == Nothing()
    return supervision


def live_and_die(supervision: Supervision, now_ns: int, life_ns: int) -> tuple[int, Action]:
    """A READY worker dies after `life_ns` and is restarted when due. Returns the time of the restart and the action."""
    died_ns = now_ns + life_ns
    action = supervision.on(DIED, died_ns, "signal 11")
    if isinstance(action, Park):
        return died_ns, action
    up_ns = action.at_ns if isinstance(action, WaitUntil) else died_ns
    if isinstance(action, WaitUntil):
        assert supervision.on(TIMER, up_ns) == Start()
    assert supervision.on(STARTED, up_ns) == Nothing()
    return up_ns, WaitUntil(up_ns - died_ns) if isinstance(action, WaitUntil) else action


def test_worker_that_served_for_long_is_restarted_at_once():
    supervision = ready()

    assert supervision.on(DIED, 60 * SECOND, "signal 9") == Start()
    assert supervision.state is SupervisorState.STARTING


def test_a_worker_that_died_soon_waits_and_is_then_started():
    supervision = ready()

    assert supervision.on(DIED, 5 * SECOND, "exit code 3") == WaitUntil(5_100_000_000)
    assert supervision.state is SupervisorState.WAITING
    assert supervision.reason == "worker exited: exit code 3"
    assert supervision.on(TIMER, 5_050_000_000) == WaitUntil(5_100_000_000)
    assert supervision.on(TIMER, 5_100_000_000) == Start()
    assert supervision.on(STARTED, 6 * SECOND) == Nothing()
    assert (supervision.state, supervision.reason) == (SupervisorState.READY, "")


def test_pauses_double_up_to_ten_seconds():
    supervision = ready()
    now_ns, pauses = 0, []
    for _ in range(10):
        # Not so often that it is parked.
        now_ns, action = live_and_die(supervision, now_ns, 20 * SECOND)
        assert isinstance(action, WaitUntil)
        pauses.append(action.at_ns / SECOND)

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10, 10, 10]


def test_a_long_life_makes_the_pauses_short_again():
    supervision = ready()
    now_ns = 0
    for _ in range(5):
        now_ns, _ = live_and_die(supervision, now_ns, 20 * SECOND)

    now_ns, action = live_and_die(supervision, now_ns, 60 * SECOND)
    assert action == Start()
    _, action = live_and_die(supervision, now_ns, SECOND)
    assert action == WaitUntil(SECOND // 10)


def test_worker_that_dies_repeatedly_is_parked_with_the_last_cause():
    supervision = ready()
    now_ns, actions = 0, []
    for _ in range(5):
        now_ns, action = live_and_die(supervision, now_ns, SECOND)
        actions.append(action)

    assert actions[-1] == Park("worker exited 5 times (last: signal 11)", now_ns + 60 * SECOND)
    assert [type(action) for action in actions[:-1]] == [WaitUntil] * 4
    assert supervision.state is SupervisorState.PARKED
    assert supervision.reason == "worker exited 5 times (last: signal 11)"
    assert supervision.on(TIMER, now_ns + 59 * SECOND) == WaitUntil(now_ns + 60 * SECOND)
    assert supervision.on(TIMER, now_ns + 60 * SECOND) == Start()


def parked(now_ns: int = 0) -> tuple[Supervision, Park]:
    supervision = ready(now_ns)
    action: Action = Nothing()
    for _ in range(MAX_DEATHS):
        now_ns, action = live_and_die(supervision, now_ns, SECOND)
    assert isinstance(action, Park)
    return supervision, action


def test_a_parked_worker_is_tried_once_each_time_and_waits_twice_as_long():
    supervision, action = parked()
    pauses, reasons = [], []
    for _ in range(6):
        now_ns = action.until_ns
        assert supervision.on(TIMER, now_ns) == Start()
        assert supervision.on(STARTED, now_ns) == Nothing()
        park = supervision.on(DIED, now_ns + 59 * SECOND, "signal 11")
        assert isinstance(park, Park)
        action = park
        pauses.append((action.until_ns - now_ns) // SECOND - 59)
        reasons.append(action.reason)

    assert pauses == [120, 240, 480, 600, 600, 600]
    assert reasons[0] == "worker exited 6 times (last: signal 11)"


def test_a_parked_worker_that_then_runs_for_a_minute_is_as_new():
    supervision, action = parked()
    now_ns = action.until_ns
    assert supervision.on(TIMER, now_ns) == Start()
    supervision.on(STARTED, now_ns)

    now_ns, action_now = live_and_die(supervision, now_ns, 60 * SECOND)
    assert action_now == Start()
    for _ in range(3):
        now_ns, action_now = live_and_die(supervision, now_ns, SECOND)
        assert isinstance(action_now, WaitUntil)
    now_ns, action_now = live_and_die(supervision, now_ns, SECOND)
    assert action_now == Park("worker exited 5 times (last: signal 11)", now_ns + 60 * SECOND)


def test_faults_of_the_machine_repeat_the_start_and_never_park():
    supervision = ready()
    action = supervision.on(DIED, 0, "signal 9")
    pauses, unstartable = [], []
    for _ in range(20):
        assert isinstance(action, WaitUntil)
        now_ns = action.at_ns
        assert supervision.on(TIMER, now_ns) == Start()
        action = supervision.on(FAULTED, now_ns, "cannot fork: Cannot allocate memory")
        assert isinstance(action, WaitUntil)
        pauses.append((action.at_ns - now_ns) / SECOND)
        unstartable.append(supervision.is_unstartable)

    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[10] * 13]
    assert unstartable == [False] * 7 + [True] * 13
    assert supervision.reason == "worker cannot be started: cannot fork: Cannot allocate memory"
    supervision.on(TIMER, action.at_ns)
    assert supervision.on(STARTED, action.at_ns) == Nothing()
    assert (supervision.reason, supervision.is_unstartable) == ("", False)
    # Faults are no deaths: this is the second one.
    assert isinstance(supervision.on(DIED, action.at_ns + SECOND, "signal 9"), WaitUntil)


def test_requests_do_not_wait_for_slow_starts_that_the_machine_prevents():
    supervision = ready()
    supervision.on(DIED, 0, "signal 9")
    unstartable = []
    for at_secs in (60, 120, 180):
        assert supervision.on(TIMER, at_secs * SECOND) == Start()
        supervision.on(FAULTED, at_secs * SECOND, "FileNotFoundError")
        unstartable.append(supervision.is_unstartable)

    assert unstartable == [False, True, True]


def test_a_parked_worker_that_the_machine_does_not_start_still_refuses():
    supervision, action = parked()
    supervision.on(TIMER, action.until_ns)

    assert supervision.on(FAULTED, action.until_ns, "cannot fork") == WaitUntil(action.until_ns + SECOND // 10)
    assert supervision.is_unstartable
    # And when it starts again, one short life is enough to park it.
    supervision.on(TIMER, action.until_ns + SECOND)
    assert isinstance(supervision.on(DIED, action.until_ns + SECOND, "signal 11"), Park)
    assert not supervision.is_unstartable


def failure(cause: BaseException, code: ErrorCode = ErrorCode.INTERNAL) -> InferenceError:
    try:
        raise cause
    except BaseException:
        try:
            raise InferenceError(code, "initialize failed") from None
        except InferenceError as error:
            return error


@pytest.mark.parametrize(
    ("error", "is_fault"),
    [
        (failure(FileNotFoundError(errno.ENOENT, "No such file or directory", "weights")), True),
        (failure(OSError(errno.ESTALE, "Stale file handle")), True),
        (failure(MemoryError()), True),
        (failure(ValueError("no weights")), False),
        (InferenceError(ErrorCode.INTERNAL, "AttributeError"), False),
        (InferenceError(ErrorCode.UNAVAILABLE, "unable to find 'model.onnx'"), True),
    ],
    ids=lambda value: str(getattr(value, "__context__", value)),
)
def test_an_error_of_the_system_and_none_of_the_model_is_the_machines(error: InferenceError, is_fault: bool):
    assert is_fault_of_machine(error) == is_fault


@pytest.mark.parametrize(
    ("error", "is_brief"),
    [
        (OSError(errno.EAGAIN, ""), True),
        (OSError(errno.ENOMEM, ""), True),
        (OSError(errno.EFAULT, ""), True),
        (MemoryError(), True),
        (OSError(errno.ENOENT, ""), False),
        (ValueError(), False),
    ],
)
def test_a_lack_that_may_end_soon_is_a_brief_fault(error: BaseException, is_brief: bool):
    assert is_brief_fault(error) == is_brief


def test_deaths_older_than_a_minute_are_forgotten():
    supervision = ready()
    supervision.on(DIED, 0, "signal 11")
    for at_secs in (20, 30, 40):
        supervision.on(TIMER, at_secs * SECOND)
        supervision.on(DIED, at_secs * SECOND, "signal 11")
    supervision.on(TIMER, 50 * SECOND)

    assert isinstance(supervision.on(DIED, 60 * SECOND, "signal 11"), WaitUntil)
    supervision.on(TIMER, 70 * SECOND)
    assert isinstance(supervision.on(DIED, 79 * SECOND, "signal 11"), Park)


def test_a_death_while_starting_counts_and_so_does_a_failed_initialize():
    supervision = ready()
    now_ns = 0
    action = supervision.on(DIED, now_ns, "signal 9")
    for why in ("signal 11", "exit code 1", "signal 6", "ValueError: no weights"):
        assert isinstance(action, WaitUntil)
        now_ns = action.at_ns
        assert supervision.on(TIMER, now_ns) == Start()
        action = supervision.on(DIED, now_ns, why)

    assert action == Park("worker exited 5 times (last: ValueError: no weights)", now_ns + 60 * SECOND)


def test_a_long_cause_is_cut():
    supervision = ready()
    for death in range(MAX_DEATHS):
        action = supervision.on(DIED, death, "x" * 100_000)
        supervision.on(TIMER, SECOND)

    assert isinstance(action, Park)
    assert len(action.reason) < 400


def test_a_ready_worker_is_asked_to_finish_and_killed_when_it_does_not():
    supervision = ready()

    assert supervision.on(STOP, SECOND) == Finish(kill_at_ns=6 * SECOND)
    assert supervision.on(TIMER, 2 * SECOND) == WaitUntil(6 * SECOND)
    assert supervision.on(TIMER, 6 * SECOND) == Kill()
    assert supervision.on(DIED, 6 * SECOND, "signal 9") == Nothing()
    assert supervision.state is SupervisorState.STOPPED


def test_a_worker_that_dies_while_it_finishes_is_stopped_and_not_started_again():
    supervision = ready()
    supervision.on(STOP, 0)

    assert supervision.on(DIED, SECOND, "signal 11") == Nothing()
    assert supervision.state is SupervisorState.STOPPED


def test_a_worker_that_is_starting_is_killed_when_it_is_stopped():
    supervision = Supervision()

    assert supervision.on(STOP, 0) == Kill()
    # Its STARTED event may arrive after the request to stop.
    assert supervision.on(STARTED, 0) == Nothing()
    assert supervision.on(DIED, SECOND, "signal 9") == Nothing()
    assert supervision.state is SupervisorState.STOPPED


@pytest.mark.parametrize("deaths", [1, MAX_DEATHS], ids=["waiting", "parked"])
def test_a_worker_without_a_process_is_stopped_at_once(deaths: int):
    supervision = ready()
    for _ in range(deaths):
        supervision.on(DIED, 0, "signal 11")
        if deaths > 1:
            supervision.on(TIMER, SECOND)

    assert supervision.on(STOP, SECOND) == Nothing()
    assert supervision.state is SupervisorState.STOPPED
    # The timer of its pause may still fire.
    assert supervision.on(TIMER, 2 * SECOND) == Nothing()


WAYS: dict[SupervisorState, tuple[SupervisorEvent, ...]] = {
    SupervisorState.STARTING: (),
    SupervisorState.READY: (STARTED,),
    SupervisorState.WAITING: (STARTED, DIED),
    SupervisorState.PARKED: (DIED, TIMER) * (MAX_DEATHS - 1) + (DIED,),
    SupervisorState.STOPPING: (STOP,),
    SupervisorState.STOPPED: (STOP, DIED),
}
POSSIBLE = {
    SupervisorState.STARTING: {STARTED, DIED, FAULTED, TIMER, STOP},
    SupervisorState.READY: {DIED, TIMER, STOP},
    SupervisorState.WAITING: {TIMER, STOP},
    SupervisorState.PARKED: {TIMER, STOP},
    SupervisorState.STOPPING: {STARTED, DIED, TIMER},
    SupervisorState.STOPPED: {TIMER},
}


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in product(SupervisorState, SupervisorEvent) if pair[1] not in POSSIBLE[pair[0]]],
    ids=str,
)
def test_impossible_event_is_an_internal_error(state: SupervisorState, event: SupervisorEvent):
    supervision = Supervision()
    for step, past in enumerate(WAYS[state]):
        supervision.on(past, step * SECOND, "signal 11")
    assert supervision.state is state

    assert error_of(supervision.on, event, 100 * SECOND) == InferenceError(
        ErrorCode.INTERNAL, f"a worker that is {state.value} cannot take {event.name}"
    )
    assert supervision.state is state


def test_a_supervision_shows_its_state():
    supervision = ready()
    supervision.on(DIED, 0, "signal 11")

    assert repr(supervision) == "<Supervision WAITING deaths=1 worker exited: signal 11>"


@pytest.mark.parametrize(
    ("exit_", "text"),
    [
        (ProcessExit(code=3), "exit code 3"),
        (ProcessExit(code=0), "exit code 0"),
        (ProcessExit(signal=11), "signal 11"),
        (ProcessExit(signal=9, out_of_memory=True), "signal 9 (possibly out of memory)"),
        (ProcessExit(signal=9, hang="it hung for 10.2 s"), "signal 9 (it hung for 10.2 s)"),
        (ProcessExit(error="no such interpreter"), "no such interpreter"),
    ],
)
def test_an_exit_is_described(exit_: ProcessExit, text: str):
    assert describe_exit(exit_) == text


MEMORY = "worker exited: signal 9 (possibly out of memory)"
LAST = Recovery(0, "worker exited: signal 11")


@pytest.mark.parametrize(
    ("downs", "last", "now_secs", "health"),
    [
        ([], None, 1000, WorkerHealth()),
        ([MEMORY, "worker exited: signal 11"], LAST, 1, WorkerHealth(MEMORY, True)),
        (["worker exited: exit code 3"], None, 1, WorkerHealth("worker exited: exit code 3")),
        ([], LAST, 299, WorkerHealth(LAST.reason)),
        ([], LAST, 300, WorkerHealth()),
        ([], Recovery(0, MEMORY), 299, WorkerHealth(MEMORY, True)),
    ],
)
def test_death_is_reported_for_minutes_after_the_restart(
    downs: list[str], last: Recovery | None, now_secs: int, health: WorkerHealth
):
    assert health_of(downs, last, now_secs * SECOND) == health


def test_a_worker_whose_slow_starts_all_fail_is_parked():
    supervision = ready()
    now_ns = 100 * SECOND
    action = supervision.on(DIED, now_ns, "signal 9")
    actions = [action]
    for _ in range(5):
        if isinstance(action, WaitUntil):
            now_ns = action.at_ns
            assert supervision.on(TIMER, now_ns) == Start()
        # Never five deaths within a minute.
        now_ns += 90 * SECOND
        action = supervision.on(DIED, now_ns, "exit code 4")
        actions.append(action)

    assert [type(each) for each in actions] == [Start, *[WaitUntil] * 4, Park]
    assert action == Park("worker exited 5 times (last: exit code 4)", now_ns + 60 * SECOND)


def test_a_start_with_success_between_slow_failures_parks_nothing():
    supervision = ready()
    now_ns = 0
    for _ in range(3):
        action = supervision.on(DIED, now_ns, "signal 9")
        for _ in range(4):
            assert isinstance(action, WaitUntil)
            assert supervision.on(TIMER, action.at_ns) == Start()
            now_ns = action.at_ns + 90 * SECOND
            action = supervision.on(DIED, now_ns, "exit code 4")
        assert isinstance(action, WaitUntil)
        now_ns = action.at_ns
        assert supervision.on(TIMER, now_ns) == Start()
        assert supervision.on(STARTED, now_ns) == Nothing()
