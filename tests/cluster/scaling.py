"""Autoscaling in tests of a whole cluster: pods whose metrics a test sets, offered load, the history of replicas."""

import asyncio
import json
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, Self

from cluster.installed import Tenant
from cluster.models import running
from cluster.spaces import LIMIT_S, eventually

Object = dict[str, Any]

QUEUE = "halimede_queue_requests"
EXECUTING = "halimede_executing_requests"
BUSY = "halimede_instance_busy_ratio"
SEQUENCES = "halimede_sequences_open"
METRICS_PORT = 8002

NEVER = ("nv_inference_request_success", SEQUENCES)
"""What stays 0: a played pod receives nothing new, however often it is looked at."""


def page_of(**values: float | str) -> str:
    """A page of metrics. values: of queue, executing, busy."""
    names = {"queue": QUEUE, "executing": EXECUTING, "busy": BUSY}
    shown = {names[each]: value for each, value in values.items()} | dict.fromkeys(NEVER, 0)
    return "".join(f'{name}{{model="m",version="1"}} {value}\n' for name, value in shown.items())


ZEROS = page_of(queue=0, executing=0, busy=0)
# Answers every probe, and shows the page of metrics that was posted last. The operator posts too, for the index.
PLAYED_POD = f"""
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
page = [PAGE]
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        shown = page[0] if self.path == "/metrics" else "ready"
        self.send_response(200 if shown else 503)
        self.send_header("Content-Type", "text/plain")
        self.end_headers()
        self.wfile.write(shown.encode())
    def do_POST(self):
        given = self.rfile.read(int(self.headers["Content-Length"])).decode()
        if self.path == "/metrics":
            page[0] = given
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
threading.Thread(target=ThreadingHTTPServer(("", {METRICS_PORT}), Handler).serve_forever).start()
ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""


def played_model(name: str, uri: str, autoscaling: Object, *, page: str = ZEROS, **fields: Any) -> Object:
    """An InferenceModel whose pods have no server, but metrics that `PlayedPods` sets. page: with which a pod begins."""
    return {
        "apiVersion": "halimede.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": name},
        "spec": {
            "model": {"uri": uri},
            "autoscaling": autoscaling,
            "podTemplate": running(PLAYED_POD.replace("PAGE", repr(page))),
            **fields,
        },
    }


class PlayedPods:
    """The pods of a played model."""

    def __init__(self, tenant: Tenant, model: str) -> None:
        self._tenant = tenant
        self._model = model

    def running(self) -> list[str]:
        """Names of the pods that are ready and are not being deleted."""
        pods = self._tenant.get("pods", f"--selector=halimede.dev/model={self._model}")["items"]
        return sorted(
            pod["metadata"]["name"]
            for pod in pods
            if "deletionTimestamp" not in pod["metadata"]
            and any((c["type"], c["status"]) == ("Ready", "True") for c in pod["status"].get("conditions", ()))
        )

    def show(self, pod: str, **values: float | str) -> None:
        """The values of the pod's metrics from now on: queue, executing, busy; without any it has no metrics at all."""
        self.post(pod, page_of(**values) if values else "")

    def post(self, pod: str, page: str) -> None:
        address = self._tenant.cluster.forward(f"pod/{pod}", METRICS_PORT, self._tenant.namespace)
        request = urllib.request.Request(f"http://{address}/metrics", page.encode(), method="POST")
        urllib.request.urlopen(request, timeout=LIMIT_S).close()

    def show_all(self, **values: float | str) -> None:
        """All at once, since the controller may look in between."""
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda pod: self.show(pod, **values), self.running()))


def turns_of(values: Sequence[int]) -> list[int]:
    """The first value, the last one, and those at which a rise and a fall meet. values: without repetitions.

    The HPA asks for its metrics one after the other, so it may see new samples of one alone, and take two steps.
    """
    inner = zip(values, values[1:], values[2:], strict=False)
    turns = [each for before, each, after in inner if (before < each) == (each > after)]
    return [*values[:1], *turns, *values[1:][-1:]]


class History:
    """Each value of a Deployment's `spec.replicas` during the `with`, as a watch reports it. field: another number."""

    def __init__(self, tenant: Tenant, name: str, field: str = "spec.replicas") -> None:
        self._tenant = tenant
        self._name = name
        self._field = field
        self._values: list[int] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        kubectl = self._tenant.cluster._kubectl  # type: ignore[attr-defined]
        self._process = subprocess.Popen(
            [
                *(kubectl, f"--kubeconfig={self._tenant.cluster.kubeconfig}", f"--namespace={self._tenant.namespace}"),
                *("get", "deployment", self._name, "--watch", "-o", f'jsonpath={{.{self._field}}}{{"\\n"}}'),
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        eventually(lambda: self._values, "the watch")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process
        assert self._process.stdout
        self._process.kill()
        self._thread.join()
        self._process.wait()
        self._process.stdout.close()

    @property
    def values(self) -> list[int]:
        """Without repetitions."""
        seen = self._values[:]
        return [each for number, each in enumerate(seen) if number == 0 or each != seen[number - 1]]

    @property
    def turns(self) -> list[int]:
        return turns_of(self.values)

    def _read(self) -> None:
        assert self._process
        assert self._process.stdout
        for line in self._process.stdout:
            # A status has no number instead of 0.
            self._values.append(int(line.strip() or 0))


class OfferedLoad:
    """Requests at even intervals, each on a connection of its own, whatever becomes of the earlier ones."""

    def __init__(self, address: str, path: str, body: Object) -> None:
        host, _, port = address.rpartition(":")
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(payload)}\r\n\r\n"
        self._request = head.encode() + payload
        self._where = (host, int(port))
        self._rate = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.answered = 0
        self.failed: list[str] = []
        """The time and the cause of each request that was not answered with status 200."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def offer(self, rate: float) -> None:
        """Requests per second from now on."""
        self._rate = rate

    async def _run(self) -> None:
        pending: set[asyncio.Task[None]] = set()
        while not self._is_over.is_set():
            if self._rate:
                task = asyncio.create_task(self._ask())
                pending.add(task)
                task.add_done_callback(pending.discard)
            await asyncio.sleep(1 / self._rate if self._rate else 0.1)
        if pending:
            _, late = await asyncio.wait(pending, timeout=LIMIT_S)
            for _ in late:
                self._fail(f"no answer within {LIMIT_S} s")

    async def _ask(self) -> None:
        try:
            reader, writer = await asyncio.open_connection(*self._where)
            with closing(writer):
                writer.write(self._request)
                answer = await reader.read()
        except OSError as error:
            self._fail(repr(error))
            return
        if answer.startswith(b"HTTP/1.1 200 "):
            self.answered += 1
        else:
            self._fail(answer.decode(errors="replace")[-500:] or "no answer")

    def _fail(self, why: str) -> None:
        self.failed.append(f"{time.strftime('%H:%M:%S')} {why}")
