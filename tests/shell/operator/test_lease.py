import asyncio
from pathlib import Path

import pytest

from halimede_operator.cluster.client import KubeClient
from halimede_operator.cluster.connection import Connection
from halimede_operator.core.election import RENEW_DEADLINE_S
from halimede_operator.lease import Leadership, LostError
from support.kube_api import Fault, KubeApi, kube_api


class Clock:
    """Real time, which may jump ahead: as for a process that stood still."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead


async def contender(api: KubeApi, folder: Path, name: str, clock: Clock) -> tuple[Leadership, KubeClient]:
    connection = Connection(str(api.kubeconfig(folder)))
    await connection.refresh()
    client = KubeClient(connection, lambda: False)
    return Leadership(client, "halimede", "operator", name, clock), client


def test_the_first_leads_the_second_waits_and_takes_over_at_once_when_it_is_given_back(tmp_path: Path):
    async def whole() -> None:
        async with kube_api() as api, asyncio.timeout(40):
            first, client1 = await contender(api, tmp_path, "first", Clock())
            second, client2 = await contender(api, tmp_path, "second", Clock())
            lead1 = asyncio.create_task(first.run(lambda: None))
            await first.active()
            lead2 = asyncio.create_task(second.run(lambda: None))
            await api.until(lambda: second.has_read)
            assert (first.may_act(), second.may_act()) == (True, False)
            lead1.cancel()
            await first.release()
            assert not first.may_act()
            await asyncio.wait_for(second.active(), 10)
            spec = api.objects["leases", "halimede", "operator"]["spec"]
            assert (spec["holderIdentity"], spec["leaseDurationSeconds"], spec["leaseTransitions"]) == ("second", 15, 1)
            lead2.cancel()
            await client1.close()
            await client2.close()

    asyncio.run(whole())


def test_one_that_stood_still_while_another_took_over_gives_up_without_a_write(tmp_path: Path):
    async def whole() -> None:
        async with kube_api() as api, asyncio.timeout(40):
            clock = Clock()
            first, client = await contender(api, tmp_path, "first", clock)
            lead = asyncio.create_task(first.run(lambda: None))
            await first.active()
            lease = api.objects["leases", "halimede", "operator"]
            api.put("leases", "halimede", "operator", spec={**lease["spec"], "holderIdentity": "second"})
            clock.ahead += 20
            assert not first.may_act()
            with pytest.raises(LostError, match="second"):
                await lead
            assert api.objects["leases", "halimede", "operator"]["spec"]["holderIdentity"] == "second"
            await client.close()

    asyncio.run(whole())


def test_one_whose_api_server_is_away_stops_acting_stays_and_goes_on(tmp_path: Path):
    async def whole() -> None:
        async with kube_api() as api, asyncio.timeout(60):
            clock = Clock()
            regained: list[float] = []
            first, client = await contender(api, tmp_path, "first", clock)
            lead = asyncio.create_task(first.run(lambda: regained.append(clock())))
            await first.active()
            away = Fault(".", status=503)
            api.faults.append(away)
            clock.ahead += RENEW_DEADLINE_S
            assert not first.may_act()
            await api.until(lambda: len(api.requests) > 6)
            assert not lead.done()
            api.faults.remove(away)
            await first.active()
            await api.until(lambda: len(regained) == 2)
            assert api.objects["leases", "halimede", "operator"]["spec"]["leaseTransitions"] == 0
            lead.cancel()
            await client.close()

    asyncio.run(whole())


def test_a_write_whose_answer_was_lost_is_read_before_the_next(tmp_path: Path):
    async def whole() -> None:
        async with kube_api() as api, asyncio.timeout(60):
            api.faults.append(Fault("(POST|PUT) .*/leases", lose=True, times=2))
            first, client = await contender(api, tmp_path, "first", Clock())
            lead = asyncio.create_task(first.run(lambda: None))
            await first.active()
            assert api.objects["leases", "halimede", "operator"]["spec"]["holderIdentity"] == "first"
            lead.cancel()
            await client.close()

    asyncio.run(whole())
