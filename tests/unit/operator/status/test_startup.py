"""`status.startup` has what `make startup` reads."""

from cluster.bench_startup import OWN, STAGES, rows_of, seconds_of
from halimede_operator.core.api.spec import Workload
from support.operator_pods import deployment, serving, snapshot
from support.operator_specs import model_key, model_spec
from support.operator_status import status_for


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
