"""Inference requests and responses. Plain slots dataclasses, because the hot path makes one of each per request."""

from dataclasses import dataclass, field

from halimede.core.types.error import InferenceError
from halimede.core.types.tensor import Tensor

ParameterValue = bool | int | float | str


@dataclass(slots=True)
class InferenceRequest:
    """An inference request to a model.

    `model_version` is decimal text, "" for the highest ready version. `outputs` names the requested outputs, empty for
    all. `timeout_us` limits the time in the queue, 0 for the model's default; `priority` 0 is the model's default.
    `parameters` has all request parameters except the reserved ones, which have fields of their own. `wants_one` means
    that the caller needs exactly one response: decoupled models refuse such a request.
    """

    model_name: str
    model_version: str = ""
    id: str = ""
    inputs: list[Tensor] = field(default_factory=list)
    outputs: tuple[str, ...] = ()
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    priority: int = 0
    timeout_us: int = 0
    sequence_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    wants_one: bool = False


@dataclass(slots=True)
class InferenceResponse:
    """One response. A request gets exactly one with `final` set; only decoupled models send others before it.

    If `error` is set there are no outputs. `model_version` is the version that ran, "" if no version was reached.
    """

    model_name: str
    model_version: str
    id: str = ""
    outputs: list[Tensor] = field(default_factory=list)
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    error: InferenceError | None = None
    final: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether it has no content; an empty final response ends the responses of a decoupled model."""
        return not self.outputs and not self.parameters and self.error is None
