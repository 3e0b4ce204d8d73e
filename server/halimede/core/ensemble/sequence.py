"""The sequence parameters of an ensemble's tensors: a step gets those of its inputs, and may change them."""

from collections.abc import Mapping

from halimede.core.types import InferenceRequest, ParameterValue

SequenceParameters = tuple[int | str, bool, bool]
"""Correlation id, start, end."""

_NAMES = frozenset({"sequence_id", "sequence_start", "sequence_end"})


def sequence_of(request: InferenceRequest) -> SequenceParameters:
    return request.sequence_id, request.sequence_start, request.sequence_end


def sequence_after(
    before: SequenceParameters | None, request: InferenceRequest, parameters: Mapping[str, ParameterValue]
) -> SequenceParameters | None:
    """The sequence parameters of a step's outputs: those that its answer has, else those that the step ran with.

    `before` is what the step ran with; None for the parameters of the ensemble's `request`, in the result too.
    """
    if parameters.keys().isdisjoint(_NAMES):
        return before
    number, start, end = before or sequence_of(request)
    given = parameters.get("sequence_id", number)
    return (
        given if isinstance(given, int | str) else number,
        bool(parameters.get("sequence_start", start)),
        bool(parameters.get("sequence_end", end)),
    )
