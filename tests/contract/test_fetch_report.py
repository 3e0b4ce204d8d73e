"""The end of a fetch, as the server writes it into the container's termination message and the operator reads it."""

import pytest

from halimede.fetch.report import FetchedModel, success_text
from halimede_operator.core.pods.fields import FETCH
from halimede_operator.core.pods.read import read_pod
from halimede_operator.core.pods.view import PodView
from halimede_spec.fetch_exit import FetchExit

NOW = "2026-11-23T10:00:00Z"
ENDED = "2026-11-23T09:59:00Z"
DIGEST = "sha256:" + "0a" * 32


def view_of(exit_code: int, message: str) -> PodView:
    """A pod whose fetch container ended like this."""
    ended = {"exitCode": exit_code, "message": message, "startedAt": ENDED, "finishedAt": ENDED, "reason": "Error"}
    status = {"name": FETCH, "ready": False, "restartCount": 0, "state": {"terminated": ended}, "lastState": {}}
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": ENDED}
    return read_pod(
        {
            "metadata": {"name": "m-1", "uid": "u", "creationTimestamp": ENDED},
            "spec": {"nodeName": "n", "initContainers": [{"name": FETCH}], "containers": [{"name": "server"}]},
            "status": {"phase": "Pending", "conditions": [scheduled], "initContainerStatuses": [status]},
        },
        None,
        "m",
        NOW,
    )


def test_the_operator_reads_every_field_of_the_report_that_it_shows() -> None:
    written = [
        FetchedModel("a", DIGEST, 12, 3, ENDED, cached=False),
        FetchedModel("mounted", None, 0, 1, ENDED, cached=True),
    ]
    read = view_of(FetchExit.DONE, success_text(written)).fetched
    assert [(each.name, each.digest, each.size_bytes, each.fetched_at) for each in read] == [
        (each.name, each.digest, each.size_bytes, each.fetched_at) for each in written
    ]


@pytest.mark.parametrize("code", sorted(set(FetchExit) - {FetchExit.DONE, FetchExit.BAD_PLAN, FetchExit.RECOVERED}))
def test_the_operator_has_words_for_every_exit_code(code: FetchExit) -> None:
    failure = view_of(code, "the cause").failure
    assert failure is not None
    assert "exited with code" not in failure.message
    assert "the cause" in failure.message


def test_a_recovery_is_no_failure() -> None:
    assert view_of(FetchExit.RECOVERED, "").failure is None
