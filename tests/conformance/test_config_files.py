"""The configuration file that a server reads, and the errors of invalid ones."""

from pathlib import Path

from support.calls import load
from support.models import add_identity, add_scaled
from support.served import Stage
from support.server import RunningServer, Start

IDENTITY = """\
backend: identity
max_batch_size: 8
input:
  - {name: IN, data_type: TYPE_FP32, dims: [4]}
output:
  - {name: OUT, data_type: TYPE_FP32, dims: [4]}
metric_tags: {country: no}
parameters:
  execute_delay_ms: {string_value: 1.0}
"""


def add_yaml(repository: Path, name: str, text: str) -> None:
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.yaml").write_text(text)


def batch_size(server: RunningServer, model: str) -> int:
    return server.get(f"/v2/models/{model}/config").json["max_batch_size"]


def reason(server: RunningServer, model: str) -> str:
    """Why the model's configuration cannot be used."""
    status, error = load(server, model)
    assert status == 500
    return error.removeprefix(f"failed to load '{model}', failed to poll from model repository: ")


def test_yaml_serves_like_text_format_and_errors_have_a_place(stage: Stage) -> None:
    server, repository = stage.server, stage.repository
    add_yaml(repository, "good", IDENTITY)
    add_yaml(repository, "wrong", IDENTITY.replace("[4]", "[0]", 1) + "max_batchsize: 3\n")
    add_yaml(repository, "broken", IDENTITY + "  - [\n")
    add_yaml(repository, "bomb", "a: &a [x]\nb: [*a, *a]\n")
    add_identity(repository, "both")
    (repository / "both" / "config.yaml").write_text(IDENTITY)
    assert load(server, "good") == (200, "")

    config = server.get("/v2/models/good/config").json
    assert (config["max_batch_size"], config["metric_tags"]) == (8, {"country": "no"})
    assert config["parameters"] == {"execute_delay_ms": {"string_value": "1.0"}}
    body = {"inputs": [{"name": "IN", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    assert server.post("/v2/models/good/infer", body).json["outputs"][0]["data"] == [1, 2, 3, 4]

    wrong = reason(server, "wrong")
    assert wrong.startswith("wrong/config.yaml:4:45: model input 'IN' dimension must be integer >= 1")
    assert (
        "; wrong/config.yaml:10:1: max_batchsize: unknown field of ModelConfig; did you mean max_batch_size?" in wrong
    )
    assert reason(server, "broken").startswith("broken/config.yaml:10:")
    assert "bomb/config.yaml:1:4: an anchor (&)" in reason(server, "bomb")
    assert reason(server, "both") == "there are both config.pbtxt and config.yaml; keep one of them"
    assert server.get("/v2/health/ready").status == 200


def write_named_configurations(repository: Path) -> list[str]:
    """Models with several configurations. Returns their names."""
    models = ["named", "named_yaml", "plain"]
    for model in models:
        add_scaled(repository, model, 2.0)
        (repository / model / "config.pbtxt").write_text("max_batch_size: 2")
        (repository / model / "configs").mkdir()
    (repository / "named" / "configs" / "edge.pbtxt").write_text("max_batch_size: 16")
    (repository / "named_yaml" / "configs" / "edge.yaml").write_text("max_batch_size: 32")
    (repository / "plain" / "configs" / "other.pbtxt").write_text("max_batch_size: 64")
    return models


def test_a_named_configuration_replaces_that_of_models_that_have_it(start: Start, repository: Path) -> None:
    models = write_named_configurations(repository)
    server = start("--model-repository", repository, "--model-config-name=edge")
    assert [batch_size(server, model) for model in models] == [16, 32, 2]
    assert server.stop() == 0


def test_without_a_name_further_configurations_are_ignored(stage: Stage) -> None:
    models = write_named_configurations(stage.repository)
    assert [load(stage.server, model) for model in models] == [(200, "")] * 3
    assert [batch_size(stage.server, model) for model in models] == [2, 2, 2]
