"""Questions to a model in a process whether it is ready, and models that do not answer in time."""

import asyncio
from collections.abc import Awaitable, Callable

from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.supervision.readiness import Readiness


class Process:
    """Counts the questions and does not answer them."""

    def __init__(self) -> None:
        self.batches: list[object] = []
        self.questions = 0

    def ask_ready(self) -> None:
        self.questions += 1


async def answer_of(asking: Awaitable[bool]) -> bool | InferenceError:
    try:
        return await asking
    except InferenceError as error:
        return error


def run(scenario: Callable[[Readiness, Process], Awaitable[None]], limit_s: float) -> None:
    async def main() -> None:
        readiness = Readiness(asyncio.get_running_loop(), limit_s)
        readiness.begin(answers=True)
        await scenario(readiness, Process())

    asyncio.run(main())


def test_a_model_that_does_not_answer_in_time_is_unavailable() -> None:
    async def scenario(readiness: Readiness, process: Process) -> None:
        checks = [answer_of(readiness.ask(process)) for _ in range(2)]
        text = "Timed out waiting for {} is_ready() response"
        assert await asyncio.gather(*checks) == [
            InferenceError(ErrorCode.UNAVAILABLE, text.format("user-defined")),
            InferenceError(ErrorCode.UNAVAILABLE, text.format("in-flight")),
        ]
        # A later check waits for the model's answer to the first one, too.
        later = asyncio.create_task(answer_of(readiness.ask(process)))
        asyncio.get_running_loop().call_soon(readiness.on_ready, True)
        assert await later is True
        assert process.questions == 1

    run(scenario, limit_s=0.01)


def test_a_batch_behind_a_check_that_hangs_does_not_make_the_model_ready() -> None:
    async def scenario(readiness: Readiness, process: Process) -> None:
        checks = [asyncio.create_task(answer_of(readiness.ask(process)))]
        await asyncio.sleep(0)
        process.batches.append(object())
        checks.append(asyncio.create_task(answer_of(readiness.ask(process))))
        answers = await asyncio.gather(*checks)
        assert [isinstance(answer, InferenceError) for answer in answers] == [True, True]

    run(scenario, limit_s=0.01)


def test_while_a_batch_runs_the_last_answer_stands() -> None:
    async def scenario(readiness: Readiness, process: Process) -> None:
        process.batches.append(object())
        assert await readiness.ask(process) is True
        readiness.on_ready(False)
        assert (await readiness.ask(process), process.questions) == (False, 0)

    run(scenario, limit_s=60)


def test_a_check_waits_for_the_one_that_runs_and_takes_its_result() -> None:
    async def scenario(readiness: Readiness, process: Process) -> None:
        checks = [asyncio.create_task(answer_of(readiness.ask(process))) for _ in range(3)]
        asyncio.get_running_loop().call_soon(readiness.on_ready, False)
        assert await asyncio.gather(*checks) == [False] * 3
        assert process.questions == 1

    run(scenario, limit_s=60)
