"""The locks agree: images have the versions that the tests use, and what their extras need."""

import re
import subprocess
import tomllib
from importlib.metadata import distribution, distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from halimede import __version__
from support.image import REPOSITORY_ROOT, documented_mb

EXTRAS = tomllib.loads((REPOSITORY_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LOCKS = {path.stem for path in (REPOSITORY_ROOT / "server").glob("*.lock")}
VARIANTS = sorted(LOCKS - {"server"})
TESTED = [variant for variant in VARIANTS if variant != "gpu"]
"""Variants whose packages the tests have. Those of the GPU's exclude the others."""


def pins(lock: str) -> dict[str, str]:
    text = (REPOSITORY_ROOT / lock).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)(?:\[.+\])?==([^ ;\\]+)", text, re.MULTILINE))


def test_both_kinds_of_image_run_the_same_onnxruntime() -> None:
    assert pins("server/gpu.lock")["onnxruntime-gpu"] == pins("requirements.lock")["onnxruntime"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_package_is_pinned_twice(variant: str) -> None:
    assert pins(f"server/{variant}.lock").keys() & pins("server/server.lock").keys() == set()


def test_each_variant_has_a_lock_an_extra_and_a_documented_size() -> None:
    assert set(VARIANTS) <= EXTRAS.keys()
    assert sorted(documented_mb()) == sorted(["cpu", *VARIANTS])


def closure(*requirements: str) -> set[str]:
    """The names of all packages that these requirements install here."""
    found: set[str] = set()
    done: set[str] = set()
    wanted = [Requirement(text) for text in requirements]
    while wanted:
        one = wanted.pop()
        if str(one) in done:
            continue
        done.add(str(one))
        found.add(canonicalize_name(one.name))
        for text in distribution(one.name).requires or ():
            inner = Requirement(text)
            if any(inner.marker is None or inner.marker.evaluate({"extra": extra}) for extra in ("", *one.extras)):
                wanted.append(inner)
    return found


@pytest.mark.parametrize("variant", TESTED)
def test_a_variants_locks_have_what_its_extras_need(variant: str) -> None:
    locked = pins("server/server.lock").keys() | pins(f"server/{variant}.lock").keys()
    needed = closure(f"halimede[onnx,{variant}]")
    assert needed - {"halimede"} - locked == set()
    assert pins(f"server/{variant}.lock").keys() - needed == set()


@pytest.mark.parametrize(
    ("lock", "extras"), [("requirements-demo.lock", "onnx,trees,demo"), ("requirements-docs.lock", "docs")]
)
def test_a_small_environment_has_what_its_extras_need(lock: str, extras: str) -> None:
    assert closure(f"halimede[{extras}]") - {"halimede"} - pins(lock).keys() == set()
    assert pins(lock).items() <= pins("requirements.lock").items()


@pytest.mark.parametrize("variant", ["cpu", *VARIANTS])
def test_the_dockerfile_builds_the_variant_from_these_locks(variant: str) -> None:
    """The shell of the Dockerfile says which locks and extras a variant has."""
    dockerfile = (REPOSITORY_ROOT / "Dockerfile.server").read_text()
    (locks,) = re.findall(r"for lock in (.+?); do", dockerfile)
    (extras,) = re.findall(r"RUN (case \$VARIANT in .+? esac);", dockerfile)
    script = f"{extras}; echo $extras {locks}"
    answer = subprocess.run(["sh", "-c", script], env={"VARIANT": variant}, capture_output=True, text=True, check=True)
    first, *found = answer.stdout.split()
    expected = {"cpu": "onnx", "gpu": "gpu"}.get(variant, f"onnx,{variant}")
    assert (first, found) == (expected, ["server.lock", *([] if variant == "cpu" else [f"{variant}.lock"])])
    assert {*first.split(",")} <= EXTRAS.keys()


def test_make_image_names_the_variant() -> None:
    def dry_run(*arguments: str) -> str:
        command = ["make", "--dry-run", "image", "ENGINE=podman", *arguments]
        return subprocess.run(command, cwd=REPOSITORY_ROOT, capture_output=True, text=True, check=True).stdout

    assert f"--tag halimede:{__version__} --build-arg" in dry_run()
    torch = dry_run("VARIANT=torch")
    assert f"--tag halimede:{__version__}-torch --build-arg" in torch
    assert "--build-arg VARIANT=torch" in torch


@pytest.mark.parametrize(
    "lock", ["server/server.lock", "operator/operator.lock", *(f"server/{variant}.lock" for variant in TESTED)]
)
def test_images_have_the_tested_versions(lock: str) -> None:
    image = pins(lock)
    assert image
    assert image.items() <= pins("requirements.lock").items()


def test_requirements_with_extras_are_pinned_with_them() -> None:
    """pip 23, which Python 3.11 brings, takes the newest release otherwise, and misses its hash."""
    text = (REPOSITORY_ROOT / "requirements.lock").read_text()
    pinned = {
        name: set(re.split(", *", extras))
        for name, extras in re.findall(r"^([a-z0-9-]+)\[(.+)\]==", text, re.MULTILINE)
    }
    wanted = [Requirement(text) for found in distributions() for text in found.requires or ()]
    asked = [
        one
        for one in wanted
        if one.extras and one.name in pins("requirements.lock") and (one.marker is None or one.marker.evaluate())
    ]
    assert "coverage" in {one.name for one in asked}
    assert [one for one in asked if not one.extras <= pinned.get(one.name, set())] == []
