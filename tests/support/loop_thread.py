"""An event loop in a thread, with methods for the test's thread."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import uvloop

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop,
    "asyncio": asyncio.new_event_loop,
}


class LoopThread:
    """`log` has the lines of what runs on the loop, and what the loop itself reports."""

    def __init__(self, loop_factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop) -> None:
        self.loop = loop_factory()
        self.log: list[str] = []
        self.loop.set_exception_handler(lambda _loop, context: self.log.append(repr(context)))
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def run(self, work: Any) -> Any:
        """Await a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function on the loop."""

        async def on_loop() -> Any:
            return function()

        return self.run(on_loop())

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait some seconds at most until the condition holds on the loop."""
        deadline = time.monotonic() + 10
        while not self.call(condition):
            assert time.monotonic() < deadline, f"it did not happen; log: {self.log}"
            time.sleep(0.002)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
