"""Check the answers of worker processes against the model's configuration.

| an output | by default | strict |
|---|---|---|
| its bytes do not fit its datatype and shape, or it occurs twice | refused | refused |
| another datatype or other dimensions than configured | sent unchanged, one warning | refused |

The default is Triton's behaviour: models that answer with numpy's int64 for TYPE_INT32 are common. The last valid shape
of each output is remembered, so that a similar answer takes a few comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from halimede.core.config.model_config import ModelConfig
from halimede.core.schedule.batching import check_size
from halimede.core.types import DataType, Tensor, internal
from halimede.core.types.tensor import shape_text


@dataclass(slots=True)
class _Output:
    """An output's configured datatype and dimensions, and the last datatype, shape, byte count and rows that passed."""

    datatype: DataType
    dims: tuple[int, ...]
    passed: DataType | None = None
    shape: tuple[int, ...] = ()
    size: int = 0
    rows: int | None = None


class ReplyChecker:
    """The outputs of one model version. All its instances share one, so that each warning is logged once."""

    __slots__ = ("_batches", "_is_strict", "_outputs", "_told", "warnings")

    def __init__(self, config: ModelConfig, *, is_strict: bool) -> None:
        self._batches = config.max_batch_size > 0
        self._is_strict = is_strict
        self._outputs = {
            output.name: _Output(output.data_type, output.dims if output.reshape is None else output.reshape.shape)
            for output in config.output
        }
        self._told: set[tuple[str, str]] = set()
        self.warnings: list[str] = []
        """Differences that were not refused, for the log. The caller logs and clears them."""

    def check(self, tensors: Sequence[Tensor], wanted: Sequence[str], rows: int | None) -> list[Tensor]:
        """The wanted outputs of one request's answer, in the order in which the model sent them. INTERNAL.

        `rows` are the request's; None if an answer may have any number of them.
        """
        if len(tensors) == 1:
            sole = tensors[0]
            known = self._outputs.get(sole.name)
            if (
                known is not None
                and sole.datatype is known.passed
                and sole.shape == known.shape
                and len(sole.data) == known.size
                and rows == known.rows
                and (not wanted or sole.name in wanted)
            ):
                return [sole]
        named: dict[str, Tensor] = {}
        for tensor in tensors:
            if tensor.name in named:
                raise internal(f"output '{tensor.name}': the model sent it twice in one answer")
            self._check(tensor, rows)
            named[tensor.name] = tensor
        return [tensor for name, tensor in named.items() if not wanted or name in wanted]

    def _check(self, tensor: Tensor, rows: int | None) -> None:
        name, shape = tensor.name, tensor.shape
        output = self._outputs.get(name)
        if output is None:
            raise internal(f"unexpected inference output '{name}'; the model has {', '.join(self._outputs)}")
        check_size(tensor)
        if tensor.datatype is not output.datatype:
            text = f"the model sent {tensor.datatype.name}, but the configuration says {output.datatype.config_name}"
            self._differs(name, "datatype", text)
        if not self._fits(shape, output.dims):
            shown = shape_text((-1, *output.dims) if self._batches else output.dims)
            self._differs(
                name, "shape", f"the model sent shape {shape_text(shape)}, but the configuration says {shown}"
            )
        elif rows is not None and shape[0] != rows:
            sent = f"the model sent shape {shape_text(shape)} for a request of {rows} rows"
            self._differs(name, "rows", f"{sent}; its first dimension must be {rows}")
        # Elements of BYTES are walked each time.
        if tensor.datatype is not DataType.BYTES:
            output.passed, output.shape, output.size, output.rows = tensor.datatype, shape, len(tensor.data), rows

    def _fits(self, shape: tuple[int, ...], dims: tuple[int, ...]) -> bool:
        if self._batches:
            if not shape:
                return False
            shape = shape[1:]
        return len(shape) == len(dims) and all(want in (got, -1) for want, got in zip(dims, shape, strict=True))

    def _differs(self, name: str, what: str, text: str) -> None:
        if self._is_strict:
            raise internal(f"output '{name}': {text}")
        if (name, what) not in self._told:
            self._told.add((name, what))
            self.warnings.append(f"output '{name}': {text}; it is sent unchanged")
