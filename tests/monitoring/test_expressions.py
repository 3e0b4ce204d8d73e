"""Every expression of the dashboards and of the rules has a value in a Prometheus that scrapes real servers under load."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from support.image import REPOSITORY_ROOT
from support.monitored import ENSEMBLE, MODEL, OPERATOR, RULES, monitored, without
from support.probe import provided
from support.prometheus import Prometheus, provide_prometheus
from support.promql import always_true, selectors
from support.server import wait_until

DASHBOARDS = sorted((REPOSITORY_ROOT / "helm" / "halimede" / "files" / "dashboards").glob("*.json"))
WAIT_S = 40.0
ALL = ".*"
VARIABLE = re.compile(r"\$(\w+)")


@pytest.fixture(scope="module")
def prometheus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    provided(request.config, provide_prometheus)
    with monitored(tmp_path_factory.mktemp("monitored")) as running:
        yield running


@pytest.fixture(scope="module")
def give_up_at(prometheus: Prometheus) -> float:
    """The end of the time in which every series must be there. All tests share it."""
    return time.monotonic() + WAIT_S


def choices(dashboard: Any) -> list[dict[str, str]]:
    """Values of the dashboard's variables: all, and one object of each kind that has such targets."""
    names = [each["name"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    targets = [OPERATOR] if dashboard["uid"] == "halimede-operator" else [MODEL, ENSEMBLE]
    return [{name: target.get(name, ALL) for name in names} for target in ({}, *targets)]


def filled(text: str, values: dict[str, str]) -> str:
    return VARIABLE.sub(lambda found: {"__rate_interval": "5s", **values}[found[1]], text)


def expressions_of(dashboard: Any) -> dict[str, str]:
    """By panel, query and choice; each also with its single selectors."""
    found = {}
    for number, values in enumerate(choices(dashboard)):
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                text = filled(target["expr"], values)
                where = f"{panel['title']} / {target.get('legendFormat', target['refId'])} / {number}"
                found[where] = text
                found |= {f"{where}: {selector}": selector for selector in selectors(text)}
    return found


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_expression_of_a_dashboard_has_a_value(path: Any, prometheus: Prometheus, give_up_at: float) -> None:
    assert without(expressions_of(json.loads(path.read_text())), prometheus, give_up_at) == {}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_variable_of_a_dashboard_has_values(path: Any, prometheus: Prometheus) -> None:
    dashboard = json.loads(path.read_text())
    everything, *_ = choices(dashboard)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), (\w+)\)", filled(variable["query"]["query"], everything))
            assert found is not None, variable
            assert found[2] == variable["name"]
            assert prometheus.get(f"label/{found[2]}/values", {"match[]": found[1]}) != [], variable["query"]


def test_every_expression_of_a_rule_has_a_value(prometheus: Prometheus, give_up_at: float) -> None:
    wanted = {}
    for group in yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"]:
        for rule in group["rules"]:
            name = rule.get("alert") or rule["record"]
            wanted[name] = always_true(rule["expr"])
            wanted |= {f"{name}: {selector}": selector for selector in selectors(rule["expr"])}
    assert without(wanted, prometheus, give_up_at) == {}


def test_prometheus_evaluates_every_rule_without_an_error(prometheus: Prometheus) -> None:
    def health() -> dict[str, str]:
        rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
        return {rule["name"]: rule.get("lastError", rule["health"]) for rule in rules}

    wait_until(lambda: "unknown" not in health().values(), "the evaluation of every rule")
    assert len(health()) > 10
    assert set(health().values()) == {"ok"}


def test_a_series_that_no_server_has_is_found(prometheus: Prometheus) -> None:
    wanted = {"there": "up", "renamed": "halimede_queued_requests", "no value": "0 * up / 0"}
    assert without(wanted, prometheus, time.monotonic()).keys() == {"renamed", "no value"}
