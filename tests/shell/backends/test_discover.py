"""Installed backends, found by their entry points."""

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from halimede.backends.discover import installed_backend

USER = "import whole_backend.part\n\n\nclass Backend:\n    pass\n"


class SlowPackage(SourceFileLoader):
    """Makes the package only once the other backend has been found and goes on, or after a second."""

    begun, other_found = threading.Event(), threading.Event()

    def create_module(self, spec: ModuleSpec) -> None:
        self.begun.set()
        if self.other_found.wait(1):
            time.sleep(0.3)


class Finder:
    def find_spec(self, name: str, path: Sequence[str] | None, target: object = None) -> ModuleSpec | None:
        if name == "other_backend":
            SlowPackage.other_found.set()
        if name != "whole_backend":
            return None
        file = next(found for each in sys.path if (found := Path(each) / name / "__init__.py").exists())
        return spec_from_file_location(name, file, loader=SlowPackage(name, str(file)))


def test_backends_that_import_parts_of_each_other_load_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models load in threads. Importlib fails one of two that import a package and a module in it at once."""
    package = tmp_path / "whole_backend"
    package.mkdir()
    (package / "__init__.py").write_text(USER)
    (package / "part.py").write_text("")
    (tmp_path / "other_backend.py").write_text(USER)
    found = tmp_path / "backends_of_test-1.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: backends-of-test\nVersion: 1\n")
    points = "[halimede.backends]\nwhole_of_test = whole_backend:Backend\nother_of_test = other_backend:Backend\n"
    (found / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    try:
        with ThreadPoolExecutor(2) as threads:
            first = threads.submit(installed_backend, "whole_of_test")
            assert SlowPackage.begun.wait(30)
            second = threads.submit(installed_backend, "other_of_test")
    finally:
        for name in ("whole_backend", "whole_backend.part", "other_backend"):
            sys.modules.pop(name, None)
    modules = [type(each.result()).__module__ for each in (first, second)]
    assert modules == ["whole_backend", "other_backend"]
