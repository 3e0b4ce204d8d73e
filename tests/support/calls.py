"""Common requests to a running server, and values of its metrics."""

import json

from support.server import RunningServer


def ones(columns: int) -> dict[str, object]:
    """The body of an inference over HTTP: one row of ones for a model that takes FP32 `IN`."""
    return {"inputs": [{"name": "IN", "shape": [1, columns], "datatype": "FP32", "data": [1.0] * columns}]}


ONES = ones(16)
"""For models of `add_identity` with default arguments."""
ONES_JSON = json.dumps(ONES)
DECOUPLED_OVER_HTTP = (
    "HTTP end point doesn't support models with decoupled transaction policy; use generate_stream, or send the header "
    "'Accept: text/event-stream'"
)


def scaled(server: RunningServer, model: str = "scaled", version: str = "") -> float:
    """The factor of a model of `add_scaled`."""
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    answer = server.post(path, ones(4))
    assert answer.status == 200, answer.body
    return answer.json["outputs"][0]["data"][0]


def load(server: RunningServer, model: str) -> tuple[int, str]:
    """The status and the error; "" for status 200."""
    answer = server.post(f"/v2/repository/models/{model}/load")
    return answer.status, "" if answer.status == 200 else answer.error


def unload(server: RunningServer, model: str) -> int:
    return server.post(f"/v2/repository/models/{model}/unload").status


def index(server: RunningServer) -> dict[tuple[str, str], tuple[str, str]]:
    """State and reason by name and version; "" where an entry lacks one."""
    answer = server.post("/v2/repository/index")
    assert answer.status == 200, answer.body
    return {(e["name"], e.get("version", "")): (e.get("state", ""), e.get("reason", "")) for e in answer.json}


def metric(server: RunningServer, name: str, model: str, labels: str = "") -> float:
    """The value of one series of a model's version 1, which must exist. `labels` are further labels, with a trailing comma."""
    head = f'{name}{{model="{model}",{labels}version="1"}} '
    found = [line for line in server.metrics().splitlines() if line.startswith(head)]
    assert len(found) == 1, (head, found)
    return float(found[0].removeprefix(head))


def executing(server: RunningServer, model: str) -> float:
    """The requests that a model executes, or whose steps an ensemble executes."""
    page = server.metrics()
    names = ("halimede_executing_requests", "halimede_ensemble_requests")
    heads = [f'{name}{{model="{model}",version="1"}} ' for name in names]
    found = [float(line.removeprefix(head)) for head in heads for line in page.splitlines() if line.startswith(head)]
    assert found, (heads, page)
    return sum(found)


def pending(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_pending_request_count", model)


def canceled(server: RunningServer, model: str) -> float:
    return metric(server, "nv_inference_request_failure", model, 'reason="CANCELED",')
