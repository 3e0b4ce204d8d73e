"""What the backend finds in model files, with the real PyTorch in this process."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from halimede.backends.pytorch.program import MOST_SHAPES, ExportedProgram
from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput
from halimede.core.types import ErrorCode
from support.torch_models import (
    BACKEND,
    CONTEXT,
    CPU,
    FP32,
    INT64,
    MODULE,
    AddSub,
    Network,
    Whole,
    any_rows,
    config,
    export,
    floats,
    parameters,
    refused,
    run,
    script,
    source,
    trace,
)

pytestmark = pytest.mark.timeout(600)  # importing torch takes long on a busy machine


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "1"
    directory.mkdir()
    return directory


def test_autocomplete_takes_the_example_of_a_traced_model(version):
    path = trace(Network(), (torch.zeros(2, 8),), version / "m.pt")
    assert BACKEND.autocomplete(ModelConfig(), source(path, default_max_batch_size="6")) == ModelConfig(
        name="m",
        max_batch_size=6,
        input=(ModelInput("x", FP32, dims=(8,)),),
        output=(ModelOutput("OUTPUT__0", FP32, dims=(3,)),),
        dynamic_batching=ModelDynamicBatching(),
    )


def test_a_traced_model_that_does_not_batch_is_completed_without_batching(version):
    completed = BACKEND.autocomplete(ModelConfig(), source(trace(Whole(), (torch.zeros(2, 3),), version / "m.pt")))
    assert completed.max_batch_size == 0
    assert (completed.input[0].dims, completed.output[0].dims) == ((2, 3), (3,))


def test_autocomplete_finds_outputs_by_a_run(version):
    path = script(Network(), version / "m.pt")
    given = config({"x": (FP32, 8)}, {})
    assert BACKEND.autocomplete(given, source(path)).output == (ModelOutput("OUTPUT__0", FP32, dims=(3,)),)
    unbatched = config({"x": (FP32, -1, 8)}, {}, max_batch_size=0)
    assert BACKEND.autocomplete(unbatched, source(path)).output == (ModelOutput("OUTPUT__0", FP32, dims=(-1, 3)),)
    (version / "net.py").write_text(MODULE)
    assert BACKEND.autocomplete(given, source(version / "net.py")).output == (
        ModelOutput("OUTPUT__0", FP32, dims=(3,)),
    )


def test_a_file_that_says_too_little_is_an_error_with_what_to_write(version):
    path = script(AddSub(), version / "m.pt")
    message = refused(lambda: BACKEND.autocomplete(ModelConfig(), source(path))).message
    assert 'input [ { name: "a" data_type: TYPE_FP32 dims: [ ... ] }, { name: "b" ' in message
    unfit = config({"a": (FP32, 2), "b": (FP32, 3)}, {})
    message = refused(lambda: BACKEND.autocomplete(unfit, source(path))).message
    assert "The size of tensor a (2) must match the size of tensor b (3)" in message
    assert 'output [ { name: "OUTPUT__0"' in message


class Lengths(nn.Module):
    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True) / lengths.reshape(-1, 1)


def test_inputs_that_the_server_makes_have_the_datatype_of_the_file(version):
    """The lengths of padded rows come as INT64."""
    sizes = ({0: any_rows()},) * 2
    path = version / "model.pt2"
    export(Lengths(), (torch.zeros(2, 4), torch.ones(2, dtype=torch.int32)), path, dynamic=sizes)
    padding = '[{"input": "INPUT__0", "axis": 1, "lengths": "INPUT__1"}]'
    settings = config({"INPUT__0": (FP32, 4)}, {"RESULT": (FP32, 1)}, parameters=parameters(PADDING=padding))
    result = run(path, settings, {"INPUT__0": floats([2, 4, 0, 0]), "INPUT__1": np.array([2])})
    assert result["RESULT"].tolist() == [[3]]


class Doubles(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Nested(nn.Module):
    def forward(
        self, x: torch.Tensor, more: dict[str, torch.Tensor], *, k: torch.Tensor
    ) -> dict[str, list[torch.Tensor]]:
        return {"sums": [x + more["y"]], "k": [k * 2]}


def nested(version: Path) -> Path:
    rows = {0: any_rows()}
    return export(
        Nested(),
        (torch.zeros(2, 3), {"y": torch.zeros(2, 3)}),
        version / "model.pt2",
        keywords={"k": torch.zeros(2, 4, dtype=torch.int64)},
        dynamic={"x": rows, "more": {"y": rows}, "k": rows},
    )


def test_a_program_is_completed_from_its_signature(version):
    assert BACKEND.autocomplete(ModelConfig(), source(nested(version))) == ModelConfig(
        name="m",
        max_batch_size=4,
        input=(
            ModelInput("x", FP32, dims=(3,)),
            ModelInput("y", FP32, dims=(3,)),
            ModelInput("k", INT64, dims=(4,)),
        ),
        output=(ModelOutput("OUTPUT__0", FP32, dims=(3,)), ModelOutput("OUTPUT__1", INT64, dims=(4,))),
        dynamic_batching=ModelDynamicBatching(),
    )


def test_tensors_of_a_program_have_names_and_paths(version):
    settings = config(
        {"KWARGS[k]": (INT64, 4), "x": (FP32, 3), "ARGS[1][y]": (FP32, 3)},
        {"RESULT[k][0]": (INT64, 4), "OUTPUT__0": (FP32, 3)},
    )
    # Twice: the shapes of the second batch are known.
    loaded = BACKEND.load(settings, source(nested(version)))
    instance = loaded.create_instance(CPU)
    inputs = {"x": floats([1, 2, 3]), "ARGS[1][y]": floats([1, 1, 1]), "KWARGS[k]": np.array([[1, 2, 3, 4]])}
    for _ in range(2):
        result = instance.run(inputs, ["RESULT[k][0]", "OUTPUT__0"], CONTEXT)
        assert (result["RESULT[k][0]"].tolist(), result["OUTPUT__0"].tolist()) == ([[2, 4, 6, 8]], [[2, 3, 4]])
    too_many = {name: np.repeat(array, 65, axis=0) for name, array in inputs.items()}
    error = refused(lambda: instance.run(too_many, ["OUTPUT__0"], CONTEXT))
    instance.close()
    assert (error.code, "refuses the shapes" in error.message) == (ErrorCode.INVALID_ARG, True)


def test_all_disagreements_with_a_program_are_reported_at_load(version):
    right = config({"INPUT__0": (FP32, 3), "INPUT__1": (FP32, 3), "INPUT__2": (INT64, 4)}, {"OUTPUT__0": (FP32, 3)})
    BACKEND.check(right, source(nested(version)))
    wrong = config(
        {"INPUT__0": (INT64, 3), "INPUT__1": (FP32, 7), "INPUT__2": (INT64, 4)},
        {"OUTPUT__0": (FP32, 3, 1)},
        max_batch_size=65,
    )
    error = refused(lambda: BACKEND.load(wrong, source(version / "model.pt2")))
    assert refused(lambda: BACKEND.check(wrong, source(version / "model.pt2"))) == error
    parts = ("TYPE_INT64 for input 'INPUT__0'", "tensor 'INPUT__1'", "tensor 'OUTPUT__0'", "max_batch_size: 64")
    assert (error.code, [part in error.message for part in parts]) == (ErrorCode.INVALID_ARG, [True] * 4)


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift + torch.zeros(3)


@pytest.mark.parametrize(("file", "function"), [("model.pt", "runtime"), ("model.pt2", "export_runtime")])
def test_exported_programs_have_a_zygote_of_their_own(version, file, function):
    assert BACKEND.preload(source(version / file)) == f"halimede.backends.pytorch.runtime:{function}"


def test_an_exported_program_is_moved_to_the_device_of_its_instance(version):
    """To the device `meta`, which every torch has."""
    path = export(Shifted(), (torch.zeros(2, 3),), version / "m.pt2", dynamic=({0: any_rows()},))
    program = ExportedProgram(path, "m", torch.device("meta"), {"x": 0})
    for _ in range(2):
        (result,) = program.call({"x": torch.zeros(4, 3, device="meta")})
        assert (result.device.type, result.shape) == ("meta", (4, 3))
    assert ExportedProgram(path, "m", None, {"x": 0}).device == torch.device("cpu")


def test_an_exported_program_remembers_a_bounded_number_of_shapes(version):
    sizes = {0: any_rows(), 1: torch.export.Dim("length", min=2, max=1000)}
    program = ExportedProgram(
        export(Doubles(), (torch.zeros(2, 3),), version / "m.pt2", dynamic=(sizes,)), "m", None, {"x": 0}
    )
    for length in range(2, 40):
        for rows in range(1, 40):
            program.call({"x": torch.zeros(rows, length)})
    assert len(program.checked) == MOST_SHAPES
    assert program.call({"x": torch.ones(1, 500)})[0].shape == (1, 500)
