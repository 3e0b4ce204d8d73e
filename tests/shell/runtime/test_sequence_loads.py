"""The load of models of sequences: the files of their initial states."""

from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.core.repository.load_errors import ConfigError
from halimede.runtime.prepare import LoadOptions, PreparedModel, load_model
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.models import add_identity

STATE = """
sequence_batching { state {
  input_name: "s" output_name: "t" data_type: TYPE_FP32 dims: [ 1 ]
  initial_state { name: "i" data_type: TYPE_FP32 dims: [ 1 ] data_file: "f" }
} }
"""


def load(folder: Path, content: bytes | None) -> PreparedModel:
    add_identity(folder, "m", dims="1", extra=STATE)
    if content is not None:
        (folder / "m" / "initial_state").mkdir()
        (folder / "m" / "initial_state" / "f").write_bytes(content)
    options = LoadOptions(Inventory(()), {}, autocomplete=True)
    return load_model(ModelRepository([folder]).find("m"), options, Abandon())


def test_a_version_has_the_initial_states_of_its_sequences(tmp_path: Path) -> None:
    [version] = load(tmp_path, b"abcd").versions
    assert version.state_files == {"s": b"abcd"}
    version.close()


def test_a_wrong_file_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, b"abc")
    path = tmp_path / "m" / "initial_state" / "f"
    assert caught.value.message == f"the initial state of 's': {path} has 3 bytes, FP32 of shape [1,1] has 4"
    with pytest.raises(ConfigError, match="the initial state of 's' cannot be read"):
        load(tmp_path / "other", None)
