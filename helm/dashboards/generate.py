"""Grafana's dashboards, helm/halimede/files/dashboards/*.json, from the YAML files beside this one.

`python helm/dashboards/generate.py` writes them; a test compares the result. A YAML file has:

- uid, title, description.
- source: a series that every target of the dashboard has. The values of the variables come from its labels.
- variables: labels of the source. Each is a variable whose values are those that fit the variables before it.
- rows: each with title, and panels with title, description, type (stat, timeseries, table, bargauge or state-timeline),
  unit (Grafana's), width (of 24), optional thresholds (colour from each value on), min, max, decimals and stack, and
  queries: legend to expression. A table joins its queries by their labels; its legends are its columns.

In an expression `@pods` stands for a comparison of the target's labels with the variables, and `@models` for these and
the label `model`.
"""

import json
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
MADE = HERE.parent / "halimede" / "files" / "dashboards"

COLUMNS = 24
HEIGHT = {"stat": 4, "bargauge": 7, "timeseries": 8, "state-timeline": 8, "table": 9}
TARGET_LABELS = ("namespace", "inferencemodel", "modelensemble", "pod", "gpu_uuid")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
Json = dict[str, Any]


def dashboard(source: Json) -> Json:
    """The JSON of a dashboard from its YAML. Raises KeyError for a missing key."""
    return {
        "uid": source["uid"],
        "title": source["title"],
        "description": source["description"],
        "tags": ["halimede"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "annotations": {"list": []},
        "links": [_links()],
        "templating": {"list": _variables(source)},
        "panels": _panels(source),
    }


def _links() -> Json:
    """A menu with Halimede's other dashboards."""
    return {
        "type": "dashboards",
        "title": "Halimede",
        "tags": ["halimede"],
        "asDropdown": True,
        "keepTime": True,
        "includeVars": True,
    }


def _variables(source: Json) -> list[Json]:
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    made: list[Json] = [{**datasource, "current": {}, "hide": 0}]
    names = source["variables"]
    for number, name in enumerate(names):
        selector = source["source"]
        if before := _comparisons(names[:number]):
            selector += f"{{{before}}}"
        query = f"label_values({selector}, {name})"
        made.append(
            {
                "name": name,
                "label": name,
                "type": "query",
                "datasource": DATASOURCE,
                "definition": query,
                "query": {"query": query, "refId": name},
                # With the start of the dashboard and with each change of its time range.
                "refresh": 2,
                "sort": 1,
                "multi": True,
                "includeAll": True,
                # Of a target without the label too: a pod has either inferencemodel or modelensemble.
                "allValue": ".*",
                "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
            }
        )
    return made


def _comparisons(names: list[str]) -> str:
    return ", ".join(f'{name}=~"${name}"' for name in names)


def _panels(source: Json) -> list[Json]:
    names = source["variables"]
    filters = {
        "@pods": _comparisons([name for name in names if name in TARGET_LABELS]),
        "@models": _comparisons(names),
    }
    made: list[Json] = []
    top = 0
    for row in source["rows"]:
        made.append(
            {
                "id": len(made) + 1,
                "type": "row",
                "title": row["title"],
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1},
            }
        )
        top += 1
        left = height = 0
        for panel in row["panels"]:
            if left + panel["width"] > COLUMNS:
                top, left, height = top + height, 0, 0
            place = {"x": left, "y": top, "w": panel["width"], "h": HEIGHT[panel["type"]]}
            made.append(_panel(panel, filters, len(made) + 1, place))
            left, height = left + panel["width"], max(height, HEIGHT[panel["type"]])
        top += height
    return made


def _panel(panel: Json, filters: dict[str, str], number: int, place: dict[str, int]) -> Json:
    kind = panel["type"]
    made: Json = {
        "id": number,
        "type": kind,
        "title": panel["title"],
        "description": panel["description"],
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _field(panel), "overrides": []},
        "options": OPTIONS[kind],
        "targets": [
            _target(kind, legend, expression, filters, chr(ord("A") + position))
            for position, (legend, expression) in enumerate(panel["queries"].items())
        ],
    }
    if kind == "table":
        renamed = {f"Value #{chr(ord('A') + position)}": legend for position, legend in enumerate(panel["queries"])}
        made["transformations"] = [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": {"excludeByName": {"Time": True}, "renameByName": renamed}},
        ]
        made["fieldConfig"]["overrides"] = [
            {
                "matcher": {"id": "byName", "options": legend},
                "properties": [{"id": "unit", "value": unit}],
            }
            for legend, unit in panel["units"].items()
        ]
    return made


def _field(panel: Json) -> Json:
    made: Json = {"unit": panel["unit"], "color": {"mode": "palette-classic"}, "custom": {}, "mappings": []}
    made |= {name: panel[name] for name in ("min", "max", "decimals") if name in panel}
    if thresholds := panel.get("thresholds"):
        # The first colour holds from minus infinity, which is null.
        steps = [{"color": colour, "value": value} for value, colour in thresholds.items()]
        steps[0]["value"] = None
        made["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel["type"] in ("stat", "bargauge", "state-timeline") and thresholds:
        made["color"] = {"mode": "thresholds"}
    if panel["type"] == "timeseries":
        made["custom"] = {
            "lineWidth": 1,
            "fillOpacity": 30 if panel.get("stack") else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.get("stack") else "none", "group": "A"},
            "thresholdsStyle": {"mode": "line" if thresholds else "off"},
        }
    return made


def _target(kind: str, legend: str, expression: str, filters: dict[str, str], letter: str) -> Json:
    for name, comparisons in filters.items():
        expression = expression.replace(name, comparisons)
    made = {"refId": letter, "datasource": DATASOURCE, "editorMode": "code", "expr": " ".join(expression.split())}
    if kind == "table":
        return made | {"format": "table", "instant": True, "range": False}
    is_instant = kind in ("stat", "bargauge")
    return made | {"legendFormat": legend, "instant": is_instant, "range": not is_instant}


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
OPTIONS: dict[str, Json] = {
    "stat": {"reduceOptions": _LAST, "colorMode": "value", "graphMode": "none", "textMode": "auto"},
    "bargauge": {"reduceOptions": _LAST, "displayMode": "basic", "orientation": "horizontal"},
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
    "state-timeline": {"showValue": "never", "mergeValues": True, "legend": {"showLegend": True}},
    "table": {"showHeader": True, "cellHeight": "sm"},
}


def texts() -> dict[str, str]:
    """The files of MADE by name."""
    sources = sorted(HERE.glob("*.yaml"))
    return {
        f"{path.stem}.json": json.dumps(dashboard(yaml.safe_load(path.read_text())), indent=1) + "\n"
        for path in sources
    }


if __name__ == "__main__":
    MADE.mkdir(exist_ok=True)
    for name, text in texts().items():
        (MADE / name).write_text(text)
