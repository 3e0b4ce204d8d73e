"""The dashboards are those of their source, and have what Grafana and a reader need."""

import importlib.util
import json
import re
from typing import Any

import pytest

from support.image import REPOSITORY_ROOT

SPEC = importlib.util.spec_from_file_location("dashboards", REPOSITORY_ROOT / "helm" / "dashboards" / "generate.py")
assert SPEC is not None
assert SPEC.loader is not None
generate = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(generate)

MADE = {path.name: path.read_text() for path in generate.MADE.iterdir()}
DASHBOARDS = {name: json.loads(text) for name, text in MADE.items()}
OF_GRAFANA = {"__rate_interval", "datasource"}
# Grafana's names; it shows a value with an unknown unit without an error.
UNITS = {"none", "s", "ms", "µs", "reqps", "ops", "percentunit", "bytes", "watt", "joule"}


def units_of_columns(panel: Any) -> list[str]:
    return [each["value"] for column in panel["fieldConfig"]["overrides"] for each in column["properties"]]


def panels(name: str) -> list[Any]:
    return [panel for panel in DASHBOARDS[name]["panels"] if panel["type"] != "row"]


def test_the_dashboards_are_those_of_their_source() -> None:
    assert generate.texts() == MADE, "run: python helm/dashboards/generate.py"
    assert MADE.keys() == {"fleet.json", "model.json", "device.json", "operator.json"}


def test_each_dashboard_has_a_uid_and_a_title_of_its_own() -> None:
    for field in ("uid", "title"):
        assert len({each[field] for each in DASHBOARDS.values()}) == len(DASHBOARDS)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_a_unit_and_says_what_it_means(name: str) -> None:
    for panel in panels(name):
        assert panel["title"], panel
        units = [panel["fieldConfig"]["defaults"]["unit"], *units_of_columns(panel)]
        assert set(units) <= UNITS, panel["title"]
        assert panel["targets"], panel["title"]
        assert re.fullmatch(r"\w.{20,}\.", panel["description"]), panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_have_their_own_place_and_id(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= generate.COLUMNS, panel["title"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert taken.setdefault((x, y), panel["title"]) == panel["title"]
    assert len({panel["id"] for panel in DASHBOARDS[name]["panels"]}) == len(DASHBOARDS[name]["panels"])


@pytest.mark.parametrize("name", DASHBOARDS)
def test_expressions_and_legends_use_the_dashboards_variables(name: str) -> None:
    variables = [each["name"] for each in DASHBOARDS[name]["templating"]["list"]]
    for panel in panels(name):
        for target in panel["targets"]:
            assert "@" not in target["expr"], panel["title"]
            used = set(re.findall(r"\$\{?(\w+)", target["expr"]))
            assert used <= {*variables, *OF_GRAFANA}, panel["title"]
            # A panel that a choice does not change would show the numbers of other objects.
            assert {"namespace", "pod"} & set(variables) <= used, panel["title"]


@pytest.mark.parametrize("name", DASHBOARDS)
def test_thresholds_rise_from_minus_infinity(name: str) -> None:
    found = [panel["fieldConfig"]["defaults"].get("thresholds") for panel in panels(name)]
    steps = [[step["value"] for step in each["steps"]] for each in found if each]
    assert steps
    for first, *others in steps:
        assert first is None
        assert others == sorted(others)
