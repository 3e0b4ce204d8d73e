"""The façade's answers to internal errors."""

import asyncio
from pathlib import Path

from halimede.core.inventory import Inventory
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.runtime.core_server import CoreServer
from halimede.runtime.lifecycle import ModelLifecycle
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from halimede.runtime.sampler import make_sampler
from halimede.settings import MetricsConfig, ModelControlMode
from support.models import add_identity


def test_an_internal_fault_in_the_request_check_is_answered(tmp_path: Path) -> None:
    add_identity(tmp_path, "text", datatype="BYTES", dims="-1")
    count = 70_000  # more elements, and not of one length, than are walked on the event loop
    data = memoryview(b"\1\0\0\0a" * (count - 1) + b"\0\0\0\0")

    async def scenario() -> InferenceResponse:
        options = LoadOptions(Inventory(()), {}, autocomplete=True)
        core = CoreServer(
            ModelLifecycle(ModelRepository((tmp_path,)), options, 1),
            make_sampler(1000, Inventory(), cpu=False, gpu=False),
            server_id="test",
            control_mode=ModelControlMode.NONE,
            strict_readiness=True,
            metrics_config=MetricsConfig(),
            dropped_log_lines=lambda: 0,
            inventory=Inventory(),
        )
        assert await core.start(None) == []
        answer: asyncio.Future[InferenceResponse] = asyncio.get_running_loop().create_future()
        core.infer(InferenceRequest("text", inputs=[Tensor("IN", DataType.BYTES, (1, count), data)]), answer.set_result)
        data.release()  # It is walked in the next turn of the loop, on a thread.
        async with asyncio.timeout(10):
            answered = await answer
            await core.close()
        return answered

    error = asyncio.run(scenario()).error
    assert error == InferenceError(ErrorCode.INTERNAL, "request for model 'text' could not be checked")
