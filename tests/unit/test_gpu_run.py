"""The run of the tests on a GPU: what is packed, what follows a test that hangs, and the table."""

from typing import Any

import pytest

from gpu.packing import MOST_BYTES, PackError, Size, needed, pins
from gpu.progress import Limits, Outcome, Progress, Result, Step, is_good, table

LIMITS = Limits(test_s=10, start_s=60, whole_s=300)
A, B = "tests/gpu/test_a_gpu.py", "tests/gpu/test_b_gpu.py"
METADATA = {
    "product": ["web>=2", "numpy>=2.0", "torch; extra == 'torch'", "old-fix; python_version < '3.12'"],
    "web": ["Small_Thing[fast]>1", "nvidia-ml-py>=12"],
    "small-thing": ["web", "colorama; sys_platform == 'win32'", "nvidia-cublas"],
    "nvidia-ml-py": [],
}
LOCK = r"""# A comment.
numpy==2.4.6 ; python_full_version < '3.12' \
    --hash=sha256:aa
numpy==2.5.5 ; python_full_version >= '3.12' \
    --hash=sha256:bb \
    --hash=sha256:cc
small-thing[fast]==1.0 \
    --hash=sha256:dd
"""


def test_the_pack_has_what_the_machine_lacks_and_nothing_else() -> None:
    assert needed(["product"], METADATA.__getitem__) == {"product", "web", "small-thing", "nvidia-ml-py"}


def test_packages_are_pinned_for_the_python_of_the_machine() -> None:
    assert pins(LOCK, frozenset({"numpy", "small-thing"})).splitlines() == [
        "numpy==2.5.5 \\",
        "    --hash=sha256:bb \\",
        "    --hash=sha256:cc",
        "small-thing[fast]==1.0 \\",
        "    --hash=sha256:dd",
    ]
    with pytest.raises(PackError, match=r"requirements\.lock does not have absent, other"):
        pins(LOCK, frozenset({"other", "absent"}))


def test_a_pack_that_cannot_be_copied_with_the_tree_is_refused() -> None:
    assert Size(MOST_BYTES - 1, 1).check() == "64.0 MiB of wheels and 0.0 MiB of the working tree; 64 MiB is the most"
    with pytest.raises(PackError, match="the pack is too large"):
        Size(MOST_BYTES, 1).check()


def ended(test: str, outcome: str = "passed", **more: Any) -> dict[str, Any]:
    return {"end": test, "outcome": outcome, "seconds": 1.0, "reason": "", "figures": {}, "details": "", **more}


def outcomes(progress: Progress) -> dict[str, str]:
    return {each.test.rpartition("::")[2] or each.test: each.outcome.value for each in progress.results}


def collected(*names: str, limits: Limits = LIMITS) -> Progress:
    """The process of the first of two files has found these tests."""
    progress = Progress([A, B], limits)
    assert progress.arguments == (A,)
    progress.started(0)
    progress.event({"tests": [f"{A}::{name}" for name in names]}, 5)
    return progress


def test_files_run_one_after_the_other() -> None:
    progress = collected("one", "two")
    for name in ("one", "two"):
        progress.event({"begin": f"{A}::{name}"}, 6)
        progress.event(ended(f"{A}::{name}"), 7)
    assert progress.step(8) is Step.WAIT
    assert progress.ended("exit code 0", 9) is Step.START
    assert progress.arguments == (B,)
    progress.started(10)
    progress.event(ended(B, "skipped", reason="not installed"), 11)
    progress.event({"tests": []}, 11)
    assert progress.ended("exit code 5", 12) is Step.END
    assert outcomes(progress) == {"one": "passed", "two": "passed", A.replace("_a", "_b"): "skipped"}
    assert is_good(progress.results)


def test_a_test_that_hangs_is_killed_and_the_others_run() -> None:
    progress = collected("one", "two", "three")
    progress.event({"begin": f"{A}::one"}, 6)
    progress.event(ended(f"{A}::one"), 7)
    progress.event({"begin": f"{A}::two"}, 8)
    assert (progress.step(17.9), progress.step(18)) == (Step.WAIT, Step.KILL)
    assert progress.ended("signal 9", 18.1) is Step.START
    assert progress.arguments == (f"{A}::three",)
    assert outcomes(progress) == {"one": "passed", "two": "timed out", "three": "not run", B: "not run"}
    assert progress.results[1].reason == "no end within 10 s"


def test_a_test_that_crashes_its_process_is_named() -> None:
    progress = collected("one", "two")
    progress.event({"begin": f"{A}::one"}, 6)
    assert progress.ended("signal 11", 7) is Step.START
    assert progress.results[0] == Result(f"{A}::one", Outcome.CRASHED, 1, "signal 11")
    assert progress.arguments == (f"{A}::two",)
    # Its process ends before the test begins: another process would do so again.
    progress.started(8)
    assert progress.ended("exit code 3", 9) is Step.START
    assert outcomes(progress)["two"] == "crashed"
    assert progress.arguments == (B,)


def test_a_file_that_cannot_be_collected_does_not_stop_the_others() -> None:
    progress = Progress([A, B], LIMITS)
    progress.started(0)
    assert (progress.step(59), progress.step(60)) == (Step.WAIT, Step.KILL)
    assert progress.ended("signal 9", 60) is Step.START
    progress.started(61)
    progress.event(ended(B, "failed", reason="ImportError"), 62)
    assert progress.ended("exit code 2", 63) is Step.END
    assert outcomes(progress) == {A: "timed out", B: "failed"}


def test_a_run_ends_at_its_limit_and_names_what_it_did_not_run() -> None:
    progress = collected("one", "two", limits=Limits(test_s=100, start_s=60, whole_s=30))
    progress.event({"begin": f"{A}::one"}, 6)
    assert (progress.step(29), progress.step(30)) == (Step.WAIT, Step.KILL)
    assert progress.ended("signal 9", 30) is Step.END
    assert outcomes(progress) == {"one": "timed out", "two": "not run", B: "not run"}
    early = Progress([A, B], Limits(test_s=100, start_s=60, whole_s=30))
    early.started(0)
    assert early.step(31) is Step.KILL
    assert early.ended("signal 9", 31) is Step.END
    assert outcomes(early) == {A: "not run", B: "not run"}


@pytest.mark.parametrize(
    ("found", "good"),
    [
        (["passed", "skipped"], True),
        (["skipped"], False),
        ([], False),
        *((["passed", bad], False) for bad in ("failed", "timed out", "crashed", "not run")),
    ],
)
def test_a_run_is_good_if_something_passed_and_nothing_failed(found: list[str], good: bool) -> None:
    assert is_good([Result(f"t{number}", Outcome(each)) for number, each in enumerate(found)]) is good


def test_the_table_has_figures_and_reasons() -> None:
    results = [
        Result("tests/gpu/test_a_gpu.py::test_speed", Outcome.PASSED, 1.25, figures={"bare": "90/s", "2": "0.9"}),
        Result("tests/gpu/test_b_gpu.py", Outcome.FAILED, 10, "Error:\n  " + "x" * 200),
        Result("tests/gpu/test_c_gpu.py", Outcome.NOT_RUN),
    ]
    assert table(results).splitlines() == [
        "test                       result      s  figure",
        "test_a_gpu.py::test_speed  passed    1.2  bare 90/s, 2 0.9",
        f"test_b_gpu.py              failed   10.0  Error: {'x' * 153}...",
        "test_c_gpu.py              not run   0.0",
        "",
        "1 passed, 1 failed, 1 not run",
    ]
