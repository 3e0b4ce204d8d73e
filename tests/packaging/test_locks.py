"""The locks agree: images have the versions that the tests use."""

import re
from pathlib import Path

import pytest

REPOSITORY_ROOT = Path(__file__).parents[2]


def pins(lock: str) -> dict[str, str]:
    text = (REPOSITORY_ROOT / lock).read_text()
    return dict(re.findall(r"^([a-z0-9-]+)==([^ ;\\]+)", text, re.MULTILINE))


def test_both_kinds_of_image_run_the_same_onnxruntime() -> None:
    assert pins("server/gpu.lock")["onnxruntime-gpu"] == pins("requirements.lock")["onnxruntime"]


def test_no_package_is_pinned_twice() -> None:
    assert pins("server/gpu.lock").keys() & pins("requirements.lock").keys() == set()


@pytest.mark.parametrize("lock", ["server/server.lock", "operator/operator.lock"])
def test_images_have_the_tested_versions(lock: str) -> None:
    image = pins(lock)
    assert image
    assert image.items() <= pins("requirements.lock").items()
