"""kopf's watches against an API server that breaks them: in the end the cache equals the API server's state."""

import asyncio
import email.utils
import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from halimede_operator.api_server.connection import Connection
from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.kopf_adapter import CacheFeed, watch_session
from halimede_operator.cluster.watch_health import STUCK_S, WatchHealth
from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Key, Kind
from halimede_operator.handlers.watch import Watches, kopf_settings
from support.kube_api import Fault, KubeApi, deep
from support.loops import in_a_loop
from support.operator_watches import Scenario, Watched, a_few, run, running

MODELS = "/apis/halimede.dev/v1alpha1/inferencemodels"
WATCH = rf"GET {MODELS}\?.*watch=true"
LIST = rf"GET {MODELS}\?(?!.*watch=true)"


@in_a_loop
async def test_watches_that_end_before_kopf_has_a_thread_drop_no_coroutine():
    """All threads may be busy, for instance with the names of an API server whose name server is overloaded."""

    async def nothing(_resource: object = None) -> str:
        return ""

    async def are_there() -> bool:
        return True

    free = threading.Event()
    with ThreadPoolExecutor(1) as busy:
        asyncio.get_running_loop().set_default_executor(busy)
        busy.submit(free.wait)
        feed = CacheFeed(Cache(), WatchHealth([], 0.0), lambda _key: None)
        watches = asyncio.create_task(Watches(None, (), feed, are_there, nothing, kopf_settings()).run())
        while not busy._work_queue.qsize():
            await asyncio.sleep(0)
        watches.cancel()
        await asyncio.wait({watches})
        free.set()
    gc.collect()


async def still_works(watched: Watched) -> None:
    """Changes arrive, creations as well as deletions."""
    watched.api.put("inferencemodels", "prod", "new", spec={})
    watched.api.remove("inferencemodels", "prod", "a")
    await watched.api.until(watched.knows)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Scenario], None]]:
    """`run` for tests that leave the watches as they were: one API server and one start of kopf are enough for them."""

    async def whole(scenario: Scenario) -> None:
        watched.api.put("inferencemodels", "prod", "a", spec={"model": {"uri": "s3://models/m"}})
        await watched.api.until(watched.knows)
        await scenario(watched)
        watched.api.remove("inferencemodels", "prod", "new")

    with running(tmp_path_factory.mktemp("shared"), before=a_few) as (runner, watched):
        yield lambda scenario: runner.run(whole(scenario))


def test_objects_are_listed_once_and_events_are_reported(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        await still_works(watched)
        assert watched.api.counted(LIST) == 1
        assert watched.api.writes() == {}

    run(scenario, tmp_path, before=a_few)


def test_kopf_gets_lists_without_items(tmp_path: Path):
    """It would have a queue and a task for each of them."""

    async def scenario(watched: Watched) -> None:
        connection = Connection(str(watched.kubeconfig))
        await connection.refresh()
        feed = CacheFeed(Cache(), WatchHealth([], 0.0), lambda _key: None)
        url = f"{connection.host}{MODELS}?limit=50"
        async with watch_session(connection, feed, 0) as session, session.get(url) as answer:
            page = await answer.json()
        assert page["items"] == []
        assert int(page["metadata"]["resourceVersion"]) > 0

    run(scenario, tmp_path, before=a_few)


def test_children_are_watched_by_their_label_and_wake_their_owner(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        labels = {"app.kubernetes.io/managed-by": "halimede-operator"}
        owner = {
            "apiVersion": "halimede.dev/v1alpha1", "kind": "InferenceModel", "name": "a", "uid": "1", "controller": True
        }  # fmt: skip
        watched.woken.clear()
        watched.api.put("services", "prod", "a", metadata={"labels": labels, "ownerReferences": [owner]})
        watched.api.put("services", "prod", "stranger")
        await watched.api.until(lambda: watched.cache.find("Service", "prod", "a") is not None)
        assert watched.woken == [Key(Kind.INFERENCE_MODEL, "prod", "a")]
        assert watched.cache.find("Service", "prod", "stranger") is None

    run(scenario, tmp_path, before=a_few)


def test_finalizers_and_annotations_for_kopf_have_no_effect(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        metadata = {
            "labels": {"app.kubernetes.io/managed-by": "halimede-operator"},
            "annotations": {"kopf.zalando.org/last-handled-configuration": "{"},
            "finalizers": ["kopf.zalando.org/KopfFinalizerMarker"],
        }
        watched.api.put("services", "prod", "a", metadata=metadata)
        await watched.api.until(lambda: watched.knows("services", "Service"))
        await still_works(watched)
        assert watched.api.writes() == {}

    run(scenario, tmp_path, before=a_few)


def test_a_long_list_is_read_in_pages(tmp_path: Path):
    def many(api: KubeApi) -> None:
        for n in range(120):
            api.put("inferencemodels", "prod", f"m{n:04}", spec={})

    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        # One of 10, until the size of the objects is known.
        assert watched.api.counted(LIST) == 4

    run(scenario, tmp_path, before=many)


def test_pages_of_large_objects_have_few(tmp_path: Path):
    def large(api: KubeApi) -> None:
        for n in range(16):
            api.put("inferencemodels", "prod", f"m{n:04}", spec={"x": "x" * 1_000_000})

    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        lists = [request for request in watched.api.requests if "/inferencemodels?" in request and "limit=" in request]
        assert [int(re.findall(r"limit=(\d+)", request)[0]) for request in lists] == [10, 4, 4]

    run(scenario, tmp_path, before=large)


def test_a_list_with_an_expired_continue_token_starts_again(tmp_path: Path):
    """O-04."""

    def many(api: KubeApi) -> None:
        for n in range(70):
            api.put("inferencemodels", "prod", f"m{n:04}", spec={})
        api.faults.append(Fault(rf"{LIST}.*continue=", status=410, reason="Expired", times=2))

    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        await watched.api.until(lambda: watched.api.counted(LIST) == 7)

    run(scenario, tmp_path, before=many)


def test_with_namespaces_no_request_is_cluster_wide(tmp_path: Path):
    def spread(api: KubeApi) -> None:
        a_few(api)
        api.put("inferencemodels", "other", "x", spec={})
        api.put("inferencemodels", "foreign", "y", spec={})

    async def scenario(watched: Watched) -> None:
        known = [where for where in (("prod", "a"), ("other", "x"), ("foreign", "y")) if watched.knows_of(*where)]
        assert known == [("prod", "a"), ("other", "x")]
        asked = [request for request in watched.api.requests if "?" in request]
        assert all("/namespaces/prod/" in request or "/namespaces/other/" in request for request in asked)

    run(scenario, tmp_path, before=spread, namespaces=("prod", "other"))


BROKEN_STREAMS = {
    "an error of etcd": (
        b'{"type":"ERROR","object":{"kind":"Status","code":500,"message":"etcdserver: request timed out"}}\n',
    ),
    "a timeout": (b'{"type":"ERROR","object":{"kind":"Status","code":504,"message":"timeout"}}\n',),
    "too many requests": (b'{"type":"ERROR","object":{"kind":"Status","code":429,"message":"slow down"}}\n',),
    "the version is too old": (b'{"type":"ERROR","object":{"kind":"Status","code":410,"message":"too old"}}\n',),
    "a line that is no JSON": (b"<html>502 Bad Gateway</html>\n",),
    "JSON that was cut off": (b'{"type":"ADDED","object":{"metadata":{"name":"gh',),
    "an event without an object": (b'{"type":"ADDED"}\n',),
    "an object without a name": (b'{"type":"ADDED","object":{"metadata":{"uid":"1"}}}\n',),
    "nothing at all": (),
    "no text": (b"\xff\xfe\n",),
}


@pytest.mark.parametrize("lines", BROKEN_STREAMS.values(), ids=BROKEN_STREAMS.keys())
def test_a_watch_with_invalid_data_is_restarted(shared: Callable[[Scenario], None], lines: tuple[bytes, ...]):
    """O-04, O-05."""

    async def scenario(watched: Watched) -> None:
        fault = Fault(WATCH, lines=lines, times=2)
        watched.api.faults.append(fault)
        watched.api.cut()
        await watched.api.until(lambda: fault.times == 0)
        await still_works(watched)

    shared(scenario)


# kopf ends at its seventh failure of a request in a row, and at the first of some kinds.
REFUSALS = {
    "unavailable": Fault(".", status=503, reason="ServiceUnavailable", times=7),
    "forbidden": Fault(".", status=403, reason="Forbidden", times=7),
    "too many, seconds": Fault(".", status=429, headers={"Retry-After": "0"}, times=7),
    "too many, a fraction": Fault(".", status=429, headers={"Retry-After": "0.01"}, times=7),
    "too many, a date": Fault(
        ".", status=429, headers={"Retry-After": email.utils.formatdate(0, usegmt=True)}, times=2
    ),
    "too many, nonsense": Fault(".", status=429, headers={"Retry-After": "soon"}, times=2),
    "the kind is gone": Fault(".", status=404, reason="NotFound", times=2),
    # kopf ends more often than there are backoffs before its next start.
    "gone": Fault(".", status=410, reason="Gone", times=7),
    "bad gateway without JSON": Fault(".", status=502, times=7),
    "dropped": Fault(".", drop=True, times=7),
    "unauthorized": Fault(".", status=401, reason="Unauthorized", times=2),
    "what is this": Fault(".", status=400, times=2),
}


@pytest.mark.parametrize("fault", REFUSALS.values(), ids=REFUSALS.keys())
def test_an_api_server_that_refuses_for_long_is_retried(shared: Callable[[Scenario], None], fault: Fault):
    """O-02, O-04, O-09, O-11: more often than kopf alone would survive."""

    async def scenario(watched: Watched) -> None:
        refusal = replace(fault, what=MODELS)
        watched.api.faults.append(refusal)
        watched.api.cut()
        await watched.api.until(lambda: refusal.times == 0, within_s=40)
        await still_works(watched)

    shared(scenario)


def test_an_unwatchable_version_leads_to_a_new_list(tmp_path: Path):
    """As after the restore of an old backup of etcd: no watch from this version will ever work."""

    async def scenario(watched: Watched) -> None:
        watched.api.faults.append(Fault(rf"{WATCH}.*resourceVersion={watched.api.version}(&|$)", status=504))
        watched.api.cut()
        watched.api.put("pods", "prod", "some-other-change")
        await watched.api.until(lambda: watched.api.counted(LIST) == 2)
        await still_works(watched)

    run(scenario, tmp_path, before=a_few)


def test_objects_deleted_while_unwatched_are_forgotten_and_wake(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        watched.api.remove("inferencemodels", "prod", "b")
        watched.api.forget_history()
        watched.woken.clear()
        watched.api.cut()
        await watched.api.until(watched.knows)
        assert watched.woken == [Key(Kind.INFERENCE_MODEL, "prod", "b")], "what is as before wakes nobody"

    async def with_gap(watched: Watched) -> None:
        gap = Fault(WATCH, drop=True)
        watched.api.faults.append(gap)
        watched.api.cut()
        await watched.api.until(lambda: watched.api.counted(WATCH) > 2)
        watched.api.faults.remove(gap)
        await scenario(watched)

    run(with_gap, tmp_path, before=a_few)


def test_watches_resume_after_an_outage_of_the_api_server(tmp_path: Path):
    """O-01."""

    async def scenario(watched: Watched) -> None:
        await watched.api.stop()
        watched.api.put("inferencemodels", "prod", "meanwhile", spec={})
        await asyncio.sleep(1)
        await watched.api.start()
        await still_works(watched)

    run(scenario, tmp_path, before=a_few)


def test_a_renewed_token_is_read_from_its_file(tmp_path: Path):
    """O-10."""

    async def scenario(watched: Watched) -> None:
        watched.api.tokens = {"better"}
        watched.api.cut()
        before = len(watched.api.requests)
        await watched.api.until(lambda: len(watched.api.requests) > before + 20)
        (watched.kubeconfig.parent / "token").write_text("better")
        await still_works(watched)

    run(scenario, tmp_path, before=a_few)


def test_a_watch_that_ends_at_once_is_not_restarted_at_once(tmp_path: Path):
    """O-03."""

    async def scenario(watched: Watched) -> None:
        watched.api.faults.append(Fault(WATCH, lines=()))
        watched.api.cut()
        await watched.api.until(lambda: watched.api.counted(WATCH) > 8)
        begun, asked = time.monotonic(), watched.api.counted(WATCH)
        await asyncio.sleep(1.5)
        per_second = (watched.api.counted(WATCH) - asked) / (time.monotonic() - begun)
        assert per_second < 4, "0.5 s, and a fifth less by chance, lie between two"

    run(scenario, tmp_path, before=a_few, apart_s=0.5)


def test_a_watch_that_is_cut_off_repeatedly_makes_progress(tmp_path: Path):
    """O-03."""

    async def scenario(watched: Watched) -> None:
        for n in range(20):
            watched.api.put("inferencemodels", "prod", f"news-{n}", spec={})
            await watched.api.until(watched.knows)
            watched.api.cut()
        await still_works(watched)
        assert watched.api.counted(LIST) == 1

    run(scenario, tmp_path, before=a_few)


HALF_DEAD = {
    "never a word": Fault(WATCH, silent=True),
    "a bookmark, and then no word": Fault(
        WATCH, lines=(b'{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"1"}}}\n',), silent=True
    ),
    "no answer": Fault(WATCH, mute=True),
}


@pytest.mark.parametrize("fault", HALF_DEAD.values(), ids=HALF_DEAD.keys())
def test_a_silent_watch_is_restarted(tmp_path: Path, fault: Fault):
    """O-07: within 75 s, and not before the API server's bookmarks come, one each minute."""
    assert 60 < kopf_settings().watching.inactivity_timeout <= 75

    async def scenario(watched: Watched) -> None:
        half_dead = replace(fault, times=1)
        watched.api.faults.append(half_dead)
        watched.api.cut()
        await watched.api.until(lambda: half_dead.times == 0)
        await still_works(watched)

    run(scenario, tmp_path, before=a_few, silence_s=1.0)


def test_kopf_is_restarted_when_it_ends(tmp_path: Path):
    """kopf ends because it cannot read an answer of discovery."""

    def odd_discovery(api: KubeApi) -> None:
        a_few(api)
        api.faults.append(Fault("GET /apis$", body={"groups": [{"name": "apps", "versions": [{}]}]}, times=1))

    async def scenario(watched: Watched) -> None:
        assert watched.api.counted("GET /apis$") == 2
        await still_works(watched)

    run(scenario, tmp_path, before=odd_discovery)


def test_bookmarks_are_signs_of_life(tmp_path: Path):
    async def scenario(watched: Watched) -> None:
        begun = time.monotonic()
        await watched.api.until(
            lambda: max(watched.watch_health.ages(time.monotonic()).values()) < time.monotonic() - begun
        )

    run(scenario, tmp_path)


def test_attempts_are_signs_of_life(tmp_path: Path):
    """O-02: an API server that is away is no reason to restart."""

    async def scenario(watched: Watched) -> None:
        await watched.api.stop()
        begun = time.monotonic()
        assert watched.watch_health.stuck(begun + STUCK_S + 1)
        await watched.api.until(lambda: not watched.watch_health.stuck(begun + STUCK_S))

    run(scenario, tmp_path)


HOSTILE = {
    **{f"{levels} levels": {"podTemplate": {"spec": {"x": deep(levels)}}} for levels in (100, 500, 2_000, 9_000)},
    "1.4 MB": {"model": {"uri": "s3://models/m"}, "podTemplate": {"spec": {"x": "x" * 1_400_000}}},
    "steps that are none": {"steps": ["a", {"modelRef": 1}]},
}


@pytest.mark.parametrize("spec", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_object_delays_no_other_object(tmp_path: Path, spec: dict[str, object]):
    def hostile(api: KubeApi) -> None:
        a_few(api)
        for plural in ("inferencemodels", "modelensembles"):
            api.put(plural, "prod", "hostile", spec=spec)

    async def scenario(watched: Watched) -> None:
        assert watched.knows()
        assert watched.knows("modelensembles", "ModelEnsemble")
        hostile(watched.api)
        await watched.api.until(watched.knows)
        await still_works(watched)
        entry = watched.cache.find("InferenceModel", "prod", "hostile")
        assert entry is not None
        assert len(entry.json) < 2000
        assert parse(Kind.INFERENCE_MODEL, entry.object, Platform("server:1", "gpu:1"))[0] is None
        assert (watched.api.counted(LIST), watched.api.counted("GET /apis$")) == (1, 1), "nothing was begun again"

    run(scenario, tmp_path, before=hostile)


def test_an_unreadable_item_is_ignored(tmp_path: Path):
    def odd(api: KubeApi) -> None:
        a_few(api)
        api.put("inferencemodels", "prod", "odd", spec={"model": {"uri": "\ud800"}})

    async def scenario(watched: Watched) -> None:
        assert watched.knows_of("prod", "c")
        assert not watched.knows_of("prod", "odd")

    run(scenario, tmp_path, before=odd)
