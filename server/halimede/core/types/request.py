"""Inference requests and responses. Plain slots dataclasses, because the hot path makes one of each per request."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from halimede.core.types.datatype import DataType
from halimede.core.types.error import InferenceError
from halimede.core.types.tensor import Tensor

ParameterValue = bool | int | float | str

InputForm = tuple[str, DataType, tuple[int, ...]]
"""Name, datatype and shape of an input."""


def forms_of(inputs: Iterable[Tensor]) -> tuple[InputForm, ...]:
    """The inputs without their data."""
    return tuple([(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs])


@dataclass(slots=True)
class RequestForm:
    """What a client sends again and again: all of a request except its id, sequence, parameters and data.

    A value that is never modified, except that a check and a codec keep in it what they know of it. `model_version` is
    decimal text, "" for the highest ready version. `outputs` names the requested outputs, empty for all. `timeout_us`
    limits the time in the queue, 0 for the model's default; `priority` 0 is the model's default. `wants_one` means that
    the caller needs exactly one response: decoupled models refuse such a request.
    """

    model_name: str
    model_version: str
    inputs: tuple[InputForm, ...]
    outputs: tuple[str, ...]
    priority: int = 0
    timeout_us: int = 0
    wants_one: bool = False
    checked: object = field(default=None, init=False, repr=False, compare=False)
    described: object = field(default=None, init=False, repr=False, compare=False)

    def of_step(
        self, model_name: str, model_version: str, inputs: tuple[InputForm, ...], outputs: tuple[str, ...]
    ) -> "RequestForm":
        """The form of a call of another model on behalf of a request of this form."""
        return form_of(model_name, model_version, inputs, outputs, self.priority, self.timeout_us)


_MAX_FORMS = 1024
_MAX_FORM_BYTES = 4 << 10

_forms: dict[tuple[object, ...], RequestForm] = {}


def form_of(
    model_name: str,
    model_version: str,
    inputs: tuple[InputForm, ...],
    outputs: tuple[str, ...],
    priority: int = 0,
    timeout_us: int = 0,
    wants_one: bool = False,
) -> RequestForm:
    """The form of these parts: one object for all requests, unless it is long, or has not been used for long."""
    key = model_name, model_version, inputs, outputs, priority, timeout_us, wants_one
    form = _forms.get(key)
    if form is None:
        form = RequestForm(*key)
        # About the bytes of its texts and dimensions.
        size = sum([32 + len(name) for name in (model_name, model_version, *outputs)])
        if size + sum([32 + len(name) + 8 * len(shape) for name, _, shape in inputs]) <= _MAX_FORM_BYTES:
            if len(_forms) >= _MAX_FORMS:
                _forms.clear()
            _forms[key] = form
    return form


@dataclass(slots=True, init=False)
class InferenceRequest:
    """An inference request to a model: its form, and what only this request has.

    `inputs` are those of the form, with their data. `parameters` has all request parameters except the reserved ones,
    which have fields of their own.
    """

    form: RequestForm
    id: str
    inputs: list[Tensor]
    parameters: dict[str, ParameterValue]
    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool

    def __init__(
        self,
        model_name: str,
        model_version: str = "",
        id: str = "",  # noqa: A002  the field's name
        inputs: list[Tensor] | None = None,
        outputs: tuple[str, ...] = (),
        parameters: dict[str, ParameterValue] | None = None,
        priority: int = 0,
        timeout_us: int = 0,
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
        wants_one: bool = False,
    ) -> None:
        self.inputs = inputs = [] if inputs is None else inputs
        # As `form_of`, without the call: most requests that models make are made here.
        parts = model_name, model_version, forms_of(inputs), outputs, priority, timeout_us, wants_one
        self.form = _forms.get(parts) or form_of(*parts)
        self.id = id
        self.parameters = {} if parameters is None else parameters
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end

    @classmethod
    def of(
        cls,
        form: RequestForm,
        request_id: str,
        inputs: list[Tensor],
        parameters: dict[str, ParameterValue],
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> "InferenceRequest":
        """A request of a known form, whose inputs these are."""
        self = cls.__new__(cls)
        self.form = form
        self.id = request_id
        self.inputs = inputs
        self.parameters = parameters
        self.sequence_id = sequence_id
        self.sequence_start = sequence_start
        self.sequence_end = sequence_end
        return self

    @property
    def model_name(self) -> str:
        return self.form.model_name

    @property
    def model_version(self) -> str:
        return self.form.model_version

    @property
    def outputs(self) -> tuple[str, ...]:
        return self.form.outputs

    @property
    def timeout_us(self) -> int:
        return self.form.timeout_us


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
