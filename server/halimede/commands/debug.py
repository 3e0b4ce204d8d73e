"""`halimede debug`: run one python model in this process, at this terminal, with requests from files.

The model has no server, no worker process and no time limit, so that `breakpoint()` and debuggers work as in any
program. Other models that it calls are served from the same repository.
The model gets requests as from a server, one in each batch, and its responses are checked and printed as a server sends
them. Responses go to standard output; the model's log lines, and errors, go to standard error.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from halimede.commands.assemble import DEVICE_LIST_VARIABLE

if TYPE_CHECKING:
    from halimede.backends.hosting import BatchReply, Call, HostedRequest, Reply, Runner
    from halimede.backends.service_calls import ResultT_co, ServiceCall
    from halimede.commands.debug_models import OtherModels
    from halimede.core.config.model_view import ModelView
    from halimede.core.types import InferenceRequest
    from halimede.runtime.prepare import LoadOptions, LoadPlan
    from halimede.runtime.repository import ModelEntry
    from halimede.workers.states import HeldStates


@dataclass(slots=True)
class Request:
    """See `hosting.HostedRequest`."""

    key: int
    request: "InferenceRequest"
    rows: int
    sequence_slot: int = 0


@dataclass(slots=True)
class Terminal:
    """A `hosting.Host` without a server: prints responses, and ignores metric updates. `start_others` starts the other
    models of the repository when the first of them is called."""

    states: "HeldStates"
    start_others: "Callable[[], OtherModels]"
    sent: "list[Reply]" = field(default_factory=list)
    """Responses sent by a response sender."""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when a response sender has sent its last response."""
    _numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    _others: "OtherModels | None" = None
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def is_cancelled(self, request: "HostedRequest") -> bool:  # noqa: ARG002 - no client exists
        return False

    def respond(self, request: "HostedRequest", reply: "Reply", final: bool) -> None:  # noqa: ARG002 - one request
        if reply is not None:
            self.sent.append(reply)
        if final:
            self.is_over.set()

    def log(self, level: str, message: str, origin: str = "") -> None:
        click.echo(f"{level} {origin}] {message}" if origin else f"{level}] {message}", err=True)

    def end(self, why: str) -> None:
        self.log("ERROR", f"a server would replace this process: {why}")

    def call(self, call: "ServiceCall[ResultT_co]") -> Any:
        """Accept declarations of metrics; other models do the rest. Any: the result is of the call's own type."""
        from halimede.backends import service_calls

        match call:
            case service_calls.NewMetricFamily() | service_calls.NewMetric():
                return next(self._numbers)
            case service_calls.MetricValue():
                return 0.0
            case service_calls.DeleteMetricFamily():
                return None
        return self._other_models().call(call)

    def infer(self, request: "InferenceRequest") -> "Call":
        return self._other_models().infer(request)

    def close(self) -> None:
        """End the other models, if they were started."""
        if self._others is not None:
            self._others.close()

    def _other_models(self) -> "OtherModels":
        with self._starting:
            if self._others is None:
                self._others = self.start_others()
            return self._others

    def update_metric(self, metric: int, operation: str, value: float) -> None:
        """Ignore the update: there is no metrics page."""


def run(model: Path, files: tuple[Path, ...]) -> int:
    """Answer the request of each file; returns the exit code, 1 if one failed."""
    # Imported here, so that --help answers quickly, without the serving libraries.
    from halimede.backends.python.runner import make_runner
    from halimede.core.config.model_view import ModelView
    from halimede.core.types import InferenceError
    from halimede.runtime.isolate import PYTHON_MODELS, Isolated
    from halimede.runtime.prepare import source
    from halimede.workers.states import HeldStates
    from halimede.workers.supervision.program import Program

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    host = Terminal(HeldStates(), lambda: _other_models(model))
    try:
        entry, plan, options = _planned(model)
        if plan.backend is None:
            raise click.UsageError(f"'{entry.name}' is an ensemble: debug the models of its steps")
        version = plan.versions[-1]
        where = source(entry, plan.config, plan.backend, version, options)
        isolated = Isolated(plan.config, where, PYTHON_MODELS, Program(), threads=1, log_verbose=1)
        runner = make_runner(isolated.spec(plan.placements[0]), host)
    except (InferenceError, OSError) as error:
        click.echo(str(error), err=True)
        return 1
    view = ModelView(entry.name, str(version), (str(version),), plan.config, plan.labels)
    try:
        return max([_answer(runner, host, view, file) for file in files])
    finally:
        runner.close()
        host.close()


def _other_models(model: Path) -> "OtherModels":
    from halimede.commands.debug_models import OtherModels
    from halimede.settings import ModelControlMode, Settings

    # Symbolic links are not resolved, because the link's own name is the model's.
    model, device_list = Path(os.path.abspath(model)), os.environ.get(DEVICE_LIST_VARIABLE)
    settings = Settings(
        model_repository=(model.parent,),
        model_control_mode=ModelControlMode.EXPLICIT,
        device_list=Path(device_list) if device_list else None,
        allow_cpu_metrics=False,
        allow_gpu_metrics=False,
    )
    return OtherModels(settings, model.name)


def _planned(model: Path) -> "tuple[ModelEntry, LoadPlan, LoadOptions]":
    """The model, its complete configuration, and the options it was planned with. InferenceError, OSError."""
    from halimede.backends.python.backend import PythonBackend
    from halimede.commands.explain_config import ModelFlags, ended_by_interrupt, find_model
    from halimede.runtime.prepare import plan_model
    from halimede.workers.abandon import Abandon

    _, entry = find_model(model, "")
    with ended_by_interrupt(), ModelFlags().load_options() as options:
        plan = plan_model(entry, options, Abandon())
    if plan.backend is not None and not isinstance(plan.backend, PythonBackend):
        raise click.UsageError(f"'{entry.name}' is a model of backend '{plan.config.backend}', not a python model")
    return entry, plan, options


def _answer(runner: "Runner", host: Terminal, view: "ModelView", file: Path) -> int:
    """Execute the request of a file and print the result; returns 1 if it failed."""
    from halimede.core.config.check_request import RequestChecker
    from halimede.core.config.process_options import strict_outputs
    from halimede.core.schedule.replies import ReplyChecker
    from halimede.core.types import InferenceError, InferenceResponse
    from halimede.core.wire.http_request import decode_infer
    from halimede.core.wire.http_response import encode_infer

    checker = ReplyChecker(view.config, is_strict=strict_outputs(view.config))
    rules = RequestChecker(view.config)
    try:
        decoded = decode_infer(view, file.read_bytes(), None, view.version)
        request = decoded.request
        checked = rules.check(request)
        for tensor in request.inputs:
            # Models may write to their inputs.
            tensor.data = memoryview(bytearray(tensor.data))
        hosted = Request(1, request, checked.batch_size)
        host.sent.clear()
        host.is_over.clear()
        replies = _executed(runner, hosted)
    except (InferenceError, OSError) as error:
        click.echo(f"{file}: {error}", err=True)
        return 1
    if replies == [None]:
        # Threads of the model may still send.
        host.is_over.wait()
    failed = 0
    has_rows = view.config.max_batch_size > 0 and not view.config.is_decoupled
    for reply in (*host.sent, *replies):
        if reply is None:
            continue
        try:
            if isinstance(reply, InferenceError):
                raise reply
            outputs = checker.check(reply.outputs, request.outputs, checked.batch_size if has_rows else None)
            rules.reshape_outputs(outputs, checked.batch_size)
            response = InferenceResponse(view.name, view.version, request.id, outputs, dict(reply.parameters))
            encoded = encode_infer(response, decoded.destinations, view)
        except InferenceError as error:
            click.echo(f"{file}: {error.message}", err=True)
            failed = 1
            continue
        click.echo(b"".join(encoded.chunks))
    for text in checker.warnings:
        click.echo(f"WARNING] {text}", err=True)
    return failed


def _executed(runner: "Runner", hosted: Request) -> "list[Reply]":
    """The reply to a request, which is executed as often as the model wants."""
    from halimede.backends.hosting import Rescheduled

    def execute() -> "BatchReply":
        (reply,) = asyncio.run(runner.execute_async([hosted])) if runner.is_async else runner.execute([hosted])
        return reply

    while isinstance(reply := execute(), Rescheduled):
        hosted.request.sequence_start = False
    return [reply]


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="MODEL_DIR")
@click.argument(
    "requests",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    nargs=-1,
    required=True,
    metavar="REQUEST.json...",
)
@click.pass_context
def debug(ctx: click.Context, model: Path, requests: tuple[Path, ...]) -> None:
    """Run a python model in this process, for debuggers.

    The model is initialized, answers the request in each file (the JSON body of an infer call), and is finalized.
    breakpoint() opens the debugger at this terminal, and there are no time limits. Other models of the repository are
    served for its calls, and loaded when they are first called. Exits with 1 if a request failed.
    """
    ctx.exit(run(model, requests))
