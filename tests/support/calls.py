"""What most tests ask of a running server, and what they look up in its metrics."""

import json

from support.server import RunningServer


def ones(columns: int) -> dict[str, object]:
    """The body of an inference over HTTP: one row of ones for a model that takes FP32 `IN`."""
    return {"inputs": [{"name": "IN", "shape": [1, columns], "datatype": "FP32", "data": [1.0] * columns}]}


ONES = ones(16)
"""For `add_identity`'s models as they are by default."""
ONES_JSON = json.dumps(ONES)
DECOUPLED_OVER_HTTP = (
    "HTTP end point doesn't support models with decoupled transaction policy; use generate_stream, or send the header "
    "'Accept: text/event-stream'"
)


def scaled(server: RunningServer, model: str = "scaled", version: str = "") -> float:
    """By what a model of `add_scaled` multiplies."""
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    answer = server.post(path, ones(4))
    assert answer.status == 200, answer.body
    return answer.json["outputs"][0]["data"][0]


def load(server: RunningServer, model: str) -> tuple[int, str]:
    """The status and, where it is not 200, the error."""
    answer = server.post(f"/v2/repository/models/{model}/load")
    return answer.status, "" if answer.status == 200 else answer.error


def unload(server: RunningServer, model: str) -> int:
    return server.post(f"/v2/repository/models/{model}/unload").status


def index(server: RunningServer) -> dict[tuple[str, str], tuple[str, str]]:
    """State and reason by name and version; "" for what an entry does not have."""
    answer = server.post("/v2/repository/index")
    assert answer.status == 200, answer.body
    return {(e["name"], e.get("version", "")): (e.get("state", ""), e.get("reason", "")) for e in answer.json}


def metric(server: RunningServer, name: str, model: str, labels: str = "") -> float:
    """One series of a model's version 1, which must be there; `labels` are others as they are written, with a comma."""
    head = f'{name}{{model="{model}",{labels}version="1"}} '
    found = [line for line in server.metrics().splitlines() if line.startswith(head)]
    assert len(found) == 1, (head, found)
    return float(found[0].removeprefix(head))


def executing(server: RunningServer, model: str) -> float:
    return metric(server, "halimede_executing_requests", model)


def pending(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_pending_request_count", model)


def canceled(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_request_failure", model, 'reason="CANCELED",')
