import copy

from halimede.core.observe.stats import BUCKET_EDGES_NS, MAX_RESPONSE_INDICES, ModelStats
from halimede.core.types.statistics import (
    BatchStatistics,
    Duration,
    FailureReason,
    InferStatistics,
    ModelStatistics,
    ResponseOutcome,
    ResponseStatistics,
)

MS = 1_000_000


def test_unused_model_has_zero_statistics():
    assert ModelStats("digits", "3").snapshot() == ModelStatistics("digits", "3")


def test_each_request_of_a_batch_adds_the_whole_compute_time_of_its_batch():
    stats = ModelStats("digits", "1")
    stats.record_execution(5, input_ns=10, infer_ns=100, output_ns=20)
    stats.record_success(2, 150, 20, 10, 100, 20, 1_700_000_000_000)
    stats.record_success(3, 140, 10, 10, 100, 20, 1_700_000_000_001)

    assert stats.snapshot() == ModelStatistics(
        name="digits",
        version="1",
        last_inference_ms=1_700_000_000_001,
        inference_count=5,
        execution_count=1,
        inference=InferStatistics(
            success=Duration(2, 290),
            queue=Duration(2, 30),
            compute_input=Duration(2, 20),
            compute_infer=Duration(2, 200),
            compute_output=Duration(2, 40),
        ),
        batches=[BatchStatistics(5, Duration(1, 10), Duration(1, 100), Duration(1, 20))],
    )


def test_executions_are_counted_per_total_batch_size_in_ascending_order():
    stats = ModelStats("digits", "1")
    for rows in (8, 1, 8):
        stats.record_execution(rows, 1, 2, 3)

    snapshot = stats.snapshot()
    assert snapshot.execution_count == 3
    assert snapshot.batches == [
        BatchStatistics(1, Duration(1, 1), Duration(1, 2), Duration(1, 3)),
        BatchStatistics(8, Duration(2, 2), Duration(2, 4), Duration(2, 6)),
    ]


def test_failures_are_counted_by_reason_and_not_as_inferences():
    stats = ModelStats("digits", "1")
    stats.record_failure(FailureReason.REJECTED, 7, 0)
    stats.record_failure(FailureReason.REJECTED, 7, 0)
    stats.record_failure(FailureReason.BACKEND, 100, 0)

    assert stats.snapshot() == ModelStatistics("digits", "1", inference=InferStatistics(fail=Duration(3, 114)))
    assert stats.failures == {
        FailureReason.REJECTED: 2,
        FailureReason.CANCELED: 0,
        FailureReason.BACKEND: 1,
        FailureReason.OTHER: 0,
    }


def test_two_snapshots_can_be_subtracted():
    stats = ModelStats("digits", "1")
    stats.record_execution(1, 1, 2, 3)
    stats.record_success(1, 10, 4, 1, 2, 3, 5)
    before = stats.snapshot()
    kept = copy.deepcopy(before)
    stats.record_execution(1, 1, 2, 3)
    stats.record_success(1, 10, 4, 1, 2, 3, 6)
    stats.record_failure(FailureReason.OTHER, 1, 0)

    assert before == kept
    assert stats.snapshot().batches[0].compute_infer == Duration(2, 4)


def test_durations_fall_into_the_bucket_whose_edge_they_do_not_exceed():
    stats = ModelStats("digits", "1")
    for request_ns, queue_ns in ((1 * MS, 0), (1 * MS + 1, 60_000 * MS)):
        stats.record_success(1, request_ns, queue_ns, 0, 0, 0, 0)

    edge = BUCKET_EDGES_NS.index(1 * MS)
    assert {i: count for i, count in enumerate(stats.request_buckets) if count} == {edge: 1, edge + 1: 1}
    assert {i: count for i, count in enumerate(stats.queue.buckets) if count} == {0: 1, len(BUCKET_EDGES_NS): 1}


def test_bucket_edges_ascend():
    assert list(BUCKET_EDGES_NS) == sorted(set(BUCKET_EDGES_NS))


def test_repr_shows_what_was_counted():
    stats = ModelStats("digits", "1")
    stats.record_success(1, 1, 1, 1, 1, 1, 1)
    stats.record_failure(FailureReason.OTHER, 1, 0)

    assert repr(stats) == "<ModelStats digits:1 success=1 fail=1>"


def test_answers_of_a_decoupled_model_are_counted_by_their_index():
    stats = ModelStats("chat", "1", decoupled=True)
    stats.record_response(0, ResponseOutcome.SUCCESS, 10, 2)
    stats.record_response(0, ResponseOutcome.FAIL, 5, 1)
    stats.record_response(1, ResponseOutcome.EMPTY, 3, 1)
    stats.record_response(1, ResponseOutcome.CANCEL, 7, 0)
    snapshot = stats.snapshot()
    stats.record_response(0, ResponseOutcome.SUCCESS, 10, 2)

    assert snapshot.responses == [
        ResponseStatistics(
            compute_infer=Duration(2, 16),
            compute_output=Duration(1, 2),
            success=Duration(1, 12),
            fail=Duration(1, 6),
        ),
        ResponseStatistics(
            compute_infer=Duration(1, 4),
            empty_response=Duration(1, 4),
            cancel=Duration(1, 7),
        ),
    ]


def test_answers_beyond_the_last_index_share_it():
    stats = ModelStats("chat", "1", decoupled=True)
    for index in range(MAX_RESPONSE_INDICES + 500):
        stats.record_response(index, ResponseOutcome.SUCCESS, 1, 0)

    responses = stats.snapshot().responses
    assert len(responses) == MAX_RESPONSE_INDICES
    assert [each.success.count for each in responses[-2:]] == [1, 501]


def test_decoupled_model_has_a_histogram_of_first_responses():
    stats = ModelStats("chat", "1", decoupled=True)
    stats.record_first_response(1 * MS)

    edge = BUCKET_EDGES_NS.index(1 * MS)
    assert {i: count for i, count in enumerate(stats.first_response_buckets) if count} == {edge: 1}
    assert stats.first_response_ns == 1 * MS


def test_non_decoupled_model_has_no_response_statistics():
    stats = ModelStats("digits", "1")
    stats.record_response(0, ResponseOutcome.SUCCESS, 1, 1)
    stats.record_first_response(1)

    assert (stats.snapshot().responses, stats.first_response_buckets, stats.first_response_ns) == ([], [], 0)
