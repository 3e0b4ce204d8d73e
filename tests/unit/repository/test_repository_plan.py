"""The repository plan: from the loaded models and one change, what to load, swap and withdraw, in order."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import pytest

from halimede.core.config.model_config import (
    EnsembleStep,
    ModelConfig,
    ModelEnsembling,
    ModelInput,
    ModelOutput,
    ModelTransactionPolicy,
)
from halimede.core.repository.load_errors import CircleError, EnsembleError, MissingStepError
from halimede.core.repository.load_waits import LoadWaits
from halimede.core.repository.plan import (
    LATEST,
    LoadedEnsemble,
    Served,
    Snapshot,
    StepKey,
    Swap,
    Withdraw,
    follow,
    is_used,
    make_design,
    steps_to_load,
    version_text,
)
from halimede.core.types import DataType


def model(name: str, *, dims: tuple[int, ...] = (4,), decoupled: bool = False) -> ModelConfig:
    return ModelConfig(
        name=name,
        input=(ModelInput("IN", DataType.FP32, dims=dims),),
        output=(ModelOutput("OUT", DataType.FP32, dims=dims),),
        model_transaction_policy=ModelTransactionPolicy(decoupled=decoupled),
    )


def chain(name: str, *steps: str | StepKey) -> ModelConfig:
    """An ensemble of one step after the other; a step is a model's name, or that and a version."""
    tensors = ["IN", *(f"between{number}" for number in range(1, len(steps))), "OUT"]
    keys = [(step, LATEST) if isinstance(step, str) else step for step in steps]
    made = tuple(
        EnsembleStep(member, version, {"IN": source}, {"OUT": target})
        for (member, version), (source, target) in zip(keys, pairwise(tensors), strict=True)
    )
    return replace(model(name), ensemble_scheduling=ModelEnsembling(made))


def snapshot(models: Mapping[str, ModelConfig], *ensembles: ModelConfig, labels: tuple[str, ...] = ()) -> Snapshot:
    """All models in version 1, and the ensembles as they serve, or wait for a step, after they were loaded in order."""
    loaded = Snapshot(
        {name: both(Served(config, {"OUT": labels} if labels else {})) for name, config in models.items()}, {}
    )
    for config in ensembles:
        try:
            design = make_design(loaded, config, {})
            serving = {**loaded.serving, config.name: both(design.served)}
            parts = design.parts
        except EnsembleError:
            serving, parts = dict(loaded.serving), None
        entry = LoadedEnsemble(config, {}, (1,), parts)
        loaded = Snapshot(serving, {**loaded.ensembles, config.name: entry})
    return loaded


def both(served: Served) -> dict[str, Served]:
    return {"1": served, "": served}


def without(state: Snapshot, name: str) -> Snapshot:
    """The state after the unload of a model or an ensemble."""
    serving, ensembles = dict(state.serving), dict(state.ensembles)
    serving.pop(name, None)
    ensembles.pop(name, None)
    return Snapshot(serving, ensembles)


def changed(state: Snapshot, config: ModelConfig) -> Snapshot:
    """The state after a model was loaded or reloaded."""
    return replace(state, serving={**state.serving, config.name: both(Served(config, {}))})


def summary(actions: list[Swap | Withdraw]) -> list[tuple[str, str]]:
    return [("swap" if isinstance(action, Swap) else "withdraw", action.ensemble) for action in actions]


MODELS = {name: model(name) for name in ("two", "three")}
INNER, OUTER, OTHER = chain("inner", "two", "three"), chain("outer", "inner"), chain("other", "two")


def test_steps_that_do_not_serve_are_loaded_first_each_once() -> None:
    steps = [("a", LATEST), ("b", 2), ("c", LATEST), ("a", LATEST), ("b", 3)]
    assert steps_to_load("e", steps, {("c", LATEST), ("b", 2)}, LoadWaits()) == ["a", "b"]


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ({}, None),
        ({"a": ["b"]}, None),
        ({"a": ["e"]}, ("e", "a")),
        ({"a": ["b"], "b": ["c", "e"]}, ("e", "a", "b")),
    ],
)
def test_a_step_whose_load_waits_for_the_ensemble_is_an_error(
    waits: dict[str, list[str]], circle: tuple[str, ...] | None
) -> None:
    graph = LoadWaits()
    for name, others in waits.items():
        graph.add(name, others)
    if circle is None:
        assert steps_to_load("e", [("a", LATEST)], (), graph) == ["a"]
        return
    with pytest.raises(CircleError) as error:
        steps_to_load("e", [("a", LATEST)], (), graph)
    assert error.value.circle == circle


def test_an_ensemble_that_is_a_step_of_its_own_is_an_error() -> None:
    with pytest.raises(CircleError, match="circular dependency between ensembles: own -> own"):
        steps_to_load("own", [("own", LATEST)], (), LoadWaits())


def test_a_design_has_the_configuration_and_labels_of_the_steps() -> None:
    state = snapshot({"two": model("two", decoupled=True)}, labels=("cat", "dog"))
    design = make_design(state, chain("e", "two"), {})
    assert design.config.model_transaction_policy == ModelTransactionPolicy(decoupled=True)
    assert (design.labels, design.parts.depth) == ({"OUT": ("cat", "dog")}, 1)
    assert make_design(state, chain("e", "two"), {"OUT": ("own",)}).labels == {"OUT": ("own",)}


@pytest.mark.parametrize(
    ("config", "kind", "text"),
    [
        (chain("e", "two", "four"), MissingStepError, "ensemble 'e' depends on 'four' which has no loaded version"),
        (
            chain("e", ("two", 7)),
            MissingStepError,
            "ensemble 'e' depends on 'two' whose required version 7 is not loaded.",
        ),
        (chain("inner", "outer"), CircleError, "circular dependency between ensembles: inner -> outer -> inner"),
    ],
)
def test_an_ensemble_without_its_steps_or_in_a_circle_has_no_design(
    config: ModelConfig, kind: type[EnsembleError], text: str
) -> None:
    with pytest.raises(kind) as error:
        make_design(snapshot(MODELS, INNER, OUTER), config, {})
    assert (type(error.value), error.value.message) == (kind, text)


def test_ensembles_nest_up_to_a_bound() -> None:
    names = ["two", *(f"e{number}" for number in range(33))]
    ensembles = [chain(name, step) for step, name in pairwise(names)]
    state = snapshot(MODELS, *ensembles[:-1])
    assert make_design(state, ensembles[-2], {}).parts.depth == 32
    with pytest.raises(EnsembleError, match=f"nests ensembles 33 deep.*: {' -> '.join(reversed(names))}$"):
        make_design(state, ensembles[-1], {})


def test_ensembles_are_withdrawn_with_a_step_from_below() -> None:
    state = without(snapshot(MODELS, INNER, OTHER, OUTER), "three")
    missing = "depends on '{}' which has no loaded version"
    assert follow(state, "three") == [
        Withdraw("inner", f"ensemble 'inner' {missing.format('three')}", ""),
        Withdraw("outer", f"ensemble 'outer' {missing.format('inner')}", ""),
    ]


def test_ensembles_come_back_with_their_step_from_below() -> None:
    state = snapshot({"two": MODELS["two"]}, INNER, OUTER)
    assert state.serving.keys() == {"two"}
    assert summary(follow(changed(state, MODELS["three"]), "three")) == [("swap", "inner"), ("swap", "outer")]


def test_a_reload_that_changes_nothing_swaps_nothing() -> None:
    state = snapshot(MODELS, INNER, OUTER)
    assert follow(changed(state, model("three")), "three") == []


def test_a_changed_configuration_swaps_the_ensembles_that_it_changes() -> None:
    state = snapshot(MODELS, INNER, OUTER, OTHER)
    actions = follow(changed(state, model("three", decoupled=True)), "three")
    assert summary(actions) == [("swap", "inner"), ("swap", "outer")]
    assert isinstance(actions[1], Swap)
    assert actions[1].design.config.model_transaction_policy == ModelTransactionPolicy(decoupled=True)


def test_misfit_has_a_problem_and_ensembles_above_wait_for_it() -> None:
    state = snapshot(MODELS, INNER, OUTER)
    inner, outer = follow(changed(state, model("three", dims=(5,))), "three")
    assert isinstance(inner, Withdraw)
    assert inner.problem.startswith("Invalid argument: in ensemble inner, ensemble tensor")
    assert outer == Withdraw("outer", "ensemble 'outer' depends on 'inner' which has no loaded version", "")


def test_an_ensemble_that_stays_withdrawn_withdraws_nothing_above_it() -> None:
    state = without(snapshot({}, INNER, OUTER), "two")
    assert summary(follow(state, "two")) == [("withdraw", "inner")]


def test_an_ensemble_is_swapped_once_after_all_of_its_steps() -> None:
    state = snapshot(MODELS, INNER, OTHER, chain("top", "other", "inner", "two"))
    actions = summary(follow(changed(state, model("two", decoupled=True)), "two"))
    assert sorted(actions[:2]) == [("swap", "inner"), ("swap", "other")]
    assert [name for _, name in actions[2:]] == ["top"]


def test_only_steps_of_ensembles_that_serve_are_used() -> None:
    state = snapshot(MODELS, INNER, OTHER)
    assert [is_used(state, name) for name in ("two", "three", "inner")] == [True, True, False]
    waiting = snapshot({"two": MODELS["two"]}, INNER)
    assert not is_used(waiting, "two")
    assert not is_used(without(state, "inner"), "three")


def test_a_step_names_a_version_or_the_highest() -> None:
    assert (version_text(LATEST), version_text(3)) == ("", "3")
