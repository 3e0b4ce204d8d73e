"""Who may ask the metrics API, over which certificates, and its errors while something else fails."""

import asyncio
import http.client
import inspect
import json
import re
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from cluster.pki import Authority
from halimede_operator.metrics_api import main
from halimede_operator.metrics_api.core.errors import MetricsError
from halimede_operator.metrics_api.metrics import RESULTS, Metrics
from halimede_operator.metrics_api.prometheus import Prometheus
from support.background import in_background
from support.metrics_api import (
    FRONT_PROXY,
    HOST,
    PROGRAM,
    ROOT,
    RULES,
    SERVICE,
    Answer,
    Caller,
    MetricsApi,
    PlayedCluster,
    PlayedPrometheus,
    as_user,
    http_server,
    metrics_api,
)
from support.operator_processes import start_operator

OURS = "v1beta2.custom.metrics.k8s.io"
PATH = "team-a/pods/digits-0/halimede_queue_requests"


def played_cluster() -> PlayedCluster:
    cluster = PlayedCluster(Authority("front-proxy-ca"))
    cluster.api_services[OURS] = SERVICE
    cluster.allowed.add(("ada", "team-a"))
    cluster.tokens["good"] = {"username": "ada", "groups": ["dev"]}
    return cluster


@contextmanager
def running(
    cluster: PlayedCluster, folder: Path, program: Sequence[str] = PROGRAM, *, forked: bool = True
) -> Iterator[tuple[MetricsApi, PlayedPrometheus]]:
    prometheus = PlayedPrometheus()
    with (
        http_server(prometheus.respond) as url,
        metrics_api(cluster, url, folder, program=program, forked=forked) as api,
    ):
        yield api, prometheus


@pytest.fixture
def cluster() -> PlayedCluster:
    return played_cluster()


@dataclass
class World:
    cluster: PlayedCluster
    api: MetricsApi
    prometheus: PlayedPrometheus


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """For tests that leave the cluster as it is."""
    cluster = played_cluster()
    with running(cluster, tmp_path_factory.mktemp("metrics-api"), forked=False) as (api, prometheus):
        yield World(cluster, api, prometheus)


def with_token(api: MetricsApi, token: str) -> Caller:
    return Caller(api.connect(), {"Authorization": f"Bearer {token}"})


def test_callers_are_known_by_certificate_or_token_and_allowed_by_review(world: World) -> None:
    cluster, api = world.cluster, world.api
    assert as_user(api, cluster, "ada", "dev").values(PATH) == {"digits-0": "3"}
    assert with_token(api, "good").values(PATH) == {"digits-0": "3"}
    by_proxy, by_token = cluster.reviews[0], cluster.reviews[-1]
    assert (
        by_proxy
        == by_token
        == {
            "user": "ada",
            "groups": ["dev", "system:authenticated"],
            "resourceAttributes": {
                "namespace": "team-a",
                "verb": "get",
                "group": "custom.metrics.k8s.io",
                "version": "v1beta2",
                "resource": "pods",
                "subresource": "halimede_queue_requests",
                "name": "digits-0",
            },
        }
    )
    assert as_user(api, cluster, "eve").refusal(PATH) == (
        403,
        "eve may not get pods/halimede_queue_requests of custom.metrics.k8s.io in the namespace team-a",
    )
    assert as_user(api, cluster, "ada").refusal(PATH.replace("team-a", "team-b"))[0] == 403
    # The API server asks for discovery as a user without groups, and as one of the masters.
    assert as_user(api, cluster, "system:kube-aggregator").get(ROOT)[0] == 200
    reviews = len(cluster.reviews)
    assert as_user(api, cluster, "system:kube-aggregator", "system:masters").get(ROOT)[0] == 200
    assert len(cluster.reviews) == reviews
    assert as_user(api, cluster, "ada").get("/apis")[0] == 404
    assert as_user(api, cluster, "ada").get("/openapi/v2")[0] == 404


def test_nobody_else_is_known(world: World) -> None:
    headers = {"X-Remote-User": "ada", "X-Remote-Group": "system:masters"}
    cluster, api = world.cluster, world.api
    for caller in (Caller(api.connect(), headers), with_token(api, "bad"), Caller(api.connect(), {})):
        assert caller.refusal(PATH)[0] == 401
    # A certificate of the right CA for another purpose.
    other = Caller(api.connect(cluster.front_proxy.issue("aggregator-of-others")), headers)
    assert other.refusal(PATH) == (
        401,
        "the client certificate is of 'aggregator-of-others'; the front proxy's is of front-proxy-client",
    )
    # One of another CA, whose common name is right.
    with pytest.raises((ssl.SSLError, ConnectionError)):
        Caller(api.connect(Authority("other-ca").issue(FRONT_PROXY)), headers).get(ROOT)
    assert with_token(api, "good").get("/apis")[0] == 404
    connection = api.connect(cluster.front_proxy.issue(FRONT_PROXY))
    connection.request("POST", f"{ROOT}/namespaces/{PATH}", body=b"{}", headers=headers)
    assert json.loads(connection.getresponse().read())["reason"] == "MethodNotAllowed"
    assert "Bearer" not in api.log.read_text()


OFTEN_REFRESHED = """
import asyncio, sys
from halimede_operator.metrics_api.main import MetricsApi
from halimede_operator.metrics_api.settings import parse
sys.exit(asyncio.run(MetricsApi(parse(sys.argv[1:]), refresh_s=0.5).run()))
"""


def test_certificates_are_read_again_every_ten_seconds() -> None:
    assert inspect.signature(main.MetricsApi).parameters["refresh_s"].default == 10


def test_renewed_certificates_are_used_without_a_restart(cluster: PlayedCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path, ("-c", OFTEN_REFRESHED)) as (api, _):
        old_proxy = as_user(api, cluster, "ada")
        idle = as_user(api, cluster, "ada")
        assert (old_proxy.get(ROOT)[0], idle.get(ROOT)[0]) == (200, 200)
        old_identity = cluster.front_proxy.issue(FRONT_PROXY)
        renewed = Authority("serving-ca-2")
        renewed.issue("serving", "", HOST).write(tmp_path / "serving")
        cluster.front_proxy = Authority("front-proxy-ca")
        api.until(lambda: answers_as(api, cluster, renewed))
        # A connection from before, whose CA is no longer trusted, names nobody any more.
        assert idle.get(ROOT)[0] == 401
        with pytest.raises((ssl.SSLError, ConnectionError)):
            Caller(api.connect(old_identity, renewed), {"X-Remote-User": "ada"}).get(ROOT)


def answers_as(api: MetricsApi, cluster: PlayedCluster, authority: Authority) -> bool:
    """Whether the server has a certificate of this CA, and knows the front proxy of now."""
    try:
        connection = api.connect(cluster.front_proxy.issue(FRONT_PROXY), authority)
        return Caller(connection, {"X-Remote-User": "ada"}).get(ROOT)[0] == 200
    except OSError:
        return False


def test_nothing_is_served_while_the_api_belongs_to_another(cluster: PlayedCluster, tmp_path: Path) -> None:
    cluster.api_services[OURS] = ("monitoring", "prometheus-adapter")
    with running(cluster, tmp_path) as (api, _):
        assert api.probe() == (200, "ok")
        status, message = as_user(api, cluster, "ada").refusal(PATH)
        assert status == 503
        assert "belongs to the Service monitoring/prometheus-adapter" in message
        assert "belongs to the Service monitoring/prometheus-adapter" in api.log.read_text()


def test_it_is_ready_when_the_api_server_answered(cluster: PlayedCluster, tmp_path: Path) -> None:
    cluster.is_down = True
    with metrics_api(cluster, "http://127.0.0.1:1", tmp_path, is_ready=False) as api:
        api.until(lambda: api.probe()[0] == 503 and "etcd is gone" in api.probe()[1])
        assert with_token(api, "good").refusal(PATH)[0] == 503
        cluster.is_down = False
        api.until(lambda: api.probe()[0] == 200)
        cluster.is_down = True
        status, message = as_user(api, cluster, "ada").refusal(PATH)
        assert (status, "etcd is gone" in message) == (503, True)
        assert api.probe()[0] == 200, "the front proxy's CA is known, and the API server's outage is not ours"


def test_a_prometheus_that_fails_is_an_outage_with_its_cause(world: World) -> None:
    cluster, api, prometheus = world.cluster, world.api, world.prometheus
    caller = as_user(api, cluster, "ada")
    for answer, cause in (
        ((502, b"<html>Bad Gateway</html>"), "status 502, not an answer of its API: '<html>Bad Gateway"),
        ((503, b'{"status":"error","errorType":"timeout","error":"too slow"}'), "timeout: too slow"),
        ((200, b" " * (4 * 1024 * 1024 + 1)), "its answer is larger than 4194304 bytes"),
        ((307, b""), "status 307"),
    ):
        prometheus.answer = partial(lambda given: given, answer)
        status, message = caller.refusal(PATH)
        assert (status, cause in message) == (503, True), message
    prometheus.answer = lambda: prometheus.good
    assert caller.values(PATH) == {"digits-0": "3"}


def test_a_prometheus_that_is_not_there_is_an_outage(cluster: PlayedCluster, tmp_path: Path) -> None:
    with metrics_api(cluster, "http://127.0.0.1:1", tmp_path) as api:
        status, message = as_user(api, cluster, "ada").refusal(PATH)
        assert (status, "Prometheus cannot be asked: http://127.0.0.1:1/api/v1/query: Cannot connect" in message) == (
            503,
            True,
        )


def test_its_own_metrics_have_each_result_and_the_queries(cluster: PlayedCluster, tmp_path: Path) -> None:
    with running(cluster, tmp_path) as (api, prometheus):
        ada = as_user(api, cluster, "ada")
        ada.values(PATH)
        assert ada.refusal("team-a/pods/digits-1/halimede_queue_requests")[0] == 404
        assert ada.refusal("team-b/pods/digits-0/halimede_queue_requests")[0] == 403
        prometheus.answer = lambda: (502, b"")
        assert [ada.refusal(PATH)[0] for _ in range(2)] == [503, 503]
        figures = api.figures()
        results = {
            name.partition('"')[2].rstrip('"}'): value
            for name, value in figures.items()
            if name.startswith("halimede_metrics_api_requests_total{")
        }
        assert results == {
            **dict.fromkeys(RESULTS, 0),
            "Success": 1,
            "NotFound": 1,
            "Forbidden": 1,
            "ServiceUnavailable": 2,
        }
        # Of the second one there is a query more, to say why it has no value.
        assert figures["halimede_metrics_api_query_seconds_count"] == 5
        # Nobody had to ask for a metric.
        api.until(lambda: prometheus.checks > 0)
        assert figures["halimede_metrics_api_prometheus_answer_age_seconds"] >= 0


def test_a_prometheus_that_does_not_answer_is_logged_without_a_request(cluster: PlayedCluster, tmp_path: Path) -> None:
    with metrics_api(cluster, "http://127.0.0.1:1", tmp_path) as api:
        api.until(lambda: "Prometheus cannot be asked: http://127.0.0.1:1/api/v1/query" in api.log.read_text())
        assert api.probe() == (200, "ok")


def test_the_age_is_that_of_the_last_good_answer() -> None:
    now_s, prometheus = 100.0, PlayedPrometheus()
    metrics = Metrics(lambda: now_s)

    def age_s() -> float:
        found = re.search(
            r"^halimede_metrics_api_prometheus_answer_age_seconds (\S+)$", metrics.text().decode(), re.MULTILINE
        )
        assert found is not None
        return float(found[1])

    async def check(answer: Answer) -> None:
        prometheus.answer_to_check = answer
        with http_server(prometheus.respond) as url:
            client = Prometheus(url, None, None, metrics)
            try:
                await client.check()
            finally:
                await client.close()

    now_s = 130.0
    assert age_s() == 30, "since the start"
    asyncio.run(check(prometheus.good))
    now_s = 142.0
    assert age_s() == 12
    for bad in ((503, b'{"status":"error","errorType":"timeout","error":"too slow"}'), (200, b"<html>Log in</html>")):
        with pytest.raises(MetricsError):
            asyncio.run(check(bad))
        assert age_s() == 12
    asyncio.run(check(prometheus.good))
    assert age_s() == 0


def test_requests_at_a_time_are_bounded(world: World) -> None:
    """16 are answered at a time, 128 wait, and others are told to come again."""
    refused, full, active, most = threading.Event(), threading.Event(), 0, 0
    lock = threading.Lock()

    def slow() -> Answer:
        nonlocal active, most
        with lock:
            active += 1
            most = max(most, active)
            if active == 16:
                full.set()
        # Shorter than the time that a query has. One of both alone may come before the second query does.
        deadline = time.monotonic() + 4
        for event in (refused, full):
            event.wait(max(0.0, deadline - time.monotonic()))
        with lock:
            active -= 1
        return world.prometheus.good

    def ask(caller: Caller) -> int:
        status, _ = caller.get(f"{ROOT}/namespaces/{PATH}")
        if status == 429:
            refused.set()
        return status

    world.prometheus.answer = slow
    proxy = world.cluster.front_proxy.issue(FRONT_PROXY)
    callers = [Caller(world.api.connect(proxy), {"X-Remote-User": "ada"}) for _ in range(160)]
    for caller in callers:
        caller.connection.connect()
    statuses = [answer.result(60) for answer in [in_background(partial(ask, caller)) for caller in callers]]
    world.prometheus.answer = lambda: world.prometheus.good
    assert most in range(2, 17)
    assert statuses.count(429) in range(1, 17)
    assert statuses.count(200) >= 16


def test_connections_are_bounded(world: World) -> None:
    """Beyond 256 a connection is closed at once, and others go on."""
    proxy = world.cluster.front_proxy.issue(FRONT_PROXY)
    callers = [Caller(world.api.connect(proxy), {"X-Remote-User": "ada"}) for _ in range(270)]
    served = 0
    for caller in callers:
        try:
            served += caller.get(ROOT)[0] == 200
        except (OSError, http.client.HTTPException):
            break
    assert 50 < served <= 256
    assert callers[0].get(ROOT)[0] == 200
    while world.api.connections:
        world.api.connections.pop().close()
    world.api.until(lambda: answers_as(world.api, world.cluster, world.api.serving))


def test_a_token_for_prometheus_is_read_for_each_query(cluster: PlayedCluster, tmp_path: Path) -> None:
    """From a file, which may be renewed; without the file the cause is said."""
    token = tmp_path / "prometheus-token"
    prometheus = PlayedPrometheus()
    with (
        http_server(prometheus.respond) as url,
        metrics_api(cluster, url, tmp_path, f"--prometheus-token-file={token}") as api,
    ):
        caller = as_user(api, cluster, "ada")
        status, message = caller.refusal(PATH)
        assert (status, "No such file or directory" in message) == (503, True)
        token.write_text("secret\n")
        assert caller.values(PATH) == {"digits-0": "3"}


def test_a_prometheus_with_a_certificate_needs_its_ca(cluster: PlayedCluster, tmp_path: Path) -> None:
    """The file of CAs is read again when it changes."""
    authority, other, cas = Authority("prometheus-ca"), Authority("other-ca"), tmp_path / "prometheus-ca.crt"
    authority.issue("prometheus", "", "127.0.0.1").write(tmp_path / "prometheus")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(tmp_path / "prometheus.crt", tmp_path / "prometheus.key")
    cas.write_bytes(other.certificate)
    with (
        http_server(PlayedPrometheus().respond, tls) as url,
        metrics_api(cluster, url, tmp_path, f"--prometheus-ca-file={cas}") as api,
    ):
        caller = as_user(api, cluster, "ada")
        status, message = caller.refusal(PATH)
        assert (status, "certificate verify failed" in message) == (503, True)
        cas.write_bytes(authority.certificate)
        assert caller.values(PATH) == {"digits-0": "3"}


def test_a_bad_rules_file_ends_the_process(cluster: PlayedCluster, tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES.read_text().replace("seriesQuery", "seriesQueries", 1))
    Authority("ca").issue("serving", "", HOST).write(tmp_path / "serving")
    flags = {"rules": rules, "tls-cert-file": tmp_path / "serving.crt", "tls-key-file": tmp_path / "serving.key"}
    command = [
        *("-m", "halimede_operator", "metrics-api"),
        *("--prometheus-url=http://prometheus:9090", "--service-name=a", "--log-format=text"),
        *(f"--{name}={value}" for name, value in flags.items()),
    ]
    log = tmp_path / "log"
    with log.open("wb") as output:
        assert start_operator(command, output, forked=True).wait(100) == 2
    said = log.read_text()
    assert "rules.yaml: rules[0].seriesQueries: is not supported; rules[0].seriesQuery: is missing" in said
