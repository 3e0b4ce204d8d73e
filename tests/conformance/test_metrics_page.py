"""The metrics page of a running server: agreement with the reference, and metrics of workers and versions."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.background import in_background
from support.calls import index, load, metric, unload
from support.models import write_config
from support.served import ECHO, Stage, add_python, infer, workers
from support.server import RunningServer, serving, wait_until

REFERENCE = (Path(__file__).parents[2] / "docs" / "pages" / "metrics.md").read_text()

ENSEMBLE = """
    name: "pipeline"
    platform: "ensemble"
    max_batch_size: 8
    input [ { name: "IN" data_type: TYPE_FP32 dims: [ -1 ] } ]
    output [ { name: "OUT" data_type: TYPE_FP32 dims: [ -1 ] } ]
    ensemble_scheduling { step [
      { model_name: "plain" model_version: -1 input_map { key: "IN" value: "IN" } output_map { key: "OUT" value: "OUT" } }
    ] }
"""
STATE = "halimede_model_version_state"


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server with a model of each kind, and one that does not load."""
    directory = tmp_path_factory.mktemp("page")
    repository = directory / "models"
    repository.mkdir()
    add_python(repository, "plain")
    add_python(repository, "session", extra="sequence_batching { direct { } }")
    add_python(repository, "stream", decoupled=True, extra='metric_tags { key: "team" value: "a" }')
    (repository / "pipeline" / "1").mkdir(parents=True)
    write_config(repository / "pipeline", ENSEMBLE)
    (repository / "broken" / "1").mkdir(parents=True)
    write_config(repository / "broken", 'name: "broken" backend: "python" max_batch_size: many')
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--exit-on-error=false"]
    names = ("plain", "session", "stream", "pipeline", "broken")
    with serving(directory, [*arguments, *(f"--load-model={name}" for name in names)], ready=False) as running:
        wait_until(lambda: all(states(running, name) for name in names), "every model", running)
        wait_until(lambda: "LOADING" not in [states(running, name).get("1") for name in names], "the loads", running)
        yield Stage(running, repository)


def states(server: RunningServer, model: str) -> dict[str, str]:
    """The state of each version of a model: its series is 1, and those of all other states are 0."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(server.metrics()):
        for sample in family.samples:
            if family.name == STATE and sample.labels["model"] == model:
                found.setdefault(sample.labels["version"], {})[sample.labels["state"]] = sample.value
    for values in found.values():
        assert sorted(values.items()) == sorted(
            (state, float(values[state] == 1)) for state in ("READY", "LOADING", "UNLOADING", "UNAVAILABLE")
        )
        assert sum(values.values()) == 1
    return {version: next(state for state in values if values[state]) for version, values in found.items()}


def documented() -> dict[str, tuple[str, set[str]]]:
    """Type and labels of each family on the reference page."""
    families: dict[str, tuple[str, set[str]]] = {}
    for section in REFERENCE.split("\n## "):
        labels = set(re.findall(r"`(\w+)`", "".join(re.findall(r"Labels: (.*?)\.\n", section))))
        for name, kind in re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|", section, re.MULTILINE):
            families[name] = kind, labels
    return families


def test_the_reference_and_the_page_have_the_same_metric_families(stage: Stage) -> None:
    # It is available from the second measurement on.
    wait_until(lambda: "\nnv_cpu_utilization " in stage.server.metrics(), "the load of the machine", stage.server)
    page = stage.server.metrics()
    published = dict(re.findall(r"^# TYPE (\w+) (\w+)$", page, re.MULTILINE))
    reference = documented()
    assert published == {name: kind for name, (kind, _) in reference.items()}

    # Every label of a series is in the reference, except `le` and the tags of a configuration.
    seen = set()
    for family in text_string_to_metric_families(page):
        name = family.name if family.name in reference else f"{family.name}_total"
        for sample in family.samples:
            seen.add(name)
            assert sample.labels.keys() - {"le", "_team"} == reference[name][1], sample
            assert ("_team" in sample.labels) == (sample.labels.get("model") == "stream" and name != STATE), sample
    assert {name for name in reference if name not in seen and not name.startswith(("nv_gpu", "nv_energy"))} == set()


def test_states_of_ready_versions_and_of_one_that_did_not_load(stage: Stage) -> None:
    assert [states(stage.server, name) for name in ("plain", "stream", "pipeline")] == [{"1": "READY"}] * 3
    # Its configuration could not be read, so that its versions are unknown.
    assert states(stage.server, "broken") == {"": "UNAVAILABLE"}


def test_the_state_of_a_version_from_its_load_to_its_unload(stage: Stage, tmp_path: Path) -> None:
    server = stage.server
    up, done = tmp_path / "up", tmp_path / "done"
    wait = "while not os.path.exists({!r}): time.sleep(0.005)"
    stage.add(
        "slow",
        f"{wait.format(str(done))}\n{ECHO}",
        methods=f"def initialize(self, args):\n    {wait.format(str(up))}",
    )
    loading = in_background(lambda: load(server, "slow"))
    wait_until(lambda: states(server, "slow") == {"1": "LOADING"}, "the load", server)
    up.touch()
    assert loading.result(60) == (200, "")
    assert states(server, "slow") == {"1": "READY"}
    asked = in_background(lambda: infer(server, "slow", 2))
    wait_until(lambda: metric(server, "halimede_executing_requests", "slow") == 1, "the request", server)
    assert unload(server, "slow") == 200
    assert states(server, "slow") == {"1": "UNLOADING"}
    done.touch()
    assert asked.result(60) == (200, [2])
    wait_until(lambda: index(server)["slow", "1"] == ("UNAVAILABLE", "unloaded"), "the unload", server)
    assert states(server, "slow") == {}


def test_a_version_whose_load_failed_is_unavailable_until_a_load_succeeds(stage: Stage) -> None:
    server = stage.server
    stage.add("fails", methods="def initialize(self, args): raise ValueError")
    assert load(server, "fails")[0] == 400
    assert states(server, "fails") == {"1": "UNAVAILABLE"}
    stage.deploy("fails")
    assert states(server, "fails") == {"1": "READY"}


def test_names_outside_the_repository_create_no_series(stage: Stage) -> None:
    assert load(stage.server, "nowhere")[0] != 200
    assert "nowhere" not in stage.server.metrics()


def test_restarts_of_workers_are_counted(stage: Stage) -> None:
    server = stage.server
    stage.deploy("killed", count=2)
    assert metric(server, "halimede_worker_restarts_total", "killed") == 0
    for restarts in (1, 2):
        before = workers(server, "killed")
        before[0].kill()
        wait_until(
            lambda n=restarts: metric(server, "halimede_worker_restarts_total", "killed") == n, "the restart", server
        )
        assert len(workers(server, "killed")) == 2
        assert before[0] not in workers(server, "killed")
    assert states(server, "killed") == {"1": "READY"}
    assert metric(server, "halimede_parked_instances", "killed") == 0


def test_parked_instances_are_counted_until_the_model_is_loaded(stage: Stage) -> None:
    server = stage.server
    stage.deploy("dies", f"if value(requests[0]) < 0: os._exit(3)\n{ECHO}")
    for death in range(5):
        assert metric(server, "halimede_worker_restarts_total", "dies") == death
        assert metric(server, "halimede_parked_instances", "dies") == 0
        assert states(server, "dies") == {"1": "READY"}
        assert infer(server, "dies", -1)[0] == 500
        if death < 4:
            wait_until(lambda: server.get("/v2/models/dies/ready").status == 200, "the restart", server)
    wait_until(lambda: metric(server, "halimede_parked_instances", "dies") == 1, "the end of restarts", server)
    assert states(server, "dies") == {"1": "UNAVAILABLE"}
    assert metric(server, "halimede_worker_restarts_total", "dies") == 4
    assert load(server, "dies") == (200, "")
    assert states(server, "dies") == {"1": "READY"}
    assert metric(server, "halimede_parked_instances", "dies") == 0
    assert metric(server, "halimede_worker_restarts_total", "dies") == 0
