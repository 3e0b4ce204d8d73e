"""Batching strategies are found among installed code, and libraries that Triton would load give a warning."""

import logging
from pathlib import Path

import pytest

from halimede.core.inventory import Inventory
from halimede.core.repository.load_errors import ConfigError, VersionError
from halimede.core.schedule.policy import StartHold
from halimede.core.types import ErrorCode
from halimede.runtime.prepare import LoadOptions, PreparedModel, load_model
from halimede.runtime.repository import ModelRepository
from halimede.workers.abandon import Abandon
from support.models import add_identity
from support.plugin import install_backend
from support.strategies import STRATEGY_GROUP, TENANTS


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def load(tmp_path: Path, extra: str, **options: int) -> PreparedModel:
    add_identity(tmp_path / "models", "m", extra=extra)
    entry = ModelRepository((tmp_path / "models",)).find("m")
    backends = tmp_path / "backends"
    return load_model(
        entry, LoadOptions(Inventory(()), {}, autocomplete=True, backend_directory=backends, **options), Abandon()
    )


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_backend(tmp_path / "site", "tenants", TENANTS, "Tenants", group=STRATEGY_GROUP)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


TENANT_BATCHES = "dynamic_batching { } " + parameter("BATCHING_STRATEGY", "tenants")


@pytest.mark.usefixtures("installed")
def test_each_version_gets_a_strategy_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "models" / "m" / "2").mkdir(parents=True)
    prepared = load(tmp_path, TENANT_BATCHES + "version_policy { all { } }", hold=StartHold(3))
    first, second = (version.strategy for version in prepared.versions)
    assert [type(each).__name__ for each in (first, second)] == ["Tenants", "Tenants"]
    assert first is not second
    assert [version.hold for version in prepared.versions] == [StartHold(3)] * 2


def test_no_strategy_is_made_unless_it_is_configured(tmp_path: Path) -> None:
    assert load(tmp_path, "dynamic_batching { }").versions[0].strategy is None


@pytest.mark.usefixtures("installed")
def test_unknown_strategy_is_refused_with_the_installed_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, "dynamic_batching { } " + parameter("BATCHING_STRATEGY", "volume"))
    assert refused.value.code is ErrorCode.INVALID_ARG
    assert refused.value.message == (
        "model 'm': parameter 'BATCHING_STRATEGY' is 'volume', which is not installed; "
        "the entry points of group 'halimede.batching_strategies' are: tenants"
    )


@pytest.mark.usefixtures("installed")
def test_a_strategy_that_cannot_be_made_fails_the_load(tmp_path: Path) -> None:
    with pytest.raises(VersionError) as refused:
        load(tmp_path, TENANT_BATCHES + parameter("bad_strategy", "1"))
    assert refused.value.code is ErrorCode.INTERNAL
    assert refused.value.message.endswith(
        "model 'm': unable to make batching strategy 'tenants' (tenants_backend:Tenants): RuntimeError: no tenants here"
    )


def test_code_in_the_directory_of_a_model_is_no_strategy(tmp_path: Path) -> None:
    for folder in ("", "1"):
        place = tmp_path / "models" / "m" / folder
        place.mkdir(parents=True)
        (place / "tenants.py").write_text(TENANTS)
        (place / "strategy.py").write_text(TENANTS)
    with pytest.raises(ConfigError, match="which is not installed"):
        load(tmp_path, "dynamic_batching { } " + parameter("BATCHING_STRATEGY", "tenants"))


@pytest.mark.parametrize("place", ["models/m/1", "models/m", "backends/identity"])
def test_a_native_strategy_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str) -> None:
    library = tmp_path / place / "batchstrategy.so"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF")
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "dynamic_batching { }")
    assert [record.message for record in caplog.records] == [
        f"model 'm': '{library}' has no effect: C libraries of batching strategies are not loaded; name an installed "
        "Python class (entry point group 'halimede.batching_strategies') in parameter 'BATCHING_STRATEGY'"
    ]


def test_the_path_of_a_native_strategy_gives_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "models" / "m" / "1").mkdir(parents=True)
    (tmp_path / "models" / "m" / "1" / "batchstrategy.so").write_bytes(b"\x7fELF")
    with caplog.at_level(logging.WARNING):
        load(tmp_path, "dynamic_batching { } " + parameter("TRITON_BATCH_STRATEGY_PATH", "/x/batchstrategy.so"))
    (record,) = caplog.records
    assert record.message.startswith("model 'm': parameter 'TRITON_BATCH_STRATEGY_PATH' has no effect: C libraries")
