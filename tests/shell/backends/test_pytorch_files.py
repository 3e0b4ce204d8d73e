"""What a file is, without PyTorch."""

import pickle
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halimede.backends.api import ModelSource
from halimede.backends.pytorch.archive import (
    MOST_PICKLE_BYTES,
    Archive,
    TracedTensor,
    describe_pickle,
    read_archive,
    read_entry,
    traced_inputs,
)
from halimede.backends.pytorch.files import ModelFiles, find_files
from halimede.backends.pytorch.form import Form
from halimede.core.config.model_config import ModelConfig
from halimede.core.repository.file_kinds import FileKind
from halimede.core.repository.model_files import pickle_problem
from halimede.core.types import ErrorCode, InferenceError
from halimede.runtime.file_look import look_at
from support.examples import examples
from support.forked import run_python
from support.model_files import archive as zip_bytes
from support.model_files import zip64

SCRIPT = ("m/code/__torch__.py", "m/constants.pkl", "m/data.pkl", "m/version")


NEW_ZIP = zip_bytes(["m/version"]).replace(b"PK\x01\x02\x14\x03\x14", b"PK\x01\x02\x14\x03\x50")

BAD_NAME = zip_bytes(["m/ü"]).replace("ü".encode(), b"\xff\xff")


def archive(path: Path, *entries: str, **contents: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for entry in entries:
            file.writestr(entry, b"")
        for entry, content in contents.items():
            file.writestr(entry.replace("__", "/").replace("_pkl", ".pkl"), content)
    return path


def refused(work) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        work()
    return caught.value


class Evil:
    """Would create a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (open, (str(self._path), "w"))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (SCRIPT, Archive(Form.SCRIPT, "m")),
        ((*SCRIPT, "m/traced_inputs.pkl"), Archive(Form.SCRIPT, "m", traced="m/traced_inputs.pkl")),
        (("e/models/model.json", "e/archive_format"), Archive(Form.EXPORTED, "e", "e/models/model.json")),
        (
            ("a/data/aotinductor/model/x.wrapper.so", "a/archive_format"),
            Archive(Form.PACKAGE, "a", package="model"),
        ),
        (
            ("a/data/aotinductor/other/x.wrapper.so", "a/models/model.json", "a/archive_format"),
            Archive(Form.PACKAGE, "a", "a/models/model.json", "other"),
        ),
        (
            ("old/serialized_exported_program.json", "old/version"),
            Archive(Form.EXPORTED, "old", "old/serialized_exported_program.json"),
        ),
    ],
)
def test_the_entries_of_an_archive_say_what_it_is(tmp_path, entries, expected):
    assert read_archive(archive(tmp_path / "model.pt", *entries), "m") == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "model.pt is empty"),
        (b"PK\x03\x04 and so on", "model.pt is truncated"),
        (NEW_ZIP, "model.pt is an archive that cannot be read: zip file version 8.0"),
        (BAD_NAME, "model.pt is an archive that cannot be read: 'utf-8' codec can't decode"),
        (b"no model at all", "model.pt is not a file of PyTorch"),
        (b"\x40\0\0\0\0\0\0\0{}", "model.pt has weights alone (safetensors)"),
        (b"version https://git-lfs.github.com/spec/v1", "model.pt is a pointer of Git LFS"),
        (pickle.dumps(OrderedDict(w=1)), "model.pt has weights alone (a state_dict)"),
    ],
    ids=["empty", "truncated", "new zip", "bad name", "text", "safetensors", "lfs", "old pickle"],
)
def test_a_file_that_is_no_model_is_one_error_that_says_what_it_is(tmp_path, content, problem):
    path = tmp_path / "model.pt"
    path.write_bytes(content)
    error = refused(lambda: read_archive(path, "m"))
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith(f"model 'm': {problem}")
    assert "torch.export.save(" in error.message


def test_files_of_torch_save_are_described_and_not_unpickled(tmp_path):
    victim = tmp_path / "made"
    weights = archive(tmp_path / "weights.pt", w__data_pkl=pickle.dumps(OrderedDict(w=1), protocol=2))
    whole = archive(tmp_path / "whole.pt", w__data_pkl=pickle.dumps(Evil(victim), protocol=4))
    assert 'write runtime: "model.py"' in refused(lambda: read_archive(weights, "m")).message
    error = refused(lambda: read_archive(whole, "m"))
    assert "is a pickle of a whole module (class io.open" in error.message
    assert not victim.exists()


def test_a_pickle_that_is_too_large_to_look_into_is_not_read(tmp_path):
    path = tmp_path / "large.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("w/data.pkl", pickle.dumps(Evil(tmp_path / "made")) + bytes(MOST_PICKLE_BYTES))
    assert "was written by torch.save, without the model's code" in refused(lambda: read_archive(path, "m")).message


def test_a_pickle_of_a_module_is_named_by_its_class():
    module = b"\x80\x02cmy.net\nNet\nq\x00)\x81q\x01.ctorch.nn.modules.linear\nLinear\n"
    assert "class my.net.Net" in describe_pickle(module)
    # Protocol 2 looks for sets in Python 2's module.
    layer = b"\x80\x02ctorch.nn.modules.linear\nLinear\nc__builtin__\nset\n."
    assert "class torch.nn.modules.linear.Linear" in describe_pickle(layer)
    assert "state_dict" in describe_pickle(b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n.")
    assert "state_dict" in describe_pickle(b"\x80\x02ccollections\nOrderedDict\ncnumpy.core.multiarray\nscalar\n.")
    # Damaged: what comes before the damage counts.
    assert "class a.B" in describe_pickle(b"\x80\x02ca\nB\n\xff\xff")


def test_an_archive_of_several_models_must_say_which_is_served(tmp_path):
    two = archive(tmp_path / "m.pt2", "a/models/one.json", "a/models/two.json", "a/archive_format")
    assert "m.pt2 has 2 models (models/one.json, models/two.json)" in refused(lambda: read_archive(two, "m")).message
    nothing = archive(tmp_path / "m.zip", "a/readme")
    assert "has no model of PyTorch in it" in refused(lambda: read_archive(nothing, "m")).message


def test_damaged_and_large_entries_are_refused(tmp_path):
    path = archive(tmp_path / "m.pt", a__b=b"x" * 1000)
    assert read_entry(path, "a/b", 1000) == b"x" * 1000
    assert "has 1000 bytes in a/b, at most 999 are read" in refused(lambda: read_entry(path, "a/b", 999)).message
    assert "m.pt is damaged: a/c" in refused(lambda: read_entry(path, "a/c", 9)).message
    path.write_bytes(path.read_bytes().replace(b"xxx", b"yyy", 1))
    assert "m.pt is damaged: a/b" in refused(lambda: read_entry(path, "a/b", 1000)).message


# As torch.jit.trace writes it, of one FP32 tensor of shape [2, 4].
TRACED = (
    b"\x80\x02ctorch.jit._pickle\nrestore_type_tag\nq\0}(X\x07\0\0\0forwardh\0](ctorch._utils\n_rebuild_tensor_v2\n"
    b"((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\x000X\x03\0\0\0cpuK\x08tQK\0(K\x02K\x04t(K\x04K\x01t\x89"
    b"ccollections\nOrderedDict\n)RtReX\x09\0\0\0List[Any]\x86RuX\x14\0\0\0Dict[str, List[Any]]\x86R."
)


def test_the_example_of_a_traced_model_is_read_without_its_classes(tmp_path):
    assert traced_inputs(TRACED) == (TracedTensor("FloatStorage", (2, 4)),)
    victim = tmp_path / "made"
    assert traced_inputs(pickle.dumps(Evil(victim))) is None
    assert not victim.exists()
    assert traced_inputs(TRACED[:-20]) is None
    assert traced_inputs(pickle.dumps({"forward": ["text"]})) is None
    assert traced_inputs(pickle.dumps([])) is None


def found(directory: Path, filename: str = "model.pt", **fields: str) -> ModelFiles:
    return find_files(ModelConfig(**fields), ModelSource("m", 1, directory.parent, directory / filename))


def test_a_module_has_its_code_and_the_weights_of_the_same_name(tmp_path):
    (tmp_path / "model.py").touch()
    assert found(tmp_path, runtime="model.py") == ModelFiles(Form.MODULE, tmp_path / "model.py")
    (tmp_path / "model.pt").write_bytes(b"weights")
    code, weights = tmp_path / "model.py", tmp_path / "model.pt"
    assert found(tmp_path, runtime="model.py") == ModelFiles(Form.MODULE, code, weights=weights)
    (tmp_path / "net.py").touch()
    assert found(tmp_path, "net.py") == ModelFiles(Form.MODULE, tmp_path / "net.py")


def test_the_runtime_serves_torchscript_where_there_is_no_code(tmp_path):
    archive(tmp_path / "model.pt", *SCRIPT)
    assert found(tmp_path, runtime="model.py").form is Form.SCRIPT


def test_a_server_without_torch_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from halimede.backends.pytorch import PyTorchBackend\n"
        "from halimede.backends.pytorch.runtime import runtime\n"
        "print(PyTorchBackend().supports_gpu())\n"
        "try: runtime()\n"
        "except Exception as error: print(repr(error))\n"
    )
    done = run_python("-c", code)
    assert done.stdout.startswith('False\n<InferenceError UNSUPPORTED "torch cannot be imported (')
    assert "install the extra 'torch': pip install 'PATH[torch]'" in done.stdout


def test_a_missing_file_is_an_error_that_names_what_is_there(tmp_path):
    error = refused(lambda: found(tmp_path))
    assert error == InferenceError(ErrorCode.UNAVAILABLE, f"unable to find '{tmp_path / 'model.pt'}' for model 'm'")
    (tmp_path / "net.pt2").touch()
    assert "there is 'net.pt2'; rename it to 'model.pt'" in refused(lambda: found(tmp_path)).message
    (tmp_path / "model.py").touch()
    assert 'write runtime: "model.py" in config.pbtxt' in refused(lambda: found(tmp_path)).message


PARTS = (
    *("archive_format", "models/model.json", "models/x", "data/aotinductor/model/x.so", "data/aotinductor/x"),
    *("code/x", "code/__torch__.py", "constants.pkl", "data.pkl", "serialized_exported_program.json", "xaotinductor/y"),
    *("models/model.json~x", "version"),
)

PROGRAM = re.compile(r"([^/]*/)?(models/|serialized_exported_program\.json$)")


@given(st.data())
@settings(max_examples=examples(300))
def test_what_is_allowed_without_pickles_is_never_loaded_by_unpickling(tmp_path_factory, data):
    members = st.tuples(st.sampled_from(["m/", "m/", "n/", ""]), st.sampled_from(PARTS))
    texts = ["".join(each) for each in data.draw(st.lists(members, min_size=1, max_size=6, unique=True))]
    content = (zip64 if data.draw(st.booleans()) else zip_bytes)(texts)
    first = zip_bytes([f"m/{name}" for name in data.draw(st.lists(st.sampled_from(PARTS), max_size=3, unique=True))])
    content = data.draw(st.sampled_from([b"", b"PK\x03\x04", first])) + content.replace(b"~", b"\0")
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(len(content) // 2, len(content) - 1))
        content = content[:at] + bytes([data.draw(st.sampled_from([0, 1, 22, 80, 255]))]) + content[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "generated.pt"
    path.write_bytes(content)
    look = look_at(path)
    if look is None or pickle_problem("pytorch", path.name, look, ()):
        return
    try:
        found = read_archive(path, "m")
    except InferenceError:
        return
    assert (found.form, look.kind) in [(Form.SCRIPT, FileKind.TORCHSCRIPT), (Form.PACKAGE, FileKind.AOTI)]
    # The function that loads packages unpickles the exported programs that are in them.
    with zipfile.ZipFile(path) as file:
        assert found.form is Form.SCRIPT or not [name for name in file.namelist() if PROGRAM.match(name)]
