"""Every flag of Triton: honoured, or accepted without effect here."""

import dataclasses
import re
from ipaddress import ip_network
from pathlib import Path

import pytest

from halimede.commands.flag import Flag, FlagTreatment
from halimede.commands.flags import GROUPS, all_flags
from halimede.core.types import ApiCategory, Secret, ServerMetadata
from halimede.front_processes.main import Order
from halimede.front_processes.values import decode, encode
from halimede.settings import AccessLevel, CompressionLevel, LogFormat, MetricsConfig, ModelControlMode, Settings
from support.command_line import complaint, settings

HONOURED = """
    --help --id --exit-timeout-secs --exit-on-error --strict-readiness
    --log-verbose --log-info --log-warning --log-error --log-format --log-file
    --model-repository --model-store --model-control-mode --load-model --model-config-name --model-load-thread-count
    --model-load-retry-count --disable-auto-complete-config --strict-model-config
    --allow-http --http-address --http-port --reuse-http-port --http-header-forward-pattern --http-max-input-size
    --http-restricted-api
    --allow-grpc --grpc-address --grpc-port --reuse-grpc-port --grpc-header-forward-pattern
    --grpc-max-response-pool-size --grpc-use-ssl --grpc-use-ssl-mutual --grpc-server-cert --grpc-server-key
    --grpc-root-cert --grpc-infer-response-compression-level --grpc-keepalive-time --grpc-keepalive-timeout
    --grpc-keepalive-permit-without-calls
    --grpc-http2-min-recv-ping-interval-without-data --grpc-http2-max-ping-strikes --grpc-max-connection-age
    --grpc-max-connection-age-grace --grpc-restricted-protocol
    --allow-metrics --allow-gpu-metrics --allow-cpu-metrics --metrics-address --metrics-port --metrics-interval-ms
    --metrics-config
    --backend-config --backend-directory --min-supported-compute-capability
"""
NO_EFFECT = """
    --repository-poll-secs --enable-peer-access --http-thread-count --grpc-infer-thread-count
    --grpc-infer-allocation-pool-size --grpc-http2-max-pings-without-data --repoagent-directory --cache-directory
    --pinned-memory-pool-byte-size --cuda-memory-pool-byte-size --cuda-virtual-address-size
    --buffer-manager-thread-count --host-policy
    --sagemaker-port --sagemaker-safe-port-range --sagemaker-thread-count
    --vertex-ai-port --vertex-ai-thread-count --vertex-ai-default-model
    --trace-file --trace-rate --trace-count --trace-log-frequency --rate-limit-resource
    --cache-config --response-cache-byte-size
"""
MISSING = """
    --model-namespacing --model-load-gpu-limit --trace-config --trace-level --rate-limit
    --allow-client-shm --allow-sagemaker --allow-vertex-ai
"""
OURS = (
    "-h --version --watch --drain-delay --grpc-max-input-size --grpc-stall-timeout-secs "
    "--grpc-message-timeout-secs --log-access --server-version --process-per-device --allow-pickle --frontend-processes "
    "--http-cors-origin --trusted-proxies --hang-timeout-secs --max-sequence-state-size --max-sequence-id-size "
    "--unload-wait-secs"
)


def test_every_flag_of_triton_has_its_treatment() -> None:
    expected = {
        **dict.fromkeys(HONOURED.split(), FlagTreatment.HONOURED),
        **dict.fromkeys(NO_EFFECT.split(), FlagTreatment.NO_EFFECT),
        **dict.fromkeys(MISSING.split(), FlagTreatment.NO_EFFECT),
        **dict.fromkeys(OURS.split(), FlagTreatment.HONOURED),
    }
    assert {name: flag.treatment for flag in all_flags() for name in flag.names} == expected


def test_table_explains_every_flag_and_its_treatment() -> None:
    rows: list[Flag] = [flag for flags in GROUPS.values() for flag in flags]
    assert [flag.name for flag in rows if not flag.help.endswith(".")] == []
    assert [flag.name for flag in rows if flag.treatment is not FlagTreatment.HONOURED and not flag.why] == []
    names = [name for flag in rows for name in flag.names]
    assert len(names) == len(set(names))


SECRET = Secret("key", "open=sesame: 1")
EFFECTS: dict[str, tuple[str, object]] = {
    "--load-model=a": ("load_model", ("a",)),
    "--model-config-name=edge": ("model_config_name", "edge"),
    "--watch": ("watch", True),
    "--model-load-thread-count=3": ("model_load_thread_count", 3),
    "--model-load-retry-count=2": ("model_load_retry_count", 2),
    "--unload-wait-secs=0.5": ("unload_wait_secs", 0.5),
    "--disable-auto-complete-config": ("disable_auto_complete_config", True),
    "--strict-model-config=true": ("disable_auto_complete_config", True),
    "--min-supported-compute-capability=7.5": ("min_supported_compute_capability", (7, 5)),
    "--process-per-device=true": ("process_per_device", True),
    "--allow-pickle=false": ("allow_pickle", False),
    "--backend-config=onnxruntime,threads=4": ("backend_config", {"onnxruntime": {"threads": "4"}}),
    "--backend-directory=/nowhere": ("backend_directory", Path("/nowhere")),
    "--id=edge": ("id", "edge"),
    "--exit-on-error=false": ("exit_on_error", False),
    "--strict-readiness=false": ("strict_readiness", False),
    "--drain-delay=0.5": ("drain_delay_secs", 0.5),
    "--exit-timeout-secs=7": ("exit_timeout_secs", 7.0),
    "--allow-http=false": ("allow_http", False),
    "--http-address=::1": ("http_address", "::1"),
    "--http-port=1": ("http_port", 1),
    "--reuse-http-port=true": ("reuse_http_port", True),
    "--http-max-input-size=1024": ("http_max_input_size", 1024),
    "--http-header-forward-pattern=x-.*": ("http_header_forward_pattern", re.compile("x-.*", re.IGNORECASE)),
    "--http-restricted-api=health:Key=open=sesame: 1": ("http_restricted_api", {ApiCategory.HEALTH: SECRET}),
    "--http-cors-origin=https://App.example:443": ("http_cors_origin", ("https://app.example",)),
    "--allow-grpc=false": ("allow_grpc", False),
    "--grpc-address=::1": ("grpc_address", "::1"),
    "--grpc-port=2": ("grpc_port", 2),
    "--reuse-grpc-port=true": ("reuse_grpc_port", True),
    "--grpc-max-input-size=4096": ("grpc_max_input_size", 4096),
    "--grpc-header-forward-pattern=x-.*": ("grpc_header_forward_pattern", re.compile("x-.*", re.IGNORECASE)),
    "--grpc-restricted-protocol=trace:Key=v": (
        "grpc_restricted_protocol",
        {ApiCategory.TRACE: Secret("triton-grpc-protocol-key", "v")},
    ),
    "--grpc-max-response-pool-size=8": ("grpc_max_response_pool_size", 8),
    "--grpc-infer-response-compression-level=high": (
        "grpc_infer_response_compression_level",
        CompressionLevel.HIGH,
    ),
    "--grpc-keepalive-time=1000": ("grpc_keepalive_time", 1000),
    "--grpc-keepalive-timeout=500": ("grpc_keepalive_timeout", 500),
    "--grpc-keepalive-permit-without-calls=true": ("grpc_keepalive_permit_without_calls", True),
    "--grpc-http2-min-recv-ping-interval-without-data=9": ("grpc_http2_min_recv_ping_interval_without_data", 9),
    "--grpc-http2-max-ping-strikes=5": ("grpc_http2_max_ping_strikes", 5),
    "--grpc-max-connection-age=60000": ("grpc_max_connection_age", 60_000),
    "--grpc-max-connection-age-grace=500": ("grpc_max_connection_age_grace", 500),
    "--frontend-processes=4": ("frontend_processes", 4),
    "--trusted-proxies=10.0.0.0/8, fd00::1": (
        "trusted_proxies",
        (ip_network("10.0.0.0/8"), ip_network("fd00::1")),
    ),
    "--hang-timeout-secs=3.5": ("hang_timeout_secs", 3.5),
    "--max-sequence-state-size=1000": ("max_sequence_state_size", 1000),
    "--max-sequence-id-size=100": ("max_sequence_id_size", 100),
    "--grpc-stall-timeout-secs=2.5": ("grpc_stall_timeout_secs", 2.5),
    "--grpc-message-timeout-secs=90": ("grpc_message_timeout_secs", 90),
    "--allow-metrics=false": ("allow_metrics", False),
    "--allow-gpu-metrics=false": ("allow_gpu_metrics", False),
    "--allow-cpu-metrics=false": ("allow_cpu_metrics", False),
    "--metrics-address=10.0.0.1": ("metrics_address", "10.0.0.1"),
    "--metrics-port=3": ("metrics_port", 3),
    "--metrics-interval-ms=500": ("metrics_interval_ms", 500),
    "--metrics-config=counter_latencies=false": ("metrics_config", MetricsConfig(counter_latencies=False)),
    "--metrics-config=histogram_latencies=false": ("metrics_config", MetricsConfig(histogram_latencies=False)),
    "--log-verbose=2": ("log_verbose", 2),
    "--log-info=false": ("log_info", False),
    "--log-warning=false": ("log_warning", False),
    "--log-error=false": ("log_error", False),
    "--log-format=json": ("log_format", LogFormat.JSON),
    "--log-file=./server.log": ("log_file", Path("server.log")),
    "--server-version=2.60.1": ("server_version", "2.60.1"),
    "--log-access=all": ("log_access", AccessLevel.ALL),
}
TOGETHER = """
    --help -h --version --model-repository --model-store --model-control-mode
    --grpc-use-ssl --grpc-use-ssl-mutual --grpc-server-cert --grpc-server-key --grpc-root-cert
"""
"""Also honoured, but tested below, with the flags that they need."""


def test_every_honoured_flag_is_tested() -> None:
    tested = {argument.split("=")[0] for argument in EFFECTS} | set(TOGETHER.split())
    honoured = {name for flag in all_flags() if flag.treatment is FlagTreatment.HONOURED for name in flag.names}
    assert tested == honoured


def test_front_end_processes_are_told_the_settings_as_they_are() -> None:
    several = {
        "model_repository": (Path("/models"), "s3://bucket"),
        "grpc_server_cert": Path("c.pem"),
        "notices": ("n",),
    }
    settings = Settings(**dict(EFFECTS.values()), **several)  # type: ignore[arg-type]
    order = Order(settings, ServerMetadata("triton", "1", ("a", "b")), 1, 2, {"HTTPService": 2})
    assert decode(Order, encode(Order, order)) == order


@pytest.mark.parametrize("argument", EFFECTS)
def test_a_flag_changes_its_setting_and_no_other(argument: str, tmp_path: Path) -> None:
    field, value = EFFECTS[argument]
    base = Settings(model_repository=(tmp_path,))
    fields: dict[str, object] = {field: value}
    arguments = [f"--model-repository={tmp_path}", argument]
    if field == "load_model":
        arguments.append("--model-control-mode=explicit")
        fields["model_control_mode"] = ModelControlMode.EXPLICIT
    if field == "http_address":
        # Metrics use the address of HTTP by default.
        fields["metrics_address"] = value
    if argument.startswith("--strict-model-config"):
        fields["notices"] = ("--strict-model-config is deprecated, use --disable-auto-complete-config",)
    assert getattr(base, field) != value
    assert settings(*arguments) == dataclasses.replace(base, **fields)


def test_zero_connection_age_means_no_limit() -> None:
    given = settings("--model-repository=.", "--grpc-max-connection-age=0", "--grpc-max-connection-age-grace=0")
    assert (given.grpc_max_connection_age, given.grpc_max_connection_age_grace) == (None, None)


def test_words_may_be_written_in_upper_and_lower_case() -> None:
    given = settings(
        *("--model-repository=.", "--model-control-mode=EXPLICIT", "--log-format=Json", "--rate-limit=OFF"),
        *("--grpc-infer-response-compression-level=High", "--trace-level=off", "--trace-config=level=off"),
    )
    assert given.model_control_mode is ModelControlMode.EXPLICIT
    assert given.log_format is LogFormat.JSON
    assert given.grpc_infer_response_compression_level is CompressionLevel.HIGH
    assert given.notices == ()


def test_an_interval_may_be_written_as_a_decimal() -> None:
    # Triton's help calls it a float, and it takes the whole milliseconds.
    assert settings("--model-repository=.", "--metrics-interval-ms=2500.9").metrics_interval_ms == 2500


WITHOUT_EFFECT = {
    "--repository-poll-secs": ("15", "15s"),
    "--enable-peer-access": ("false", "maybe"),
    "--http-thread-count": ("8", "0"),
    "--grpc-infer-thread-count": ("2", "129"),
    "--grpc-infer-allocation-pool-size": ("8", "-1"),
    "--grpc-http2-max-pings-without-data": ("2", "-1"),
    "--repoagent-directory": ("/opt/tritonserver/repoagents", None),
    "--cache-directory": ("/opt/tritonserver/caches", None),
    "--pinned-memory-pool-byte-size": ("268435456", "256M"),
    "--cuda-memory-pool-byte-size": ("0:67108864", "67108864"),
    "--cuda-virtual-address-size": ("0:67108864", "0:x"),
    "--buffer-manager-thread-count": ("0", "two"),
    "--host-policy": ("gpu_0,numa-node=1", "gpu_0"),
    "--sagemaker-port": ("8080", "80800"),
    "--sagemaker-safe-port-range": ("8000-8080", "8000"),
    "--sagemaker-thread-count": ("8", "8x"),
    "--vertex-ai-port": ("8080", "http"),
    "--vertex-ai-thread-count": ("8", "1_000"),
    "--vertex-ai-default-model": ("resnet", None),
    "--trace-file": ("/tmp/trace.json", None),
    "--trace-rate": ("1", "often"),
    "--trace-count": ("5", "-2"),
    "--trace-log-frequency": ("50", "-1"),
    "--rate-limit-resource": ("R1:4:0", None),
    "--cache-config": ("local,size=...", None),
    "--response-cache-byte-size": ("1048576", "-1"),
}


def test_every_flag_without_effect_is_tested() -> None:
    assert set(WITHOUT_EFFECT) == set(NO_EFFECT.split())


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_flag_without_effect_is_accepted_with_one_notice(name: str, tmp_path: Path) -> None:
    value, _ = WITHOUT_EFFECT[name]
    given = settings(f"--model-repository={tmp_path}", name, value)
    (notice,) = given.notices
    assert notice.startswith(f"{name}={value} has no effect: ")
    assert dataclasses.replace(given, notices=()) == Settings(model_repository=(tmp_path,))


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, (_, bad) in WITHOUT_EFFECT.items() if bad])
def test_value_of_a_flag_without_effect_is_checked(name: str, bad: str) -> None:
    expected = complaint("--model-repository=.", f"{name}={bad}")
    assert expected.startswith(f"{name}: ")
    assert f"Got {bad}; expected " in expected


def test_a_repeated_flag_without_effect_is_one_line() -> None:
    policies = ["--host-policy=gpu_0,numa-node=0", "--host-policy=gpu_1,cpu-cores=0-3,8"]
    (notice,) = settings("--model-repository=.", *policies).notices
    assert notice.startswith("--host-policy=gpu_0,numa-node=0, gpu_1,cpu-cores=0-3,8 has no effect: ")


def test_trace_settings_have_no_effect() -> None:
    given = settings(
        "--model-repository=.",
        *("--trace-config", "rate=100", "--trace-config=count=-1", "--trace-config=mode=triton"),
        *("--trace-config=triton,file=/p", "--trace-config=triton,log-frequency=50"),
        *("--trace-config=opentelemetry,resource=service.name=x", "--trace-config=level=OFF"),
    )
    (notice,) = given.notices
    assert notice.startswith("--trace-config=rate=100, count=-1, mode=triton, triton,file=/p, triton,log-frequency=50,")
    assert "OFF" not in notice


@pytest.mark.parametrize(
    "missing",
    [
        "--model-control-mode=poll",
        "--model-namespacing=true",
        "--model-load-gpu-limit=0:0.9",
        "--trace-config=level=TIMESTAMPS",
        "--trace-config=level=TENSORS",
        "--trace-level=TIMESTAMPS",
        "--rate-limit=execution_count",
        "--allow-client-shm=true",
        "--allow-sagemaker=true",
        "--allow-vertex-ai=1",
    ],
)
def test_a_flag_of_a_missing_feature_does_not_end_the_start(missing: str, tmp_path: Path) -> None:
    given = settings(f"--model-repository={tmp_path}", missing)
    (notice,) = given.notices
    assert re.match(rf"{re.escape(missing)} has no effect: \w", notice)
    assert dataclasses.replace(given, notices=()) == Settings(model_repository=(tmp_path,))


def test_mode_poll_says_what_is_served() -> None:
    assert settings("--model-repository=.", "--model-control-mode=POLL").notices == (
        "--model-control-mode=POLL has no effect: mode poll is not supported yet; the models that are there at the "
        "start are served, as in mode none, and with --watch also what changes later",
    )


def test_the_password_of_a_cache_is_not_shown() -> None:
    (notice,) = settings("--model-repository=.", "--cache-config=redis,password=hunter2").notices
    assert notice.startswith("--cache-config=redis,password=... has no effect: the response cache is not supported yet")
    mistyped = complaint("--model-repository=.", "--cache-config=redis:password=hunter2")
    assert mistyped == "--cache-config: option format is '<cache>,<setting>=<value>'"


def test_a_flag_that_leaves_a_missing_feature_off_gives_no_warning(tmp_path: Path) -> None:
    off = """
        --model-namespacing=false --trace-config=level=OFF --trace-level=OFF --rate-limit=off --allow-client-shm=false
        --allow-sagemaker=FALSE --allow-vertex-ai=0 --metrics-config=summary_latencies=false
        --metrics-config=histogram_latencies=on
    """
    assert settings(f"--model-repository={tmp_path}", *off.split()) == Settings(model_repository=(tmp_path,))


def test_the_value_of_a_flag_of_a_missing_feature_is_checked() -> None:
    for mistyped in (
        "--rate-limit=exec",
        "--rate-limit-resource=R1",
        "--model-load-gpu-limit=0:1.5",
        "--trace-config=level=ALL",
        "--trace-config=rate=often",
        "--trace-config=rates=1",
        "--trace-config=opentelemetry,",
        "--metrics-config=summary_latencies",
        "--metrics-config=counter_latency=true",
        "--metrics-config=counter_latencies=maybe",
    ):
        name = mistyped.split("=")[0]
        expected = complaint("--model-repository=.", mistyped)
        assert expected.startswith(f"{name}: ")
        assert "; expected " in expected


def test_the_last_metrics_setting_of_a_name_counts() -> None:
    given = settings(
        "--model-repository=.",
        *(f"--metrics-config=counter_latencies={value}" for value in ("false", "true", "false")),
        "--metrics-config=summary_latencies=false",
    )
    assert given.metrics_config == MetricsConfig(counter_latencies=False)


def test_summaries_are_accepted_with_one_warning() -> None:
    given = settings(
        "--model-repository=.",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01",
    )
    assert given.metrics_config == MetricsConfig()
    assert given.notices == (
        "--metrics-config=summary_latencies=true, summary_quantiles=0.5:0.05,0.9:0.01 has no effect: durations are "
        "published as counters and histograms, see halimede_request_duration_seconds and "
        "halimede_queue_duration_seconds, and not as summaries",
    )


def test_several_groups_of_restricted_apis_have_secrets_of_their_own() -> None:
    given = settings(
        "--model-repository=.",
        "--grpc-restricted-protocol=model-repository,model-config:Admin-Key=a:b",
        "--grpc-restricted-protocol",
        "inference:infer-key=two words",
    )
    admin = Secret("triton-grpc-protocol-admin-key", "a:b")
    assert given.grpc_restricted_protocol == {
        ApiCategory.MODEL_REPOSITORY: admin,
        ApiCategory.MODEL_CONFIG: admin,
        ApiCategory.INFERENCE: Secret("triton-grpc-protocol-infer-key", "two words"),
    }


@pytest.mark.parametrize("name", ["--http-restricted-api", "--grpc-restricted-protocol"])
def test_invalid_restriction_error_does_not_show_the_secret(name: str) -> None:
    form = "option format is '<api>[,<api>]*:<key>=<value>'"
    categories = ", ".join(category.value for category in ApiCategory)
    for value, expected in (
        ("health", form),
        ("health:key", form),
        (":key=hunter2", form),
        ("health:=hunter2", form),
        ("key=hunter2:health", form),
        ("heath:key=hunter2", f"unknown restricted api 'heath'; expected {categories}"),
        ("health,:key=hunter2", f"unknown restricted api ''; expected {categories}"),
        ("health:a key=hunter2", "'a key' cannot be the name of a header"),
        ("health:key=", "the value of 'key' cannot be sent in a header"),
        ("health:key= hunter2", "the value of 'key' cannot be sent in a header"),
        ("health:key=hünter2", "the value of 'key' cannot be sent in a header"),
        ("health,trace,health:key=hunter2", "api 'health' is in two groups"),
    ):
        complained = complaint("--model-repository=.", f"{name}={value}")
        assert complained.startswith(f"{name}: {expected}")
        assert "unter2" not in complained


def test_an_api_in_two_groups_is_an_error() -> None:
    expected = complaint(
        "--model-repository=.",
        "--http-restricted-api=model-repository,health:k1=v1",
        "--http-restricted-api=metadata,health:k2=v2",
    )
    assert expected == "--http-restricted-api: api 'health' is in two groups; expected one, as only one secret counts"


@pytest.mark.parametrize(
    ("mistake", "expected"),
    [
        ("--model-repository=/no/where", "repository path is not a valid directory: /no/where"),
        ("--model-repository=ftp://host/models", "ftp:// names no repository; expected a directory, s3://"),
        ("--model-repository=s3:///models", "'s3:///models' does not begin with the name of a bucket or container"),
        ("--model-repository=", "repository path is not a valid directory: it is empty"),
        ("--allow-http=yes", "Invalid option value. Got yes; expected true, on, 1, false, off, 0"),
        ("--http-port=x", "Invalid option value. Got x; expected an integer"),
        ("--http-port=8_000", "Invalid option value. Got 8_000; expected an integer"),
        ("--http-port= 80", "Invalid option value. Got  80; expected an integer"),
        ("--http-port=٨", "Invalid option value. Got ٨; expected an integer"),
        ("--http-port=", "Invalid option value. Got ; expected an integer"),
        ("--grpc-port=65536", "Provided option value is out of bound. Got 65536; expected 0 to 65535"),
        (f"--grpc-port={'9' * 5000}", "Provided option value is out of bound. Got 9999"),
        ("--http-max-input-size=0", "Provided option value is out of bound. Got 0; expected 1"),
        ("--model-load-thread-count=0", "Provided option value is out of bound. Got 0"),
        ("--model-load-retry-count=-1", "Provided option value is out of bound. Got -1"),
        ("--model-config-name=../x", "Invalid option value. Got ../x; expected a name"),
        ("--exit-timeout-secs=nan", "Invalid option value. Got nan; expected a number of seconds"),
        ("--exit-timeout-secs=-1", "Provided option value is out of bound. Got -1; expected 0 to 2147483647"),
        ("--drain-delay=1e999", "Provided option value is out of bound. Got 1e999"),
        ("--drain-delay=soon", "Invalid option value. Got soon; expected a number of seconds"),
        ("--metrics-interval-ms=0.9", "Provided option value is out of bound. Got 0.9; expected 1 to 2147483647"),
        ("--metrics-interval-ms=2s", "Invalid option value. Got 2s; expected a number of milliseconds"),
        ("--log-verbose=-1", "Provided option value is out of bound. Got -1"),
        ("--server-version=latest", "Invalid option value. Got latest; expected <major>.<minor>[.<patch>]"),
        ("--log-format=xml", "Invalid option value. Got xml; expected default, ISO8601, json"),
        ("--log-file=.", "is a directory, expected a file: ."),
        ("--log-file=/no/where/x.log", "directory does not exist: /no/where"),
        ("--model-control-mode=auto", "Invalid option value. Got auto; expected none, explicit"),
        ("--min-supported-compute-capability=7.55", "Invalid option value. Got 7.55; expected <major>.<minor>"),
        ("--min-supported-compute-capability=x", "Invalid option value. Got x; expected <major>.<minor>"),
        ("--backend-config=onnxruntime", "option format is '<backend name>,<setting>=<value>'"),
        ("--backend-config=,k=v", "option format is '<backend name>,<setting>=<value>'"),
        ("--http-header-forward-pattern=x-(", "Invalid regular expression 'x-('"),
        ("--grpc-max-response-pool-size=0", "Provided option value is out of bound. Got 0"),
        ("--grpc-stall-timeout-secs=0.5", "Provided option value is out of bound. Got 0.5; expected 1 to 2147483647"),
        (
            "--trusted-proxies=10.0.0.1/8",
            "Invalid option value. Got 10.0.0.1/8; expected addresses or networks, such as",
        ),
        ("--grpc-keepalive-time=0", "Provided option value is out of bound. Got 0"),
        ("--grpc-infer-response-compression-level=best", "Invalid option value. Got best; expected none, low, medium"),
        ("--http-address=", "address is empty; expected a host, an IP address or unix:<path>"),
        ("--grpc-address=unix:", "path of the unix socket is empty; expected unix:<path>"),
        (f"--metrics-address=unix:/{'ä' * 54}", "path of a unix socket has at most 107 bytes, this one has 109: /ä"),
    ],
)
def test_invalid_value_is_reported_with_the_valid_ones(mistake: str, expected: str) -> None:
    assert complaint(mistake).startswith(f"{mistake.split('=', maxsplit=1)[0]}: {expected}")


def test_a_compute_capability_may_go_without_its_minor_number() -> None:
    assert settings(
        "--model-repository=.", "--min-supported-compute-capability=9"
    ).min_supported_compute_capability == (
        9,
        0,
    )


@pytest.mark.parametrize(
    "wrong", ["app.example", "https://app.example/", "https://*.example", "https://a:b", "null", ""]
)
def test_an_origin_is_exactly_what_a_browser_sends(wrong: str) -> None:
    text = complaint("--model-repository=.", f"--http-cors-origin={wrong}")
    assert f"Got {wrong}; expected <scheme>://<host>[:<port>] without a path, or *" in text


def test_sites_for_cors_are_collected_in_lower_case() -> None:
    origins = ("http://LOCALHOST:3000", "http://a:80", "https://a:80", "http://[::1]:8080", "app://x", "*")
    given = settings("--model-repository=.", *(f"--http-cors-origin={each}" for each in origins))
    assert given.http_cors_origin == (
        *("http://localhost:3000", "http://a", "https://a:80", "http://[::1]:8080"),
        *("app://x", "*"),
    )
