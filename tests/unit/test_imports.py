"""No import circle between modules, also not by imports for types alone.

The contracts of import-linter compare the modules of one package with each other. They do not find a module that imports
its own package, which imports the module.
"""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

FRONT_ENDS = "halimede.frontends"
FRONT_ENDS_MAY_IMPORT = (
    "halimede.facade",
    "halimede.core.accounts",
    "halimede.core.config.check_request",
    "halimede.core.config.model_view",
    "halimede.core.config.write",
    "halimede.core.fairness",
    "halimede.core.observe.access_lines",
    "halimede.core.observe.log_lines",
    "halimede.core.types",
    "halimede.core.wire",
)
"""These modules, and all in those that are packages."""


def circle(*packages: str) -> set[str]:
    """The modules of one circle; empty if there is none."""
    graph = grimp.build_graph(*packages, cache_dir=None, exclude_type_checking_imports=False)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return set(error.args[1])
    return set()


def test_no_import_circle() -> None:
    assert circle("halimede", "halimede_operator", "halimede_spec") == set()


def test_no_module_needs_grpcio() -> None:
    graph = grimp.build_graph(
        "halimede", "halimede_operator", "halimede_spec", cache_dir=None, include_external_packages=True
    )
    importers = {} if "grpc" not in graph.modules else {"grpc": graph.find_modules_that_directly_import("grpc")}
    assert importers == {}
    # Otherwise nothing would be found.
    assert "uvloop" in graph.modules


def test_front_ends_know_the_server_by_its_facade_alone() -> None:
    graph = grimp.build_graph("halimede", cache_dir=None, exclude_type_checking_imports=False)
    front_ends = graph.find_descendants(FRONT_ENDS)
    imported = {each for module in front_ends for each in graph.find_modules_directly_imported_by(module)} - front_ends
    rooms = {each: [room for room in FRONT_ENDS_MAY_IMPORT if f"{each}.".startswith(f"{room}.")] for each in imported}
    others = {each for each, found in rooms.items() if not found}
    assert others == {"halimede"}, "only its version"
    assert {room for found in rooms.values() for room in found} == set(FRONT_ENDS_MAY_IMPORT), "a room that none needs"


def test_a_module_that_imports_its_package_for_a_type_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = tmp_path / "sample_package"
    sample.mkdir()
    (sample / "__init__.py").write_text("from sample_package.value import Value\n")
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample_package import Value\n"
    (sample / "value.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    assert circle("sample_package") == {"sample_package", "sample_package.value"}
