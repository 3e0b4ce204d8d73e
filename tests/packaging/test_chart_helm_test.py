"""The pod of `helm test`: its program against an API server, and that it is no pod of the operator."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from halimede_operator.settings import parse
from support.chart import CHART, WITHOUT_CRDS, with_values
from support.kube_api import kube_api

PROGRAM = CHART / "files" / "test.py"
# The fixture builds helm in the first run.
pytestmark = pytest.mark.timeout(1800)


def pod_of_the_test(helm: str, *arguments: str) -> dict[str, Any]:
    command = [helm, "template", "halimede", str(CHART), "--namespace=halimede", "--kube-version=1.36.0"]
    shown = ("--show-only=templates/tests/operator.yaml", *WITHOUT_CRDS)
    done = subprocess.run([*command, *shown, *arguments], capture_output=True, text=True, check=True)
    pod: dict[str, Any] = yaml.safe_load(done.stdout)
    return pod


def test_the_pod_runs_the_program_for_the_release(helm: str, tmp_path: Path) -> None:
    made = with_values(helm, tmp_path, {})
    operator = made["Deployment", "halimede", "halimede"]["spec"]
    pod = pod_of_the_test(helm)
    container = pod["spec"]["containers"][0]
    assert container["command"] == ["python3", "-c", PROGRAM.read_text()]
    assert container["image"] == operator["template"]["spec"]["containers"][0]["image"]
    lease = parse(operator["template"]["spec"]["containers"][0]["args"]).lease_name
    assert container["args"][3] == f"/apis/coordination.k8s.io/v1/namespaces/halimede/leases/{lease}"
    assert not operator["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()


def test_the_pod_of_a_release_for_some_namespaces_lists_only_there(helm: str) -> None:
    paths = pod_of_the_test(helm, "--set=watchNamespaces={a,b}")["spec"]["containers"][0]["args"][4:]
    assert sorted(path.rpartition("/namespaces/")[2] for path in paths) == [
        f"{space}/{kind}?limit=1" for space in "ab" for kind in ("inferencemodels", "modelensembles")
    ]


def test_the_program_ends_well_if_the_lease_is_renewed(helm: str, tmp_path: Path) -> None:
    arguments = pod_of_the_test(helm)["spec"]["containers"][0]["args"][3:]
    assert asyncio.run(checked(tmp_path, arguments, limit_s=20, renewed=True)) == (
        0,
        "/apis/halimede.dev/v1alpha1/inferencemodels?limit=1 is there\n"
        "/apis/halimede.dev/v1alpha1/modelensembles?limit=1 is there\n"
        "one renews the Lease: it is the active operator\n",
    )


def test_the_program_says_why_the_operator_does_not_act(tmp_path: Path) -> None:
    lease = "/apis/coordination.k8s.io/v1/namespaces/halimede/leases/halimede"
    status, output = asyncio.run(checked(tmp_path, [lease], limit_s=0, renewed=False))
    assert (status, output) == (1, f"No operator renews its Lease {lease}: see the logs of the operator's pods\n")
    status, output = asyncio.run(checked(tmp_path, [lease, "/apis/other.dev/v1"], limit_s=0, renewed=True))
    assert (status, output) == (1, "GET /apis/other.dev/v1: HTTP Error 404: Not Found\n")


async def checked(folder: Path, arguments: list[str], *, limit_s: float, renewed: bool) -> tuple[int, str]:
    """The program's exit status and output."""
    (folder / "token").write_text("good")
    async with kube_api() as api:

        def renew() -> None:
            spec = {"holderIdentity": "one", "renewTime": f"2030-01-01T00:00:{len(api.requests):02}Z"}
            api.put("leases", "halimede", "halimede", spec=spec)

        renew()
        command = (sys.executable, str(PROGRAM), api.url, str(folder), str(limit_s), *arguments)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        if renewed:
            await api.until(lambda: process.returncode is not None or api.counted("leases") == 1)
            renew()
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode()
