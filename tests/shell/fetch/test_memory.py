"""The peak memory of a process that fetches a big model."""

import sys
from pathlib import Path

import pytest

from support.stores import Fetch, Served, WebServer

MB = 1 << 20
PEAK = """
import atexit, re, sys
from pathlib import Path
from halimede.cli import main
atexit.register(lambda: print(re.search(r"VmHWM:.*", Path("/proc/self/status").read_text())[0]))
sys.argv[0] = "halimede"
main()
"""


@pytest.mark.parametrize("size_mb", [100, pytest.param(2048, marks=[pytest.mark.load, pytest.mark.timeout(600)])])
def test_a_model_is_fetched_in_bounded_memory(tmp_path: Path, size_mb: int) -> None:
    with WebServer({"/models/digits/1/model.onnx": Served(size=size_mb * MB)}).running() as web:
        model = {"name": "digits", "uri": "s3://models/digits/"}
        fetching = Fetch(tmp_path, {"models": [model], "stores": {"s3": {"endpoint": web.url}}}, timeout=500)
        process = fetching.start(program=[sys.executable, "-c", PEAK, "fetch"])
        process.wait(500)
        fetched = fetching.end(process)

    assert fetched.code == 0, fetched.log
    assert fetched.models[0]["size_bytes"] == size_mb * MB
    assert (tmp_path / "models/digits/1/model.onnx").stat().st_size == size_mb * MB
    peak_mb = int(fetched.log.rpartition("VmHWM:")[2].split()[0]) / 1024
    assert peak_mb <= 100
