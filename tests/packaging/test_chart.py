"""The chart: what helm makes of it, what its schema refuses, and that manifests and CRDs say the same."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.programs import provide_programs
from support.image import REPOSITORY_ROOT, Unavailable

CHART = REPOSITORY_ROOT / "helm" / "halimede"
GOLDEN = Path(__file__).parent / "chart"

# The fixture builds helm where no run has done so before.
pytestmark = pytest.mark.timeout(1800)

specification = importlib.util.spec_from_file_location("generate", REPOSITORY_ROOT / "manifests" / "generate.py")
assert specification is not None
assert specification.loader is not None
generate = importlib.util.module_from_spec(specification)
specification.loader.exec_module(generate)


@pytest.fixture(scope="module")
def programs() -> Iterator[Path]:
    try:
        yield provide_programs()
    except Unavailable as why:
        pytest.skip(str(why))


@pytest.fixture(scope="module")
def helm(programs: Path) -> str:
    return str(programs / "helm")


def test_lint_finds_nothing(helm: str) -> None:
    done = subprocess.run([helm, "lint", "--strict", str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_charts_crds_are_those_in_crds() -> None:
    of = {path.name: path.read_text() for path in (REPOSITORY_ROOT / "crds").glob("*s.yaml")}
    assert len(of) == 2
    assert {path.name: path.read_text() for path in (CHART / "files" / "crds").iterdir()} == of


def test_crds_stay_when_the_chart_goes_unless_told_otherwise(helm: str) -> None:
    def policies(*arguments: str) -> list[str | None]:
        crds = [each for each in generate.rendered(helm, *arguments) if each["kind"] == "CustomResourceDefinition"]
        return [each["metadata"].get("annotations", {}).get("helm.sh/resource-policy") for each in crds]

    assert policies() == ["keep", "keep"]
    assert policies("--set", "crds.keep=false") == [None, None]
    assert policies("--set", "crds.install=false") == []


def test_the_manifests_are_the_charts_default(helm: str, programs: Path) -> None:
    assert generate.BASE.read_text() == generate.base(helm), f"run: python manifests/generate.py {helm}"
    kustomized = subprocess.run(
        [programs / "kubectl", "kustomize", REPOSITORY_ROOT / "manifests" / "base"],
        capture_output=True,
        text=True,
        check=True,
    )
    built = {named(each) for each in yaml.safe_load_all(kustomized.stdout)}
    assert built == {named(each) for each in generate.rendered(helm)} | {("Namespace", "", "halimede")}


def named(resource: dict[str, Any]) -> tuple[str, str, str]:
    return resource["kind"], resource["metadata"].get("namespace", ""), resource["metadata"]["name"]


@pytest.mark.parametrize("values", sorted(path.stem for path in GOLDEN.glob("*.values.yaml")))
def test_values_make_these_objects(helm: str, values: str) -> None:
    name = values.removesuffix(".values")
    made = generate.rendered(helm, "--set", "crds.install=false", "--values", str(GOLDEN / f"{name}.values.yaml"))
    assert made == list(yaml.safe_load_all((GOLDEN / f"{name}.golden.yaml").read_text()))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"operator": {"replicas": -1}}, "operator/replicas"),
        ({"models": {"schemes": ["ftp"]}}, "models/schemes/0"),
        ({"models": {"schemes": ["file"], "fileRoots": []}}, "models/fileRoots"),
        ({"models": {"fileRoots": ["/srv/models"]}}, "models/fileRoots"),
        ({"models": {"schemes": ["file"], "fileRoots": ["/"]}}, "models/fileRoots/0"),
        ({"stores": {"s3": {"endpoint": "minio:9000"}}}, "stores/s3/endpoint"),
        ({"watchNamespaces": ["Prod"]}, "watchNamespaces/0"),
        ({"monitoring": {"podMonitor": "Sometimes"}}, "monitoring/podMonitor"),
        ({"replicas": 2}, "additional properties 'replicas' not allowed"),
    ],
)
def test_values_that_mean_nothing_are_refused(helm: str, tmp_path: Path, given: dict[str, Any], said: str) -> None:
    (tmp_path / "values.json").write_text(json.dumps(given))
    with pytest.raises(subprocess.CalledProcessError) as error:
        generate.rendered(helm, "--values", str(tmp_path / "values.json"))
    assert said in error.value.stderr


@pytest.mark.parametrize(
    ("wanted", "is_known", "is_made"),
    [("Auto", True, True), ("Auto", False, False), ("Always", False, True), ("Never", True, False)],
)
def test_a_pod_monitor_where_the_cluster_knows_that_kind(helm: str, wanted: str, is_known: bool, is_made: bool) -> None:
    known = ["--api-versions", "monitoring.coreos.com/v1/PodMonitor"] if is_known else []
    made = generate.rendered(helm, "--set", f"monitoring.podMonitor={wanted}", *known)
    assert ("PodMonitor" in {each["kind"] for each in made}) is is_made


def test_the_chart_can_be_packed_and_has_what_it_needs(helm: str, tmp_path: Path) -> None:
    subprocess.run([helm, "package", "--destination", tmp_path, CHART], capture_output=True, check=True)
    (packed,) = tmp_path.iterdir()
    shutil.unpack_archive(packed, tmp_path, "gztar")
    assert {path.name for path in (tmp_path / "halimede" / "files" / "crds").iterdir()} == {
        "inferencemodels.yaml",
        "modelensembles.yaml",
    }
