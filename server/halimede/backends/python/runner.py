"""Host one python model in its worker process.

| what the model does | what the batch's requests get |
|---|---|
| returns a list of responses | each request its own response |
| raises, or returns something invalid | all requests without a response: the cause |
| an element is None | what the request's sender sends; an error if the model did not get the sender |
| decoupled | what the senders send |
| a request is released for another execution, which needs `iterative_sequence` | nothing, or what the sender sends |

Every exception of a model, including SystemExit and KeyboardInterrupt, is an error of its batch: the process continues.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any

from halimede.backends.hosting import RESCHEDULED, BatchReply, Host, HostedRequest, Runner, WorkerSpec
from halimede.backends.python.load import ModelErrors, model_class, version_directory
from halimede.backends.python.utils.config import ModelConfig
from halimede.backends.python.utils.errors import code_of, is_device_lost
from halimede.backends.python.utils.metrics import report_released
from halimede.backends.python.utils.module import install
from halimede.backends.python.utils.request import ReceivedRequest, wanted_outputs
from halimede.backends.python.utils.response import InferenceResponse, failed_answer_read, reply_of
from halimede.backends.python.utils.sender import finish
from halimede.backends.python.utils.session import Session
from halimede.backends.sequence_runner import SequenceHost, SequenceRunner
from halimede.backends.state_files import read_state_files
from halimede.core.sequences.plan import SequencePlan, read_plan
from halimede.core.types import ErrorCode, InferenceError, internal


def make_runner(spec: WorkerSpec, host: Host) -> Runner:
    """Import the model, create its object and initialize it. InferenceError with the cause of a failure."""
    config = json.loads(spec.config_json)
    plan = read_plan(config)
    files = {} if plan is None else read_state_files(plan, spec.repository)
    errors, session = _prepare(spec, host if plan is None else SequenceHost(host), config, plan)
    found = model_class(spec, errors)
    try:
        model = found()
    except BaseException as error:  # noqa: BLE001  a model may raise what it likes
        raise errors.error("the making of its TritonPythonModel", error) from None
    try:
        initialize = getattr(model, "initialize", None)
        if initialize is not None:
            initialize(_arguments(spec))
    except BaseException as error:  # noqa: BLE001  a model may raise what it likes
        raise errors.error("initialize", error) from None
    session.serves = True
    runner = PythonRunner(spec, session, errors, model)
    return runner if plan is None else SequenceRunner(runner, plan, spec.model, files, host.states)


def complete_config(spec: WorkerSpec, host: Host) -> dict[str, Any]:
    """The configuration as completed by the model's `auto_complete_config`. InferenceError with the cause."""
    errors, _ = _prepare(spec, host, json.loads(spec.config_json))
    found = model_class(spec, errors)
    try:
        complete = getattr(found, "auto_complete_config", None)
        if complete is None:
            return dict(json.loads(spec.config_json))
        completed = complete(ModelConfig(spec.config_json))
        if not isinstance(completed, ModelConfig):
            raise internal(
                f"auto_complete_config function in model '{spec.model}' must return a valid pb.ModelConfig object."
            )
        # Values that are not JSON are found here, where the model's name is known.
        return dict(json.loads(json.dumps(completed.as_dict())))
    except BaseException as error:  # noqa: BLE001  a model may raise what it likes
        raise errors.error("auto_complete_config", error) from None


class PythonRunner:
    """An initialized model; see `hosting.Runner`."""

    ends_late = False

    def __init__(self, spec: WorkerSpec, session: Session, errors: ModelErrors, model: Any) -> None:
        self._session = session
        self._errors = errors
        self._model = model
        self._instance = spec.instance
        self._failed = f"Failed to process the request(s) for model instance '{spec.instance}', message: "
        self._execute: Callable[[list[ReceivedRequest]], Any] = model.execute
        # Well-behaved decorators set the attribute that `unwrap` follows.
        self.is_async = inspect.iscoroutinefunction(inspect.unwrap(model.execute))
        self.answers_is_ready = callable(getattr(model, "is_ready", None))
        self._rescheduled: dict[int, ReceivedRequest] = {}
        """By sequence slot, the request that the model wants to execute again."""

    def execute(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        """Run a batch; one reply per request, in order. Never raises."""
        session = self._session
        received = [ReceivedRequest(request, session) for request in requests]
        if self._rescheduled:
            self._resume(received)
        if failed_answer_read.get():
            failed_answer_read.set("")
        try:
            result = self._execute(received.copy())
            # Check the type before calling a function: nearly always it is a list.
            if type(result) is not list and inspect.iscoroutine(result):
                result = asyncio.run(result)
            return self._replies(received, result)
        except BaseException as error:  # noqa: BLE001  a model may raise what it likes
            return self._fail(received, error)
        finally:
            if session.released:
                self._report_released()

    async def execute_async(self, requests: Sequence[HostedRequest]) -> list[BatchReply]:
        """As `execute`, for a model whose `execute` is a coroutine function."""
        received = [ReceivedRequest(request, self._session) for request in requests]
        if self._rescheduled:
            self._resume(received)
        try:
            result = self._execute(received.copy())
            if inspect.isawaitable(result):
                result = await result
            return self._replies(received, result)
        except GeneratorExit:
            # The worker process drops the batch.
            raise
        except BaseException as error:  # noqa: BLE001  a model may raise what it likes
            return self._fail(received, error)
        finally:
            if self._session.released:
                self._report_released()

    async def is_ready(self) -> bool:
        """The model's `is_ready`; False if it raises or returns no bool."""
        try:
            ready = self._model.is_ready()
            if inspect.isawaitable(ready):
                ready = await ready
            if isinstance(ready, bool):
                return ready
            raise TypeError("is_ready() must return a boolean value")
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001  a model may raise what it likes
            self._errors.log("is_ready", error)
            return False

    def forget(self, sequence_slot: int) -> None:
        """No effect: `SequenceRunner` keeps the states."""

    def close(self) -> None:
        """Call `finalize` if the model has it; a failure is logged."""
        self._session.serves = False
        try:
            finalize = getattr(self._model, "finalize", None)
            if finalize is not None:
                finalize()
        except BaseException as error:  # noqa: BLE001  a model may raise what it likes
            self._errors.log("finalize", error)

    def _resume(self, received: list[ReceivedRequest]) -> None:
        """Requests that are executed again continue with the senders that they had."""
        for request in received:
            before = self._rescheduled.pop(request.hosted.sequence_slot, None)
            if before is not None and before.hosted.key == request.hosted.key:
                request.continue_from(before)

    def _replies(self, received: list[ReceivedRequest], result: Any) -> list[BatchReply]:
        if self._session.decoupled:
            if result is not None:
                raise _Refused(
                    f"Python model '{self._instance}' is using the decoupled mode and the execute function must return"
                    " None."
                )
            return [self._reply_later(request) if request.is_rescheduled else None for request in received]
        responses = _checked(received, result)
        replies: list[BatchReply] = []
        session = self._session
        if session.reschedules:
            _check_rescheduled(received, responses)
        outputs = session.output_names
        for request, response in zip(received, responses, strict=True):
            if response is None or request.sender is not None:
                replies.append(self._reply_by_sender(request, response))
            else:
                replies.append(reply_of(response, request.hosted.request.outputs or outputs, session))
        return replies

    def _reply_later(self, request: ReceivedRequest) -> BatchReply:
        """The reply for a request that is released for another execution."""
        if self._session.reschedules:
            if request.sender is not None and request.sender.has_ended:
                return None
            self._rescheduled[request.hosted.sequence_slot] = request
            return RESCHEDULED
        text = (
            "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not configured to"
            " handle such a flag."
        )
        # The model may still hold the request: responses that it sends from now on are refused.
        return finish(request.get_response_sender(), internal(self._failed + text))

    def _reply_by_sender(self, request: ReceivedRequest, response: InferenceResponse | None) -> BatchReply:
        """The reply for a request whose sender the model has, or for which it returned None."""
        if response is not None:
            returned = reply_of(response, wanted_outputs(request), self._session)
            reply = finish(request.get_response_sender(), returned)
            if reply is None:
                self._session.host.log(
                    "WARNING",
                    f"instance '{self._instance}' returned a response for a request that it had answered: dropped",
                )
            return reply
        if request.is_rescheduled:
            return self._reply_later(request)
        if request.sender is not None:
            return None
        text = (
            "Expected an 'InferenceResponse' object in the execute function return list, found None for a request"
            " whose response sender was never asked for, so that nothing can answer it."
        )
        # The model may still hold the request: responses that it sends from now on are refused.
        return finish(request.get_response_sender(), internal(self._failed + text))

    def _fail(self, received: list[ReceivedRequest], error: BaseException) -> list[BatchReply]:
        if isinstance(error, _Refused):
            code, cause = ErrorCode.INTERNAL, str(error)
            self._session.host.log("ERROR", self._failed + cause)
        else:
            code, cause = code_of(error), self._errors.log("execute", error, _unchecked_error())
            if is_device_lost(error):
                self._session.host.end(f"instance '{self._instance}' has lost its device's context: {cause}")
        failure = InferenceError(code, self._failed + cause)
        return [finish(request.get_response_sender(), failure) for request in received]

    def _report_released(self) -> None:
        try:
            report_released(self._session)
        except Exception as error:  # noqa: BLE001  a batch does not fail for the server's figures
            self._errors.log("the removal of a metric family", error)


def _unchecked_error() -> str:
    """The probable cause, if the model read outputs of a called model's error response without checking for it."""
    error = failed_answer_read.get()
    return f"the model read outputs of a response that is an error: {error}" if error else ""


_RETURNED = (InferenceResponse, type(None))


class _Refused(Exception):
    """The result of `execute` is invalid."""


def _checked(received: list[ReceivedRequest], result: Any) -> Sequence[InferenceResponse | None]:
    if result is None and all(request.sender is not None for request in received):
        return [None] * len(received)
    if not isinstance(result, list):
        raise _Refused(
            f"Expected a list in the execute return, found type '{type(result)}': execute must return a list of"
            f" responses, one for each request."
        )
    if len(result) != len(received):
        raise _Refused(
            "Number of InferenceResponse objects do not match the number of InferenceRequest objects."
            f" InferenceRequest(s) size is:{len(received)}, and InferenceResponse(s) size is:{len(result)}"
        )
    for kind in set(map(type, result)):
        if not issubclass(kind, _RETURNED):
            raise _Refused(
                f"Expected an 'InferenceResponse' object in the execute function return list, found type '{kind}'."
            )
    return result


def _check_rescheduled(received: list[ReceivedRequest], responses: Sequence[InferenceResponse | None]) -> None:
    for request, response in zip(received, responses, strict=True):
        if request.is_rescheduled and response is not None:
            # The text of Triton, with its mistake.
            raise _Refused(
                "Expected a None object in the execute function return list for reschduled request, found type"
                f" '{type(response)}'."
            )


# Any: JSON.
def _prepare(
    spec: WorkerSpec, host: Host, config: dict[str, Any], plan: SequencePlan | None = None
) -> tuple[ModelErrors, Session]:
    errors = ModelErrors(spec, host)
    outputs = tuple(output["name"] for output in config.get("output", ()))
    if plan is not None:
        outputs += plan.hidden_outputs
    # The server has checked that it is one of the two words.
    strict = config.get("parameters", {}).get("STRICT_OUTPUTS", {}).get("string_value", "").lower() == "true"
    reschedules = plan is not None and plan.is_iterative
    session = Session(
        host, version_directory(spec), spec.decoupled, outputs, strict_outputs=strict, reschedules=reschedules
    )
    install(session)
    return errors, session


def _arguments(spec: WorkerSpec) -> dict[str, str]:
    return {
        "model_config": spec.config_json,
        "model_instance_kind": spec.kind,
        "model_instance_name": spec.instance,
        "model_instance_device_id": str(spec.device_id),
        "model_repository": spec.repository,
        "model_version": str(spec.version),
        "model_name": spec.model,
    }
