"""manifests/base/operator.yaml, which `kubectl apply -k manifests/base` installs: the chart with its default values.

`python manifests/generate.py HELM` writes it with that program; a test compares the result.
"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "helm" / "halimede"
BASE = ROOT / "manifests" / "base" / "operator.yaml"
OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")
HEAD = "# Made from helm/halimede by manifests/generate.py: change that.\n"


def rendered(helm: str, *arguments: str) -> list[dict[str, Any]]:
    """The chart's objects in the order in which helm prints them; CalledProcessError with helm's output."""
    command = [
        helm,
        "template",
        "halimede",
        str(CHART),
        "--namespace",
        "halimede",
        "--kube-version",
        "1.36.0",
        "--skip-tests",
        *arguments,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [each for each in yaml.load_all(done.stdout, yaml.CSafeLoader) if each]


def base(helm: str) -> str:
    objects = rendered(helm, "--set", "crds.install=false")
    for each in objects:
        _forget_helm(each)
    return HEAD + yaml.safe_dump_all(objects, sort_keys=False, width=120)


def _forget_helm(value: Any) -> None:
    if isinstance(value, dict):
        for label in OF_HELM:
            value.pop(label, None)
        for each in value.values():
            _forget_helm(each)
    elif isinstance(value, list):
        for each in value:
            _forget_helm(each)


if __name__ == "__main__":
    BASE.write_text(base(sys.argv[1]))
