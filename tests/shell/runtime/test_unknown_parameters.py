"""Parameters that nobody reads give one warning per load."""

import logging
from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.runtime.prepare import LoadOptions, load_model
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.models import add_identity
from support.served import parameter


def test_a_load_names_unknown_parameters_in_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = [parameter(key, "1") for key in ("execute_delay", "creation_delay_seconds", "SPINS")]
    add_identity(tmp_path, "m", extra="\n".join(given))
    with caplog.at_level(logging.WARNING):
        load_model(ModelRepository((tmp_path,)).find("m"), LoadOptions(Inventory(()), {}, autocomplete=True), Abandon())
    assert [record.message for record in caplog.records] == [
        "model 'm': parameter 'execute_delay' has no effect: backend 'identity' has no such parameter; did you mean "
        "'execute_delay_ms'?; parameter 'creation_delay_seconds' has no effect: backend 'identity' has no such "
        "parameter; did you mean 'creation_delay_sec'?; parameter 'SPINS' has no effect: backend 'identity' has no "
        "such parameter; did you mean 'SPIN'?"
    ]
