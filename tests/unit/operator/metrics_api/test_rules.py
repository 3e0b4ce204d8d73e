"""The rules file: its problems, its queries, and the namespace that no request leaves."""

import copy
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from halimede_operator.metrics_api.core import promql
from halimede_operator.metrics_api.core.rules import ENSEMBLES, MODELS, PODS, Rule, Rules, parse_rules
from halimede_operator.metrics_api.core.selectors import Operator, Requirement
from support.metrics_api import RULES

RULE: dict[str, Any] = {
    "seriesQuery": 'requests{namespace!=""}',
    "resources": {"overrides": {"namespace": {"resource": "namespace"}, "pod": {"resource": "pod"}}},
    "name": {"matches": "^requests$", "as": "waiting"},
    "metricsQuery": "sum by (<<.GroupBy>>) (rate(<<.Series>>{<<.LabelMatchers>>}[2m]))",
}


def parsed(rule: dict[str, Any] = RULE) -> Rule:
    rules = parse_rules({"rules": [rule]})
    assert isinstance(rules, Rules), rules
    return rules.by_metric["waiting"]


def changed(path: str, value: Any) -> dict[str, Any]:
    rule = copy.deepcopy(RULE)
    *parents, last = path.split("/")
    target = rule
    for parent in parents:
        target = target[parent]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return rule


def test_the_charts_rules_are_four_metrics_of_all_our_kinds() -> None:
    rules = parse_rules(yaml.safe_load(RULES.read_text()))
    assert isinstance(rules, Rules), rules
    assert {metric: (rule.series, rule.window_s) for metric, rule in rules.by_metric.items()} == {
        "halimede_queue_requests": ("halimede_queue_requests", 30),
        "halimede_inflight_requests": ("halimede_executing_requests", 30),
        "halimede_instance_busy_ratio": ("halimede_instance_busy_ratio", 30),
        "halimede_queue_wait_seconds": ("halimede_queue_duration_seconds_count", 60),
    }
    for rule in rules.by_metric.values():
        assert rule.labels == {PODS: "pod", MODELS: "inferencemodel", ENSEMBLES: "modelensemble"}


def test_a_query_has_its_series_matchers_and_grouping() -> None:
    rule = parsed()
    matchers = rule.matchers(PODS, "prod", ["a", "b.c"], (Requirement("model", Operator.IN, ("bert",)),))
    assert matchers == 'model="bert",namespace="prod",pod=~"a|b\\\\.c"'
    assert rule.query(PODS, matchers) == f"sum by (pod) (rate(requests{{{matchers}}}[2m]))"
    assert rule.window_s == 120


def test_templates_in_a_value_stay_text() -> None:
    rule = parsed()
    query = rule.query(PODS, rule.matchers(PODS, "<<.GroupBy>>", ["<<.Series>>"]))
    assert query == 'sum by (pod) (rate(requests{namespace="<<.GroupBy>>",pod="<<.Series>>"}[2m]))'


@given(st.text(), st.lists(st.text(), min_size=1, max_size=3), st.text())
def test_no_value_ends_its_string(namespace: str, names: list[str], value: str) -> None:
    """A query without its strings is the same for all values."""
    rule = parsed()
    query = rule.query(PODS, rule.matchers(PODS, namespace, names, (Requirement("model", Operator.IN, (value,)),)))
    rest = re.sub(r'"(?:[^"\\\n]|\\.)*"', '""', query)
    operator = "=" if len(names) == 1 else "=~"
    assert rest == f'sum by (pod) (rate(requests{{model="",namespace="",pod{operator}""}}[2m]))'


@pytest.mark.parametrize(
    ("requirement", "text"),
    [
        (Requirement("a", Operator.IN, ("x", "y")), 'a=~"x|y"'),
        (Requirement("a", Operator.NOT_IN, ("x",)), 'a!="x"'),
        (Requirement("a", Operator.NOT_IN, ("x", "y.z")), 'a!~"x|y\\\\.z"'),
        (Requirement("a", Operator.EXISTS), 'a!=""'),
        (Requirement("a", Operator.DOES_NOT_EXIST), 'a=""'),
    ],
)
def test_matchers_of_requirements(requirement: Requirement, text: str) -> None:
    assert promql.matcher(requirement) == text


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ("no rule", "rules[0].must be a mapping"),
        (changed("seriesFilters", []), "rules[0].seriesFilters: is not supported"),
        (changed("metricsQuery", None), "rules[0].metricsQuery: is missing"),
        (changed("seriesQuery", '{__name__=~"requests.*"}'), "rules[0].seriesQuery: must be the name of a series"),
        (changed("seriesQuery", 7), "rules[0].seriesQuery: must be the name of a series"),
        (changed("name", {"as": "a", "like": "b"}), "rules[0].name: must have `as`"),
        (changed("name/as", "${1}_total"), "rules[0].name.as: must be the name of a metric"),
        (changed("name/as", "a{}"), "rules[0].name.as: must be the name of a metric"),
        (changed("name/matches", "^other$"), "rules[0].name.matches: must be ^requests$"),
        (changed("resources", {"template": "<<.Resource>>"}), "rules[0].resources: must have `overrides`"),
        (
            changed("resources/overrides/node", {"resource": "node"}),
            "overrides.node: must be one of namespace, pod, infer",
        ),
        (changed("resources/overrides/node", "pod"), "overrides.node: must be one of namespace"),
        (changed("resources/overrides/other", {"resource": "pod"}), "two labels have the same resource"),
        (changed("resources/overrides/namespace", None), "no label has the resource namespace"),
        (changed("resources/overrides/pod", None), "only the namespace has a label"),
        (changed("metricsQuery", 7), "rules[0].metricsQuery: must be a text"),
        (changed("metricsQuery", "sum(a{<<.LabelMatchers>>})"), "has no <<.GroupBy>>"),
        (
            changed("metricsQuery", "sum(a{<<.LabelMatchers>>}) by (<<.GroupBySlice>>)"),
            "<<.GroupBySlice>> is not supported",
        ),
        (changed("metricsQuery", "a by (<<.GroupBy>>)"), "every selector must have <<.LabelMatchers>>"),
        (
            changed("metricsQuery", 'sum(a{<<.LabelMatchers>>} or b{x="y"}) by (<<.GroupBy>>)'),
            "every selector must have <<.LabelMatchers>>",
        ),
    ],
)
def test_a_rule_with_a_problem_is_refused(rule: Any, problem: str) -> None:
    problems = parse_rules({"rules": [rule]})
    assert isinstance(problems, tuple)
    assert any(problem in each for each in problems), problems


def test_all_problems_are_found_and_names_are_unique() -> None:
    assert parse_rules({"rules": [RULE, RULE]}) == ("rules[1].name.as: the metric waiting has a rule already",)
    bad = changed("seriesFilters", [])
    problems = parse_rules({"rules": [bad, bad]})
    assert isinstance(problems, tuple)
    assert len(problems) == 2
    for file in (None, [], {}, {"rules": []}, {"rules": {}}):
        assert parse_rules(file) == ("rules: must be a list of rules",)
