import pytest

from halimede.backends.trees.options import TreeOptions, read_options
from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of


def read(**parameters):
    return read_options(ModelConfig(parameters={key: ModelParameter(value) for key, value in parameters.items()}), "m")


def test_all_parameters_of_triton_are_read():
    options = read(
        model_type="lightgbm",
        output_class="true",
        predict_proba="false",
        threshold="0.3",
        xgboost_allow_unknown_field="true",
        cpu_nthread="2",
        storage_type="AUTO",
        algo="ALGO_AUTO",
        blocks_per_sm="0",
        threads_per_tree="1",
        transfer_threshold="0",
        use_experimental_optimizations="true",
        chunk_size="32",
        layout="depth_first",
    )
    assert options == TreeOptions(
        model_type="lightgbm",
        is_classifier=True,
        threshold=0.3,
        allow_unknown_field=True,
        threads=2,
        ignored=(
            "storage_type",
            "algo",
            "layout",
            "use_experimental_optimizations",
            "chunk_size",
            "blocks_per_sm",
            "threads_per_tree",
            "transfer_threshold",
        ),
    )
    assert read() == TreeOptions()


@pytest.mark.parametrize(
    ("parameters", "gives_class"),
    [
        ({}, False),
        ({"is_classifier": "true"}, True),
        ({"output_class": "true"}, True),
        ({"output_class": "true", "predict_proba": "true"}, False),
        ({"is_classifier": "false", "predict_proba": "true"}, False),
    ],
    ids=str,
)
def test_a_classifier_without_predict_proba_gives_the_class(parameters, gives_class):
    assert read(**parameters).gives_class is gives_class


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "catboost"),
        ("is_classifier", "yes"),
        ("predict_proba", "2"),
        ("threshold", "half"),
        ("threshold", "nan"),
        ("threshold", "inf"),
        ("cpu_nthread", "1025"),
        ("cpu_nthread", "²"),
        ("storage_type", "DENSER"),
        ("layout", "deep"),
        ("chunk_size", "many"),
    ],
)
def test_an_invalid_parameter_is_named(key, value):
    error = error_of(read, **{key: value})
    assert error.code is ErrorCode.INVALID_ARG
    assert f"parameter '{key}' is '{value}'; it must be" in error.message


def test_every_invalid_parameter_is_named():
    with pytest.raises(InferenceError, match=r"'model_type'.*'algo'"):
        read(model_type="?", algo="?")
    with pytest.raises(InferenceError, match="two names of one setting"):
        read(is_classifier="true", output_class="false")
