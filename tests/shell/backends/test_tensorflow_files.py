"""What a SavedModel and a GraphDef say, read without TensorFlow."""

import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.backends.api import ModelSource
from halimede.backends.tensorflow import TensorFlowBackend
from halimede.backends.tensorflow.model_file import (
    FileTensor,
    FrozenGraph,
    MetaGraph,
    Node,
    Signature,
    read_frozen_graph,
    read_saved_model,
)
from halimede.backends.tensorflow.operations import keepers
from halimede.backends.tensorflow.session import runtime
from halimede.backends.tensorflow.signature import check_tensors
from halimede.core.config.autocomplete import ModelSignature, TensorSignature
from halimede.core.config.model_config import ModelConfig, ModelDynamicBatching, ModelInput, ModelOutput, ModelParameter
from halimede.core.types import DataType, ErrorCode, InferenceError
from support.tensorflow_files import (
    BFLOAT16,
    COMPLEX,
    DOUBLE,
    FLOAT,
    INT32,
    STRING,
    field,
    graph,
    meta_graph,
    node,
    saved_model,
    signature,
    tensor,
    write_saved_model,
)

BACKEND = TensorFlowBackend()
PLAIN = meta_graph(["serve"], {"serving_default": DOUBLE})
FP32 = DataType.FP32


def source(tmp_path: Path, data: bytes | None, name: str = "model.savedmodel", **options: str) -> ModelSource:
    artifact = tmp_path / "1" / name
    if data is not None:
        write_saved_model(artifact, data)
    return ModelSource("m", 1, tmp_path, artifact, options)


def autocompleted(tmp_path: Path, data: bytes, config: ModelConfig | None = None, **options: str) -> ModelConfig:
    return BACKEND.autocomplete(config or ModelConfig(), source(tmp_path, data, **options))


def refused(call) -> InferenceError:
    with pytest.raises(InferenceError) as caught:
        call()
    return caught.value


def parameters(**values: str) -> ModelConfig:
    return ModelConfig(parameters={key: ModelParameter(value) for key, value in values.items()})


def test_saved_model_is_read_with_all_its_graphs_and_signatures(tmp_path):
    odd = signature(
        {"s": tensor("s", STRING, None), "a": tensor("a", INT32, ())}, {"o": field(4, b"") + field(2, FLOAT)}
    )
    data = saved_model(meta_graph(["serve", "gpu"], {"b": odd, "a": DOUBLE}), meta_graph([], {}))
    double = Signature(
        (FileTensor("x", "serving_default_x:0", FLOAT, (-1, 4)),),
        (FileTensor("y", "StatefulPartitionedCall:0", FLOAT, (-1, 4)),),
    )
    strange = Signature(
        (FileTensor("a", "a:0", INT32, ()), FileTensor("s", "s:0", STRING, None)),
        (FileTensor("o", "", FLOAT, (), "sparse"),),
    )
    path = write_saved_model(tmp_path / "m", data) / "saved_model.pb"
    assert read_saved_model(path) == (MetaGraph(("serve", "gpu"), {"a": double, "b": strange}), MetaGraph((), {}))


def test_frozen_graph_is_read_with_the_shapes_of_its_placeholders(tmp_path):
    nodes = (
        node("x", "Placeholder", number=FLOAT, sizes=(-1, 4)),
        node("any", "Placeholder", number=INT32, sizes=None),
        node("bare", "PlaceholderV2", number=BFLOAT16),
        node("scalar", "PlaceholderWithDefault", "c", number=STRING, sizes=()),
        node("c", "Const"),
        node("y", "Add", "x", "bare:0", "^c"),
    )
    path = tmp_path / "g"
    path.write_bytes(graph(*nodes))
    found = read_frozen_graph(path)
    assert found == FrozenGraph(
        {
            "x": Node("Placeholder", (), FLOAT, (-1, 4)),
            "any": Node("Placeholder", (), INT32, None),
            "bare": Node("PlaceholderV2", (), BFLOAT16, None),
            "scalar": Node("PlaceholderWithDefault", ("c",), STRING, ()),
            "c": Node("Const"),
            "y": Node("Add", ("x", "bare:0", "^c")),
        }
    )
    assert (found.placeholders(), found.ends()) == (("x", "any", "bare", "scalar"), ("y",))
    # Early TensorFlow wrote the shape of a scalar for an unknown one.
    path.write_bytes(graph(*nodes, version=23))
    assert read_frozen_graph(path).nodes["scalar"].shape is None
    assert read_frozen_graph(path).nodes["x"].shape == (-1, 4)


def test_outputs_need_the_placeholders_that_nothing_feeds():
    nodes = FrozenGraph(
        {
            "x": Node("Placeholder"),
            "unused": Node("Placeholder"),
            "z": Node("Placeholder"),
            "inner": Node("Mul", ("z", "z:0")),
            "y": Node("Add", ("x", "inner:0")),
            "late": Node("Identity", ("^z",)),
        }
    )
    assert nodes.needed(("y",), frozenset()) == ("x", "z")
    assert nodes.needed(("y",), frozenset({"x", "inner"})) == ()
    assert nodes.needed(("late:0", "absent"), frozenset({"x"})) == ("z",)


def test_every_cut_of_a_saved_model_is_an_error_or_a_shorter_model(tmp_path):
    data = saved_model(PLAIN)
    path = tmp_path / "m"
    for size in range(len(data)):
        path.write_bytes(data[:size])
        if size in (0, 2):  # nothing, or the version alone
            assert read_saved_model(path) == ()
            continue
        with pytest.raises(ValueError, match="byte"):
            read_saved_model(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "bytes"
    path.write_bytes(data)
    for read in (read_saved_model, read_frozen_graph):
        try:
            read(path)
        except ValueError:
            continue


@pytest.fixture
def without_tensorflow(monkeypatch):
    """An earlier test of this process may have imported it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorflow"]:
        monkeypatch.delitem(sys.modules, name)
    runtime.cache_clear()


@pytest.mark.usefixtures("without_tensorflow")
def test_autocomplete_completes_tensors_and_batching_from_the_signature(tmp_path):
    completed = autocompleted(tmp_path, saved_model(PLAIN), **{"default-max-batch-size": "6"})
    assert completed == ModelConfig(
        name="m",
        max_batch_size=6,
        input=(ModelInput("x", FP32, dims=(4,)),),
        output=(ModelOutput("y", FP32, dims=(4,)),),
        dynamic_batching=ModelDynamicBatching(),
    )
    assert "tensorflow" not in sys.modules


def test_complete_configuration_needs_no_file(tmp_path):
    config = ModelConfig(input=(ModelInput("x", FP32, dims=(4,)),), output=(ModelOutput("y", FP32, dims=(4,)),))
    assert BACKEND.autocomplete(config, source(tmp_path, None)) is config


def test_output_without_datatype_is_left_out_unless_it_is_configured(tmp_path):
    waves = signature(
        {"x": tensor("x", FLOAT, (-1, 4))},
        {"y": tensor("y", FLOAT, (-1, 4)), "wave": tensor("w", COMPLEX, (-1, 4)), "odd": field(2, 99)},
    )
    data = saved_model(meta_graph(["serve"], {"serving_default": waves}))
    assert [each.name for each in autocompleted(tmp_path / "a", data).output] == ["y"]
    asked = ModelConfig(output=(ModelOutput("wave"),))
    assert refused(lambda: autocompleted(tmp_path / "b", data, asked)) == InferenceError(
        ErrorCode.INVALID_ARG,
        "model 'm': 'wave' is a tensor of complex64, and the protocol has no datatype for it",
    )


TWO = saved_model(
    meta_graph(["serve"], {"features": DOUBLE, "scores": DOUBLE, "__saved_model_init_op": b""}),
    meta_graph(["serve", "tpu"], {"only": DOUBLE}),
    meta_graph(["train"], {}),
)


def chosen(tmp_path: Path, **values: str) -> list[str]:
    return [each.name for each in autocompleted(tmp_path, TWO, parameters(**values)).output]


@pytest.mark.parametrize(
    "values", [{"TF_SIGNATURE_DEF": "scores"}, {"TF_GRAPH_TAG": "tpu"}, {"TF_GRAPH_TAG": "tpu,serve"}], ids=str
)
def test_tag_and_signature_are_those_of_the_parameters(tmp_path, values):
    assert chosen(tmp_path, **values) == ["y"]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"TF_GRAPH_TAG": "gpu"},
            "no graph has the tag 'gpu' (parameter TF_GRAPH_TAG); the tags of the SavedModel's graphs are 'serve'; "
            "'serve,tpu'; 'train'",
        ),
        ({}, "no signature 'serving_default' (parameter TF_SIGNATURE_DEF); it has features, scores"),
        ({"TF_SIGNATURE_DEF": "x"}, "no signature 'x' (parameter TF_SIGNATURE_DEF); it has features, scores"),
        ({"TF_GRAPH_TAG": "train"}, "it has none: give `signatures=` to tf.saved_model.save"),
    ],
    ids=range(4),
)
def test_wrong_tag_or_signature_is_an_error_that_lists_those_there_are(tmp_path, values, text):
    error = refused(lambda: chosen(tmp_path, **values))
    assert (error.code, text in error.message) == (ErrorCode.INVALID_ARG, True), error.message


def keras_file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".h5":
        path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
        return
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")


@pytest.mark.parametrize("name", ["model.keras", "model.h5"])
@pytest.mark.parametrize("platform", ["tensorflow_savedmodel", "tensorflow_graphdef"])
def test_keras_file_is_refused_with_the_way_to_export_it(tmp_path, name, platform):
    where = source(tmp_path, None, name)
    keras_file(where.artifact)
    export = f"keras.saving.load_model('{name}').export('model.savedmodel')"
    text = f"'{where.artifact}' is a Keras model, which is not served: write a SavedModel with {export}"
    config = ModelConfig(platform=platform)
    assert refused(lambda: BACKEND.load(config, where)) == InferenceError(ErrorCode.INVALID_ARG, f"model 'm': {text}")
    # The same where the file lies beside the place of the SavedModel.
    beside = replace(where, artifact=where.artifact.with_name("model.savedmodel"))
    absent = f"unable to find '{beside.artifact}' for model 'm': {text}"
    assert refused(lambda: BACKEND.load(config, beside)) == InferenceError(ErrorCode.UNAVAILABLE, absent)


def test_wrong_directory_is_an_error_that_says_what_is_there(tmp_path):
    where = source(tmp_path, None)
    where.artifact.parent.mkdir()
    (where.artifact.parent / "weights.bin").write_bytes(b"x")
    expected = InferenceError(
        ErrorCode.UNAVAILABLE, f"unable to find '{where.artifact}' for model 'm': there is 'weights.bin'"
    )
    assert refused(lambda: BACKEND.load(ModelConfig(), where)) == expected

    (where.artifact.parent / "saved_model.pb").write_bytes(saved_model(PLAIN))
    assert "itself is a SavedModel; move its files" in refused(lambda: BACKEND.load(ModelConfig(), where)).message

    where.artifact.mkdir()
    (where.artifact / "saved_model.pbtxt").write_text("x")
    error = refused(lambda: BACKEND.load(ModelConfig(), where))
    assert (error.code, "has no saved_model.pb, it has 'saved_model.pbtxt'" in error.message) == (
        ErrorCode.INVALID_ARG,
        True,
    )


@pytest.mark.usefixtures("without_tensorflow")
@pytest.mark.parametrize(
    ("platform", "data", "text"),
    [
        ("tensorflow_savedmodel", saved_model(PLAIN)[:-5], "is not a SavedModel, or is cut off: a field of"),
        ("tensorflow_savedmodel", b"", "is not a SavedModel: it has no graph"),
        ("tensorflow_graphdef", graph(node("x", "Placeholder"))[:-9], "is not a GraphDef, or is cut off: "),
        # An ONNX file: its graph is field 7.
        ("tensorflow_graphdef", field(1, 8) + field(2, "maker") + field(7, b""), "is not a GraphDef: it has no graph"),
    ],
    ids=range(4),
)
def test_file_of_another_kind_or_cut_off_is_one_error(tmp_path, platform, data, text):
    where = source(tmp_path, data if platform == "tensorflow_savedmodel" else None)
    if platform == "tensorflow_graphdef":
        where.artifact.parent.mkdir()
        where.artifact.write_bytes(data)
    error = refused(lambda: BACKEND.load(ModelConfig(platform=platform), where))
    assert (error.code, text in error.message) == (ErrorCode.INVALID_ARG, True), error.message
    assert "tensorflow" not in sys.modules


@pytest.mark.usefixtures("without_tensorflow")
def test_check_names_what_differs_without_tensorflow(tmp_path):
    where = source(tmp_path, saved_model(PLAIN))
    config = ModelConfig(
        name="m",
        max_batch_size=4,
        input=(ModelInput("x", DataType.INT32, dims=(5,)),),
        output=(ModelOutput("z", FP32, dims=(4,)),),
    )
    error = refused(lambda: BACKEND.check(config, where))
    found = [
        part in error.message for part in ("TYPE_INT32 for input 'x'", "tensor 'x'", "output 'z', allowed", "are: y")
    ]
    assert (error.code, found) == (ErrorCode.INVALID_ARG, [True] * 4)
    right = replace(config, input=(ModelInput("x", FP32, dims=(4,)),), output=(ModelOutput("y", FP32, dims=(4,)),))
    BACKEND.check(right, where)
    assert "tensorflow" not in sys.modules


@pytest.mark.usefixtures("without_tensorflow")
def test_check_of_a_frozen_graph_knows_its_names_and_placeholders(tmp_path):
    where = source(tmp_path, None, "model.graphdef")
    where.artifact.parent.mkdir()
    nodes = (
        node("x", "Placeholder", number=FLOAT, sizes=(-1, 4)),
        node("forgotten", "Placeholder", number=INT32, sizes=()),
        node("inner", "Mul", "x", "x"),
        node("y", "Add", "inner", "forgotten"),
        node("free", "Neg", "x"),
    )
    where.artifact.write_bytes(graph(*nodes))
    x, inner = ModelInput("x", FP32, dims=(4,)), ModelInput("inner", DataType.FP64, dims=(4,))
    config = ModelConfig(
        "m", "tensorflow_graphdef", max_batch_size=4, input=(x,), output=(ModelOutput("free", FP32, dims=(4,)),)
    )

    def texts(**changes: object) -> str:
        return refused(lambda: BACKEND.check(replace(config, **changes), where)).message

    BACKEND.check(config, where)
    # Any tensor can be fed; its datatype is not in the file.
    BACKEND.check(replace(config, input=(x, inner)), where)
    wrong = (ModelInput("x", DataType.INT32, dims=(5,)),)
    assert (
        "TYPE_INT32 for input 'x', model provides TYPE_FP32; model 'm', tensor 'x': the model expects 2 dimensions "
        "(shape [-1,4])" in texts(input=wrong)
    )
    assert "inference output 'z', allowed outputs are: y, free" in texts(output=(ModelOutput("z", FP32, dims=(4,)),))
    assert "configuration expects 1 inputs, model provides 2" in texts(output=(ModelOutput("y", FP32, dims=(4,)),))
    assert "tensorflow" not in sys.modules


def test_optional_input_needs_a_default_in_the_model():
    config = ModelConfig(
        name="m",
        input=(ModelInput("x", FP32, dims=(4,), optional=True), ModelInput("z", FP32, dims=(4,), optional=True)),
        output=(ModelOutput("y", FP32, dims=(4,)),),
    )
    x, y, z = (TensorSignature(name, FP32, (4,)) for name in "xyz")
    found = ModelSignature((x, z), (y,))
    check_tensors(config, found, placeholders=["w"])
    assert refused(lambda: check_tensors(config, found, placeholders=["x"])) == InferenceError(
        ErrorCode.INVALID_ARG,
        "unable to load model 'm', input 'x' is optional in the configuration, and the model has no default for it",
    )


def played(name: str, op: str, *inputs: str, calls: str = "") -> SimpleNamespace:
    function = SimpleNamespace(name=calls)
    attribute = SimpleNamespace(func=function, list=SimpleNamespace(func=[function]))
    return SimpleNamespace(name=name, op=op, input=inputs, attr={"f": attribute})


def test_only_operations_that_an_output_depends_on_can_keep_an_input():
    inner = SimpleNamespace(signature=SimpleNamespace(name="inner"), node_def=[played("a", "AssignVariableOp")])
    outer = SimpleNamespace(
        signature=SimpleNamespace(name="outer"), node_def=[played("b", "ReadVariableOp"), played("c", "inner")]
    )
    nodes = [
        played("x", "Placeholder"),
        played("call", "StatefulPartitionedCall", "x", calls="outer"),
        played("y", "Identity", "call:0"),
        played("pure", "Identity", "x"),
        played("queued", "QueueEnqueueV2", "x"),
        played("late", "Identity", "x", "^queued"),
    ]
    message = SimpleNamespace(node=nodes, library=SimpleNamespace(function=[inner, outer]))
    stateful = {"AssignVariableOp", "ReadVariableOp", "StatefulPartitionedCall", "QueueEnqueueV2"}

    def kept(*outputs: str) -> set[str]:
        return set(keepers(message, outputs, stateful.__contains__))

    assert kept("y:0") == {"AssignVariableOp"}
    assert kept("pure:0") == set()
    assert kept("late") == {"QueueEnqueueV2"}
