"""The operator as a process, against the API server of `kube_api`."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import aiohttp

from support.forked import OPERATOR, Process, start_python
from support.image import REPOSITORY_ROOT
from support.kube_api import KubeApi
from support.ports import free_port


@dataclass
class Running:
    api: KubeApi
    process: subprocess.Popen[bytes] | Process
    health: int
    metrics: int
    log: Path
    http: aiohttp.ClientSession

    async def probe(self, which: str) -> tuple[int, str]:
        try:
            async with self.http.get(f"http://127.0.0.1:{self.health}/{which}") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def page(self) -> str:
        async with self.http.get(f"http://127.0.0.1:{self.metrics}/metrics") as answer:
            return await answer.text()

    async def metric(self, line: str) -> float:
        for found in (await self.page()).splitlines():
            if found.startswith(line + " "):
                return float(found.rpartition(" ")[2])
        return 0.0

    async def until_ready(self) -> None:
        async with asyncio.timeout(60):
            while (await self.probe("readyz"))[0] != 200 or not await self.metric("halimede_operator_leader"):
                await asyncio.sleep(0.05)

    async def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await self.wait()

    async def wait(self) -> int:
        return await asyncio.to_thread(self.process.wait, 40)


@asynccontextmanager
async def running(
    api: KubeApi,
    folder: Path,
    *arguments: str,
    program: Sequence[str] = ("-m", "halimede_operator"),
    forked: bool = True,
) -> AsyncIterator[Running]:
    """An operator in a process of its own; `program` is what Python runs, in a fork or as an interpreter."""
    health, metrics = free_port(), free_port()
    log = folder / f"log-{health}"
    command = [
        *program, "--server-image=server:1", f"--kubeconfig={api.kubeconfig(folder)}", "--lease-namespace=halimede",
        f"--health-port={health}", f"--metrics-port={metrics}", *arguments,
    ]  # fmt: skip
    with log.open("w") as out:
        process = start_operator(command, out, forked=forked)
    async with aiohttp.ClientSession() as http:
        yield Running(api, process, health, metrics, log, http)
    process.kill()
    process.wait()


def start_operator(command: Sequence[str], output: IO[Any], *, forked: bool) -> subprocess.Popen[bytes] | Process:
    """What Python runs, with its output in a file."""
    folder = REPOSITORY_ROOT / "operator"
    if forked:
        return start_python(*command, stdout=output, stderr=output, directory=folder, imported=OPERATOR)
    interpreter = [sys.executable, *command]
    return subprocess.Popen(interpreter, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder)
