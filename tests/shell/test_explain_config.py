"""`halimede explain-config`, as a process: its output and exit codes."""

import json
import subprocess
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from halimede.commands.explain_config import explain_config
from halimede.core.config.read import read_pbtxt, read_yaml
from halimede.core.inventory import Inventory
from halimede.core.repository.load_errors import VersionError
from halimede.core.types import InferenceError
from halimede.runtime.prepare import LoadOptions, load_model
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.forked import run_python
from support.models import add_identity, add_onnx_identity, add_scaled, write_config
from support.served import write_model

PROGRAM = "from halimede.commands.explain_config import explain_config; explain_config()"


def explain(
    *arguments: str | Path, directory: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return run_python("-c", PROGRAM, *arguments, environment=environment, directory=directory)


def origin(output: str, line: str) -> str:
    """The comment behind the one line that begins so."""
    found = [each for each in output.splitlines() if each.strip().startswith(line)]
    assert len(found) == 1, output
    return found[0].partition("#")[2].strip()


def test_command_is_a_subcommand_of_halimede() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    group = "halimede.commands"
    point = EntryPoint("explain-config", project["entry-points"][group]["explain-config"], group)
    assert point.load() is explain_config


def test_a_folder_that_is_no_model_is_refused_as_one(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path / "models", "auto", "FP32", [4])
    result = explain(tmp_path / "models")
    assert result.returncode == 2
    text = "is not the folder of a model: there is neither a config.pbtxt nor a version directory, such as '1', in it"
    assert f"'{tmp_path / 'models'}' {text}" in result.stderr


def test_an_onnx_model_without_a_configuration(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "auto", "FP32", ["N", 4])
    result = explain(tmp_path / "auto")
    assert result.returncode == 0
    for line, expected in {
        'backend: "onnxruntime"': "model directory",
        "max_batch_size: 4": "model file",
        'name: "IN"': "model file",
        "num_versions: 1": "default",
        "dynamic_batching {": "model file",
        "preferred_batch_size: [ 4 ]": "default",
        "count: 2": "default",
    }.items():
        assert origin(result.stdout, line) == expected
    assert "autofilled max_batch_size to 4 for model 'auto'" in result.stderr
    config = read_pbtxt(result.stdout)
    assert (config.problems, config.config.input[0].dims) == ((), (4,))


def test_values_of_the_file_have_its_lines_and_fields_without_effect_are_noted(tmp_path: Path) -> None:
    add_identity(tmp_path, "ident")
    write_config(
        tmp_path / "ident",
        'backend: "identity"\nmax_batch_size: 0\noptimization {\n  priority: PRIORITY_MAX\n}\n'
        'input { name: "IN" data_type: TYPE_FP32 dims: 4 }\noutput { name: "OUT" data_type: TYPE_FP32 dims: 4 }\n',
    )
    result = explain("ident", directory=tmp_path)
    assert result.returncode == 0
    assert origin(result.stdout, "max_batch_size: 0") == "config.pbtxt:2"
    assert origin(result.stdout, 'name: "IN"') == "config.pbtxt:6"
    assert result.stderr.splitlines() == [
        "ident/config.pbtxt:4:3: 'optimization.priority' has no effect: all models run at the same priority"
    ]


def test_origin_of_the_backend_and_directory_warnings_are_printed(tmp_path: Path) -> None:
    add_scaled(tmp_path, "m", 2.0)
    (tmp_path / "m" / "01").mkdir()
    write_config(tmp_path / "m", 'platform: "onnxruntime_onnx"')
    result = explain(tmp_path / "m")
    assert origin(result.stdout, 'backend: "onnxruntime"') == "follows from platform"
    assert "m: ignoring version directory '01': a version has no leading zeros" in result.stderr
    write_config(tmp_path / "m", 'backend: "onnxruntime"')
    assert origin(explain(tmp_path / "m").stdout, 'platform: "onnxruntime_onnx"') == "follows from backend"


def test_device_list_is_read_as_by_serve(tmp_path: Path) -> None:
    add_identity(tmp_path, "ident")
    result = explain(tmp_path / "ident", HALIMEDE_DEVICE_LIST=str(tmp_path / "nowhere.json"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith(f"the device list '{tmp_path}/nowhere.json' cannot be read")


def test_a_configuration_s_name_cannot_leave_its_directory(tmp_path: Path) -> None:
    for name in ("../secret", "..", "a/b"):
        with pytest.raises(InferenceError, match="configuration name"):
            ModelRepository((tmp_path,), config_name=name)


def test_a_yaml_configuration_in_every_format(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "m", "FP32", ["N", 4])
    (tmp_path / "m" / "config.yaml").write_text("max_batch_size: 8\nparameters:\n  note: {string_value: no}\n")
    as_yaml, as_text, as_json = (explain(tmp_path / "m", "--format", form) for form in ("yaml", "pbtxt", "json"))
    assert origin(as_yaml.stdout, 'string_value: "no"') == "config.yaml:3"
    assert read_yaml(as_yaml.stdout).config == read_pbtxt(as_text.stdout).config
    document = json.loads(as_json.stdout)
    assert set(document) == {"config", "origins"}
    assert (document["config"]["name"], document["config"]["max_batch_size"]) == ("m", 8)
    assert document["origins"]["max_batch_size"] == "config.yaml:1"
    assert document["origins"]["input[0].dims"] == "model file"
    assert document["origins"]['parameters["note"].string_value'] == "config.yaml:3"


def test_all_problems_are_printed_with_their_positions(tmp_path: Path) -> None:
    add_scaled(tmp_path, "bad", 2.0)
    write_config(tmp_path / "bad", 'max_batch_size: -1\nnonsense: 1\n  input { name: "x" dims: 0 }')
    result = explain(tmp_path / "bad")
    assert (result.returncode, result.stdout) == (1, "")
    assert [line.split(": ")[0] for line in result.stderr.splitlines()] == [
        "bad/config.pbtxt:1:1",
        "bad/config.pbtxt:2:1",
        "bad/config.pbtxt:3:21",
    ]
    (tmp_path / "bad" / "config.pbtxt").unlink()
    (tmp_path / "bad" / "config.yaml").write_text("input:\n  - dims: [0, x]\n")
    result = explain(tmp_path / "bad")
    assert (result.returncode, result.stderr.splitlines()[-1].split(": ")[0]) == (1, "bad/config.yaml:2:15")


def test_two_configurations_are_an_error(tmp_path: Path) -> None:
    add_identity(tmp_path, "both")
    (tmp_path / "both" / "config.yaml").write_text("backend: identity\n")
    result = explain(tmp_path / "both")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "there are both config.pbtxt and config.yaml; keep one of them\n"


def test_unreadable_model_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.onnx").write_bytes(b"no onnx at all")
    result = explain(tmp_path / "broken")
    assert (result.returncode, result.stdout) == (1, "")
    assert "broken/1/model.onnx" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_named_configuration_and_the_flags_of_serve(tmp_path: Path) -> None:
    add_onnx_identity(tmp_path, "m", "FP32", ["N", 4])
    (tmp_path / "m" / "configs").mkdir()
    (tmp_path / "m" / "configs" / "edge.pbtxt").write_text("max_batch_size: 2")
    named = explain(tmp_path / "m", "--model-config-name", "edge")
    assert origin(named.stdout, "max_batch_size: 2") == "configs/edge.pbtxt:1"
    larger = explain(tmp_path / "m", "--backend-config=onnxruntime,default-max-batch-size=16")
    assert origin(larger.stdout, "max_batch_size: 16") == "model file"
    bare = explain(tmp_path / "m", "--disable-auto-complete-config")
    assert bare.returncode == 1
    assert "model configuration must contain at least one input" in bare.stderr


def test_one_model_file(tmp_path: Path) -> None:
    add_scaled(tmp_path, "scaled", 2.0)
    result = explain(tmp_path / "scaled" / "1" / "model.onnx")
    assert result.returncode == 0
    assert origin(result.stdout, 'name: "OUT"') == "model file"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "nowhere"),
        ([], "MODEL_DIR"),
        ([".", "--model-config-name=../x"], "--model-config-name"),
        ([".", "--backend-config=x"], "--backend-config"),
        ([".", "--format=xml"], "--format"),
    ],
)
def test_a_mistyped_command_line_ends_with_2(tmp_path: Path, arguments: list[str], text: str) -> None:
    result = explain(*arguments, directory=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert text in result.stderr


def test_name_of_a_link_is_the_models_name(tmp_path: Path) -> None:
    add_scaled(tmp_path, "real", 2.0)
    (tmp_path / "alias").symlink_to("real")
    document = json.loads(explain(tmp_path / "alias", "--format=json").stdout)
    assert (document["config"]["name"], document["origins"]["name"]) == ("alias", "default")


ONNX = 'backend: "onnxruntime" max_batch_size: 8 '
TENSORS = 'input { name: "IN" data_type: TYPE_FP32 dims: 4 } output { name: "OUT" data_type: TYPE_FP32 dims: 4 } '


REFUSED = [
    (
        TENSORS.replace("dims: 4", "dims: 5"),
        "the model expects 2 dimensions (shape [-1,4]) but the model configuration specifies",
    ),
    (TENSORS.replace('"IN"', '"x"'), "unexpected inference input 'x', allowed inputs are: IN"),
    (TENSORS.replace("TYPE_FP32", "TYPE_FP64"), "configuration expects datatype TYPE_FP64 for input 'IN'"),
    (
        TENSORS + 'parameters { key: "intra_op_thread_count" value { string_value: "two" } }',
        "parameter 'intra_op_thread_count' is 'two'; it must be a number from 0 to 1024",
    ),
    (
        TENSORS + 'optimization { execution_accelerators { cpu_execution_accelerator { name: "openvino" } } }',
        "is configured for OpenVINOExecutionProvider, which the installed onnxruntime does not have",
    ),
]


@pytest.mark.parametrize(
    ("isolation", "config", "problem"),
    [
        *(("thread", *each) for each in REFUSED),
        # How an error comes from a process does not depend on the error.
        ("process", *REFUSED[0]),
        *(pytest.param("process", *each, marks=pytest.mark.large) for each in REFUSED[1:]),
    ],
)
def test_configuration_that_a_load_refuses_is_refused(
    tmp_path: Path, isolation: str, config: str, problem: str
) -> None:
    add_scaled(tmp_path, "m", 2.0)
    parameter = f'parameters {{ key: "ISOLATION" value {{ string_value: "{isolation}" }} }}'
    write_config(tmp_path / "m", ONNX + config + parameter)
    result = explain(tmp_path / "m")
    assert (result.returncode, result.stdout) == (1, "")
    assert problem in result.stderr
    if isolation == "thread":
        entry = ModelRepository((tmp_path,)).find("m")
        with pytest.raises(VersionError) as caught:
            load_model(entry, LoadOptions(Inventory(()), {}, autocomplete=True), Abandon())
        assert result.stderr == f"{caught.value.message}\n"


def test_every_served_version_is_checked(tmp_path: Path) -> None:
    for name, version in (("onnx", 1), ("onnx", 2)):
        add_scaled(tmp_path, name, 2.0, version=version)
    write_config(tmp_path / "onnx", ONNX + TENSORS + "version_policy { all { } }")
    (tmp_path / "onnx" / "1" / "model.onnx").write_bytes(b"no onnx at all")
    write_model(tmp_path, "code", "class TritonPythonModel:\n    pass\n", version=1)
    write_model(tmp_path, "code", "class TritonPythonModel:\n    def execute(self, requests): pass\n", version=2)
    write_config(tmp_path / "code", 'backend: "python" version_policy { all { } }')
    for name, problem in {"onnx": "onnx runtime error", "code": "does not implement `execute` method"}.items():
        result = explain(tmp_path / name)
        assert (result.returncode, problem in result.stderr) == (1, True), result.stderr
        write_config(tmp_path / name, (tmp_path / name / "config.pbtxt").read_text().replace("version_policy", "#"))
        assert explain(tmp_path / name).returncode == 0
