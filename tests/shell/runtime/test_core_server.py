"""The façade's answers to internal errors."""

import asyncio
from pathlib import Path

from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.serving_core import make_core
from halimede.settings import Settings
from support.models import add_identity


def test_an_internal_fault_in_the_request_check_is_answered(tmp_path: Path) -> None:
    add_identity(tmp_path, "text", datatype="BYTES", dims="-1")
    count = 70_000  # more elements, and not of one length, than are walked on the event loop
    data = memoryview(b"\1\0\0\0a" * (count - 1) + b"\0\0\0\0")

    async def scenario() -> InferenceResponse:
        core = make_core(Settings(model_repository=(tmp_path,)))
        assert await core.start() == []
        answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        request = InferenceRequest("text", inputs=[Tensor("IN", DataType.BYTES, (1, count), data)])
        core.server.infer(request, answer.set_result)
        data.release()  # It is walked in the next turn of the loop, on a thread.
        async with asyncio.timeout(10):
            answered = await answer
            await core.close()
        return answered

    error = asyncio.run(scenario()).error
    assert error == InferenceError(ErrorCode.INTERNAL, "request for model 'text' could not be checked")
