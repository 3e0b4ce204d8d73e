"""A cache that the pods of a machine share. A pod is a directory of models here."""

import fcntl
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shell.fetch.conftest import Store
from support.stores import Asked, Fault, Fetched, numbered_bytes, tree

MB = 1 << 20


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def pod(
    store: Store, number: int, cache: Path, path: str = "digits/", *, limit: int | None = None, **fields: Any
) -> Fetched:
    plan_cache = {"path": str(cache), "size_limit_bytes": limit}
    return store.fetch(path, process=f"pod{number}", into=f"pod{number}", cache=plan_cache, **fields)


def entries(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "entries").iterdir())


def test_the_second_pod_fetches_nothing(store: Store, cache: Path) -> None:
    store.put({"digits/config.pbtxt": b"", "digits/1/model.onnx": b"x"})

    first, second = pod(store, 1, cache), pod(store, 2, cache, config={"max_batch_size": 2})

    assert (first.code, second.code, store.gets("digits/1/model.onnx")) == (0, 0, 1)
    assert [first.models[0]["cached"], second.models[0]["cached"]] == [False, True]
    # One content, with the configuration of each plan.
    assert tree(store.folder / "pod1") == {"digits/config.pbtxt": b"", "digits/1/model.onnx": b"x"}
    assert tree(store.folder / "pod2")["digits/config.pbtxt"] == b"max_batch_size: 2\n"


def test_pods_at_once_fetch_once(large_store: Store, cache: Path) -> None:
    store, content = large_store, numbered_bytes(20 * MB)
    store.put({"digits/1/model.onnx": content})
    store.proxy.rule = lambda asked: Fault(bytes_per_sec=8 * MB) if asked.start is not None else None

    pods = [store.fetching(process=f"pod{i}", into=f"pod{i}", cache={"path": str(cache)}) for i in range(3)]
    running = [each.start() for each in pods]
    ended = [each.end(process) for each, process in zip(pods, running, strict=True)]

    assert [each.code for each in ended] == [0, 0, 0]
    assert store.sent("digits/1/model.onnx") == 20 * MB
    assert sorted(each.models[0]["cached"] for each in ended) == [False, True, True]
    assert all(tree(store.folder / f"pod{i}") == {"digits/1/model.onnx": content} for i in range(3))
    assert sum("another process fetches" in each.log for each in ended) == 2


def test_waiting_fetch_resumes_the_work_of_a_killed_one(large_store: Store, cache: Path) -> None:
    store, content = large_store, numbered_bytes(40 * MB)
    store.put({"digits/1/model.onnx": content})
    slow = True

    def rule(asked: Asked) -> Fault | None:
        return Fault(bytes_per_sec=MB) if slow and (asked.start or 0) >= 24 * MB else None

    store.proxy.rule = rule
    first, second = (store.fetching(process=f"pod{i}", into=f"pod{i}", cache={"path": str(cache)}) for i in range(2))
    killed = first.start()
    while store.sent("digits/1/model.onnx") < 26 * MB:
        time.sleep(0.02)
    waiting = second.start()
    while "another process fetches" not in (store.folder / "pod1.log").read_text():
        time.sleep(0.02)
    slow = False
    before = store.gets("digits/1/model.onnx")
    killed.send_signal(signal.SIGKILL)
    assert first.end(killed).code == -signal.SIGKILL

    fetched = second.end(waiting)

    assert (fetched.code, tree(store.folder / "pod1")) == (0, {"digits/1/model.onnx": content})
    again = store.proxy.gets(f"/{store.bucket}/digits/1/model.onnx")[before:]
    assert sorted(asked.start for asked in again) == [24 * MB, 32 * MB]


def test_wait_for_another_fetch_may_take_longer_than_the_timeout(store: Store, cache: Path) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    assert pod(store, 1, cache).code == 0
    (name,) = entries(cache)
    waiting = store.fetching(process="pod2", into="pod2", cache={"path": str(cache)}, timeout=1)
    with (cache / "locks" / name).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = waiting.start()
        waiting.wait_for("waiting for it", process)
        time.sleep(2)  # longer than the timeout
    fetched = waiting.end(process)

    assert (fetched.code, fetched.models[0]["cached"]) == (0, True), fetched.log


def test_least_recently_used_entry_is_evicted_for_a_new_one(store: Store, cache: Path) -> None:
    store.put({f"{name}/1/model.onnx": name.encode() * MB for name in "abc"})
    names = {}
    for number, name in enumerate("aba"):
        # Pods that were deleted.
        shutil.rmtree(store.folder / f"pod{number}", ignore_errors=True)
        assert pod(store, number, cache, f"{name}/", name=name, limit=2 * MB + MB // 2).code == 0
        names[name] = names.get(name) or (set(entries(cache)) - set(names.values())).pop()
        shutil.rmtree(store.folder / f"pod{number}")

    assert pod(store, 3, cache, "c/", name="c", limit=2 * MB + MB // 2).code == 0

    assert names["a"] in entries(cache)
    assert names["b"] not in entries(cache)
    assert len(entries(cache)) == 2
    assert sorted(path.name for path in (cache / "locks").iterdir()) == sorted([".all", *entries(cache)])


def test_entry_with_links_from_pods_is_not_evicted(store: Store, cache: Path) -> None:
    store.put({f"{name}/1/model.onnx": name.encode() * MB for name in "ab"})
    assert pod(store, 1, cache, "a/", name="a", limit=MB + 1).code == 0

    fetched = pod(store, 2, cache, "b/", name="b", limit=MB + 1)

    assert fetched.code == 13
    assert fetched.report == f"model 'b' has {MB} bytes; {MB} of the cache's {MB + 1} are in use by others"
    assert tree(store.folder / "pod1") == {"a/1/model.onnx": b"a" * MB}
    shutil.rmtree(store.folder / "pod1")
    assert pod(store, 2, cache, "b/", name="b", limit=MB + 1).code == 0


def test_entry_in_use_is_not_evicted(store: Store, cache: Path) -> None:
    store.put({f"{name}/1/model.onnx": name.encode() * MB for name in "ab"})
    assert pod(store, 1, cache, "a/", name="a").code == 0
    shutil.rmtree(store.folder / "pod1")
    (name,) = entries(cache)
    with (cache / "locks" / name).open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert pod(store, 2, cache, "b/", name="b", limit=MB + 1).code == 13
    assert entries(cache) == [name]


def test_a_model_that_could_never_fit_is_refused_before_it_is_fetched(store: Store, cache: Path) -> None:
    store.put({"digits/1/model.onnx": b"x" * MB})

    fetched = pod(store, 1, cache, limit=MB - 1)

    assert (fetched.code, fetched.report) == (13, f"model 'digits' has {MB} bytes, and the cache's limit is {MB - 1}")
    assert store.gets("digits/1/model.onnx") == 0


def test_digest_allows_use_of_the_cache_while_the_store_is_down(store: Store, cache: Path) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    digest = pod(store, 1, cache).models[0]["digest"]
    assert pod(store, 1, cache, digest=digest).code == 0
    store.proxy.rule = lambda _: Fault(503)

    fetched = pod(store, 2, cache, digest=digest, timeout=2)

    assert (fetched.code, tree(store.folder / "pod2")) == (0, {"digits/1/model.onnx": b"x"})


def test_modified_cache_content_is_not_used_for_a_digest(store: Store, cache: Path) -> None:
    store.put({"digits/1/model.onnx": b"x"})
    digest = pod(store, 1, cache).models[0]["digest"]
    assert pod(store, 1, cache, digest=digest).code == 0
    for file in (cache / "entries").rglob("model.onnx"):
        file.chmod(0o644)
        file.write_bytes(b"y")

    fetched = pod(store, 2, cache, digest=digest)

    assert (fetched.code, tree(store.folder / "pod2")) == (0, {"digits/1/model.onnx": b"x"})
    assert "its files in the cache were changed" in fetched.log


def test_pod_on_another_file_system_gets_copies(store: Store) -> None:
    cache = Path("/dev/shm") / f"halimede-{store.bucket}"
    if os.stat("/dev/shm").st_dev == os.stat(store.folder).st_dev:
        pytest.skip("there is one file system here")
    try:
        store.put({"digits/1/model.onnx": b"x" * MB})
        assert pod(store, 1, cache).code == 0
        shutil.rmtree(cache)
    finally:
        shutil.rmtree(cache, ignore_errors=True)

    assert tree(store.folder / "pod1") == {"digits/1/model.onnx": b"x" * MB}


def test_kill_at_any_point_leaves_no_partial_model(store: Store, cache: Path) -> None:
    content = {f"digits/1/{name}": os.urandom(MB) for name in ("model.onnx", *"abcdef")}
    store.put(content)
    store.proxy.rule = lambda asked: Fault(bytes_per_sec=8 * MB) if asked.start is not None else None
    whole = {**content}
    seen = []
    for delay in range(12):
        shutil.rmtree(store.models, ignore_errors=True)
        shutil.rmtree(cache, ignore_errors=True)
        fetching = store.fetching(cache={"path": str(cache)})
        process = fetching.start()
        asked = len(store.proxy.asked)
        while len(store.proxy.asked) - asked < delay and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        fetching.end(process)
        seen.append(tree(store.models) if store.models.exists() else {})

    assert all(each in ({}, whole) for each in seen)
    assert pod(store, 1, cache).code == 0
    assert tree(store.folder / "pod1") == whole
