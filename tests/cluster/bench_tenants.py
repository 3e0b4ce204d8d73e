"""What one tenant's large or many objects cost others: the parts change, floods, pods and replicas of bench_operator."""

import http.client
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cluster.bench_parts import (
    LIMIT_S,
    QUIET_S,
    WRITERS,
    Bench,
    Counts,
    Row,
    cpu_s,
    machine_load,
    model_path,
    new_bench,
    peak_rss_mb,
    row,
    spread,
    started,
)
from cluster.fake_nodes import MARK
from cluster.operators import APPLY, Object, Operator
from cluster.spaces import eventually

EDIT_S, STALL_S, MOST_MB = 3.0, 1.0, 300.0
FIRST_STATUS_S = 2.0
MOST_CPU, MOST_TIME = 1.2, 1.5
"""Of a change beside many models, relative to one without them."""
APART_S = 3.2
"""A Deployment's template changes at most every 3 s."""
ROUNDS = 2
PODS_OF_NODE = 250


def nested(levels: int) -> Object:
    value: Object = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def wide() -> Object:
    """A pod's spec with 40 containers and 100 volumes."""
    mounts = [{"name": f"v{number}", "mountPath": f"/m/{number}"} for number in range(5)]
    sleep = {"image": "debian:bookworm-slim", "command": ["sleep", "9"], "volumeMounts": mounts}
    small = {"resources": {"requests": {"cpu": "1m"}}}
    return {
        "containers": [{"name": f"c{number}", **sleep, **small} for number in range(40)],
        "volumes": [{"name": f"v{number}", "emptyDir": {}} for number in range(100)],
    }


FLOODS: Mapping[str, Object] = {
    "env": {"env": [{"name": f"V{number}", "value": "x" * 9600} for number in range(100)]},
    "annotations": {"annotations": {"example.com/a": "x" * 210_000}},
    "wide": {"podTemplate": {"spec": wide()}},
    "deep": {"podTemplate": {"spec": {"x": nested(900)}}},
}
"""What the models of a flood have beside a model's URI."""


@dataclass
class Bystander:
    """Writes models of another namespace one after the other, and looks how fast the operator answers."""

    bench: Bench
    operator: Operator
    writes_new_models: bool
    """Or changes the same one."""
    took_s: list[float] = field(default_factory=list)
    answered_s: list[float] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """A probe that failed, or a lease that was not held."""
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with ThreadPoolExecutor(2) as threads:
            running = [threads.submit(self._write), threads.submit(self._look)]
            try:
                yield
            finally:
                self._stop.set()
                for each in running:
                    each.result()

    def rows(self, name: str, note: str) -> list[Row]:
        return [
            row(f"{name}-other-namespace", max(self.took_s), "s", EDIT_S, f"{spread(self.took_s)}; {note}"),
            row(f"{name}-stall", max(self.answered_s), "s", STALL_S, "longest answer of the operator's loop"),
            row(
                f"{name}-troubles",
                len(self.troubles),
                "failed probes and looks without the lease",
                0,
                "; ".join(self.troubles[:3]),
            ),
            row(f"{name}-peak-rss", peak_rss_mb(self.operator), "MB", MOST_MB),
        ]

    def _write(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            path = model_path("calm", f"model-{number if self.writes_new_models else 0}")
            self.took_s.append(time_to_status(self.bench, path, number))
            self._stop.wait(APART_S)

    def _look(self) -> None:
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                # The loop of the work answers it; another thread answers probes.
                if self.operator.metric("halimede_operator_leader") != 1:
                    self.troubles.append("no lease")
            except OSError as error:
                self.troubles.append(f"metrics: {error!r}")
            self.answered_s.append(time.monotonic() - begun)
            if (answer := self.operator.probe("healthz")) != http.client.OK:
                self.troubles.append(f"healthz: {answer}")
            self._stop.wait(0.1)


def time_to_status(bench: Bench, path: str, number: int) -> float:
    """Seconds from a write of a model until it has the status of its new spec."""
    bench.write(path, replicas=0, env=[{"name": "N", "value": str(number)}])
    begun = time.monotonic()
    while not bench.is_settled(path):
        if time.monotonic() - begun > LIMIT_S:
            raise AssertionError(f"{path} has no status")
        time.sleep(0.02)
    return time.monotonic() - begun


def measure_change(counts: Counts) -> list[Row]:
    """Changes of one model, and new models, with and without many others: an operator each, in one cluster."""
    with new_bench("empty") as empty:
        own = empty.site.own
        own.kubectl("create", "namespace", "full")
        full = empty.beside("full")
        with started(empty) as first, started(full) as second:
            operators = ((empty, first.ready()), (full, second.ready()))
            full.apply(counts.models, replicas=0)
            full.wait_until_settled(second)
            used: dict[Bench, list[float]] = {empty: [], full: []}
            took: dict[Bench, list[float]] = {empty: [], full: []}
            made: dict[Bench, list[float]] = {empty: [], full: []}
            with machine_load() as load:
                for turn in range(ROUNDS):
                    for bench, operator in operators:
                        before = cpu_s(operator.process.pid)
                        for number in range(counts.changes):
                            path = model_path(bench.namespaces[0], "model-0")
                            took[bench].append(time_to_status(bench, path, 1 + turn * counts.changes + number))
                            time.sleep(APART_S)
                        used[bench].append(cpu_s(operator.process.pid) - before)
                    for bench, _ in operators:
                        new = (f"new-{turn}-{number}" for number in range(counts.changes))
                        made[bench] += [time_to_status(bench, model_path(bench.namespaces[0], name), 0) for name in new]
    beside = f"beside {counts.models}"
    cpu, times = sum(used[full]) / sum(used[empty]), statistics.median(took[full]) / statistics.median(took[empty])
    return [
        row(
            "change-cpu",
            cpu,
            "times",
            MOST_CPU,
            f"{spread(used[empty])} s alone, {spread(used[full])} s {beside}; {load()}",
        ),
        row(
            "change-time", times, "times", MOST_TIME, f"{spread(took[empty])} s alone, {spread(took[full])} s {beside}"
        ),
        row("new-status", max(made[empty]), "s", FIRST_STATUS_S, spread(made[empty])),
        row(f"new-1-of-{counts.models}-status", max(made[full]), "s", FIRST_STATUS_S, spread(made[full])),
    ]


def measure_floods(counts: Counts) -> list[Row]:
    """Large models of one namespace, and an edit in another one."""
    return [each for name, spec in FLOODS.items() for each in measure_flood(name, spec, counts.flood)]


def measure_flood(name: str, spec: Object, count: int) -> list[Row]:
    def write(bench: Bench) -> None:
        def one(number: int) -> None:
            bench.write(model_path("flood", f"model-{number}"), replicas=0, **spec)

        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(one, range(count)))

    return measure_beside(f"flood-{name}-{count}", write)


def measure_pods(counts: Counts) -> list[Row]:
    """Pods of one model that nobody runs."""

    def write(bench: Bench) -> None:
        api = bench.site.own.api
        bench.write(model_path("flood", "model"), replicas=0)
        sets = "/apis/apps/v1/namespaces/flood/replicasets"
        eventually(lambda: api.get(sets)["items"], "the ReplicaSet")
        (replica_set,) = api.get(sets)["items"]
        # The controller would delete what nobody asked for.
        bench.site.own.faults.freeze_program("kube-controller-manager")
        owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "controller": True}
        owner |= {field: replica_set["metadata"][field] for field in ("name", "uid")}
        template = replica_set["spec"]["template"]
        pod_spec = {**template["spec"], "schedulerName": "nobody"}

        def one(number: int) -> None:
            name = f"pod-{number:05}"
            metadata = {**template["metadata"], "name": name, "ownerReferences": [owner]}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod_spec}
            api.send("PATCH", f"/api/v1/namespaces/flood/pods/{name}?fieldManager=bench", pod, APPLY)

        with ThreadPoolExecutor(WRITERS) as writers:
            list(writers.map(one, range(counts.pods)))

    return measure_beside(f"pods-{counts.pods}", write)


def measure_replicas(counts: Counts) -> list[Row]:
    """Replicas of one model on simulated nodes, made by Kubernetes' controllers, and new models in another namespace."""

    def write(bench: Bench) -> None:
        own = bench.site.own
        own.fake_nodes.add(-(-counts.replicas // PODS_OF_NODE) + 1)
        on_fake_nodes = {"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
        bench.write(model_path("flood", "model"), replicas=counts.replicas, scheduling=on_fake_nodes)
        path = "/apis/apps/v1/namespaces/flood/replicasets"

        def all_are_made() -> bool:
            return any(each["status"].get("replicas") == counts.replicas for each in own.api.get(path)["items"])

        eventually(all_are_made, f"{counts.replicas} pods", LIMIT_S)

    return measure_beside(f"replicas-{counts.replicas}", write, writes_new_models=True)


def measure_beside(name: str, write: Callable[[Bench], Any], writes_new_models: bool = False) -> list[Row]:
    """Measure what another namespace notices of writes in the namespace `flood`, until the operator is through."""
    with new_bench("operator", "flood", "calm") as bench, started(bench) as operator:
        bystander = Bystander(bench, operator.ready(), writes_new_models)
        before = cpu_s(operator.process.pid)
        with machine_load() as load, bystander.at_work():
            begun = time.monotonic()
            write(bench)
            written_s = time.monotonic() - begun
            wait_until_through(operator)
            lasted_s = time.monotonic() - begun
        used_s = cpu_s(operator.process.pid) - before
        return bystander.rows(
            name, f"written in {written_s:.0f} s, all in {lasted_s:.0f} s, {used_s:.1f} s CPU; {load()}"
        )


def wait_until_through(operator: Operator) -> None:
    """Wait until hardly anything has been due for a while: the bystander's own models may be."""
    since = time.monotonic()
    while time.monotonic() - since < 2 * QUIET_S:
        if operator.metric("halimede_operator_queue_depth") > 1:
            since = time.monotonic()
        time.sleep(0.5)
