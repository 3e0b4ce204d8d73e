"""Estimators in the backend `sklearn`; conformance/test_trees.py has them in their processes."""

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest

from halimede.backends.cores import available_cores
from halimede.backends.trees.sklearn_backend import SklearnBackend, SklearnInstance
from halimede.backends.trees.sklearn_options import METHODS, estimator_input, limited_jobs, output_methods
from halimede.core.config.model_config import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelOutput,
    ModelParameter,
    ModelTensorReshape,
)
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.canaries import pickled
from support.lazily import Lazily
from support.refusals import error_of
from support.tree_models import CPU, context, rows, source, targets

ensemble = Lazily("sklearn.ensemble")
joblib = Lazily("joblib")
linear_model = Lazily("sklearn.linear_model")
pipeline = Lazily("sklearn.pipeline")
preprocessing = Lazily("sklearn.preprocessing")
texts_to_features = Lazily("sklearn.feature_extraction.text")
xgboost = Lazily("xgboost")

FP32, FP64, INT64, BYTES = DataType.FP32, DataType.FP64, DataType.INT64, DataType.BYTES
BACKEND = SklearnBackend()
X = np.nan_to_num(rows(120, seed=1)).astype(np.float64)
Y = targets(X, 3)


def settings(inputs, outputs, max_batch_size=64, **parameters):
    return ModelConfig(
        max_batch_size=max_batch_size,
        input=tuple(ModelInput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in inputs.items()),
        output=tuple(ModelOutput(name, datatype, dims=tuple(dims)) for name, (datatype, *dims) in outputs.items()),
        parameters={key: ModelParameter(value) for key, value in parameters.items()},
    )


def saved(tmp_path, estimator, name="model.joblib"):
    (tmp_path / "1").mkdir(exist_ok=True)
    joblib.dump(estimator, tmp_path / "1" / name)
    return source(tmp_path / "1", name)


def run(config, where, inputs):
    instance = BACKEND.load(config, where).create_instance(CPU)
    count = len(next(iter(inputs.values())))
    return instance.run(inputs, [each.name for each in config.output], context(count))


def refused(config, where, inputs):
    return refused_by(run, config, where, inputs)


def refused_by(call, *arguments):
    return error_of(call, *arguments)


def test_a_classifier_answers_with_labels_and_probabilities(tmp_path):
    estimator = pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()).fit(X, Y)
    config = settings(
        {"x": (FP64, 5)}, {"label": (INT64, 1), "probabilities": (FP32, 3), "decision_function": (FP64, 3)}
    )
    found = run(config, saved(tmp_path, estimator), {"x": X})
    assert found["label"].tolist() == estimator.predict(X)[:, None].tolist()
    assert found["probabilities"].tolist() == estimator.predict_proba(X).astype(np.float32).tolist()
    assert found["decision_function"].tobytes() == estimator.decision_function(X).tobytes()


def test_parameters_choose_the_methods_of_outputs():
    config = settings({"x": (FP64, 5)}, {"a": (FP64, 3), "probabilities": (FP64, 1)}, method_of_a="predict_proba")
    assert output_methods(config, "m") == {"a": "predict_proba", "probabilities": "predict_proba"}
    wrong = settings({"x": (FP64, 5)}, {"a": (FP64, 3)}, method_of_b="predict", method_of_a="fit")
    error = error_of(output_methods, wrong, "m")
    assert "there is no output 'b'" in error.message
    assert f"'method_of_a' is 'fit'; it must be one of {', '.join(METHODS)}" in error.message


def test_several_inputs_are_the_columns_of_one_array():
    config = settings({"b": (FP64, 2), "a": (FP32, 1), "s": (BYTES, 1)}, {"y": (FP64, 1)})
    b, a = np.array([[1.0, 2], [3, 4]]), np.array([[5], [6]], np.float32)
    s = np.array([["ü".encode()], [b"x"]], object)
    numbers = estimator_input({"a": a, "b": b}, config)
    assert (numbers.dtype, numbers.tolist()) == (np.float64, [[1, 2, 5], [3, 4, 6]])
    mixed = estimator_input({"a": a, "b": b, "s": s}, config)
    assert mixed.tolist() == [[1, 2, 5, "ü"], [3, 4, 6, "x"]]
    with pytest.raises(InferenceError, match="input 's': an element is not UTF-8 text"):
        estimator_input({"s": np.array([[b"\xff"]], object)}, config)


def test_strings_go_in_and_come_out(tmp_path):
    texts, labels = ["good day", "bad day", "good night", "bad night"], np.array(["yes", "nö", "yes", "nö"])
    estimator = pipeline.make_pipeline(texts_to_features.TfidfVectorizer(), linear_model.LogisticRegression()).fit(
        texts, labels
    )
    config = settings({"x": (BYTES, 1)}, {"y": (BYTES, 1)})
    config = replace(config, input=(replace(config.input[0], reshape=ModelTensorReshape()),))
    x = np.array([each.encode() for each in texts], object)
    assert run(config, saved(tmp_path, estimator), {"x": x})["y"].tolist() == [["yes"], ["nö"], ["yes"], ["nö"]]


def test_sparse_results_become_tensors(tmp_path):
    estimator = preprocessing.OneHotEncoder().fit(np.array([[0.0], [1], [2]]))
    found = run(
        settings({"x": (FP64, 1)}, {"transform": (FP32, 3)}), saved(tmp_path, estimator), {"x": np.ones((2, 1))}
    )
    assert found["transform"].tolist() == [[0, 1, 0], [0, 1, 0]]


def test_outputs_without_batches_have_all_dims(tmp_path):
    estimator = linear_model.LinearRegression().fit(X, X[:, :2])
    config = settings({"x": (FP64, -1, 5)}, {"y": (FP64, -1, 2)}, max_batch_size=0)
    assert run(config, saved(tmp_path, estimator), {"x": X[:7]})["y"].tobytes() == estimator.predict(X[:7]).tobytes()


@pytest.mark.parametrize("name", ["model.pkl", "model.joblib", "other.bin"])
def test_pickles_of_any_name_are_read(tmp_path, name):
    estimator = linear_model.LinearRegression().fit(X, Y)
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / name).write_bytes(pickle.dumps(estimator))
    where = source(tmp_path / "1", "other.bin" if name == "other.bin" else "model.joblib")
    assert run(settings({"x": (FP64, 5)}, {"y": (FP64, 1)}), where, {"x": X})["y"].shape == (120, 1)


def test_autocomplete_describes_classifiers_and_regressors(tmp_path):
    classifier = saved(tmp_path, linear_model.LogisticRegression().fit(X, np.array(["a", "b", "c"])[Y]))
    assert BACKEND.autocomplete(ModelConfig(), classifier) == ModelConfig(
        name="m",
        max_batch_size=4,
        input=(ModelInput("input", FP64, dims=(5,)),),
        output=(ModelOutput("label", BYTES, dims=(1,)), ModelOutput("probabilities", FP64, dims=(3,))),
        dynamic_batching=ModelDynamicBatching(),
    )
    regressor = BACKEND.autocomplete(ModelConfig(), saved(tmp_path, linear_model.LinearRegression().fit(X, X[:, 0])))
    assert regressor.output == (ModelOutput("prediction", FP64, dims=(1,)),)
    with pytest.raises(InferenceError, match="OneHotEncoder cannot be completed from the file"):
        BACKEND.autocomplete(ModelConfig(), saved(tmp_path, preprocessing.OneHotEncoder().fit(X[:3])))


def test_errors_at_load_name_the_cause(tmp_path):
    config = settings({"x": (FP64, 4)}, {"y": (FP64, 1), "probabilities": (FP64, 2)})
    where = saved(tmp_path, linear_model.LinearRegression().fit(X, Y))
    error = refused(config, where, {"x": X})
    assert error.code is ErrorCode.INVALID_ARG
    assert "output 'probabilities' needs the method predict_proba, which the LinearRegression" in error.message
    assert "the inputs have 4 columns, the estimator was trained with 5" in error.message
    where.artifact.write_bytes(b"no pickle")
    assert "model.joblib cannot be read as a pickle: " in refused(config, where, {"x": X}).message
    where.artifact.write_bytes(b"cno_such_package\nThing\n.")
    assert (
        "needs a package that is not installed: No module named 'no_such_package'" in refused(config, where, {}).message
    )
    where.artifact.unlink()
    assert refused(config, where, {}).code is ErrorCode.UNAVAILABLE


def test_nothing_is_unpickled_without_allow_pickle(tmp_path):
    (tmp_path / "1").mkdir()
    where = source(tmp_path / "1", "model.joblib")
    where.artifact.write_bytes(pickled(tmp_path / "marker"))
    without = replace(where, allow_pickle=False)
    config = settings({"x": (FP64, 4)}, {"y": (FP64, 1)})
    errors = [
        refused(config, without, {}),
        *(refused_by(call, config, without) for call in (BACKEND.check, BACKEND.load)),
        refused_by(BACKEND.autocomplete, ModelConfig(), without),
    ]
    assert {(error.code, error.message.partition(", and")[0]) for error in errors} == {
        (ErrorCode.UNSUPPORTED, "model 'm': 'model.joblib' is read as a pickle")
    }
    assert not (tmp_path / "marker").exists()
    # The canary is one.
    refused(config, where, {})
    assert (tmp_path / "marker").exists()


def test_answers_that_do_not_fit_the_configuration_are_errors(tmp_path):
    where = saved(tmp_path, linear_model.LogisticRegression().fit(X, Y))
    for outputs, text in (
        ({"probabilities": (FP64, 2)}, "output 'probabilities': the estimator answers with shape [120, 3]"),
        (
            {"probabilities": (INT64, 3)},
            "output 'probabilities': the estimator answers with float64, which is not TYPE_INT64",
        ),
    ):
        error = refused(settings({"x": (FP64, 5)}, outputs), where, {"x": X})
        assert (error.code, text in error.message) == (ErrorCode.INTERNAL, True)
    several = ensemble.RandomForestClassifier(2).fit(X, np.stack([Y, Y], axis=1))
    error = refused(settings({"x": (FP64, 5)}, {"probabilities": (FP64, 6)}), saved(tmp_path, several), {"x": X})
    assert "2 arrays, one per target" in error.message


def jobs_after_load(tmp_path, estimator, **parameters):
    config = settings({"x": (FP64, 5)}, {"y": (INT64, 1)}, **parameters)
    instance = BACKEND.load(config, saved(tmp_path, estimator)).create_instance(CPU)
    found = instance._estimator.get_params()
    return [value for name, value in found.items() if name.endswith("n_jobs")]


@pytest.mark.parametrize("n_jobs", [None, 1, 2, -1])
def test_a_configured_number_of_threads_is_every_n_jobs(tmp_path, n_jobs):
    estimator = pipeline.make_pipeline(
        preprocessing.StandardScaler(), ensemble.RandomForestClassifier(2, n_jobs=n_jobs)
    ).fit(X, Y)
    assert jobs_after_load(tmp_path, estimator, INTRA_OP_THREAD_COUNT="3") == [3]


def test_an_estimator_of_one_job_keeps_it(tmp_path):
    assert jobs_after_load(tmp_path, ensemble.RandomForestClassifier(2).fit(X, Y)) == [None]


def test_all_cores_of_the_machine_are_the_share_of_the_instance(tmp_path):
    estimator = pipeline.make_pipeline(
        preprocessing.StandardScaler(), ensemble.RandomForestClassifier(2, n_jobs=-1)
    ).fit(X, Y)
    assert jobs_after_load(tmp_path, estimator) == [available_cores()]


def test_boosted_trees_without_a_number_get_the_share_of_the_instance(tmp_path):
    assert jobs_after_load(tmp_path, xgboost.XGBClassifier(n_estimators=2).fit(X, Y)) == [available_cores()]


@pytest.mark.parametrize(
    ("n_jobs", "none_is_one", "expected"),
    [(None, True, None), (None, False, 4), (-1, True, 4), (-3, True, 4), (9, True, 4), (2, True, 2)],
)
def test_n_jobs_is_at_most_the_share(n_jobs, none_is_one, expected):
    assert limited_jobs(n_jobs, 4, none_is_one=none_is_one) == expected


def test_column_names_of_the_training_are_no_warning(tmp_path):
    named, plain = linear_model.LogisticRegression().fit(X, Y), preprocessing.StandardScaler().fit(X)
    # What fit() notes of a data frame.
    named.feature_names_in_ = np.array(["a", "b", "c", "d", "e"], dtype=object)
    config = settings({"x": (FP64, 5)}, {"y": (INT64, 1)})
    with pytest.warns(UserWarning, match="X does not have valid feature names"):
        expected = named.predict(X)
    for estimator in (named, pipeline.Pipeline([("scale", plain), ("classify", named)])):
        # Every warning is an error in these tests.
        assert run(config, saved(tmp_path, estimator), {"x": X})["y"].shape == (len(X), 1)
    assert run(config, saved(tmp_path, named), {"x": X})["y"].ravel().tolist() == expected.tolist()


class Filters:
    """Answers with the number of filters of warnings that it finds, each of which costs a forest time for each tree."""

    def predict(self, rows):
        return np.full((len(rows), 1), len(warnings.filters))


def test_an_estimator_finds_no_further_filters_of_warnings():
    config = settings({"x": (FP64, 5)}, {"y": (INT64, 1)})
    instance = SklearnInstance(Filters(), config, {"y": "predict"})
    assert instance.run({"x": X[:1]}, ["y"], context(1))["y"].item() == len(warnings.filters)
