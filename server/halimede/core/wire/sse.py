"""Server-sent events: one `data:` line of JSON per answer. JSON contains no line end."""

from dataclasses import replace

from halimede.core.config.model_view import ModelView
from halimede.core.types import InferenceResponse
from halimede.core.types.tensor import Buffer
from halimede.core.wire.destinations import JSON, Destinations, Inline
from halimede.core.wire.http_control import error_json
from halimede.core.wire.http_response import encode_infer_steps
from halimede.core.wire.steps import Steps

MEDIA_TYPE = "text/event-stream"


def accepts_events(accept: str) -> bool:
    """Whether a client that sends this `Accept` wants events: it lists them, and does not prefer JSON."""
    weights: dict[str, float] = {}
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        weights[name] = next((_weight(each[2:]) for each in parameters if each.startswith("q=")), 1.0)
    wanted = weights.get(MEDIA_TYPE, 0.0)
    return wanted > 0.0 and wanted >= weights.get("application/json", 0.0)


def _weight(text: str) -> float:
    """A q-value; a malformed one is a refusal."""
    try:
        weight = float(text)
    except ValueError:
        return 0.0
    return weight if 0.0 <= weight <= 1.0 else 0.0


def event(json: list[Buffer]) -> list[Buffer]:
    """The event that carries a JSON document in chunks."""
    return [b"data: ", *json, b"\n\n"]


def error_event(message: str) -> list[Buffer]:
    return event([error_json(message)])


def json_only(destinations: Destinations) -> Destinations:
    """The same destinations, with JSON in place of binary data."""
    if not destinations.outputs:
        return Destinations()
    outputs = {name: Inline(binary=False, classes=each.classes) for name, each in destinations.outputs.items()}
    return Destinations(JSON, outputs)


def encode_event_steps(
    response: InferenceResponse, destinations: Destinations, view: ModelView, *, marks_final: bool
) -> Steps[list[Buffer]]:
    """A response as the JSON of `infer`, in chunks. `marks_final`: it states whether it is the last, as over gRPC."""
    if marks_final:
        parameters = {**response.parameters, "triton_final_response": response.final}
        response = replace(response, parameters=parameters)
    encoded = yield from encode_infer_steps(response, destinations, view)
    return encoded.chunks
