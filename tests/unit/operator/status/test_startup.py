"""`status.startup` has what `make startup` reads, and what the operator reads back."""

import pytest

from cluster.bench_startup import OWN, STAGES, rows_of, seconds_of
from halimede_operator.core.pods.start import Start, read_start
from halimede_operator.core.spec.types import Workload
from support.operator_pods import deployment, second, serving, snapshot
from support.operator_rollouts import SPEC, served_world
from support.operator_specs import model_key, model_spec
from support.operator_status import status_for


@pytest.mark.parametrize("stages", [{}, {"ready": 0}, {"scheduled": 0, "fetched": 4, "ready": 86_400}])
def test_a_start_is_read_as_it_was_written(stages: dict[str, int]):
    start = Start("bert-1-a", second(0), stages)
    assert read_start({"startup": start.as_text()}) == start


def test_malformed_starts_are_left_out():
    text = Start("bert-1-a", second(0), {"ready": 4}).as_text()
    for startup in (None, 7, {"pod": "bert-1-a"}, "", text.replace("T", " "), text.replace("-22", "-99"), f"{text}, x"):
        assert read_start({"startup": startup}) is None


def test_a_node_whose_clock_is_behind_has_no_negative_times():
    pod = serving(created=20, since=12)
    startup = status_for(snapshot(model_key(), pod, child=deployment(1)))["startup"]
    start = read_start({"startup": startup})
    assert start is not None
    assert (min(start.stages.values()), start.stages["ready"]) == (0, 0)


def test_an_update_expects_the_first_start_of_a_pod_that_was_unready_later():
    world = served_world({**SPEC, "rollout": {"policy": "Recreate"}})
    old = world.revision
    world.have(serving(f"bert-{old}-a", template=old, since=4000))
    world.edit(env=[{"name": "A", "value": "B"}])
    strategy = world.decide().strategy
    assert strategy is not None
    assert "nothing serves for about 15 s, by the last start" in strategy.reason


def test_stages_of_a_status_add_up_to_the_start():
    found = snapshot(model_key(), serving(since=12), child=deployment(1))
    startup = status_for(found, model_spec(workload=Workload(replicas=1)))["startup"]
    seconds = seconds_of(startup)
    assert seconds.keys() == {*STAGES, "own", "created-to-ready"}
    assert sum(seconds[stage] for stage in STAGES) == seconds["created-to-ready"] == 12
    assert seconds["own"] == sum(seconds[stage] for stage in OWN) > 0
    assert seconds["started"] >= 0


def test_rows_are_medians_with_the_goals_of_the_whole_and_of_our_part():
    starts = [{"own": own, "first-answer": answer} for own, answer in ((2, 9.5), (4, 7), (1, 8.5))]
    rows = {row.name: (row.value, row.goal) for row in rows_of(starts, "quiet")}
    assert rows == {"startup-own": (2, 3), "startup-first-answer": (8.5, 8)}
