"""Telemetry of runtimes is disabled."""

from pathlib import Path

from support.models import add_simple, write_config
from support.openvino_models import add_sub, write
from support.server import start_server

# In CI openvino-telemetry is silent by itself.
NOT_CI = {"CI": "", "TF_BUILD": "", "JENKINS_URL": ""}


def test_serving_leaves_nothing_in_the_home_directory(tmp_path: Path) -> None:
    """openvino-telemetry would write an identity for its messages there."""
    home = tmp_path / "home"
    home.mkdir()
    add_simple(tmp_path / "models")
    for name, isolation in (("pair", "thread"), ("pair_process", "process")):
        write(add_sub((-1, 16)), tmp_path / "models" / name / "1" / "model.xml")
        parameter = f'parameters {{ key: "ISOLATION" value {{ string_value: "{isolation}" }} }}'
        write_config(tmp_path / "models" / name, parameter + "instance_group { count: 1 }")
    server = start_server(
        tmp_path,
        ["--model-repository", tmp_path / "models"],
        environment={"HOME": str(home), "XDG_CACHE_HOME": "", **NOT_CI},
        # Libraries may look for the home directory when they are imported.
        forked=False,
    )
    try:
        data = [1] * 16
        inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": data} for name in ("INPUT0", "INPUT1")]
        assert server.post("/v2/models/simple/infer", {"inputs": inputs}).status == 200
        inputs = [{"name": name, "shape": [1, 16], "datatype": "FP32", "data": data} for name in ("a", "b")]
        for name in ("pair", "pair_process"):
            assert server.post(f"/v2/models/{name}/infer", {"inputs": inputs}).status == 200
        assert server.stop() == 0
    finally:
        server.kill()
    assert list(home.rglob("*")) == []
