"""The façade: the only interface of the runtime that front ends use.

Arguments and results are plain data and buffers, requests are cancelled by ticket, and answers come through a
callback, so that a second implementation over a socket can put several front-end processes before one core. All methods
are called on the event loop's thread and all callbacks come on it. No method blocks: what this process does not know
comes by a callback, or is awaited.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from halimede.core.config.model_view import ModelView
from halimede.core.types import DeviceReport, InferenceRequest, InferenceResponse, ModelIndexEntry, ServerMetadata
from halimede.core.types.caller import Caller
from halimede.core.types.kv_cache import KvCache
from halimede.core.types.statistics import ModelStatistics
from halimede.facade.lookup import ModelLookup

OnResponse = Callable[[InferenceResponse], None]
LoadParameter = bool | int | str | bytes


class Server(Protocol):
    """A model server. Errors are InferenceError; only `infer` never raises one but answers with it."""

    def metadata(self) -> ServerMetadata:
        """Name, version and the supported extensions."""

    def is_live(self) -> bool:
        """The server is up: true from the binding of the ports until the exit, unless its core hangs."""

    def is_ready(self) -> bool:
        """Every wanted model is ready and has an instance up (`--strict-readiness`), and the server is not draining."""

    def is_draining(self) -> bool:
        """SIGTERM was received: in-flight requests finish, `is_ready` is false, new requests answer UNAVAILABLE."""

    def model(self, name: str, version: str = "") -> ModelView | ModelLookup:
        """The ready version (highest for ""); a lookup if it is not known in this process, which never happens in the
        core's.

        NOT_FOUND when unknown or without versions; UNAVAILABLE when not ready.
        """

    async def is_model_ready(self, name: str, version: str = "") -> bool:
        """Whether that version (the highest for "") serves, an instance of it is up, and the model reports that it
        is ready if it implements readiness. NOT_FOUND when the model is unknown."""

    def infer(self, request: InferenceRequest, on_response: OnResponse, caller: Caller | None = None) -> int:
        """Start an inference and return its ticket. `caller` is for those inside the server, None for a client.

        `on_response` gets every answer, the last one with `final`; errors come the same way. It may be called before
        this returns, and is never called again after the final answer. Tickets are never 0 and never reused. A caller
        that takes answers that are not final acknowledges them by `acknowledge`.
        """

    def cancel(self, ticket: int) -> None:
        """The client has disconnected: a queued request is dropped, an executing one gets its cancel flag.

        The final answer, an error of code CANCELLED or the real one, still comes through the callback. Unknown tickets
        are ignored.
        """

    def acknowledge(self, ticket: int, responses: int = 1) -> None:
        """The client has taken `responses` more answers, none of them final: a model that waits for that continues.

        A decoupled model sends a bounded number of answers ahead of the acknowledged ones. Unknown tickets are ignored.
        """

    async def kv_cache(self, model: str) -> KvCache | None:
        """The fill level of a language model's KV cache; None for a model that does not report it."""

    async def statistics(self, name: str = "", version: str = "") -> Sequence[ModelStatistics]:
        """The statistics of one version, of all versions of a model (version ""), or of all models (name "").
        INVALID_ARG `requested model '<m>' is not available` when unknown."""

    async def repository_index(self, ready_only: bool) -> Sequence[ModelIndexEntry]:
        """Every model of the repositories, one entry per version that was ever loaded."""

    async def devices(self) -> DeviceReport:
        """The devices of the server, with the instances on each, and the memory in use as of the last sample."""

    async def load_model(self, name: str, parameters: Mapping[str, LoadParameter]) -> None:
        """Load or reload a model and return when it is ready; raises with the root cause when it is not."""

    async def unload_model(self, name: str, unload_dependents: bool = False) -> None:
        """Stop serving a model and return; its memory is freed when its last request is answered."""
