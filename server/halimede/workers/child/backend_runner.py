"""Hosts a model of any backend in a worker process: what a thread of the server would do, behind the `Runner` contract.

Unlike what hosts python models it needs this package whole, so it runs in forks of the zygote alone.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from halimede.backends.api import Backend, ModelSource
from halimede.backends.discover import find_backend
from halimede.backends.hosting import Answer, Host, HostedRequest, Reply, WorkerSpec
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import read_json
from halimede.core.config.write import to_json
from halimede.core.types import Device, DeviceKind, ErrorCode, InferenceError, InferenceRequest, Placement
from halimede.workers.instance import InstanceRunner, describe


def make_runner(spec: WorkerSpec, host: Host) -> "BackendRunner":
    """Load the model and make its instance. InferenceError with what the backend says."""
    _forward_log(host)
    backend, config, source = _parts(spec)
    device = Device(DeviceKind.GPU, spec.device_id, spec.device_uuid) if spec.device_uuid else None
    placement = Placement(spec.instance, spec.ordinal, spec.kind, device)
    try:
        model = backend.load(config, source)
        instance = model.create_instance(placement)
    except InferenceError:
        raise
    except BaseException as error:
        logging.getLogger(__name__).exception("instance '%s' did not start", spec.instance)
        raise InferenceError(ErrorCode.INTERNAL, describe(error)) from error

    def close() -> None:
        instance.close()
        model.close()

    return BackendRunner(InstanceRunner(spec.instance, config, instance), close, host)


def complete_config(spec: WorkerSpec, host: Host) -> Any:
    """The configuration as JSON, with what the model file says filled in. InferenceError."""
    _forward_log(host)
    backend, config, source = _parts(spec)
    try:
        return orjson.loads(to_json(backend.autocomplete(config, source)))
    except InferenceError:
        raise
    except BaseException as error:
        logging.getLogger(__name__).exception("model '%s': auto-complete failed", spec.model)
        raise InferenceError(ErrorCode.INTERNAL, describe(error)) from error


def _parts(spec: WorkerSpec) -> tuple[Backend, ModelConfig, ModelSource]:
    config = read_json(spec.config_json).config
    source = ModelSource(spec.model, spec.version, Path(spec.repository), Path(spec.artifact), dict(spec.options))
    return find_backend(spec.backend), config, source


class BackendRunner:
    """A `Runner` over one instance of a backend."""

    is_async = False
    answers_is_ready = False

    def __init__(self, runner: InstanceRunner, close: Any, host: Host) -> None:
        self._runner = runner
        self._close = close
        self._host = host

    def execute(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        ran = self._runner.run([_Item(each.request, each.rows, each, self._host) for each in requests])
        return [Answer(reply) if isinstance(reply, list) else reply for reply in ran.replies]

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[Reply]:
        raise NotImplementedError("backends execute on the main thread")

    async def is_ready(self) -> bool:
        return True

    def close(self) -> None:
        try:
            self._close()
        except BaseException:
            logging.getLogger(__name__).exception("instance '%s': close failed", self._runner.name)


@dataclass(slots=True)
class _Item:
    """A request whose flag is looked up when it is read."""

    request: InferenceRequest
    rows: int
    hosted: HostedRequest
    host: Host

    @property
    def cancelled(self) -> bool:
        return self.host.is_cancelled(self.hosted)


class _Forward(logging.Handler):
    """Lines of the backend's log become lines of the server's."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        self._host.log(
            {"CRITICAL": "ERROR", "DEBUG": "VERBOSE"}.get(record.levelname, record.levelname), self.format(record)
        )


def _forward_log(host: Host) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Forward(host)]
    root.setLevel(logging.INFO)
