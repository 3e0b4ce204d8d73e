"""Tree models and estimators in a real server, with Triton's client."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from support.lazily import Lazily
from support.models import write_config
from support.processes import holding_no_more
from support.served import workers
from support.server import RunningServer, serving, wait_until
from support.tree_models import config, read, rows, run, targets

joblib = Lazily("joblib")
linear_model = Lazily("sklearn.linear_model")
pipeline = Lazily("sklearn.pipeline")
preprocessing = Lazily("sklearn.preprocessing")
xgboost = Lazily("xgboost")

TRAIN, TEST = rows(200, seed=1, missing=0.0), rows(16, seed=2, missing=0.0)

# As it is written for Triton, with parameters that concern GPUs.
FRAUD = """
backend: "fil"
max_batch_size: 32768
input [ { name: "input__0" data_type: TYPE_FP32 dims: [ 5 ] } ]
output [
  { name: "output__0" data_type: TYPE_FP32 dims: [ 2 ] },
  { name: "treeshap_output" data_type: TYPE_FP32 dims: [ 6 ] }
]
instance_group [{ kind: KIND_AUTO }]
parameters [
  { key: "model_type" value: { string_value: "xgboost_json" } },
  { key: "output_class" value: { string_value: "true" } },
  { key: "predict_proba" value: { string_value: "true" } },
  { key: "threshold" value: { string_value: "0.5" } },
  { key: "storage_type" value: { string_value: "AUTO" } },
  { key: "algo" value: { string_value: "ALGO_AUTO" } },
  { key: "blocks_per_sm" value: { string_value: "0" } }
]
dynamic_batching {}
"""

SUICIDAL = """
import os

class Suicidal:
    def predict(self, rows):
        if (rows < 0).any():
            os._exit(3)
        return rows[:, 0]
"""


@pytest.fixture(scope="module")
def booster():
    matrix = xgboost.DMatrix(TRAIN, label=targets(TRAIN))
    return xgboost.train({"objective": "binary:logistic", "max_depth": 3, "nthread": 1}, matrix, 5)


@pytest.fixture(scope="module")
def estimator():
    return pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()).fit(
        TRAIN.astype(np.float64), targets(TRAIN, 3)
    )


@pytest.fixture(scope="module")
def server(tmp_path_factory, booster, estimator) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("models")
    write_config(repository / "fraud", FRAUD)
    for name, filename in (("fraud", "xgboost.json"), ("bare", "xgboost.ubj")):
        (repository / name / "1").mkdir(parents=True)
        booster.save_model(repository / name / "1" / filename)
    (repository / "estimator" / "1").mkdir(parents=True)
    joblib.dump(estimator, repository / "estimator" / "1" / "model.joblib")
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "checkpoint.tl").write_bytes(
        (repository / "fraud" / "1" / "xgboost.json").read_bytes()
    )
    modules = tmp_path_factory.mktemp("modules")
    (modules / "suicidal.py").write_text(textwrap.dedent(SUICIDAL))
    (repository / "suicidal" / "1").mkdir(parents=True)
    # A pickle by hand: the class is in a module of the worker processes alone.
    (repository / "suicidal" / "1" / "model.pkl").write_bytes(b"csuicidal\nSuicidal\n)\x81.")
    write_config(
        repository / "suicidal",
        """
        backend: "sklearn" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP64 dims: 1 }
        output { name: "y" data_type: TYPE_FP64 dims: 1 }
        """,
    )
    arguments = ["--model-repository", repository, "--model-control-mode=explicit", "--load-model=fraud"]
    with serving(
        tmp_path_factory.mktemp("log"),
        [*arguments, "--load-model=bare", "--load-model=estimator", "--load-model=suicidal"],
        environment={"PYTHONPATH": str(modules)},
    ) as running:
        yield running


def infer(client_module, url, model, inputs, outputs):
    client = client_module.InferenceServerClient(url)
    tensors = []
    for name, (datatype, array) in inputs.items():
        tensor = client_module.InferInput(name, list(array.shape), datatype)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    result = client.infer(model, tensors, outputs=[client_module.InferRequestedOutput(name) for name in outputs])
    found = {name: result.as_numpy(name) for name in outputs}
    client.close()
    return found


@pytest.mark.parametrize("protocol", [httpclient, grpcclient], ids=["http", "grpc"])
def test_a_repository_made_for_triton_gives_the_same_bits_as_outside(server, booster, protocol, tmp_path):
    url = server.http_url.removeprefix("http://") if protocol is httpclient else server.grpc_url
    names = ["output__0", "treeshap_output"]
    found = infer(protocol, url, "fraud", {"input__0": ("FP32", TEST)}, names)
    booster.save_model(tmp_path / "m.json")
    outside = run(read(tmp_path / "m.json", "xgboost_json"), config([2], shap=[6]), TEST, names)
    assert {name: each.tobytes() for name, each in found.items()} == {
        name: each.tobytes() for name, each in outside.items()
    }
    assert np.abs(found["output__0"][:, 1] - booster.inplace_predict(TEST)).max() < 1e-6
    margins = booster.inplace_predict(TEST, predict_type="margin")
    assert np.abs(found["treeshap_output"].sum(axis=1) - margins).max() < 1e-6
    line = "without effect, because they change no answer: parameters storage_type, algo, blocks_per_sm"
    assert server.log.count(line) == 1


def test_a_model_needs_no_configuration(server, booster):
    found = server.get("/v2/models/bare/config").json
    assert (found["backend"], found["max_batch_size"]) == ("fil", 1024)
    url = server.http_url.removeprefix("http://")
    answer = infer(httpclient, url, "bare", {"input__0": ("FP32", TEST)}, ["output__0"])["output__0"]
    assert np.abs(answer[:, 0] - booster.inplace_predict(TEST)).max() < 1e-6


def test_an_estimator_gives_the_same_bits_as_outside(server, estimator):
    assert server.get("/v2/models/estimator/config").json["backend"] == "sklearn"
    x = TEST.astype(np.float64)
    url = server.http_url.removeprefix("http://")
    found = infer(httpclient, url, "estimator", {"input": ("FP64", x[:4])}, ["label", "probabilities"])
    assert found["label"].tolist() == estimator.predict(x[:4])[:, None].tolist()
    assert found["probabilities"].tobytes() == estimator.predict_proba(x[:4]).tobytes()


def test_a_wrong_file_is_one_clear_error(server):
    answer = server.post("/v2/repository/models/broken/load")
    assert answer.status == 400
    assert "checkpoint.tl cannot be read as model_type 'treelite_checkpoint'" in answer.error
    assert "the file looks like one of model_type 'xgboost_json'" in answer.error


def test_estimators_share_the_memory_of_scikit_learn(server):
    found = workers(server)
    assert [each.name() for each in found] == ["estimator_0", "suicidal_0"]
    (zygote,) = {each.parent() for each in found}
    assert "sklearn" in Path(f"/proc/{zygote.pid}/maps").read_text()
    # A fork of a process with several threads may hang.
    assert zygote.num_threads() == 1


def test_an_estimator_that_ends_its_process_costs_a_batch(server):
    def ask(value):
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP64", "data": [value]}
        return server.post("/v2/models/suicidal/infer", {"inputs": [tensor]})

    def suicidal():
        return [each for each in workers(server) if each.name().startswith("suicidal")]

    assert ask(1.0).json["outputs"][0]["data"] == [1.0]
    (before,) = suicidal()
    assert ask(-1.0).status >= 500
    wait_until(lambda: ask(2.0).status == 200, "the next process", server)
    (after,) = suicidal()
    assert before.pid != after.pid


def test_the_server_itself_imports_neither_treelite_nor_scikit_learn(server):
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "onnxruntime" in maps
    assert not [name for name in ("/treelite/", "/sklearn/", "/scipy/") if name in maps]


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=[pytest.mark.load, pytest.mark.timeout(1200)])])
def test_loads_and_unloads_leave_nothing_behind(server, times):
    def again():
        assert server.post("/v2/repository/models/fraud/unload").status == 200
        wait_until(lambda: server.get("/v2/models/fraud/ready").status != 200, "the unload", server)
        assert server.post("/v2/repository/models/fraud/load").status == 200

    again()
    again()
    with holding_no_more(server.process.pid, threads=0, growth_bytes=4 << 20):
        for _ in range(times):
            again()
