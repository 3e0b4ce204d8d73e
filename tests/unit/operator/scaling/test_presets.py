"""The table of presets, as an HPA and as Prometheus get it."""

import pytest

from halimede_operator.core.scaling.presets import (
    IN_USE,
    PRESETS,
    Goal,
    goals_of,
    object_metric,
    pod_metric,
    promql,
)
from halimede_operator.core.spec.types import Key, Kind, Preset

BERT = Key(Kind.INFERENCE_MODEL, "prod", "bert")


def test_target_replaces_that_of_the_first_metric():
    assert goals_of(Preset.QUEUE, None) == PRESETS[Preset.QUEUE]
    assert goals_of(Preset.QUEUE, "10") == (
        Goal("halimede_queue_requests", "10"),
        Goal("halimede_instance_busy_ratio", "800m"),
    )


def test_metric_of_each_pod():
    assert pod_metric(Goal("halimede_queue_requests", "4")) == {
        "type": "Pods",
        "pods": {
            "metric": {"name": "halimede_queue_requests"},
            "target": {"type": "AverageValue", "averageValue": "4"},
        },
    }


def test_metric_of_the_object_is_a_sum_or_a_mean():
    described = {"apiVersion": "halimede.dev/v1alpha1", "kind": "InferenceModel", "name": "bert"}
    queue, busy = (object_metric(goal, BERT)["object"] for goal in PRESETS[Preset.QUEUE])
    assert queue["describedObject"] == busy["describedObject"] == described
    assert queue["target"] == {"type": "AverageValue", "averageValue": "4"}
    assert busy["target"] == {"type": "Value", "value": "800m"}


def test_promql_takes_fresh_valid_samples_of_one_object():
    assert promql("halimede_queue_requests", BERT) == (
        'sum((last_over_time(halimede_queue_requests{namespace="prod",inferencemodel="bert"}[30s]) >= 0 < +Inf))'
    )
    assert 'modelensemble="search"' in promql("halimede_queue_requests", Key(Kind.MODEL_ENSEMBLE, "prod", "search"))


METRICS = sorted({goal.metric for goals in (*PRESETS.values(), IN_USE) for goal in goals})


@pytest.mark.parametrize("metric", METRICS)
def test_every_metric_has_its_promql(metric):
    query = promql(metric, BERT)
    assert query.count("(") == query.count(")")
    assert query.count('namespace="prod",inferencemodel="bert"') == query.count("last_over_time") > 0
