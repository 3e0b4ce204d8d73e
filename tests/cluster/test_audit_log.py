"""The audit log that tests read while the API server writes it."""

from pathlib import Path

from cluster.own import GrowingLog


def test_each_line_of_a_growing_log_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_text('{"stage":"RequestReceived"}\n{"stage":"Resp')
    log = GrowingLog(path)
    assert log.read() == ['{"stage":"RequestReceived"}']
    assert log.read() == []
    with path.open("a") as more:
        more.write('onseComplete"}\n{}\n')
    assert log.read() == ['{"stage":"ResponseComplete"}', "{}"]
    assert log.read() == []
