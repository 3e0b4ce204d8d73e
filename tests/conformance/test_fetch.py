"""Serving models from a store: fetched by `halimede fetch` before the start, or by the server."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.lazily import Lazily
from support.models import add_onnx_identity, add_simple
from support.openvino_models import perceptron, write
from support.probe import provided
from support.server import Start, start_server, wait_until
from support.stores import KEY, SECRET, Fault, Fetch, Moto, Proxy, write_credentials
from support.tensorflow_models import built_models
from support.torch_models import AddSub, script
from support.tree_models import rows, targets

joblib = Lazily("joblib")
linear_model = Lazily("sklearn.linear_model")
xgboost = Lazily("xgboost")


def environment(folder: Path) -> dict[str, str]:
    """Credentials, and a temporary folder for the leftovers of a killed server."""
    return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "TMPDIR": str(folder)}


@pytest.fixture(scope="module")
def moto() -> Iterator[Moto]:
    with Moto() as running:
        yield running


@pytest.fixture
def bucket(moto: Moto, tmp_path: Path) -> str:
    """A bucket with the models `simple`, in two versions, and `one`."""
    source = tmp_path / "source"
    add_simple(source)
    add_simple(source, version=2)
    add_onnx_identity(source, "one", "FP32", ["N", 4])
    name = tmp_path.name.replace("_", "-").lower()[-40:].strip("-") + "-bucket"
    upload(moto, name, source)
    return name


def upload(moto: Moto, bucket: str, source: Path, prefix: str = "models/") -> None:
    moto.put(
        bucket,
        {
            f"{prefix}{path.relative_to(source).as_posix()}": path.read_bytes()
            for path in source.rglob("*")
            if path.is_file()
        },
    )


SIMPLE = {
    "inputs": [
        {"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16},
    ]
}


def summed(server) -> list[int]:  # type: ignore[no-untyped-def]
    answer = server.post("/v2/models/simple/infer", SIMPLE)
    assert answer.status == 200, answer.body
    outputs = {each["name"]: each["data"] for each in answer.json["outputs"]}
    return outputs["OUTPUT0"]


def test_a_fetched_model_is_served(moto: Moto, bucket: str, tmp_path: Path, start: Start) -> None:
    model = {
        "name": "simple",
        "uri": f"s3://{bucket}/models/simple/",
        "credentials": write_credentials(tmp_path / "credentials"),
        "config": {"max_batch_size": 4, "instance_group": [{"count": 2, "kind": "KIND_CPU"}]},
    }
    step = {
        "model_name": "simple",
        "model_version": -1,
        "input_map": {"INPUT0": "A", "INPUT1": "B"},
        "output_map": {"OUTPUT0": "SUM"},
    }
    tensor = {"data_type": "TYPE_INT32", "dims": [16]}
    ensemble = {
        "max_batch_size": 4,
        "input": [{"name": "A", **tensor}, {"name": "B", **tensor}],
        "output": [{"name": "SUM", **tensor}],
        "ensemble_scheduling": {"step": [step]},
    }
    plan = {
        "models": [model],
        "ensembles": [{"name": "adder", "config": ensemble}],
        "stores": {"s3": {"endpoint": moto.url}},
    }

    fetched = Fetch(tmp_path, plan, into="repository").run()
    assert fetched.code == 0, fetched.log

    server = start("--model-repository", tmp_path / "repository")
    assert summed(server) == list(range(1, 17))
    config = server.get("/v2/models/simple/config").json
    assert (config["max_batch_size"], config["instance_group"][0]["count"]) == (4, 2)
    inputs = [{**each, "name": name} for each, name in zip(SIMPLE["inputs"], "AB", strict=True)]
    assert server.post("/v2/models/adder/infer", {"inputs": inputs}).json["outputs"][0]["data"] == list(range(1, 17))
    assert [
        (each["name"], each["version"], each["state"]) for each in server.post("/v2/repository/index", {}).json
    ] == [
        ("adder", "1", "READY"),
        ("simple", "2", "READY"),
    ]


# The SavedModel is built once on a machine, and TensorFlow's import takes seconds.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "served",
    [("openvino",), pytest.param(("fil", "sklearn", "pytorch", "tensorflow"), marks=pytest.mark.large)],
    ids=["openvino", "with large libraries"],
)
def test_files_of_each_framework_are_served_without_a_repository(
    moto: Moto, tmp_path: Path, request: pytest.FixtureRequest, served: tuple[str, ...]
) -> None:
    """The files of all are placed where the server expects them, and some models are loaded. Others need not be real."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("booster.json", "scores.pkl", "net.pth"):
        (source / name).write_bytes(b"{}")
    if "fil" in served:
        x = rows(50, missing=0.0)
        xgboost.train({"verbosity": 0}, xgboost.DMatrix(x, label=targets(x)), 2).save_model(source / "booster.json")
        joblib.dump(linear_model.LogisticRegression().fit(x, targets(x)), source / "scores.pkl")
        script(AddSub(), source / "net.pth")
    write(perceptron(), source / "perceptron" / "model.xml")
    shutil.copytree(provided(request.config, built_models) / "network", source / "exported")
    bucket = f"frameworks-{len(served)}"
    upload(moto, bucket, source, prefix="")
    tensor = {"data_type": "TYPE_FP32", "dims": [2]}
    torch_config = {
        "input": [{"name": name, **tensor} for name in ("INPUT__0", "INPUT__1")],
        "output": [{"name": name, **tensor} for name in ("OUTPUT__0", "OUTPUT__1")],
    }
    sources = {
        "fil": {"uri": "booster.json", "format": "fil"},
        "sklearn": {"uri": "scores.pkl"},
        "pytorch": {"uri": "net.pth", "format": "torch", "config": torch_config},
        "openvino": {"uri": "perceptron/"},
        "tensorflow": {"uri": "exported/", "format": "tensorflow"},
    }
    credentials = write_credentials(tmp_path / "credentials")
    models = [
        {"credentials": credentials, **model, "name": name, "uri": f"s3://{bucket}/{model['uri']}"}
        for name, model in sources.items()
    ]

    fetched = Fetch(tmp_path, {"models": models, "stores": {"s3": {"endpoint": moto.url}}}, into="repository").run()
    assert fetched.code == 0, fetched.log

    repository = tmp_path / "repository"
    assert {name: sorted(path.name for path in (repository / name / "1").iterdir()) for name in sources} == {
        "fil": ["xgboost.json"],
        "sklearn": ["model.pkl"],
        "pytorch": ["model.pt"],
        "openvino": ["model.bin", "model.xml"],
        "tensorflow": ["model.savedmodel"],
    }
    assert (repository / "tensorflow" / "1" / "model.savedmodel" / "saved_model.pb").is_file()
    loads = [f"--load-model={name}" for name in served]
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", *loads]
    server = start_server(tmp_path, arguments, ready=False)
    wait_until(lambda: "Started HTTPService" in server.log, "the end of all loads", server, 300)
    assert {name: server.get(f"/v2/models/{name}/config").json["backend"] for name in served} == {
        name: name for name in served
    }
    assert server.stop() == 0, server.log


def test_a_server_fetches_a_repository_from_a_store(moto: Moto, bucket: str, tmp_path: Path, start: Start) -> None:
    server = start("--model-repository", f"s3://{moto.url}/{bucket}/models", environment=environment(tmp_path))

    assert summed(server) == list(range(1, 17))
    index = [(each["name"], each["version"], each["state"]) for each in server.post("/v2/repository/index", {}).json]
    assert index == [("one", "1", "READY"), ("simple", "2", "READY")]
    assert server.stop() == 0
    assert list(tmp_path.glob("halimede-models-*")) == []


def test_each_load_checks_the_store_again(moto: Moto, bucket: str, tmp_path: Path, start: Start) -> None:
    with Proxy(moto.url).running() as proxy:
        server = start(
            "--model-repository",
            f"s3://{proxy.url}/{bucket}/models",
            "--model-control-mode=explicit",
            "--load-model=simple",
            environment=environment(tmp_path),
        )
        index = [(each["name"], each.get("state")) for each in server.post("/v2/repository/index", {}).json]
        assert index == [("one", None), ("simple", "READY")]
        assert proxy.gets(f"/{bucket}/models/one/1/model.onnx") == []

        assert server.post("/v2/repository/models/simple/load", {}).status == 200
        assert len(proxy.gets(f"/{bucket}/models/simple/2/model.onnx")) == 1

        add_simple(tmp_path / "third", version=3)
        upload(moto, bucket, tmp_path / "third")
        assert server.post("/v2/repository/models/simple/load", {}).status == 200
        assert server.get("/v2/models/simple").json["versions"] == ["3"]

        proxy.rule = lambda _: Fault(403)
        refused = server.post("/v2/repository/models/one/load", {})
        assert (refused.status, "access was denied (403)" in refused.error) == (500, True)
        assert summed(server) == list(range(1, 17))
    unknown = server.post("/v2/repository/models/nothing-there/unload", {})
    assert unknown.status == 200


def test_the_next_server_removes_what_a_killed_one_has_fetched(
    moto: Moto, bucket: str, tmp_path: Path, start: Start
) -> None:
    def fetched() -> set[Path]:
        return set(tmp_path.glob("halimede-models-*"))

    arguments = "--model-repository", f"s3://{moto.url}/{bucket}/models"
    living = start(*arguments, environment=environment(tmp_path))
    of_living = fetched()
    killed = start(*arguments, environment=environment(tmp_path))
    of_killed = fetched() - of_living
    killed.kill()
    start(*arguments, environment=environment(tmp_path))
    assert (len(of_living), len(of_killed), len(fetched())) == (1, 1, 2)
    assert of_living < fetched()
    assert not of_killed & fetched()
    assert summed(living) == list(range(1, 17))


def test_a_server_without_access_to_its_store_exits_with_the_reason(moto: Moto, tmp_path: Path) -> None:
    with Proxy(moto.url, lambda _: Fault(403)).running() as proxy:
        server = start_server(
            tmp_path,
            ["--model-repository", f"s3://{proxy.url}/bucket/models"],
            environment=environment(tmp_path),
            ready=False,
        )
        assert server.process.wait(60) == 1
    assert "access was denied (403)" in server.log
    assert SECRET not in server.log
