"""The pages of the backends and the backends themselves have the same options."""

import re
from pathlib import Path

import pytest

from halimede.backends.api import NamesOptions
from halimede.backends.discover import find_backend
from halimede.core.config.unknown_options import SERVER_PARAMETERS

PAGES = Path(__file__).parents[2] / "docs" / "pages"
NAME = re.compile(r"`([^` ]+)`")
TABLE = re.compile(r"^\| `?parameter`? \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.MULTILINE)
BACKENDS = {
    "onnxruntime": "onnxruntime",
    "openvino": "openvino",
    "pytorch": "pytorch",
    "tensorflow": "tensorflow",
    "tensorrt": "tensorrt",
    "fil": "trees",
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_page_and_its_backend_have_the_same_options(name: str) -> None:
    backend = find_backend(name)
    assert isinstance(backend, NamesOptions)
    page = (PAGES / f"backend-{BACKENDS[name]}.md").read_text()
    rows = [row.split("|")[1] for table in TABLE.findall(page) for row in table.splitlines()]
    documented = {parameter for row in rows for parameter in NAME.findall(row)}

    assert documented - {*backend.parameters, *SERVER_PARAMETERS} == set()
    # The setting for the memory in which a file is read is on a page of its own.
    text = " ".join(NAME.findall(page)) + (PAGES / "model-files.md").read_text()
    assert [each for each in (*backend.parameters, *backend.settings) if each not in text] == []
