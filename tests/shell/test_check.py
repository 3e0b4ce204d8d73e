"""`halimede check` as a process: its output for each model of a repository, and its exit code."""

import json
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from halimede.commands.check import CheckResult, check, table
from support.forked import run_python
from support.models import add_identity, add_onnx_identity, add_scaled, write_config
from support.served import add_python, parameter, write_model

PROGRAM = "from halimede.commands.check import check; check()"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_python("-c", PROGRAM, *arguments, environment={"COLUMNS": "100"})


def test_command_is_a_subcommand_of_halimede() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "halimede.commands"
    assert EntryPoint("check", project["entry-points"][group]["check"], group).load() is check


def test_each_model_lists_honoured_ignored_and_refused_fields(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "plain", "FP32", ["N", 4])
    add_identity(
        tmp_path,
        "cached",
        extra="response_cache { enable: true }\ndynamic_batching { priority_levels: 1\n"
        "default_priority_level: 1 max_queue_delay_microseconds: 5 }",
    )
    add_identity(
        tmp_path,
        "sequence",
        extra='model_operations { op_library_filename: "op.so" }\noptimization { priority: PRIORITY_MAX }',
    )
    add_scaled(tmp_path, "other", 2.0)
    write_config(tmp_path / "other", 'input { name: "x" data_type: TYPE_FP32 dims: 4 }')
    add_python(tmp_path, "code", extra=parameter("any", "1"))
    write_model(tmp_path, "mute", "class TritonPythonModel:\n    def execute(self, requests): return []\n")
    (tmp_path / "notes").mkdir()
    result = run(tmp_path, "--json")
    assert result.returncode == 1
    document = json.loads(result.stdout)
    assert [warning.partition(" in ")[0] for warning in document["warnings"]] == ["ignoring 'notes'"]
    assert result.stderr.startswith("ignoring 'notes' in ")
    models = {model.pop("name"): model for model in document["models"]}
    loads = {name: model["loads"] for name, model in models.items()}
    assert loads == {"cached": True, "code": True, "mute": True, "other": False, "plain": True, "sequence": False}
    assert models["plain"] == {
        "loads": True, "backend": "onnxruntime", "versions": [1],
        "honoured": [], "ignored": [], "refused": [], "warnings": [],
    }  # fmt: skip
    cached, sequence = models["cached"], models["sequence"]
    assert cached["honoured"] == ["name", "backend", "max_batch_size", "input", "output", "dynamic_batching"]
    assert [text.partition(" has no effect: ")[0] for text in cached["ignored"]] == [
        "'response_cache.enable'",
    ]
    assert sequence["honoured"] == ["name", "backend", "max_batch_size", "input", "output"]
    (refused,) = sequence["refused"]
    assert refused.startswith("sequence/config.pbtxt:7:28: 'model_operations.op_library_filename' is not supported yet")
    assert [text.partition(" has")[0] for text in sequence["ignored"]] == ["'optimization.priority'"]
    assert "unexpected inference input 'x', allowed inputs are: IN" in models["other"]["refused"][0]
    assert models["mute"]["warnings"][0].startswith("it has no inputs and no outputs: ")
    # The code of a model may have any parameters.
    assert (models["code"]["warnings"], models["code"]["ignored"]) == ([], [])


def test_a_repository_whose_models_all_load(tmp_path: Path) -> None:
    for name in ("one", "two"):
        add_scaled(tmp_path / name, name, 2.0)
    result = run(tmp_path / "one", tmp_path / "two")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == [
        "MODEL  LOADS  BACKEND      VERSIONS  WHAT",
        "one    yes    onnxruntime  1         honoured  (nothing is configured)",
        "two    yes    onnxruntime  1         honoured  (nothing is configured)",
        "",
        "2 of 2 models load",
    ]
    add_scaled(tmp_path / "two", "one", 2.0)
    result = run(tmp_path / "one", tmp_path / "two")
    assert (result.returncode, "model appears in two or more repositories" in result.stdout) == (1, True)


def test_long_reasons_are_wrapped_below_themselves() -> None:
    reasons = ("a reason that is much longer than the line has room for, " * 2, "short")
    lines = table(
        [CheckResult("m", versions=(1, 2), refused=reasons, honoured=("input",)), CheckResult("n\x1b[2J")], 70
    )
    assert lines == [
        "MODEL     LOADS  BACKEND  VERSIONS  WHAT",
        "m         NO              1,2       refused   a reason that is much longer than the",
        "                                              line has room for, a reason that is much",
        "                                              longer than the line has room for,",
        "                                    refused   short",
        "                                    honoured  input",
        "n\\x1b[2J  yes                       honoured  (nothing is configured)",
        "",
        "1 of 2 models load",
    ]


def test_refused_step_refuses_its_ensemble(tmp_path: Path) -> None:
    add_scaled(tmp_path, "step", 2.0)
    tensors = 'input { name: "A" data_type: TYPE_FP32 dims: 4 } output { name: "B" data_type: TYPE_FP32 dims: 4 }'
    maps = 'input_map { key: "IN" value: "A" } output_map { key: "OUT" value: "B" }'
    steps = f'ensemble_scheduling {{ step {{ model_name: "step" model_version: -1 {maps} }} }}'
    write_config(tmp_path / "above", f'platform: "ensemble" max_batch_size: 4 {tensors} {steps}')
    (tmp_path / "above" / "1").mkdir()
    assert run(tmp_path).returncode == 0
    write_config(tmp_path / "step", 'model_operations { op_library_filename: "op.so" }')
    models = json.loads(run(tmp_path, "--json").stdout)["models"]
    assert [(model["name"], model["loads"]) for model in models] == [("above", False), ("step", False)]
    assert models[0]["refused"] == models[1]["refused"]


@pytest.mark.parametrize("arguments", [[], ["nowhere"], [".", "--nonsense"]])
def test_a_mistyped_command_line_ends_with_2(arguments: list[str]) -> None:
    assert run(*arguments).returncode == 2


def test_repository_without_a_model_exits_with_1(tmp_path: Path) -> None:
    add_scaled(tmp_path, "resnet", 2.0)
    result = run(tmp_path / "resnet")
    assert (result.returncode, result.stdout) == (1, "")
    assert f"give the folder above as the repository: '{tmp_path}'" in result.stderr
