"""Requests of an ensemble, with clients that record answers and a server that the test controls."""

import asyncio
import sys
import time
from dataclasses import dataclass

import pytest

from halimede.core.config.check_request import Checked
from halimede.core.ensemble.admission import MAX_WAITING
from halimede.core.schedule.wait_graph import ANSWERED, Dependencies
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.caller import Caller
from halimede.core.types.statistics import FailureReason
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.ensemble import MAX_REQUESTS
from halimede.runtime.requests import STOPPING
from support.ensemble_bench import CANCELLED, Bench, of_e, refused
from support.loops import in_a_loop

BROKEN = InferenceError(ErrorCode.INTERNAL, "it broke")


@in_a_loop
async def test_a_request_passes_all_steps_and_gets_one_answer() -> None:
    bench = Bench("a", "b")
    bench.submit(1)
    assert bench.server.called == ["a"]
    bench.server.take().answer()
    assert (bench.server.called, bench.executing) == (["b"], 1)
    bench.server.take().answer()
    assert bench.answers == [(1, "ok", True)]
    response = bench.responses[0][1]
    assert (response.model_name, response.model_version) == ("e", "1")
    snapshot = bench.stats.snapshot()
    assert (snapshot.inference_count, snapshot.execution_count, snapshot.inference.success.count) == (1, 1, 1)
    assert snapshot.inference.compute_infer.ns == 0
    bench.assert_at_rest()
    await bench.requests.drained()


@in_a_loop
async def test_log_names_outputs_that_no_step_made(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    bench = Bench("a")
    bench.submit(1)
    bench.server.take().answer()
    assert caplog.messages == []
    bench.submit(2)
    bench.server.take().end()
    assert caplog.messages == ["Composing models did not output tensor OUT"]


@in_a_loop
async def test_the_first_error_is_the_answer_after_the_other_branch_has_ended() -> None:
    bench = Bench("a", "b", side_by_side=True)
    bench.submit(1)
    bench.server.take("b").answer(BROKEN)
    assert bench.answers == []
    bench.server.take("a").answer()
    assert bench.answers == [(1, of_e(BROKEN), True)]
    assert bench.failures() == {FailureReason.OTHER: 1}
    bench.assert_at_rest()


@in_a_loop
async def test_immediate_answers_do_not_deepen_the_stack() -> None:
    models = [f"m{number}" for number in range(2000)]
    bench = Bench(*models)
    bench.server.at_once = lambda _: None
    depth = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        bench.submit(1)
    finally:
        sys.setrecursionlimit(depth)
    assert bench.answers == [(1, "ok", True)]
    bench.assert_at_rest()


@in_a_loop
async def test_a_cancel_ends_running_steps_and_starts_no_others() -> None:
    bench = Bench("a", "b")
    bench.submit(1)
    (ticket,) = bench.server.calls
    bench.ensemble.cancel(1)
    bench.ensemble.cancel(1)
    assert (bench.server.cancelled, bench.answers) == ([ticket], [])
    bench.server.take().answer()  # it was too late
    assert bench.server.called == []
    assert bench.answers == [(1, CANCELLED, True)]
    assert bench.failures() == {FailureReason.CANCELED: 1}
    bench.assert_at_rest()


@in_a_loop
async def test_calls_of_steps_carry_their_depth_and_caller() -> None:
    bench = Bench("a")
    callers = (None, Caller(3), Caller(3, "a batch", None, "m", 7))
    for key, caller in enumerate(callers, 1):
        bench.submit(key, caller=caller)
        assert bench.server.take().caller == (Caller(1), Caller(4), Caller(4, 3, None, "m", 7))[key - 1]
    assert bench.ensemble.dependencies_of(3) == Dependencies([(3,)])
    assert bench.ensemble.dependencies_of(4) == ANSWERED


@in_a_loop
async def test_a_request_is_not_refused_for_the_queueing_of_its_steps() -> None:
    bench = Bench("a")
    bench.submit(1)
    assert not bench.ensemble.try_refuse(1, InferenceError(ErrorCode.UNAVAILABLE, "no instance will answer"))
    bench.server.take().answer()
    assert bench.answers == [(1, "ok", True)]
    bench.assert_at_rest()


@in_a_loop
async def test_an_ensemble_refuses_requests_beyond_its_bounds() -> None:
    bench = Bench("a")
    bench.submit(*range(1, MAX_REQUESTS + 2))
    assert bench.answers == [(MAX_REQUESTS + 1, refused("Exceeds maximum queue size", MAX_REQUESTS + 1), True)]
    assert bench.failures() == {FailureReason.REJECTED: 1}
    for call in list(bench.server.calls.values()):
        call.answer()
    bench.assert_at_rest()


@in_a_loop
async def test_an_ensemble_refuses_requests_beyond_the_byte_bound() -> None:
    bench = Bench("a")
    bench.submit(1, size_bytes=bench.table.decoded.limit_bytes)
    bench.submit(2, size_bytes=1)
    ((key, error, final),) = bench.answers
    assert (key, final) == (2, True)
    assert isinstance(error, InferenceError)
    assert error.message.startswith("[request id: 2] Exceeds maximum queue size: requests in flight hold")


@in_a_loop
async def test_calls_of_a_step_are_limited_and_the_rest_run_in_order() -> None:
    bench = Bench("a", "b", limit=1)
    bench.submit(1, 2, 3)
    assert bench.server.called == ["a"]
    bench.server.take().answer()
    # The first one's second step has a gate of its own.
    assert [(call.request.model_name, call.request.id) for call in bench.server.calls.values()] == [
        ("b", "1"),
        ("a", "2"),
    ]
    while bench.server.calls:
        bench.server.take().answer()
    assert bench.answers == [(1, "ok", True), (2, "ok", True), (3, "ok", True)]
    assert bench.stats.queue.ns > 0
    bench.assert_at_rest()


@in_a_loop
async def test_requests_with_calls_at_gates_are_pending() -> None:
    bench = Bench("a", "b", side_by_side=True, limit=1)
    ensemble = bench.ensemble

    def counted() -> tuple[int, int, bool]:
        return ensemble.queued, bench.executing, ensemble.load().oldest_wait_ns > 0

    bench.submit(1)
    assert counted() == (0, 1, False)
    bench.submit(2, 3)
    assert counted() == (2, 1, True)
    bench.server.take("a").answer()
    assert counted() == (2, 1, True), "the second one's other call waits still"
    bench.server.take("b").answer()
    assert counted() == (1, 1, True)
    ensemble.cancel(3)
    assert counted() == (0, 1, False)
    bench.server.take("a").answer()
    bench.server.take("b").answer()
    assert counted() == (0, 0, False)
    bench.assert_at_rest()


@in_a_loop
async def test_a_full_gate_fails_the_request_and_cancels_its_calls() -> None:
    bench = Bench("many", "a", limit=1, decoupled=("many",))
    bench.submit(1)
    many = bench.server.take("many")
    for _ in range(1 + MAX_WAITING):
        many.answer(final=False)
    assert bench.answers == []
    many.answer(final=False)
    bench.server.take("a").answer()
    many.end()
    assert bench.answers[-1] == (1, of_e(refused("Exceeds maximum queue size", 1)), True)
    bench.assert_at_rest()
    bench.submit(2)
    bench.server.take("many").answer(final=False)
    assert bench.server.called == ["a"]


@in_a_loop
async def test_a_cancelled_request_leaves_the_gate() -> None:
    bench = Bench("a", limit=1)
    bench.submit(1, 2, 3)
    bench.ensemble.cancel(2)
    assert bench.answers == [(2, CANCELLED, True)]
    bench.server.take().answer()
    assert [call.request.id for call in bench.server.calls.values()] == ["3"]
    bench.server.take().answer()
    bench.assert_at_rest()


@in_a_loop
async def test_a_failed_request_does_not_wait_at_a_gate() -> None:
    bench = Bench("a", "b", side_by_side=True, limit=1)
    bench.submit(1)
    bench.server.take("a").answer()
    bench.submit(2)  # its step `b` waits behind that of 1
    bench.server.take("a").answer(BROKEN)
    assert bench.answers == [(2, of_e(BROKEN), True)]
    bench.server.take("b").answer()
    assert bench.server.called == []
    bench.assert_at_rest()


@in_a_loop
async def test_calls_of_one_request_that_expire_together_fail_only_that_request() -> None:
    bench = Bench("many", "s", limit=1, decoupled=("many",))
    bench.submit(1, 2, timeout_us=50_000)
    many = bench.server.take("many")
    for _ in range(3):
        many.answer(final=False)
    many.end()
    second = bench.server.take("many")
    second.answer(final=False)
    assert bench.server.called == ["s"]  # two more calls of request 1 and one of request 2 wait
    time.sleep(0.1)  # noqa: ASYNC251  # the loop is busy while they expire
    for _ in range(5):
        await asyncio.sleep(0)
    bench.server.take("s").answer()
    second.end()
    expired = of_e(refused("Request timeout expired", 1)), of_e(refused("Request timeout expired", 2))
    assert [each for each in bench.answers if each[2]] == [(1, expired[0], True), (2, expired[1], True)]
    bench.assert_at_rest()


@in_a_loop
async def test_a_waiting_call_is_not_made_after_its_request_failed_without_an_error() -> None:
    bench = Bench("a", "b", side_by_side=True, limit=1)
    bench.submit(1, 2)
    bench.server.take("a").answer()
    bench.server.take("a").answer(final=False)  # not the one answer that a step gives
    bench.server.take("b").answer()
    assert [call.request.id for call in bench.server.calls.values()] == []


@in_a_loop
async def test_the_time_in_the_gate_counts_towards_the_queue_timeout() -> None:
    bench = Bench("a", limit=1)
    bench.submit(1)
    bench.submit(2, timeout_us=1_000)
    bench.submit(3, timeout_us=60_000_000)
    bench.submit(4)
    while not bench.answers:
        await asyncio.sleep(0.001)
    assert bench.answers == [(2, of_e(refused("Request timeout expired", 2)), True)]
    await asyncio.sleep(0.002)
    bench.server.take().answer()
    (call,) = bench.server.calls.values()
    assert (call.request.id, call.request.timeout_us < 60_000_000) == ("3", True)
    while bench.server.calls:
        bench.server.take().answer()
    bench.assert_at_rest()


@in_a_loop
async def test_a_call_from_the_code_of_a_model_passes_the_gate() -> None:
    bench = Bench("a", limit=1)
    bench.submit(1)
    bench.submit(2, caller=Caller(1, "a batch"))
    bench.submit(3, caller=Caller(1))
    assert [call.request.id for call in bench.server.calls.values()] == ["1", "2"]
    bench.server.take().answer()
    assert [call.request.id for call in bench.server.calls.values()] == ["2"]
    bench.server.take().answer()
    assert [call.request.id for call in bench.server.calls.values()] == ["3"]
    bench.server.take().answer()
    bench.assert_at_rest()


@in_a_loop
async def test_a_decoupled_step_sends_as_fast_as_the_client_acknowledges() -> None:
    bench = Bench("many", "a", decoupled=("many",))
    bench.submit(1)
    (ticket,) = bench.server.calls
    many = bench.server.take("many")
    for _ in range(3):
        many.answer(final=False)
        bench.server.take("a").answer()
    assert bench.answers == [(1, "ok", False)] * 3
    assert bench.server.acknowledged == []
    bench.ensemble.acknowledge(1, 2)
    assert bench.server.acknowledged == [ticket] * 2
    bench.ensemble.acknowledge(1, 1)
    assert bench.server.acknowledged == [ticket] * 3
    many.end()
    assert bench.answers == [*[(1, "ok", False)] * 3, (1, "end", True)]
    assert [each.success.count for each in bench.stats.snapshot().responses] == [1, 1, 1, 0]
    bench.assert_at_rest()


@in_a_loop
async def test_a_stop_answers_each_request_once_and_ignores_later_answers() -> None:
    bench = Bench("a", "b", limit=1)
    bench.submit(1, 2, 3)
    bench.ensemble.abort()
    assert bench.answers == [(key, STOPPING, True) for key in (1, 2, 3)]
    bench.assert_at_rest()
    bench.server.take().answer()
    assert (bench.server.called, len(bench.answers)) == ([], 3)
    bench.submit(4)
    assert bench.server.called == ["a"]


@dataclass
class Member:
    """The executor of a step's model; only its readiness is implemented."""

    up: bool = True
    says_ready: bool = True
    refusal: InferenceError | None = None

    def is_available(self) -> bool:
        return self.up

    async def is_ready(self) -> bool:
        return self.up and self.says_ready


@in_a_loop
async def test_an_ensemble_is_ready_when_all_its_members_are_ready() -> None:
    bench = Bench("a", "b")
    for member_b, available, ready in (
        (Member(), True, True),
        (Member(says_ready=False), True, False),
        (Member(up=False), False, False),
        (None, False, False),
    ):
        bench.members[:] = [Member(), member_b]
        assert (bench.ensemble.is_available(), await bench.ensemble.is_ready()) == (available, ready)
        assert bench.ensemble.refusal is None
    bench.members[:] = [Member(), Member(refusal=InferenceError(ErrorCode.UNAVAILABLE, "model 'b' is not ready: dead"))]
    assert bench.ensemble.refusal == InferenceError(
        ErrorCode.UNAVAILABLE, "ensemble 'e' is not ready: model 'b' is not ready: dead"
    )


@in_a_loop
async def test_a_failing_callback_does_not_affect_other_clients(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("a")

    def fail(_: InferenceResponse) -> None:
        raise ValueError("the client's own")

    inputs = [Tensor("IN", DataType.FP32, (1,), b"\0" * 4)]
    bench.requests.submit(1, InferenceRequest("e", inputs=inputs), Checked(1, 4), fail, monotonic_ns())
    bench.submit(2)
    bench.server.take().answer()
    bench.server.take().answer()
    assert bench.answers == [(2, "ok", True)]
    assert "answering a request of model 'e' failed" in caplog.text
    bench.assert_at_rest()


@in_a_loop
async def test_an_internal_fault_fails_only_its_own_request(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench("a", "b")
    bench.submit(1, 2, 3)
    faults = [ValueError("a defect"), MemoryError()]

    def break_down(_: InferenceRequest) -> InferenceError | None:
        raise faults.pop(0)

    bench.server.at_once = break_down
    bench.server.take().answer()
    bench.server.take().answer()
    bench.server.at_once = None
    bench.server.take().answer()
    bench.server.take().answer()
    defect = InferenceError(ErrorCode.INTERNAL, "in ensemble 'e', the server failed")
    lack = InferenceError(ErrorCode.UNAVAILABLE, "the server has not enough memory for this")
    assert bench.answers == [(1, defect, True), (2, lack, True), (3, "ok", True)]
    assert "ensemble 'e': a request failed in the server" in caplog.text
    bench.assert_at_rest()
