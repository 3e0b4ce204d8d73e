"""`make startup`: how long a small ONNX model takes from no replica to its first answer, as JSON on stdout.

The stages come from `status.startup`, whose times are the cluster's own, in whole seconds: only the median of several
starts means something. The first answer is timed here. Images are on the nodes; what is fetched is in a store on this
machine. No check depends on the results.
"""

import json
import os
import re
import signal
import statistics
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from cluster.bench_parts import Row, end, machine_load, row, spread
from cluster.installed import Platform, Tenant, provide_images
from cluster.models import QUESTION, Object, model
from cluster.own import OwnCluster
from cluster.spaces import LIMIT_S, eventually
from support.models import add_scaled

NAME = "startup"
START_LIMIT_S = 300.0
FIRST_ANSWER_S, OWN_S = 8.0, 3.0
"""Goals on an idle machine: of all, and of what is not Kubernetes'."""
STAGES = {
    "scheduled": ("created", "scheduled"),
    "fetched": ("scheduled", "fetched"),
    "started": ("fetched", "started"),
    "loaded": ("started", "loaded"),
    "ready": ("loaded", "ready"),
}
"""From which to which time of `status.startup` each lasts."""
OWN = ("fetched", "loaded")
"""Fetching, with the start of its container, and the server, from its start until it is ready."""


def seconds_of(startup: str) -> dict[str, float]:
    """The seconds of each stage, of our own ones, and from the pod's creation until it is ready."""
    at = {"created": 0.0} | {stage: float(seconds) for stage, seconds in re.findall(r"(\w+) \+(\d+) s", startup)}
    found = {stage: at[last] - at[first] for stage, (first, last) in STAGES.items()}
    return {**found, "own": sum(found[stage] for stage in OWN), "created-to-ready": at["ready"] - at["created"]}


def rows_of(starts: Sequence[Mapping[str, float]], note: str) -> list[Row]:
    """The medians. starts: of each the seconds by name."""
    goals = {"first-answer": FIRST_ANSWER_S, "own": OWN_S}
    return [
        row(f"startup-{name}", statistics.median(values), "s", goals.get(name), f"{spread(values)}; {note}")
        for name in starts[0]
        for values in [[start[name] for start in starts]]
    ]


@dataclass(frozen=True, slots=True)
class Bench:
    """A model without replicas."""

    tenant: Tenant
    cluster: OwnCluster

    @property
    def path(self) -> str:
        return f"/apis/halimede.dev/v1alpha1/namespaces/{self.tenant.namespace}/inferencemodels/{NAME}"

    def status(self) -> Object:
        found: Object = self.cluster.api.get(self.path).get("status", {})
        return found

    def pods(self) -> set[str]:
        return self.tenant.names("pods")

    def start(self) -> dict[str, float]:
        """Start a replica, measure it, and stop it."""
        address = self.cluster.forward(f"service/{NAME}", 8000, self.tenant.namespace)
        begun = time.monotonic()
        self.cluster.api.patch(self.path, {"spec": {"replicas": 1}})
        eventually(lambda: answers(address), "the first answer", START_LIMIT_S)
        answered_s = time.monotonic() - begun
        (pod,) = (name.partition("/")[2] for name in self.pods())

        def startup() -> str | None:
            found: str = self.status().get("startup", "")
            return found if found.startswith(f"{pod} ") else None

        measured = seconds_of(eventually(startup, f"status.startup of {pod}"))
        self.cluster.api.patch(self.path, {"spec": {"replicas": 0}})
        eventually(lambda: not self.pods(), "no pod", START_LIMIT_S)
        return {**measured, "first-answer": answered_s}


def answers(address: str) -> bool:
    """Whether the model answers a request. An answer with an error is an AssertionError."""
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "data": data}
        for name, (datatype, shape, data) in QUESTION.items()
    ]
    body = json.dumps({"inputs": inputs}).encode()
    try:
        with urllib.request.urlopen(f"http://{address}/v2/models/{NAME}/infer", body, LIMIT_S):
            return True
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error.code}: {error.read()[:2000]!r}") from error
    except OSError:
        # Nobody is behind the Service yet.
        return False


def measure(cluster: OwnCluster, times: int) -> tuple[list[Row], list[dict[str, float]]]:
    platform = Platform.install(cluster)
    cluster.kubectl("create", "namespace", NAME)
    with TemporaryDirectory() as folder:
        add_scaled(Path(folder), NAME, 2)
        uri = platform.store.put(NAME, Path(folder, NAME))
    bench = Bench(Tenant(cluster, NAME), cluster)
    bench.tenant.apply(json.dumps(model(NAME, uri, replicas=0)))
    eventually(bench.status, "the model's status")
    eventually(lambda: bench.tenant.names("services"), "the model's Service")
    # The first start fills the nodes' caches of files.
    bench.start()
    with machine_load() as load:
        starts = [bench.start() for _ in range(times)]
    return rows_of(starts, load()), starts


@click.command()
@click.option("--times", type=click.IntRange(1, 1000), default=10, show_default=True, help="Starts to measure.")
def main(times: int) -> None:
    """Measure starts in a cluster of its own."""
    signal.signal(signal.SIGTERM, end)
    with ThreadPoolExecutor() as pool:
        images = pool.submit(provide_images)
        cluster = OwnCluster.start()
        try:
            images.result()
            rows, starts = measure(cluster, times)
        finally:
            cluster.stop()
    machine = {"cores": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}
    print(json.dumps({"machine": machine, "rows": [asdict(each) for each in rows], "starts": starts}, indent=1))


if __name__ == "__main__":
    main()
