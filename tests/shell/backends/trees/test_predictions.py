"""Answers of the backend, against what each library predicts itself."""

import struct

import numpy as np
import onnxruntime
import pytest

from halimede.backends.trees.forest import POSTPROCESSORS
from halimede.backends.trees.onnx_file import onnx_bytes
from support.lazily import Lazily
from support.tree_models import (
    config,
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

TRAIN, TEST = rows(300, seed=1), rows(64, seed=2)
POSITIVE = np.abs(np.nan_to_num(TRAIN[:, 0])) + 0.1
LABELS = {2: targets(TRAIN), 3: targets(TRAIN, 3)}

XGBOOST = {
    "binary:logistic": LABELS[2],
    "binary:logitraw": LABELS[2],
    "binary:hinge": LABELS[2],
    "reg:squarederror": POSITIVE,
    "reg:logistic": LABELS[2],
    "reg:gamma": POSITIVE,
    "reg:tweedie": POSITIVE,
    "count:poisson": POSITIVE,
    "rank:pairwise": LABELS[2],
    "multi:softprob": LABELS[3],
}
LIGHTGBM = {
    "binary": LABELS[2],
    "regression": POSITIVE,
    "regression_l1": POSITIVE,
    "poisson": POSITIVE,
    "gamma": POSITIVE,
    "tweedie": POSITIVE,
    "cross_entropy": LABELS[2],
    "cross_entropy_lambda": LABELS[2],
    "multiclass": LABELS[3],
    "multiclassova": LABELS[3],
    "lambdarank": LABELS[2],
}


def close(values, expected):
    expected = np.asarray(expected, np.float64).reshape(values.shape)
    assert values.dtype == np.float32
    assert np.abs(values - expected).max() <= 4e-6 * max(1, np.abs(expected).max())


def xgboost_booster(objective, labels, **parameters):
    matrix = xgboost.DMatrix(TRAIN, label=labels)
    if objective.startswith("rank"):
        matrix.set_group([len(TRAIN)])
    settings = {"objective": objective, "max_depth": 4, "nthread": 1, **parameters}
    if objective.startswith("multi"):
        settings["num_class"] = 3
    return xgboost.train(settings, matrix, 6)


def lightgbm_booster(objective, labels, **parameters):
    group = [len(TRAIN)] if objective == "lambdarank" else None
    data = lightgbm.Dataset(TRAIN, labels, group=group)
    settings = {"objective": objective, "num_leaves": 12, "verbose": -1, "num_threads": 1, "seed": 1, **parameters}
    if objective.startswith("multiclass"):
        settings["num_class"] = 3
    return lightgbm.train(settings, data, 6)


@pytest.mark.parametrize("objective", XGBOOST)
def test_xgboost_objectives_answer_as_the_library(tmp_path, objective):
    booster = xgboost_booster(objective, XGBOOST[objective])
    width = 3 if objective == "multi:softprob" else 1
    close(run(xgboost_forest(tmp_path, booster), config([width]), TEST), booster.inplace_predict(TEST))


@pytest.mark.parametrize(
    "parameters",
    [{"booster": "dart", "rate_drop": 0.5}, {"base_score": 0.3}, {"num_parallel_tree": 4, "subsample": 0.5}],
    ids=str,
)
def test_xgboost_boosters_answer_as_the_library(tmp_path, parameters):
    booster = xgboost_booster("binary:logistic", LABELS[2], **parameters)
    close(run(xgboost_forest(tmp_path, booster), config([1]), TEST), booster.predict(xgboost.DMatrix(TEST)))


@pytest.mark.parametrize("objective", LIGHTGBM)
def test_lightgbm_objectives_answer_as_the_library(tmp_path, objective):
    booster = lightgbm_booster(objective, LIGHTGBM[objective])
    width = 3 if objective.startswith("multiclass") else 1
    close(run(lightgbm_forest(tmp_path, booster), config([width]), TEST), booster.predict(TEST))


@pytest.mark.parametrize(
    "parameters",
    [
        {"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.6},
        {"boosting": "dart"},
        {"use_missing": False},
        {"sigmoid": 2.0},
    ],
    ids=str,
)
def test_lightgbm_settings_answer_as_the_library(tmp_path, parameters):
    booster = lightgbm_booster("binary", LABELS[2], **parameters)
    x = TEST.copy()
    x[::3, 1] = 0
    close(run(lightgbm_forest(tmp_path, booster), config([1]), x), booster.predict(x))


def test_lightgbm_files_with_missing_zeros_are_refused(tmp_path):
    booster = lightgbm_booster("binary", LABELS[2], zero_as_missing=True)
    with pytest.raises(ValueError, match="zero_as_missing"):
        lightgbm_forest(tmp_path, booster)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("RandomForestClassifier", {"n_estimators": 7, "max_depth": 5}, id="RandomForestClassifier"),
        pytest.param("GradientBoostingClassifier", {"n_estimators": 7}, id="GradientBoostingClassifier"),
        pytest.param("HistGradientBoostingClassifier", {"max_iter": 7}, id="HistGradientBoostingClassifier"),
    ],
)
@pytest.mark.parametrize("classes", [2, 3])
def test_sklearn_classifiers_answer_as_the_library(tmp_path, name, options, classes):
    train, x = np.nan_to_num(TRAIN), np.nan_to_num(TEST)
    estimator = getattr(ensemble, name)(random_state=0, **options).fit(train, LABELS[classes])
    forest = sklearn_forest(tmp_path, estimator)
    close(run(forest, config([classes]), x), estimator.predict_proba(x))
    if classes == 2:
        close(run(forest, config([1]), x), estimator.predict_proba(x)[:, 1])
    classified = run(forest, config([1], is_classifier="true"), x)
    assert classified.tolist() == estimator.predict(x)[:, None].tolist()


def test_sklearn_regressors_answer_as_the_library(tmp_path):
    train, x = np.nan_to_num(TRAIN), np.nan_to_num(TEST)
    for estimator in (
        ensemble.RandomForestRegressor(5, random_state=0),
        ensemble.ExtraTreesRegressor(5, random_state=0),
    ):
        estimator.fit(train, POSITIVE)
        close(run(sklearn_forest(tmp_path, estimator), config([1]), x), estimator.predict(x))
    several = ensemble.RandomForestRegressor(5, random_state=0).fit(train, np.stack([POSITIVE, LABELS[3]], axis=1))
    close(run(sklearn_forest(tmp_path, several), config([2]), x), several.predict(x))
    isolation = ensemble.IsolationForest(n_estimators=5, random_state=0).fit(train)
    close(run(sklearn_forest(tmp_path, isolation), config([1]), x), -isolation.score_samples(x))


def test_xgboost_categories_answer_as_the_library(tmp_path):
    train, x = TRAIN.copy(), TEST.copy()
    train[:, 3], x[:, 3] = np.arange(len(train)) % 70, np.arange(len(x)) % 70
    x[:4, 3] = [-1, 3.7, np.nan, 500]
    types = ["q", "q", "q", "c", "q"]
    labels = (train[:, 3] % 3 == 0).astype(int)
    matrix = xgboost.DMatrix(train, label=labels, feature_types=types, enable_categorical=True)
    booster = xgboost.train({"max_depth": 4, "max_cat_to_onehot": 1, "nthread": 1}, matrix, 6)
    forest = xgboost_forest(tmp_path, booster)
    assert forest.nodes.is_categorical.any()
    # XGBoost refuses invalid categories; Treelite's interpreter, like Triton, takes them as of no category.
    outside = treelite.gtil.predict(treelite.frontend.from_xgboost(booster), x, nthread=1)
    close(run(forest, config([1]), x), outside)
    valid = np.array([each for each in range(len(x)) if each not in (0, 1, 3)])
    inside = run(forest, config([1]), x[valid])
    close(inside, booster.predict(xgboost.DMatrix(x[valid], feature_types=types, enable_categorical=True)))


def test_lightgbm_categories_answer_as_the_library(tmp_path):
    train, x = TRAIN.copy(), TEST.copy()
    train[:, 3], x[:, 3] = np.arange(len(train)) % 20, np.arange(len(x)) % 25
    x[:4, 3] = [-1, 3.7, np.nan, 50_000_000]
    data = lightgbm.Dataset(train, (train[:, 3] % 3 == 0).astype(int), categorical_feature=[3])
    settings = {"objective": "binary", "num_leaves": 12, "verbose": -1, "num_threads": 1, "min_data_per_group": 1}
    booster = lightgbm.train({**settings, "cat_smooth": 1, "max_cat_to_onehot": 1}, data, 6)
    forest = lightgbm_forest(tmp_path, booster)
    assert forest.nodes.is_categorical.any()
    close(run(forest, config([1]), x), booster.predict(x))


@pytest.mark.parametrize("postprocessor", POSTPROCESSORS)
def test_each_postprocessor_answers_as_treelite(tmp_path, postprocessor):
    is_multiclass = postprocessor in ("softmax", "identity_multiclass", "multiclass_ova")
    objective, labels = ("multi:softprob", LABELS[3]) if is_multiclass else ("reg:squarederror", POSITIVE)
    model = treelite.frontend.from_xgboost(xgboost_booster(objective, labels))
    accessor = model.get_header_accessor()
    accessor.set_field("postprocessor", postprocessor)
    accessor.set_field("sigmoid_alpha", np.array([1.5], np.float32))
    accessor.set_field("ratio_c", np.array([0.7], np.float32))
    model.serialize(tmp_path / "checkpoint.tl")
    forest = read(tmp_path / "checkpoint.tl", "treelite_checkpoint")
    expected = treelite.gtil.predict(model, TEST, nthread=1)
    close(run(forest, config([3 if is_multiclass else 1]), TEST), expected)


@pytest.mark.parametrize("count", [1, 16, 1000])
def test_the_same_session_outside_gives_the_same_bits(tmp_path, count):
    booster = xgboost_booster("reg:squarederror", POSITIVE)
    forest = xgboost_forest(tmp_path, booster)
    x = rows(count, seed=3)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_bytes(forest), options)
    expected = session.run(None, {"input": x})[0]
    assert run(forest, config([1], cpu_nthread="1"), x).tobytes() == expected.tobytes()


def test_the_old_binary_format_is_read(tmp_path):
    # XGBoost no longer writes it, so this file is written here: a tree with one split, and its two leaves.
    learner = struct.pack("<fIIIII", 0.5, 5, 0, 0, 0, 0).ljust(136, b"\0")
    name = lambda text: struct.pack("<Q", len(text)) + text  # noqa: E731
    parameters = struct.pack("<iiiiiqii", 1, 1, 5, 0, 0, 0, 1, 0).ljust(160, b"\0")
    tree = struct.pack("<iiiiii", 1, 3, 0, 1, 5, 0).ljust(148, b"\0")
    inner = struct.pack("<iiiIf", -1, 1, 2, 2 | 1 << 31, 0.25)
    leaves = [struct.pack("<IiiIf", side << 31, -1, -1, 0, value) for side, value in ((1, -1.5), (0, 2.5))]
    stats = b"".join(struct.pack("<fffi", 0, cover, 0, 0) for cover in (4, 3, 1))
    content = learner + name(b"reg:linear") + name(b"gbtree") + parameters + tree + inner + b"".join(leaves) + stats
    (tmp_path / "xgboost.model").write_bytes(content + struct.pack("<i", 0))
    forest = read(tmp_path / "xgboost.model", "xgboost")
    x = np.zeros((3, 5), np.float32)
    x[:, 2] = [0, 1, np.nan]
    assert run(forest, config([1]), x).tolist() == [[-1.0], [3.0], [-1.0]]
