"""AOTInductor packages. Compiling one takes a minute, so `make load` runs this."""

import os
import shutil
import tempfile
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from halimede.backends.pytorch.program import PackageProgram
from halimede.core.config.model_config import ModelConfig, ModelInput, ModelOutput
from halimede.core.repository.file_kinds import FileKind, Look
from halimede.core.types import ErrorCode, InferenceError
from halimede.runtime.file_look import look_at
from support.torch_models import BACKEND, BF16, CONTEXT, CPU, FP32, run, source

pytestmark = [
    pytest.mark.load,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("g++") is None, reason="compiling needs g++"),
]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(
        self, x: torch.Tensor, more: dict[str, torch.Tensor], *, k: torch.Tensor
    ) -> dict[str, list[torch.Tensor]]:
        return {"sums": [self.layer(x) + more["y"].sum(1)], "k": [k.to(torch.bfloat16)]}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("package") / "1"
    directory.mkdir()
    rows = torch.export.Dim("rows", min=1, max=64)
    length = torch.export.Dim("length", min=2, max=100)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Nested().eval(),
            (torch.zeros(2, 4), {"y": torch.zeros(2, 5, 3)}),
            {"k": torch.zeros(2, 5)},
            dynamic_shapes={"x": {0: rows}, "more": {"y": {0: rows, 1: length}}, "k": {0: rows, 1: length}},
        )
        torch._inductor.aoti_compile_and_package(program, package_path=str(directory / "model.pt2"))
    return directory / "model.pt2"


def inputs(rows: int, y: int, k: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(rows)
    shapes = {"INPUT__0": (rows, 4), "y": (rows, y, 3), "k": (rows, k)}
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_a_package_is_of_one_kind_and_in_no_doubt(package: Path) -> None:
    assert look_at(package) == Look(FileKind.AOTI)


def test_a_package_is_completed_from_its_source_and_a_run(package: Path) -> None:
    found = BACKEND.autocomplete(ModelConfig(), source(package))
    assert found.input == (
        ModelInput("INPUT__0", FP32, dims=(4,)),
        ModelInput("y", FP32, dims=(-1, 3)),
        ModelInput("k", FP32, dims=(-1,)),
    )
    assert found.output == (ModelOutput("OUTPUT__0", FP32, dims=(3,)), ModelOutput("OUTPUT__1", BF16, dims=(-1,)))
    assert found.max_batch_size == 4


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_batches_of_any_size_are_the_same_as_outside(package: Path, rows: int) -> None:
    config = BACKEND.autocomplete(ModelConfig(), source(package))
    given = inputs(rows, 7, 7)
    found = run(package, config, given)
    outside = torch._inductor.aoti_load_package(str(package))
    x, y, k = (torch.from_numpy(array.copy()) for array in given.values())
    expected = outside(x, {"y": y}, k=k)
    assert found["OUTPUT__0"].tobytes() == expected["sums"][0].detach().numpy().tobytes()
    assert found["OUTPUT__1"].tobytes() == expected["k"][0].view(torch.uint16).numpy().tobytes()


def test_sizes_that_do_not_fit_are_refused_before_the_library_reads_them(package: Path) -> None:
    config = BACKEND.autocomplete(ModelConfig(), source(package))
    instance = BACKEND.load(config, source(package)).create_instance(CPU)
    texts = []
    for given in (inputs(2, 7, 5), inputs(2, 101, 101), inputs(65, 7, 7)):
        with pytest.raises(InferenceError) as caught:
            instance.run(given, ["OUTPUT__0"], CONTEXT)
        assert caught.value.code is ErrorCode.INVALID_ARG
        texts.append(caught.value.message)
    instance.close()
    assert texts == [
        "dimension 1 of input 'k' is 5, and dimension 1 of input 'y' is 7; the model needs equal sizes",
        "dimension 1 of input 'y' is 101; the model takes at most 100",
        "dimension 0 of input 'INPUT__0' is 65; the model takes at most 64",
    ]


def test_a_configuration_that_differs_from_the_package_is_an_error(package: Path) -> None:
    config = BACKEND.autocomplete(ModelConfig(), source(package))
    wrong = replace(config, input=(replace(config.input[0], dims=(5,)), *config.input[1:]), max_batch_size=65)
    with pytest.raises(InferenceError) as caught:
        BACKEND.load(wrong, source(package))
    assert "tensor 'INPUT__0'" in caught.value.message
    assert "max_batch_size: 64" in caught.value.message
    output = replace(config, output=(ModelOutput("OUTPUT__0", BF16, dims=(3,)),))
    with pytest.raises(InferenceError, match="TYPE_BF16 for output 'OUTPUT__0', model provides float32"):
        run(package, output, inputs(1, 7, 7))


def test_a_package_without_its_source_is_checked_by_its_library(package: Path, tmp_path: Path) -> None:
    bare = tmp_path / "1" / "model.pt2"
    bare.parent.mkdir()
    with zipfile.ZipFile(package) as old, zipfile.ZipFile(bare, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".cpp"):
                new.writestr(entry, old.read(entry.filename))
    with pytest.raises(InferenceError, match="does not say its arguments"):
        BACKEND.autocomplete(ModelConfig(), source(bare))


def test_an_instance_of_another_device_is_refused(package: Path) -> None:
    names = {"INPUT__0": 0, "y": 1, "k": 2}
    with pytest.raises(InferenceError, match=r"compiled for 'cpu'.* write instance_group \[ { kind: KIND_CPU } \]"):
        PackageProgram(package, "m", "model", torch.device("cuda", 0), names, None)


def test_an_unpacked_package_leaves_no_files(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    config = BACKEND.autocomplete(ModelConfig(), source(package))
    instance = BACKEND.load(config, source(package)).create_instance(CPU)
    assert list(tmp_path.iterdir()) == []
    assert instance.run(inputs(2, 7, 7), ["OUTPUT__0"], CONTEXT)["OUTPUT__0"].shape == (2, 3)
    instance.close()
    assert (list(tmp_path.iterdir()), os.environ["TMPDIR"]) == ([], str(tmp_path))
