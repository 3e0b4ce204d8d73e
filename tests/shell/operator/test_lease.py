"""Leader election over an API server. Tests make single attempts at chosen times; the last test waits between them."""

import asyncio
import datetime
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.client import KubeClient
from halimede_operator.core.process.election import LEASE_S, RENEW_DEADLINE_S, RETRY_S
from halimede_operator.lease import Leadership, LostError
from support.kube_api import Fault, KubeApi, kube_api
from support.loops import with_opened

NOON = datetime.datetime(2030, 1, 1, 12, tzinfo=datetime.UTC)


@dataclass
class Hall:
    """The API server that the operators share."""

    api: KubeApi
    folder: Path
    now: float = 1000.0
    regained: int = 0
    _clients: list[KubeClient] = field(default_factory=list)

    async def contender(
        self,
        name: str,
        *,
        clock_minutes: float = 0,
        clock: Callable[[], float] | None = None,
        retry_s: float = RETRY_S,
    ) -> Leadership:
        """clock_minutes: offset of its machine's clock."""
        connection = Connection(str(self.api.kubeconfig(self.folder)))
        await connection.refresh()
        client = KubeClient(connection, lambda: False)
        self._clients.append(client)
        wrong = datetime.timedelta(minutes=clock_minutes)
        # Each machine counts its seconds from another beginning.
        begin = 7_000.0 * len(self._clients)
        return Leadership(
            client,
            "halimede",
            "operator",
            name,
            clock or (lambda: self.now + begin),
            lambda: NOON + wrong + datetime.timedelta(seconds=self.now),
            retry_s=retry_s,
        )

    async def attempt(self, *contenders: Leadership) -> None:
        for each in contenders:
            await each.attempt(self._regain)

    def _regain(self) -> None:
        self.regained += 1

    def lease(self) -> dict[str, Any]:
        spec: dict[str, Any] = self.api.objects["leases", "halimede", "operator"]["spec"]
        return spec

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


@asynccontextmanager
async def open_hall(folder: Path) -> AsyncIterator[Hall]:
    async with kube_api() as api, asyncio.timeout(40):
        hall = Hall(api, folder)
        try:
            yield hall
        finally:
            await hall.close()


with_hall = with_opened(open_hall)


@with_hall
async def test_a_second_operator_takes_over_a_released_lease_at_once(hall: Hall):
    first, second = await hall.contender("first"), await hall.contender("second")
    await hall.attempt(first, second)
    assert (first.may_act(), second.may_act(), second.has_read) == (True, False, True)
    await first.release()
    assert not first.may_act()
    await hall.attempt(second)
    await second.active()
    lease = hall.lease()
    assert (lease["holderIdentity"], lease["leaseDurationSeconds"], lease["leaseTransitions"]) == ("second", 15, 1)


@with_hall
async def test_a_waiting_operator_says_once_whom_it_waits_for(hall: Hall, caplog: pytest.LogCaptureFixture):
    first, second = await hall.contender("first"), await hall.contender("second")
    await hall.attempt(first)
    hall.api.put("leases", "halimede", "operator", spec={**hall.lease(), "leaseDurationSeconds": 2147483647})
    with caplog.at_level(logging.INFO):
        await hall.attempt(second, second, second)
    assert caplog.messages == [
        "lease halimede/operator: waiting, because first holds it; it is taken when it was not renewed for 60 s"
    ]


@pytest.mark.parametrize("minutes", [(5, -5), (-5, 5), (0, 5), (5, 0)])
@with_hall
async def test_clocks_that_differ_by_minutes_do_no_harm(hall: Hall, minutes: tuple[float, float]):
    """O-31."""
    first = await hall.contender("first", clock_minutes=minutes[0])
    second = await hall.contender("second", clock_minutes=minutes[1])
    for _ in range(12):
        hall.now += RENEW_DEADLINE_S - 1
        await hall.attempt(first, second)
        assert (first.may_act(), second.may_act()) == (True, False)
    # The first one is gone; the second one waits as long as it has itself seen nothing of it.
    last = hall.now
    while not second.may_act() and hall.now < last + 1000:
        hall.now += 1
        await hall.attempt(second)
    assert hall.now == last + LEASE_S
    assert not first.may_act()


@with_hall
async def test_a_frozen_leader_that_lost_the_lease_ends_without_a_write(hall: Hall):
    first = await hall.contender("first")
    await hall.attempt(first)
    hall.api.put("leases", "halimede", "operator", spec={**hall.lease(), "holderIdentity": "second"})
    hall.now += 20
    assert not first.may_act()
    with pytest.raises(LostError, match="second"):
        await hall.attempt(first)
    assert hall.lease()["holderIdentity"] == "second"


@with_hall
async def test_a_leader_without_api_server_stops_acting_and_resumes_later(hall: Hall):
    first = await hall.contender("first")
    await hall.attempt(first)
    away = Fault(".", status=503)
    hall.api.faults.append(away)
    for _ in range(5):
        hall.now += RENEW_DEADLINE_S
        await hall.attempt(first)
        assert not first.may_act()
    hall.api.faults.remove(away)
    await hall.attempt(first)
    assert (first.may_act(), hall.regained, hall.lease()["leaseTransitions"]) == (True, 2, 0)


class Silent:
    """An API that never answers."""

    async def get_lease(self, namespace: str, name: str, timeout_s: float) -> dict[str, Any] | None:
        await asyncio.Event().wait()
        return None

    async def write_lease(self, namespace: str, lease: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        await asyncio.Event().wait()
        return lease


def test_a_warning_about_the_lease_has_a_cause(caplog: pytest.LogCaptureFixture):
    first = Leadership(Silent(), "halimede", "operator", "first", renew_deadline_s=0.02)
    asyncio.run(first.attempt(lambda: None))
    assert [record.getMessage() for record in caplog.records] == ["lease halimede/operator: no answer in 0.01 s"]


@with_hall
async def test_the_lease_is_released_after_a_cancelled_renewal(hall: Hall):
    first = await hall.contender("first")
    await hall.attempt(first)
    renewal = asyncio.create_task(first.attempt(lambda: None))
    hall.api.faults.append(Fault("PUT .*/leases", lose=True, times=1, then=lambda: renewal.cancel() or None))
    await asyncio.wait({renewal})
    await hall.api.until(lambda: hall.api.counted("PUT .*/leases") == 1)
    await first.release()
    assert (renewal.cancelled(), hall.lease()["leaseDurationSeconds"]) == (True, 1)


@with_hall
async def test_after_a_lost_answer_the_lease_is_read_before_the_next_write(hall: Hall):
    hall.api.faults.append(Fault("(POST|PUT) .*/leases", lose=True, times=2))
    first = await hall.contender("first")
    await hall.attempt(first, first)
    assert not first.may_act()
    await hall.attempt(first)
    assert (first.may_act(), hall.lease()["holderIdentity"]) == (True, "first")


@with_hall
async def test_run_acquires_and_renews_the_lease(hall: Hall):
    clock = asyncio.get_running_loop().time
    first, second = [await hall.contender(each, clock=clock, retry_s=0.3) for each in ("first", "second")]
    leads = asyncio.create_task(first.run(lambda: None))
    waits = asyncio.create_task(second.run(lambda: None))
    await first.active()
    await hall.api.until(lambda: second.has_read and hall.api.counted("PUT .*/leases") >= 1)
    leads.cancel()
    await asyncio.wait({leads})
    await first.release()
    await asyncio.wait_for(second.active(), 10)
    waits.cancel()
