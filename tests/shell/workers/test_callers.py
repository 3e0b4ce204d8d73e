"""Who calls from an instance whose batches the test makes."""

from halimede.core.types import InferenceRequest
from halimede.core.types.caller import Answers, Beside, Caller, RunningBatch
from halimede.workers.callers import Callers
from halimede.workers.worker import BatchItem


def item(key: int, caller: Caller | None = None) -> BatchItem:
    return BatchItem(key, InferenceRequest("m"), 1, cancelled=False, caller=caller)


def calling(depth: int, waiter: object) -> Caller:
    return Caller(depth, waiter, None, "m", 1_500_000_000)


def callers() -> Callers:
    return Callers("m", "1", 0, queue_timeout_ms=1_500)


FIRST, SECOND = RunningBatch("m", "1", 1), RunningBatch("m", "1", 2)


def test_a_call_is_one_deeper_than_the_deepest_request_of_its_batch() -> None:
    made = callers()

    assert made.of_batch([item(1), item(5, Caller(4)), item(6, Caller(2))]) == calling(5, FIRST)
    assert made.of_batch([item(2)]) == calling(1, SECOND)


def test_all_calls_of_a_batch_have_one_caller() -> None:
    made = callers()
    batch = [item(1, Caller(4, "a batch"))]

    assert made.of_batch(batch) is made.of_batch(batch)
    assert made.of_batch([item(2, Caller(1, "another"))]) == calling(2, SECOND)
    assert made.of_batch(batch) == calling(5, FIRST)


def test_answers_of_one_batch_wait_for_a_call_outside_of_it() -> None:
    made = callers()

    assert made.beside([(item(1, Caller(4)), 1), (item(3), 1)]) == calling(5, Answers(FIRST))
    assert made.beside([(item(2), 2)]) == calling(1, Answers(SECOND))


def test_with_several_batches_the_waiting_one_is_unknown() -> None:
    made = callers()

    assert made.beside([(item(1, Caller(4)), 1), (item(2), 2)]) == calling(5, Beside("m", "1", 0))
    assert made.beside([]) == calling(1, Beside("m", "1", 0))
