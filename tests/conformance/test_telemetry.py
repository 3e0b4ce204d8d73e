"""Telemetry of runtimes is disabled."""

from pathlib import Path

from support.models import add_simple
from support.server import start_server


def test_serving_leaves_nothing_in_the_home_directory(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    add_simple(tmp_path / "models")
    server = start_server(
        tmp_path, ["--model-repository", tmp_path / "models"], environment={"HOME": str(home), "XDG_CACHE_HOME": ""}
    )
    try:
        data = [1] * 16
        inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": data} for name in ("INPUT0", "INPUT1")]
        assert server.post("/v2/models/simple/infer", {"inputs": inputs}).status == 200
        assert server.stop() == 0
    finally:
        server.kill()
    assert list(home.rglob("*")) == []
