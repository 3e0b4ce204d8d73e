from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.config.unknown_options import unknown_parameters, unknown_settings
from halimede.core.types import Problem

KNOWN = ("intra_op_thread_count", "execution_mode", "method_of_*")


def notes(*names: str) -> tuple[Problem, ...]:
    config = ModelConfig(name="m", backend="net", parameters={name: ModelParameter("1") for name in names})
    return unknown_parameters(config, KNOWN)


def test_parameters_of_the_server_and_the_backend_are_known():
    assert notes("intra_op_thread_count", "execution_mode", "method_of_label", "ISOLATION", "PADDING", "SPIN") == ()


def test_a_batching_strategy_may_have_parameters_of_its_own():
    assert notes("BATCHING_STRATEGY", "tenants") == ()


def test_another_parameter_is_named_with_the_nearest_known_one():
    assert notes("intra_op_num_threads", "isolation", "x") == (
        Problem(
            "parameter 'intra_op_num_threads' has no effect: backend 'net' has no such parameter; did you mean "
            "'intra_op_thread_count'?",
            'parameters["intra_op_num_threads"]',
        ),
        Problem(
            "parameter 'isolation' has no effect: backend 'net' has no such parameter; did you mean 'ISOLATION'?",
            'parameters["isolation"]',
        ),
        Problem("parameter 'x' has no effect: backend 'net' has no such parameter", 'parameters["x"]'),
    )


def test_settings_of_one_backend_and_of_all_are_named_as_they_were_given():
    given = {"default_max_batch_size": "4", "execution_mode": "1"}
    assert [*unknown_settings("net", given, ("default-max-batch-size", *KNOWN))] == [
        "--backend-config=net,default_max_batch_size has no effect: backend 'net' has no such setting; did you mean "
        "'default-max-batch-size'?"
    ]
    assert [*unknown_settings("", ("cache",), KNOWN)] == [
        "--backend-config=cache has no effect: the backends have no such setting"
    ]
