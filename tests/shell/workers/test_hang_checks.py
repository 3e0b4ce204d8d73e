"""The checks of processes that hang."""

import asyncio
from dataclasses import dataclass, field

import pytest

from halimede.core.hangs import ProcessKind
from halimede.processes.hangs import HangChecks

LIMIT_S = 0.02


@dataclass(eq=False)
class Silent:
    """A process that shows no life. The first `failures` attempts to end it fail."""

    failures: int
    attempts: int = 0
    kind: ProcessKind = ProcessKind.WORKER
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def shows_life(self) -> bool:
        return False

    def end_hung(self, silence_secs: float) -> None:
        assert silence_secs >= LIMIT_S
        self.attempts += 1
        if self.attempts <= self.failures:
            raise RuntimeError("can't start new thread")
        self.ended.set()


def test_a_process_that_cannot_be_ended_is_ended_later(caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        checks = HangChecks(LIMIT_S)
        stubborn, other = Silent(failures=2), Silent(failures=0)
        for each in (stubborn, other):
            checks.add(each)
        running = asyncio.create_task(checks.run())
        await asyncio.wait_for(asyncio.gather(stubborn.ended.wait(), other.ended.wait()), 10)
        running.cancel()
        assert (stubborn.attempts, other.attempts) == (3, 1)
        assert checks.ended == {ProcessKind.WORKER: 2}

    asyncio.run(run())
    assert "could not be ended" in caplog.text
