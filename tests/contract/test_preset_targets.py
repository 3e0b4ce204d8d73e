"""Dashboards and CRDs repeat the default targets of presets: these are those of the operator."""

import json
from typing import Any

import pytest

from halimede_operator.core.scaling.presets import PRESETS
from halimede_operator.core.spec.quantities import quantity
from halimede_operator.core.spec.types import Preset
from support.custom_resources import CRDS
from support.image import REPOSITORY_ROOT

DASHBOARDS = REPOSITORY_ROOT / "helm" / "halimede" / "files" / "dashboards"
PANELS = {
    Preset.QUEUE: ("Queued requests per pod", "What the preset queue scales on. The line is its default target, {}."),
    Preset.CONCURRENCY: (
        "Queued and executing requests per pod",
        "What the preset concurrency scales on. The line is its default target, {}.",
    ),
    Preset.GPU: ("Busy fraction of instances", "The line is the target of the preset gpu, {} %."),
}
"""On the dashboard of a model: the panel's title, and its text with the target."""


def target(preset: Preset) -> float:
    found = quantity(PRESETS[preset][0].target)
    assert found is not None
    return float(found)


def panel(dashboard: str, title: str) -> Any:
    panels = json.loads((DASHBOARDS / dashboard).read_text())["panels"]
    (found,) = (each for each in panels if each["title"] == title and each["type"] == "timeseries")
    return found


@pytest.mark.parametrize("preset", Preset)
def test_the_line_of_a_panel_is_the_presets_target(preset: Preset) -> None:
    title, text = PANELS[preset]
    found = panel("model.json", title)
    _, line = found["fieldConfig"]["defaults"]["thresholds"]["steps"]
    assert line["value"] == target(preset)
    is_fraction = found["fieldConfig"]["defaults"]["unit"] == "percentunit"
    assert text.format(f"{target(preset) * (100 if is_fraction else 1):g}") in found["description"]


def test_the_fleet_says_how_many_requests_the_autoscaler_holds() -> None:
    text = f"With the preset queue the autoscaler holds {target(Preset.QUEUE):g} for each pod."
    assert text in panel("fleet.json", "Queued requests by model")["description"]


@pytest.mark.parametrize("crd", CRDS.values(), ids=CRDS)
def test_a_crd_has_the_default_targets(crd: Any) -> None:
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    of = {preset: goals[0].target for preset, goals in PRESETS.items()}
    assert spec["properties"]["autoscaling"]["properties"]["target"]["description"] == (
        f"The target for each pod, as a quantity. Default {of[Preset.QUEUE]} requests for queue, "
        f"{of[Preset.CONCURRENCY]} for concurrency, {of[Preset.GPU]} for gpu."
    )
