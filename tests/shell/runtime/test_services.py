"""Calls and metric updates from models to the server."""

import pytest

from halimede.core.observe.custom_metrics import CustomMetrics
from halimede.runtime.services import ModelServices
from support.playing import NOBODY


def test_thousands_of_failed_updates_give_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = CustomMetrics()
    family = metrics.new_family("m#1", "hits", "", "COUNTER")
    metric = metrics.new_metric("m#1", family, {}, None)
    updates = [(metric, "increment", 2.0), *[(metric, "increment", -1.0)] * 4_000, (metric, "increment", 3.0)]
    ModelServices(metrics, NOBODY).update_metrics("m#1", updates)
    assert metrics.value("m#1", metric) == 5
    [line] = [record.getMessage() for record in caplog.records]
    assert (line.startswith("model 'm': "), line.endswith(" (3999 more updates failed)")) == (True, True)
