from halimede.core.watching import BUSY_LOOK_NS, PAUSED_BATCHES, WATCH_NS, WATCHED_REQUESTS, Watching


def test_it_is_worth_it_after_what_came_soon_and_was_small():
    watching = Watching(processors=2)

    assert watching.is_worth_it(WATCH_NS - 1, WATCHED_REQUESTS)
    assert not watching.is_worth_it(WATCH_NS, 1)
    assert not watching.is_worth_it(0, WATCHED_REQUESTS + 1)


def test_with_one_processor_nobody_looks():
    assert not Watching(processors=1).is_worth_it(0, 1)


def test_after_looks_that_others_needed_the_processor_for_none_is_made_for_a_while():
    watching = Watching(processors=2)
    watching.ended(looks=10, elapsed_ns=10 * BUSY_LOOK_NS + 1)

    assert not any(watching.is_worth_it(0, 1) for _ in range(PAUSED_BATCHES))
    assert watching.is_worth_it(0, 1)


def test_quick_looks_change_nothing():
    watching = Watching(processors=2)
    watching.ended(looks=10, elapsed_ns=10 * BUSY_LOOK_NS)

    assert watching.is_worth_it(0, 1)
