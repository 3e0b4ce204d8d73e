"""One process, from its start to its end."""

import asyncio
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from halimede.backends.hosting import WorkerSpec
from halimede.core.supervise import describe_exit
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.launcher import Launcher, WorkerProcess
from halimede.workers.output import OutputReader
from halimede.workers.process.program import Program
from halimede.workers.server.connection import Connection, Owners

ENTRY = "halimede.workers.child.main:main"

LAST_WORD_SECS = 0.03
"""How long an error waits for the zygote to say how its worker ended, when the channel has ended before."""


class Life:
    """One process of a worker, from its start to its end, and the connection to it."""

    def __init__(
        self,
        process: WorkerProcess,
        spec: WorkerSpec,
        inputs: Sequence[str],
        outputs: Sequence[str],
        owners: Owners,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.process = process
        self.killed_for = ""
        """Why we ended it, "" when it ended by itself."""
        self._spec = spec
        self._inputs = inputs
        self._outputs = outputs
        self._lost: asyncio.Future[str] = loop.create_future()
        self.connection = Connection(process.channel, spec, inputs, outputs, owners, self._on_lost, loop)
        about = {"model": spec.model, "version": str(spec.version)}
        self._output = OutputReader(process.output, spec.model, about, loop)
        self._exit = loop.create_task(process.wait())

    def _on_lost(self, reason: str) -> None:
        """The channel tells nothing any more: whatever the process still does, nobody hears of it."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result(reason)

    async def start(self, work: Mapping[str, Any]) -> Any:
        """What the process says once it has done what START asks for. InferenceError when it fails, or dies."""
        order = {**work, "spec": asdict(self._spec), "inputs": self._inputs, "outputs": self._outputs}
        starting = asyncio.ensure_future(self.connection.start(order))
        try:
            await asyncio.wait((starting, self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if starting.done() and not starting.cancelled():
                return starting.result()
            why = await self.over()
            text = f"Stub process '{self._spec.instance}' is not healthy: it ended by {why} while it started"
            raise InferenceError(ErrorCode.INTERNAL, text)
        finally:
            starting.cancel()

    async def over(self) -> str:
        """Wait until the process is of no use any more, and say why."""
        await asyncio.wait((self._exit, self._lost), return_when=asyncio.FIRST_COMPLETED)
        if not self._exit.done():
            # Its channel is closed before the kernel has told how it ended.
            await asyncio.wait((self._exit,), timeout=LAST_WORD_SECS)
        elif not self._lost.done():
            # What it said before its end may not be read yet.
            await asyncio.wait((self._lost,), timeout=LAST_WORD_SECS)
        if self._lost.done() and self._lost.result().startswith(("it sent garbage", "it left more")):
            return self._lost.result()
        if self._exit.done():
            return describe_exit(self._exit.result())
        return self._lost.result() if self._lost.done() else "an unknown cause"

    async def finish(self) -> None:
        """Have the model finalize and the process end."""
        finishing = asyncio.ensure_future(self.connection.stop())
        await asyncio.wait((finishing, self._exit), return_when=asyncio.FIRST_COMPLETED)
        finishing.cancel()
        await asyncio.shield(self._exit)

    def give_up(self) -> None:
        """Kill it: a batch took too long, and there is no other way to stop that."""
        self.process.kill(signal.SIGKILL)
        if not self._lost.done():
            self._lost.set_result("the server, which had no more time for it")

    async def end(self) -> None:
        """Kill what is left of it, and free what we hold of it. Called once, at last."""
        self.connection.close()
        self.process.kill(signal.SIGKILL)
        # They refer to one another: the worker's shared memory would stay until the garbage collector comes by.
        del self.connection
        await self._exit
        self._output.close()
        self.process.close()


async def spawn(spec: WorkerSpec, program: Program, launcher: Launcher) -> WorkerProcess:
    """A process of the program. InferenceError."""
    environment = dict(program.environment)
    if spec.device_uuid:
        environment["CUDA_VISIBLE_DEVICES"] = spec.device_uuid
    work = asyncio.to_thread(launcher.spawn, spec.instance, entry=ENTRY, python=program.python, environment=environment)
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_discard)
        raise


def _discard(spawned: "asyncio.Task[WorkerProcess]") -> None:
    """End a process that came up after nobody waited for it any more."""
    if not spawned.cancelled() and spawned.exception() is None:
        spawned.result().kill(signal.SIGKILL)
        spawned.result().close()
