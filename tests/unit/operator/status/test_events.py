"""The events between statuses."""

from halimede_operator.core.decided import EventDraft
from halimede_operator.core.snapshot import Object, Snapshot
from halimede_operator.core.spec.types import Problem, Spec, Workload
from halimede_operator.core.status.events import EventLimit, LastingStates, events_of
from support.operator_pods import (
    deployment,
    ended,
    fetch_failed,
    fetching,
    leaving,
    loading,
    lost_readiness,
    serving,
    snapshot,
    stopped,
)
from support.operator_specs import model_key, model_spec
from support.operator_status import status_for

SPEC = model_spec()


def scenario(*looks: Snapshot | tuple[Snapshot, Spec | None, tuple[Problem, ...]]) -> list[tuple[str, str]]:
    """The events of successive reconciles, each with the status of the one before."""
    status: Object | None = None
    reported: list[tuple[str, str]] = []
    for number, look in enumerate(looks):
        seen, spec, problems = look if isinstance(look, tuple) else (look, SPEC, ())
        if status is not None:
            seen.object["status"] = status
        after = status_for(seen, spec, problems=problems, now=f"2026-11-22T10:00:{number:02}Z")
        reported += [(event.type, event.reason) for event in events_of(status, after)]
        status = after
    return reported


def seen(*pods: Object, replicas: int = 1, **fields: object) -> Snapshot:
    return snapshot(model_key(), *pods, child=deployment(replicas, **fields))


def test_a_model_that_becomes_ready_is_one_event():
    looks = (snapshot(model_key()), seen(), seen(fetching()), seen(loading()), seen(serving()), seen(serving()))

    assert scenario(*looks) == [("Normal", "Serving")]


def test_a_crash_loop_is_one_event():
    crash = ended(1, "failed to load: no weights")
    turn = (
        seen(stopped(crash)),
        seen(stopped({"waiting": {"reason": "CrashLoopBackOff"}}, last=crash)),
        seen(loading(last=crash)),
    )

    assert scenario(seen(loading()), *turn, *turn, *turn, seen(serving())) == [
        ("Warning", "ModelLoadFailed"),
        ("Normal", "Serving"),
    ]


def test_a_failed_rollout_and_its_repair_are_events():
    old = serving("bert-0-a", template="6d8b5f4c77")
    failing = fetch_failed(11, "no key", "bert-1-a")
    looks = (seen(serving()), seen(old, fetching("bert-1-a"), generation=2, progress="ReplicaSetUpdated"),
             seen(old, failing, generation=2, progress="ReplicaSetUpdated"), seen(serving("bert-2-a"), generation=3))  # fmt: skip

    assert scenario(*looks) == [
        ("Normal", "Serving"),
        ("Normal", "Progressing"),
        ("Warning", "ModelFetchFailed"),
        ("Normal", "Serving"),
    ]


def test_a_loss_of_readiness_is_an_event():
    assert scenario(seen(serving()), seen(lost_readiness()), seen(serving())) == [
        ("Normal", "Serving"),
        ("Warning", "ProbeFailed"),
        ("Normal", "Serving"),
    ]


def test_suspending_is_one_event():
    idle = model_spec(workload=Workload(suspend=True))
    looks = (seen(serving()), (seen(leaving(serving()), replicas=0), idle, ()), (seen(replicas=0), idle, ()))

    assert scenario(*looks) == [("Normal", "Serving"), ("Normal", "Suspended")]


def test_a_model_created_with_zero_replicas_is_no_event():
    idle = model_spec(workload=Workload(replicas=0))

    assert scenario((snapshot(model_key()), idle, ()), (seen(replicas=0), idle, ())) == []


def test_an_invalid_spec_is_an_event_with_its_reason():
    bad = (seen(), None, (Problem("spec.model.uri", "must be a URI"),))
    status = status_for(bad[0], None, problems=bad[2])

    draft = EventDraft("Warning", "InvalidSpec", "spec.model.uri: must be a URI", must_last="Ready")
    assert events_of(None, status) == (draft,)
    assert scenario(bad, bad) == [("Warning", "InvalidSpec")]


def test_a_status_without_conditions_is_no_event():
    assert events_of({"conditions": "?"}, {"conditions": [{"type": "Ready", "status": "True"}]}) == ()


def test_there_is_at_most_one_event_per_reason_and_minute():
    """O-66, O-84."""
    limit = EventLimit()
    up, down = EventDraft("Normal", "Serving", ""), EventDraft("Warning", "ProbeFailed", "")
    flaps = [limit.try_send(model_key(), draft, now_s) for now_s, draft in enumerate([up, down] * 60)]

    assert [number for number, sent in enumerate(flaps) if sent] == [0, 1, 60, 61]
    assert limit.try_send(model_key("other"), up, 119.5)
    assert not limit.try_send(model_key(), up, 119.9)
    assert limit.try_send(model_key(), up, 120.0)


def test_the_event_limit_forgets_old_events():
    limit = EventLimit()
    for number in range(1000):
        limit.try_send(model_key(f"m{number}"), EventDraft("Normal", "Serving", ""), float(number))

    assert len(limit) == 60


def test_a_replica_failing_beside_others_and_recovering_is_two_events():
    both = (serving("bert-1-a"), serving("bert-1-b"))
    two = model_spec(workload=Workload(replicas=2))
    failing = (serving("bert-1-a"), lost_readiness("bert-1-b"))
    looks = [(seen(*pods, replicas=2), two, ()) for pods in (both, failing, failing, both, both)]

    assert scenario(*looks) == [("Normal", "Serving"), ("Warning", "ProbeFailed"), ("Normal", "Serving")]


def state(reason: str, text: str = "") -> Object:
    return {"conditions": [{"type": "Ready", "status": "False", "reason": reason, "message": text}]}


FAILS = EventDraft("Warning", "ProbeFailed", "at first", must_last="Ready")


def test_a_failure_is_an_event_with_its_last_text_after_ten_seconds():
    states, key = LastingStates(), model_key()

    assert states.due(key, (FAILS,), state("ProbeFailed", "at first"), 100.0) == ((), 10.0)
    assert states.due(key, (), state("ProbeFailed", "later"), 109.0) == ((), 1.0)
    assert states.due(model_key("other"), (), state("ProbeFailed"), 110.0) == ((), None)
    (event,), again_s = states.due(key, (), state("ProbeFailed", "later"), 110.0)
    assert (event.type, event.reason, event.message, again_s) == ("Warning", "ProbeFailed", "later", None)
    assert states.due(key, (), state("ProbeFailed", "later"), 200.0) == ((), None)


def test_a_failure_that_is_over_within_ten_seconds_is_no_event():
    states, key, up = LastingStates(), model_key(), EventDraft("Normal", "Serving", "")
    states.due(key, (FAILS,), state("ProbeFailed"), 100.0)

    assert states.due(key, (up,), state("Serving"), 105.0) == ((up,), None)
    assert states.due(key, (), state("ProbeFailed"), 120.0) == ((), None)


def test_a_failure_of_a_deleted_object_is_forgotten():
    states = LastingStates()
    states.due(model_key(), (FAILS,), state("ProbeFailed"), 100.0)
    states.forget(model_key())

    assert states.due(model_key(), (), state("ProbeFailed"), 120.0) == ((), None)
