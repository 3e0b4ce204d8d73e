"""The command line, from text to Settings, and what it says about mistakes."""

import subprocess
import sys
from pathlib import Path

import click
import pytest

from halimede import __version__
from halimede.commands.serve import build_settings, serve
from halimede.settings import ModelControlMode, Settings


def settings(*arguments: str, **environment: str) -> Settings:
    context = serve.make_context("serve", list(arguments))
    return build_settings(context.params, environment)


def complaint(*arguments: str, **environment: str) -> str:
    with pytest.raises(click.UsageError) as caught:
        settings(*arguments, **environment)
    assert caught.value.exit_code == 2
    return caught.value.format_message()


def test_a_repository_is_all_that_must_be_given(tmp_path: Path) -> None:
    assert settings("--model-repository", str(tmp_path)) == Settings(model_repository=(tmp_path,))


def test_every_flag_fills_its_setting(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    devices = tmp_path / "devices.json"
    devices.write_text("[]")
    arguments = (
        f"--model-repository={tmp_path} --model-store {other} --model-control-mode=explicit "
        "--load-model=a --load-model b --model-load-thread-count 3 --disable-auto-complete-config "
        "--exit-on-error=false --strict-readiness 0 --exit-timeout-secs 7 --id edge "
        "--allow-http=on --http-address 127.0.0.1 --http-port 1 --http-max-input-size 1024 "
        "--allow-grpc=OFF --grpc-address ::1 --grpc-port 2 --grpc-max-input-size 4096 "
        "--allow-metrics True --metrics-address 10.0.0.1 --metrics-port 3 --metrics-interval-ms 500 "
        "--allow-gpu-metrics=false --allow-cpu-metrics=FALSE "
        "--log-verbose=2 --log-info=off --log-warning=0 --log-error=1 "
        "--backend-config=onnxruntime,threads=4 --backend-config dir=/x=y,z --backend-config onnxruntime,arena=0"
    )
    assert settings(*arguments.split(), HALIMEDE_DEVICE_LIST=str(devices)) == Settings(
        model_repository=(tmp_path, other),
        model_control_mode=ModelControlMode.EXPLICIT,
        load_model=("a", "b"),
        disable_auto_complete_config=True,
        model_load_thread_count=3,
        exit_on_error=False,
        strict_readiness=False,
        exit_timeout_secs=7.0,
        id="edge",
        allow_http=True,
        http_address="127.0.0.1",
        http_port=1,
        http_max_input_size=1024,
        allow_grpc=False,
        grpc_address="::1",
        grpc_port=2,
        grpc_max_input_size=4096,
        allow_metrics=True,
        metrics_address="10.0.0.1",
        metrics_port=3,
        allow_gpu_metrics=False,
        allow_cpu_metrics=False,
        metrics_interval_ms=500,
        log_verbose=2,
        log_info=False,
        log_warning=False,
        log_error=True,
        backend_config={"onnxruntime": {"threads": "4", "arena": "0"}, "": {"dir": "/x=y,z"}},
        device_list=devices,
    )


def test_one_model_file_needs_no_repository(tmp_path: Path) -> None:
    model = tmp_path / "digits.onnx"
    model.touch()
    assert settings(str(model)) == Settings(model_file=model)


def test_metrics_listen_where_http_does(tmp_path: Path) -> None:
    assert settings("--model-repository", str(tmp_path), "--http-address", "127.0.0.1") == Settings(
        model_repository=(tmp_path,), http_address="127.0.0.1", metrics_address="127.0.0.1"
    )


@pytest.mark.parametrize(("value", "disabled"), [("true", True), ("0", False)])
def test_strict_model_config_is_the_old_name_of_disabling_completion(
    tmp_path: Path, value: str, disabled: bool
) -> None:
    given = settings("--model-repository", str(tmp_path), f"--strict-model-config={value}")
    assert given == Settings(model_repository=(tmp_path,), disable_auto_complete_config=disabled)


def test_verbose_takes_a_level_or_a_boolean(tmp_path: Path) -> None:
    levels = [
        settings(f"--model-repository={tmp_path}", f"--log-verbose={text}").log_verbose
        for text in ("0", "1", "3", "true", "False")
    ]
    assert levels == [0, 1, 3, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "--model-repository must be specified"),
        ("--model-repository /no/where", "--model-repository: repository path is not a valid directory: /no/where"),
        ("--model-repository=", "--model-repository: repository path is not a valid directory: "),
        ("/no/where.onnx", "FILE: model file does not exist: /no/where.onnx"),
        (".", "FILE: a directory, which is no model file: .; right for a repository is --model-repository"),
        ("--model-repository . pyproject.toml", "--model-repository and the model file pyproject.toml exclude"),
        ("--model-repository . pyproject.toml second", "Unexpected argument: second"),
        (
            "--model-repository . --load-model m",
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (
            "--model-repository . --model-control-mode explicit --load-model * --load-model m",
            "--load-model: '*' loads all models and must be alone",
        ),
        ("--model-control-mode poll", "--model-control-mode: Invalid option value. Got poll; right are none, explicit"),
        ("--allow-http yes", "--allow-http: Invalid option value. Got yes; right are true, on, 1, false, off, 0"),
        ("--http-port x", "--http-port: Invalid option value. Got x; right is an integer"),
        ("--grpc-port 65536", "--grpc-port: Provided option value is out of bound. Got 65536; right is 0 to 65535"),
        ("--http-max-input-size 0", "--http-max-input-size: Provided option value is out of bound. Got 0; right is 1"),
        ("--model-load-thread-count=0", "--model-load-thread-count: Provided option value is out of bound. Got 0"),
        ("--exit-timeout-secs nan", "--exit-timeout-secs: Provided option value is out of bound. Got nan"),
        ("--exit-timeout-secs soon", "--exit-timeout-secs: Invalid option value. Got soon"),
        ("--log-verbose -1", "--log-verbose: Provided option value is out of bound. Got -1"),
        ("--backend-config onnxruntime", "--backend-config: option format is '<backend name>,<setting>=<value>'"),
        ("--backend-config ,k=v", "--backend-config: option format is '<backend name>,<setting>=<value>'"),
        ("--htp-port 1", 'Bad option: "--htp-port". Did you mean --http-port?'),
        ("--id", "Option '--id' requires an argument."),
        (
            "--model-repository . --grpc-port 8000",
            "The server cannot listen to HTTP requests and GRPC requests at the same address and port 0.0.0.0:8000",
        ),
        (
            "--model-repository . --metrics-port 8001",
            "The server cannot listen to GRPC requests and metrics requests at the same address and port 0.0.0.0:8001",
        ),
    ],
)
def test_a_mistake_is_named(arguments: str, says: str) -> None:
    assert complaint(*arguments.split()).startswith(says)


@pytest.mark.parametrize(
    "arguments",
    [
        "--grpc-port 8000 --grpc-address 127.0.0.1",
        "--grpc-port 8000 --allow-http=false",
        "--http-port 0 --grpc-port 0 --metrics-port 0",
    ],
)
def test_equal_ports_that_do_not_meet_are_no_collision(arguments: str) -> None:
    given = settings("--model-repository=.", *arguments.split())
    assert given.model_repository == (Path(),)


def test_a_missing_device_list_is_named_by_its_variable() -> None:
    says = complaint("--model-repository=.", HALIMEDE_DEVICE_LIST="/no/list.json")
    assert says == "HALIMEDE_DEVICE_LIST: file does not exist: /no/list.json"


def halimede(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "halimede", *arguments], capture_output=True, text=True, timeout=30, check=False
    )


def test_the_command_says_its_version() -> None:
    done = halimede("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"halimede {__version__}\n", "")


def test_help_lists_the_subcommands_and_their_flags() -> None:
    assert "serve" in halimede("--help").stdout
    shown = halimede("serve", "--help").stdout
    hidden = [flag for each in serve.params for flag in each.opts if flag.startswith("--") and flag not in shown]
    assert hidden == []


def test_a_mistake_ends_the_command_with_code_2() -> None:
    done = halimede("serve")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "Error: --model-repository must be specified")


def test_an_unknown_subcommand_is_named() -> None:
    done = halimede("server")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'server'" in done.stderr


def test_help_and_mistakes_import_no_serving_library() -> None:
    program = (
        "import sys\n"
        "from halimede.cli import main\n"
        "main(['serve', '--help'], standalone_mode=False)\n"
        "heavy = {'numpy', 'grpc', 'uvloop', 'onnxruntime', 'google.protobuf', 'rich', 'halimede.app'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr == "[]\n"
