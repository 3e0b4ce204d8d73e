"""`--http-restricted-api` and `--http-header-forward-pattern` on the running server, with Triton's client."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as tritonhttp
from tritonclient.utils import InferenceServerException

from support.calls import ONES
from support.models import add_identity
from support.server import RunningServer, serving, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = tmp_path_factory.mktemp("models")
    add_identity(models, "ident")
    with serving(
        tmp_path_factory.mktemp("log"),
        [
            *("--model-repository", models, "--model-control-mode=explicit", "--load-model=ident"),
            "--http-restricted-api=model-repository,shared-memory,trace,logging:admin-key=s3cret",
            "--http-restricted-api=inference:infer-key=open sesame",
            "--http-header-forward-pattern=x-.*|priority",
        ],
    ) as running:
        yield running


def test_clients_of_triton_send_the_secret(server: RunningServer) -> None:
    tensor = tritonhttp.InferInput("IN", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 16), np.float32))
    with tritonhttp.InferenceServerClient(server.http_url) as client:
        with pytest.raises(InferenceServerException, match="expecting header 'infer-key'"):
            client.infer("ident", [tensor])
        result = client.infer("ident", [tensor], headers={"infer-key": "open sesame", "X-Request": "7"})
        assert result.as_numpy("OUT").sum() == 16
        with pytest.raises(InferenceServerException, match="reserved for Triton usage"):
            client.infer("ident", [tensor], headers={"infer-key": "open sesame", "priority": "1"})
        client.unload_model("ident", headers={"admin-key": "s3cret"})
        wait_until(lambda: not client.is_model_ready("ident"), "the model to go", server)
        client.load_model("ident", headers={"admin-key": "s3cret"})
        assert client.is_model_ready("ident")


def test_no_secret_is_ever_logged_or_shown(server: RunningServer) -> None:
    server.post("/v2/models/ident/infer", ONES, {"infer-key": "open sesame"})
    shown = server.log + server.metrics() + json.dumps(server.get("/v2/models/ident/config").json)
    assert "s3cret" not in shown
    assert "open sesame" not in shown
