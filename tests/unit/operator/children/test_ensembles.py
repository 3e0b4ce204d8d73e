import json
from dataclasses import replace
from typing import Any

import pytest

from halimede_operator.core.children.content import member_problems
from halimede_operator.core.spec.types import EnsembleSpec, ModelSpec, Problem, Step
from support.operator_children import children_of, fetch_of, pod_of, template_of
from support.operator_specs import PLATFORM, members_of, model_spec, search_spec, step, tensor, workload


def plan_of(spec: EnsembleSpec, members: dict[str, ModelSpec]) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads(children_of(spec, members)["ConfigMap"]["data"]["plan.json"])
    return plan


def steps_of(spec: EnsembleSpec, members: dict[str, ModelSpec]) -> list[dict[str, Any]]:
    (ensemble,) = plan_of(spec, members)["ensembles"]
    steps: list[dict[str, Any]] = ensemble["config"]["ensemble_scheduling"]["step"]
    return steps


def calls(*versions: int | None, model: str = "tok") -> tuple[Step, ...]:
    """Steps that call one model, each with its own version."""
    return tuple(
        step(f"s{i}", {"text": "request.TEXT"}, {"ids": f"ids{i}"}, model=model, version=version)
        for i, version in enumerate(versions)
    )


def calling(*versions: int | None) -> EnsembleSpec:
    outputs = tuple(tensor(f"OUT{i}", f"s{i}.ids{i}") for i in range(len(versions)))
    return search_spec(steps=calls(*versions), outputs=outputs)


def test_platform_and_member_may_name_the_same_secret() -> None:
    members = {**members_of("tok"), "pool": model_spec("pool", credentials_secret="keys")}

    made = pod_of(search_spec(), members, platform=replace(PLATFORM, s3_secret="keys"))

    volumes = [each["name"] for each in made["volumes"] if each.get("secret", {}).get("secretName") == "keys"]
    assert volumes == ["credentials-keys", "s3-credentials"]


def test_one_pod_fetches_all_members_and_the_ensemble_that_calls_them() -> None:
    assert plan_of(search_spec(), members_of("tok", "pool")) == {
        "models": [{"name": "pool", "uri": "s3://models/pool"}, {"name": "tok", "uri": "s3://models/tok"}],
        "ensembles": [
            {
                "name": "search",
                "config": {
                    "name": "search",
                    "platform": "ensemble",
                    "max_batch_size": 8,
                    "input": [{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}],
                    "output": [{"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": [-1]}],
                    "ensemble_scheduling": {
                        "step": [
                            {
                                "model_name": "tok",
                                "model_version": -1,
                                "input_map": {"text": "TEXT"},
                                "output_map": {"ids": "tok.ids"},
                            },
                            {
                                "model_name": "pool",
                                "model_version": -1,
                                "input_map": {"ids": "tok.ids"},
                                "output_map": {"mean": "EMBEDDING"},
                            },
                        ]
                    },
                },
            }
        ],
        "stores": {"s3": {"endpoint": "https://store.example"}},
    }


def test_a_member_is_called_by_the_name_under_which_it_is_served() -> None:
    members = {"tok": model_spec("bert-tokenizer"), "pool": model_spec("pool")}

    assert [model["name"] for model in plan_of(search_spec(), members)["models"]] == ["bert-tokenizer", "pool"]
    assert steps_of(search_spec(), members)[0]["model_name"] == "bert-tokenizer"


def test_unused_step_outputs_are_left_out() -> None:
    first, second = search_spec().steps
    spec = search_spec(steps=(replace(first, outputs={"ids": "ids", "lengths": "lengths"}), second))

    assert steps_of(spec, members_of("tok", "pool"))[0]["output_map"] == {"ids": "tok.ids"}


def test_a_tensor_used_by_a_step_and_as_output_has_the_outputs_name() -> None:
    spec = search_spec(outputs=(tensor("EMBEDDING", "pool.out"), tensor("IDS", "tok.ids", "INT64")))

    first, second = steps_of(spec, members_of("tok", "pool"))
    assert first["output_map"] == {"ids": "IDS"}
    assert second["input_map"] == {"ids": "IDS"}


def test_every_tensor_has_its_own_name() -> None:
    spec = search_spec(
        inputs=(tensor("tok.ids"), tensor("tok.ids_")),
        steps=(
            step("tok", {"a": "request.tok.ids", "b": "request.tok.ids_"}, {"ids": "ids"}),
            step("pool", {"ids": "tok.ids"}, {"mean": "out"}),
        ),
    )

    first, second = steps_of(spec, members_of("tok", "pool"))
    assert first == {
        "model_name": "tok",
        "model_version": -1,
        "input_map": {"a": "tok.ids", "b": "tok.ids_"},
        "output_map": {"ids": "tok.ids__"},
    }
    assert second["input_map"] == {"ids": "tok.ids__"}


def test_a_condition_names_the_servers_tensors() -> None:
    first, second = search_spec().steps
    conditional = replace(
        second, when="tok.score > 0.5 and request.TEXT.present and `tok.ids`.shape[0] < 9 or 'tok.ids' == ''"
    )
    spec = search_spec(
        steps=(replace(first, outputs={"ids": "ids", "score": "score"}), conditional),
        outputs=(tensor("EMBEDDING", "pool.out"), tensor("SCORE", "tok.score")),
    )

    called = steps_of(spec, members_of("tok", "pool"))
    assert called[1]["when"] == "`SCORE` > 0.5 and `TEXT`.present and `tok.ids`.shape[0] < 9 or 'tok.ids' == ''"
    assert "when" not in called[0]


def test_an_output_used_only_by_a_condition_is_kept() -> None:
    first, second = search_spec().steps
    steps = (replace(first, outputs={"ids": "ids", "score": "score"}), replace(second, when="tok.score > 0.5"))

    assert steps_of(search_spec(steps=steps), members_of("tok", "pool"))[0]["output_map"] == {
        "ids": "tok.ids",
        "score": "tok.score",
    }


LATEST_2 = {"latest": {"numVersions": 2}}
ONE_AND_THREE = {"specific": {"versions": [1, 3]}}


@pytest.mark.parametrize(
    ("versions", "own", "policy", "called"),
    [
        ((None,), None, None, [-1]),
        ((None,), LATEST_2, LATEST_2, [-1]),
        ((2,), None, {"specific": {"versions": [2]}}, [2]),
        ((4, 2, 4), LATEST_2, {"specific": {"versions": [2, 4]}}, [4, 2, 4]),
        # No policy says "the latest, and 2".
        ((2, None), None, {"all": {}}, [2, -1]),
        ((2, None), {"all": {}}, {"all": {}}, [2, -1]),
        # The highest that the model serves, not the highest that is there now.
        ((5, None), ONE_AND_THREE, {"specific": {"versions": [1, 3, 5]}}, [5, 3]),
    ],
)
def test_versions_named_by_steps_are_served(
    versions: tuple[int | None, ...], own: Any, policy: Any, called: list[int]
) -> None:
    config = {"maxBatchSize": 8} if own is None else {"maxBatchSize": 8, "versionPolicy": own}
    members = {"tok": model_spec("tok", config=config)}

    (member,) = plan_of(calling(*versions), members)["models"]
    assert member["config"] == ({"maxBatchSize": 8} if policy is None else {"maxBatchSize": 8, "versionPolicy": policy})
    assert [each["model_version"] for each in steps_of(calling(*versions), members)] == called


def test_credentials_of_members_are_mounted_once_each() -> None:
    members = {
        "tok": model_spec("tok", credentials_secret="keys", uri="pvc://claim/tok"),
        "pool": model_spec("pool", credentials_secret="keys", uri="pvc://claim/pool", digest="sha256:" + "a" * 64),
    }

    children = children_of(search_spec(), members)

    pod = template_of(children)["spec"]
    assert [volume["name"] for volume in pod["volumes"]][4:] == ["credentials-keys", "claim-claim"]
    assert [mount["name"] for mount in fetch_of(pod)["volumeMounts"]][3:] == ["claim-claim", "credentials-keys"]
    models = json.loads(children["ConfigMap"]["data"]["plan.json"])["models"]
    assert models == [
        {
            "name": "pool",
            "uri": "pvc://claim/pool",
            "digest": "sha256:" + "a" * 64,
            "credentials": "/run/halimede/credentials/keys",
            "mount": "/run/halimede/claims/claim",
        },
        {
            "name": "tok",
            "uri": "pvc://claim/tok",
            "credentials": "/run/halimede/credentials/keys",
            "mount": "/run/halimede/claims/claim",
        },
    ]


def test_a_members_model_rolls_ensemble_pods_but_its_replicas_do_not() -> None:
    def template(tok: ModelSpec) -> Any:
        return template_of(children_of(search_spec(), {**members_of("pool"), "tok": tok}))

    before = template(model_spec("tok"))
    assert template(model_spec("tok", uri="s3://models/tok-2")) != before
    assert template(model_spec("tok", config={"max_batch_size": 4})) != before
    assert template(model_spec("tok", workload=workload(replicas=7))) == before


def test_equal_served_names_of_members_are_problems() -> None:
    spec = search_spec()

    assert member_problems(spec, members_of("tok", "pool")) == ()
    assert member_problems(spec, {"tok": model_spec("same"), "pool": model_spec("same")}) == (
        Problem(
            "spec.steps[1].modelRef.name",
            "InferenceModels 'tok' and 'pool' are both served as 'same'; give one of them another spec.model.name",
        ),
    )
    assert member_problems(spec, {"tok": model_spec("search"), "pool": model_spec("pool")}) == (
        Problem(
            "spec.steps[0].modelRef.name",
            "InferenceModel 'tok' is served as 'search', which is the ensemble's own name; give its spec.model.name or the "
            "ensemble another one",
        ),
    )
    twice = search_spec(steps=(*calls(None, None, model="tok"),))
    assert member_problems(twice, members_of("tok")) == ()
