"""Deadlocks of calls. Calls are numbers, waiters are words."""

from halimede.core.schedule.wait_graph import ANSWERED, Dependencies, WaitGraph

FREE = ()


def graph(dependencies: dict[int, Dependencies], **calls: list[int]) -> WaitGraph:
    made = WaitGraph(dependencies.get)
    for waiter, tickets in calls.items():
        for ticket in tickets:
            made.add(ticket, waiter)
    return made


def test_a_call_for_a_free_instance_is_served():
    assert not graph({1: Dependencies([FREE])}, a=[1]).is_stuck(1)


def test_model_that_calls_itself_on_its_only_instance_is_stuck():
    assert graph({1: Dependencies([["a"]])}, a=[1]).is_stuck(1)


def test_a_second_instance_that_works_will_serve_it():
    assert not graph({1: Dependencies([["a"], ["b"]])}, a=[1]).is_stuck(1)


def test_the_second_of_two_calls_that_wait_for_each_other_is_stuck():
    dependencies: dict[int, Dependencies] = {1: Dependencies([["a"], ["b"]])}
    calls = graph(dependencies, a=[1])
    assert not calls.is_stuck(1)

    dependencies[2] = Dependencies([["a"], ["b"]])
    calls.add(2, "b")
    assert calls.is_stuck(2)


def test_a_circle_through_other_models_is_seen():
    # a's model calls b's, which runs and calls c's, which runs and calls a's.
    dependencies: dict[int, Dependencies] = {
        1: Dependencies([["b"]]),
        2: Dependencies([["c"]]),
        3: Dependencies([["a"]]),
    }

    assert graph(dependencies, a=[1], b=[2], c=[3]).is_stuck(3)


def test_a_circle_through_an_ensemble_is_seen():
    dependencies: dict[int, Dependencies] = {1: Dependencies([["pipeline"]]), 2: Dependencies([["a"]])}

    assert graph(dependencies, a=[1], pipeline=[2]).is_stuck(2)


def test_a_batch_of_several_calls_ends_with_all_of_them():
    # b waits for a call that will be served and for one that waits for b itself.
    dependencies: dict[int, Dependencies] = {1: Dependencies([FREE]), 2: Dependencies([["b"]])}

    calls = graph(dependencies, b=[1, 2])

    assert calls.is_stuck(2)
    assert not calls.is_stuck(1)


def test_a_request_behind_batches_that_still_make_progress_is_not_stuck():
    dependencies: dict[int, Dependencies] = {1: Dependencies([["b"]]), 2: Dependencies([["c"]])}

    assert not graph(dependencies, a=[1], b=[2]).is_stuck(1)


def test_waiting_process_also_blocks_its_free_slots():
    dependencies: dict[int, Dependencies] = {1: Dependencies([["process"], ["process", "b"]])}

    assert graph(dependencies, process=[1]).is_stuck(1)
    assert not graph(dependencies, b=[1]).is_stuck(1), "another slot of the process serves it"


def test_call_is_answered_when_all_that_blocks_it_has_ended():
    dependencies: dict[int, Dependencies] = {
        1: Dependencies([["process", "b"]]),
        2: Dependencies([FREE]),
        3: Dependencies([["a"]]),
    }

    assert graph(dependencies, a=[1], process=[2], b=[3]).is_stuck(3)
    dependencies[3] = Dependencies([FREE])
    assert not graph(dependencies, a=[1], process=[2], b=[3]).is_stuck(1)


def test_ended_call_blocks_nothing():
    assert not graph({1: ANSWERED}, a=[1]).is_stuck(1)


def test_calls_that_are_answered_are_forgotten():
    calls = graph({1: Dependencies([["a"]])}, a=[1])
    assert len(calls) == 1

    calls.remove(1)
    calls.remove(1)

    assert len(calls) == 0
