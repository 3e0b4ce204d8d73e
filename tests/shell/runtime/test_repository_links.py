"""Links in a model's directory: what they lead to counts as the model's, within bounds."""

from pathlib import Path

import pytest

from halimede.runtime.repository import MAX_FILES_ELSEWHERE, ModelEntry, ModelRepository


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """The version directory of model `m`."""
    path = tmp_path / "models" / "m" / "1"
    path.mkdir(parents=True)
    return path


def find(version: Path) -> ModelEntry:
    return ModelRepository((version.parents[1],)).find("m")


def many_files(directory: Path, number: int) -> Path:
    (directory / "deep").mkdir(parents=True)
    for each in range(number - 1):
        (directory / "deep" / f"{each:05}").touch()
    return directory


def test_a_link_to_a_small_directory_elsewhere_is_part_of_the_model(version: Path, tmp_path: Path) -> None:
    weights = many_files(tmp_path / "weights", MAX_FILES_ELSEWHERE)
    (version / "model.savedmodel").symlink_to(weights)
    before = find(version)
    (weights / "deep" / "00007").write_text("changed")
    after = find(version)
    assert before.versions == after.versions == {1: ("model.savedmodel",)}
    assert before.sources != after.sources
    assert before.fingerprint != after.fingerprint


def test_a_link_to_many_files_elsewhere_is_not_followed(version: Path, tmp_path: Path) -> None:
    weights = many_files(tmp_path / "weights", MAX_FILES_ELSEWHERE + 1)
    (version / "weights").symlink_to(weights)
    (version / "model.py").touch()
    before = find(version)
    (weights / "deep" / "00007").write_text("changed")
    after = find(version)
    assert (before.sources, before.fingerprint) == (after.sources, after.fingerprint)
    (version / "model.py").write_text("changed")
    assert find(version).sources != before.sources


def test_a_model_with_a_link_to_the_root_is_found(version: Path) -> None:
    for name in ("root", "again"):
        (version / name).symlink_to("/")
    assert find(version).versions == {1: ("again", "root")}


def test_a_version_that_is_a_link_is_read_wholly(version: Path, tmp_path: Path) -> None:
    elsewhere = many_files(tmp_path / "mounted", MAX_FILES_ELSEWHERE + 1)
    (elsewhere / "within").symlink_to("deep")
    version.rmdir()
    version.symlink_to(elsewhere)
    before = find(version)
    (elsewhere / "deep" / "00007").write_text("changed")
    assert find(version).sources != before.sources


def test_loops_of_links_end(version: Path) -> None:
    (version / "self").symlink_to("../1")
    (version / "up").symlink_to("../..")
    (version / "model.py").touch()
    assert find(version).versions == {1: ("model.py", "self", "up")}


def test_a_model_is_gone_if_no_readable_repository_has_an_entry_of_its_name(tmp_path: Path) -> None:
    roots = tmp_path / "one", tmp_path / "two"
    for root in roots:
        root.mkdir()
    (roots[0] / "linked").symlink_to("nowhere")
    (roots[1] / "m").mkdir()
    repository = ModelRepository(roots)
    assert [repository.is_gone(name) for name in ("m", "linked", "removed")] == [False, False, True]
    # The volume may return.
    roots[0].rename(tmp_path / "elsewhere")
    assert not repository.is_gone("removed")
    (tmp_path / "m.onnx").touch()
    alone = ModelRepository((), tmp_path / "m.onnx")
    (tmp_path / "m.onnx").unlink()
    assert not alone.is_gone("m")
