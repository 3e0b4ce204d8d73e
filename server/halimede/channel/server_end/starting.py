"""The answer of a process to START."""

import asyncio
from typing import Any

from halimede.channel.frames import ChannelFrame, unexpected
from halimede.channel.json_frames import decode_json, error_from_json
from halimede.channel.server_end.channel import Channel
from halimede.core.restarts import StartFaultError


class StartAnswer:
    """STARTED or FAILED, once. All methods are called on the event loop's thread."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self._answer: asyncio.Future[Any] = loop.create_future()
        channel.handle(ChannelFrame.STARTED, self._on_started)
        channel.handle(ChannelFrame.FAILED, self._on_failed)

    async def wait(self) -> Any:
        """What STARTED says. InferenceError for FAILED, StartFaultError if the machine is the cause; cancelled if the
        process is lost."""
        return await self._answer

    def cancel(self) -> None:
        """The process is lost."""
        self._answer.cancel()

    def _on_started(self, body: memoryview) -> None:
        if self._answer.done():
            raise unexpected(ChannelFrame.STARTED)
        self._answer.set_result(decode_json(body))

    def _on_failed(self, body: memoryview) -> None:
        if self._answer.done():
            raise unexpected(ChannelFrame.FAILED)
        value = decode_json(body)
        error = error_from_json(value)
        if value.get("is_fault_of_machine") is True:
            error = StartFaultError(error.code, error.message)
        self._answer.set_exception(error)
