"""Run batches on a program, once before the first request too."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from halimede.backends.api import LostInstanceError, RefusedRequestsError, RunContext
from halimede.backends.python.utils.errors import is_device_lost
from halimede.backends.pytorch.loading import Bound
from halimede.backends.pytorch.options import TorchOptions
from halimede.backends.pytorch.results import pick
from halimede.backends.pytorch.runtime import runtime
from halimede.backends.pytorch.script import cause_of
from halimede.backends.pytorch.transfer import Transfer
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.sequence_tensors import model_outputs
from halimede.core.types import DataType, ErrorCode, InferenceError
from halimede.core.types.error import clip, internal, invalid

log = logging.getLogger(__name__)

MOST_CAUSE = 1024
"""Maximum characters of PyTorch's error text in an answer."""
OUT_OF_MEMORY = ("cuda out of memory", "cuda error: out of memory", "status_alloc_failed")
"""What the texts of errors have that are about a device's memory, the last in those of cuBLAS and cuDNN."""


class TorchInstance:
    """A TensorInstance. Between `create_instance` and `close` its thread is in inference mode."""

    def __init__(self, name: str, config: ModelConfig, bound: Bound, options: TorchOptions) -> None:
        torch = runtime()
        self._name = name
        self._model = config.name
        self._program: Any = bound.program
        self._positions = bound.outputs
        self._datatypes = {each.name: each.data_type for each in model_outputs(config)}
        self._batches = config.max_batch_size > 0
        self._transfer = Transfer(config, bound.device, is_writing=bound.program.is_writing, made=bound.made)
        self._is_cleaning = options.cache_cleaning and torch.cuda.is_available()
        # Entering it for each batch would take longer than a small model.
        self._mode = torch.inference_mode() if options.inference_mode else torch.no_grad()
        self._mode.__enter__()

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        try:
            found = self._compute(inputs, outputs, context)
            if self._is_cleaning:
                runtime().cuda.empty_cache()
            return found
        except (InferenceError, RefusedRequestsError):
            raise
        except Exception as error:
            log.exception("instance '%s' failed", self._name, extra={"model": self._model})
            raise self._failure(error) from error

    def run_zeros(self, inputs: Mapping[str, NDArray[Any]], rows: int) -> None:
        """Run a batch of zeros of that many rows, so that PyTorch has compiled what it compiles at first runs.

        Any exception: the model may not take zeros. INVALID_ARG if the outputs are not those of the configuration.
        """
        # A run changes neither random numbers nor gradients that the model computes later.
        torch = runtime()
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        with torch.random.fork_rng(devices=list(devices)):
            found = self._compute(inputs, list(self._positions), RunContext([""], [rows], []))
        problems = [problem for name, array in found.items() if (problem := self._problem(name, array, rows))]
        if problems:
            raise invalid(f"model '{clip(self._model)}': {'; '.join(problems)}")

    def close(self) -> None:
        self._program = None
        self._mode.__exit__(None, None, None)

    def _compute(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        values = self._transfer.values(inputs, context)
        return self._transfer.arrays(pick(self._program.call(values), self._positions, outputs))

    def _problem(self, name: str, array: NDArray[Any], rows: int) -> str | None:
        """Why every batch would fail because of this output."""
        datatype = self._datatypes[name]
        if array.dtype != datatype.dtype and datatype is not DataType.BYTES:
            return (
                f"configuration expects datatype {datatype.config_name} for output '{clip(name)}', model provides "
                f"{array.dtype}"
            )
        if self._batches and array.shape[:1] != (rows,):
            shape = list(array.shape)
            return (
                f"output '{clip(name)}' has shape {shape} for a batch of {rows} rows; its first dimension must be the "
                "batch, or max_batch_size 0"
            )
        return None

    def _failure(self, error: Exception) -> InferenceError:
        cause = cause_of(error)
        cause = cause if len(cause) <= MOST_CAUSE else cause[:MOST_CAUSE] + "..."
        text = f"Failed to process the request(s) for model instance '{self._name}', message: {cause}"
        if is_device_lost(error):
            return LostInstanceError(ErrorCode.INTERNAL, text)
        if is_out_of_memory(error):
            # Memory that PyTorch keeps for later batches; others may need it, and this instance in larger pieces.
            runtime().cuda.empty_cache()
        return internal(text)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the device had no memory. TorchScript and libraries raise other classes than PyTorch's own."""
    text = str(error).lower()
    return isinstance(error, runtime().OutOfMemoryError) or any(part in text for part in OUT_OF_MEMORY)
