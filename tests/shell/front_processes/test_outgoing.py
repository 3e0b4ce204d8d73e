"""Requests of a front-end process to a core that does not read: they wait, and block nothing."""

from collections.abc import Iterator

import pytest

from halimede.channel.server_end.memory import COPIED_ON_LOOP_BYTES
from halimede.core.types import DataType, ErrorCode, InferenceRequest, InferenceResponse, Tensor
from halimede.front_processes.frames import FrontFrame
from halimede.inference_frames.kinds import InferenceFrame
from support.loop_thread import LOOPS, LoopThread
from support.played_core import PlayedCore

SIZE = 10_000
MANY = 200
"""More than fits the channel."""


@pytest.fixture(params=LOOPS)
def core(request: pytest.FixtureRequest) -> Iterator[PlayedCore]:
    made = PlayedCore(LoopThread(LOOPS[request.param]))
    yield made
    made.close()
    assert made.thread.log == []


def asking(number: int, size: int = SIZE) -> InferenceRequest:
    data = bytes([number % 256]) * size
    return InferenceRequest("m", id=str(number), inputs=[Tensor("IN", DataType.UINT8, (size,), data)])


def ask_many(core: PlayedCore) -> tuple[list[int], list[InferenceResponse]]:
    """Ask until the core would have to read; the tickets, and where answers go."""
    answers: list[InferenceResponse] = []
    tickets = [core.infer(asking(number), answers.append) for number in range(MANY)]
    return tickets, answers


def test_requests_that_wait_for_the_core_arrive_in_their_order(core: PlayedCore):
    ask_many(core)

    arrived: list[InferenceRequest] = []
    while len(arrived) < MANY:
        arrived += core.requests()

    assert [each.id for each in arrived] == [str(number) for number in range(MANY)]
    assert all(bytes(each.inputs[0].data) == asking(int(each.id)).inputs[0].data for each in arrived)


def test_what_else_the_core_is_asked_follows_whole(core: PlayedCore):
    ask_many(core)
    core.thread.call(lambda: core.server.model("m"))

    kinds = []
    while FrontFrame.ASK not in kinds:
        kinds.append(core.frame()[0])

    assert set(kinds) == {FrontFrame.INFERS, FrontFrame.ASK}


def test_a_request_that_waits_is_taken_back_when_it_is_cancelled(core: PlayedCore):
    """So that clients that come and go leave nothing here, while the core hangs."""
    tickets, answers = ask_many(core)
    core.thread.call(lambda: [core.server.cancel(ticket) for ticket in tickets[1:]])
    taken_back = len(answers)
    assert taken_back > MANY // 2
    assert {each.error.code for each in answers if each.error} == {ErrorCode.CANCELLED}

    seen: list[str] = []
    cancelled = 0
    while len(seen) < MANY - taken_back or cancelled < MANY - taken_back - 1:
        kind, body = core.frame()
        if kind is FrontFrame.INFERS:
            seen += [request.id for request in core.decoded(body)]
        else:
            assert kind is InferenceFrame.CANCEL_CALL
            cancelled += 1
    assert seen == [str(number) for number in range(MANY - taken_back)]
    assert "in_flight=" + str(MANY - taken_back) in repr(core.server)


def test_a_large_request_that_waits_is_sent_when_the_core_reads(core: PlayedCore):
    ask_many(core)
    core.infer(asking(MANY, COPIED_ON_LOOP_BYTES + 1), lambda _: None)

    seen: list[str] = []
    while str(MANY) not in seen:
        seen += [request.id for request in core.requests()]

    assert seen == [str(number) for number in range(MANY + 1)]
