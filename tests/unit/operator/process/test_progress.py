"""Liveness: a process that hangs, one that is busy, and one that is starved."""

from halimede_operator.core.process.progress import HANGS_AFTER_S, Progress


def test_a_loop_that_makes_no_step_hangs() -> None:
    progress = Progress(now=0.0)
    for second in range(1, int(HANGS_AFTER_S) + 1):
        progress.ticked(float(second))
    assert progress.problem() is None
    progress.ticked(HANGS_AFTER_S + 1)
    assert progress.problem() == "the event loop has hung for 61 s"
    progress.stepped(HANGS_AFTER_S + 2)
    assert progress.problem() is None


def test_a_loop_with_long_steps_is_alive() -> None:
    progress = Progress(now=0.0)
    for second in range(1, 600):
        progress.ticked(float(second))
        if second % 50 == 0:
            progress.stepped(float(second))
        assert progress.problem() is None


def test_a_process_that_was_stopped_is_alive_afterwards() -> None:
    progress = Progress(now=0.0)
    progress.ticked(1.0)
    progress.ticked(3600.0)
    assert progress.problem() is None


def test_a_starved_process_is_alive_as_long_as_both_threads_run_now_and_then() -> None:
    progress = Progress(now=0.0)
    for number in range(1, 100):
        progress.ticked(40.0 * number)
        if number % 20 == 0:
            progress.stepped(40.0 * number)
        assert progress.problem() is None


def test_the_first_step_after_a_pause_is_noticed() -> None:
    progress = Progress(now=0.0)
    assert [progress.stepped(now) for now in (1.0, 2.5, 3.5, 100.0, 101.0)] == [False, False, False, True, False]
