"""Why a server does not start, as it writes it into the container's termination message and the operator reads it."""

import pytest

from halimede.core.types import ModelIndexEntry, ModelReadyState
from halimede.startup import failed_loads, termination_message
from halimede_operator.core.pods.containers import Container, container_failure


@pytest.mark.parametrize("version", ["1", ""])
def test_the_operator_recognizes_a_model_that_failed_to_load(version: str) -> None:
    message = termination_message(
        failed_loads([ModelIndexEntry("bert", version, ModelReadyState.UNAVAILABLE, "no weights")])
    )
    ended = {"exitCode": 1, "message": message, "reason": "Error"}
    status = {"name": "server", "ready": False, "state": {"terminated": ended}, "lastState": {}}
    failure = container_failure(Container({}, "bert-1", status))
    assert failure is not None
    assert failure.reason == "ModelLoadFailed"
    assert "failed to load bert" in failure.message
