"""Values that a configuration has as texts: numbers, choices, and what is said of wrong ones."""

import pytest

from halimede.core.config.autocomplete import batch_size_setting
from halimede.core.config.model_config import ModelConfig, ModelParameter
from halimede.core.config.parameters import ValueReader, number_setting, parameters_of, parse_number
from halimede.core.types import ErrorCode, InferenceError
from support.refusals import error_of

WRONG_NUMBERS = ["", "-1", "+1", " 1", "1.0", "many", "²", "٣", "9" * 5000]


@pytest.mark.parametrize("text", [*WRONG_NUMBERS, "1", "11"])
def test_only_decimal_digits_within_the_range_are_a_number(text: str) -> None:
    assert parse_number(text, 2, 10) is None


def test_the_ends_of_the_range_are_numbers() -> None:
    assert [parse_number(text, 2, 10) for text in ("2", "02", "10")] == [2, 2, 10]


@pytest.mark.parametrize("text", WRONG_NUMBERS)
def test_a_wrong_number_in_a_setting_is_named(text: str) -> None:
    error = error_of(number_setting, "net", {"size": text}, "size", 4)
    assert error.code is ErrorCode.INVALID_ARG
    shown = text if len(text) < 256 else f"{text[:256]}..."
    assert error.message == f"--backend-config net,size={shown}: it must be a number, at least 0"


def test_a_setting_has_a_default_and_a_least_number() -> None:
    assert (number_setting("net", {}, "size", 4), number_setting("net", {"size": "7"}, "size", 4)) == (4, 7)
    with pytest.raises(InferenceError, match="at least 1"):
        number_setting("net", {"size": "0"}, "size", 4, 1)


def test_backends_have_a_setting_for_the_batch_size() -> None:
    given = {"default-max-batch-size": "0"}
    assert (batch_size_setting("net", {}), batch_size_setting("net", {}, 8), batch_size_setting("net", given, 8)) == (
        4,
        8,
        0,
    )
    with pytest.raises(InferenceError, match="net,default-max-batch-size=-1: it must be a number, at least 0"):
        batch_size_setting("net", {"default-max-batch-size": "-1"})


def reader(*, reads_empty: bool = False, **parameters: str) -> ValueReader:
    config = ModelConfig(parameters={key: ModelParameter(text) for key, text in parameters.items()})
    return ValueReader(parameters_of(config), reads_empty=reads_empty)


def test_values_are_read_in_upper_and_lower_case() -> None:
    given = reader(text="Some", count="3", flag="TRUE", choice="fast")
    found = (given.text("text"), given.count("count", 8), given.flag("flag", default=False))
    assert (*found, given.choice("choice", {"SLOW": 0, "FAST": 1}, 0)) == ("Some", 3, True, 1)
    given.finish("m")


@pytest.mark.parametrize("given", [reader(), reader(count="", flag="", choice="")], ids=["unset", "empty"])
def test_what_is_not_set_or_empty_has_its_default(given: ValueReader) -> None:
    assert (given.text("text"), given.count("count", 8, least=1), given.flag("flag", None)) == ("", 0, None)
    assert given.choice("choice", {"a": 1}, 7) == 7
    given.finish("m")


def test_every_wrong_value_is_named_in_one_error() -> None:
    given = reader(reads_empty=True, count="9", flag="", choice="C")
    assert (given.count("count", 8, least=1), given.flag("flag", default=True)) == (0, True)
    assert given.choice("choice", {"a": 1, "B": 2}, 7) == 7
    error = error_of(given.finish, "m")
    assert error.code is ErrorCode.INVALID_ARG
    assert error.message == (
        "model 'm': parameter 'count' is '9'; it must be a number from 1 to 8; "
        "parameter 'flag' is ''; it must be 'true' or 'false'; parameter 'choice' is 'C'; it must be one of a, B"
    )
