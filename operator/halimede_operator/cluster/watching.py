"""The HTTP session that kopf watches with.

kopf ends as a whole when a watch meets what it has no rule for: 5xx or 403 for 54 seconds, a 401 that stays, a watch's
ERROR other than 410, a line that is no JSON, a Retry-After that is a date. It also keeps bookmarks and the ends of
lists to itself, so that nobody can tell a dead watch from a quiet one, nor that an object vanished while no watch ran.
kopf lets its user bring the session; this one asks on, with growing pauses, until there is an answer that kopf
understands, and tells what it saw on the way:

- lists go straight to the cache, whole, so that what is not in them can be forgotten; kopf sees empty ones, with the
  version to watch from;
- a stream that turns bad ends like a connection that broke, and kopf watches on from the last version; after
  `RELIST_AFTER` failures in a row the version itself is doubted ("410 Gone"), and kopf lists again;
- nothing but GET goes through: kopf cannot write.

Runs in the loop of kopf's thread.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import parse_qs, urlsplit

import aiohttp
import orjson

from halimede_operator.cluster.cache import Entry, entry_of
from halimede_operator.cluster.client import error_of
from halimede_operator.cluster.connection import Connection
from halimede_operator.cluster.decoding import decode, decode_list
from halimede_operator.cluster.kinds import Resource, resource_of
from halimede_operator.cluster.pulse import Pulse, Where
from halimede_operator.core.platform import FIELD_MANAGER

log = logging.getLogger(__name__)

GONE = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Gone","message":"listing again"}}\n'
RELIST_AFTER = 5
SHORT_LIFE_S = 1.0
"""A stream that ends sooner, without a word, was no success."""


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a list."""

    entries: list[Entry]
    uids: frozenset[str] | None
    """Of all pages, with the last page; None before."""
    version: int


class Feed(Protocol):
    """Told in the loop of kopf's thread."""

    def listed(self, resource: Resource, namespace: str | None, page: Listed) -> None: ...


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait: after failures in a row, and for a word of a watch."""

    first_s: float = 0.5
    longest_s: float = 30.0
    silence_s: float = 70.0
    """A watch that says nothing for so long is asked for anew: the API server sends a bookmark each minute."""

    def wait_s(self, failures: int) -> float:
        return float(min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30)))


class WatchSession:
    """In the place of an `aiohttp.ClientSession`, with what kopf uses of one."""

    def __init__(
        self,
        connection: Connection,
        feed: Feed,
        pulse: Pulse,
        clock: Callable[[], float],
        patience: Patience = Patience(),
    ) -> None:
        self.headers = {"User-Agent": FIELD_MANAGER}
        self.pulse = pulse
        self.clock = clock
        self._connection = connection
        self._feed = feed
        self._patience = patience
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=connection.ssl_context()))
        self._failures: dict[str, int] = {}
        """By what was asked for: a list and the watch after it fail on their own."""
        self._pages: dict[Where, set[str]] = {}

    @property
    def closed(self) -> bool:
        return self._session.closed

    async def close(self) -> None:
        await self._session.close()

    async def request(
        self,
        *,
        method: str,
        url: str,
        json: object = None,
        headers: dict[str, str] | None = None,
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - kopf names it
    ) -> "Stream | Answer | aiohttp.ClientResponse":
        if method.lower() != "get" or json is not None or headers:
            raise PermissionError(f"kopf is here to watch, not to {method} {url}")
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        collection = resource_of(parts.path)
        where = Where(*collection) if collection is not None else None
        is_watch = query.get("watch") == "true"
        what = f"{'watch' if is_watch else 'list'} {where}" if where is not None else f"read {parts.path}"
        wait_s = self._pause_s(what)
        while True:
            await asyncio.sleep(wait_s)
            if where is not None:
                self.pulse.tried(where, self.clock())
            try:
                auth = {**self.headers, **await self._connection.headers()}
                response = await self._session.get(url, headers=auth, timeout=timeout)
                if response.status == 200 and is_watch and where is not None:
                    return Stream(self, response, what, where)
                if response.status == 404 and where is None:
                    # Of discovery: kopf knows what to make of it.
                    return response
                data = await response.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                wait_s = self.failed(what, str(error) or type(error).__name__)
                continue
            if response.status == 200:
                try:
                    answer = Answer(
                        decode(data) if where is None else self._listed(where, data, more="continue" in query)
                    )
                except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                    wait_s = self.failed(what, f"malformed answer: {error!r}")
                    continue
                self.succeeded(what)
                return answer
            problem = error_of("GET", parts.path, response.status, response.headers, data)
            wait_s = max(self.failed(what, str(problem)), problem.retry_after_s or 0.0)
            if response.status == 401:
                await self._renew_credentials()
            if is_watch and (response.status == 410 or self._failures[what] % RELIST_AFTER == 0):
                return Stream(self, None, what, where)
            if response.status == 410:
                # The rest of a list that took too long to read: kopf begins again after this error.
                raise aiohttp.ClientPayloadError(str(problem))

    def succeeded(self, what: str) -> None:
        if self._failures.pop(what, 0):
            log.info("works again: %s", what)

    def failed(self, what: str, why: str) -> float:
        """Returns how long to wait."""
        failures = self._failures[what] = self._failures.get(what, 0) + 1
        log.log(
            logging.WARNING if failures in (1, 10) or failures % 100 == 0 else logging.DEBUG, "cannot %s: %s", what, why
        )
        return self._pause_s(what)

    def _pause_s(self, what: str) -> float:
        failures = self._failures.get(what, 0)
        return self._patience.wait_s(failures) * random.uniform(0.8, 1.2) if failures else 0.0  # noqa: S311 - no secret

    async def _renew_credentials(self) -> None:
        try:
            await self._connection.refresh()
        except Exception as error:  # noqa: BLE001 - a kubeconfig's loader raises what it likes; it is tried again
            log.warning("credentials cannot be read: %s", error)

    def _listed(self, where: Where, data: bytes, *, more: bool) -> dict[str, Any]:
        """Hands a page on; returns what kopf is to know of it. more: it is not the first page."""
        head, items = decode_list(data)
        metadata = head["metadata"]
        entries = [entry for item in items if (entry := _entry(where, item)) is not None]
        seen = self._pages.setdefault(where, set()) if more else set()
        seen.update(entry.uid for entry in entries)
        self._pages[where] = seen
        is_last = not metadata.get("continue")
        page = Listed(entries, frozenset(seen) if is_last else None, int(metadata["resourceVersion"]))
        self._feed.listed(where.resource, where.namespace, page)
        self.pulse.told(where, self.clock())
        if is_last:
            del self._pages[where]
        return {"metadata": metadata, "items": []}


def _entry(where: Where, item: bytes) -> Entry | None:
    """None for what cannot be read: the others are not to wait for it."""
    try:
        return entry_of(where.resource, decode(item))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        log.warning("one of the %s cannot be read and is left alone: %r, %s", where, error, item[:256])
        return None


class Answer:
    """A whole JSON answer, in the place of an `aiohttp.ClientResponse`."""

    status = 200

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    async def json(self) -> dict[str, Any]:
        return self._value

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class Stream:
    """A watch's answer, in the place of an `aiohttp.ClientResponse`: whole lines that kopf understands, or the end."""

    status = 200

    def __init__(
        self, session: WatchSession, response: aiohttp.ClientResponse | None, what: str, where: Where | None
    ) -> None:
        """response: None for one that says that the version is too old."""
        self._session = session
        self._response = response
        self._what = what
        self._where = where

    @property
    def content(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()

    async def iter_chunked(self, _size: int) -> AsyncIterator[bytes]:
        if self._response is None or self._where is None:
            yield GONE
            return
        begun = self._session.clock()
        heard = False
        rest = b""
        async for data in self._response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                try:
                    kind, told = read_event(self._where.resource, line)
                except ValueError as error:
                    self._session.failed(self._what, str(error))
                    raise aiohttp.ClientPayloadError(str(error)) from error
                if kind == "ERROR":
                    self._session.failed(self._what, "the version is too old")
                else:
                    heard = True
                    self._session.pulse.told(self._where, self._session.clock())
                    self._session.succeeded(self._what)
                yield told + b"\n"
        # What is left without an end of line was cut off.
        if not heard and self._session.clock() - begun < SHORT_LIFE_S:
            self._session.failed(self._what, "the stream ended at once")


def read_event(resource: Resource, line: bytes) -> tuple[str, bytes]:
    """The type of an event that kopf may see, ERROR for 410 alone, and the event as it may: as much of the object as is
    kept. Raises ValueError for any other line."""
    try:
        event = decode(line)
        kind, value = event["type"], event["object"]
        if kind == "ERROR" and value["code"] != 410:
            raise ValueError(f"{value['code']} {value.get('message')}")
        if kind in ("ERROR", "BOOKMARK"):
            return kind, line
        entry = entry_of(resource, value)
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"malformed event: {error!r}") from error
    return str(kind), b'{"type":%s,"object":%s}' % (orjson.dumps(kind), entry.json)
