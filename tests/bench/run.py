"""`make bench`: ratios and CPU per request, as JSON on stdout.

Load generator and server share the machine's cores, so that throughputs have little meaning and are not reported. The
results are ratios within one run, CPU time of the server process divided by its count of requests, memory, and seconds to
ready. Run it on an otherwise idle machine. No check depends on the results.
"""

import argparse
import http.client
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import backends
import bls
import busy
import fronts
import hop
import micro
import models
import numpy as np
import onnxruntime
import perf_analyzer
import psutil
import queues

from halimede.demo.digits import MODEL, train
from halimede.demo.export import Export
from halimede.demo.process import ServerProcess

CALLERS = 16
ROUNDS = 3
STARTS = 3
BARE_RUNS = 15
WARM_UP_REQUESTS = 20_000
GROWTH_REQUESTS = 80_000
HEAVY_REQUESTS = 640
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `value` is the median of `samples`."""

    name: str
    value: float
    unit: str
    samples: list[float]
    note: str = ""


def row(name: str, unit: str, samples: list[float], note: str = "") -> Row:
    return Row(name, round(statistics.median(samples), 4), unit, [round(each, 4) for each in samples], note)


def model_statistics(server: ServerProcess, model: str) -> dict[str, Any]:
    """The statistics extension's JSON for the model's one version."""
    url = f"http://{server.address('http')}/v2/models/{model}/stats"
    with urllib.request.urlopen(url, timeout=30) as answer:
        (found,) = json.load(answer)["model_stats"]
    return dict(found)


def requests_answered(server: ServerProcess, model: str) -> int:
    return int(model_statistics(server, model)["inference_stats"]["success"]["count"])


def batches_formed(server: ServerProcess, model: str) -> Counter[int]:
    """Executions by batch size since the model was loaded."""
    batches = model_statistics(server, model)["batch_stats"]
    return Counter({each["batch_size"]: each["compute_infer"]["count"] for each in batches})


def cpu_s(server: ServerProcess) -> float:
    """CPU time of the server and its children, user and system."""
    process = psutil.Process(server.pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def rss_mib(server: ServerProcess) -> float:
    process = psutil.Process(server.pid)
    return float(sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))) / MIB


def bare_seconds_per_call(model: bytes) -> dict[int, float]:
    """Median seconds of InferenceSession.run by batch size, with one intra-op thread like the server's instance."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    seconds = {}
    for size in range(1, models.HEAVY_MAX_BATCH + 1):
        x = np.ones((size, models.HEAVY_WIDTH), dtype=np.float32)
        taken = []
        for _ in range(BARE_RUNS):
            start = time.perf_counter()
            session.run(None, {"x": x})
            taken.append(time.perf_counter() - start)
        seconds[size] = statistics.median(taken)
    return seconds


def onnx_rows(server: ServerProcess) -> list[Row]:
    """A bare loop's time for the batches that the server formed, over the server's time for the same batches."""
    model = models.heavy_onnx().SerializeToString()
    ratios = []
    sizes: Counter[int] = Counter()
    bare: dict[int, float] = {}
    for _ in range(ROUNDS):
        bare = bare_seconds_per_call(model)
        before = batches_formed(server, "heavy")
        served_s = seconds_to_serve(server, HEAVY_REQUESTS)
        formed = batches_formed(server, "heavy") - before
        sizes += formed
        ratios.append(sum(bare[size] * count for size, count in formed.items()) / served_s)
    calls = ", ".join(f"{size}: {bare[size] * 1000:.1f} ms x {count}" for size, count in sorted(sizes.items()))
    return [row("onnx-vs-bare", "ratio of throughputs", ratios, f"batch size: bare call x executions; {calls}")]


def seconds_to_serve(server: ServerProcess, requests: int) -> float:
    """Seconds from the first of these requests to the last answer. For slow models only: the clients are Python threads."""
    body, header_length = models.binary_request("x", np.ones((1, models.HEAVY_WIDTH), dtype=np.float32))
    headers = {"Inference-Header-Content-Length": str(header_length)}

    def call(count: int) -> None:
        connection = http.client.HTTPConnection(server.address("http"), timeout=30)
        for _ in range(count):
            connection.request("POST", "/v2/models/heavy/infer", body, headers)
            answer = connection.getresponse()
            if b"error" in answer.read() or answer.status != http.client.OK:
                raise RuntimeError(f"heavy answered {answer.status}")
        connection.close()

    start = time.perf_counter()
    with ThreadPoolExecutor(CALLERS) as threads:
        for done in [threads.submit(call, requests // CALLERS) for _ in range(CALLERS)]:
            done.result()
    return time.perf_counter() - start


def cpu_row(server: ServerProcess, name: str, model: str, protocol: str) -> Row:
    """CPU microseconds of the server per request."""
    perf_analyzer.load(model, protocol, server.address(protocol), CALLERS)
    samples = []
    for _ in range(ROUNDS):
        requests, cpu = requests_answered(server, model), cpu_s(server)
        perf_analyzer.load(model, protocol, server.address(protocol), CALLERS)
        cpu = cpu_s(server) - cpu
        samples.append(cpu / (requests_answered(server, model) - requests) * 1e6)
    return row(name, "us CPU per request", samples, f"{CALLERS} callers")


def sequence_rows(server: ServerProcess) -> list[Row]:
    """CPU of the server's own process per request, without workers: sequences against a model without sequences."""
    flags = {"python_ident": (), "sequence": ("--sequence-length", str(models.SEQUENCE_LENGTH))}
    process = psutil.Process(server.pid)

    def load(model: str) -> float:
        requests, before = requests_answered(server, model), process.cpu_times()
        perf_analyzer.load(model, "http", server.address("http"), CALLERS, *flags[model])
        after = process.cpu_times()
        spent = after.user + after.system - before.user - before.system
        return spent / (requests_answered(server, model) - requests)

    for model in flags:
        load(model)
    ratios = [load("sequence") / load("python_ident") for _ in range(ROUNDS)]
    return [row("sequence-http", "ratio of CPU per request", ratios, f"{CALLERS} callers, against python_ident")]


def ensemble_rows(server: ServerProcess) -> list[Row]:
    """An ensemble with STEPS steps of one model, and the cost of a step relative to a request for the model."""
    alone = cpu_row(server, "ident-http", "ident", "http")
    chain = cpu_row(server, "ensemble-http", "chain", "http")
    steps = [(whole - one) / (models.STEPS - 1) for whole, one in zip(chain.samples, alone.samples, strict=True)]
    return [chain, row("ensemble-step", "us CPU per step", steps, f"{models.STEPS} steps, against the one alone")]


def queue_policy_rows(server: ServerProcess) -> list[Row]:
    """A model that sleeps, with queue policies, against the same one without."""
    address = server.address("http")
    return [
        row(
            f"{model}-{callers}",
            "ratio of throughputs",
            queues.throughput_ratios(address, model, callers),
            f"{callers} callers, {models.SLEEP_MS} ms per batch; {policy}",
        )
        for model, policy in models.POLICIES.items()
        if policy
        for callers in (1, 4)
    ]


def busy_rows(server: ServerProcess) -> list[Row]:
    """Instances whose queue is never empty."""
    rows = []
    for each in busy.measured(server):
        how = models.FULL_QUEUE[each.model]
        note = f"{how.callers} callers, {each.rows:.1f} rows per batch"
        rows.append(row(f"busy-{each.model}", "share of the time", each.busy, note))
        rows.append(row(f"rate-{each.model}", "ratio to a bare loop", each.ratio, note))
        rows.append(
            row(f"p99-{each.model}", "ratio to the batches" if how.wait_ms else "ratio to the mean", each.p99, note)
        )
    return rows


def backend_rows(scratch: Path) -> list[Row]:
    """Each CPU backend that is installed: a bare loop's time for the batches that the server formed, over the server's."""
    rows = []
    for each in backends.measured(scratch):
        note = (
            f"{backends.CALLERS} callers, {each.batch_ms:.1f} ms a batch of {each.full}, of which {each.is_full:.2f} are "
            f"full; size {each.size}"
        )
        rows.append(row(f"{each.name}-{each.isolation}", "ratio to a bare loop", each.ratios, note))
        if each.to_onnx:
            note = f"that ratio over the one of onnx-{each.isolation} in the same round"
            rows.append(row(f"{each.name}-to-onnx", "ratio of ratios", each.to_onnx, note))
    return rows


def front_rows(scratch: Path) -> list[Row]:
    """Front ends in processes of their own, against one process that does everything."""
    rows = []
    alone, *others = fronts.measured(scratch)
    for each in (alone, *others):
        note = f"{fronts.CALLERS} callers over HTTP; all processes of the server: {statistics.median(each.all_us):.1f}"
        rows.append(row(f"core-fronts-{each.processes}", "us CPU per request", each.core_us, note))
    for each in others:
        ratios = [rate / one for rate, one in zip(each.rates, alone.rates, strict=True)]
        rows.append(row(f"rate-fronts-{each.processes}", "ratio to one process", ratios))
    return rows


def growth_row(server: ServerProcess) -> Row:
    """Memory that GROWTH_REQUESTS small requests leave behind."""

    def ask_for(more: int) -> int:
        start = requests_answered(server, "ident")
        while (done := requests_answered(server, "ident") - start) < more:
            perf_analyzer.load("ident", "http", server.address("http"), CALLERS)
        return done

    ask_for(WARM_UP_REQUESTS)
    before = rss_mib(server)
    asked = ask_for(GROWTH_REQUESTS)
    grown = (rss_mib(server) - before) * GROWTH_REQUESTS / asked
    return row("rss-growth", f"MiB per {GROWTH_REQUESTS} requests", [grown], f"measured over {asked}")


def start_rows(scratch: Path) -> list[Row]:
    """Seconds from exec to ready with the demo's model, and the memory of the server that then waits."""
    export = Export(scratch / "digits", MODEL)
    train(export)
    seconds, memory = [], []
    for _ in range(STARTS):
        start = time.perf_counter()
        with ServerProcess([f"--model-repository={export.repository}"], scratch / "start.log") as server:
            server.wait_ready()
            seconds.append(time.perf_counter() - start)
            memory.append(rss_mib(server))
    return [row("start-to-ready", "s", seconds), row("idle-rss", "MiB", memory)]


ON_A_SERVER: dict[str, Callable[[ServerProcess], list[Row]]] = {
    # First, because memory that larger requests have freed would hide growth.
    "growth": lambda server: [growth_row(server)],
    "onnx": onnx_rows,
    "busy": busy_rows,
    "ident-http": lambda server: [cpu_row(server, "ident-http", "ident", "http")],
    "ident-grpc": lambda server: [cpu_row(server, "ident-grpc", "ident", "grpc")],
    "image-http": lambda server: [cpu_row(server, "image-http", "image", "http")],
    "image-grpc": lambda server: [cpu_row(server, "image-grpc", "image", "grpc")],
    "ensemble-http": ensemble_rows,
    "python-http": lambda server: [cpu_row(server, "python-http", "python_ident", "http")],
    "python-grpc": lambda server: [cpu_row(server, "python-grpc", "python_ident", "grpc")],
    "queue-policies": queue_policy_rows,
    "sequence-http": sequence_rows,
    "python-image-http": lambda server: [cpu_row(server, "python-image-http", "python_image", "http")],
}
ALONE: dict[str, Callable[[Path], list[Row]]] = {
    "micro": lambda _: micro_rows(),
    "hop": lambda _: hop_rows(),
    "bls": lambda _: bls_rows(),
    "backends": backend_rows,
    "fronts": front_rows,
    "start": start_rows,
}


def micro_rows() -> list[Row]:
    """Parts of the hot path alone, in this process."""
    return [
        row("scheduler", "us per request", micro.scheduler_us(), f"dynamic batcher, batches of {micro.BATCH}"),
        row("queue-1000", "us per request", micro.queue_us(1), f"the same with {micro.QUEUED} queued"),
        row("queue-1000-levels", "us per request", micro.queue_us(4), "the same over 4 priority levels"),
        row("queue-1000-timeouts", "us per request", micro.queue_us(4, has_timeouts=True), "and with timeouts"),
        row("sequences", "us per request", micro.sequences_us(), f"oldest strategy, {micro.SEQUENCES} open sequences"),
        row("wire-http", "us per request", micro.wire_http_us(is_known=False), "decode and encode of FP32[16], binary"),
        row("wire-http-known", "us per request", micro.wire_http_us(is_known=True), "the same JSON part again"),
        row("wire-grpc", "us per request", micro.wire_grpc_us(), "parse, decode, encode and serialize of FP32[16]"),
        row("wire-http2", "us per request", micro.wire_http2_us(), "the same from frames to frames"),
    ]


def hop_rows() -> list[Row]:
    """A batch of one request to a worker process and back."""
    note = "CPU of server and worker together, batch of one"
    return [
        row("worker-hop-64", "us per batch", hop.hop_us(64, 5_000), note),
        row("worker-hop-600k", "us per batch", hop.hop_us(600_000, 1_000), note),
    ]


def bls_rows() -> list[Row]:
    """A model that calls another one repeatedly."""
    note = "CPU of server, caller and called model together, of a python model that calls one"
    return [
        row("bls-64", "us per call", bls.bls_us(64, 5_000), note),
        row("bls-600k", "us per call", bls.bls_us(600_000, 1_000), note),
        row("bls-64-thread", "us per call", bls.bls_us(64, 5_000, "identity"), "the called model on a thread"),
    ]


def measure(wanted: list[str]) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        for name, measure_alone in ALONE.items():
            if name in wanted:
                rows += shown(measure_alone(scratch))
        served = [name for name in ON_A_SERVER if name in wanted]
        if not served:
            return rows
        repository = models.write_repository(scratch / "models")
        with ServerProcess([f"--model-repository={repository}"], scratch / "server.log") as server:
            server.wait_ready()
            for name in served:
                rows += shown(ON_A_SERVER[name](server))
    return rows


def shown(rows: list[Row]) -> list[Row]:
    """Print the rows on stderr, and return them."""
    for each in rows:
        print(f"{each.name:16} {each.value:10.3f} {each.unit:24} {each.note}", file=sys.stderr, flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*ALONE, *ON_A_SERVER]
    parser.add_argument("--rows", default=",".join(names), help="which, separated by commas (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the JSON to this file and not to stdout")
    arguments = parser.parse_args()
    wanted = arguments.rows.split(",")
    if unknown := set(wanted) - set(names):
        parser.error(f"--rows: {', '.join(sorted(unknown))} is none of {', '.join(names)}")

    rows = measure(wanted)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "onnxruntime": onnxruntime.__version__}
    text = json.dumps({"machine": machine, "rows": [asdict(each) for each in rows]}, indent=1)
    if arguments.json:
        arguments.json.write_text(text + "\n")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
