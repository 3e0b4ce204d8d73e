"""The status of ensembles: their steps and their members."""

import json

import pytest

from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import (
    Key,
    Kind,
    Workload,
)
from support.operator_pods import (
    DIGEST,
    FETCHED_MODEL,
    deployment,
    index,
    loading,
    serving,
    snapshot,
)
from support.operator_specs import ensemble_key, search_spec
from support.operator_status import PROBLEM, conditions, message, status_for

ENSEMBLE_INDEX = (("search", "1", "READY", ""), ("tok", "1", "READY", ""), ("pool-v2", "3", "READY", ""))
MEMBERS = {
    "tok": {"metadata": {"name": "tok", "generation": 1}, "spec": {}},
    "pool": {"metadata": {"name": "pool", "generation": 2}, "spec": {"model": {"name": "pool-v2"}}},
}


def ensemble(pod_: Object, entries: tuple[tuple[str, str, str, str], ...], members: dict[str, Object]) -> Snapshot:
    name = pod_["metadata"]["name"]
    child = deployment()
    return snapshot(ensemble_key(), pod_, child=child, indexes={name: index(*entries)}, members=members)


def two_models() -> str:
    return json.dumps(
        {"models": [FETCHED_MODEL | {"name": "pool-v2"}, FETCHED_MODEL | {"name": "tok", "size_bytes": 9}]}
    )


def test_the_status_of_an_ensemble_that_serves():
    made = serving("search-1-a")
    made["status"]["initContainerStatuses"][0]["state"]["terminated"]["message"] = two_models()
    status = status_for(ensemble(made, ENSEMBLE_INDEX, MEMBERS), search_spec())

    assert conditions(status) == {"Ready": "True Serving"}
    assert status["members"] == [
        f"tok: {DIGEST}, 9 bytes, fetched at 2026-11-22T09:00:04Z",
        f"pool: {DIGEST}, 438 bytes, fetched at 2026-11-22T09:00:04Z",
    ]
    assert (status["readySteps"], status["selector"]) == ("2/2", "halimede.dev/ensemble=search")
    assert status["url"] == "http://search.prod.svc:8000/v2/models/search"
    assert "model" not in status


def test_a_loading_ensemble_reports_its_unready_steps():
    entries = (("tok", "1", "READY", ""), ("pool-v2", "3", "LOADING", ""))
    status = status_for(ensemble(loading("search-1-a"), entries, MEMBERS), search_spec())

    assert (conditions(status)["StepsReady"], conditions(status)["Ready"]) == ("False Loading", "False Loading")
    assert message(status, "StepsReady") == "step pool: model pool is not loaded yet"
    assert status["readySteps"] == "1/2"


INVALID = {"type": "Accepted", "status": "False", "reason": "InvalidSpec", "message": "bad"}
LACKING = {
    "no such model": (
        {"tok": MEMBERS["tok"]},
        "ModelMissing",
        "step pool: InferenceModel pool does not exist",
    ),
    "a model with problems": (
        {
            **MEMBERS,
            "tok": {
                **MEMBERS["tok"],
                "status": {
                    "observedGeneration": 1,
                    "conditions": [{**INVALID, "message": "spec.model.uri: bad"}],
                },
            },
        },
        "ModelInvalid",
        "step tok: InferenceModel tok: spec.model.uri: bad",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LACKING)
def test_a_missing_or_invalid_member_is_reported(case: str):
    members, reason, text = LACKING[case]
    status = status_for(ensemble(serving("search-1-a"), ENSEMBLE_INDEX, members), search_spec())

    found = conditions(status)
    assert (found["StepsReady"], found["Ready"], found["Stalled"]) == (
        f"False {reason}",
        f"False {reason}",
        f"True {reason}",
    )
    assert (message(status, "StepsReady"), message(status)) == (text, text)
    assert (found["Available"], found["Degraded"], status["readySteps"]) == ("True Serving", f"True {reason}", "1/2")


@pytest.mark.parametrize("reason", ["PodsRefused", "QuotaExceeded", "Conflict", "Forbidden"])
def test_a_member_whose_own_pods_are_refused_is_served_by_the_ensemble(reason: str):
    refused = {"observedGeneration": 1, "conditions": [{**INVALID, "reason": reason}]}
    members = {**MEMBERS, "tok": {**MEMBERS["tok"], "status": refused}}
    assert (
        conditions(status_for(ensemble(serving("search-1-a"), ENSEMBLE_INDEX, members), search_spec()))["Ready"]
        == "True Serving"
    )


def test_problems_of_an_older_generation_of_a_member_do_not_count():
    members = {**MEMBERS, "pool": {**MEMBERS["pool"], "status": {"observedGeneration": 1, "conditions": [INVALID]}}}

    assert (
        conditions(status_for(ensemble(serving("search-1-a"), ENSEMBLE_INDEX, members), search_spec()))["Ready"]
        == "True Serving"
    )


def test_steps_of_an_invalid_ensemble_are_unknown():
    seen = snapshot(Key(Kind.MODEL_ENSEMBLE, "prod", "search"), child=deployment())
    status = status_for(seen, None, problems=(PROBLEM,))

    assert (conditions(status)["StepsReady"], conditions(status)["Ready"]) == (
        "Unknown InvalidSpec",
        "False InvalidSpec",
    )
    assert "readySteps" not in status


def test_a_step_is_ready_if_all_serving_pods_have_its_model():
    pods = (serving("search-1-a"), loading("search-1-b"))
    indexes = {"search-1-a": index(*ENSEMBLE_INDEX), "search-1-b": index(("tok", "1", "READY", ""))}
    seen = snapshot(ensemble_key(), *pods, child=deployment(2), indexes=indexes, members=MEMBERS)

    assert status_for(seen, search_spec(workload=Workload(replicas=2)))["readySteps"] == "2/2"
