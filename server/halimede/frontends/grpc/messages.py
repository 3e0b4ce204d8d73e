"""Open incoming ModelInferRequests: inflate and parse them, large ones on threads and few at a time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Self

from halimede.core.types import ErrorCode, InferenceError
from halimede.core.wire.grpc_inflate import Inflating, is_compressed
from halimede.core.wire.protocol import ModelInferRequest, ProtoMessage, parse

MAX_ON_LOOP_BYTES = 1 << 20
"""Messages of more bytes than this are parsed, and serialized, on a thread."""

MAX_INFLATED_ON_LOOP_BYTES = 256 << 10
"""As MAX_ON_LOOP_BYTES, for the inflated size of a compressed message."""

LARGE_AT_ONCE = 2
"""Large messages parsed or serialized at a time, over all calls: each uses several times its size during that time."""

MAX_INFLATED_BYTES = 256 << 20
"""Maximum inflated size of the compressed messages of all unanswered calls; further ones wait, compressed."""


class MessageTooLarge(InferenceError):
    """A message above `--grpc-max-input-size`, for which gRPC has its own status."""

    def __init__(self, size: int | str, max_bytes: int) -> None:
        super().__init__(
            ErrorCode.INVALID_ARG,
            f"request message size of {size} bytes exceeds the maximum allowed value of {max_bytes} bytes. Use "
            "--grpc-max-input-size to increase the limit.",
        )


@dataclass(slots=True)
class Opened:
    """`held_bytes` count as inflated until they are released; only large compressed messages hold any.

    A small message is a context manager by itself: a generator would cost it 3 us more.
    """

    message: ProtoMessage
    size_bytes: int
    held_bytes: int = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing to do: a small message is not counted."""


class Messages:
    """Reads messages of at most `max_bytes` each, inflated or not."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._small_bytes = min(MAX_ON_LOOP_BYTES, max_bytes)
        self.large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._inflated_bytes = 0
        self._room = asyncio.Event()

    def open(self, raw: bytes) -> AbstractAsyncContextManager[Opened]:
        """Open the message, which must be decoded inside the context, as a large one counts as being parsed there.

        On leaving without an error, the caller must `release` its `held_bytes` once the request is answered.
        MessageTooLarge, or INTERNAL for an invalid message.
        """
        if len(raw) <= self._small_bytes and not is_compressed(raw):
            return Opened(parse(ModelInferRequest, raw), len(raw))
        return self._open(raw)

    @asynccontextmanager
    async def _open(self, raw: bytes) -> AsyncIterator[Opened]:
        if is_compressed(raw):
            inflating = Inflating(raw)
            if not inflating.advance(min(MAX_INFLATED_ON_LOOP_BYTES, self._max_bytes)):
                async with self._inflate(inflating) as opened:
                    yield opened
                return
            raw = bytes(inflating.content)
        if len(raw) > self._max_bytes:
            raise MessageTooLarge(len(raw), self._max_bytes)
        if len(raw) > MAX_ON_LOOP_BYTES:
            async with self.large:
                yield Opened(await asyncio.to_thread(parse, ModelInferRequest, raw), len(raw))
        else:
            yield Opened(parse(ModelInferRequest, raw), len(raw))

    @asynccontextmanager
    async def _inflate(self, inflating: Inflating) -> AsyncIterator[Opened]:
        # Its size is not known yet, so count the maximum. One message is always admitted.
        held = self._max_bytes
        while self._inflated_bytes and self._inflated_bytes + held > MAX_INFLATED_BYTES:
            self._room.clear()
            await self._room.wait()
        self._inflated_bytes += held
        try:
            async with self.large:
                opened = await asyncio.to_thread(self._parse_inflated, inflating)
                self.release(held - opened.held_bytes)
                held = opened.held_bytes
                yield opened
        except BaseException:
            self.release(held)
            raise

    def _parse_inflated(self, inflating: Inflating) -> Opened:
        if not inflating.advance(self._max_bytes):
            inflating.content.clear()
            raise MessageTooLarge(f"more than {self._max_bytes}", self._max_bytes)
        size_bytes = len(inflating.content)
        return Opened(parse(ModelInferRequest, inflating.content), size_bytes, size_bytes)

    def release(self, held_bytes: int) -> None:
        """Release the bytes of a request that is answered."""
        self._inflated_bytes -= held_bytes
        self._room.set()
