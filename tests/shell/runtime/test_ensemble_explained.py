"""`halimede explain-config` of an ensemble: its own configuration, and whether it fits its steps' models."""

from pathlib import Path

from click.testing import CliRunner, Result

from halimede.commands.explain_config import explain_config
from support.ensemble_models import Step, add_ensemble, chain
from support.models import add_identity, add_scaled


def explain(model: Path) -> Result:
    return CliRunner().invoke(explain_config, [str(model)])


def test_configuration_is_shown_as_it_is_served(tmp_path: Path) -> None:
    add_scaled(tmp_path, "two", 2)
    decoupled = (
        'parameters { key: "ISOLATION" value { string_value: "process" } } model_transaction_policy { decoupled: true }'
    )
    add_identity(tmp_path, "many", dims="4", extra=decoupled)
    add_ensemble(tmp_path, "inner", chain("many"))
    add_ensemble(tmp_path, "e", chain("two", "inner"))
    result = explain(tmp_path / "e")
    assert (result.exit_code, result.exception) == (0, None)
    origins = [line.split("#") for line in result.stdout.splitlines() if "decoupled" in line]
    assert [[part.strip() for part in line] for line in origins] == [["decoupled: true", "the steps' models"]]
    assert 'platform: "ensemble"' in result.stdout


def test_explain_config_reports_misfits_and_exits_with_one(tmp_path: Path) -> None:
    add_scaled(tmp_path, "two", 2)
    for name, steps, text in (
        ("lost", chain("nowhere"), "ensemble lost contains models that are not available or ambiguous: nowhere"),
        ("future", [Step("two", {"IN": "IN"}, {"OUT": "OUT"}, version=7)], "whose required version 7 is not loaded."),
        ("misfit", [Step("two", {"IN": "IN"}, {"OTHER": "OUT"})], "non-existing output OTHER in model two"),
        ("unused", [Step("two", {"IN": "other"}, {"OUT": "OUT"})], "unused/config.pbtxt:3:"),
        ("loop", chain("pool"), "circular dependency between ensembles: loop -> ... -> pool -> loop"),
    ):
        add_ensemble(tmp_path, name, steps)
        add_ensemble(tmp_path, "pool", chain("loop"))
        result = explain(tmp_path / name)
        assert (result.exit_code, result.stdout) == (1, ""), name
        assert text in result.stderr, name


def test_ensemble_without_scheduling_is_reported_before_the_name_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "e" / "1").mkdir(parents=True)
    (tmp_path / "e" / "config.pbtxt").write_text('name: "other" platform: "ensemble"')
    problems = [line for line in explain(tmp_path / "e").stderr.splitlines() if "config.pbtxt" in line]
    assert [problem.partition("config.pbtxt")[2] for problem in problems] == [
        ": ensemble scheduling must be set for ensemble other whose platform is ensemble",
        ":1:1: unexpected directory name 'e' for model 'other', directory name must equal model name",
    ]


def test_problems_of_the_model_of_a_step_have_a_place(tmp_path: Path) -> None:
    add_identity(tmp_path, "step", extra="nonsense: 1")
    add_ensemble(tmp_path, "e", chain("step"))
    result = explain(tmp_path / "e")
    assert result.exit_code == 1
    assert "step/config.pbtxt:" in result.stderr
