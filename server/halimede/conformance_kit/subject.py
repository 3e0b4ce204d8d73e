"""What is checked: a backend with one model, and how the checks load and run it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from halimede.backends.api import Backend, BackendModel, Instance, ModelSource
from halimede.conformance_kit.requests import Maker
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import InferenceError, InferenceRequest, Placement, Tensor
from halimede.core.types.error import describe
from halimede.runtime.prepare import LoadOptions, LoadPlan, source
from halimede.runtime.repository import ModelEntry
from halimede.workers.instance import InstanceRunner

T = TypeVar("T")
Reply = list[Tensor] | InferenceError | None


class Wrong(Exception):  # the result of a check, not an error of this program
    """The backend breaks a rule: why, and what its author can do."""

    def __init__(self, why: str, advice: str) -> None:
        super().__init__(f"{why}; {advice}")


class NotTried(Exception):  # as above
    """A check that says nothing about this model, and why."""


@dataclass(slots=True)
class Item:
    """One request of a batch, as workers take it."""

    key: int
    request: InferenceRequest
    rows: int
    cancelled: bool = False
    sequence_slot: int = 0


@dataclass(frozen=True, slots=True)
class Subject:
    """A backend, and a model of it. `good` and `refused` are requests of the caller; without `good` they are made."""

    entry: ModelEntry
    options: LoadOptions
    plan: LoadPlan
    backend: Backend
    maker: Maker
    tolerance: float = 1e-3
    cycles: int = 10
    refused: Sequence[InferenceRequest] = field(default=())
    longest_wait_secs: float = 60.0

    @property
    def config(self) -> ModelConfig:
        return self.plan.config

    @property
    def source(self) -> ModelSource:
        return source(self.entry, self.config, self.backend, self.plan.versions[-1], self.options)

    def load(self, source: ModelSource | None = None) -> BackendModel:
        """Load the model, or the one of another source."""
        return self.backend.load(self.config, source if source is not None else self.source)

    def placement(self, ordinal: int = 0) -> Placement:
        kind = self.plan.placements[0]
        return Placement(f"{self.config.name}_{ordinal}", ordinal, kind.kind, kind.device)

    @contextmanager
    def instance(self) -> Iterator[Instance]:
        """A loaded instance, closed afterwards."""
        model = self.load()
        try:
            made = model.create_instance(self.placement())
            try:
                yield made
            finally:
                made.close()
        finally:
            model.close()

    @contextmanager
    def running(self) -> Iterator["Runs"]:
        """The same, ready to run requests as the server runs them."""
        with self.instance() as made:
            yield Runs(self, made)


class Runs:
    """Runs batches on an instance."""

    def __init__(self, subject: Subject, instance: Instance) -> None:
        self.instance = instance
        self._subject = subject
        self._runner = InstanceRunner("checked", subject.config, instance, state_files=subject.plan.state_files)

    def batch(
        self,
        requests: Sequence[InferenceRequest],
        cancelled: Mapping[int, bool] | None = None,
        *,
        sequence_slots: Sequence[int] | None = None,
    ) -> list[Reply]:
        """The replies of a batch, in order. `sequence_slots` are those of the sequences; by default each has its
        own."""
        flags = cancelled or {}
        batches = self._subject.config.max_batch_size > 0
        items = [
            Item(
                at,
                request,
                request.inputs[0].shape[0] if batches and request.inputs else 1,
                flags.get(at, False),
                at if sequence_slots is None else sequence_slots[at],
            )
            for at, request in enumerate(requests)
        ]
        replies: list[Reply] = list(self._runner.run(items).replies)
        return replies

    def outputs(self, request: InferenceRequest, what: str, advice: str) -> list[Tensor]:
        """The outputs of a request that must succeed."""
        (reply,) = self.batch([request])
        return answered(reply, what, advice)


def answered(reply: Reply, what: str, advice: str) -> list[Tensor]:
    """The outputs of a reply. Wrong if it is an error."""
    if isinstance(reply, list):
        return reply
    raise Wrong(f"{what} fails: {reply.message if reply is not None else 'no answer'}", advice)


def on_thread(work: Callable[[], T]) -> T:
    """The result of the work, done on a thread of its own, as instances are."""
    results: list[T] = []
    failures: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001  # raised below
            failures.append(error)

    thread = threading.Thread(target=run, name="check", daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return results[0]


def failure_of(work: Callable[[], object]) -> BaseException | None:
    """What the work raises."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001  # backends may raise anything
        return error
    return None


def text_of(error: BaseException) -> str:
    return error.message if isinstance(error, InferenceError) else describe(error)


def artifact_bytes(path: Path) -> int:
    """The size of a file, or of the files of a directory."""
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return path.stat().st_size if path.is_file() else 0
