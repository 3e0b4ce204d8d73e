"""The lines of a watch: what goes to the cache, and what kopf gets."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from halimede_operator.cluster.cache import Cache
from halimede_operator.cluster.kinds import MODELS
from halimede_operator.cluster.kopf_adapter import CacheFeed
from halimede_operator.cluster.watch_health import Collection, WatchHealth
from halimede_operator.core.spec.types import Key

LONG = "x" * 100_000
IN_MODELS = Collection(MODELS, None)


def event(kind: str = "MODIFIED", version: int = 7, **rest: Any) -> bytes:
    metadata = {"namespace": "prod", "name": "m", "uid": "u", "resourceVersion": str(version)}
    metadata |= rest.pop("metadata", {})
    return json.dumps({"type": kind, "object": {"metadata": metadata, **rest}}).encode()


def with_feed(story: Callable[[CacheFeed, Cache, list[Key]], None], *then: Callable[[Cache, list[Key]], None]) -> None:
    async def whole() -> None:
        cache, woken = Cache(), list[Key]()
        feed = CacheFeed(cache, WatchHealth([], 0.0), woken.append)
        story(feed, cache, woken)
        feed.hand_over()
        await asyncio.sleep(0)
        for look in then:
            look(cache, woken)

    asyncio.run(whole())


def test_an_event_is_a_bookmark_for_kopf() -> None:
    def story(feed: CacheFeed, _cache: Cache, _woken: list[Key]) -> None:
        line = feed.line(IN_MODELS, event("ADDED", spec={"env": [{"name": "LONG", "value": LONG}]}))
        assert json.loads(line) == {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}

    def look(cache: Cache, woken: list[Key]) -> None:
        entry = cache.find("InferenceModel", "prod", "m")
        assert entry is not None
        assert len(entry.json) < 1000
        assert [key.name for key in woken] == ["m"]

    with_feed(story, look)


def test_the_event_of_our_own_write_is_known_and_wakes_nobody() -> None:
    def story(feed: CacheFeed, cache: Cache, _woken: list[Key]) -> None:
        cache.put(MODELS, json.loads(event())["object"])
        assert b"BOOKMARK" in feed.line(IN_MODELS, event())

    def look(_cache: Cache, woken: list[Key]) -> None:
        assert woken == []

    with_feed(story, look)


def test_a_deleted_object_is_forgotten() -> None:
    def story(feed: CacheFeed, cache: Cache, _woken: list[Key]) -> None:
        cache.put(MODELS, json.loads(event())["object"])
        assert b"BOOKMARK" in feed.line(IN_MODELS, event("DELETED", 8))

    def look(cache: Cache, woken: list[Key]) -> None:
        assert len(cache) == 0
        assert [key.name for key in woken] == ["m"]

    with_feed(story, look)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b'{"type": "ERROR", "object": {"kind": "Status", "code": 410}}',
        b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "9"}}}',
        b'{"type": "ADDED", "object": {"metadata": {"uid": "u", "resourceVersion": "9"}}}',
        event("ADDED", metadata={"resourceVersion": "many"}),
    ],
)
def test_what_the_cache_cannot_keep_is_for_kopf(line: bytes) -> None:
    def story(feed: CacheFeed, _cache: Cache, _woken: list[Key]) -> None:
        assert feed.line(IN_MODELS, line) == line

    with_feed(story)


def test_a_page_of_a_list_goes_to_the_cache() -> None:
    def story(feed: CacheFeed, cache: Cache, _woken: list[Key]) -> None:
        cache.put(MODELS, json.loads(event(metadata={"uid": "old", "name": "old"}))["object"])
        items = [json.loads(event())["object"], {"metadata": {"uid": "unreadable"}}, None]
        page = {"metadata": {"resourceVersion": "9"}, "items": items}
        found = feed.page(IN_MODELS, json.dumps(page).encode(), is_first=True)
        assert found == {"metadata": {"resourceVersion": "9"}, "items": ["u", "unreadable", ""]}

    def look(cache: Cache, woken: list[Key]) -> None:
        assert cache.find("InferenceModel", "prod", "m") is not None
        assert cache.find("InferenceModel", "prod", "old") is None, "it is not in the list"
        assert sorted(key.name for key in woken) == ["m", "old"]

    with_feed(story, look)


def test_objects_on_other_pages_of_a_list_stay() -> None:
    def page(feed: CacheFeed, name: str, is_first: bool, **more: str) -> None:
        item = json.loads(event(metadata={"uid": name, "name": name}))["object"]
        text = json.dumps({"metadata": {"resourceVersion": "9", **more}, "items": [item]})
        feed.page(IN_MODELS, text.encode(), is_first)

    def story(feed: CacheFeed, _cache: Cache, _woken: list[Key]) -> None:
        page(feed, "of-a-list-that-broke-off", True, **{"continue": "token"})
        page(feed, "a", True, **{"continue": "token"})
        page(feed, "b", False)

    def look(cache: Cache, _woken: list[Key]) -> None:
        assert [cache.find("InferenceModel", "prod", name) is not None for name in ("a", "b")] == [True, True]
        assert cache.find("InferenceModel", "prod", "of-a-list-that-broke-off") is None

    with_feed(story, look)
