"""What JSON cannot carry: half-precision floats."""

from halimede.core.config.model_view import ModelView
from halimede.core.types import DataType, InferenceError, InferenceRequest, invalid
from halimede.core.types.error import clip
from halimede.core.wire.classification import check_classifiable
from halimede.core.wire.destinations import ALL_BINARY, Destinations

HALF = (DataType.FP16, DataType.BF16)
"""Datatypes that JSON cannot carry, as in Triton."""


def check_outputs(view: ModelView, request: InferenceRequest, destinations: Destinations) -> None:
    """Raise INVALID_ARG before the model runs if an output could not be sent afterwards."""
    if destinations is ALL_BINARY or (view.config.backend == "python" and not request.outputs):
        return  # A python model may leave out any output that the request does not name.
    for output in view.config.output:
        if request.outputs and output.name not in destinations.outputs:
            continue
        destination = destinations.of(output.name)
        if destination.classes:
            check_classifiable(output.name, output.data_type)
        elif not destination.binary and output.data_type in HALF:
            raise half_output(output.name, output.data_type)


def half_input(name: str, datatype: DataType) -> InferenceError:
    """The error for an input that JSON cannot carry."""
    return invalid(
        f"receiving {datatype.name} data via JSON is not supported. Please use the binary data format for input"
        f" {clip(name)}"
    )


def half_output(name: str, datatype: DataType) -> InferenceError:
    """The error for an output that JSON cannot carry."""
    return invalid(
        f"sending {datatype.name} data via JSON is not supported. Please use the binary data format for output"
        f" {clip(name)}"
    )
