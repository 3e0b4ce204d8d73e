"""The backend with the real PyTorch, in this process."""

import gc
import logging
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from halimede.backends.api import RefusedRequestsError, RunContext
from halimede.core.config.model_config import (
    ModelOutput,
    ModelSequenceBatching,
    SequenceState,
)
from halimede.core.repository.file_kinds import FileKind, Look
from halimede.core.types import DataType, ErrorCode, InferenceError, InferenceRequest
from halimede.runtime.file_look import look_at
from halimede.workers.worker import BatchItem
from support.canaries import exported_program
from support.torch_models import (
    BACKEND,
    BF16,
    BYTES,
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

pytestmark = pytest.mark.timeout(600)  # importing torch and its compilers takes long on a busy machine

X = np.random.default_rng(3).standard_normal((5, 8)).astype(np.float32)
NETWORK = config({"x": (FP32, 8)}, {"y": (FP32, 3)})
ADD_SUB = config({"a": (FP32, 2), "b": (FP32, 2)}, {"sum": (FP32, 2), "difference": (FP32, 2)})


def outside(module: nn.Module, array: np.ndarray) -> np.ndarray:
    """What the module computes without the server."""
    with torch.inference_mode():
        return module.eval()(torch.from_numpy(array.copy())).numpy()


@pytest.fixture
def version(tmp_path: Path) -> Path:
    directory = tmp_path / "1"
    directory.mkdir()
    return directory


def test_every_form_computes_the_same_bits_as_outside(version):
    network = Network()
    expected = outside(network, X)
    script(network, version / "s.pt")
    trace(network, (torch.zeros(2, 8),), version / "t.pt")
    export(network, (torch.zeros(2, 8),), version / "e.pt2", dynamic=({0: any_rows()},))
    (version / "net.py").write_text(MODULE)
    torch.save(network.state_dict(), version / "net.pt")
    by_path = config({"ARGS[0]": (FP32, 8)}, {"RESULT": (FP32, 3)})
    found = {
        "script": run(version / "s.pt", NETWORK, {"x": X})["y"],
        "trace": run(version / "t.pt", NETWORK, {"x": X})["y"],
        "export": run(version / "e.pt2", by_path, {"ARGS[0]": X})["RESULT"],
        "module": run(version / "net.py", NETWORK, {"x": X})["y"],
    }
    assert {name: array.tobytes() == expected.tobytes() for name, array in found.items()} == dict.fromkeys(found, True)
    # What PyTorch writes is of one kind, and in no doubt.
    assert {name: look_at(version / name) for name in ("s.pt", "t.pt", "e.pt2", "net.pt")} == {
        "s.pt": Look(FileKind.TORCHSCRIPT),
        "t.pt": Look(FileKind.TORCHSCRIPT),
        "e.pt2": Look(FileKind.TORCH_EXPORT),
        "net.pt": Look(FileKind.TORCH_SAVE),
    }


class Same(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("datatype", [each for each in DataType if each not in (DataType.INVALID, BYTES)], ids=str)
def test_every_datatype_goes_through_unchanged(version, datatype):
    raw = (np.arange(6 * datatype.itemsize) * 37 % 251).astype(np.uint8)
    raw = raw % 2 if datatype is DataType.BOOL else raw
    array = np.frombuffer(raw.tobytes(), datatype.dtype).reshape(2, 3)
    result = run(script(Same(), version / "m.pt"), config({"x": (datatype, 3)}, {"y": (datatype, 3)}), {"x": array})
    assert (result["y"].dtype, result["y"].tobytes()) == (datatype.dtype, array.tobytes())


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (x * k).sum()


def test_clients_see_a_scalar_as_one_element(version):
    example = (torch.zeros(3), torch.tensor(2.0))
    inputs = {"ARGS[0]": floats(1, 2, 3), "ARGS[1]": floats(2)}
    exported = config({"ARGS[0]": (FP32, 3), "ARGS[1]": (FP32, 1)}, {"RESULT": (FP32, 1)}, max_batch_size=0)
    assert run(export(Scaled(), example, version / "e.pt2"), exported, inputs)["RESULT"].tolist() == [12]


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.float32) * 2).to(torch.bfloat16)


def test_bfloat16_is_computed_in_its_own_type(version):
    bits = np.array([[0x3F80], [0xC000]], dtype=np.uint16)
    result = run(script(Halves(), version / "m.pt"), config({"x": (BF16, 1)}, {"y": (BF16, 1)}), {"x": bits})
    assert result["y"].tolist() == [[0x4000], [0xC080]]


def test_tensors_are_not_copied_on_the_cpu(version):
    """Also not inputs at any place of a message, as long as they are aligned."""
    array = np.frombuffer(bytearray(40), np.float32)[1:9].reshape(1, 8)
    result = run(script(Same(), version / "m.pt"), config({"x": (FP32, 8)}, {"y": (FP32, 8)}), {"x": array})
    assert np.shares_memory(result["y"], array)


def test_names_may_be_arguments_indices_or_in_order(version):
    path = script(AddSub(), version / "m.pt")
    a, b = floats([5, 6]), floats([1, 2])
    swapped = config({"b": (FP32, 2), "a": (FP32, 2)}, {"sum": (FP32, 2), "difference": (FP32, 2)})
    indexed = config({"I__1": (FP32, 2), "I__0": (FP32, 2)}, {"O__1": (FP32, 2)})
    ordered = config({"one": (FP32, 2), "two": (FP32, 2)}, {"s": (FP32, 2), "d": (FP32, 2)})
    assert run(path, swapped, {"a": a, "b": b})["difference"].tolist() == [[4, 4]]
    assert run(path, indexed, {"I__0": a, "I__1": b})["O__1"].tolist() == [[4, 4]]
    assert run(path, ordered, {"one": a, "two": b})["d"].tolist() == [[4, 4]]
    assert list(run(path, ADD_SUB, {"a": a, "b": b}, ["sum"])) == ["sum"]


class Named(nn.Module):
    def forward(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"total": tensors["x"] + tensors["y"], "x": tensors["x"]}


def test_dictionaries_take_and_give_tensors_by_name(version):
    path = script(Named(), version / "m.pt")
    settings = config({"y": (FP32, 1), "x": (FP32, 1)}, {"total": (FP32, 1)})
    assert run(path, settings, {"x": floats([1]), "y": floats([2])})["total"].tolist() == [[3]]
    wrong = config({"y": (FP32, 1), "x": (FP32, 1)}, {"sum": (FP32, 1)})
    assert "forward returns the names total, x" in refused(lambda: run(path, wrong, {})).message


class Shout(nn.Module):
    def forward(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]


def test_lists_of_strings_are_bytes_of_one_dimension(version):
    path = script(Shout(), version / "m.pt")
    rows = np.array([[b"a\xc3\xbc"], [b"b"]], dtype=object)
    batched = run(path, config({"t": (BYTES, 1)}, {"u": (BYTES, 1)}), {"t": rows})
    assert batched["u"].tolist() == [["Aü"], ["B"]]  # TorchScript knows ASCII alone
    whole = run(path, config({"t": (BYTES, -1)}, {"u": (BYTES, -1)}, max_batch_size=0), {"t": rows.reshape(-1)})
    assert whole["u"].shape == (2,)
    wide = config({"t": (BYTES, 2)}, {"u": (BYTES, 2)})
    assert "write dims: [ 1 ]" in refused(lambda: run(path, wide, {})).message
    number = config({"t": (FP32, 1)}, {"u": (BYTES, 1)})
    assert (
        "input 't' is TYPE_FP32, and the model takes a list of strings"
        in refused(lambda: run(path, number, {})).message
    )


def test_a_string_that_is_not_utf8_fails_only_its_request(version):
    loaded = BACKEND.load(config({"t": (BYTES, 1)}, {"u": (BYTES, 1)}), source(script(Shout(), version / "m.pt")))
    instance = loaded.create_instance(CPU)
    items = [BatchItem(key, InferenceRequest("m"), 1, cancelled=False) for key in range(2)]
    array = np.array([[b"fine"], [b"a\xff"]], dtype=object)
    with pytest.raises(RefusedRequestsError) as caught:
        instance.run({"t": array}, ["u"], RunContext(["", ""], [1, 1], items))
    instance.close()
    assert {at: error.code for at, error in caught.value.errors.items()} == {1: ErrorCode.INVALID_ARG}


class Masked(nn.Module):
    def forward(
        self, x: torch.Tensor, scale: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        if scale is not None:
            x = x * scale
        if mask is not None:
            x = x * mask
        return x


def test_an_optional_input_that_is_left_out_has_its_default(version):
    path = script(Masked(), version / "m.pt")
    inputs = {"x": (FP32, 1), "scale": (FP32, 1), "mask": (FP32, 1)}
    settings = config(inputs, {"y": (FP32, 1)})
    settings = replace(settings, input=tuple(replace(each, optional=each.name != "x") for each in settings.input))
    assert run(path, settings, {"x": floats([3])})["y"].tolist() == [[3]]
    assert run(path, settings, {"x": floats([3]), "mask": floats([5])})["y"].tolist() == [[15]]
    everything = {"mask": floats([5]), "scale": floats([2]), "x": floats([3])}
    assert run(path, settings, everything)["y"].tolist() == [[30]]


class Accumulates(nn.Module):
    """Writes its result into the state that it was given."""

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state.add_(x)
        return state * 1, state


STATEFUL = replace(
    config({"x": (FP32, 1)}, {"y": (FP32, 1)}),
    sequence_batching=ModelSequenceBatching(
        state=(SequenceState(input_name="state", output_name="state__1", data_type=FP32, dims=(1,)),)
    ),
)


def test_a_model_that_writes_to_its_inputs_cannot_change_a_state(version):
    settings = replace(STATEFUL, output=(ModelOutput("y__0", FP32, dims=(1,)),))
    state = floats([10])
    result = run(
        script(Accumulates(), version / "m.pt"), settings, {"x": floats([1]), "state": state}, ["y__0", "state__1"]
    )
    assert (result["y__0"].tolist(), result["state__1"].tolist(), state.tolist()) == ([[11]], [[11]], [[10]])


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 0 + self.calls


def test_a_run_at_load_does_not_count(version):
    settings = config({"x": (FP32, 1)}, {"y": (FP32, 1)})
    assert run(script(Counts(), version / "m.pt"), settings, {"x": floats([0])})["y"].tolist() == [[1]]
    (version / "net.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.register_buffer('calls', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.calls += 1\n        return x * 0 + self.calls\n"
    )
    compiled = replace(settings, parameters=parameters(TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "eager"}'))
    assert run(version / "net.py", compiled, {"x": floats([0])})["y"].tolist() == [[1]]


class Random(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand([1])


def test_a_run_at_load_draws_no_random_numbers(version):
    path = script(Random(), version / "m.pt")
    torch.manual_seed(4)
    result = run(path, config({"x": (FP32, 1)}, {"y": (FP32, 1)}), {"x": floats([0])})
    torch.manual_seed(4)
    assert result["y"].tolist() == torch.rand([1, 1]).tolist()


def test_an_output_of_another_type_is_an_error_at_load(version):
    path = script(Network(), version / "m.pt")
    error = refused(lambda: run(path, config({"x": (FP32, 8)}, {"y": (INT64, 3)}), {"x": X}))
    assert error == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': configuration expects datatype TYPE_INT64 for output 'y', model provides float32",
    )
    whole = script(Whole(), version / "w.pt")
    error = refused(lambda: run(whole, config({"x": (FP32, 3)}, {"y": (FP32, 3)}), {}))
    assert "output 'y' has shape [3] for a batch of 1 rows" in error.message


class Picky(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert bool((x > 0).all()), "only positive numbers"
        return x


def test_a_model_that_does_not_take_zeros_is_served_and_its_errors_are_short(version, caplog):
    caplog.set_level(logging.INFO)
    path = script(Picky(), version / "m.pt")
    settings = config({"x": (FP32, 1)}, {"y": (FP32, 1)})
    assert run(path, settings, {"x": floats([1])})["y"].tolist() == [[1]]
    assert "it does not take zeros" in caplog.text
    text = "Failed to process the request(s) for model instance 'm_0', message: RuntimeError: AssertionError: "
    assert refused(lambda: run(path, settings, {"x": floats([-1])})) == InferenceError(
        ErrorCode.INTERNAL, f"{text}only positive numbers"
    )


def test_a_model_saved_in_training_mode_is_served_with_a_warning(version, caplog):
    module = Network()
    path = script(module, version / "m.pt")
    run(path, NETWORK, {"x": X})
    assert "training mode" not in caplog.text
    with pytest.warns(FutureWarning):
        torch.jit.script(module.train()).save(str(path))
    run(path, NETWORK, {"x": X})
    assert "was saved in training mode" in caplog.text


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import no_such_module", "the import of net.py failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "net.py has no class derived from torch.nn.Module"),
        ("import torch\nclass M(torch.nn.Module):\n    def __init__(self, n): ...", "M() of net.py failed"),
        (MODULE.replace("16, 3", "16, 4"), "the weights in net.pt do not fit Network"),
    ],
    ids=["import", "no class", "constructor", "weights"],
)
def test_a_module_that_cannot_be_loaded_is_one_clear_error(version, code, problem):
    (version / "net.py").write_text(code)
    torch.save(Network().state_dict(), version / "net.pt")
    assert problem in refused(lambda: run(version / "net.py", NETWORK, {"x": X})).message


def test_weights_that_are_a_pickle_of_a_module_are_refused(version):
    (version / "net.py").write_text(MODULE)
    torch.save(Network(), version / "net.pt")
    message = refused(lambda: run(version / "net.py", NETWORK, {"x": X})).message
    assert "net.pt has no plain weights" in message
    assert "torch.save(model.state_dict(), path)" in message


VECTOR = config({"INPUT__0": (FP32, 2)}, {"OUTPUT__0": (FP32, 2)}, max_batch_size=0)


def test_an_exported_program_is_not_unpickled_without_allow_pickle(version, tmp_path):
    path = exported_program(version / "model.pt2", tmp_path / "marker")
    without = replace(source(path), allow_pickle=False)
    calls = (BACKEND.load, BACKEND.check, BACKEND.autocomplete)
    errors = [refused(partial(call, config, without)) for call in calls for config in [replace(VECTOR, output=())]]
    assert {(error.code, error.message.partition(", and")[0]) for error in errors} == {
        (ErrorCode.UNSUPPORTED, "model 'm': 'model.pt2' contains pickles: it is an archive of torch.export")
    }
    assert not (tmp_path / "marker").exists()
    # The canary is one.
    with pytest.raises(RuntimeError):
        BACKEND.load(VECTOR, source(path)).create_instance(CPU)
    assert (tmp_path / "marker").exists()


def test_the_programs_beside_a_packages_library_are_not_unpickled(version, tmp_path):
    # Such a package is refused without pickles. So this is a file that takes the place of another one during a load.
    library = "data/aotinductor/model/x.wrapper"
    more = {f"{library}.so": "", f"{library}_metadata.json": '{"AOTI_DEVICE_KEY": "cpu"}'}
    path = exported_program(version / "model.pt2", tmp_path / "marker", more)
    with pytest.raises(RuntimeError, match="file too short"):
        BACKEND.load(VECTOR, source(path)).create_instance(CPU)
    assert not (tmp_path / "marker").exists()


def test_a_compiler_that_fails_is_an_error_at_load(version):
    (version / "net.py").write_text(MODULE)
    settings = replace(NETWORK, parameters=parameters(TORCH_COMPILE_OPTIONAL_PARAMETERS='{"backend": "none such"}'))
    assert "none such" in refused(lambda: run(version / "net.py", settings, {"x": X})).message


class Imaginary(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(x, x)


def test_a_datatype_that_no_answer_can_carry_is_named(version):
    path = script(Imaginary(), version / "m.pt")
    error = refused(lambda: run(path, config({"x": (FP32, 8)}, {"y": (FP32, 3)}), {"x": X}))
    assert "expects datatype TYPE_FP32 for output 'y', model provides complex64" in error.message
    message = refused(lambda: BACKEND.autocomplete(config({"x": (FP32, 8)}, {}), source(path))).message
    assert "output 'OUTPUT__0' is torch.complex64, which no answer can carry" in message


def test_the_text_of_an_error_is_cut(version):
    (version / "net.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n    def forward(self, x):\n        raise ValueError('no' * 5000)\n"
    )
    message = refused(lambda: run(version / "net.py", NETWORK, {"x": X})).message
    assert (message.endswith("nono..."), 1024 < len(message) < 1200) == (True, True)


def test_settings_of_torchscript_keep_the_answers(version):
    path = script(Network(), version / "m.pt")
    settings = replace(
        NETWORK,
        parameters=parameters(
            INFERENCE_MODE="false", ENABLE_JIT_PROFILING="true", ENABLE_JIT_EXECUTOR="true", DISABLE_CUDNN="false"
        ),
    )
    assert run(path, settings, {"x": X})["y"].tobytes() == outside(Network(), X).tobytes()


def script_modules() -> int:
    gc.collect()
    return sum(torch.jit.ScriptModule in type(each).__mro__ for each in gc.get_objects())


@pytest.mark.parametrize(
    "cycles", [5, pytest.param(20, marks=pytest.mark.large), pytest.param(100, marks=pytest.mark.load)]
)
def test_instances_that_are_closed_are_freed(version, cycles):
    path = script(Network(), version / "m.pt")
    gone: list[weakref.ref] = []
    before = script_modules()
    for _ in range(cycles):
        loaded = BACKEND.load(NETWORK, source(path))
        instance = loaded.create_instance(CPU)
        result = instance.run({"x": X}, ["y"], CONTEXT)["y"]
        gone.append(weakref.ref(instance))
        instance.close()
        loaded.close()
        del loaded, instance
    gc.collect()
    assert [each() for each in gone] == [None] * cycles
    assert script_modules() <= before
    assert result.tobytes() == outside(Network(), X).tobytes()


def test_gpu_support_is_found_without_importing_torch(monkeypatch, tmp_path):
    package = tmp_path / "torch"
    (package / "lib").mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, "torch")
    assert BACKEND.supports_gpu() is False
    (package / "lib" / "libtorch_cuda.so").touch()
    assert BACKEND.supports_gpu() is True
