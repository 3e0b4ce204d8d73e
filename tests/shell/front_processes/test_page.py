"""The numbers that front-end processes share: totals over all of them, changes of models, dropped log lines."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.front_processes.page import Page
from halimede.front_processes.pool import processes_for
from halimede.frontends.totals import Total
from support.command_line import complaint, settings

PARTS = st.lists(st.integers(0, 2**40), min_size=1, max_size=6)


@pytest.fixture
def pages() -> Iterator[list[Page]]:
    """Three mappings of one page: those of three processes."""
    descriptor = Page.create(3)
    yield [Page(descriptor, 3) for _ in range(3)]
    os.close(descriptor)


def totals_of(parts: list[int]) -> list[Total]:
    cells = memoryview(bytearray(8 * len(parts))).cast("Q")
    places = range(len(parts))
    made = [Total(cells, own, tuple(other for other in places if other != own)) for own in places]
    for total, part in zip(made, parts, strict=True):
        total.publish(part)
    return made


@given(PARTS)
def test_each_process_sees_the_sum_of_all_parts(parts: list[int]):
    for total, part in zip(totals_of(parts), parts, strict=True):
        assert total.others() == sum(parts) - part
        assert total.publish(part) == sum(parts)


@given(PARTS)
def test_only_the_processes_with_the_smallest_part_are_least(parts: list[int]):
    assert [total.is_least() for total in totals_of(parts)] == [part == min(parts) for part in parts]


@given(PARTS)
def test_a_share_is_the_mean_rounded_up(parts: list[int]):
    for total in totals_of(parts):
        assert total.share() * len(parts) >= sum(parts) > (total.share() - 1) * len(parts)


def test_a_process_alone_has_everything():
    [total] = totals_of([7])

    assert (total.others(), total.share(), total.is_least(), total.publish(3)) == (0, 7, True, 3)


def test_totals_of_all_kinds_and_processes_are_apart(pages: list[Page]):
    parts = 1
    published = []
    for number, page in enumerate(pages):
        for totals in (page.http_totals(number), page.grpc_totals(number)):
            for total in (totals.connections, totals.held_bytes, totals.unsent_bytes):
                total.publish(parts)
                published.append(parts)
                parts *= 2
    for number, page in enumerate(pages):
        mine = published[6 * number : 6 * number + 6]
        for first, totals in enumerate((page.http_totals(number), page.grpc_totals(number))):
            for at, total in enumerate((totals.connections, totals.held_bytes, totals.unsent_bytes)):
                kind = 3 * first + at
                assert total.others() == sum(published[kind::6]) - mine[kind]


def test_a_process_that_ended_has_no_part(pages: list[Page]):
    for number, page in enumerate(pages):
        page.http_totals(number).connections.publish(5)
        page.grpc_totals(number).held_bytes.publish(100)
        page.publish_dropped_lines(number, 1)

    pages[0].clear(1)

    assert pages[0].http_totals(0).connections.others() == 5
    assert pages[2].grpc_totals(2).held_bytes.others() == 100
    assert pages[1].http_totals(1).connections.others() == 10
    assert pages[0].dropped_lines() == 3, "the lines that the process dropped are still counted"


def test_the_beats_of_each_process_are_counted_until_its_end(pages: list[Page]):
    for number, page in enumerate(pages):
        for _ in range(number + 1):
            page.beat(number)
    assert [pages[0].beats(number) for number in range(3)] == [1, 2, 3]

    pages[0].clear(1)

    assert [pages[0].beats(number) for number in range(3)] == [1, 0, 3]
    assert pages[0].dropped_lines() == 0


def test_dropped_lines_outlive_the_process_that_dropped_them(pages: list[Page]):
    core, *_ = pages
    for number, count in enumerate((3, 20, 100)):
        pages[number].publish_dropped_lines(number, count)
    assert core.dropped_lines() == 123

    kept = core.keep_dropped_lines(1)
    pages[1].publish_dropped_lines(1, 0)

    assert (kept, core.dropped_lines()) == (20, 103)
    assert core.keep_dropped_lines(1) == 0, "they are kept once"


def test_all_processes_see_a_change_of_the_models_at_once(pages: list[Page]):
    before = [page.changes for page in pages]
    pages[0].note_change()

    assert (before, [page.changes for page in pages]) == ([0, 0, 0], [1, 1, 1])


@pytest.mark.parametrize("is_ready", [False, True])
@pytest.mark.parametrize("is_draining", [False, True])
def test_all_processes_see_the_state_and_the_beats_of_the_core(pages: list[Page], is_ready: bool, is_draining: bool):
    core, *others = pages
    assert {(each.is_ready, each.is_draining, each.core_beats) for each in others} == {(False, False, 0)}

    core.publish_state(is_ready=is_ready, is_draining=is_draining)
    core.beat_core()

    assert {(each.is_ready, each.is_draining, each.core_beats) for each in others} == {(is_ready, is_draining, 1)}
    assert (core.changes, [core.beats(number) for number in range(3)]) == (0, [0, 0, 0])


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 1), (3, 1), (4, 2), (15, 2), (16, 4), (256, 4)])
def test_processes_by_default(cores: int, processes: int):
    assert processes_for(cores) == processes


@pytest.mark.parametrize("count", [0, 1, 2, 64])
def test_a_number_of_processes_is_read(count: int):
    assert settings("--model-repository=/", f"--frontend-processes={count}").frontend_processes == count


@pytest.mark.parametrize(
    ("count", "right"), [("-1", "64"), ("65", "64"), ("two", "an integer"), ("", "an integer"), ("1.5", "an integer")]
)
def test_another_number_of_processes_is_refused(count: str, right: str):
    text = complaint("--model-repository=/", f"--frontend-processes={count}")

    assert text.startswith("--frontend-processes: ")
    assert right in text
