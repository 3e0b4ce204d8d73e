"""An open-loop HTTP client for tests of overload: requests are sent at their times, independent of the server's answers.

Run as a separate process, so that it does not share the interpreter of the test. Reads one JSON document on stdin, a
list of phases `{"seconds": …, "streams": [{"name", "port", "path", "body", "rate" | "callers"}]}`, runs one after the
other, and prints a list of `{name: Outcome}`. A stream with a `rate` is open-loop with random gaps (Poisson); it opens a
connection when all others are busy. One with `callers` is closed-loop: each caller uses one connection.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import uvloop


@dataclass(slots=True)
class Outcome:
    """Milliseconds from sending to the complete answer, sorted, by status; status 0 for broken connections.

    `lag_ms` is the largest delay of the client itself in sending, which is not the server's.
    """

    seconds: float
    sent: int = 0
    latencies_ms: dict[str, list[float]] = field(default_factory=dict)
    bodies: dict[str, str] = field(default_factory=dict)
    lag_ms: float = 0.0

    def count(self, status: int) -> int:
        return len(self.latencies_ms.get(str(status), ()))

    def rate(self, status: int) -> float:
        return self.count(status) / self.seconds

    def quantile_ms(self, status: int, quantile: float) -> float:
        found = self.latencies_ms[str(status)]
        return found[min(len(found) - 1, int(quantile * len(found)))]


@dataclass(frozen=True, slots=True)
class Stream:
    name: str
    port: int
    path: str
    body: str = ""
    rate: float = 0.0
    callers: int = 0


@dataclass(frozen=True, slots=True)
class Phase:
    seconds: float
    streams: tuple[Stream, ...]


def run_phases(phases: Sequence[Phase]) -> list[dict[str, Outcome]]:
    """Run the phases in a new process and return the outcome of each stream."""
    limit_s = sum(phase.seconds for phase in phases) + 60
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([asdict(phase) for phase in phases]).encode(),
        stdout=subprocess.PIPE,
        timeout=limit_s,
        check=True,
    )
    return [{name: Outcome(**each) for name, each in phase.items()} for phase in json.loads(done.stdout)]


class Connection(asyncio.Protocol):
    """One kept connection with at most one request on it."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        if len(rest) >= length:
            self._received = b""
            self._settle((int(head[9:12]), rest))

    def connection_lost(self, exc: Exception | None) -> None:
        self._settle((0, str(exc).encode()))

    def send(self, request: bytes) -> "asyncio.Future[tuple[int, bytes]]":
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(request)  # type: ignore[union-attr]
        return self.answer

    def _settle(self, result: tuple[int, bytes]) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_result(result)


class Runner:
    """One stream in one phase."""

    def __init__(self, stream: Stream, seconds: float) -> None:
        self._stream = stream
        self._seconds = seconds
        body = stream.body.encode()
        method = "POST" if body else "GET"
        head = f"{method} {stream.path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        self._request = head.encode() + body
        self._free: list[Connection] = []
        self._loop = asyncio.get_running_loop()
        self.outcome = Outcome(seconds)

    async def run(self) -> Outcome:
        ends = self._loop.time() + self._seconds
        if self._stream.callers:
            await asyncio.gather(*(self._call_until(ends) for _ in range(self._stream.callers)))
        else:
            await self._send_at_random(ends)
        for connection in self._free:
            connection.transport.close()  # type: ignore[union-attr]
        for found in self.outcome.latencies_ms.values():
            found.sort()
        return self.outcome

    async def _call_until(self, ends: float) -> None:
        while self._loop.time() < ends:
            await self._ask()

    async def _send_at_random(self, ends: float) -> None:
        gaps = random.Random(self._stream.name)
        at = self._loop.time()
        pending: set[asyncio.Task[None]] = set()
        while at < ends:
            late = self._loop.time() - at
            if late < 0:
                await asyncio.sleep(-late)
            else:
                self.outcome.lag_ms = max(self.outcome.lag_ms, late * 1000)
            task = self._loop.create_task(self._ask())
            pending.add(task)
            task.add_done_callback(pending.discard)
            at += gaps.expovariate(self._stream.rate)
        if pending:
            await asyncio.wait(pending)

    async def _ask(self) -> None:
        outcome = self.outcome
        outcome.sent += 1
        connection = self._free.pop() if self._free else await self._connect()
        begun = time.perf_counter()  # the loop's clock does not advance within a turn, and counts milliseconds
        status, body = await connection.send(self._request)
        key = str(status)
        outcome.latencies_ms.setdefault(key, []).append((time.perf_counter() - begun) * 1000)
        if key not in outcome.bodies:
            outcome.bodies[key] = body[:300].decode(errors="replace")
        if status:
            self._free.append(connection)

    async def _connect(self) -> Connection:
        _, connection = await self._loop.create_connection(Connection, "127.0.0.1", self._stream.port)
        return connection


async def main() -> None:
    results = []
    for phase in json.load(sys.stdin):
        runners = [Runner(Stream(**stream), phase["seconds"]) for stream in phase["streams"]]
        outcomes = await asyncio.gather(*(runner.run() for runner in runners))
        results.append({stream["name"]: asdict(each) for stream, each in zip(phase["streams"], outcomes, strict=True)})
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    uvloop.run(main())
