"""Hosts a model of any backend in a worker process, as a `Runner`: does the work of `workers.thread`.

Unlike the host of python models it needs the whole package, so it runs only in forks of the zygote.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import orjson

from halimede.backends.api import Backend, Checks, LostInstanceError, ModelSource, RequestInstance
from halimede.backends.discover import find_backend
from halimede.backends.hosting import Answer, BatchReply, Host, HostedRequest, Runner, WorkerSpec
from halimede.backends.sequence_runner import SequenceHost, SequenceRunner
from halimede.backends.state_files import read_state_files
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import read_json
from halimede.core.config.sequence_plan import sequence_plan
from halimede.core.config.sequence_tensors import model_outputs
from halimede.core.config.write import to_json
from halimede.core.schedule.batching import OutputTypes, check_reply
from halimede.core.types import Device, DeviceKind, InferenceError, InferenceRequest, ParameterValue, Placement, Tensor
from halimede.core.types.error import describe, internal, invalid
from halimede.workers.instance import InstanceRunner


def make_runner(spec: WorkerSpec, host: Host) -> Runner:
    """Load the model and make its instance. InferenceError with the backend's error."""
    _forward_log(host)
    backend, config, source = _parts(spec)
    placement = Placement(spec.instance, spec.ordinal, spec.kind, source.device)
    plan = sequence_plan(config)
    files = {} if plan is None else read_state_files(plan, spec.repository)
    try:
        model = backend.load(config, source)
        instance = model.create_instance(placement)
    except InferenceError:
        raise
    except BaseException as error:
        logging.getLogger(__name__).exception("instance '%s' did not start", spec.instance)
        raise internal(describe(error)) from error

    def close() -> None:
        instance.close()
        model.close()

    if spec.decoupled:
        if not hasattr(instance, "execute"):
            raise invalid(f"backend '{spec.backend}' answers each request once: its models cannot be decoupled")
        request_instance = cast(RequestInstance, instance)
        if plan is None:
            return DecoupledRunner(spec.instance, request_instance, close, host, config)
        runner = DecoupledRunner(spec.instance, request_instance, close, SequenceHost(host), config)
        return SequenceRunner(runner, plan, spec.model, files, host.states)
    hosted = InstanceRunner(spec.instance, config, instance, state_files=files, states=host.states)
    return BackendRunner(hosted, close, host)


def complete_config(spec: WorkerSpec, host: Host) -> Any:
    """The configuration as JSON, completed from the model file. InferenceError."""
    _forward_log(host)
    backend, config, source = _parts(spec)
    try:
        return orjson.loads(to_json(backend.autocomplete(config, source)))
    except InferenceError:
        raise
    except BaseException as error:
        logging.getLogger(__name__).exception("model '%s': auto-complete failed", spec.model)
        raise internal(describe(error)) from error


def check_model(spec: WorkerSpec, host: Host) -> None:
    """Raise InferenceError with what the backend's `check` finds; nothing for a backend without it."""
    _forward_log(host)
    backend, config, source = _parts(spec)
    if not isinstance(backend, Checks):
        return
    try:
        backend.check(config, source)
    except InferenceError:
        raise
    except BaseException as error:
        logging.getLogger(__name__).exception("model '%s': check failed", spec.model)
        raise internal(describe(error)) from error


def _parts(spec: WorkerSpec) -> tuple[Backend, ModelConfig, ModelSource]:
    config = read_json(spec.config_json).config
    device = Device(DeviceKind.GPU, spec.device_id, spec.device_uuid) if spec.device_uuid else None
    source = ModelSource(
        spec.model,
        spec.version,
        Path(spec.repository),
        Path(spec.artifact),
        dict(spec.options),
        device=device,
        allow_pickle=spec.allow_pickle,
    )
    return find_backend(spec.backend), config, source


class _Hosted:
    """The common part of all runners over a backend's instance."""

    is_async = False
    answers_is_ready = False
    ends_late = False

    def __init__(self, name: str, close: Callable[[], None], host: Host) -> None:
        self._name = name
        self._close = close
        self._host = host

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        raise NotImplementedError("backends execute on the main thread")

    async def is_ready(self) -> bool:
        return True

    def forget(self, sequence_slot: int) -> None:
        """No effect: without sequences there are no states."""

    def close(self) -> None:
        try:
            self._close()
        except BaseException:
            logging.getLogger(__name__).exception("instance '%s': close failed", self._name)


class BackendRunner(_Hosted):
    """A `Runner` over one instance of a backend."""

    def __init__(self, runner: InstanceRunner, close: Callable[[], None], host: Host) -> None:
        super().__init__(runner.name, close, host)
        self._runner = runner

    def execute(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        items = [_Item(each.key, each.request, each.rows, each.sequence_slot, each, self._host) for each in requests]
        ran = self._runner.run(items)
        lost = next((reply for reply in ran.replies if isinstance(reply, LostInstanceError)), None)
        if lost is not None:
            self._host.end(lost.message)
        return [Answer(reply) if isinstance(reply, list) else reply for reply in ran.replies]

    def forget(self, sequence_slot: int) -> None:
        self._runner.forget(sequence_slot)


class DecoupledRunner(_Hosted):
    """A `Runner` over an instance that answers any number of times, also after `execute` has returned."""

    def __init__(
        self, name: str, instance: RequestInstance, close: Callable[[], None], host: Host, config: ModelConfig
    ) -> None:
        super().__init__(name, close, host)
        self._instance = instance
        self._model = config.name
        self._datatypes = {output.name: output.data_type for output in model_outputs(config)}

    def execute(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        open_requests = [_DecoupledRequest(each, self._host, self._datatypes) for each in requests]
        try:
            self._instance.execute(open_requests)
        except BaseException as error:  # noqa: BLE001  # the process survives any exception of a model
            failure = error if isinstance(error, InferenceError) else self._as_error(error)
            for request in open_requests:
                if not request.is_over:
                    request.fail(failure)
        return [None for _ in requests]

    def _as_error(self, error: BaseException) -> InferenceError:
        logging.getLogger(__name__).error("instance '%s' failed", self._name, exc_info=error)
        text = f"Failed to process the request(s) for model instance '{self._name}', message: {describe(error)}"
        return internal(text)


class _DecoupledRequest:
    """An `ExecuteRequest` whose answers are sent at once. It may be answered on any thread."""

    def __init__(self, hosted: HostedRequest, host: Host, datatypes: OutputTypes) -> None:
        request = hosted.request
        self.id = request.id
        self.inputs: Mapping[str, Tensor] = {tensor.name: tensor for tensor in request.inputs}
        self.outputs: Sequence[str] = request.outputs or tuple(datatypes)
        self.batch_size = hosted.rows
        self.parameters: Mapping[str, ParameterValue] = request.parameters
        self.is_over = False
        self._hosted = hosted
        self._host = host
        self._datatypes = datatypes
        self._lock = threading.Lock()

    def is_cancelled(self) -> bool:
        return self._host.is_cancelled(self._hosted)

    def respond(
        self, outputs: Sequence[Tensor], *, final: bool = True, parameters: Mapping[str, ParameterValue] | None = None
    ) -> None:
        """Send one answer; outputs that do not match the configuration fail the request."""
        try:
            checked = check_reply(outputs, self._datatypes, self._hosted.request.outputs, None)
        except InferenceError as error:
            self._send(error.with_traceback(None), final=True)
            return
        self._send(Answer(checked, parameters or {}), final=final)

    def fail(self, error: InferenceError) -> None:
        """Answer only this request with an error, which is its final answer."""
        self._send(error, final=True)

    def _send(self, reply: Answer | InferenceError, *, final: bool) -> None:
        with self._lock:
            if self.is_over:
                raise RuntimeError(f"request '{self.id}' has had its final answer already")
            self.is_over = final
        self._host.respond(self._hosted, reply, final)


@dataclass(slots=True)
class _Item:
    """A request whose flag is looked up when it is read."""

    key: int
    request: InferenceRequest
    rows: int
    sequence_slot: int
    hosted: HostedRequest
    host: Host

    @property
    def cancelled(self) -> bool:
        return self.host.is_cancelled(self.hosted)


class _Forward(logging.Handler):
    """Forwards log records of the backend to the server's log."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def emit(self, record: logging.LogRecord) -> None:
        level = next(name for least, name in _LEVELS if record.levelno >= least)
        self._host.log(level, self.format(record), f"{record.filename}:{record.lineno}")


_LEVELS = ((logging.ERROR, "ERROR"), (logging.WARNING, "WARNING"), (logging.INFO, "INFO"), (-1, "VERBOSE"))
"""By the lowest level: libraries may define levels in between."""


def _forward_log(host: Host) -> None:
    root = logging.getLogger()
    root.handlers[:] = [_Forward(host)]
    root.setLevel(logging.INFO)
