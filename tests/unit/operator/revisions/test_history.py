"""`status.revisions`: reading what any user may have written, and adding the Deployment's revision."""

import json

from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.core.revisions.history import MAX_REVISIONS, Entry, Outcome, read_history, with_current
from halimede_operator.core.revisions.rollback import RolledBack

NAMES = st.sampled_from(["aa", "bb", "cc", "dd", "ee", "ff"])
OUTCOMES = st.sampled_from(Outcome)
ENTRIES = st.builds(Entry, NAMES, st.integers(0, 9), OUTCOMES, st.sampled_from(["", "CrashLoop", "NeverReady"]))
HISTORIES = st.lists(ENTRIES, max_size=MAX_REVISIONS, unique_by=lambda each: each.revision).map(tuple)
CURRENT = st.builds(
    Entry, NAMES, st.integers(0, 9), st.sampled_from([Outcome.ROLLING_OUT, Outcome.SERVING, Outcome.FAILED])
)
RECORDS = st.none() | st.builds(
    RolledBack, st.just("inputs"), st.sampled_from(["gg", "hh"]), st.just(3), st.just("CrashLoop"), st.just("x"), NAMES
)


@given(HISTORIES, CURRENT, RECORDS)
def test_a_history_is_at_rest_once_it_has_the_current_revision(
    history: tuple[Entry, ...], current: Entry, record: RolledBack | None
) -> None:
    once = with_current(history, current, record)

    assert with_current(once, current, record) == once
    assert len({each.revision for each in once}) == len(once) <= MAX_REVISIONS
    assert [each.revision for each in once if each.outcome is Outcome.SERVING] in ([], [current.revision])
    if record is None:
        assert once[0].revision == current.revision


@given(HISTORIES)
def test_a_history_is_read_as_it_was_written(history: tuple[Entry, ...]) -> None:
    written = json.loads(json.dumps({"revisions": [each.as_text() for each in history]}))

    assert read_history(written) == history


def test_malformed_entries_are_left_out() -> None:
    good = "aa of generation 1: Serving"
    bad: list[object] = [
        None,
        7,
        {},
        "",
        "aa of generation -1: Serving",
        f"aa of generation {10**18}: Serving",
        "aa of generation 1: Lost",
        "aa of generation 1: Failed (because)(of)",
        f"{'x' * 64} of generation 1: Serving",
    ]

    assert read_history({"revisions": [*bad, good, good]}) == (Entry("aa", 1, Outcome.SERVING),)
    for status in (None, {}, {"revisions": 7}, {"revisions": {}}):
        assert read_history(status) == ()
