"""One inference, asked and answered. Plain slots dataclasses: one of each is made per request on the hot path."""

from dataclasses import dataclass, field

from halimede.core.types.error import InferenceError
from halimede.core.types.tensor import Tensor

ParameterValue = bool | int | float | str


@dataclass(slots=True)
class InferenceRequest:
    """What a client asks of a model.

    `model_version` is the decimal text of the request, "" for the highest ready version. `outputs` names the wanted
    outputs, empty for all. `timeout_us` is time in the queue, 0 for the model's own; `priority` 0 is the model's
    default. `parameters` holds what is left after the reserved ones went to fields of their own. `wants_one`: a model
    that may answer otherwise than once, a decoupled one, is not asked.
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
    """One answer. A request gets exactly one with `final` set; only decoupled models send others before it.

    `error` set means that there are no outputs. `model_version` is the version that ran, "" where none was reached.
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
        """Whether it says nothing but, if it is final, that a decoupled model's answers are over."""
        return not self.outputs and not self.parameters and self.error is None
