"""A server under load, an operator, a metrics API, and a Prometheus that scrapes them: for dashboards and alerts."""

import asyncio
import http.server
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.pki import Authority
from support.device_nodes import node
from support.image import REPOSITORY_ROOT
from support.kube_api import KubeApi, kube_api
from support.loop_thread import LoopThread
from support.metrics_api import PlayedCluster, PlayedPrometheus, http_server, metrics_api
from support.models import add_identity, add_simple, delay, write_config
from support.operator_processes import start_operator
from support.played_driver import PlayedDriver, PlayedGpu, two_slices
from support.ports import free_port
from support.prometheus import Prometheus, start_prometheus
from support.served import ECHO, add_python, body
from support.server import RunningServer, start_server, wait_until

INTERVAL = "500ms"
RULES = REPOSITORY_ROOT / "helm" / "halimede" / "files" / "alerts.yaml"
NAMESPACE = "prod"
MODEL = {"namespace": NAMESPACE, "inferencemodel": "zoo", "pod": "zoo-5d4f8c7b9-x2x4z"}
ENSEMBLE = {"namespace": NAMESPACE, "modelensemble": "pipeline", "pod": "pipeline-7c9d8f6b5-q8q9w"}
"""The labels of two targets. One server is behind both: it has models and an ensemble."""
OPERATOR = {"namespace": "halimede", "pod": "halimede-6f5d4c3b2-k7k8l"}
METRICS_API = {"namespace": "halimede", "pod": "halimede-metrics-api-7b6c5d4f3-m3n3p"}
TARGETS = 5

PIPELINE = """
    name: "pipeline"
    platform: "ensemble"
    max_batch_size: 8
    input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
      { model_name: "plain" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
    ] }
"""
ON_GPU = "instance_group [ { kind: KIND_GPU count: 1 } ]"
STREAM = """
    for request in requests:
        request.get_response_sender().send(answer(request), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
SEQUENCES = "sequence_batching { direct { } max_sequence_idle_microseconds: 60000000 }"
NARROW = (
    "dynamic_batching { default_queue_policy { max_queue_size: 1 } } instance_group [ { kind: KIND_CPU count: 1 } ]"
)

# As kube-state-metrics 2.x has them, for the HorizontalPodAutoscaler of MODEL.
OF_HPA = 'namespace="prod",horizontalpodautoscaler="zoo"'
KUBE_STATE_METRICS = "\n".join(
    [
        f'kube_horizontalpodautoscaler_info{{{OF_HPA},scaletargetref_api_version="apps/v1",'
        'scaletargetref_kind="Deployment",scaletargetref_name="zoo"} 1',
        *(
            f'kube_horizontalpodautoscaler_status_condition{{{OF_HPA},condition="{condition}",status="{status}"}} '
            f"{int(status == 'true')}"
            for condition in ("AbleToScale", "ScalingActive", "ScalingLimited")
            for status in ("true", "false", "unknown")
        ),
        "",
    ]
)


@contextmanager
def monitored(folder: Path) -> Iterator[Prometheus]:
    """All of it, started and under load until the block ends. Raises Unavailable where a program is missing."""
    (folder / "prometheus").mkdir()
    with ExitStack() as stack:
        # It starts while the server does.
        operator_port = stack.enter_context(_operator(folder))
        metrics_api_port = stack.enter_context(_metrics_api(folder / "metrics-api"))
        server = stack.enter_context(_server(folder))
        kube_state_port = stack.enter_context(_page(KUBE_STATE_METRICS))
        stack.enter_context(_load(server))
        jobs = [
            _job("halimede", (server.metrics_port, MODEL), (server.metrics_port, ENSEMBLE)),
            _job("halimede-operator", (operator_port, OPERATOR)),
            _job("halimede-metrics-api", (metrics_api_port, METRICS_API)),
            _job("kube-state-metrics", (kube_state_port, {})) | {"honor_labels": True},
        ]
        configuration = {
            "global": {"scrape_interval": INTERVAL, "scrape_timeout": INTERVAL, "evaluation_interval": INTERVAL},
            "rule_files": [str(RULES)],
            "scrape_configs": jobs,
        }
        prometheus = stack.enter_context(start_prometheus(configuration, folder / "prometheus"))
        wait_until(lambda: len(prometheus.query("up == 1")) == TARGETS, f"{TARGETS} targets", server)
        yield prometheus


def _job(name: str, *targets: tuple[int, Mapping[str, str]]) -> dict[str, Any]:
    configs = [{"targets": [f"127.0.0.1:{port}"], "labels": dict(labels)} for port, labels in targets]
    return {"job_name": name, "static_configs": configs}


@contextmanager
def _server(folder: Path) -> Iterator[RunningServer]:
    repository = folder / "models"
    repository.mkdir()
    add_python(repository, "plain", extra=ON_GPU)
    add_python(repository, "fails", 'raise ValueError("a failure of the test")')
    add_python(repository, "stream", STREAM, decoupled=True)
    add_python(repository, "session", ECHO, extra=SEQUENCES)
    add_simple(repository, "onnx")
    add_identity(repository, "narrow", extra=NARROW + delay(100))
    (repository / "pipeline" / "1").mkdir(parents=True)
    write_config(repository / "pipeline", PIPELINE)
    (repository / "broken" / "1").mkdir(parents=True)
    write_config(repository / "broken", 'name: "broken" backend: "python" max_batch_size: many')
    driver = PlayedDriver(folder, PlayedGpu("GPU-0", 81559, 40000), *two_slices(100, 9000))
    server = start_server(
        folder,
        ["--model-repository", repository, "--exit-on-error=false", "--strict-readiness=false"],
        environment={**driver.environment, "CUDA_VISIBLE_DEVICES": "GPU-0"},
    )
    try:
        yield server
        assert server.process.poll() is None, server.log
    finally:
        server.kill()


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests for a model, one after the other."""

    model: str
    body: object
    accepts: str = "application/json"


def _streams() -> list[Stream]:
    numbers = {"shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
    wide = {"inputs": [{"name": "IN", "shape": [1, 16], "datatype": "FP32", "data": [1.0] * 16}]}
    return [
        *(Stream(model, body(1.0)) for model in ("plain", "pipeline", "fails")),
        Stream("stream", body(1.0), "text/event-stream"),
        Stream("onnx", {"inputs": [{"name": name, **numbers} for name in ("INPUT0", "INPUT1")]}),
        Stream("session", body(1.0) | {"parameters": {"sequence_id": 1, "sequence_start": True}}),
        *[Stream("narrow", wide)] * 4,
    ]


@contextmanager
def _load(server: RunningServer) -> Iterator[None]:
    ended = threading.Event()

    def send(stream: Stream) -> None:
        # A pause leaves the processor to the rest of the test.
        while not ended.wait(0.1):
            server.post(f"/v2/models/{stream.model}/infer", stream.body, {"Accept": stream.accepts})

    threads = [threading.Thread(target=send, args=(stream,)) for stream in _streams()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@contextmanager
def _operator(folder: Path) -> Iterator[int]:
    """The port of the metrics of an operator that gets a model with a device to reconcile every second."""
    loop = LoopThread(asyncio.new_event_loop)
    serving = kube_api()
    api: KubeApi = loop.run(serving.__aenter__())
    health, metrics = free_port(), free_port()

    loop.call(lambda: api.put("nodes", None, "a", **node("a", ("1g.10gb",))))  # type: ignore[arg-type]
    command = [
        *("-m", "halimede_operator", "--server-image=server:1", "--gpu-server-image=gpu:1"),
        *(f"--kubeconfig={api.kubeconfig(folder)}", "--lease-namespace=halimede"),
        *(f"--health-port={health}", f"--metrics-port={metrics}"),
    ]
    log = folder / "operator.log"
    with log.open("wb") as output:
        process = start_operator(command, output, forked=True)
    accelerator = {"type": "MIG", "mig": {"minMemory": "8Gi"}}

    async def add_models() -> None:
        number = 0
        while True:
            spec = {"model": {"uri": "s3://models/zoo"}, "accelerator": accelerator}
            api.put("inferencemodels", NAMESPACE, f"zoo-{number}", spec=spec)
            number += 1
            await asyncio.sleep(1)

    adding = asyncio.run_coroutine_threadsafe(add_models(), loop.loop)
    try:
        yield metrics
        assert process.poll() is None, log.read_text()
    finally:
        adding.cancel()
        process.kill()
        process.wait()
        loop.run(serving.__aexit__(None, None, None))
        loop.stop()


@contextmanager
def _metrics_api(folder: Path) -> Iterator[int]:
    """The port of its own metrics."""
    folder.mkdir()
    cluster, prometheus = PlayedCluster(Authority("front-proxy-ca")), PlayedPrometheus()
    with http_server(prometheus.respond) as url, metrics_api(cluster, url, folder, is_ready=False) as api:
        yield api.metrics


@contextmanager
def _page(text: str) -> Iterator[int]:
    """The port of a server that answers every request with this text."""

    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def without(expressions: Mapping[str, str], prometheus: Prometheus, give_up_at: float) -> dict[str, str]:
    """Those of the expressions that have no finite value, also at a monotonic time."""
    missing = dict(expressions)
    while True:
        missing = {name: text for name, text in missing.items() if not _has_value(prometheus, text)}
        if not missing or time.monotonic() > give_up_at:
            return missing
        time.sleep(0.2)


def _has_value(prometheus: Prometheus, expression: str) -> bool:
    values = [float(sample["value"][1]) for sample in prometheus.query(expression)]
    return any(value - value == 0 for value in values)
