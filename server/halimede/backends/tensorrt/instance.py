"""Run batches on an engine: inputs to the device, the execution or its graph, outputs back."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halimede.backends.api import LostInstanceError, RunContext
from halimede.backends.tensorrt.buffers import Input, Output
from halimede.backends.tensorrt.cuda import Cuda, Graph
from halimede.backends.tensorrt.engine import Engine, Execution
from halimede.backends.tensorrt.graphs import GraphPlan, plan_graphs
from halimede.backends.tensorrt.options import ModelOptions
from halimede.backends.tensorrt.profiles import Profile, Shape, choose, explain
from halimede.core.config.model_config import ModelConfig
from halimede.core.types import ErrorCode, InferenceError, invalid

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Recorded:
    """A graph, its input shapes and its outputs' shapes by name."""

    graph: Graph
    inputs: Mapping[str, Shape]
    outputs: Mapping[str, Shape]


class TensorRtInstance:
    """A TensorInstance with a stream, buffers for the largest batch, and a context for each of its profiles.

    It runs one batch at a time, so it has one set of buffers: the copies of a batch have no execution to overlap with.
    """

    def __init__(
        self,
        engine: Engine,
        profiles: tuple[Profile, ...],
        config: ModelConfig,
        options: ModelOptions,
        cuda: Cuda,
        name: str,
    ) -> None:
        """Allocates memory for the largest batch, records the graphs and runs once, so that no batch pays for it."""
        self._engine = engine
        self._profiles = profiles
        self._cuda = cuda
        self._name = name
        self._batches = config.max_batch_size > 0
        self._graphs: dict[tuple[Shape, ...], _Recorded] = {}
        signature = engine.signature
        with ExitStack() as stack:
            self._stream = cuda.stream(options.priority)
            stack.callback(self._stream.close)
            self._done = cuda.event(spin=options.busy_wait)
            stack.callback(self._done.close)
            self._inputs = {each.name: Input(cuda, each, pinned=options.pinned_input) for each in signature.inputs}
            trt = engine.libraries.trt
            self._outputs = {
                each.name: Output(cuda, each, trt, pinned=options.pinned_output) for each in signature.outputs
            }
            for slot in self._inputs.values():
                stack.callback(slot.close)
            for output in self._outputs.values():
                stack.callback(output.close)
            self._executions: dict[int, Execution] = {}
            # Contexts end before the memory that they use, and before the engine.
            stack.callback(self._executions.clear)
            for profile in profiles:
                self._executions[profile.index] = Execution(engine, profile, options.strategy, self._stream)
            stack.callback(self._forget_graphs)
            for execution in self._executions.values():
                self._try_reserve(execution)
            self._warm_up()
            self._record_graphs(config, options.graphs)
            self._resources = stack.pop_all()

    def run(
        self, inputs: Mapping[str, NDArray[Any]], outputs: Sequence[str], context: RunContext
    ) -> dict[str, NDArray[Any]]:
        if self._cuda.lost:
            text = f"instance '{self._name}' cannot run until its process is restarted: an earlier batch failed: "
            raise LostInstanceError(ErrorCode.UNAVAILABLE, text + self._cuda.lost)
        if context.cancel_flags and context.is_cancelled():
            raise InferenceError(ErrorCode.CANCELLED, "all requests of the batch were cancelled")
        arrays = self._arrays(inputs)
        try:
            recorded = self._graphs.get(tuple([array.shape for array in arrays.values()])) if self._graphs else None
            if recorded is not None:
                return self._launch(recorded, arrays, outputs)
            return self._execute(arrays, outputs)
        except BaseException as error:
            # What has begun may still read the buffers, which the next batch overwrites.
            with suppress(InferenceError):
                self._stream.wait()
            if self._cuda.lost:
                text = error.message if isinstance(error, InferenceError) else self._cuda.lost
                raise LostInstanceError(ErrorCode.INTERNAL, text) from error
            raise

    def close(self) -> None:
        self._resources.close()

    def _arrays(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The inputs in the engine's order and with its datatypes, which those that the server makes may not have."""
        arrays: dict[str, NDArray[Any]] = {}
        for name, slot in self._inputs.items():
            array = inputs.get(name)
            if array is None:
                raise invalid(f"input '{name}' is missing: a TensorRT engine needs all of its inputs")
            dtype = slot.tensor.datatype.dtype
            arrays[name] = array if array.dtype == dtype else array.astype(dtype)
        return arrays

    def _execute(self, arrays: Mapping[str, NDArray[Any]], wanted: Sequence[str]) -> dict[str, NDArray[Any]]:
        stream = self._stream
        execution = self._executions[self._choose(arrays).index]
        for name, array in arrays.items():
            self._inputs[name].send(array, execution, stream)
        moved = [output.prepare(execution) for output in self._outputs.values()]
        if any(moved):
            # The graphs would write to memory that is freed.
            self._forget_graphs()
        try:
            execution.start(stream)
        except InferenceError:
            for output in self._outputs.values():
                output.computed_shape(execution)  # raises the cause if there was no memory for an output
            raise
        shapes = {name: self._outputs[name].computed_shape(execution) for name in wanted}
        return self._collect(shapes)

    def _launch(
        self, recorded: _Recorded, arrays: Mapping[str, NDArray[Any]], wanted: Sequence[str]
    ) -> dict[str, NDArray[Any]]:
        stream = self._stream
        rows = 0
        for name, array in arrays.items():
            slot, shape = self._inputs[name], recorded.inputs[name]
            slot.copy(array, stream)
            if array.shape != shape:
                slot.clear_after(array.nbytes, prod(shape) * array.itemsize, stream)
                rows = array.shape[0]
        recorded.graph.launch(stream)
        shapes = {name: recorded.outputs[name] for name in wanted}
        if rows:
            shapes = {name: (rows, *shape[1:]) for name, shape in shapes.items()}
        return self._collect(shapes)

    def _collect(self, shapes: Mapping[str, Shape]) -> dict[str, NDArray[Any]]:
        """Copy outputs of these shapes to the host and wait for them."""
        for name, shape in shapes.items():
            self._outputs[name].fetch(shape, self._stream)
        self._done.record(self._stream)
        self._done.wait()
        return {name: self._outputs[name].take(shape) for name, shape in shapes.items()}

    def _choose(self, arrays: Mapping[str, NDArray[Any]]) -> Profile:
        shapes = {name: array.shape for name, array in arrays.items()}
        values = {name: tuple(arrays[name].reshape(-1).tolist()) for name in self._profiles[0].values}
        profile = choose(self._profiles, shapes, values)
        if profile is None:
            text = f"the request does not fit instance '{self._name}': {explain(self._profiles, shapes, values)}"
            raise invalid(text)
        return profile

    def _try_reserve(self, execution: Execution) -> None:
        """Make room for the largest batch of the profile, so that a lack of memory fails the load and no request."""
        try:
            self._reserve(execution)
        except InferenceError as error:
            if error.code is ErrorCode.UNAVAILABLE:
                raise
            # The largest sizes of each input may not fit each other: then memory grows with the batches.
            text = "instance '%s': no memory is reserved for the largest inputs of profile %d: %s"
            log.warning(text, self._name, execution.profile.index, error.message)

    def _reserve(self, execution: Execution) -> None:
        """Make room for the largest inputs of the profile, and for the outputs that follow from them."""
        for name, slot in self._inputs.items():
            shape = execution.profile.shapes[name].maximum
            slot.reserve(shape)
            execution.shape(name, shape)
            if slot.tensor.on_host:
                slot.send(self._array(name, execution.profile.values, shape), execution, self._stream)
        for output in self._outputs.values():
            output.prepare(execution)

    def _array(self, name: str, values: Mapping[str, Any], shape: Shape) -> NDArray[Any]:
        """Values of a shape tensor: the largest of the profile, or zeros for one without values in it."""
        dtype = self._inputs[name].tensor.datatype.dtype
        return np.array(values[name].maximum, dtype).reshape(shape) if name in values else np.zeros(shape, dtype)

    def _warm_up(self) -> None:
        """Run each profile once with zeros: CUDA loads kernels when they first run."""
        for profile in self._profiles:
            arrays = {
                name: np.zeros(each.optimum, self._inputs[name].tensor.datatype.dtype)
                for name, each in profile.shapes.items()
            }
            for name, each in profile.values.items():
                arrays[name][...] = np.reshape(each.optimum, arrays[name].shape)
            try:
                self._execute(arrays, tuple(self._outputs))
            except InferenceError as error:
                if self._cuda.lost:
                    raise
                # An engine may refuse zeros, so this is no reason to refuse the engine.
                log.warning("instance '%s': its first run, with zeros, failed: %s", self._name, error.message)

    def _record_graphs(self, config: ModelConfig, asked: bool) -> None:
        signature = self._engine.signature
        if signature.has_shape_tensors or any(each.has_open_size for each in self._outputs.values()):
            if asked:
                text = "no CUDA graph is recorded: the engine has shape tensors or outputs of open size"
                log.warning("instance '%s': %s", self._name, text)
            return
        plans, note = plan_graphs(config, {each.name: each.shape for each in signature.inputs}, self._profiles)
        if note:
            log.warning("instance '%s': %s", self._name, note)
        for plan in plans:
            # Smaller graphs come first and serve their batches, so a larger one may have none left.
            if batches := [batch for batch in plan.batches() if batch not in self._graphs]:
                self._graphs.update(dict.fromkeys(batches, self._record(plan)))

    def _record(self, plan: GraphPlan) -> _Recorded:
        execution, stream = self._executions[plan.profile.index], self._stream
        for name, shape in plan.shapes.items():
            self._inputs[name].send(np.zeros(shape, self._inputs[name].tensor.datatype.dtype), execution, stream)
        for output in self._outputs.values():
            output.prepare(execution)
        # A run after a change of shapes prepares the context, which cannot be recorded.
        execution.start(stream)
        stream.wait()
        stream.begin_recording()
        try:
            execution.start(stream)
        except InferenceError:
            with suppress(InferenceError):
                stream.end_recording().close()
            raise
        graph = stream.end_recording()
        return _Recorded(graph, plan.shapes, {name: execution.output_shape(name) for name in self._outputs})

    def _forget_graphs(self) -> None:
        for graph in {id(each): each.graph for each in self._graphs.values()}.values():
            graph.close()
        self._graphs.clear()
