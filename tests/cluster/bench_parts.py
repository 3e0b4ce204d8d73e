"""What the measurements of the operator share: figures, a cluster with an operator, and writers of many models."""

import datetime
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]  # the package has no types

from cluster.operators import APPLY, Object, Operator, Site, crds, start_process
from cluster.own import OwnCluster
from cluster.spaces import eventually

REST_S = 60.0
QUIET_S = 5.0
WRITERS = 4
LIMIT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Counts:
    """How many objects the measurements have."""

    models: int = 1000
    many_models: int = 5000
    flood: int = 300
    pods: int = 12_000
    replicas: int = 500
    """As many as the operator allows by default."""
    changes: int = 20


@dataclass(frozen=True, slots=True)
class Row:
    """One figure, and its upper limit."""

    name: str
    value: float
    unit: str
    goal: float | None
    note: str


def row(name: str, value: float, unit: str, goal: float | None = None, note: str = "") -> Row:
    """Make a row and print it on stderr at once."""
    state = "" if goal is None else f"(goal {goal:g})" if value <= goal else f"(MISSES {goal:g})"
    print(f"{name:28} {value:9.3f} {unit:24} {state:14} {note}", file=sys.stderr, flush=True)
    return Row(name, round(value, 4), unit, goal, note)


@dataclass(frozen=True, slots=True)
class Bench:
    """An operator's site, and namespaces with many models."""

    site: Site
    namespaces: tuple[str, ...]
    """Models are divided between them."""
    everywhere: bool = False
    """The operator watches all namespaces, and has all rights."""

    def beside(self, namespace: str) -> "Bench":
        """Another operator with the chart's rights in another namespace of this cluster."""
        site = Site(self.site.own, start_process, namespace, self.site.folder)
        site.allow("operator")
        return Bench(site, (namespace,))

    def apply(self, count: int, spec_of: Callable[[int], Object] = lambda _number: {}, **spec: Any) -> None:
        """spec_of: what differs between the models."""

        def write(number: int) -> None:
            self.write(self.path_of(number), **spec, **spec_of(number))

        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(write, range(count)))

    def write(self, path: str, annotations: Object | None = None, **spec: Any) -> None:
        """Apply one model."""
        value = {
            "apiVersion": "halimede.dev/v1alpha1",
            "kind": "InferenceModel",
            "metadata": {"name": path.rpartition("/")[2], "annotations": annotations or {}},
            "spec": {"model": {"uri": "s3://models/digits"}, **spec},
        }
        self.site.own.api.send("PATCH", f"{path}?fieldManager=bench", value, APPLY)

    def path_of(self, number: int) -> str:
        return model_path(self.namespaces[number % len(self.namespaces)], name_of(number))

    def is_settled(self, path: str) -> bool:
        return is_settled(self.site.own.api.get(path))

    def wait_until_settled(self, operator: Operator) -> None:
        """Wait until all models have the status of their spec, and nothing has been written for a while."""
        # A list of thousands has its price, which is not to be the operator's.
        self.wait_for_rest(operator)

        def are_settled() -> bool:
            lists = (self.site.own.api.get(model_path(namespace)) for namespace in self.namespaces)
            if all(is_settled(value) for models in lists for value in models["items"]):
                return True
            time.sleep(QUIET_S)
            return False

        eventually(are_settled, "all models' status", LIMIT_S, operator.check)
        self.wait_for_rest(operator)

    def wait_for_rest(self, operator: Operator) -> None:
        """Wait until nothing has been written for a while."""

        def is_quiet() -> bool:
            before = self.site.writes()
            time.sleep(QUIET_S)
            return self.site.writes() == before

        eventually(is_quiet, "the operator to come to rest", LIMIT_S, operator.check)

    def rest_rows(self, operator: Operator, models: int) -> list[Row]:
        """Measure models at rest: they are settled, and nothing changes."""
        pid = operator.process.pid
        before, cpu_before = self.site.writes(), cpu_s(pid)
        with machine_load() as load:
            time.sleep(REST_S)
        written = self.site.writes() - before
        return [
            row(f"rest-{models}-writes", written.total(), f"writes in {REST_S:g} s", 0, as_text(written)),
            row(f"rest-{models}-cpu", cpu_s(pid) - cpu_before, f"s CPU in {REST_S:g} s", None, load()),
            row(f"rest-{models}-rss", psutil.Process(pid).memory_info().rss / 1e6, "MB"),
        ]


@contextmanager
def new_bench(*namespaces: str) -> Iterator[Bench]:
    """A cluster with the CRDs. The first namespace is the operator's; models are in the others.

    If it is the only one, models are there too, and the operator has the chart's rights in it."""
    with TemporaryDirectory() as folder:
        own = OwnCluster.start(nodes=1)
        try:
            own.kubectl("apply", "--server-side", *(f"--filename={path}" for path in crds()))
            for namespace in namespaces:
                own.kubectl("create", "namespace", namespace)
            site = Site(own, start_process, namespaces[0], Path(folder))
            site.allow("operator")
            if everywhere := len(namespaces) > 1:
                site.allow_everywhere()
            yield Bench(site, namespaces[1:] or namespaces, everywhere)
        finally:
            own.stop()


@contextmanager
def started(bench: Bench) -> Iterator[Operator]:
    """An operator, which is not ready yet."""
    try:
        yield bench.site.start(everywhere=bench.everywhere)
    finally:
        bench.site.stop_all()


@contextmanager
def machine_load() -> Iterator[Callable[[], str]]:
    """Reports at the end how busy the machine was, and the share of the cluster, the operator and this program."""
    idle, ours, begun = psutil.cpu_times(), cpu_s(os.getpid()), time.monotonic()
    busy = ""
    yield lambda: busy
    now, lasted_s = psutil.cpu_times(), time.monotonic() - begun
    free = (now.idle + now.iowait - idle.idle - idle.iowait) / lasted_s
    share = (cpu_s(os.getpid()) - ours) / lasted_s
    busy = f"{os.cpu_count() - free:.1f} of {os.cpu_count()} cores busy, {share:.1f} with this; load {os.getloadavg()[0]:.1f}"


def name_of(number: int) -> str:
    return f"model-{number}"


def model_path(namespace: str, name: str = "") -> str:
    """Where the API server has a model, or all of a namespace."""
    path = f"/apis/halimede.dev/v1alpha1/namespaces/{namespace}/inferencemodels"
    return f"{path}/{name}" if name else path


def is_settled(model: Object) -> bool:
    return bool((model.get("status") or {}).get("observedGeneration") == model["metadata"]["generation"])


def is_status(entry: Object) -> bool:
    return entry["objectRef"].get("subresource") == "status"


def finished(entry: Object) -> float:
    """Seconds since 1970, by the same clock as `time.time`."""
    return datetime.datetime.fromisoformat(entry["stageTimestamp"]).timestamp()


def control_programs(own: OwnCluster) -> dict[str, int]:
    programs = own.control.space.programs
    return {name: programs[name].outer_pid for name in ("kube-apiserver", "etcd", "kube-controller-manager")}


def cpu_s(pid: int) -> float:
    """CPU time of a process and those below it, user and system."""
    process = psutil.Process(pid)
    total = 0.0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            total += times.user + times.system
    return total


def peak_rss_mb(operator: Operator) -> float:
    lines = Path(f"/proc/{operator.process.pid}/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(kib) * 1024 / 1e6


def as_text(writes: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted(writes.items()))


def spread(samples: list[float]) -> str:
    return f"{len(samples)} times, {min(samples):.3f} to {max(samples):.3f}"


def end(*_: object) -> NoReturn:
    """Ends like Ctrl-C, so that nothing is left running."""
    raise KeyboardInterrupt
