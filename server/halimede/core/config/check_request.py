"""Check that a request fits its model: the last check of client data before the request is queued.

A checker is made once per model version. The checks run in Triton's order, because the order decides which error a
client sees first: duplicates, requested outputs, the set of inputs, batch sizes, then each input's datatype, shape and
bytes. Three differences are intended. Required inputs are looked up by name; Triton compares counts, so an optional
input can stand in for a required one. A batch of zero rows is refused; Triton treats it as one row. Every part of a
message that comes from the client is cut, so that a message stays below 4 KiB.

Sizes that a client declares are compared, as Python integers, with the bytes that arrived; nothing is allocated from
them.
"""

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from halimede.core.config.bytes_framing import framing_problem, has_equal_lengths
from halimede.core.config.model_config import ModelConfig, ModelInput
from halimede.core.config.padding import Padding, padding_of
from halimede.core.config.shape_tensors import with_rows
from halimede.core.types import DataType, InferenceError, InferenceRequest, RequestForm, Tensor
from halimede.core.types.error import clip, internal, invalid, of_request
from halimede.core.types.request import InputForm

MAX_TENSOR_BYTES = 2**63 - 1
"""The largest addressable tensor; numpy refuses a larger shape even if a zero dimension makes it empty. Elements of
BYTES count as the references that numpy's arrays have of them."""

# Tensors with at most this many elements are addressable with every datatype.
_SAFE_ELEMENTS = MAX_TENSOR_BYTES // 8

_MAX_DIMS_TEXT = 256
_MAX_NAMES_TEXT = 1024

_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting"
    " max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)

FRAMED_AT_ONCE = 64 << 10
"""Maximum number of BYTES elements that `check` walks itself: about 5 ms of work."""

COMPARED_AT_ONCE = 1 << 20
"""The same for elements of equal length, which are compared in one vector operation."""


@dataclass(slots=True)
class Checked:
    """What the scheduler needs from a checked request: its rows (at least 1) and the bytes of its inputs.

    Similar requests may share one object, so it must not be modified.

    `compatible` is equal for requests of this model that may share a batch: the same inputs in the same shapes, except
    for ragged inputs and the padded dimensions.
    `needs_framing` is set if BYTES tensors with very many elements still have to be walked, by `check_framing`.
    """

    batch_size: int
    size_bytes: int
    compatible: Hashable = ()
    needs_framing: bool = False


@dataclass(frozen=True, slots=True)
class _Input:
    """`dims` are the client's, without the batch dimension; `reshape` is the shape that the backend gets instead."""

    name: str
    datatype: DataType
    dims: tuple[int, ...]
    reshape: tuple[int, ...] | None
    optional: bool
    ragged: bool
    padding: Padding | None
    values: bool
    """A shape tensor of a model that batches: it has the number of rows as its first value, not as a dimension."""


@dataclass(slots=True)
class _Known:
    """A form that passed: the byte counts of its inputs, the form that the backend sees, and the result."""

    checker: "RequestChecker"
    sizes: list[int]
    form: RequestForm
    checked: Checked


@dataclass(frozen=True, slots=True)
class _Reshape:
    """How an output's shape in the backend (`inner`) maps to the shape for clients (`outer`)."""

    inner: tuple[int, ...]
    outer: tuple[int, ...]


class RequestChecker:
    """The rules for requests of one model version, compiled."""

    __slots__ = (
        "_batches",
        "_input_names",
        "_inputs",
        "_loose",
        "_max_batch_size",
        "_model",
        "_output_names",
        "_output_reshapes",
        "_remembers",
        "_required",
        "_reshapes",
        "_uniform",
        "_usual_outputs",
    )

    def __init__(self, config: ModelConfig) -> None:
        """`config` must be complete and valid."""
        self._model = clip(config.name)
        self._max_batch_size = config.max_batch_size
        self._batches = config.max_batch_size > 0
        paddings = {padding.input: padding for padding in padding_of(config)}
        self._inputs = {
            tensor.name: _compile(tensor, paddings.get(tensor.name), self._batches) for tensor in config.input
        }
        has_values = any(each.values for each in self._inputs.values())
        self._loose = has_values or any(each.ragged or each.padding is not None for each in self._inputs.values())
        self._input_names = tuple(self._inputs)
        self._required = frozenset(tensor.name for tensor in config.input if not tensor.optional)
        # Requests can differ only in their number of rows: any two of them may share a batch.
        self._uniform = not has_values and all(not tensor.optional and -1 not in tensor.dims for tensor in config.input)
        self._reshapes = any(tensor.reshape is not None for tensor in config.input)
        # BYTES and shape tensors have elements to check each time.
        has_texts = any(each.data_type is DataType.BYTES for each in config.input)
        self._remembers = not (has_texts or has_values)
        self._output_names = frozenset(tensor.name for tensor in config.output)
        self._usual_outputs = frozenset(
            {(), tuple(tensor.name for tensor in config.output), *((tensor.name,) for tensor in config.output)}
        )
        self._output_reshapes = {
            tensor.name: _Reshape(tensor.reshape.shape, tensor.dims)
            for tensor in config.output
            if tensor.reshape is not None
        }

    def check(self, request: InferenceRequest) -> Checked:
        """Accept the request and give its inputs the shapes that the backend sees, or raise INVALID_ARG."""
        known = request.form.checked
        if not isinstance(known, _Known) or known.checker is not self:
            return self._check(request)
        for tensor, size in zip(request.inputs, known.sizes):  # noqa: B905  as many, and the argument takes as long
            if len(tensor.data) != size:
                return self._check(request)  # This finds the error.
        if self._reshapes:
            _reshape(request, known.form)
        return known.checked

    @property
    def reshapes_outputs(self) -> bool:
        """Whether `reshape_outputs` has any effect."""
        return bool(self._output_reshapes)

    def reshape_outputs(self, outputs: list[Tensor], batch_size: int) -> None:
        """Give the backend's outputs the shapes that clients see according to the configuration.

        INTERNAL if an output with a `reshape` does not have the configured shape.
        """
        if not self._output_reshapes:
            return
        for tensor in outputs:
            reshape = self._output_reshapes.get(tensor.name)
            if reshape is None:
                continue
            inner = (batch_size, *reshape.inner) if self._batches else reshape.inner
            outer = (batch_size, *reshape.outer) if self._batches else reshape.outer
            if len(inner) != len(tensor.shape) or any(
                want not in (got, -1) for want, got in zip(inner, tensor.shape, strict=True)
            ):
                raise internal(
                    f"unexpected shape for output '{clip(tensor.name)}' for model '{self._model}'. Expected "
                    f"{_dims_text(inner)}, got {_dims_text(tensor.shape)}."
                )
            tensor.shape = _reshaped(inner, tensor.shape, outer)

    def _check(self, request: InferenceRequest) -> Checked:
        by_name = {tensor.name: tensor for tensor in request.inputs}
        if len(by_name) != len(request.inputs):
            name = _first_duplicate(tensor.name for tensor in request.inputs)
            raise _invalid(request.id, f"input '{clip(name)}' already exists in request")
        if request.outputs not in self._usual_outputs:
            self._check_outputs(request)
        self._check_input_names(request, by_name.keys())
        rows = self._batch_size(request)
        size = 0
        needs_framing = False
        for tensor in request.inputs:
            # Refused here and not with the names, because Triton compares the batch sizes first.
            expected = self._inputs.get(tensor.name)
            if expected is None:
                raise self._unknown(tensor)
            needs_framing |= self._check_input(request, tensor, expected)
            size += len(tensor.data)
        if rows < 1:
            raise _invalid(request.id, f"inference request batch-size must be >= 1 for '{self._model}'")
        # After the last check, so that a refused request is left unchanged.
        compatible = () if self._uniform or not self._batches else self._shapes(by_name)
        form = request.form
        if self._reshapes:
            _reshape(request, replace(form, inputs=tuple([self._reshaped_input(each) for each in form.inputs])))
        checked = Checked(rows, size, compatible, needs_framing)
        if self._remembers:
            sizes = [len(tensor.data) for tensor in request.inputs]
            form.checked = _Known(self, sizes, request.form, checked)
        return checked

    def check_declared(self, request_id: str, tensor: Tensor) -> None:
        """Check what a request says of an input of which the data is not decoded yet, or raise INVALID_ARG."""
        expected = self._inputs.get(tensor.name)
        if expected is None:
            raise self._unknown(tensor)
        if self._batches and not expected.values and tensor.shape and tensor.shape[0] > self._max_batch_size:
            raise self._too_many_rows(request_id)
        self._check_shape(request_id, tensor, expected)

    def check_framing(self, request: InferenceRequest) -> None:
        """Check the elements that `check` skipped, or raise INVALID_ARG. Slow; may run on any thread."""
        for tensor in request.inputs:
            if tensor.datatype is DataType.BYTES and prod(tensor.shape) > FRAMED_AT_ONCE:
                problem = framing_problem(tensor.data, prod(tensor.shape), clip(tensor.name), self._model)
                if problem is not None:
                    raise _invalid(request.id, problem)

    def _check_outputs(self, request: InferenceRequest) -> None:
        if len(set(request.outputs)) != len(request.outputs):
            name = _first_duplicate(request.outputs)
            raise _invalid(request.id, f"output '{clip(name)}' already exists in request")
        for name in request.outputs:
            if name not in self._output_names:
                raise invalid(f"unexpected inference output '{clip(name)}' for model '{self._model}'")

    def _check_input_names(self, request: InferenceRequest, given: Collection[str]) -> None:
        most, least, got = len(self._inputs), len(self._required), len(given)
        if least <= got <= most and self._required.issubset(given):
            return
        if least <= got <= most and any(name not in self._inputs for name in given):
            return  # an unknown name has its own error
        expected = f"{most}" if least == most else f"number of inputs between {least} and {most}"
        noun = " inputs" if least == most else ""
        missing = [name for name in self._input_names if name in self._required and name not in given]
        # If nothing is missing, Triton prints a closing bracket without an opening one, and clients compare the text.
        missing_text = f"[{_names_text(missing)}]" if missing else "]"
        raise _invalid(
            request.id,
            f"expected {expected}{noun} but got {got} inputs for model '{self._model}'. Got input(s) "
            f"[{_names_text(tensor.name for tensor in request.inputs)}], but missing required input(s) {missing_text}. "
            "Please provide all required input(s).",
        )

    def _batch_size(self, request: InferenceRequest) -> int:
        """The number of rows of the request, 1 if the model does not batch."""
        if not self._batches:
            return 1
        rows = -1
        for tensor in request.inputs:
            shape = tensor.shape
            if not shape:
                raise _invalid(
                    request.id,
                    f"input '{clip(tensor.name)}' has no shape but model requires batch dimension for '{self._model}'",
                )
            if shape[0] < 0:
                raise self._unspecified(request.id, tensor)
            if (expected := self._inputs.get(tensor.name)) is not None and expected.values:
                continue
            if rows == -1:
                rows = shape[0]
            elif shape[0] != rows:
                raise _invalid(
                    request.id,
                    f"input '{clip(tensor.name)}' batch size does not match other inputs for '{self._model}'",
                )
        if rows > self._max_batch_size:
            raise self._too_many_rows(request.id)
        # All inputs are optional and none was sent: the request still runs, with one row.
        return rows if rows >= 0 else 1

    def _too_many_rows(self, request_id: str) -> InferenceError:
        text = f"inference request batch-size must be <= {self._max_batch_size} for '{self._model}'"
        return _invalid(request_id, text)

    def _unknown(self, tensor: Tensor) -> InferenceError:
        return invalid(f"unexpected inference input '{clip(tensor.name)}' for model '{self._model}'")

    def _check_shape(self, request_id: str, tensor: Tensor, expected: _Input) -> None:
        """Raise for an input whose datatype or shape does not fit."""
        datatype = tensor.datatype
        if datatype is not expected.datatype:
            got = "<invalid>" if datatype is DataType.INVALID else datatype.name
            raise _invalid(
                request_id,
                f"inference input '{clip(tensor.name)}' data-type is '{got}', but model '{self._model}' expects "
                f"'{expected.datatype.name}'",
            )
        shape = tensor.shape
        if shape and min(shape) < 0:
            raise self._unspecified(request_id, tensor)
        dims = shape[1:] if self._batches and not expected.values else shape
        if dims != expected.dims and not _fits(dims, expected.dims):
            wanted = (-1, *expected.dims) if self._batches and not expected.values else expected.dims
            raise _invalid(
                request_id,
                f"unexpected shape for input '{clip(tensor.name)}' for model '{self._model}'. Expected "
                f"{_dims_text(wanted)}, got {_dims_text(shape)}.{_BATCH_NOTE if self._batches else ''}",
            )
        padding = expected.padding
        if padding is not None and padding.buckets and shape[padding.axis] > padding.buckets[-1]:
            raise _invalid(
                request_id,
                f"input '{clip(tensor.name)}' for model '{self._model}' has length {shape[padding.axis]} in dimension "
                f"{padding.axis}, its padding takes at most {padding.buckets[-1]}",
            )

    def _check_input(self, request: InferenceRequest, tensor: Tensor, expected: _Input) -> bool:
        """Raise for an input that does not fit; return whether its framing is left to `check_framing`."""
        self._check_shape(request.id, tensor, expected)
        datatype, shape = tensor.datatype, tensor.shape
        elements = prod(shape)
        # The byte count of an empty tensor does not limit its other dimensions, so check them here.
        if not 0 < elements <= _SAFE_ELEMENTS:
            if prod(dim or 1 for dim in shape) * datatype.dtype.itemsize > MAX_TENSOR_BYTES:
                raise _invalid(
                    request.id,
                    f"input '{clip(tensor.name)}' has too many elements for model '{self._model}', got shape "
                    f"{_dims_text(shape)}, a tensor has at most {MAX_TENSOR_BYTES} bytes",
                )
            if self._batches and shape[0] == 0 and not expected.values:
                # As in Triton, which treats a batch of zero rows as one row here; the batch size is refused later.
                elements = prod(shape[1:])
        if datatype is DataType.BYTES:
            if elements > FRAMED_AT_ONCE and len(tensor.data) >= 4 * elements:
                return elements > COMPARED_AT_ONCE or not has_equal_lengths(tensor.data, elements)
            if problem := framing_problem(tensor.data, elements, clip(tensor.name), self._model):
                raise _invalid(request.id, problem)
        elif elements * datatype.itemsize != len(tensor.data):
            raise _invalid(
                request.id,
                f"input byte size mismatch for input '{clip(tensor.name)}' for model '{self._model}'. Expected "
                f"{elements * datatype.itemsize}, got {len(tensor.data)}",
            )
        return False

    def _unspecified(self, request_id: str, tensor: Tensor) -> InferenceError:
        return _invalid(
            request_id,
            f"All input dimensions should be specified for input '{clip(tensor.name)}' for model '{self._model}', got "
            f"{_dims_text(tensor.shape)}",
        )

    def _shapes(self, by_name: dict[str, Tensor]) -> tuple[Hashable, ...]:
        """The shape of every input without the rows, in the configuration's order; None for an omitted input.

        A ragged input has no shape in it, a padded dimension is -1, and of a shape tensor the values count too.
        """
        if self._loose:
            return tuple(
                [_fixed(each, by_name[name]) if name in by_name else None for name, each in self._inputs.items()]
            )
        return tuple([by_name[name].shape[1:] if name in by_name else None for name in self._input_names])

    def _reshaped_input(self, given: InputForm) -> InputForm:
        name, datatype, shape = given
        expected = self._inputs[name]
        if expected.reshape is None:
            return given
        rows = 1 if self._batches and not expected.values else 0
        return name, datatype, shape[:rows] + _reshaped(expected.dims, shape[rows:], expected.reshape)


def _reshape(request: InferenceRequest, form: RequestForm) -> None:
    """Give a request the form that the backend sees."""
    request.form = form
    for tensor, (_, _, shape) in zip(request.inputs, form.inputs, strict=True):
        tensor.shape = shape


def _compile(tensor: ModelInput, padding: Padding | None, batches: bool) -> _Input:
    reshape = tensor.reshape.shape if tensor.reshape is not None else None
    ragged = tensor.allow_ragged_batch
    values = batches and tensor.is_shape_tensor
    dims = with_rows(tensor.dims) if values else tensor.dims
    return _Input(tensor.name, tensor.data_type, dims, reshape, tensor.optional, ragged, padding, values)


def _fixed(expected: _Input, tensor: Tensor) -> Hashable:
    """What the requests of a batch must have in common: dimensions, or values after the number of rows."""
    shape = tensor.shape
    if expected.ragged:
        return ()
    if expected.values:
        return bytes(memoryview(tensor.data)[expected.datatype.itemsize :])
    if expected.padding is None:
        return shape[1:]
    axis = expected.padding.axis
    return (*shape[1:axis], -1, *shape[axis + 1 :])


def too_many_elements(model_name: str, request_id: str, tensor: Tensor) -> InferenceError:
    """The error for an input with more elements than its shape gives, however many there are."""
    elements, name, model = prod(tensor.shape), clip(tensor.name), clip(model_name)
    if tensor.datatype is DataType.BYTES:
        text = f"unexpected number of string elements {elements + 1} for inference input '{name}' for model '{model}'"
        return _invalid(request_id, f"{text}, expecting {elements}")
    text = f"input byte size mismatch for input '{name}' for model '{model}'. Expected"
    return _invalid(request_id, f"{text} {elements * tensor.datatype.itemsize}, got more")


def _invalid(request_id: str, message: str) -> InferenceError:
    return invalid(of_request(request_id, message))


def _fits(dims: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Whether these dims match `wanted`, in which -1 accepts any size."""
    return len(dims) == len(wanted) and all(want in (got, -1) for got, want in zip(dims, wanted, strict=True))


def _reshaped(pattern: Sequence[int], shape: Sequence[int], into: Sequence[int]) -> tuple[int, ...]:
    """`into` with its variable dimensions replaced, in order, by the sizes that `shape` has where `pattern` has -1."""
    variable = iter([got for want, got in zip(pattern, shape, strict=True) if want == -1])
    return tuple(next(variable) if dim == -1 else dim for dim in into)


def _first_duplicate(names: Iterable[str]) -> str:
    seen: set[str] = set()
    return next(name for name in names if name in seen or seen.add(name))  # type: ignore[func-returns-value]


def _dims_text(dims: Sequence[int]) -> str:
    # A dimension takes two characters or more, so further dimensions cannot be shown.
    text = ",".join(str(dim) for dim in dims[: _MAX_DIMS_TEXT // 2 + 1])
    return f"[{text}]" if len(text) <= _MAX_DIMS_TEXT else f"[{text[:_MAX_DIMS_TEXT]}...]"


def _names_text(names: Iterable[str]) -> str:
    """The names, quoted, separated by commas; `...` if the list was cut."""
    shown: list[str] = []
    size = 0
    for name in names:
        quoted = f"'{clip(name)}'"
        size += len(quoted.encode("utf-8", "replace")) + 1
        if size > _MAX_NAMES_TEXT:
            shown.append("...")
            break
        shown.append(quoted)
    return ",".join(shown)
