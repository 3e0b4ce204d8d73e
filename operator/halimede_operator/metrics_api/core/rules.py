"""The rules file: which metrics there are, and the query of each. Its format is that of prometheus-adapter.

Of that format we take what our own file needs: a series query that names its series, `resources.overrides`, `name`, and
`metricsQuery` with the templates `<<.Series>>`, `<<.LabelMatchers>>` and `<<.GroupBy>>`. Anything else is a problem, so
that a file never means less here than there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halimede_operator.core.spec.types import GROUP, VERSION, Kind
from halimede_operator.metrics_api.core import promql
from halimede_operator.metrics_api.core.selectors import Requirement

# Any, in this module: YAML.


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of objects that metrics describe."""

    name: str
    """As in paths: the plural, with its group if it has one."""
    api_version: str
    kind: str


PODS = Resource("pods", "v1", "Pod")
_OURS = {kind: Resource(f"{kind.plural}.{GROUP}", f"{GROUP}/{VERSION}", kind.value) for kind in Kind}
MODELS, ENSEMBLES = _OURS[Kind.INFERENCE_MODEL], _OURS[Kind.MODEL_ENSEMBLE]
_RESOURCES = {("", "pod"): PODS, (GROUP, "inferencemodel"): MODELS, (GROUP, "modelensemble"): ENSEMBLES}
_SERIES = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^{}]*\})?", re.ASCII)
_TEMPLATE = re.compile(r"<<\s*\.?(.*?)\s*>>")
_RANGE = re.compile(r"\[([0-9]+)([smh])\]")
_SECONDS = {"s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True, slots=True)
class Rule:
    metric: str
    series: str
    labels: Mapping[Resource, str]
    """The label of each resource that has the metric."""
    namespace_label: str
    template: str

    @property
    def window_s(self) -> int:
        """The age of the oldest sample that a value may come from."""
        return max((int(count) * _SECONDS[unit] for count, unit in _RANGE.findall(self.template)), default=0)

    def matchers(
        self, resource: Resource, namespace: str, names: Sequence[str], required: tuple[Requirement, ...] = ()
    ) -> str:
        """Of the series of these objects; always of this namespace alone. names: at least one."""
        return ",".join(
            (
                *map(promql.matcher, required),
                promql.equals(self.namespace_label, (namespace,)),
                promql.equals(self.labels[resource], names),
            )
        )

    def query(self, resource: Resource, matchers: str) -> str:
        """PromQL: one value for each object. matchers: what `matchers` returns."""
        values = {"Series": self.series, "LabelMatchers": matchers, "GroupBy": self.labels[resource]}
        # In one pass, so that templates in a value stay text.
        return _TEMPLATE.sub(lambda template: values[template[1]], self.template)


@dataclass(frozen=True, slots=True)
class Rules:
    by_metric: Mapping[str, Rule]


def parse_rules(file: Any) -> Rules | tuple[str, ...]:
    """The rules, or all problems of the file. file: its YAML, loaded."""
    given = file.get("rules") if isinstance(file, Mapping) else None
    if not isinstance(given, list) or not given:
        return ("rules: must be a list of rules",)
    problems: list[str] = []
    rules: dict[str, Rule] = {}
    for number, rule in enumerate(given):
        found = list(_problems(rule)) if isinstance(rule, Mapping) else ["must be a mapping"]
        if not found:
            made = _rule(rule)
            if made.metric in rules:
                found = [f"name.as: the metric {made.metric} has a rule already"]
            rules[made.metric] = made
        problems += [f"rules[{number}].{problem}" for problem in found]
    return tuple(problems) or Rules(MappingProxyType(rules))


def _rule(rule: Mapping[str, Any]) -> Rule:
    series = rule["seriesQuery"].partition("{")[0].strip()
    labels: dict[Resource, str] = {}
    namespace_label = ""
    for label, target in rule["resources"]["overrides"].items():
        if _key(target) == ("", "namespace"):
            namespace_label = label
        else:
            labels[_RESOURCES[_key(target)]] = label
    return Rule(rule["name"]["as"], series, MappingProxyType(labels), namespace_label, rule["metricsQuery"].strip())


def _problems(rule: Mapping[str, Any]) -> Iterator[str]:
    wanted = {"seriesQuery", "resources", "name", "metricsQuery"}
    for name in sorted(set(rule) - wanted):
        yield f"{name}: is not supported"
    if missing := sorted(wanted - set(rule)):
        yield f"{missing[0]}: is missing"
        return
    series = _SERIES.fullmatch(rule["seriesQuery"].strip()) if isinstance(rule["seriesQuery"], str) else None
    if series is None:
        yield "seriesQuery: must be the name of a series, with matchers in braces"
    yield from _problems_of_name(rule["name"], series[1] if series else "")
    yield from _problems_of_resources(rule["resources"])
    yield from _problems_of_query(rule["metricsQuery"])


def _problems_of_name(name: Any, series: str) -> Iterator[str]:
    if not isinstance(name, Mapping) or not set(name) <= {"as", "matches"}:
        yield "name: must have `as`, may have `matches`, and has nothing else"
        return
    if _SERIES.fullmatch(str(name.get("as", ""))) is None or "{" in str(name["as"]):
        yield "name.as: must be the name of a metric, without references to groups"
    if series and name.get("matches", f"^{series}$") != f"^{series}$":
        yield f"name.matches: must be ^{series}$, the name of the series"


def _problems_of_resources(resources: Any) -> Iterator[str]:
    overrides = (
        resources.get("overrides") if isinstance(resources, Mapping) and set(resources) == {"overrides"} else None
    )
    if not isinstance(overrides, Mapping):
        yield "resources: must have `overrides`, and nothing else"
        return
    known = [("", "namespace"), *_RESOURCES]
    for label, target in overrides.items():
        if _key(target) not in known:
            options = ", ".join(".".join(filter(None, (resource, group))) for group, resource in known)
            yield f"resources.overrides.{label}: must be one of {options}"
    keys = [_key(target) for target in overrides.values()]
    if len(set(keys)) < len(keys):
        yield "resources.overrides: two labels have the same resource"
    if ("", "namespace") not in keys:
        yield "resources.overrides: no label has the resource namespace"
    if len(keys) < 2:
        yield "resources.overrides: only the namespace has a label"


def _problems_of_query(query: Any) -> Iterator[str]:
    if not isinstance(query, str):
        yield "metricsQuery: must be a text"
        return
    for template in _TEMPLATE.findall(query):
        if template not in ("Series", "LabelMatchers", "GroupBy"):
            yield f"metricsQuery: <<.{template}>> is not supported"
    selectors = re.findall(r"\{([^{}]*)\}", query)
    if not selectors or any("<<.LabelMatchers>>" not in selector for selector in selectors):
        # Otherwise a request would read series of other namespaces.
        yield "metricsQuery: every selector must have <<.LabelMatchers>>"
    if "<<.GroupBy>>" not in query:
        yield "metricsQuery: has no <<.GroupBy>>"


def _key(target: Any) -> tuple[str, str]:
    if not isinstance(target, Mapping) or not set(target) <= {"group", "resource"}:
        return "", ""
    return str(target.get("group", "")), str(target.get("resource", ""))
