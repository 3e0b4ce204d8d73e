"""An ensemble with clients that record their answers, and a fake server that the test drives."""

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from halimede.core.config.check_request import Checked, RequestChecker
from halimede.core.config.model_config import (
    EnsembleStep,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from halimede.core.ensemble.graph import make_graph
from halimede.core.observe.stats import ModelStats
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest, InferenceResponse, Tensor
from halimede.core.types.caller import Caller
from halimede.core.types.statistics import FailureReason
from halimede.facade.server import OnResponse
from halimede.runtime.clock import monotonic_ns
from halimede.runtime.ensemble import Ensemble
from halimede.runtime.requests import RequestTable, VersionRequests

CANCELLED = InferenceError(ErrorCode.CANCELLED, "request was cancelled")


@dataclass
class Call:
    request: InferenceRequest
    on_response: OnResponse
    caller: Caller | None

    def answer(self, error: InferenceError | None = None, *, final: bool = True) -> None:
        outputs = [] if error is not None else [Tensor("OUT", DataType.FP32, (1,), b"\0" * 4)]
        name = self.request.model_name
        self.on_response(InferenceResponse(name, "1", self.request.id, outputs, error=error, final=final))

    def end(self) -> None:
        """End a decoupled model's answers."""
        self.on_response(InferenceResponse(self.request.model_name, "1", self.request.id))


@dataclass
class PlayedServer:
    """Keeps calls by ticket until the test answers them, or answers them immediately as `at_once` specifies."""

    calls: dict[int, Call] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    at_once: Callable[[InferenceRequest], InferenceError | None] | None = None
    at_cancel: Callable[[Call], None] | None = None
    tickets: int = 1000

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        self.tickets += 1
        call = Call(request, on_response, caller)
        if self.at_once is not None:
            call.answer(self.at_once(request))
        else:
            self.calls[self.tickets] = call
        return self.tickets

    def cancel(self, ticket: int) -> None:
        self.cancelled.append(ticket)
        if self.at_cancel is not None:
            self.at_cancel(self.calls.pop(ticket))

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        self.acknowledged += [ticket] * responses

    def take(self, model: str = "") -> Call:
        """The oldest unanswered call of this model, or of any model."""
        ticket = next(ticket for ticket, call in self.calls.items() if model in ("", call.request.model_name))
        return self.calls.pop(ticket)

    @property
    def called(self) -> list[str]:
        return [call.request.model_name for call in self.calls.values()]


def tensors(kind: type, *names: str) -> tuple[Any, ...]:
    return tuple(kind(name=name, data_type=DataType.FP32, dims=(1,)) for name in names)


def member(name: str, *, decoupled: bool = False) -> ModelConfig:
    policy = ModelTransactionPolicy(decoupled=decoupled)
    return ModelConfig(
        name=name, input=tensors(ModelInput, "IN"), output=tensors(ModelOutput, "OUT"), model_transaction_policy=policy
    )


class Bench:
    """An ensemble IN -> OUT of models in sequence, or of two parallel models (`OUT`, `MORE`)."""

    def __init__(
        self, *models: str, side_by_side: bool = False, limit: int = 0, decoupled: tuple[str, ...] = ()
    ) -> None:
        outputs = ("OUT", "MORE") if side_by_side else ("OUT",)
        names = ["IN", *(f"between{at}" for at in range(1, len(models))), "OUT"]
        ways = [("IN", output) for output in outputs] if side_by_side else list(pairwise(names))
        steps = tuple(
            EnsembleStep(model, -1, {"IN": source}, {"OUT": target})
            for model, (source, target) in zip(models, ways, strict=True)
        )
        config = ModelConfig(
            name="e",
            platform="ensemble",
            input=tensors(ModelInput, "IN"),
            output=tensors(ModelOutput, *outputs),
            ensemble_scheduling=ModelEnsembling(steps, limit),
        )
        graph = make_graph(config, [member(model, decoupled=model in decoupled) for model in models])
        self.server = PlayedServer()
        self.table = RequestTable()
        self.stats = ModelStats("e", "1", decoupled=graph.decoupled)
        loop = asyncio.get_running_loop()
        self.members: list[Any] = []
        requests = functools.partial(VersionRequests, self.table, self.stats)
        self.ensemble = Ensemble(graph, requests, self.server, lambda: self.members, RequestChecker(config), loop)
        self.requests = self.ensemble.requests
        self.responses: list[tuple[int, InferenceResponse]] = []

    def submit(self, *keys: int, caller: Caller | None = None, timeout_us: int = 0, size_bytes: int = 4) -> None:
        for key in keys:
            inputs = [Tensor("IN", DataType.FP32, (1,), b"\0" * 4)]
            request = InferenceRequest("e", id=str(key), inputs=inputs, timeout_us=timeout_us)

            def note(response: InferenceResponse, key: int = key) -> None:
                assert response.id == str(key)
                self.responses.append((key, response))

            self.requests.submit(key, request, Checked(1, size_bytes), note, monotonic_ns(), caller)

    @property
    def executing(self) -> int:
        return self.requests.count - self.ensemble.queued

    @property
    def answers(self) -> list[tuple[int, InferenceError | str, bool]]:
        """The answers to clients: an error, `ok` or `end`, and whether it was the last."""
        return [(key, each.error or ("end" if each.is_empty else "ok"), each.final) for key, each in self.responses]

    def failures(self) -> dict[FailureReason, int]:
        return {reason: count for reason, count in self.stats.failures.items() if count}

    def assert_at_rest(self) -> None:
        """No state of any request is left."""
        assert (self.executing, self.table.by_ticket, self.table.decoded.held_bytes) == (0, {}, 0)
        asyncio.get_running_loop().create_task(self.requests.drained()).cancel()


def of_e(error: InferenceError) -> InferenceError:
    return InferenceError(error.code, f"in ensemble 'e', {error.message}")


def refused(text: str, key: int) -> InferenceError:
    return InferenceError(ErrorCode.UNAVAILABLE, f"[request id: {key}] {text}")
