"""Obstacles to making the children: an invalid spec, a taken name, a refused or failed write."""

from dataclasses import replace

import pytest

from halimede_operator.core.api_errors import Meaning
from halimede_operator.core.children.diff import Conflict
from halimede_operator.core.decided import ApplyFailure
from halimede_operator.core.spec.types import (
    Problem,
)
from support.operator_pods import (
    snapshot,
)
from support.operator_specs import model_key
from support.operator_status import PROBLEM, TWO, conditions, message, status_for, two_serving

OBSTACLES = {
    "problems, all of them": (
        {"problems": (PROBLEM, Problem("spec.replicas", "must not be negative"))},
        "False InvalidSpec",
        "spec.model.uri: must be a URI; spec.replicas: must not be negative",
    ),
    "a name that is taken": (
        {"conflicts": (Conflict({"kind": "Service", "metadata": {"name": "bert"}}, "Widget other"),)},
        "False Conflict",
        "Service bert exists and belongs to Widget other; rename this object, or delete what is in its way",
    ),
    "a name of nobody's": (
        {"conflicts": (Conflict({"kind": "Service", "metadata": {"name": "bert"}}, ""),)},
        "False Conflict",
        "Service bert exists and belongs to somebody else; rename this object, or delete what is in its way",
    ),
    "no right to write": (
        {"failures": (ApplyFailure("Service prod/bert", Meaning.FORBIDDEN, 'cannot patch resource "services"'),)},
        "False Forbidden",
        'Service prod/bert: cannot patch resource "services"',
    ),
    "a child that is not valid": (
        {"failures": (ApplyFailure("Deployment prod/bert", Meaning.REFUSED, "spec.template: bad"),)},
        "False ApplyRefused",
        "Deployment prod/bert: spec.template: bad",
    ),
    "a quota of children": (
        {"failures": (ApplyFailure("Service prod/bert", Meaning.OVER_QUOTA, "exceeded quota: q"),)},
        "False QuotaExceeded",
        "Service prod/bert: exceeded quota: q",
    ),
}


@pytest.mark.parametrize("case", OBSTACLES)
def test_obstacles_are_reported_as_not_accepted_and_stalled(case: str):
    obstacles, expected, text = OBSTACLES[case]
    status = status_for(two_serving(), None if "problems" in obstacles else TWO, **obstacles)

    found = conditions(status)
    reason = expected.split()[1]
    assert (found["Accepted"], found["Ready"], found["Stalled"]) == (expected, expected, f"True {reason}")
    assert (message(status, "Accepted"), message(status)) == (text, text)
    assert found["Degraded"] == f"True {reason}"
    assert (found["Available"], status["phase"]) == ("True Serving", "Degraded")
    assert "Reconciling" not in found


def test_missing_rights_are_degraded_even_without_pods():
    """O-11."""
    failure = ApplyFailure("Deployment prod/bert", Meaning.FORBIDDEN, 'cannot patch resource "deployments"')
    status = status_for(snapshot(model_key()), failures=(failure,))

    assert (conditions(status)["Degraded"], status["phase"]) == ("True Forbidden", "Failed")


def test_a_transient_failure_does_not_make_the_spec_invalid():
    status = status_for(two_serving(), failures=(ApplyFailure("Service prod/bert", Meaning.TRANSIENT, "timed out"),))

    found = conditions(status)
    assert (found["Accepted"], found["Ready"]) == ("True Valid", "False ApplyFailed")
    assert found["Reconciling"] == "True ApplyFailed"
    assert message(status) == "Service prod/bert: timed out; it is tried again"


def test_a_spec_with_problems_keeps_the_status_of_serving_pods():
    spec = replace(TWO, model=replace(TWO.model, format="onnx"))
    before = status_for(two_serving(), spec)
    after = status_for(two_serving(status=before, generation=2), None, problems=(PROBLEM,))

    same = ("url", "addresses", "effective", "current", "model", "placements", "readyReplicas")
    assert {name: after[name] for name in same} == {name: before[name] for name in same}
