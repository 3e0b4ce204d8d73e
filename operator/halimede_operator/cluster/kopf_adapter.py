"""Adapts kopf to the API server and to the cache. Runs in kopf's thread.

kopf cannot do these things by itself or by its settings. Each has a test in tests/shell/operator/test_kopf_adapter.py:

- kopf decodes a page as a whole. An object that is nested thousands of levels deep would end every list
  (RecursionError), and large objects would take GB of memory: test_a_hostile_object_delays_no_other_object,
  test_large_items_of_a_page_are_in_memory_one_at_a_time.
- The number of objects per page is fixed in kopf: test_pages_of_large_objects_have_few.
- kopf has a queue and a task for each object that it lists or that changes, and keeps large events until their handlers
  have run. So objects go to the cache directly: test_an_event_is_a_bookmark_for_kopf,
  test_kopf_gets_lists_without_items.
- kopf does not report objects that were deleted while nothing watched:
  test_objects_deleted_while_unwatched_are_forgotten_and_wake.
- kopf restarts a watch at once, even one that ends at once: test_a_watch_that_ends_at_once_is_not_restarted_at_once.
- kopf does not report bookmarks and attempts: test_bookmarks_are_signs_of_life, test_attempts_are_signs_of_life.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

import aiohttp
import orjson

from halimede_operator.api_server.connection import Connection
from halimede_operator.api_server.decoding import decode_list, shallow
from halimede_operator.cluster.cache import Cache, entry_of
from halimede_operator.cluster.watch_health import Collection, WatchHealth, collection_of
from halimede_operator.core.reading import text_at
from halimede_operator.core.spec.types import Key

log = logging.getLogger(__name__)

PAGE_BYTES = 4 << 20
"""How long a page of a list should be. While it is decoded it takes five times the memory."""
FIRST_PAGE = 10
"""Objects of the first page of a list, before their size is known."""


class CacheFeed:
    """Puts what kopf reads into the cache and wakes the affected keys.

    Methods are called in kopf's thread; the cache is changed in the event loop that made this object.
    """

    def __init__(self, cache: Cache, watch_health: WatchHealth, wake: Callable[[Key], None]) -> None:
        self._cache, self.watch_health, self._wake = cache, watch_health, wake
        self._loop = asyncio.get_running_loop()
        self._changes: list[Callable[[], Iterable[Key]]] = []
        self._listed: dict[Collection, set[str]] = {}
        """Uids of the objects in the pages of a list so far."""
        self.complete = asyncio.Event()
        """Set when the cache has all objects of the first list of every watch."""

    @property
    def unavailable(self) -> Mapping[str, str]:
        """Optional kinds that are not watched, and why."""
        return self._cache.unavailable

    def start(self, watches: Iterable[Collection], unavailable: Mapping[str, str]) -> None:
        """kopf is about to list these collections. Called in the cache's loop, while kopf does not run.

        unavailable: the kinds that cannot be watched, and why.
        """
        self.watch_health.expect(watches, time.monotonic())
        self._listed.clear()
        for key in self._cache.set_unavailable(unavailable):
            self._wake(key)

    def page(self, where: Collection, data: bytes, is_first: bool) -> dict[str, Any]:
        """Read a page of a list. Return it as JSON, whose items are their uids. Raises ValueError if it is not JSON.

        data: its text, of any depth.
        """
        self.watch_health.record_answer(where, time.monotonic())
        page = decode_list(data, lambda item: self._learn(where, item, listed=True))
        if is_first:
            self._listed[where] = set()
        self._listed[where] |= set(page["items"])
        if not page["metadata"].get("continue"):
            version, uids = int(page["metadata"]["resourceVersion"]), frozenset(self._listed.pop(where))
            self._collect(lambda: self._cache.listed(where.resource, where.namespace, version, uids))
            self.watch_health.listed(where)
            if not self.watch_health.unlisted():
                self._collect(self._completed)
        return page

    def line(self, where: Collection, line: bytes) -> bytes:
        """The line of a watch. Return the line for kopf: of an event that was put into the cache, its version alone."""
        try:
            event = orjson.loads(line)
            kind, metadata = event["type"], event["object"]["metadata"]
            uid, version = metadata["uid"], int(metadata["resourceVersion"])
            if kind == "DELETED":
                self._collect(lambda: self._cache.delete(uid, version))
            elif kind not in ("ADDED", "MODIFIED"):
                return line
            elif not self._cache.has(uid, version):
                entry = entry_of(where.resource, event["object"])
                self._collect(lambda: self._cache.learn(entry))
        except (KeyError, TypeError, AttributeError, ValueError):
            # An error of the API server, or nothing that the cache could keep. kopf knows what to do.
            return line
        return orjson.dumps({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}})

    def event(self, where: Collection, value: dict[str, Any]) -> None:
        """kopf reports an event that `line` left to it."""
        self._learn(where, value)

    def _learn(self, where: Collection, value: Any, *, listed: bool = False) -> str:  # Any: JSON
        """Put an object into the cache, or ignore it if it cannot be read. Return its uid, "" if it has none."""
        try:
            entry = entry_of(where.resource, value)
            self._collect(lambda: self._cache.learn(entry, listed=listed))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            log.warning("one of the %s cannot be read and is ignored: %r", where, error)
        return text_at(value, "metadata", "uid")

    def _completed(self) -> tuple[Key, ...]:
        self.complete.set()
        return ()

    def _collect(self, change: Callable[[], Iterable[Key]]) -> None:
        if not self._changes:
            # Changes are collected for 5 ms, because each wake-up of the other loop costs this thread some 5 ms.
            asyncio.get_running_loop().call_later(0.005, self.hand_over)
        self._changes.append(change)

    def hand_over(self) -> None:
        """Pass the collected changes to the cache's loop. Must also be called when kopf's loop ends."""
        changes, self._changes = self._changes, []
        self._loop.call_soon_threadsafe(lambda: [self._wake(key) for change in changes for key in change()])


def watch_session(connection: Connection, feed: CacheFeed, apart_s: float) -> aiohttp.ClientSession:
    """The HTTP session for kopf: sends the current token, decodes safely, and reports to the feed.

    apart_s: shortest time between the starts of two watches of one collection.
    """
    begun: dict[Collection, float] = {}
    most: dict[Collection, int] = {}
    """Objects of the next page."""

    async def ask(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        request.headers.update(await connection.headers())
        if where := collection_of(request.url.path):
            if "watch" in request.url.query:
                await asyncio.sleep(begun.get(where, 0.0) + apart_s - time.monotonic())
                begun[where] = time.monotonic()
            elif (limit := request.url.query.get("limit")) is not None:
                limit = str(min(int(limit), most.get(where, FIRST_PAGE)))
                request.url = request.url.update_query(limit=limit)
            feed.watch_health.record_request(where, time.monotonic())
        return await send(request)

    class Response(aiohttp.ClientResponse):
        async def start(self, connection: Any) -> aiohttp.ClientResponse:  # Any: aiohttp does not export its type
            await super().start(connection)
            if self.status == 200 and "watch" in self.url.query and (where := collection_of(self.url.path)):
                self.content = Lines(self.content, where, feed)  # type: ignore[assignment]  # has all its methods
            return self

        async def json(self, **options: Any) -> Any:  # Any: JSON
            where = collection_of(self.url.path)
            if self.status != 200 or where is None:
                return await super().json(**options)
            data = await self.read()
            page = feed.page(where, data, is_first="continue" not in self.url.query)
            if page["items"]:
                most[where] = max(1, PAGE_BYTES * len(page["items"]) // len(data))
            return {**page, "items": []}

    connector = aiohttp.TCPConnector(limit=0, ssl=connection.ssl_context())
    return aiohttp.ClientSession(connector=connector, response_class=Response, middlewares=(ask,))


class Lines:
    """The body of a watch as complete lines with bounded depth. A line that a broken connection cut off is dropped.

    Events go to the feed; kopf gets bookmarks in their place.
    """

    def __init__(self, content: aiohttp.StreamReader, where: Collection, feed: CacheFeed) -> None:
        self._content, self._where, self._feed = content, where, feed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        rest = b""
        async for data in self._content.iter_any():
            self._feed.watch_health.record_answer(self._where, time.monotonic())
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                yield self._feed.line(self._where, shallow(line)) + b"\n"
