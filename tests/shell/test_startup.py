"""The tables that the server prints once its models are loaded."""

import logging
from importlib.util import find_spec
from pathlib import Path

import pytest

import halimede.backends.identity
from halimede import __version__
from halimede.core.observe.log_lines import LogLine, Severity, render_default
from halimede.core.types import ModelIndexEntry, ModelReadyState, ServerMetadata
from halimede.log import PACKAGE, LogHandler, LogOutput, LogWriter
from halimede.processes.output import log as prints_log
from halimede.settings import ModelControlMode, Settings
from halimede.start_report import MOST_KEPT, TerminalStart
from halimede.startup import (
    backend_rows,
    failed_loads,
    model_rows,
    option_rows,
    termination_message,
    unknown_settings_in,
)
from halimede.termination_message import MAX_BYTES, write_message


def test_options_have_the_names_of_tritons_table() -> None:
    settings = Settings(
        model_repository=(Path("/models"), Path("/more")),
        model_control_mode=ModelControlMode.EXPLICIT,
        model_config_name="cpu",
        disable_auto_complete_config=True,
        min_supported_compute_capability=(7, 5),
        strict_readiness=False,
        drain_delay_secs=2.5,
    )
    assert option_rows(settings, ServerMetadata("here", "1.0", ("statistics", "parameters"))) == [
        ("server_id", "here"),
        ("server_version", "1.0"),
        ("halimede_version", __version__),
        ("server_extensions", "statistics parameters"),
        ("model_repository_path[0]", "/models"),
        ("model_repository_path[1]", "/more"),
        ("model_control_mode", "MODE_EXPLICIT"),
        ("strict_model_config", "1"),
        ("model_config_name", "cpu"),
        ("rate_limit", "OFF"),
        ("min_supported_compute_capability", "7.5"),
        ("strict_readiness", "0"),
        ("drain_delay", "2.5"),
        ("exit_timeout", "25"),
        ("cache_enabled", "0"),
    ]


def test_settings_that_no_backend_has_are_named(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.py").touch()

    def warnings(backend: str, **settings: str) -> list[str]:
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        return unknown_settings_in(Settings(backend_config={backend: given}, backend_directory=tmp_path))

    assert warnings("onnxruntime", default_max_batch_size="8", intra_op_threads="2") == [
        "--backend-config=onnxruntime,intra-op-threads has no effect: backend 'onnxruntime' has no such setting; did "
        "you mean 'intra-op-thread-count'?"
    ]
    assert warnings("", default_max_batch_size="8", gpu_memory_fraction="0.5") == []
    assert warnings("", gpu_memory="0.5") == [
        "--backend-config=gpu-memory has no effect: the backends have no such setting; did you mean "
        "'gpu-memory-fraction'?"
    ]
    assert warnings("mine", x="1") == ["--backend-config=mine,x has no effect: backend 'mine' has no such setting"]
    (missing,) = warnings("onnx", x="1", y="2")
    assert missing.startswith("--backend-config=onnx,x, y has no effect: unable to find backend library for backend")


def test_model_file_is_shown_as_the_repository() -> None:
    rows = dict(option_rows(Settings(model_file=Path("net.onnx")), ServerMetadata("triton", "1.0", ())))
    assert rows["model_file"] == "net.onnx"
    assert "model_repository_path[0]" not in rows


def test_backends_are_listed_with_path_and_settings() -> None:
    settings = Settings(backend_config={"": {"a": "1", "b": "1"}, "identity": {"b": "2"}})
    rows = {name: (path, config) for name, path, config in backend_rows(settings)}
    assert rows["identity"] == (halimede.backends.identity.__file__, '{"cmdline":{"a":"1","b":"2"}}')
    spec = find_spec("halimede.backends.onnxruntime")
    assert rows["onnxruntime"] == (spec.origin, '{"cmdline":{"a":"1","b":"1"}}')


def test_models_state_is_shown_with_its_reason() -> None:
    index = [
        ModelIndexEntry("a", "1", ModelReadyState.READY),
        ModelIndexEntry("a", "2", ModelReadyState.UNAVAILABLE, "broken"),
    ]
    assert model_rows(index) == [("a", "1", "READY"), ("a", "2", "UNAVAILABLE: broken")]


def test_unrequested_model_has_no_row() -> None:
    assert model_rows([ModelIndexEntry("never"), ModelIndexEntry("a", "1", ModelReadyState.READY)]) == [
        ("a", "1", "READY")
    ]


def test_termination_message_names_each_failed_version() -> None:
    failed = ModelReadyState.UNAVAILABLE
    index = [
        ModelIndexEntry("a", "1", ModelReadyState.READY),
        ModelIndexEntry("a", "2", failed, "broken"),
        ModelIndexEntry("b", "", failed, "no version"),
        ModelIndexEntry("c", "1", failed, ""),
    ]
    failures = failed_loads(index)
    assert failures == ["a version 2: broken", "b: no version"]
    assert termination_message(failures) == "failed to load a version 2: broken\nfailed to load b: no version"


def test_termination_message_is_short_and_in_the_kubelets_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr("halimede.termination_message.TERMINATION_LOG", log)
    write_message("unused")
    assert not log.exists()
    log.touch()
    write_message("é" * MAX_BYTES)
    assert log.read_bytes() == "é".encode() * (MAX_BYTES // 2)


def test_a_start_at_a_terminal_keeps_a_bounded_number_of_problems(tmp_path: Path) -> None:
    log = tmp_path / "log"
    handler = LogHandler(LogWriter(LogOutput(log), render_default), frozenset(Severity), on_terminal=True)
    levels = {each: each.level for each in (logging.getLogger(PACKAGE), prints_log)}
    try:
        start = TerminalStart(handler)
        for number in range(MOST_KEPT + 1):
            handler.deliver(LogLine(0, Severity.WARNING, 1, "f.py", 1, f"number {number}"))
        handler.flush()
        assert log.read_text().endswith(f'f.py:1] "number {MOST_KEPT}"\n')
        assert log.read_text().count("\n") == 1
        start.end()
        handler.deliver(LogLine(0, Severity.WARNING, 1, "f.py", 1, "as usual"))
        handler.flush()
        lines = log.read_text().splitlines()
        assert [lines[1].endswith("warning:\x1b[0m number 0"), len(lines)] == [True, MOST_KEPT + 2]
        assert lines[-1].endswith('f.py:1] "as usual"')
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
