"""What `output__0` and `treeshap_output` have, by parameters and dims."""

from dataclasses import replace

import numpy as np
import pytest

from halimede.backends.trees import shap as shap_module
from halimede.backends.trees.backend import TreeModel
from halimede.backends.trees.options import read_options
from halimede.core.config.model_config import ModelInput, ModelInstanceGroup, ModelOutput, ModelTensorReshape
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.lazily import Lazily
from support.processes import holding_no_more
from support.refusals import error_of
from support.tree_models import (
    CPU,
    FEATURES,
    config,
    context,
    lightgbm_forest,
    read,
    rows,
    run,
    sklearn_forest,
    targets,
    xgboost_forest,
)

ensemble = Lazily("sklearn.ensemble")
lightgbm = Lazily("lightgbm")
treelite = Lazily("treelite")
xgboost = Lazily("xgboost")

TRAIN, TEST = rows(300, seed=1), rows(32, seed=2)


@pytest.fixture(scope="module")
def binary(tmp_path_factory):
    matrix = xgboost.DMatrix(TRAIN, label=targets(TRAIN))
    booster = xgboost.train({"objective": "binary:logistic", "max_depth": 4, "nthread": 1}, matrix, 6)
    return booster, xgboost_forest(tmp_path_factory.mktemp("binary"), booster)


@pytest.fixture(scope="module")
def multiclass(tmp_path_factory):
    matrix = xgboost.DMatrix(TRAIN, label=targets(TRAIN, 3))
    booster = xgboost.train({"objective": "multi:softprob", "num_class": 3, "max_depth": 3, "nthread": 1}, matrix, 4)
    return booster, xgboost_forest(tmp_path_factory.mktemp("multiclass"), booster)


def test_a_binary_model_gives_one_probability_or_two(binary):
    booster, forest = binary
    expected = booster.inplace_predict(TEST)
    one = run(forest, config([1], predict_proba="true", output_class="true"), TEST)
    two = run(forest, config([2], predict_proba="true", output_class="true"), TEST)
    assert np.abs(one[:, 0] - expected).max() < 1e-6
    assert two.tolist() == np.concatenate([1 - one, one], axis=1).tolist()


@pytest.mark.parametrize("threshold", ["", "0.2", "0.9"])
def test_a_binary_classifier_gives_the_class_above_the_threshold(binary, threshold):
    booster, forest = binary
    found = run(forest, config([1], output_class="true", threshold=threshold), TEST)
    expected = (booster.inplace_predict(TEST) > float(threshold or 0.5)).astype(float)
    assert 0 < expected.mean() < 1
    assert found.tolist() == expected[:, None].tolist()


def test_a_threshold_chooses_between_two_probabilities(tmp_path):
    train, x = np.nan_to_num(TRAIN), np.nan_to_num(TEST)
    model = ensemble.RandomForestClassifier(5, max_depth=4, random_state=0).fit(train, targets(TRAIN))
    found = run(sklearn_forest(tmp_path, model), config([1], is_classifier="true", threshold="0.8"), x)
    expected = model.predict_proba(x)[:, 1] > 0.8
    assert expected.any()
    assert found[:, 0].tolist() == expected.astype(float).tolist()


def test_a_multiclass_model_gives_probabilities_or_the_class(multiclass):
    booster, forest = multiclass
    expected = booster.inplace_predict(TEST)
    assert np.abs(run(forest, config([3]), TEST) - expected).max() < 1e-6
    found = run(forest, config([1], is_classifier="true"), TEST)
    assert found.tolist() == expected.argmax(axis=1)[:, None].astype(float).tolist()


def test_dims_of_the_same_size_are_the_shape_of_the_answer(multiclass, binary):
    assert run(multiclass[1], config([3, 1]), TEST).shape == (32, 3, 1)
    scalar = replace(
        config(None), output=(ModelOutput("output__0", DataType.FP32, dims=(1,), reshape=ModelTensorReshape()),)
    )
    assert run(binary[1], scalar, TEST).shape == (32,)
    unbatched = replace(
        config(None),
        max_batch_size=0,
        input=(ModelInput("input__0", DataType.FP32, dims=(-1, FEATURES)),),
        output=(ModelOutput("output__0", DataType.FP32, dims=(-1, 1)),),
    )
    assert run(binary[1], unbatched, TEST).tolist() == run(binary[1], config([1]), TEST).tolist()


@pytest.mark.parametrize("count", [0, 1, 700])
def test_any_number_of_rows_runs_at_once(binary, count):
    x = rows(count, seed=5)
    found = run(binary[1], config([1], shap=[FEATURES + 1]), x, ["output__0", "treeshap_output"])
    assert {name: each.shape for name, each in found.items()} == {
        "output__0": (count, 1),
        "treeshap_output": (count, 6),
    }


def test_rows_at_any_address_are_read(binary):
    body = b"\0" + TEST.tobytes()
    x = np.frombuffer(memoryview(body)[1:], np.float32).reshape(TEST.shape)
    assert run(binary[1], config([1]), x).tolist() == run(binary[1], config([1]), TEST).tolist()


def test_each_disagreement_is_named(binary):
    wrong = replace(
        config([4]),
        input=(ModelInput("input__0", DataType.FP64, dims=(7,)),),
    )
    error = error_of(run, binary[1], wrong, TEST)
    assert error.code is ErrorCode.INVALID_ARG
    for part in (
        "expects datatype TYPE_FP64 for input 'input__0', model provides TYPE_FP32",
        "the model expects 2 dimensions (shape [-1,5]) but the model configuration specifies 2 dimensions",
        "tensor 'output__0'",
        "the file has 5 features, and output__0 has values of dims [ 1 or 2 ]",
    ):
        assert part in error.message
    other = replace(config([1]), input=(ModelInput("x", DataType.FP32, dims=(5,)),))
    with pytest.raises(InferenceError, match="unexpected inference input 'x', allowed inputs are: input__0"):
        run(binary[1], other, TEST)
    with pytest.raises(InferenceError, match="'treeshap_output'"):
        run(binary[1], config([1], shap=[FEATURES]), TEST)


def test_instances_share_a_session_unless_they_have_threads_of_their_own(binary):
    for threads, share in ((), True), ({"cpu_nthread": "2"}, False):
        settings = replace(config([1], **dict(threads)), instance_group=(ModelInstanceGroup(count=2),))
        model = TreeModel(settings, binary[1], read_options(settings, "m"), "m")
        first, second = model.create_instance(CPU), model.create_instance(CPU)
        assert (first._session is second._session) is share
        outputs = [each.run({"input__0": TEST}, ["output__0"], context(32))["output__0"] for each in (first, second)]
        assert outputs[0].tobytes() == outputs[1].tobytes()


def test_loads_and_unloads_leave_no_memory_behind(multiclass):
    settings = config([3], shap=[3, 6])

    def cycles(count):
        for _ in range(count):
            model = TreeModel(settings, multiclass[1], read_options(settings, "m"), "m")
            instances = [model.create_instance(CPU) for _ in range(2)]
            for each in instances:
                each.run({"input__0": TEST}, ["output__0", "treeshap_output"], context(32))
                each.close()
            model.close()

    cycles(20)
    with holding_no_more(threads=0, growth_bytes=2 << 20):
        cycles(20)


def test_shap_values_are_those_of_xgboost_and_add_up(binary, multiclass):
    for (booster, forest), dims in ((binary, [6]), (multiclass, [3, 6])):
        found = run(forest, config([forest.outputs], shap=dims), TEST, ["treeshap_output"])
        expected = booster.predict(xgboost.DMatrix(TEST), pred_contribs=True)
        margins = booster.predict(xgboost.DMatrix(TEST), output_margin=True)
        assert found.shape == (32, *dims)
        assert np.abs(found - expected).max() < 2e-6
        assert np.abs(found.sum(axis=-1) - margins).max() < 2e-6


def test_shap_values_are_those_of_lightgbm_and_add_up(tmp_path):
    train, x = TRAIN.copy(), TEST.copy()
    train[:, 3], x[:, 3] = np.arange(len(train)) % 20, np.arange(len(x)) % 25
    settings = {"objective": "multiclass", "num_class": 3, "num_leaves": 12, "verbose": -1, "num_threads": 1}
    data = lightgbm.Dataset(train, train[:, 3].astype(int) % 3, categorical_feature=[3])
    booster = lightgbm.train({**settings, "min_data_per_group": 1, "cat_smooth": 1, "max_cat_to_onehot": 1}, data, 4)
    forest = lightgbm_forest(tmp_path, booster)
    assert forest.nodes.is_categorical.any()
    found = run(forest, config([3], shap=[18]), x, ["treeshap_output"])
    assert np.abs(found - booster.predict(x, pred_contrib=True)).max() < 1e-6
    sums = found.reshape(32, 3, 6).sum(axis=-1)
    assert np.abs(sums - booster.predict(x, raw_score=True)).max() < 1e-6


def test_shap_values_of_a_random_forest_add_up_to_its_averages(tmp_path):
    train, x = np.nan_to_num(TRAIN), np.nan_to_num(TEST)
    model = ensemble.RandomForestClassifier(5, random_state=0).fit(train, targets(TRAIN, 3))
    found = run(sklearn_forest(tmp_path, model), config([3], shap=[3, 6]), x, ["treeshap_output"])
    assert np.abs(found.sum(axis=-1) - model.predict_proba(x)).max() < 1e-6
    # The expected value is the share of each class in the trees' training rows.
    shares = np.mean([tree.tree_.value[0, 0] for tree in model.estimators_], axis=0)
    assert np.abs(found[:, :, -1] - shares).max() < 1e-6


def test_shap_values_of_many_small_chunks_are_the_same(binary, monkeypatch):
    settings = config([1], shap=[6])
    whole = run(binary[1], settings, TEST, ["treeshap_output"])
    monkeypatch.setattr(shap_module, "MOST_ELEMENTS", 64)  # also smaller groups of trees
    chunks = run(binary[1], settings, TEST, ["treeshap_output"])
    assert np.abs(whole - chunks).max() < 1e-6


def test_shap_values_stop_for_a_cancelled_batch(binary):
    shap = shap_module.TreeShap(binary[1], "m")
    asked = []
    shap.values(TEST, lambda: bool(asked.append(1)) or True)
    assert len(asked) == 1


def test_shap_values_that_cannot_be_computed_are_refused(binary, multiclass, monkeypatch, tmp_path):
    forest = binary[1]
    with pytest.raises(InferenceError, match="number of training rows of each node"):
        run(replace(forest, nodes=replace(forest.nodes, cover=np.zeros(0))), config([1], shap=[6]), TEST)
    labels = np.stack([targets(TRAIN), targets(TRAIN)], axis=1).astype(float)
    booster = xgboost.train({"nthread": 1, "max_depth": 2}, xgboost.DMatrix(TRAIN, label=labels), 2)
    several = xgboost_forest(tmp_path, booster)
    with pytest.raises(InferenceError, match="one target, the file has 2"):
        run(several, config([2], shap=[2, 6]), TEST)
    monkeypatch.setattr(shap_module, "MOST_CONDITIONS", 10)
    with pytest.raises(InferenceError, match="at most 10 splits"):
        run(forest, config([1], shap=[6]), TEST)


def test_more_shap_values_than_an_answer_can_have_are_refused(binary):
    shap = shap_module.TreeShap(replace(binary[1], features=2**20), "m")
    with pytest.raises(InferenceError, match="send fewer rows") as caught:
        shap.values(np.broadcast_to(np.float32(0), (256, 2**20)), lambda: False)
    assert caught.value.code is ErrorCode.INVALID_ARG


def test_a_model_with_one_leaf_answers(tmp_path):
    booster = xgboost.train({"nthread": 1, "gamma": 1e9}, xgboost.DMatrix(TRAIN, label=targets(TRAIN)), 2)
    treelite.frontend.from_xgboost(booster).serialize(tmp_path / "checkpoint.tl")
    forest = read(tmp_path / "checkpoint.tl", "treelite_checkpoint")
    found = run(forest, config([1], shap=[6]), TEST, ["output__0", "treeshap_output"])
    assert np.abs(found["output__0"][:, 0] - booster.inplace_predict(TEST)).max() < 1e-6
    assert found["treeshap_output"][0].tolist() == [0, 0, 0, 0, 0, found["output__0"][0, 0]]
