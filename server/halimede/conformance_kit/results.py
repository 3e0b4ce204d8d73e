"""Checks of what an instance computes: shapes, datatypes, batches, outputs, and whose memory it uses."""

from collections.abc import Iterable
from dataclasses import replace

from halimede.conformance_kit.requests import Values, difference, rows_of
from halimede.conformance_kit.subject import NotTried, Runs, Subject, Wrong, answered
from halimede.core.types import DataType, InferenceError, InferenceRequest, Tensor
from halimede.core.types.request import forms_of

GIVE_REQUESTS = (
    "if the model cannot take random values or these sizes, give it the shapes that it takes with --shape, else let it "
    "refuse the request with an InferenceError"
)


def check_single(subject: Subject) -> str:
    """One row: the outputs that the configuration declares, in its datatypes and dimensions."""
    with subject.running() as runs:
        outputs = runs.outputs(subject.maker.request(1), "a request of one row", GIVE_REQUESTS)
    check_declared(subject, outputs)
    return f"a request of one row gets {len(outputs)} outputs as configured"


def check_full_batch(subject: Subject) -> str:
    """The largest batch."""
    rows = subject.config.max_batch_size
    if not rows:
        raise NotTried("max_batch_size is 0")
    if subject.maker.has_sequences:
        raise NotTried("a request of a sequence has one row")
    with subject.running() as runs:
        outputs = runs.outputs(subject.maker.request(2, rows=rows), f"a request of {rows} rows", _FULL)
    check_declared(subject, outputs)
    return f"a request of {rows} rows, the largest batch, gets {rows} rows"


_FULL = "set max_batch_size to the largest batch that the model takes, in `autocomplete` or in the configuration"


def check_variable_dimensions(subject: Subject) -> str:
    """Variable dimensions of several sizes, one after the other on one instance."""
    if not subject.maker.has_variable_dimensions():
        raise NotTried("the inputs have no variable dimension")
    sizes = (1, 5, 2)
    with subject.running() as runs:
        for size in sizes:
            what = f"a request with variable dimensions of {size}"
            check_declared(subject, runs.outputs(subject.maker.request(3, size=size), what, GIVE_REQUESTS))
    return f"variable dimensions of {', '.join(map(str, sizes))} work, one after the other"


def check_no_elements(subject: Subject) -> str:
    """Tensors without elements are legal: the instance computes or refuses, and runs on."""
    if not subject.maker.has_variable_dimensions():
        raise NotTried("the inputs have no variable dimension")
    with subject.running() as runs:
        before = runs.outputs(subject.maker.request(4), "a usual request", GIVE_REQUESTS)
        (reply,) = runs.batch([subject.maker.request(4, size=0)])
        if isinstance(reply, list):
            check_declared(subject, reply)
        elif reply is None:
            raise Wrong("a request without elements gets no answer", "answer or refuse every request")
        _check_same(subject, runs, 4, before, "after a request without elements")
    verdict = "computed" if isinstance(reply, list) else "refused"
    return f"a request whose tensors have no elements is {verdict}, and the next one is right"


def check_values(subject: Subject) -> str:
    """Extreme values of all datatypes: the instance computes or refuses, and gives the same results afterwards."""
    kinds = sorted({tensor.data_type.name for tensor in subject.config.input})
    with subject.running() as runs:
        before = runs.outputs(subject.maker.request(5), "a usual request", GIVE_REQUESTS)
        for seed in range(3):
            (reply,) = runs.batch([subject.maker.request(seed, values=Values.EXTREME)])
            if isinstance(reply, list):
                check_declared(subject, reply)
        _check_same(subject, runs, 5, before, "after a request with extreme values")
    return f"extreme values ({', '.join(kinds)}) are computed or refused, and the next request is right"


def check_batching(subject: Subject) -> str:
    """The rows of a batch have the results that they have alone."""
    rows = subject.config.max_batch_size
    if rows < 2:
        raise NotTried("the model does not batch")
    requests = subject.maker.batch(6, rows)
    with subject.running() as runs:
        together = [answered(reply, "a batch of two requests", GIVE_REQUESTS) for reply in runs.batch(requests)]
        for request, outputs in zip(requests, together, strict=True):
            for at, (inputs, row) in enumerate(zip(rows_of(request.inputs), rows_of(outputs), strict=True)):
                sequence = request.sequence_id, request.sequence_start, request.sequence_end
                form = replace(request.form, inputs=forms_of(inputs))
                alone = InferenceRequest.of(form, f"row {at}", inputs, {}, *sequence)
                expected = runs.outputs(alone, "a row alone", GIVE_REQUESTS)
                if found := difference(row, expected, subject.tolerance):
                    raise Wrong(
                        f"row {at} of a batch of {rows} rows has another result than alone: {found}",
                        "compute each row from its own inputs only, in order; set max_batch_size to 0 if the model "
                        "cannot batch",
                    )
    return f"{rows} rows in {len(requests)} requests get the same results as alone"


def check_outputs_in_part(subject: Subject) -> str:
    """A request for some outputs gets these, with the same content."""
    names = [output.name for output in subject.config.output]
    with subject.running() as runs:
        everything = {t.name: t for t in runs.outputs(subject.maker.request(8), "a request for all outputs", _PART)}
        for name, whole in everything.items():
            part = runs.outputs(subject.maker.request(8, outputs=[name]), f"a request for output '{name}' alone", _PART)
            if found := difference(part, [whole], subject.tolerance):
                raise Wrong(f"a request for output '{name}' alone has another result: {found}", _PART)
    return f"each of {len(names)} outputs can be requested alone"


_PART = "return every output whose name is in `outputs`; others may be left out or returned as well"


def check_inputs_unchanged(subject: Subject) -> str:
    """An instance only reads its inputs: they may be a client's memory, or another model's output."""
    request = subject.maker.request(9, rows=min(2, subject.config.max_batch_size or 1))
    before = [bytearray(tensor.data) for tensor in request.inputs]
    with subject.running() as runs:
        runs.outputs(request, "a request with read-only inputs", _READ_ONLY)
    changed = [
        tensor.name for tensor, content in zip(request.inputs, before, strict=True) if bytes(tensor.data) != content
    ]
    if changed:
        raise Wrong(f"the content of input '{changed[0]}' was changed", _READ_ONLY)
    return "inputs are read-only and keep their content"


_READ_ONLY = "do not write to an input: copy it first, for example with `array.copy()`"


def check_answers_kept(subject: Subject) -> str:
    """Outputs keep their content when the instance runs again: the answer may still be waiting for its client."""
    with subject.running() as runs:
        first = runs.outputs(subject.maker.request(10), "a request", GIVE_REQUESTS)
        before = [bytearray(tensor.data) for tensor in first]
        for seed in (11, 12):
            runs.outputs(subject.maker.request(seed), "a further request", GIVE_REQUESTS)
        for tensor, content in zip(first, before, strict=True):
            if bytes(tensor.data) != content:
                raise Wrong(
                    f"output '{tensor.name}' of an answer was overwritten by a later run",
                    "return a new array from each run, or a copy of the runtime's buffer",
                )
    return "an answer keeps its content while later requests run"


def check_declared(subject: Subject, outputs: Iterable[Tensor]) -> None:
    """Raise Wrong unless the outputs are declared, in the shapes that the configuration allows."""
    declared = {output.name: output for output in subject.config.output}
    for tensor in outputs:
        output = declared[tensor.name]  # the runner has refused other names and datatypes
        dims = output.reshape.shape if output.reshape is not None else output.dims
        shape = tensor.shape[1:] if subject.maker.batches else tensor.shape
        if len(shape) != len(dims) or any(dim not in (-1, size) for dim, size in zip(dims, shape, strict=True)):
            raise Wrong(
                f"output '{tensor.name}' has shape {list(tensor.shape)}, and the configuration says {list(dims)}"
                + (" behind the batch dimension" if subject.maker.batches else ""),
                "correct the shape, or check the configuration in `load` against the model file",
            )


def _check_same(subject: Subject, runs: Runs, seed: int, expected: list[Tensor], when: str) -> None:
    (reply,) = runs.batch([subject.maker.request(seed)])
    advice = "keep no state between runs, and leave the instance usable after an error"
    if found := difference(answered(reply, f"a usual request {when}", advice), expected, subject.tolerance):
        raise Wrong(f"a request has another result {when}: {found}", advice)


def refused_alone(subject: Subject, runs: Runs) -> tuple[InferenceRequest, InferenceError] | None:
    """A request that the model refuses, and its error; None if none is found."""
    candidates = list(subject.refused)
    if any(tensor.data_type is DataType.BYTES for tensor in subject.config.input):
        candidates.append(subject.maker.request(14, values=Values.NOT_TEXT))
    for request in candidates:
        (reply,) = runs.batch([request])
        if isinstance(reply, InferenceError):
            return request, reply
    return None
