"""The conformance kit for backends: passes for good ones, and each check fails for a backend that breaks its rule."""

import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from halimede.backends.discover import installed_backend
from halimede.conformance_kit.kit import CHECKS, HOSTED, Outcome, Verdict, make_subject, run_checks, write_sample
from halimede.conformance_kit.kit import DECOUPLED as DECOUPLED_CHECKS
from halimede.conformance_kit.subject import Subject
from halimede.core.inventory import Inventory
from halimede.core.types import DataType, InferenceError, InferenceRequest, Tensor
from halimede.processes.launcher import Launcher
from halimede.runtime.prepare import LoadOptions
from halimede.runtime.repository import ModelRepository
from support.broken_backends import BROKEN, CONFIGURED, DECOUPLED, REFUSED, SEQUENCES, STATE, install, write_model
from support.forked import run_python
from support.models import add_onnx_identity, add_simple, save_onnx, write_config


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    site = tmp_path_factory.mktemp("site")
    environment = install(site)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        # For worker processes.
        patch.setenv("PYTHONPATH", environment["PYTHONPATH"])
        installed_backend.cache_clear()
        yield environment
    installed_backend.cache_clear()


@pytest.fixture(scope="module")
def options(plugins: dict[str, str]) -> Iterator[LoadOptions]:  # its environment is inherited
    launcher = Launcher()
    yield LoadOptions(Inventory(()), {}, autocomplete=True, launcher=launcher)
    launcher.close()


def refused(_: object) -> Sequence[InferenceRequest]:
    data = np.array([0, 13, 0, 0], np.float32).tobytes()
    return [InferenceRequest("m", inputs=[Tensor("IN", DataType.FP32, (1, 4), data)])]


def subject_of(directory: Path, options: LoadOptions, backend: str, **settings: object) -> Subject:
    entry = ModelRepository((directory.parent,)).find(directory.name)
    return make_subject(entry, options, backend, shapes={}, cycles=6, **settings)  # type: ignore[arg-type]  # passed on


IN_THIS_PROCESS = [name for name in CHECKS if name not in HOSTED]
"""For further models: one of each kind is enough to try worker processes."""


def passed(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.check for outcome in outcomes if outcome.verdict is Verdict.OK]


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    return [str(outcome) for outcome in outcomes if outcome.verdict is Verdict.FAILED]


def test_good_plugin_passes_every_check(tmp_path: Path, options: LoadOptions) -> None:
    subject = subject_of(write_model(tmp_path / "m", "good"), options, "good", refused=refused)
    outcomes = list(run_checks(subject))
    assert passed(outcomes) == [name for name in CHECKS if name not in CONFIGURED], "\n".join(map(str, outcomes))
    assert failures(outcomes) == []


def test_threads_that_end_a_little_later_are_no_leak(tmp_path: Path, options: LoadOptions) -> None:
    subject = subject_of(write_model(tmp_path / "m", "endsthreadslate"), options, "endsthreadslate")
    (outcome,) = run_checks(subject, only=["cycles"])
    assert outcome.verdict is Verdict.OK, outcome.text


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
def test_good_plugin_of_sequences_passes_every_check(strategy: str, tmp_path: Path, options: LoadOptions) -> None:
    """With the oldest strategy rows belong to no sequence: the sums are states of the configuration."""
    model = write_model(tmp_path / "m", "sums" if strategy == "direct" else "statesums", SEQUENCES)
    if strategy == "oldest":
        config = model / "config.pbtxt"
        config.write_text(config.read_text().replace("direct { }", f"oldest {{ }}{STATE}"))
    subject = subject_of(model, options, "sums" if strategy == "direct" else "statesums", refused=refused)
    outcomes = list(run_checks(subject, only=CHECKS if strategy == "direct" else IN_THIS_PROCESS))
    missing = {"full-batch", "responses", *(("null-rows", "process") if strategy == "oldest" else ())}
    assert passed(outcomes) == [name for name in CHECKS if name not in missing], "\n".join(map(str, outcomes))
    assert failures(outcomes) == []


def test_good_decoupled_plugin_passes_its_checks(tmp_path: Path, options: LoadOptions) -> None:
    subject = subject_of(write_model(tmp_path / "m", "streams", DECOUPLED), options, "streams")
    outcomes = list(run_checks(subject))
    assert sorted(passed(outcomes)) == sorted(DECOUPLED_CHECKS), "\n".join(map(str, outcomes))
    assert failures(outcomes) == []


@pytest.mark.parametrize("broken", BROKEN)
def test_broken_plugin_fails_its_check(broken: str, tmp_path: Path, options: LoadOptions) -> None:
    check, text = BROKEN[broken]
    model = write_model(tmp_path / "m", broken.lower(), CONFIGURED.get(check, ""))
    subject = subject_of(model, options, broken.lower(), refused=refused, longest_wait_secs=3)
    (outcome,) = run_checks(subject, only=[check])
    assert outcome.verdict is Verdict.FAILED
    assert text in outcome.text
    # Every line says what is wrong, and then what to do.
    assert ";" in outcome.text


def test_every_check_has_a_backend_that_fails_it() -> None:
    assert {check for check, _ in BROKEN.values()} == set(CHECKS)


def test_identity_passes(tmp_path: Path, options: LoadOptions) -> None:
    subject = subject_of(write_sample(tmp_path, "identity"), options, "identity")
    assert failures(list(run_checks(subject, only=IN_THIS_PROCESS))) == []


@pytest.mark.parametrize("datatype", ["FP32", "BYTES", "BF16"])
def test_onnxruntime_passes(datatype: str, tmp_path: Path, options: LoadOptions) -> None:
    add_onnx_identity(tmp_path, "m", datatype, ["N", "M"])
    checks = CHECKS if datatype == "BYTES" else IN_THIS_PROCESS
    outcomes = list(run_checks(subject_of(tmp_path / "m", options, "onnxruntime"), only=checks))
    assert failures(outcomes) == []
    tried = {outcome.check for outcome in outcomes if outcome.verdict is Verdict.OK}
    # Only a text can be refused: by its encoding.
    assert set(checks) - tried - CONFIGURED.keys() <= {"refusals"}
    assert ("refusals" in tried) == (datatype == "BYTES")


def test_onnxruntime_passes_with_sequences(tmp_path: Path, options: LoadOptions) -> None:
    """The sum of a sequence, as a state of the configuration."""
    save_onnx(
        tmp_path / "m" / "1" / "model.onnx",
        [
            helper.make_node("Sub", ["READY", "START"], ["continues"]),
            helper.make_node("Mul", ["BEFORE", "continues"], ["kept"]),
            helper.make_node("Add", ["IN", "kept"], ["OUT"]),
            helper.make_node("Identity", ["OUT"], ["AFTER"]),
        ],
        [
            ("IN", "FP32", ["N", 4]),
            ("START", "FP32", ["N", 1]),
            ("READY", "FP32", ["N", 1]),
            ("BEFORE", "FP32", ["N", 4]),
        ],
        [("OUT", "FP32", ["N", 4]), ("AFTER", "FP32", ["N", 4])],
    )
    batching = SEQUENCES.replace("direct { }", f"direct {{ }}{STATE.replace('dims: -1', 'dims: 4')}")
    write_config(
        tmp_path / "m",
        f"""
        backend: "onnxruntime"
        max_batch_size: 4
        input {{ name: "IN" data_type: TYPE_FP32 dims: 4 }}
        output {{ name: "OUT" data_type: TYPE_FP32 dims: 4 }}
        {batching}
        """,
    )
    outcomes = list(run_checks(subject_of(tmp_path / "m", options, "onnxruntime"), only=IN_THIS_PROCESS))
    assert failures(outcomes) == []
    assert set(IN_THIS_PROCESS) - set(passed(outcomes)) <= {"full-batch", "dimensions", "no-elements", "refusals"}


def test_python_backend_has_checks_of_its_own(tmp_path: Path, options: LoadOptions) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(
        "class TritonPythonModel:\n    def execute(self, requests):\n        pass\n"
    )
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "python"\noutput { name: "O" data_type: TYPE_FP32 dims: 1 }')
    with pytest.raises(InferenceError, match="check its models with `halimede check`"):
        subject_of(tmp_path / "m", options, "python")


def command(*arguments: str | Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "halimede.backends.check", *arguments, environment=environment)


def test_command_reports_each_check_and_a_crash(tmp_path: Path, plugins: dict[str, str]) -> None:
    model = write_model(tmp_path / "m", "crashes")
    result = command("crashes", model, environment=plugins)
    lines = result.stdout.splitlines()
    assert lines[0] == "backend crashes, model m"
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["ok", name] for name in ("interface", "load", "completion", "single")
    ]
    assert lines[5].startswith("FAIL  full-batch    the process died with SIGSEGV during the check full-batch; ")
    assert (len(lines), result.returncode) == (6, 1)


def test_command_takes_requests_that_must_be_refused(tmp_path: Path, plugins: dict[str, str]) -> None:
    (tmp_path / "bad.json").write_text(REFUSED)
    model = write_model(tmp_path / "m", "failswholebatch")
    result = command("failswholebatch", model, "--refused", tmp_path / "bad.json", "--cycles=2", environment=plugins)
    assert [line for line in result.stdout.splitlines() if line.startswith("FAIL")] == [
        "FAIL  refusals      a usual request beside a refused request of the same batch fails: 13 is not allowed; "
        "raise RefusedRequestsError with the positions of the unusable requests before you compute"
    ]
    assert result.returncode == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("onnxruntime",), "backend 'onnxruntime' needs a file: give the directory of a model with 1/model.onnx"),
        (("nothing",), "unable to find backend library for backend 'nothing'"),
        (("identity", "simple"), "model 'simple' is of the backend 'onnxruntime', not 'identity'"),
        (("onnxruntime", "simple", "--shape=no:1"), "--shape names 'no', which is no input of model 'simple'"),
        (("onnxruntime", "simple", "--shape=no"), "write INPUT:SIZE,SIZE without the batch dimension"),
    ],
)
def test_command_says_why_it_cannot_begin(arguments: tuple[str, ...], text: str, tmp_path: Path) -> None:
    add_simple(tmp_path)
    given = [tmp_path / each if each == "simple" else each for each in arguments]
    result = command(*given, environment={})
    assert text in result.stderr
    assert result.returncode == 2
