"""Runs `halimede-operator metrics-api`, with a played API server and played pods for a real Prometheus to scrape."""

import http.client
import json
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, urlencode, urlsplit

from cluster.pki import Authority, Identity, write_kubeconfig
from support.forked import Process
from support.image import REPOSITORY_ROOT
from support.operator_processes import start_operator
from support.ports import free_port

RULES = REPOSITORY_ROOT / "helm" / "halimede" / "files" / "metrics-rules.yaml"
ROOT = "/apis/custom.metrics.k8s.io/v1beta2"
SERVICE = ("halimede", "halimede-metrics-api")
"""Namespace and name."""
HOST = "halimede-metrics-api.halimede.svc"
FRONT_PROXY = "front-proxy-client"
START_LIMIT_S = 60
PROGRAM = ("-m", "halimede_operator", "metrics-api")

Answer = tuple[int, bytes]
Responder = Callable[[str, str, Mapping[str, str], bytes], Answer]
"""From method, path, query and body of a request."""


@contextmanager
def http_server(respond: Responder, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve on a free port of this machine, on threads; the URL, without a slash at the end. tls: of HTTPS."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            status, answer = respond(self.command, parts.path, query, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_GET = do_POST = _answer  # noqa: N815 - names of the base class

        def log_message(self, *_: Any) -> None: ...

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """A client that does not wait for its answer is no error."""

    with Listener(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@dataclass
class PlayedCluster:
    """The parts of an API server that the metrics API asks."""

    front_proxy: Authority
    pods: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    """Labels by namespace and name."""
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The user of each valid token."""
    allowed: set[tuple[str, str]] = field(default_factory=set)
    """Users, each with a namespace in which it may get all metrics."""
    api_services: dict[str, tuple[str, str]] = field(default_factory=dict)
    """The Service of each APIService, by its name."""
    allowed_names: list[str] = field(default_factory=lambda: [FRONT_PROXY])
    requests: list[str] = field(default_factory=list)
    reviews: list[dict[str, Any]] = field(default_factory=list)
    """The specs of all SubjectAccessReviews."""
    is_down: bool = False

    def respond(self, method: str, path: str, query: Mapping[str, str], body: bytes) -> Answer:
        self.requests.append(f"{method} {path}")
        if self.is_down:
            return _refused(503, "etcd is gone")
        match path.strip("/").split("/"):
            case ["api", "v1", "namespaces", namespace, "pods"]:
                return self._pods(namespace, query)
            case ["api", "v1", "namespaces", "kube-system", "configmaps", "extension-apiserver-authentication"]:
                return 200, json.dumps({"data": self._authentication()}).encode()
            case ["apis", "apiregistration.k8s.io", "v1", "apiservices", name]:
                if name not in self.api_services:
                    return _refused(404, f"no {name}")
                namespace, service = self.api_services[name]
                return 200, json.dumps({"spec": {"service": {"namespace": namespace, "name": service}}}).encode()
            case ["apis", "authentication.k8s.io", "v1", "tokenreviews"]:
                user = self.tokens.get(json.loads(body)["spec"]["token"])
                return 201, json.dumps({"status": {"authenticated": True, "user": user} if user else {}}).encode()
            case ["apis", "authorization.k8s.io", "v1", "subjectaccessreviews"]:
                spec = json.loads(body)["spec"]
                self.reviews.append(spec)
                wanted = spec.get("resourceAttributes")
                is_allowed = (spec["user"], wanted["namespace"]) in self.allowed if wanted else _may_discover(spec)
                return 201, json.dumps({"status": {"allowed": is_allowed}}).encode()
        return _refused(404, f"nothing at {path}")

    def _pods(self, namespace: str, query: Mapping[str, str]) -> Answer:
        selector = query.get("labelSelector", "")
        if "=" not in selector:
            return _refused(400, "unable to parse requirement")
        wanted = dict(part.split("=") for part in selector.split(","))
        names = [
            name
            for (space, name), labels in self.pods.items()
            if space == namespace and wanted.items() <= labels.items()
        ]
        limit = int(query["limit"])
        metadata = {"continue": "more"} if len(names) > limit else {}
        items = [{"metadata": {"name": name}} for name in names[:limit]]
        return 200, json.dumps({"metadata": metadata, "items": items}).encode()

    def _authentication(self) -> dict[str, str]:
        return {
            "requestheader-client-ca-file": self.front_proxy.certificate.decode(),
            "requestheader-allowed-names": json.dumps(self.allowed_names),
            "requestheader-username-headers": '["X-Remote-User"]',
            "requestheader-group-headers": '["X-Remote-Group"]',
            "requestheader-uid-headers": '["X-Remote-Uid"]',
            "requestheader-extra-headers-prefix": '["X-Remote-Extra-"]',
        }


def _may_discover(spec: Mapping[str, Any]) -> bool:
    """As the ClusterRole system:discovery."""
    return spec["nonResourceAttributes"] == {"path": ROOT, "verb": "get"} and "system:authenticated" in spec["groups"]


def _refused(status: int, message: str) -> Answer:
    return status, json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": status}).encode()


@dataclass
class MetricsApi:
    """A running process."""

    port: int
    health: int
    metrics: int
    process: subprocess.Popen[bytes] | Process
    serving: Authority
    folder: Path
    log: Path
    connections: list[http.client.HTTPSConnection] = field(default_factory=list)
    """Closed at the end."""

    def connect(
        self, identity: Identity | None = None, authority: Authority | None = None
    ) -> http.client.HTTPSConnection:
        """identity: of the client's certificate. authority: the CA that the server's certificate must have."""
        context = ssl.create_default_context(cadata=(authority or self.serving).certificate.decode())
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if identity is not None:
            identity.write(self.folder / "client")
            context.load_cert_chain(self.folder / "client.crt", self.folder / "client.key")
        self.connections.append(Connection(self.port, context))
        return self.connections[-1]

    def probe(self) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health}/readyz", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def figures(self) -> dict[str, float]:
        """The values of its own metrics, by name and labels as they are written."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    def until(self, is_so: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + START_LIMIT_S
        while not is_so():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < give_up_at, self.log.read_text()[-4000:]
            time.sleep(0.05)


class Connection(http.client.HTTPSConnection):
    """Connects to 127.0.0.1, and expects the certificate of the Service, as the API server does."""

    def __init__(self, port: int, context: ssl.SSLContext) -> None:
        super().__init__(HOST, port, context=context, timeout=60)
        self._tls = context

    def connect(self) -> None:
        self.sock = self._tls.wrap_socket(socket.create_connection(("127.0.0.1", self.port), 60), server_hostname=HOST)


@dataclass
class Caller:
    """Sends requests as a user, through the front proxy."""

    connection: http.client.HTTPSConnection
    headers: dict[str, str]

    def get(self, path: str, **query: str) -> tuple[int, dict[str, Any]]:
        target = quote(path, safe="/*") + (f"?{urlencode(query)}" if query else "")
        self.connection.request("GET", target, headers=self.headers)
        answer = self.connection.getresponse()
        return answer.status, json.loads(answer.read())

    def values(self, path: str, **query: str) -> dict[str, str]:
        """The values of a metric by the object's name."""
        status, answer = self.get(f"{ROOT}/namespaces/{path}", **query)
        assert status == 200, answer
        return {each["describedObject"]["name"]: each["value"] for each in answer["items"]}

    def refusal(self, path: str, **query: str) -> tuple[int, str]:
        """Status and message."""
        status, answer = self.get(f"{ROOT}/namespaces/{path}", **query)
        assert answer["kind"] == "Status", answer
        assert answer["code"] == status
        return status, answer["message"]


def as_user(api: MetricsApi, cluster: PlayedCluster, name: str, *groups: str) -> Caller:
    """As the API server forwards a request of this user."""
    proxy = cluster.front_proxy.issue(FRONT_PROXY)
    headers = {"X-Remote-User": name, **({"X-Remote-Group": groups[0]} if groups else {})}
    return Caller(api.connect(proxy), headers)


@contextmanager
def metrics_api(
    cluster: PlayedCluster,
    prometheus_url: str,
    folder: Path,
    *arguments: str,
    is_ready: bool = True,
    program: Sequence[str] = PROGRAM,
    forked: bool = True,
) -> Iterator[MetricsApi]:
    """The process beside this API server.

    folder: for its files. is_ready: wait until it is. program: what Python runs, in a fork or as an interpreter.
    """
    serving = Authority("serving-ca")
    serving.issue("serving", "", HOST).write(folder / "serving")
    with http_server(cluster.respond) as url:
        kubeconfig = write_kubeconfig(folder / "kubeconfig", url, serving.certificate, "a-token")
        with metrics_api_process(
            *(kubeconfig, prometheus_url, folder, serving, *arguments),
            is_ready=is_ready,
            program=program,
            forked=forked,
        ) as api:
            yield api


@contextmanager
def metrics_api_process(
    kubeconfig: Path,
    prometheus_url: str,
    folder: Path,
    serving: Authority,
    *arguments: str,
    is_ready: bool = True,
    program: Sequence[str] = PROGRAM,
    forked: bool = True,
) -> Iterator[MetricsApi]:
    """folder: has serving.crt and serving.key, and gets other files. serving: the CA of that certificate."""
    port, health, metrics, log = free_port(), free_port(), free_port(), folder / "log"
    command = [
        *program, f"--kubeconfig={kubeconfig}", f"--rules={RULES}",
        f"--prometheus-url={prometheus_url}", f"--tls-cert-file={folder / 'serving.crt'}",
        f"--tls-key-file={folder / 'serving.key'}", f"--service-namespace={SERVICE[0]}", f"--service-name={SERVICE[1]}",
        f"--port={port}", f"--health-port={health}", f"--metrics-port={metrics}", "--log-format=text", *arguments,
    ]  # fmt: skip
    with log.open("wb") as output:
        process = start_operator(command, output, forked=forked)
    api = MetricsApi(port, health, metrics, process, serving, folder, log)
    try:
        if is_ready:
            api.until(lambda: api.probe()[0] == 200)
        yield api
    finally:
        for connection in api.connections:
            connection.close()
        process.terminate()
        status = process.wait(60)
    assert status == 0, log.read_text()[-4000:]


CHECK = b"query=vector%281%29"


class PlayedPrometheus:
    """Answers the queries of all rules alike, and apart from these the one that only checks whether it answers."""

    def __init__(self) -> None:
        result = [{"metric": {"pod": "digits-0"}, "value": [1000, "3"]}]
        self.good = 200, json.dumps({"status": "success", "data": {"resultType": "vector", "result": result}}).encode()
        self.answer: Callable[[], Answer] = lambda: self.good
        self.answer_to_check = self.good
        self.checks = 0

    def respond(self, _method: str, _path: str, _query: Mapping[str, str], body: bytes) -> Answer:
        if CHECK not in body:
            return self.answer()
        self.checks += 1
        return self.answer_to_check


@dataclass
class PlayedPods:
    """Metrics pages of pods, and the scrape configuration that finds them."""

    pages: dict[str, Callable[[], str]] = field(default_factory=dict)
    targets: list[dict[str, Any]] = field(default_factory=list)

    def add(self, namespace: str, pod: str, page: str | Callable[[], str], **labels: str) -> None:
        path = f"/{namespace}/{pod}"
        self.pages[path] = page if callable(page) else lambda: page
        self.targets.append({"__metrics_path__": path, "namespace": namespace, "pod": pod, **labels})

    def respond(self, _method: str, path: str, _query: Mapping[str, str], _body: bytes) -> Answer:
        return 200, self.pages[path]().encode()

    def configuration(self, url: str) -> dict[str, Any]:
        """Of a Prometheus that scrapes the pods, which are served at this URL."""
        address = url.removeprefix("http://")
        targets = [{"targets": [address], "labels": labels} for labels in self.targets]
        return {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [{"job_name": "pods", "static_configs": targets}],
        }
