"""The recording rules and alerts: promtool's tests of them, and a section of the documentation for each alert."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from support.image import REPOSITORY_ROOT
from support.monitored import RULES
from support.probe import provided
from support.prometheus import provide_prometheus

TESTS = Path(__file__).parent / "alerts.test.yaml"
PAGE = "docs/pages/alerts.md"
ALERTS = {
    rule["alert"]: rule
    for group in yaml.load(RULES.read_text(), yaml.CSafeLoader)["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
CASES = [case for test in yaml.load(TESTS.read_text(), yaml.CSafeLoader)["tests"] for case in test["alert_rule_test"]]


@pytest.fixture(scope="module")
def promtool(request: pytest.FixtureRequest) -> str:
    return str(provided(request.config, provide_prometheus) / "promtool")


@pytest.mark.parametrize("arguments", [("check", "rules", str(RULES)), ("test", "rules", str(TESTS))])
def test_promtool_finds_nothing_wrong(promtool: str, arguments: tuple[str, ...]) -> None:
    done = subprocess.run([promtool, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_test_where_it_fires_and_one_where_it_does_not() -> None:
    fires = {case["alertname"] for case in CASES if case.get("exp_alerts")}
    does_not_fire = {case["alertname"] for case in CASES if not case.get("exp_alerts")}
    assert fires == does_not_fire == ALERTS.keys()


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_what_happened_and_where_its_section_is(name: str) -> None:
    alert = ALERTS[name]
    assert alert["labels"].keys() == {"severity"}
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    assert alert["annotations"].keys() == {"summary", "description", "runbook"}
    assert alert["annotations"]["runbook"] == f"{PAGE}#{name.lower()}"
    assert "for" in alert


def test_the_page_has_a_section_for_each_alert_with_cause_and_remedy() -> None:
    _, *sections = re.split(r"^## (?=Halimede)", (REPOSITORY_ROOT / PAGE).read_text(), flags=re.MULTILINE)
    assert [section.partition("\n")[0] for section in sections] == list(ALERTS)
    for section in sections:
        for part in ("**Cause.** ", "**Look at.** ", "**Do.** "):
            assert part in section, section
