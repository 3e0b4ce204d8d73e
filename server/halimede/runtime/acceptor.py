"""What takes the requests of one model version: the pump of a model, or an ensemble, which has others do its work."""

from typing import Protocol

from halimede.core.config.check_request import Checked
from halimede.core.schedule.waits import Place
from halimede.core.types import InferenceError, InferenceRequest
from halimede.core.types.caller import Caller
from halimede.core.types.server import WorkerHealth
from halimede.runtime.server import OnResponse


class Acceptor(Protocol):
    """Gives every request that it accepts exactly one final answer. All on the event loop's thread."""

    @property
    def queued(self) -> int:
        """Requests that wait to be executed."""

    @property
    def executing(self) -> int:
        """All other requests that were accepted and are not answered."""

    @property
    def parked(self) -> int:
        """Instances that are not started again."""

    def worker_health(self) -> WorkerHealth:
        """How the processes of its instances are."""

    @property
    def refusal(self) -> InferenceError | None:
        """Why no request is taken any more; None while there is hope."""

    def oldest_wait_ns(self) -> int:
        """How long the oldest queued request has waited; 0 when nothing is queued."""

    def is_available(self) -> bool:
        """Whether a request would be worked on."""

    async def is_ready(self) -> bool:
        """As `is_available`, and the model, if it has a say in that, says that it is ready."""

    def hold(self, size_bytes: int) -> None:
        """Stay open for a request that is on its way, and count its bytes; UNAVAILABLE when there are too many."""

    def release(self, size_bytes: int) -> None:
        """The request that `hold` was for is here, or will not come."""

    def submit(
        self,
        key: int,
        request: InferenceRequest,
        checked: Checked,
        on_response: OnResponse,
        received_ns: int,
        caller: Caller | None = None,
    ) -> None:
        """Take a checked request; its answers come through `on_response`, perhaps before this returns."""

    def cancel(self, key: int) -> None:
        """Whoever asked is gone: its final answer may come early. Ignored when the request is not known."""

    def try_refuse(self, key: int, error: InferenceError) -> bool:
        """Answer a request that is queued here with an error; False when it is not queued, or not known."""

    def acknowledge(self, key: int, responses: int) -> None:
        """Whoever asked took so many more answers, none of them final."""

    def is_busy(self) -> bool:
        """Whether requests are queued while nothing here is free to take them: only then may one wait for ever."""

    def place_of(self, key: int) -> Place:
        """Whose turn a request waits for."""

    def abort(self) -> None:
        """Answer everything with an error: the server stops now."""

    async def drained(self) -> None:
        """Wait until every accepted request is answered."""

    async def close(self) -> None:
        """Wait until every accepted request is answered, then let go of what was needed for them."""
