"""Any sequence of edits, failures, upgrades and hand edits comes to rest, with the revision of the spec or a rollback."""

from collections.abc import Callable
from dataclasses import replace

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from halimede_operator.core.labels import INPUTS
from halimede_operator.core.revisions.history import Outcome, read_history
from halimede_operator.core.revisions.inputs import inputs_of
from halimede_operator.core.revisions.rollback import rolled_back_in
from support.examples import examples
from support.operator_rollouts import LATE, PLATFORM, World, load_failed

POLICIES = ("Manual", "OnSpecChange", "Auto")
Step = Callable[[World], None]


def edit(number: int) -> Step:
    return lambda world: world.edit(model={"uri": f"s3://models/{number}"})


def scale(replicas: int) -> Step:
    return lambda world: world.edit(replicas=replicas)


def roll(policy: str, rolls_back: bool) -> Step:
    return lambda world: world.edit(rollout={"upgradePolicy": policy, "autoRollback": rolls_back})


def upgrade(number: int) -> Step:
    def change(world: World) -> None:
        world.platform = replace(PLATFORM, server_image=f"server:{number}")

    return change


def undo(number: int) -> Step:
    return lambda world: world.undo(sorted(world.replica_sets)[number % len(world.replica_sets)])


def serve(world: World) -> None:
    world.serve(world.revision)


def fail(world: World) -> None:
    """The deadline passes. What served before still does."""
    old = [each for each in world.pods if each["metadata"]["labels"]["pod-template-hash"] != world.revision]
    kept = [each for each in old if each["status"].get("containerStatuses", [{}])[0].get("ready")]
    world.have(*kept, load_failed(world.revision))
    world.progress = LATE
    world._control()


def lose_status(world: World) -> None:
    world.object["status"] = None


STEPS = st.one_of(
    st.integers(1, 3).map(edit),
    st.integers(0, 2).map(scale),
    st.builds(roll, st.sampled_from(POLICIES), st.booleans()),
    st.integers(1, 3).map(upgrade),
    st.integers(0, 5).map(undo),
    st.just(serve),
    st.just(fail),
    st.just(lose_status),
)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=3, max_size=14))
def test_any_sequence_comes_to_rest(steps: list[Step]) -> None:
    world = World()
    world.reconcile()
    for step in steps:
        step(world)
        world.reconcile()

        wanted = inputs_of(world.object, {})
        record = rolled_back_in(world.deployment)
        if record is None:
            assert world.annotation(INPUTS) == wanted
        else:
            assert (record.inputs, record.former) == (wanted, world.revision)
            assert world.condition("Stalled") == "True RolledBack"
        listed = read_history(world.status)
        assert world.revision in {each.revision for each in listed}
        serving_ones = [each.revision for each in listed if each.outcome is Outcome.SERVING]
        assert serving_ones in ([], [world.revision])


@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.integers(1, 3).map(upgrade), st.integers(1, 2).map(scale)), min_size=1, max_size=6))
def test_no_upgrade_and_no_scaling_replaces_a_ready_pod(steps: list[Step]) -> None:
    world = World()
    world.reconcile()
    serve(world)
    world.reconcile()
    before = world.revision
    for step in steps:
        step(world)
        world.reconcile()
        assert world.revision == before
