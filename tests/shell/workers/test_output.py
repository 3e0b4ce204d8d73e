"""Output of a worker is logged at a limited rate, and its last lines always."""

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable

import pytest

from halimede.processes.output import OutputReader

LIMIT_S = 30.0
Act = Callable[[int, OutputReader], Awaitable[None]]


def printed(act: Act, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The log lines after `act` has written to the pipe and the reader is closed."""

    async def main() -> None:
        read, write = os.pipe()
        os.set_blocking(read, False)
        reader = OutputReader(read, "m", {"model": "m", "version": "3"}, asyncio.get_running_loop())
        await act(write, reader)
        reader.close()
        reader.close()
        os.close(read)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    assert {(getattr(each, "model", ""), getattr(each, "version", "")) for each in caplog.records} <= {("m", "3")}
    return caplog.messages


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def test_lines_are_joined_from_any_parts(caplog: pytest.LogCaptureFixture):
    async def act(write: int, reader: OutputReader) -> None:
        for at, piece in enumerate((b"one\ntw", b"o\n\nthree\xff", b"\nno end")):
            os.write(write, piece)
            await until(lambda at=at: len(caplog.messages) >= (1, 3, 4)[at])
        os.close(write)

    assert printed(act, caplog) == ["one", "two", "", "three�", "no end"]


def test_a_long_line_is_split(caplog: pytest.LogCaptureFixture):
    async def act(write: int, reader: OutputReader) -> None:
        os.write(write, b"a" * 10_000 + b"\n" + b"b" * 20_000)
        os.close(write)

    assert [(text[0], len(text)) for text in printed(act, caplog)] == [
        ("a", 8_192), ("a", 1_808), ("b", 8_192), ("b", 8_192), ("b", 3_616),
    ]  # fmt: skip


def test_the_last_lines_are_logged_after_a_flood(caplog: pytest.LogCaptureFixture):
    """The last lines often explain why a model that printed too much has died."""

    async def act(write: int, reader: OutputReader) -> None:
        os.set_blocking(write, False)
        os.write(write, b"\n" * 65_536)
        await until(lambda: caplog.messages)
        os.write(write, b"x\n" * 20_000 + b"Traceback: why\n" + b"it died")
        os.close(write)

    lines = printed(act, caplog)

    assert lines[-3:-1] == ["Traceback: why", "it died"]
    assert len(lines) <= 2 * 500 + 1
    assert (
        lines[-1]
        == f"{65_536 + 20_002 - len(lines) + 1} lines of its output were left out: at most 500 are taken in a second"
    )


def test_close_does_not_wait_for_a_pipe_that_others_hold_open(caplog: pytest.LogCaptureFixture):
    writers: list[int] = []

    async def act(write: int, reader: OutputReader) -> None:
        writers.append(write)
        os.write(write, b"said\nhalf")

    assert printed(act, caplog) == ["said", "half"]
    os.close(writers[0])


def test_reading_stops_at_the_end_of_the_pipe(caplog: pytest.LogCaptureFixture):
    async def act(write: int, reader: OutputReader) -> None:
        os.write(write, b"said\n")
        os.close(write)
        await until(lambda: caplog.messages)
        for _ in range(10):
            await asyncio.sleep(0)

    assert printed(act, caplog) == ["said"]
