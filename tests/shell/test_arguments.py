"""The syntax of the command line, which is getopt's, and conflicts between flags that are each valid."""

from pathlib import Path

import pytest

from halimede.commands.assemble import assemble
from halimede.commands.parse import parse
from halimede.settings import ModelControlMode, Settings
from support.command_line import complaint, complaints, settings


def test_repository_is_the_only_required_flag(tmp_path: Path) -> None:
    assert settings("--model-repository", str(tmp_path)) == Settings(model_repository=(tmp_path,))


def test_one_model_file_needs_no_repository(tmp_path: Path) -> None:
    model = tmp_path / "digits.onnx"
    model.touch()
    assert settings(str(model)) == Settings(model_file=model)
    assert settings("--disable-auto-complete-config", str(model)) == Settings(
        model_file=model, disable_auto_complete_config=True
    )


def test_a_directory_that_is_a_model_file_needs_no_repository(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "saved_model.pb").touch()
    assert settings(str(tmp_path / "exported")) == Settings(model_file=tmp_path / "exported")
    assert "a directory; use --model-repository for a repository" in complaint(str(tmp_path))


def test_a_uri_in_place_of_a_model_file_names_the_ways_to_serve_one() -> None:
    assert "(a URI; use --model-repository for a store, `halimede fetch` for a model)" in complaint(
        "s3://bucket/models"
    )


def test_the_folder_of_a_model_is_told_from_a_repository(tmp_path: Path) -> None:
    (tmp_path / "double" / "1").mkdir(parents=True)
    text = complaint(str(tmp_path / "double"))
    assert f"(a model's folder; serve the folder above: --model-repository={tmp_path})" in text


def test_the_only_model_in_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "onnx").mkdir()
    (tmp_path / "onnx" / "model.onnx").touch()
    (tmp_path / "config.json").touch()
    assert f"for a repository, or give the model in it: {tmp_path / 'onnx'})" in complaint(str(tmp_path))
    assert settings(str(tmp_path / "onnx")) == Settings(model_file=tmp_path / "onnx")


def test_value_follows_an_equals_sign_or_a_space() -> None:
    behind_sign = settings("--model-repository=.", "--id=a", "--http-port=1", "--allow-grpc=false")
    behind_space = settings("--model-repository", ".", "--id", "a", "--http-port", "1", "--allow-grpc", "false")
    assert behind_sign == behind_space == Settings(model_repository=(Path(),), id="a", http_port=1, allow_grpc=False)


def test_a_value_may_hold_anything() -> None:
    given = settings(
        "--model-repository=.",
        "--id=--http-port=1",
        "--backend-config",
        "dir=/x=y,z",
        "--load-model=a=b",
        "--model-control-mode=explicit",
    )
    assert (given.id, given.backend_config, given.load_model) == ("--http-port=1", {"": {"dir": "/x=y,z"}}, ("a=b",))


def test_booleans_are_read_in_any_case() -> None:
    for words, value in (("true True TRUE on ON 1", True), ("false False FALSE off OFF 0", False)):
        for word in words.split():
            assert settings("--model-repository=.", "--allow-http", word).allow_http is value


def test_a_boolean_without_a_value_is_true() -> None:
    given = settings("--reuse-http-port", "--model-repository=.", "--reuse-grpc-port")
    assert (given.reuse_http_port, given.reuse_grpc_port) == (True, True)
    assert (
        settings("--model-repository=.", "--disable-auto-complete-config=false").disable_auto_complete_config is False
    )


def test_verbose_takes_a_level_a_boolean_or_nothing() -> None:
    written = (
        ["--log-verbose", "0"],
        ["--log-verbose=3"],
        ["--log-verbose=true"],
        ["--log-verbose"],
        ["--log-verbose", "--id=x"],
    )
    levels = [settings("--model-repository=.", *arguments).log_verbose for arguments in written]
    assert levels == [0, 3, 1, 1, 1]


def test_last_value_of_a_repeated_flag_counts_and_a_list_grows(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    given = settings(
        *("--http-port=1", "--http-port=2", f"--model-repository={tmp_path}", f"--model-store={other}"),
        *("--model-control-mode=none", "--model-control-mode=explicit", "--load-model=a", "--load-model=b"),
        *("--backend-config=x,k=1", "--backend-config=x,k=2", "--backend-config=j=3"),
    )
    assert given == Settings(
        http_port=2,
        model_repository=(tmp_path, other),
        model_control_mode=ModelControlMode.EXPLICIT,
        load_model=("a", "b"),
        backend_config={"x": {"k": "2"}, "": {"j": "3"}},
    )


def test_unambiguous_prefix_of_a_flag_is_accepted() -> None:
    assert settings("--model-repo=.", "--http-po", "1") == settings("--model-repository=.", "--http-port=1")
    assert complaints("--model-repository=.", "--grpc-use=true", "--model=x") == [
        'Bad option: "--grpc-use".',
        'Bad option: "--model".',
    ]


def test_arguments_after_two_dashes_are_not_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("--id").touch()
    assert settings("--", "--id") == Settings(model_file=Path("--id"))


@pytest.mark.parametrize(
    ("mistyped", "meant"),
    [
        ("--htp-port", "--http-port"),
        ("--htpt-port", "--http-port"),
        ("--http-portt", "--http-port"),
        ("-http-port", "--http-port"),
        ("--http_port", "--http-port"),
        ("--HTTP-Port", "--http-port"),
        ("--httpport", "--http-port"),
        ("--model_repository", "--model-repository"),
        ("--model-repositery", "--model-repository"),
        ("--metric-port", "--metrics-port"),
        ("--load-models", "--load-model"),
        ("--exit-timeout-sec-s", "--exit-timeout-secs"),
    ],
)
def test_misspelled_flag_gets_a_suggestion(mistyped: str, meant: str) -> None:
    assert complaint("--model-repository=.", mistyped, "1") == f'Bad option: "{mistyped}". Did you mean {meant}?'


@pytest.mark.parametrize(
    "unknown",
    [
        "--metrics-host",
        "--http-infer-thread-count",
        "--http-use-ssl",
        "--http-restricted-protocol",
        "--http-max-connection-age",
        "--allow-tpu-metrics",
        "--ip",
        "--port",
        "--log-level",
        "-p",
    ],
)
def test_unrelated_name_gets_no_suggestion(unknown: str) -> None:
    assert complaint("--model-repository=.", f"{unknown}=1") == f'Bad option: "{unknown}".'


def test_a_missing_value_is_named_even_if_a_flag_follows() -> None:
    assert complaints("--id", "--http-port", "--grpc-port=1", "--metrics-port") == [
        "Option '--id' requires an argument.",
        "Option '--http-port' requires an argument.",
        "Option '--metrics-port' requires an argument.",
    ]


def test_every_mistake_is_reported() -> None:
    assert complaints(
        *("--http-port=x", "--nonsense", "1", "--allow-client-shm", "--model-repository=/no/where", "explicit", "more")
    ) == [
        "--http-port: Invalid option value. Got x; expected an integer",
        'Bad option: "--nonsense".',
        "--model-repository: repository path is not a valid directory: /no/where",
        "Unexpected argument: explicit (no such file or directory)",
        "Unexpected argument: more",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--model-repository must be specified"),
        (".", "Unexpected argument: . (a directory; use --model-repository for a repository)"),
        (
            "--model-repository /no/where --exit-on-error=false",
            "--model-repository: repository path is not a valid directory: /no/where",
        ),
        ("/dev/null", "Unexpected argument: /dev/null (neither a flag nor a model file)"),
        ("/no/where.onnx", "Unexpected argument: /no/where.onnx (no such file or directory)"),
        (
            "--model-repository . pyproject.toml",
            "--model-repository and the model file pyproject.toml exclude each other",
        ),
        (
            "--model-repository . --load-model m",
            "Use of '--load-model' requires setting '--model-control-mode=explicit' as well.",
        ),
        (
            "--model-repository . --model-control-mode explicit --load-model * --load-model m",
            "--load-model: '*' loads all models and must be alone",
        ),
        (
            "--model-repository . --grpc-port 8000",
            "The server cannot listen to HTTP requests and GRPC requests at the same address and port 0.0.0.0:8000",
        ),
        (
            "--model-repository . --metrics-port 8001",
            "The server cannot listen to GRPC requests and metrics requests at the same address and port 0.0.0.0:8001",
        ),
        (
            "--model-repository . --http-address unix:/run/x --grpc-address unix:/run/../run/x --metrics-address ::",
            "The server cannot listen to HTTP requests and GRPC requests at the same address unix:/run/x",
        ),
        (
            "--model-repository . --http-address unix:/run/x",
            "The server cannot listen to HTTP requests and metrics requests at the same address unix:/run/x"
            "; set a --metrics-address for metrics",
        ),
    ],
)
def test_conflicting_flags_are_named(arguments: str, expected: str) -> None:
    assert complaint(*arguments.split()) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        "--grpc-port 8000 --grpc-address 127.0.0.1",
        "--grpc-port 8000 --allow-http=false",
        "--http-port 0 --grpc-port 0 --metrics-port 0",
        "--http-address unix:/run/http --grpc-address unix:/run/grpc --metrics-address unix:/run/metrics",
        "--http-address unix:/run/x --grpc-address unix:/run/x --allow-grpc=false --metrics-address 127.0.0.1",
        "--http-address unix:8001 --metrics-address 0.0.0.0",
        f"--http-address unix:/{'x' * 106} --metrics-address ::1",
    ],
)
def test_services_on_different_addresses_do_not_conflict(arguments: str) -> None:
    given = settings("--model-repository=.", *arguments.split())
    assert given.model_repository == (Path(),)


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    """Arguments for three files, whose content is not checked here."""
    arguments = {}
    for name in ("server-cert", "server-key", "root-cert"):
        (tmp_path / name).touch()
        arguments[name] = f"--grpc-{name}={tmp_path / name}"
    return arguments


def test_encryption_takes_a_certificate_and_a_key(pem: dict[str, str], tmp_path: Path) -> None:
    given = settings("--model-repository=.", "--grpc-use-ssl", pem["server-cert"], pem["server-key"])
    assert given == Settings(
        model_repository=(Path(),),
        grpc_use_ssl=True,
        grpc_server_cert=tmp_path / "server-cert",
        grpc_server_key=tmp_path / "server-key",
    )


def test_mutual_authentication_implies_encryption(pem: dict[str, str], tmp_path: Path) -> None:
    given = settings("--model-repository=.", "--grpc-use-ssl-mutual=true", *pem.values())
    assert given == Settings(
        model_repository=(Path(),),
        grpc_use_ssl=True,
        grpc_use_ssl_mutual=True,
        grpc_server_cert=tmp_path / "server-cert",
        grpc_server_key=tmp_path / "server-key",
        grpc_root_cert=tmp_path / "root-cert",
    )


def test_encryption_names_each_file_that_is_missing(pem: dict[str, str]) -> None:
    assert complaints("--model-repository=.", "--grpc-use-ssl") == [
        "--grpc-use-ssl requires --grpc-server-cert",
        "--grpc-use-ssl requires --grpc-server-key",
    ]
    assert complaints("--model-repository=.", "--grpc-use-ssl-mutual", pem["server-cert"]) == [
        "--grpc-use-ssl-mutual requires --grpc-server-key",
        "--grpc-use-ssl-mutual requires --grpc-root-cert",
    ]


def test_certificate_without_effect_is_an_error(pem: dict[str, str]) -> None:
    without = "requires --grpc-use-ssl (or --grpc-use-ssl-mutual), without which nothing is encrypted"
    assert complaints("--model-repository=.", "--grpc-use-ssl=false", *pem.values()) == [
        f"--grpc-server-cert {without}",
        f"--grpc-server-key {without}",
        f"--grpc-root-cert {without}",
    ]


def test_root_certificate_without_effect_gives_a_notice(pem: dict[str, str]) -> None:
    given = settings("--model-repository=.", "--grpc-use-ssl", *pem.values())
    assert given.notices == (
        "--grpc-root-cert has no effect without --grpc-use-ssl-mutual: clients are not asked for a certificate",
    )


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert complaints(
        *("--model-repository=.", "--grpc-use-ssl", "--grpc-server-cert=/no/cert", f"--grpc-server-key={tmp_path}")
    ) == [
        "--grpc-server-cert: file does not exist: /no/cert",
        f"--grpc-server-key: is a directory, expected a file: {tmp_path}",
    ]


def test_a_list_of_devices_comes_from_its_variable(tmp_path: Path) -> None:
    devices = tmp_path / "devices.json"
    devices.write_text("[]")
    given, problems = assemble(parse(["--model-repository=."]), {"HALIMEDE_DEVICE_LIST": str(devices)})
    assert (given, problems) == (Settings(model_repository=(Path(),), device_list=devices), [])


def test_a_missing_device_list_is_named_by_its_variable() -> None:
    _, problems = assemble(parse(["--model-repository=."]), {"HALIMEDE_DEVICE_LIST": "/no/list.json"})
    assert problems == ["HALIMEDE_DEVICE_LIST: file does not exist: /no/list.json"]


@pytest.mark.parametrize(
    ("variable", "field"),
    [
        ("TRITONSERVER_DELAY_SCHEDULER", "delay_scheduler"),
        ("TRITONSERVER_BACKLOG_DELAY_SCHEDULER", "backlog_delay_scheduler"),
    ],
)
def test_the_delays_of_schedulers_come_from_their_variables(variable: str, field: str) -> None:
    def delayed(value: str) -> tuple[int, tuple[str, ...]]:
        given, problems = assemble(parse(["--model-repository=."]), {variable: value})
        assert problems == []
        return getattr(given, field), given.notices

    assert [delayed(value) for value in ("", "0", "4", "9999999999")] == [(0, ()), (0, ()), (4, ()), (2**31 - 1, ())]
    ignored = variable + ": '{}' is not a number of requests; it is ignored"
    for value in ("four", "-1", "9" * 11):
        assert delayed(value) == (0, (ignored.format(value),))


def test_environment_variables_of_triton_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CLOUD_CREDENTIAL_PATH", "/x")
    monkeypatch.setenv("AIP_HTTP_PORT", "1")
    assert settings("--model-repository=.") == Settings(model_repository=(Path(),))


def test_environment_of_vertex_ai_is_reported() -> None:
    vertex = {"AIP_MODE": "PREDICTION"}

    def notices(*flags: str) -> tuple[str, ...]:
        given, problems = assemble(parse(["--model-repository=.", *flags]), vertex)
        assert problems == []
        return given.notices

    assert notices() == (
        "AIP_MODE=PREDICTION has no effect: the Vertex AI endpoint is not supported yet; --allow-vertex-ai=false turns "
        "this warning off",
    )
    assert notices("--allow-vertex-ai=true") == (
        "--allow-vertex-ai=true has no effect: the Vertex AI endpoint is not supported yet",
    )
    assert notices("--allow-vertex-ai=false") == ()
