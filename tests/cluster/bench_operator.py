"""`make bench-operator`: what many objects cost the operator and the API server, as JSON on stdout.

The operator's process against the test cluster's API server, all on the same machine; each part has a cluster of its
own. Writes are counted and timed by the API server's audit log. Seconds depend on the machine and its other load, which
the notes have; counts and memory are exact. No check depends on the results.
"""

import http.client
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import click

from cluster.bench_parts import (
    LIMIT_S,
    Bench,
    Counts,
    Row,
    as_text,
    control_programs,
    cpu_s,
    end,
    finished,
    is_status,
    machine_load,
    model_path,
    name_of,
    new_bench,
    peak_rss_mb,
    row,
    spread,
    started,
)
from cluster.bench_tenants import measure_change, measure_floods, measure_pods, measure_replicas
from cluster.fake_nodes import MARK
from cluster.gpus import Layout
from cluster.operators import Object, Operator
from cluster.spaces import eventually

GOALS = Counts()
AT_REST = 200
MOST_MB = {1000: 150.0, 5000: 250.0}
READY_S = {1000: 15.0, 5000: 30.0}
"""By the number of models."""
SPACES = 20
"""Namespaces of very many models. With each change of a Service or a Deployment, Kubernetes' controllers go through all
EndpointSlices or ReplicaSets of its namespace."""
NODES = 200
DECISION_S = 0.01
LAYOUTS = ((("1g.10gb",) * 7,), (("2g.20gb",) * 3, ("1g.10gb",) * 7), (("3g.40gb",) * 2, ("1g.10gb",) * 7))
"""Cards of the simulated nodes: more slices than models, and of each size enough."""
NEEDS = ("8Gi",) * 7 + ("12Gi",) * 2 + ("30Gi",)


def measure_placement(counts: Counts) -> list[Row]:
    """Models that each need a slice, on simulated nodes."""
    with new_bench("operator", "placement") as bench:
        own = bench.site.own
        for number, cards in enumerate(LAYOUTS):
            layout = Layout(cards)
            offered = {resource: str(len(found)) for resource, found in layout.devices("any").items()}
            own.fake_nodes.add(NODES // len(LAYOUTS) + (number < NODES % len(LAYOUTS)), offered, layout.labels())
        with started(bench) as operator:
            return measure_placed(bench, operator.ready(), counts.models)


def measure_placed(bench: Bench, operator: Operator, count: int) -> list[Row]:
    on_fake_nodes = {"nodeSelector": {MARK: "fake"}, "tolerations": [{"key": MARK, "operator": "Exists"}]}
    begun = time.monotonic()
    bench.apply(
        count,
        lambda number: {
            "accelerator": {"type": "MIG", "mig": {"minMemory": NEEDS[number % len(NEEDS)]}},
            "scheduling": on_fake_nodes,
        },
    )
    bench.wait_until_settled(operator)
    lasted_s = time.monotonic() - begun
    models = bench.site.own.api.get(model_path(bench.namespaces[0]))["items"]
    placed = Counter(each["status"]["effective"]["resourceName"] for each in models)
    unscheduled = sum("nodes" not in each["status"]["effective"] for each in models)
    # A list comes in pages; the first one has no token of a page before.
    lists = sum(
        entry["verb"] == "list" and entry["objectRef"]["resource"] == "nodes" and "continue=" not in entry["requestURI"]
        for entry in bench.site.audited()
    )
    writes = bench.site.writes()
    most_lists = lasted_s / 10 + 1
    return [
        row(f"place-{count}-slow", slow_decisions(operator), "decisions above 10 ms of CPU", count / 100),
        row(f"place-{count}-unplaced", unscheduled, "models", 0, as_text(placed)),
        row(f"place-{count}-lists", lists, "lists of all nodes and pods", most_lists, f"in {lasted_s:.0f} s"),
        row(f"place-{count}-writes", writes.total() / count, "writes per model", None, as_text(writes)),
        row(f"place-{count}-peak-rss", peak_rss_mb(operator), "MB", None),
        *bench.rest_rows(operator, count),
    ]


def measure_rest(_counts: Counts) -> list[Row]:
    """Models with one pod each, which no node fits."""
    with new_bench("rest") as bench, started(bench) as operator:
        operator.ready()
        bench.apply(AT_REST, scheduling={"nodeSelector": {"nowhere": "yes"}})
        bench.wait_until_settled(operator)
        return bench.rest_rows(operator, AT_REST)


def measure_scale(counts: Counts) -> list[Row]:
    """Models without replicas in one namespace."""
    with new_bench("scale") as bench:
        with started(bench) as operator:
            rows = measure_apply(bench, operator.ready(), counts.models)
            rows += bench.rest_rows(operator, counts.models)
            assert operator.end() == 0
        return [*rows, *measure_restart(bench, counts.models, lambda again: measure_changes(bench, again, counts))]


def measure_growth(counts: Counts) -> list[Row]:
    """How much more many models take than fewer."""
    found = {count: measure_spread(count) for count in (counts.models, counts.many_models)}
    few, many = ({each.name.rpartition("-")[2]: each for each in rows} for rows in found.values())
    most = 1.1 * counts.many_models / counts.models
    ratios = [
        row(
            f"growth-{what}",
            many[what].value / few[what].value,
            "times",
            most,
            f"of {counts.many_models / counts.models:g} times the models",
        )
        for what in ("children", "status", "cpu", "machine")
    ]
    return [*(each for rows in found.values() for each in rows), *ratios]


def measure_spread(count: int) -> list[Row]:
    """Models without replicas in many namespaces."""
    with new_bench("operator", *(f"models-{number}" for number in range(SPACES))) as bench:
        with started(bench) as operator:
            rows = measure_apply(bench, operator.ready(), count)
            assert operator.end() == 0
        rows += measure_restart(bench, count)
    return [replace(each, name=f"spread-{each.name}") for each in rows]


def measure_apply(bench: Bench, operator: Operator, count: int) -> list[Row]:
    programs = {"operator": operator.process.pid, **control_programs(bench.site.own)}
    before, begun = {name: cpu_s(pid) for name, pid in programs.items()}, time.time()
    with machine_load() as load:
        bench.apply(count, replicas=0)
        applied_s = time.time() - begun
        bench.wait_until_settled(operator)
        used = {name: cpu_s(pid) - before[name] for name, pid in programs.items()}
    requests = bench.site.audited()
    applied = [entry for entry in requests if entry["verb"] == "patch"]
    made = [entry for entry in applied if entry["responseStatus"]["code"] == http.client.CREATED]
    told_first = {entry["objectRef"]["name"]: finished(entry) for entry in reversed(applied) if is_status(entry)}
    writes = bench.site.writes()
    most = len(made) / count + 1
    return [
        row(
            f"apply-{count}-children",
            max(map(finished, made)) - begun,
            "s",
            0.12 * count,
            f"{len(made)} children; {load()}",
        ),
        row(f"apply-{count}-status", max(told_first.values()) - begun, "s", None, "until each has its first status"),
        row(f"apply-{count}-models", applied_s, "s", None, "of these until the models themselves were written"),
        row(f"apply-{count}-cpu", used["operator"], "s CPU", None, ", ".join(f"{n} {s:.0f}" for n, s in used.items())),
        row(f"apply-{count}-machine", sum(used.values()), "s CPU", None, "of these programs together"),
        row(f"apply-{count}-writes", writes.total() / count, "writes per model", most, as_text(writes)),
        row(f"apply-{count}-requests", len(requests) / count, "requests per model", None, "reads among them"),
        row(f"apply-{count}-peak-rss", peak_rss_mb(operator), "MB", MOST_MB.get(count)),
    ]


def measure_restart(
    bench: Bench, models: int, then: Callable[[Operator], list[Row]] = lambda _operator: []
) -> list[Row]:
    """Start an operator again. then: what to measure with it afterwards."""
    before, begun = bench.site.writes(), time.monotonic()
    with started(bench) as operator:
        with machine_load() as load:
            eventually(lambda: operator.probe("readyz") == 200, "the operator to be ready", LIMIT_S, operator.check)
            ready_s, ready_cpu_s = time.monotonic() - begun, cpu_s(operator.process.pid)

            def is_through() -> bool:
                return operator.metric("halimede_operator_reconciles_total") >= models

            eventually(is_through, "all models to be looked at", LIMIT_S, operator.check)
            through_s, through_cpu_s = time.monotonic() - begun, cpu_s(operator.process.pid)
        bench.wait_for_rest(operator)
        written = bench.site.writes() - before
        rows = [
            row(f"restart-{models}-ready", ready_s, "s", READY_S.get(models), f"{ready_cpu_s:.1f} s CPU; {load()}"),
            row(
                f"restart-{models}-looked-at",
                through_s,
                "s",
                None,
                f"until each was reconciled once; {through_cpu_s:.1f} s CPU",
            ),
            row(f"restart-{models}-writes", written.total(), "writes", 0, as_text(written)),
            row(f"restart-{models}-peak-rss", peak_rss_mb(operator), "MB", MOST_MB.get(models)),
        ]
        return [*rows, *then(operator)]


def measure_changes(bench: Bench, operator: Operator, counts: Counts) -> list[Row]:
    """Change a variable of one model after the other."""
    rollouts, statuses = [], []
    with machine_load() as load:
        for number in range(0, counts.models, counts.models // counts.changes):
            path, name = bench.path_of(number), name_of(number)
            begun = time.time()
            bench.site.own.api.patch(path, {"spec": {"env": [{"name": "N", "value": "1"}]}})
            eventually(partial(bench.is_settled, path), f"{name}'s status", check=operator.check)

            def patches(name: str = name, begun: float = begun) -> list[Object]:
                return [
                    entry
                    for entry in bench.site.audited()
                    if entry["verb"] == "patch" and entry["objectRef"].get("name") == name and finished(entry) > begun
                ]

            # The API server logs a request after it has answered.
            eventually(lambda: any(map(is_status, patches())), "the audit log", check=operator.check)
            entries = patches()
            rolled = [finished(entry) for entry in entries if entry["objectRef"]["resource"] == "deployments"]
            rollouts.append(min(rolled) - begun)
            statuses.append(min(finished(entry) for entry in entries if is_status(entry)) - begun)
    return [
        row(
            f"change-1-of-{counts.models}-rollout",
            statistics.median(rollouts),
            "s",
            None,
            f"{spread(rollouts)}; {load()}",
        ),
        row(f"change-1-of-{counts.models}-status", statistics.median(statuses), "s", None, spread(statuses)),
    ]


def slow_decisions(operator: Operator) -> float:
    """How many decisions took more CPU time than the goal."""
    name = "halimede_operator_placement_decision_seconds"
    return operator.metric(f"{name}_count") - operator.metric(f'{name}_bucket{{le="{DECISION_S}"}}')


PARTS: Mapping[str, Callable[[Counts], list[Row]]] = {
    "placement": measure_placement,
    "rest": measure_rest,
    "scale": measure_scale,
    "growth": measure_growth,
    "change": measure_change,
    "floods": measure_floods,
    "pods": measure_pods,
    "replicas": measure_replicas,
}


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="A part; repeat it for several.")
@click.option("--models", default=GOALS.models, show_default=True)
@click.option("--many-models", default=GOALS.many_models, show_default=True, help="Of the part growth.")
@click.option("--flood", default=GOALS.flood, show_default=True, help="Large models of one namespace.")
@click.option("--pods", default=GOALS.pods, show_default=True, help="Pods of one model.")
@click.option("--replicas", default=GOALS.replicas, show_default=True, help="Replicas of one model.")
def main(only: tuple[str, ...], **counts: int) -> None:
    """Measure all parts, or some."""
    signal.signal(signal.SIGTERM, end)
    rows = [each for part in only or PARTS for each in PARTS[part](Counts(**counts))]
    machine = {"cores": os.cpu_count(), "python": ".".join(map(str, sys.version_info[:3]))}
    print(json.dumps({"machine": machine, "rows": [asdict(each) for each in rows]}, indent=1))


if __name__ == "__main__":
    main()
