"""The rows of a batch with sequence slots: each request with its controls and state, and the null rows between them.

The state of a sequence slot is replaced at START, and removed after END or when the scheduler says that the sequence
has ended (`forget`), so there is one at most for each sequence slot. A row collects the new state that the model's
responses carry. The sequence slot gets it when the execution of the row ends without an error; a response that is sent
even later changes the state at once.

The bytes of each state are taken from the bound of the server before the state is kept, and are given back when it is
replaced or dropped. If they are refused, the sequence ends: the request gets an error, and so do requests without
START that are executed before the scheduler knows.

A null row has inputs as large as those of a request of its batch, so one request in the last of many sequence slots
makes a batch of many times its size. Null rows of more than `MAX_UNCOUNTED_BYTES` must fit into the bound of the
states, too.

Standard library and numpy only, for any CPython from 3.10 on.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

import numpy as np

from halimede.core.sequences.plan import Control, ControlKind, CorrelationControl, SequencePlan, State
from halimede.core.types import Buffer, DataType, ErrorCode, InferenceError, InferenceRequest, Tensor
from halimede.core.types.error import EndedSequenceError, clip, internal, invalid, unavailable
from halimede.core.types.tensor import shape_text

NULL_KEY = -1
"""The key of a null row, which no request has."""

MAX_UNCOUNTED_BYTES = 64 << 20
"""Maximum bytes of the null rows of a request that need not fit into the bound of the states."""

_UNSIGNED = {
    DataType.UINT64: (8, (1 << 64) - 1),
    DataType.INT64: (8, (1 << 64) - 1),
    DataType.UINT32: (4, (1 << 32) - 1),
    DataType.INT32: (4, (1 << 32) - 1),
}


class Item(Protocol):
    """A request of a batch. Members are properties, because these may also be attributes that nothing may set."""

    @property
    def key(self) -> int: ...
    @property
    def request(self) -> InferenceRequest: ...
    @property
    def rows(self) -> int: ...
    @property
    def sequence_slot(self) -> int: ...


class StateBytes(Protocol):
    """The bound of the states that this process may keep. Thread-safe."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Guards the states that are kept. Not held during the calls of the methods."""

    def try_take(self, size_bytes: int) -> bool:
        """Take bytes; False, and none is taken, if they would exceed the bound."""

    def give_back(self, size_bytes: int) -> None:
        """Return bytes that were taken. Does not wait."""


class Memory:
    """The state of one sequence: a tensor of each input name that the model has returned a state for.

    `is_dropped`: the sequence has ended, and nothing is stored any more. Changed with the lock of `StateBytes`.
    """

    __slots__ = ("is_dropped", "tensors")

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.is_dropped = False


class Row:
    """One row of a batch as the model sees it: a request with more inputs, or a null row (`item` None)."""

    __slots__ = ("_ended", "_failed", "_new", "item", "key", "memory", "request", "rows", "sequence_slot", "sequences")

    def __init__(
        self, sequences: "Sequences", item: Item | None, sequence_slot: int, request: InferenceRequest, memory: Memory
    ) -> None:
        self.sequences = sequences
        self.item = item
        self.key = NULL_KEY if item is None else item.key
        self.sequence_slot = sequence_slot
        self.rows = 1 if item is None else item.rows
        self.request = request
        self.memory = memory
        self._new: dict[str, tuple[Tensor, int]] = {}
        """By input name: the new state, and the bytes that were taken for it."""
        self._ended = self._failed = False

    @property
    def cancelled(self) -> bool:
        """Nobody needs the result of a null row. Items of a python model have no flag: its host has them."""
        return self.item is None or bool(getattr(self.item, "cancelled", False))

    def take(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of a response that the client gets; new state among them is kept. INTERNAL if it is invalid."""
        sequences = self.sequences
        others: list[Tensor] = []
        for tensor in outputs:
            state = sequences.by_output.get(tensor.name)
            if state is None:
                others.append(tensor)
                continue
            if self.item is not None and not self._failed:
                self._drop_new(state.input_name)
                self._new[state.input_name] = sequences.kept(state, tensor, self)
            if sequences.is_wanted(tensor.name, self.item):
                others.append(tensor)
        if self._ended and not self._failed:
            self._store()
        return others

    def fail(self) -> None:
        """The request gets an error: its state stays as it is."""
        self._failed = True
        for name in [*self._new]:
            self._drop_new(name)

    def end(self, *, is_last: bool) -> None:
        """The execution of the row is over. `is_last`: the request is not executed again."""
        self._ended = True
        self._store()
        if is_last and self.request.sequence_end:
            self.sequences.forget(self.sequence_slot, self.memory)

    def _store(self) -> None:
        # Not a loop over the items: another thread may `take` a response meanwhile.
        while self._new:
            name, (tensor, taken_bytes) = self._new.popitem()
            self.sequences.store(name, tensor, taken_bytes, self.memory)

    def _drop_new(self, name: str) -> None:
        """Drop a new state that the sequence slot does not get."""
        new = self._new.pop(name, None)
        if new is not None and new[1]:
            self.sequences.states.give_back(new[1])


class Sequences:
    """The sequences of one instance. Not thread-safe, except that rows may `take` responses, and sequence slots whose
    requests do not execute be forgotten, on any thread."""

    def __init__(
        self, plan: SequencePlan, model: str, initial: Mapping[str, Tensor], states: StateBytes, *, copies: bool
    ) -> None:
        """`initial` are the states of a new sequence by input name, which are not counted in `states`. `copies`: the
        model may write to its inputs, and to outputs that it has returned."""
        self.plan = plan
        self.states = states
        self.by_output = {state.output_name: state for state in plan.states}
        self._by_input = {state.input_name: state for state in plan.states}
        self._model = model
        self._initial = initial
        self._copies = copies
        self._memories: dict[int, Memory] = {}
        self._ended: dict[int, EndedSequenceError] = {}
        """By sequence slot, the error of a sequence whose state exceeded the bound. The scheduler may not know yet:
        only the end of a batch tells it, and not a response of its own."""
        self._controls = {
            (start, end): tuple(_value(control, start, end) for control in plan.controls)
            for start in (False, True)
            for end in (False, True)
        }
        """The control inputs of a request, except its correlation id, by START and END."""

    def __repr__(self) -> str:
        return f"<Sequences of {self._model} sequence_slots={len(self._memories)}>"

    def check(self, items: Sequence[Item]) -> dict[int, InferenceError]:
        """The errors of requests that cannot be executed, by position."""
        control = self.plan.correlation
        takes_text = control is None or control.datatype is DataType.BYTES
        if takes_text and not self._ended and not self.plan.fills_rows:
            return {}
        errors: dict[int, InferenceError] = {}
        for at, item in enumerate(items):
            request = item.request
            if control is not None and not takes_text and isinstance(request.sequence_id, str):
                errors[at] = self._unfit(control)
            elif item.sequence_slot in self._ended and not request.sequence_start:
                errors[at] = self._ended[item.sequence_slot]
            elif self.plan.fills_rows and (error := self._null_rows_error(item)) is not None:
                errors[at] = error
            if at in errors and (request.sequence_start or request.sequence_end):
                self.forget(item.sequence_slot)
        return errors

    def _null_rows_error(self, item: Item) -> InferenceError | None:
        """The error of a request for which the null rows before its sequence slot would be too large."""
        size = item.sequence_slot * sum(len(tensor.data) for tensor in item.request.inputs)
        if size <= MAX_UNCOUNTED_BYTES:
            return None
        if self.states.try_take(size):
            self.states.give_back(size)
            return None
        return unavailable(
            f"inference request of sequence {clip(str(item.request.sequence_id))} to model '{clip(self._model)}': the "
            f"{item.sequence_slot} null rows before it, which are as large, have {size} bytes and would exceed the "
            "memory that the server has for the states of sequences"
        )

    def _unfit(self, control: CorrelationControl) -> InferenceError:
        """The error of a text as the correlation id of a model that takes numbers."""
        return invalid(
            f"sequence batching control '{clip(control.name)}' data-type is 'BYTES', but model '{clip(self._model)}' "
            f"expects '{control.datatype.name}'"
        )

    def begin(self, items: Sequence[Item]) -> list[Row]:
        """The rows of these requests, which are not empty and, if null rows are needed, in the order of their sequence
        slots."""
        rows: list[Row] = []
        for item in items:
            if item.request.sequence_start or item.sequence_slot not in self._memories:
                self.forget(item.sequence_slot)
                self._memories[item.sequence_slot] = Memory()
            memory = self._memories[item.sequence_slot]
            rows.append(Row(self, item, item.sequence_slot, self._extended(item.request, memory), memory))
        if not self.plan.fills_rows or rows[-1].sequence_slot == len(rows) - 1:
            return rows
        taken = {row.sequence_slot: row for row in rows}
        return [taken.get(at) or self._null_row(at, items[0], rows[0]) for at in range(rows[-1].sequence_slot + 1)]

    def shapes(self, item: Item) -> tuple[tuple[int, ...], ...]:
        """The shapes of the states that the request would get now."""
        memory = self._memories.get(item.sequence_slot)
        if memory is None or item.request.sequence_start:
            return tuple(self._initial[state.input_name].shape for state in self.plan.states)
        return tuple(self._state_of(state, memory).shape for state in self.plan.states)

    def is_wanted(self, output: str, item: Item | None) -> bool:
        """Whether the client gets this output of a state."""
        if item is None or output not in self.plan.outputs:
            return False
        return not item.request.outputs or output in item.request.outputs

    def kept(self, state: State, tensor: Tensor, row: Row) -> tuple[Tensor, int]:
        """A new state as it is kept, checked, and the bytes that were taken for it. Its memory is not the model's,
        except if the model does not use it. UNAVAILABLE, and the sequence has ended, if the bytes are refused."""
        memory = row.memory
        if tensor.datatype is not state.datatype:
            raise internal(
                f"state output '{clip(state.output_name)}': the model returned {tensor.datatype.name}, but the "
                f"configuration says {state.datatype.config_name}"
            )
        if not state.fits(tensor.shape):
            raise internal(
                f"state output '{clip(state.output_name)}': the model returned shape {shape_text(tensor.shape)}, but "
                f"the configuration says {shape_text(state.dims)}"
            )
        if state.has_one_buffer and tensor.shape != (shape := self._state_of(state, memory).shape):
            raise internal(
                f"state output '{clip(state.output_name)}': the model returned shape {shape_text(tensor.shape)}, but "
                f"'use_same_buffer_for_input_output' keeps the state in a buffer of shape {shape_text(shape)}"
            )
        # What has a buffer is copied into it as soon as the execution ends.
        is_kept = state.has_one_buffer and state.datatype is not DataType.BYTES
        size = 0 if is_kept and state.input_name in memory.tensors else len(tensor.data)
        # Null rows get states of the same shape. They are not kept, but their batch must fit too.
        null_size = size * row.sequence_slot if self.plan.fills_rows and -1 in state.dims else 0
        if not self.states.try_take(size + null_size):
            raise self._end(row, size)
        if null_size:
            self.states.give_back(null_size)
        is_own = not self._copies and (is_kept or _is_whole(tensor.data))
        data = tensor.data if is_own else bytes(tensor.data)
        return Tensor(state.input_name, tensor.datatype, tensor.shape, data), size

    def store(self, name: str, tensor: Tensor, taken_bytes: int, memory: Memory) -> None:
        """Replace a state of a sequence. `taken_bytes` were taken for the new one."""
        with self.states.lock:
            unused = taken_bytes if memory.is_dropped else self._replace(name, tensor, memory)
        if unused:
            self.states.give_back(unused)

    def _replace(self, name: str, tensor: Tensor, memory: Memory) -> int:
        """Returns the bytes of the state before, if it has been replaced by another tensor."""
        known = memory.tensors.get(name)
        if not self._by_input[name].has_one_buffer or tensor.datatype is DataType.BYTES:
            memory.tensors[name] = tensor
            return 0 if known is None else len(known.data)
        if known is None:
            # The model gets a view that it cannot write to.
            buffer = memoryview(bytearray(tensor.data))
            memory.tensors[name] = Tensor(name, tensor.datatype, tensor.shape, buffer.toreadonly())
        else:
            np.frombuffer(_writable(known.data), np.uint8)[:] = np.frombuffer(tensor.data, np.uint8)
        return 0

    def forget(self, sequence_slot: int, memory: Memory | None = None) -> None:
        """The sequence of the sequence slot has ended. With `memory`, nothing happens if another sequence has the
        sequence slot."""
        known = self._memories.get(sequence_slot)
        if known is None or (memory is not None and known is not memory):
            return
        self._ended.pop(sequence_slot, None)
        self._memories.pop(sequence_slot, None)
        self._drop(known)

    def close(self) -> None:
        """The instance has ended: drop all states."""
        for sequence_slot in [*self._memories]:
            self.forget(sequence_slot)

    def _end(self, row: Row, size_bytes: int) -> EndedSequenceError:
        """End the sequence of a row, whose new state is refused."""
        identity = "" if self.plan.is_iterative else f" {clip(str(row.request.sequence_id))}"
        error = EndedSequenceError(
            ErrorCode.UNAVAILABLE,
            f"sequence{identity} for model '{clip(self._model)}' has ended: its new state of {size_bytes} bytes would "
            "exceed the memory that the server has for the states of sequences; begin the sequence again with the "
            "START flag",
        )
        if self._memories.get(row.sequence_slot) is row.memory:
            self._ended[row.sequence_slot] = error
        self._drop(row.memory)
        return error

    def _drop(self, memory: Memory) -> None:
        with self.states.lock:
            memory.is_dropped = True
            size = sum(len(tensor.data) for tensor in memory.tensors.values())
            memory.tensors.clear()
        if size:
            self.states.give_back(size)

    def _state_of(self, state: State, memory: Memory) -> Tensor:
        return memory.tensors.get(state.input_name) or self._initial[state.input_name]

    def _extended(self, request: InferenceRequest, memory: Memory) -> InferenceRequest:
        """The request with controls and states as inputs. If it names outputs, the hidden ones are among them."""
        start, end, identity = request.sequence_start, request.sequence_end, request.sequence_id
        inputs = [*request.inputs, *self._controls[start, end]]
        self._add_correlation(inputs, identity)
        inputs += [self._state_of(state, memory) for state in self.plan.states]
        form = request.form
        if form.outputs and self.by_output:
            form = replace(form, outputs=tuple(dict.fromkeys((*form.outputs, *self.by_output))))
        return InferenceRequest.of(form, request.id, inputs, request.parameters, identity, start, end)

    def _null_row(self, sequence_slot: int, source: Item, row: Row) -> Row:
        """A row without a request: the inputs of another one, all controls false, and states of the same shapes."""
        inputs = list(source.request.inputs)
        if self._copies:
            inputs = [replace(tensor, data=bytearray(tensor.data)) for tensor in inputs]
        inputs += [control.false for control in self.plan.controls]
        self._add_correlation(inputs, 0)
        for state in self.plan.states:
            inputs.append(state.zeros(self._state_of(state, row.memory).shape))
        request = InferenceRequest(source.request.model_name, inputs=inputs, outputs=row.request.outputs)
        return Row(self, None, sequence_slot, request, Memory())

    def _add_correlation(self, inputs: list[Tensor], identity: int | str) -> None:
        control = self.plan.correlation
        if control is None:
            return
        if control.datatype is DataType.BYTES:
            # A number is sent as decimal text. No identity is an empty text.
            text = (str(identity) if identity else "").encode()
            data = len(text).to_bytes(4, "little") + text
        else:
            # As in Triton, the lowest bytes of a number that is larger than the datatype.
            size, mask = _UNSIGNED[control.datatype]
            data = (int(identity) & mask).to_bytes(size, "little")
        inputs.append(Tensor(control.name, control.datatype, control.shape, data))


def _value(control: Control, start: bool, end: bool) -> Tensor:
    """The control's tensor for a request."""
    flags = {
        ControlKind.CONTROL_SEQUENCE_READY: True,
        ControlKind.CONTROL_SEQUENCE_START: start,
        ControlKind.CONTROL_SEQUENCE_END: end,
    }
    return control.true if flags[control.kind] else control.false


def groups_of_equal_state(sequences: Sequences, items: Sequence[Item]) -> Collection[Sequence[int]]:
    """The positions of requests that can share arrays, because their states have the same shapes."""
    groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for at, item in enumerate(items):
        groups.setdefault(sequences.shapes(item), []).append(at)
    return groups.values()


def initial_states(plan: SequencePlan, files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """The states of a new sequence by input name. `files` has the contents of data files by input name."""
    states = {}
    for state in plan.states:
        data = files.get(state.input_name)
        zeros = state.zeros(state.initial_shape)
        states[state.input_name] = zeros if data is None else replace(zeros, data=data)
    return states


def _is_whole(data: Buffer) -> bool:
    """Whether the bytes are all of a memory that belongs to their array alone: keeping them keeps nothing else alive.

    A capsule is how a runtime gives away the memory of one output.
    """
    if isinstance(data, bytes):
        return True
    owner = data.obj if isinstance(data, memoryview) else None
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if not isinstance(owner, np.ndarray) or owner.nbytes != len(data):
        return False
    return owner.flags.owndata or type(owner.base).__name__ == "PyCapsule"


def _writable(data: Buffer) -> bytearray:
    """The buffer of a state that has one: only this module writes to it."""
    buffer = data.obj if isinstance(data, memoryview) else data
    if not isinstance(buffer, bytearray):
        raise TypeError(f"a state's buffer is a {type(buffer).__name__}")
    return buffer
