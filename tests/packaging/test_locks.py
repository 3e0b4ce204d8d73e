"""The locks agree: images have the versions that the tests use."""

import re
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY_ROOT = Path(__file__).parents[2]


def pins(lock: str) -> dict[str, str]:
    text = (REPOSITORY_ROOT / lock).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)(?:\[.+\])?==([^ ;\\]+)", text, re.MULTILINE))


def test_both_kinds_of_image_run_the_same_onnxruntime() -> None:
    assert pins("server/gpu.lock")["onnxruntime-gpu"] == pins("requirements.lock")["onnxruntime"]


def test_no_package_is_pinned_twice() -> None:
    assert pins("server/gpu.lock").keys() & pins("server/server.lock").keys() == set()


@pytest.mark.parametrize("lock", ["server/server.lock", "operator/operator.lock"])
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
