"""`make bench-operator`: what many objects cost the operator and the API server, as JSON on stdout.

The operator's process with the chart's rights against the test cluster's API server, all on the same machine. Writes
are counted and timed by the API server's audit log. Seconds depend on the machine and its other load, which the notes
have; counts and memory are exact. No check depends on the results.
"""

import datetime
import http.client
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil  # type: ignore[import-untyped]  # the package has no types

from cluster.fake_nodes import MARK
from cluster.gpus import Layout
from cluster.operators import APPLY, Object, Operator, Place, crds, start_process
from cluster.own import OwnCluster
from cluster.spaces import eventually

AT_REST = 200
MODELS = 1000
CHANGED = 20
REST_S = 60.0
QUIET_S = 5.0
WRITERS = 4
LIMIT_S = 900.0
MOST_MB = 150
NODES = 200
DECISION_S = 0.01
LAYOUTS = ((("1g.10gb",) * 7,), (("2g.20gb",) * 3, ("1g.10gb",) * 7), (("3g.40gb",) * 2, ("1g.10gb",) * 7))
"""Cards of the simulated nodes: more slices than models, and of each size enough."""
NEEDS = ("8Gi",) * 7 + ("12Gi",) * 2 + ("30Gi",)


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
    """A namespace of the cluster with an operator and many models."""

    place: Place

    def apply(self, count: int, spec_of: Callable[[int], Object] = lambda _number: {}, **spec: Any) -> None:
        """spec_of: what differs between the models."""

        def write(number: int) -> None:
            value = {
                "apiVersion": "halimede.dev/v1alpha1",
                "kind": "InferenceModel",
                "metadata": {"name": name_of(number)},
                "spec": {"model": {"uri": "s3://models/digits"}, **spec, **spec_of(number)},
            }
            self.place.own.api.send("PATCH", f"{self.path_of(number)}?fieldManager=bench", value, APPLY)

        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(write, range(count)))

    def path_of(self, number: int) -> str:
        return f"{self.place.models}/{name_of(number)}"

    def is_settled(self, path: str) -> bool:
        return is_settled(self.place.own.api.get(path))

    def wait_until_settled(self, operator: Operator) -> None:
        def are_settled() -> bool:
            time.sleep(QUIET_S)  # a list of a thousand has its price, which is not to be the operator's
            return all(is_settled(value) for value in self.place.own.api.get(self.place.models)["items"])

        eventually(are_settled, "all models' status", LIMIT_S, operator.check)

    def wait_for_rest(self, operator: Operator) -> None:
        """Wait until nothing has been written for a while."""

        def is_quiet() -> bool:
            before = self.place.writes()
            time.sleep(QUIET_S)
            return self.place.writes() == before

        eventually(is_quiet, "the operator to come to rest", LIMIT_S, operator.check)

    def rest_rows(self, operator: Operator, models: int) -> list[Row]:
        """Measure models at rest: they are settled, and nothing changes."""
        self.wait_for_rest(operator)
        pid = operator.process.pid
        before, cpu_before = self.place.writes(), cpu_s(pid)
        with machine_load() as load:
            time.sleep(REST_S)
        written = self.place.writes() - before
        return [
            row(f"rest-{models}-writes", written.total(), f"writes in {REST_S:g} s", 0, as_text(written)),
            row(f"rest-{models}-cpu", cpu_s(pid) - cpu_before, f"s CPU in {REST_S:g} s", None, load()),
            row(f"rest-{models}-rss", psutil.Process(pid).memory_info().rss / 1e6, "MB"),
        ]


def measure(own: OwnCluster, folder: Path) -> list[Row]:
    own.kubectl("apply", "--server-side", *(f"--filename={path}" for path in crds()))
    rows = measure_placement(own, make_bench(own, folder, "placement"))
    return [*rows, *measure_rest(make_bench(own, folder, "rest")), *measure_scale(make_bench(own, folder, "scale"))]


def make_bench(own: OwnCluster, folder: Path, namespace: str) -> Bench:
    own.kubectl("create", "namespace", namespace)
    place = Place(own, start_process, namespace, folder)
    place.allow("operator")
    return Bench(place)


def measure_rest(bench: Bench) -> list[Row]:
    """Models with one pod each, which no node fits."""
    with started(bench.place) as operator:
        operator.ready()
        bench.apply(AT_REST, scheduling={"nodeSelector": {"nowhere": "yes"}})
        bench.wait_until_settled(operator)
        return bench.rest_rows(operator, AT_REST)


def measure_scale(bench: Bench) -> list[Row]:
    with started(bench.place) as operator:
        operator.ready()
        rows = measure_apply(bench, operator)
        rows += bench.rest_rows(operator, MODELS)
        assert operator.end() == 0
    before = bench.place.writes()
    begun = time.monotonic()
    with started(bench.place) as operator:
        rows += measure_restart(bench, operator, before, begun)
        rows += measure_changes(bench, operator)
    return rows


def measure_apply(bench: Bench, operator: Operator) -> list[Row]:
    programs = {"operator": operator.process.pid, **control_programs(bench.place.own)}
    before, begun = {name: cpu_s(pid) for name, pid in programs.items()}, time.time()
    with machine_load() as load:
        bench.apply(MODELS, replicas=0)
        applied_s = time.time() - begun
        bench.wait_until_settled(operator)
        bench.wait_for_rest(operator)
        used = {name: cpu_s(pid) - before[name] for name, pid in programs.items()}
    requests = bench.place.audited()
    applied = [entry for entry in requests if entry["verb"] == "patch"]
    made = [entry for entry in applied if entry["responseStatus"]["code"] == http.client.CREATED]
    told_first = {entry["objectRef"]["name"]: finished(entry) for entry in reversed(applied) if is_status(entry)}
    writes = bench.place.writes()
    most = len(made) / MODELS + 1
    return [
        row(f"apply-{MODELS}-children", max(map(finished, made)) - begun, "s", 120, f"{len(made)} children; {load()}"),
        row(f"apply-{MODELS}-status", max(told_first.values()) - begun, "s", None, "until each has its first status"),
        row(f"apply-{MODELS}-models", applied_s, "s", None, "of these until the models themselves were written"),
        row(f"apply-{MODELS}-cpu", used["operator"], "s CPU", None, ", ".join(f"{n} {s:.0f}" for n, s in used.items())),
        row(f"apply-{MODELS}-writes", writes.total() / MODELS, "writes per model", most, as_text(writes)),
        row(f"apply-{MODELS}-requests", len(requests) / MODELS, "requests per model", None, "reads among them"),
        row(f"apply-{MODELS}-peak-rss", peak_rss_mb(operator), "MB", MOST_MB),
    ]


def measure_restart(bench: Bench, operator: Operator, before: Counter[str], begun: float) -> list[Row]:
    with machine_load() as load:
        eventually(lambda: operator.probe("readyz") == 200, "the operator to be ready", check=operator.check)
        ready_s, ready_cpu_s = time.monotonic() - begun, cpu_s(operator.process.pid)

        def is_through() -> bool:
            return operator.metric("halimede_operator_reconciles_total") >= MODELS

        eventually(is_through, "all models to be looked at", check=operator.check)
        through_s = time.monotonic() - begun
    bench.wait_for_rest(operator)
    written = bench.place.writes() - before
    return [
        row(f"restart-{MODELS}-ready", ready_s, "s", 15, f"{ready_cpu_s:.1f} s CPU; {load()}"),
        row(f"restart-{MODELS}-looked-at", through_s, "s", None, "until each model was reconciled once"),
        row(f"restart-{MODELS}-writes", written.total(), "writes", 0, as_text(written)),
        row(f"restart-{MODELS}-peak-rss", peak_rss_mb(operator), "MB", MOST_MB),
    ]


def measure_changes(bench: Bench, operator: Operator) -> list[Row]:
    """Change a variable of one model after the other."""
    rollouts, statuses = [], []
    with machine_load() as load:
        for number in range(0, MODELS, MODELS // CHANGED):
            path, name = bench.path_of(number), name_of(number)
            begun = time.time()
            bench.place.own.api.patch(path, {"spec": {"env": [{"name": "N", "value": "1"}]}})
            eventually(partial(bench.is_settled, path), f"{name}'s status", check=operator.check)
            entries = [
                entry
                for entry in bench.place.audited()
                if entry["verb"] == "patch" and entry["objectRef"].get("name") == name and finished(entry) > begun
            ]
            rolled = [finished(entry) for entry in entries if entry["objectRef"]["resource"] == "deployments"]
            rollouts.append(min(rolled) - begun)
            statuses.append(min(finished(entry) for entry in entries if is_status(entry)) - begun)
    return [
        row(f"change-1-of-{MODELS}-rollout", statistics.median(rollouts), "s", None, f"{spread(rollouts)}; {load()}"),
        row(f"change-1-of-{MODELS}-status", statistics.median(statuses), "s", None, spread(statuses)),
    ]


def measure_placement(own: OwnCluster, bench: Bench) -> list[Row]:
    """Models that each need a slice, on simulated nodes."""
    for number, cards in enumerate(LAYOUTS):
        layout = Layout(cards)
        counts = {resource: str(len(found)) for resource, found in layout.devices("any").items()}
        own.fake_nodes.add(NODES // len(LAYOUTS) + (number < NODES % len(LAYOUTS)), counts, layout.labels())
    on_fake_nodes = {"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
    bench.place.allow_everywhere()
    try:
        with started(bench.place, everywhere=True) as operator:
            operator.ready()
            begun = time.monotonic()
            bench.apply(
                MODELS,
                lambda number: {
                    "accelerator": {"type": "MIG", "mig": {"minMemory": NEEDS[number % len(NEEDS)]}},
                    "scheduling": on_fake_nodes,
                },
            )
            bench.wait_until_settled(operator)
            bench.wait_for_rest(operator)
            lasted_s = time.monotonic() - begun
            models = own.api.get(bench.place.models)["items"]
            placed = Counter(each["status"]["effective"]["resourceName"] for each in models)
            unscheduled = sum("nodes" not in each["status"]["effective"] for each in models)
            # A list comes in pages; the first one has no token of a page before.
            lists = sum(
                entry["verb"] == "list"
                and entry["objectRef"]["resource"] == "nodes"
                and "continue=" not in entry["requestURI"]
                for entry in bench.place.audited()
            )
            rows = [
                row(f"place-{MODELS}-slow", slow_decisions(operator), "decisions above 10 ms of CPU", MODELS / 100),
                row(f"place-{MODELS}-unplaced", unscheduled, "models", 0, as_text(placed)),
                row(
                    f"place-{MODELS}-lists",
                    lists,
                    "lists of all nodes and pods",
                    lasted_s / 10 + 1,
                    f"in {lasted_s:.0f} s",
                ),
                row(
                    f"place-{MODELS}-writes",
                    bench.place.writes().total() / MODELS,
                    "writes per model",
                    None,
                    as_text(bench.place.writes()),
                ),
                row(f"place-{MODELS}-peak-rss", peak_rss_mb(operator), "MB", None),
            ]
            return [*rows, *bench.rest_rows(operator, MODELS)]
    finally:
        own.kubectl("delete", "namespace", bench.place.namespace, "--wait=false")
        own.fake_nodes.remove()


def slow_decisions(operator: Operator) -> float:
    """How many decisions took more CPU time than the goal."""
    name = "halimede_operator_placement_decision_seconds"
    return operator.metric(f"{name}_count") - operator.metric(f'{name}_bucket{{le="{DECISION_S}"}}')


@contextmanager
def started(place: Place, *, everywhere: bool = False) -> Iterator[Operator]:
    try:
        yield place.start(everywhere=everywhere)
    finally:
        place.stop_all()


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


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    with TemporaryDirectory() as folder:
        own = OwnCluster.start()
        try:
            rows = measure(own, Path(folder))
        finally:
            own.stop()
    machine = {"cores": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}
    print(json.dumps({"machine": machine, "rows": [asdict(each) for each in rows]}, indent=1))


if __name__ == "__main__":
    main()
