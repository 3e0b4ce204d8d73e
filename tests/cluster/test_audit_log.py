"""The audit log that tests read while the API server writes it."""

from pathlib import Path

from cluster.own import whole_lines


def test_an_incomplete_log_line_is_read_later(tmp_path: Path) -> None:
    (tmp_path / "audit.log").write_text('{"stage":"ResponseComplete"}\n{"stage":"Resp')
    assert whole_lines(tmp_path / "audit.log") == ['{"stage":"ResponseComplete"}']
