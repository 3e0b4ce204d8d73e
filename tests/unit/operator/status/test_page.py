"""The documentation page covers every reason."""

import re
from pathlib import Path

import yaml

from halimede_operator.core.pods.failure import NormalReason, Reason

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "pages" / "kubernetes-status.md").read_text()


def cells(heading: str) -> set[str]:
    """The words in the first column of the table under the heading."""
    table = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {word for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for word in re.findall(r"`(\w+)`", row)}


def test_the_page_documents_every_reason_of_a_pod():
    assert set(Reason) - cells("What went wrong, and what to do") == set()


def test_the_page_documents_every_normal_reason():
    documented = cells("Starting and stopping") | set(re.findall(r"`(\w+)`", PAGE.split("## Starting and stopping")[0]))
    assert set(NormalReason) - documented == set()


def test_the_page_documents_every_field():
    known = set()
    for plural in ("inferencemodels", "modelensembles"):
        crd = yaml.safe_load((ROOT / "crds" / f"{plural}.yaml").read_text())
        known |= set(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"])

    documented = cells("Other fields") | set(re.findall(r"`(placementsTruncated)`", PAGE))
    assert known - documented == {"conditions", "observedGeneration", "selector"}
