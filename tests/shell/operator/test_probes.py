"""The probes are answered while the event loop of the work is busy."""

import asyncio
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from halimede_operator.probes import ProbeThread
from support.ports import free_port


def ask(port: int, what: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/{what}", timeout=20) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def test_a_busy_loop_does_not_delay_the_probes():
    port, ticks = free_port(), list[int]()

    async def whole() -> None:
        probes = await ProbeThread.start(port, lambda: None, lambda: "not listed yet", lambda: ticks.append(1))
        with ThreadPoolExecutor() as pool:
            # This loop makes no step until both are answered.
            answers = [pool.submit(ask, port, what).result() for what in ("healthz", "readyz")]
        assert answers == [(200, b"ok"), (503, b"not listed yet")]
        assert ticks
        await probes.cleanup()

    asyncio.run(whole())


def test_a_port_in_use_is_an_error_of_the_start():
    port = free_port()

    async def whole() -> None:
        first = await ProbeThread.start(port, lambda: None, lambda: None, lambda: None)
        with pytest.raises(OSError, match="in use"):
            await ProbeThread.start(port, lambda: None, lambda: None, lambda: None)
        await first.cleanup()

    asyncio.run(whole())
