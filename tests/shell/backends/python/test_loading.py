"""The import of a model's file, and the errors of failed loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from halimede.backends.python.runner import complete_config, make_runner
from halimede.core.types import ErrorCode
from support.python_models import FakeHost, asked, body, runner_of, spec_of, values, write
from support.refusals import error_of

RETURN_NAMES = """
class TritonPythonModel:
    def initialize(self, args):
        self.args = args
    def execute(self, requests):
        return [pb.InferenceResponse([pb.Tensor("OUT", np.array([seen(self)], dtype=object))])]
"""


def load_error(folder, code, host=None, **config) -> str:
    """The text of a load that fails."""
    error = error_of(runner_of, folder, code, host, **config)
    assert error.code is ErrorCode.INTERNAL
    return error.message


def seen(folder, code) -> list:
    [text] = values(runner_of(folder, code + RETURN_NAMES).execute([asked()])[0])["OUT"]
    return json.loads(text)


def test_the_module_is_named_after_its_version_and_imports_its_folder(tmp_path):
    write(tmp_path, "")
    version = tmp_path / "m" / "1"
    (version / "helper.py").write_text("from . import package\nname = __name__")
    (version / "package").mkdir()
    (version / "package" / "__init__.py").write_text("inner = 'inner'")
    (tmp_path / "m" / "beside.py").write_text("name = __name__")
    code = """
import json
import os
import subprocess
import sys
from pathlib import Path
from . import helper
from .helper import package
import beside
import package as plain
def seen(model):
    return json.dumps([__name__, __package__, helper.name, package.inner, beside.name, plain.inner])
"""
    assert seen(tmp_path, code) == ["1.model", "1", "1.helper", "inner", "beside", "inner"]


def test_a_changed_file_of_the_same_size_and_second_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    code = "def seen(model): return '[%d]'\n"
    assert seen(tmp_path, code % 1) == [1]
    file = tmp_path / "m" / "1" / "model.py"
    before = file.stat()
    spec = write(tmp_path, code % 2 + RETURN_NAMES)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    [text] = values(make_runner(spec, FakeHost()).execute([asked()])[0])["OUT"]
    assert json.loads(text) == [2]


def test_working_directory_is_last_on_the_search_path(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "workdir_module.py").write_text("name = __name__")
    (tmp_path / "here" / "numpy.py").write_text("raise ImportError('hidden')")
    monkeypatch.chdir(tmp_path / "here")
    code = """
import json
import workdir_module, numpy
def seen(model):
    return json.dumps([workdir_module.name, numpy.array([1]).shape])
"""
    assert seen(tmp_path, code) == ["workdir_module", [1]]


def test_other_directory_named_like_the_version_is_not_imported(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "1").mkdir(parents=True)
    (elsewhere / "1" / "model.py").write_text("wrong")
    monkeypatch.syspath_prepend(str(elsewhere))
    assert seen(tmp_path, "import json\ndef seen(model): return json.dumps(__file__)") == str(
        tmp_path / "m" / "1" / "model.py"
    )


def test_initialize_gets_strings_and_the_whole_configuration_as_json(tmp_path):
    args = seen(tmp_path, "import json\ndef seen(model): return json.dumps(model.args)")
    config = args.pop("model_config")
    assert json.loads(config)["name"] == "m"
    assert args == {
        "model_instance_kind": "CPU",
        "model_instance_name": "m_0",
        "model_instance_device_id": "0",
        "model_repository": str(tmp_path / "m"),
        "model_version": "1",
        "model_name": "m",
    }


def test_shared_backend_code_keeps_each_models_own_directory(tmp_path):
    backend = tmp_path / "backends" / "shared"
    backend.mkdir(parents=True)
    (backend / "helper.py").write_text("name = __name__")
    (backend / "model.py").write_text(
        "import triton_python_backend_utils as pb, numpy as np, helper\n"
        + body('return [pb.InferenceResponse([pb.Tensor("OUT", np.array([pb.get_model_dir(), __name__], object))])]')
    )
    runner = make_runner(spec_of(tmp_path, backend / "model.py"), FakeHost())
    [reply] = runner.execute([asked()])
    assert values(reply) == {"OUT": [str(tmp_path / "m" / "1").encode(), b"model"]}


def test_another_file_name_is_loaded_as_well(tmp_path):
    code = body("return [pb.InferenceResponse([]) for _ in requests]")
    assert make_runner(write(tmp_path, code, file="other.py"), FakeHost()).execute([asked()])[0].outputs == []


EXECUTE = "    def execute(self, requests): return []\n"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax (model.py, line 4)"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("class TritonPythonModel:\n    x = 1 / 0", "ZeroDivisionError: division by zero"),
        (
            "class Model: pass",
            "AttributeError: module '1.model' has no attribute 'TritonPythonModel': model.py must have a class of this name",
        ),
        ("class TritonPythonModel: pass", "Python model model.py does not implement `execute` method."),
        ("class TritonPythonModel:\n    execute = 3", "Python model model.py does not implement `execute` method."),
        ("class TritonPythonModel:\n    def __init__(self): raise ValueError('ctor')\n" + EXECUTE, "ValueError: ctor"),
        (
            "class TritonPythonModel:\n    def initialize(self, args): raise KeyError('k')\n" + EXECUTE,
            "KeyError: 'k'",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self): pass\n" + EXECUTE,
            "TypeError: TritonPythonModel.initialize() takes 1 positional argument but 2 were given",
        ),
        (
            "import sys\nclass TritonPythonModel:\n    def initialize(self, args): sys.exit('no GPU')\n" + EXECUTE,
            "SystemExit: no GPU",
        ),
        (
            "class Odd(Exception):\n    def __str__(self): raise SystemExit(3)\nraise Odd",
            "Odd: its text cannot be shown, because its __str__ fails",
        ),
        ("raise ValueError('x' * 5000)", "ValueError: " + "x" * 1009 + "..."),
        ("raise ValueError('caf\\udce9')", "ValueError: caf?"),
    ],
)
def test_failed_load_reports_only_its_cause(tmp_path, code, text):
    assert load_error(tmp_path, code) == text


def test_the_traceback_is_logged_but_not_sent_to_the_caller(tmp_path):
    host = FakeHost()
    text = load_error(tmp_path, "def deep(): raise ValueError('boom')\ndeep()", host)
    [(level, line)] = host.logs
    assert level == "ERROR"
    assert line.startswith("model 'm' version 1 instance 'm_0': the import of its file failed: Traceback")
    assert f'File "{tmp_path}/m/1/model.py", line 4, in deep' in line
    assert text == "ValueError: boom"


def test_the_log_shows_a_wrong_line_without_the_frames_of_the_server(tmp_path):
    host = FakeHost()
    text = load_error(tmp_path, "def execute(self)\n    pass", host)
    [(_, line)] = host.logs
    where = f'Traceback (most recent call last):\n  File "{tmp_path}/m/1/model.py", line 4\n    def execute(self)\n'
    assert line.startswith(f"model 'm' version 1 instance 'm_0': the import of its file failed: {where}")
    assert text == "SyntaxError: expected ':' (model.py, line 4)"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("open(__file__ + '.weights')", "FileNotFoundError: [Errno 2] No such file or directory: 'model.py.weights'"),
        ("open('/no/such/place')", "FileNotFoundError: [Errno 2] No such file or directory: 'place'"),
        ("import os; raise ValueError('in ' + os.path.dirname(__file__))", "ValueError: in 1"),
        ("import json; raise ValueError(json.__file__)", "ValueError: json/__init__.py"),
        ("raise ValueError('GET /v2/models')", "ValueError: GET /v2/models"),
    ],
)
def test_no_directory_of_this_machine_reaches_the_caller(tmp_path, code, text):
    assert load_error(tmp_path, code) == text


def test_an_import_error_names_no_directory(tmp_path):
    write(tmp_path, "")
    (tmp_path / "m" / "1" / "helper.py").write_text("")
    assert load_error(tmp_path, "from helper import nothing") == (
        "ImportError: cannot import name 'nothing' from 'helper' (helper.py)"
    )


def test_missing_or_invalid_file_is_reported_by_name(tmp_path):
    write(tmp_path, "")
    for file, text in (
        ("none.py", "Python model file not found: model 'm' has no none.py"),
        ("model.onnx", "Model name must end with '.py'. Model name is \"model.onnx\"."),
    ):
        assert error_of(make_runner, spec_of(tmp_path, tmp_path / "m" / "1" / file), FakeHost()).message == text


COMPLETE = """
import os, sys
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(c):
        {}
    def initialize(self, args): os.abort()
    def execute(self, requests): pass
"""


def test_a_configuration_is_completed_by_the_model_without_initializing_it(tmp_path):
    add = 'c.add_input({"name": "X", "data_type": "TYPE_INT8", "dims": [2]}); c.set_max_batch_size(16); return c'
    completed = complete_config(write(tmp_path, COMPLETE.format(add)), FakeHost())
    assert completed["max_batch_size"] == 16
    assert completed["input"][1] == {"name": "X", "data_type": "TYPE_INT8", "dims": [2]}


def test_model_without_auto_complete_keeps_the_configuration(tmp_path):
    spec = write(tmp_path, "class TritonPythonModel:\n" + EXECUTE)
    assert complete_config(spec, FakeHost()) == json.loads(spec.config_json)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("return None", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        ("return c.as_dict()", "auto_complete_config function in model 'm' must return a valid pb.ModelConfig object."),
        ("sys.exit(4)", "SystemExit: 4"),
        ("raise ValueError('boom')", "ValueError: boom"),
        ("c.as_dict()['x'] = np.int64(1); return c", "TypeError: Object of type int64 is not JSON serializable"),
    ],
)
def test_failed_completion_reports_its_cause(tmp_path, line, text):
    error = error_of(complete_config, write(tmp_path, COMPLETE.format(line)), FakeHost())
    assert (error.code, error.message) == (ErrorCode.INTERNAL, text)


def test_a_long_traceback_is_logged_by_its_end(tmp_path):
    host = FakeHost()
    load_error(tmp_path, "raise ValueError('x' * 100_000 + 'end')", host)
    assert len(host.logs[0][1]) < 13_000
    assert host.logs[0][1].endswith("xend\n")


def test_hosting_code_imports_only_numpy():
    script = (
        "import sys; before = set(sys.modules); import halimede.backends.python.runner;"
        "print(*sorted({m.partition('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert [name for name in printed.split() if not name.startswith("_")] == ["halimede", "numpy"]


def test_a_process_that_a_model_spawns_can_import_its_file(tmp_path):
    code = (
        "import multiprocessing\n"
        "def work(n):\n"
        "    try:\n"
        "        pb.get_model_dir()\n"
        "    except pb.TritonModelException as error:\n"
        "        return f'{n} {pb.triton_to_numpy_type(11).__name__} {error}'\n"
    )
    code += body(
        """
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pb.Logger.log_info(pool.apply(work, (7,)))
        return [pb.InferenceResponse([])]
        """
    )
    # A process of its own, because what is spawned begins with what this one began with.
    write(tmp_path, code)
    script = (
        "import sys; from pathlib import Path; from types import ModuleType\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "sys.modules['__main__'] = ModuleType('__main__')\n"
        "from support.python_models import FakeHost, asked, spec_of\n"
        "from halimede.backends.python.runner import make_runner\n"
        "host, folder = FakeHost(), Path(sys.argv[1])\n"
        "runner = make_runner(spec_of(folder, folder / 'm' / '1' / 'model.py'), host)\n"
        "print(runner.execute([asked()]), host.logs)\n"
    )
    tests = str(Path(__file__).resolve().parents[3])
    run = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path), tests],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "('INFO', '7 float32 this works in the process of a model only')" in run.stdout, run.stdout + run.stderr


def test_the_native_names_have_their_own_module(tmp_path):
    code = "import c_python_backend_utils as c\nassert c.Tensor is pb.Tensor\n" + body("return []")
    assert runner_of(tmp_path, code).is_async is False


def test_error_in_finalize_is_only_logged(tmp_path):
    host = FakeHost()
    final = "    def finalize(self): pb.Logger.log_info('finalized'); raise SystemExit('late')\n"
    runner_of(tmp_path, body("return []") + final, host).close()
    assert host.logs[0] == ("INFO", "finalized")
    assert "finalize failed" in host.logs[1][1]
    runner_of(tmp_path, body("return []")).close()
