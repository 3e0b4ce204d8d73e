"""When a process counts as hung. Times are in seconds, a check each half second."""

import os
from pathlib import Path

import pytest

from halimede.core.hangs import (
    ProcessStat,
    Silence,
    check_interval_ns,
    front_end_is_alive,
    parse_stat,
    zygote_is_alive,
)

SECOND = 1_000_000_000
LIMIT = 2 * SECOND


def hung_at(silence: Silence, checks: list[tuple[float, bool]]) -> list[float]:
    return [at for at, is_alive in checks if silence.check(int(at * SECOND), is_alive=is_alive)]


def test_a_process_that_is_silent_for_the_limit_hangs():
    silence = Silence(LIMIT)
    assert hung_at(silence, [(0.5 * n, n < 3) for n in range(8)]) == [3.0, 3.5]
    assert silence.ns == 2.5 * SECOND


def test_any_sign_of_life_begins_the_wait_again():
    assert hung_at(Silence(LIMIT), [(0.5 * n, n == 3) for n in range(8)]) == [3.5]


def test_the_first_check_of_a_silent_process_begins_its_wait():
    assert hung_at(Silence(LIMIT), [(1000 + 0.5 * n, False) for n in range(5)]) == [1002.0]


def test_time_in_which_the_watcher_did_not_run_does_not_count():
    """A silence of an hour between two checks counts as two intervals: the machine was suspended."""
    silence = Silence(LIMIT)
    assert hung_at(silence, [(0, True), (3600, False), (3600.5, True)]) == []
    assert hung_at(silence, [(7200, False), (7200.5, False), (7201, False)]) == [7201]


@pytest.mark.parametrize(("limit", "interval"), [(1, 0.25), (2, 0.5), (10, 1), (3600, 1)])
def test_checks_are_at_most_a_second_apart_and_several_fit_the_limit(limit: int, interval: float):
    assert check_interval_ns(limit * SECOND) == interval * SECOND


def test_the_kernels_line_of_a_process_with_any_name_is_read():
    line = "17 (a) S (b c) T 1 17 17 0 -1 4194560 5 0 0 0 {} 0 0 20 0 1 0 900 1000 200\n"
    assert parse_stat(line.format("40 2")) == ProcessStat("T", 42)
    assert parse_stat(Path(f"/proc/{os.getpid()}/stat").read_text()).letter == "R"


@pytest.mark.parametrize(
    ("now", "has_beaten", "is_alive"),
    [
        (ProcessStat("S", 7), True, True),
        (ProcessStat("S", 7), False, False),
        (ProcessStat("T", 7), False, False),
        (ProcessStat("R", 8), False, True),  # it imports
        (ProcessStat("D", 7), False, True),  # it waits for a disk
        (ProcessStat("t", 7), False, True),  # a debugger holds it
    ],
)
def test_a_zygote_lives_if_it_beats_computes_or_waits_for_the_kernel(
    now: ProcessStat, has_beaten: bool, is_alive: bool
):
    assert zygote_is_alive(ProcessStat("S", 7), now, has_beaten=has_beaten) is is_alive


@pytest.mark.parametrize(
    ("letter", "has_beaten", "is_alive"),
    [("R", False, False), ("D", False, False), ("T", False, False), ("T", True, True), ("t", False, True)],
)
def test_a_front_end_lives_if_it_beats_or_a_debugger_holds_it(letter: str, has_beaten: bool, is_alive: bool):
    assert front_end_is_alive(ProcessStat(letter, 7), has_beaten=has_beaten) is is_alive
