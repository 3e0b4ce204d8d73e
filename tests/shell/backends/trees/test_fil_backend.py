"""Files, read by the reader's process."""

import faulthandler
import os
import random
import resource
import signal
import struct
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halimede.backends.trees.files import FILENAMES
from halimede.backends.trees.forest import checked, from_arrays, to_arrays
from halimede.backends.trees.read_forest import read_forest
from halimede.backends.trees.reader import read_file
from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput
from halimede.core.types import ErrorCode, InferenceError
from support.lazily import Lazily
from support.processes import holding_no_more
from support.refusals import error_of
from support.tree_models import BACKEND, CPU, FP32, config, context, rows, run, source, targets

lightgbm = Lazily("lightgbm")
treelite = Lazily("treelite")
xgboost = Lazily("xgboost")

SOURCE = source(Path("m/1"))
TRAIN, TEST = rows(200, seed=1), rows(16, seed=2)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A directory with one model in every format that a library still writes, and XGBoost's answer."""
    folder = tmp_path_factory.mktemp("files")
    matrix = xgboost.DMatrix(TRAIN, label=targets(TRAIN))
    booster = xgboost.train({"objective": "binary:logistic", "max_depth": 3, "nthread": 1}, matrix, 3)
    booster.save_model(folder / "xgboost.json")
    booster.save_model(folder / "xgboost.ubj")
    treelite.frontend.from_xgboost(booster).serialize(folder / "checkpoint.tl")
    data = lightgbm.Dataset(TRAIN, targets(TRAIN))
    settings = {"objective": "binary", "num_leaves": 6, "verbose": -1, "num_threads": 1}
    lightgbm.train(settings, data, 3).save_model(folder / "model.txt")
    return folder, booster.inplace_predict(TEST)


def version(tmp_path, files, *names):
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).write_bytes((files[0] / name).read_bytes())
    return folder


def answer(settings, where):
    model = BACKEND.load(settings, where)
    instance = model.create_instance(CPU)
    result = instance.run({"input__0": TEST}, ["output__0"], context(len(TEST)))["output__0"]
    instance.close()
    model.close()
    return result


@pytest.mark.parametrize("model_type", ["xgboost_json", "xgboost_ubj", "treelite_checkpoint"])
def test_each_format_has_its_default_name(tmp_path, files, model_type):
    everything = [name for name in FILENAMES.values() if name != "xgboost.model"]
    where = source(version(tmp_path, files, *everything))
    found = answer(config([1], model_type=model_type), where)
    assert np.abs(found[:, 0] - files[1]).max() < 1e-6


def test_a_file_of_another_name_is_named_and_its_type_found(tmp_path, files):
    folder = version(tmp_path, files, "xgboost.json")
    (folder / "xgboost.json").rename(folder / "trees.bin")
    assert np.abs(answer(config([1]), source(folder, "trees.bin"))[:, 0] - files[1]).max() < 1e-6


def test_a_complete_configuration_is_left_as_it_is_without_reading(tmp_path):
    settings = config([1])
    assert BACKEND.autocomplete(settings, source(tmp_path / "nothing")) is settings


def test_autocomplete_fills_in_tensors_and_batching(tmp_path, files):
    where = source(version(tmp_path, files, "model.txt"))
    assert BACKEND.autocomplete(ModelConfig(backend="fil"), where) == ModelConfig(
        name="m",
        backend="fil",
        max_batch_size=1024,
        input=(ModelInput("input__0", FP32, dims=(5,)),),
        output=(ModelOutput("output__0", FP32, dims=(1,)),),
        dynamic_batching=ModelDynamicBatching(),
    )
    asks = replace(config(None, shap=()), max_batch_size=0, input=())
    completed = BACKEND.autocomplete(asks, source(where.artifact, **{"default-max-batch-size": "7"}))
    assert (completed.max_batch_size, [each.dims for each in (*completed.input, *completed.output)]) == (
        7,
        [(5,), (6,)],
    )


def test_a_missing_file_is_named_with_what_is_there(tmp_path, files):
    where = source(version(tmp_path, files, "model.txt"))
    error = error_of(BACKEND.load, config([1], model_type="xgboost"), where)
    assert error.code is ErrorCode.UNAVAILABLE
    assert "unable to find xgboost.model in" in error.message
    assert "of model_type 'xgboost': there is model.txt" in error.message
    with pytest.raises(InferenceError, match=r"unable to find xgboost.ubj, xgboost.json, .* for model 'm'"):
        BACKEND.load(config([1]), source(tmp_path / "nothing"))


@pytest.mark.parametrize(
    ("model_type", "name"),
    [("lightgbm", "xgboost.json"), ("xgboost", "checkpoint.tl")],
)
def test_a_file_of_another_type_is_refused_with_its_type(files, model_type, name):
    with holding_no_more(), pytest.raises(InferenceError) as caught:
        read_file(files[0] / name, model_type, SOURCE, allow_unknown_field=False)
    actual = next(kind for kind, filename in FILENAMES.items() if filename == name)
    assert caught.value.code is ErrorCode.INVALID_ARG
    assert caught.value.message.startswith(f"model 'm': {name} cannot be read as model_type '{model_type}': ")
    assert caught.value.message.endswith(f"; the file looks like one of model_type '{actual}'")


def test_unknown_fields_are_refused_unless_they_are_allowed(tmp_path, files):
    text = (files[0] / "xgboost.json").read_text()
    path = tmp_path / "xgboost.json"
    path.write_text(text.replace('{"learner":{', '{"learner":{"colour":"blue",', 1))
    with pytest.raises(InferenceError, match='"colour"'):
        read_file(path, "xgboost_json", SOURCE, allow_unknown_field=False)
    assert read_file(path, "xgboost_json", SOURCE, allow_unknown_field=True).trees == 3


def test_a_reader_that_crashes_is_one_error(tmp_path, files):
    # Treelite follows the offsets in this file without a check, outside of its memory.
    lines = (files[0] / "model.txt").read_text().split("\n")
    broken = [
        "left_child=" + " ".join(["1000000000"] * len(line.split())) if line.startswith("left_child=") else line
        for line in lines
    ]
    path = tmp_path / "model.txt"
    path.write_text("\n".join(broken))
    error = error_of(read_file, path, "lightgbm", SOURCE, allow_unknown_field=False)
    assert error.code is ErrorCode.INVALID_ARG
    assert "the reader crashed (SIGSEGV): the file is damaged" in error.message


def endless(folder, files):
    """A file in which every node is its own left child. Its reader takes memory as long as it runs."""
    lines = (files[0] / "model.txt").read_text().split("\n")
    path = folder / "model.txt"
    path.write_text(
        "\n".join(
            "left_child=" + " ".join(["0"] * len(line.split())) if line.startswith("left_child=") else line
            for line in lines
        )
    )
    return path


def test_a_reader_that_does_not_end_is_one_error(tmp_path, files):
    # On a fast machine the limit of memory comes before that of time.
    with pytest.raises(InferenceError, match=r"the reader did not end within 1 s|takes more than 1024 MiB"):
        read_file(endless(tmp_path, files), "lightgbm", SOURCE, allow_unknown_field=False, base_seconds=1)


def test_a_reader_that_needs_too_much_memory_names_the_setting(tmp_path, files):
    where = source(Path("m/1"), **{"read-memory-mb": "300"})
    error = error_of(read_file, endless(tmp_path, files), "lightgbm", where, allow_unknown_field=False)
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message.startswith("model 'm': reading model.txt takes more than 300 MiB of memory.")
    assert "--backend-config fil,read-memory-mb=N" in error.message


def test_the_memory_of_a_reader_is_limited():
    program = "from halimede.backends.trees.reader import limit_process; limit_process(1 << 30, 60); bytearray(3 << 30)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.stderr.endswith(b"MemoryError\n")


def test_without_treelite_the_error_names_the_extra(tmp_path, files, monkeypatch):
    (tmp_path / "treelite.py").write_text("raise ImportError('no treelite')")
    monkeypatch.chdir(tmp_path)
    # Modules in the current folder are not imported.
    assert read_file(files[0] / "model.txt", "lightgbm", SOURCE, allow_unknown_field=False).trees == 3
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert error_of(read_file, files[0] / "model.txt", "lightgbm", SOURCE, allow_unknown_field=False) == InferenceError(
        ErrorCode.UNSUPPORTED,
        "model 'm': treelite cannot be imported (no treelite); "
        "install the extra 'trees': pip install 'PATH[trees]', where PATH is the source folder or the wheel of Halimede",
    )


def mutated(content: bytes, seed: int) -> bytes:
    source_of_faults = random.Random(seed)
    data = bytearray(content)
    if seed % 5 == 0:
        return bytes(data[: source_of_faults.randrange(len(data))])
    for _ in range(source_of_faults.choice((1, 2, 8))):
        at = source_of_faults.randrange(len(data) - 8)
        match seed % 5:
            case 1:
                data[at] = source_of_faults.randrange(256)
            case 2:
                data[at : at + 4] = struct.pack("<i", source_of_faults.choice((-1, 0, 1, 7, 2**31 - 1)))
            case 3:
                del data[at : at + source_of_faults.randrange(1, 30)]
            case _:
                data[at:at] = data[at : at + source_of_faults.randrange(1, 30)]
    return bytes(data)


def read_in_forks(paths, kind):
    """What the reader's process does, without the time to start one: arrays, or None if it refuses, crashes or hangs.

    The fork of a large process takes longer than to read a file: one fork reads until a file ends it.
    """
    answers = [path.with_suffix(".npz") for path in paths]
    done = 0
    while done < len(paths):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            read_until_a_crash(list(zip(paths, answers, strict=True))[done:], kind, writing)
        os.close(writing)
        with open(reading, "rb") as progress:
            done += len(progress.read())
        _, status = os.waitpid(child, 0)
        if status:
            answers[done].unlink(missing_ok=True)
            done += 1
    for answer in answers:
        if answer.exists():
            with np.load(answer, allow_pickle=False) as arrays:
                yield dict(arrays)
        else:
            yield None


def read_until_a_crash(files, kind, progress):
    """Write a byte after each file, and exit."""
    code = 1
    try:
        faulthandler.disable()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        for path, answer in files:
            # Of CPU time: a file is read within milliseconds, and some damaged ones for ever.
            signal.setitimer(signal.ITIMER_PROF, 0.2)
            with suppress(Exception):
                arrays = to_arrays(read_forest(path, kind, allow_unknown_field=False))
                np.savez(answer, **arrays)
            os.write(progress, b".")
        code = 0
    finally:
        os._exit(code)


def fuzzed(folder, kind, content, seeds):
    """How many damaged files were read, and how many of their forests passed the check and ran."""
    x = np.concatenate([TEST, np.full((1, 5), np.nan, np.float32), np.full((1, 5), 1e30, np.float32)])
    paths = [folder / str(seed) for seed in seeds]
    for path, seed in zip(paths, seeds, strict=True):
        path.write_bytes(mutated(content, seed))
    found = passed = 0
    for arrays in read_in_forks(paths, kind):
        if arrays is None:
            continue
        found += 1
        try:
            forest = checked(from_arrays(arrays), "m")
            settings = config([forest.outputs], features=forest.features)
            run(forest, settings, np.resize(x, (len(x), forest.features)))
            passed += 1
        except InferenceError:
            continue
    return found, passed


@pytest.mark.parametrize("kind", ["xgboost_json", "xgboost_ubj", "lightgbm", "treelite_checkpoint"])
def test_what_treelite_makes_of_damaged_files_is_safe_to_run(tmp_path, files, kind):
    found, passed = fuzzed(tmp_path, kind, (files[0] / FILENAMES[kind]).read_bytes(), range(25))
    assert found >= passed > 0
