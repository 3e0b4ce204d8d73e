"""The server reads what the operator writes: the fetch plan, the command line, the ensembles."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
from hypothesis import HealthCheck, given, settings

from halimede.backends.discover import installed_backend
from halimede.commands.assemble import assemble
from halimede.commands.parse import parse
from halimede.core.config.dataflow import check_dataflow
from halimede.core.config.model_config import ModelConfig
from halimede.core.config.read import read_json
from halimede.core.ensemble.graph import make_graph
from halimede.core.repository.layout import DEFAULT_ARTIFACTS
from halimede.fetch.plan import read_plan
from halimede.settings import LogFormat, Settings
from halimede_operator.core.spec.types import Key, ModelSpec, Serving, Spec
from halimede_spec.fetch_plan import FORMATS
from support.operator_children import children_of, pod_of, server_of
from support.operator_specs import PLATFORM, cases, members_of, model_spec, search_spec, step, tensor, workload

MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(cases())
def test_the_fetcher_reads_every_plan(case: tuple[Key, Spec, dict[str, ModelSpec]]) -> None:
    key, spec, members = case
    platform = replace(PLATFORM, s3_secret="models-s3", s3_region="eu-central-1")
    text = children_of(spec, members, key=key, platform=platform)["ConfigMap"]["data"]["plan.json"]

    plan, problems = read_plan(text.encode())

    assert (problems, plan.s3.credentials) == ([], "/run/halimede/s3")
    assert len(plan.models) == max(1, len(members))
    assert [problem.message for each in plan.ensembles for problem in check_dataflow(each.config.config)] == []


def test_each_format_has_an_installed_backend_with_well_known_files() -> None:
    assert set(FORMATS.values()) <= {artifact.backend for artifact in DEFAULT_ARTIFACTS}
    assert [backend for backend in FORMATS.values() if installed_backend(backend) is None] == []


def test_the_server_accepts_the_command_line(tmp_path: Path) -> None:
    spec = model_spec(
        workload=workload(serving=Serving(True, True, 9000, 9001, 9002, 1 << 20, 60, ("--log-verbose=1",)))
    )
    arguments = [each.replace("/models", str(tmp_path)) for each in server_of(pod_of(spec))["args"]]

    made, problems = assemble(parse(arguments), {})

    assert problems == []
    assert made == Settings(
        model_repository=(tmp_path,),
        http_port=9000,
        grpc_port=9001,
        metrics_port=9002,
        http_max_input_size=1 << 20,
        grpc_max_input_size=1 << 20,
        drain_delay_secs=5,
        exit_timeout_secs=60,
        log_format=LogFormat.JSON,
        log_verbose=1,
    )
    without_grpc = server_of(pod_of(model_spec(workload=workload(serving=Serving(grpc=False)))))["args"]
    assert not assemble(parse([each.replace("/models", str(tmp_path)) for each in without_grpc]), {})[0].allow_grpc


def member(name: str, inputs: dict[str, str], outputs: dict[str, str]) -> ModelConfig:
    def tensors(given_tensors: dict[str, str]) -> list[dict[str, Any]]:
        return [{"name": each, "data_type": f"TYPE_{kind}", "dims": [-1]} for each, kind in given_tensors.items()]

    document = {"name": name, "max_batch_size": 8, "input": tensors(inputs), "output": tensors(outputs)}
    return read_json(orjson.dumps(document)).config


def test_the_servers_graph_has_the_edges_of_the_steps() -> None:
    spec = search_spec(
        inputs=(tensor("TEXT", data_type="BYTES"), tensor("FAST", data_type="BOOL")),
        outputs=(tensor("EMBEDDING", "pool.out"), tensor("IDS", "tok.ids", "INT64")),
        steps=(
            step("tok", {"text": "request.TEXT"}, {"ids": "ids", "score": "score", "unused": "unused"}),
            step("pool", {"ids": "tok.ids"}, {"mean": "out"}, when="tok.score > 0.5 and not request.FAST"),
        ),
    )
    plan, problems = read_plan(children_of(spec, members_of("tok", "pool"))["ConfigMap"]["data"]["plan.json"].encode())
    assert problems == []
    members = [
        member("tok", {"text": "STRING"}, {"ids": "INT64", "score": "FP32", "unused": "FP32"}),
        member("pool", {"ids": "INT64"}, {"mean": "FP32"}),
    ]

    graph = make_graph(plan.ensembles[0].config.config, members)

    assert (graph.inputs, graph.outputs) == (("TEXT", "FAST"), ("EMBEDDING", "IDS"))
    tok, pool = graph.steps
    assert (dict(tok.inputs), dict(tok.outputs)) == ({"text": "TEXT"}, {"ids": "IDS", "score": "tok.score"})
    assert (dict(pool.inputs), dict(pool.outputs)) == ({"ids": "IDS"}, {"mean": "EMBEDDING"})
    assert pool.when is not None
    assert set(pool.when.tensors) == {"tok.score", "FAST"}
