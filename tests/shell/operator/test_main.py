"""The operator's process: its start, its probes and metrics, and its end."""

import asyncio
import inspect
import json
import os
import re
import signal
from pathlib import Path

from halimede_operator.core.process.election import RENEW_DEADLINE_S, RETRY_S
from halimede_operator.lease import Leadership
from halimede_operator.operator import Operator
from support.kube_api import Fault, KubeApi, kube_api
from support.loops import in_a_loop
from support.operator_processes import running


def lease_program(renew_deadline_s: float = RENEW_DEADLINE_S) -> tuple[str, str]:
    """An operator that attempts to renew its lease, or to get it, several times a second."""
    times = f"renew_deadline_s={renew_deadline_s}, retry_s=0.4"
    lines = (
        "import asyncio, sys",
        "from halimede_operator.log import set_up_logging",
        "from halimede_operator.operator import Operator",
        "from halimede_operator.settings import parse",
        "settings = parse(sys.argv[1:])",
        "set_up_logging(settings.log_format)",
        f"sys.exit(asyncio.run(Operator(settings, {times}).run()))",
    )
    return "-c", "\n".join(lines)


def _has_status(api: KubeApi, name: str) -> bool:
    return "status" in api.objects["inferencemodels", "prod", name]


@in_a_loop
async def test_it_reconciles_reports_metrics_and_releases_the_lease_at_the_end(tmp_path: Path):
    async with kube_api() as api, running(api, tmp_path, forked=False) as operator:
        await operator.until_ready()
        api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/digits"}})
        await api.until(lambda: _has_status(api, "digits"))
        assert await operator.probe("healthz") == (200, "ok")
        writes = "halimede_operator_api_writes_total"
        assert await operator.metric(f'{writes}{{code="201",kind="Deployment",verb="PATCH"}}') == 1
        assert await operator.metric('halimede_operator_reconciles_total{result="done"}') >= 1
        assert await operator.metric("halimede_operator_queue_depth") == 0
        assert 'halimede_operator_reconciles_total{result="permanent"} 0.0' in await operator.page()
        assert "halimede_operator_queue_oldest_seconds 0.0" in await operator.page()
        assert await operator.metric('halimede_operator_watch_age_seconds{kind="Pod"}') > 0
        assert await operator.end() == 0
        assert api.objects["leases", "halimede", "halimede-operator"]["spec"]["holderIdentity"] == ""
        lines = [json.loads(line) for line in operator.log.read_text().splitlines()]
        assert {line["level"] for line in lines} == {"INFO"}
        assert all(line.keys() == {"time", "level", "logger", "message"} for line in lines)


@in_a_loop
async def test_without_credentials_it_logs_an_error_and_ends(tmp_path: Path):
    async with kube_api() as api, running(api, tmp_path, f"--kubeconfig={tmp_path / 'nothing'}") as operator:
        assert await operator.wait() == 2
        line = operator.log.read_text().splitlines()[-1]
        assert "kubeconfig" in json.loads(line)["message"]


@in_a_loop
async def test_a_second_operator_watches_nothing_until_it_takes_over(tmp_path: Path):
    async with kube_api() as api, running(api, tmp_path) as first:
        await first.until_ready()
        api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/digits"}})
        await api.until(lambda: _has_status(api, "digits"))
        listed = api.counted(r"/inferencemodels\?")
        async with running(api, tmp_path, program=lease_program()) as second, asyncio.timeout(60):
            while (await second.probe("readyz"))[0] != 200:
                await asyncio.sleep(0.05)
            assert await second.metric("halimede_operator_leader") == 0
            assert api.counted(r"/inferencemodels\?") == listed
            written = api.writes()
            assert await first.end() == 0
            await second.until_ready()
            assert api.writes() == written, "what the first one left needs nothing"
            assert await second.end() == 0


def test_it_renews_its_lease_in_the_times_of_the_election() -> None:
    for made in (Operator, Leadership):
        parameters = inspect.signature(made).parameters
        defaults = [parameters[name].default for name in ("renew_deadline_s", "retry_s")]
        assert defaults == [RENEW_DEADLINE_S, RETRY_S]


@in_a_loop
async def test_it_ends_when_another_operator_has_its_lease(tmp_path: Path):
    async with kube_api() as api, running(api, tmp_path, program=lease_program(renew_deadline_s=2.0)) as operator:
        await operator.until_ready()
        os.kill(operator.process.pid, signal.SIGSTOP)
        lease = api.objects["leases", "halimede", "halimede-operator"]
        api.put("leases", "halimede", "halimede-operator", spec={**lease["spec"], "holderIdentity": "other"})
        await asyncio.sleep(2.1)  # longer than it may act without a renewal
        api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/digits"}})
        os.kill(operator.process.pid, signal.SIGCONT)
        assert await operator.wait() == 3
        assert api.writes() == {}


@in_a_loop
async def test_it_waits_for_the_custom_resources_and_logs_it(tmp_path: Path):
    """O-12."""
    async with kube_api() as api:
        api.missing_groups = {"halimede.dev"}
        async with running(api, tmp_path) as operator:
            async with asyncio.timeout(30):
                while "CRDs" not in operator.log.read_text():
                    await asyncio.sleep(0.05)
            assert (await operator.probe("readyz"))[0] == 503
            assert (await operator.probe("healthz"))[0] == 200
            api.missing_groups = set()
            await operator.until_ready()
            # And they go and come while it runs.
            before = operator.log.read_text().count("CRDs")
            api.missing_groups = {"halimede.dev"}
            api.faults.append(Fault(r"/inferencemodels\?.*watch=true", status=410, times=1))
            api.cut()
            await api.until(lambda: operator.log.read_text().count("CRDs") > before, within_s=40)
            api.missing_groups = set()
            api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/digits"}})
            await api.until(lambda: _has_status(api, "digits"), within_s=60)
            assert await operator.end() == 0


@in_a_loop
async def test_with_watch_namespaces_it_reads_only_these(tmp_path: Path):
    async with (
        kube_api() as api,
        running(api, tmp_path, "--watch-namespace=prod", "--watch-namespace=test") as operator,
    ):
        api.put("inferencemodels", "prod", "digits", spec={"model": {"uri": "s3://models/digits"}})
        api.put("inferencemodels", "foreign", "digits", spec={"model": {"uri": "s3://models/digits"}})
        await operator.until_ready()
        await api.until(lambda: _has_status(api, "digits"))
        assert await operator.end() == 0
        assert api.named("deployments") == {"digits"}
        collections = [request for request in api.requests if "?" in request]
        assert collections
        assert all(re.search("/namespaces/(prod|test)/", request) for request in collections)


@in_a_loop
async def test_it_waits_for_an_api_server_that_refuses_it_at_first(tmp_path: Path):
    async with kube_api() as api:
        # 401 is asked twice before it counts. All the same at the lease, and then where the kinds are looked for.
        refusals = [Fault(".", status=status, times=times) for status, times in ((401, 2), (403, 1), (503, 1))]
        kinds = Fault("v1alpha1$", status=403, times=1)
        api.faults += [*refusals, kinds]
        async with running(api, tmp_path, program=lease_program()) as operator:
            await api.until(lambda: not any(fault.times for fault in (*refusals, kinds)), within_s=40)
            await operator.until_ready()
            assert await operator.end() == 0
