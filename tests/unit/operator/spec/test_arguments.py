"""`spec.serving.args`: which flags a spec may give the server, and what is said about all others."""

import pytest

from halimede_operator.core.platform import Platform
from halimede_operator.core.spec.parse import parse
from halimede_operator.core.spec.types import Kind, ModelSpec
from support.custom_resources import model

PLATFORM = Platform(server_image="server", gpu_server_image="gpu-server")


def problem_of(argument: str) -> str:
    _, problems = parse(Kind.INFERENCE_MODEL, model(serving={"args": [argument]}), PLATFORM)
    assert {problem.path for problem in problems} <= {"spec.serving.args[0]"}
    return "".join(problem.message for problem in problems)


def test_flags_are_kept_in_their_order() -> None:
    given = ["--watch", "--backend-config=onnxruntime,a=b", "--id=a=b", "--log-verbose", "--backend-config=c=d"]
    spec, problems = parse(Kind.INFERENCE_MODEL, model(serving={"args": given}), PLATFORM)
    assert problems == ()
    assert isinstance(spec, ModelSpec)
    assert spec.workload.serving.arguments == tuple(given)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--log-verbos=1", "'--log-verbos' is not a flag of the server; did you mean --log-verbose?"),
        ("--colour=red", "'--colour' is not a flag of the server"),
        ("--log-verbose 1", "'--log-verbose 1' is not a flag of the server; did you mean --log-verbose?"),
        ("/models/bert.onnx", "'/models/bert.onnx' is not a flag of the server"),
        ("--log-info=maybe", "--log-info: Invalid option value. Got maybe; expected true, on, 1, false, off, 0"),
        ("--frontend-processes=65", "--frontend-processes: Provided option value is out of bound. Got 65; expected 0"),
        ("--id", "--id needs a value, as --id=TEXT"),
        ("--log-access=some", "--log-access: Invalid option value. Got some; expected off, failures, all"),
    ],
)
def test_a_wrong_flag_is_refused_before_the_rollout(argument: str, message: str) -> None:
    assert problem_of(argument).startswith(f"must be a flag of the server as --name=value: {message}")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--http-port=9000", "must not have --http-port: use spec.serving.ports.http"),
        ("--drain-delay=0", "must not have --drain-delay: the pod's grace period depends on it"),
        ("--version", "must not have --version: the server would not start"),
        (
            "--http-restricted-api=statistics,health:key=value",
            "must not restrict health: probes and the operator send no header",
        ),
    ],
)
def test_flags_that_the_operator_needs_are_refused(argument: str, message: str) -> None:
    assert problem_of(argument) == message


def test_a_secret_is_not_repeated() -> None:
    assert "hidden" not in problem_of("--http-restricted-apis=inference:key=hidden")
