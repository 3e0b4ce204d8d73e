"""The chart, its rendered objects, and values that several tests give it."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from support.image import REPOSITORY_ROOT

CHART = REPOSITORY_ROOT / "helm" / "halimede"
WITHOUT_CRDS = ("--set", "crds.install=false")

specification = importlib.util.spec_from_file_location("generate", REPOSITORY_ROOT / "manifests" / "generate.py")
assert specification is not None
assert specification.loader is not None
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)

METRICS_API: dict[str, Any] = {
    "metricsApi": {"enabled": "Always", "tls": {"secretName": "tls", "caBundle": "Q0E="}},
    "prometheus": {"url": "http://prometheus:9090"},
}
"""With a certificate, because the chart would make another one each time."""


DIGEST = f"sha256:{'0' * 64}"
MONITORED = {"monitoring": {"podMonitor": "Always"}}


def named(resource: dict[str, Any]) -> tuple[str, str, str]:
    return resource["kind"], resource["metadata"].get("namespace", ""), resource["metadata"]["name"]


def with_values(helm: str, folder: Path, values: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    (folder / "values.json").write_text(json.dumps(values))
    return {named(each): each for each in generate.rendered(helm, f"--values={folder / 'values.json'}", *WITHOUT_CRDS)}
