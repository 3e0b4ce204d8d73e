"""The choice of a model directory's configuration file."""

import pytest

from halimede.core.config.files import config_file, config_name_problem


def chosen(config_name, *there):
    return config_file(config_name, set(there).__contains__)


def test_either_format_is_found():
    assert chosen("") is None
    assert chosen("", "config.pbtxt", "configs/edge.pbtxt") == "config.pbtxt"
    assert chosen("", "config.yaml", "config.yml", "config.json") == "config.yaml"


def test_named_configuration_takes_precedence():
    assert chosen("edge", "config.pbtxt", "configs/edge.pbtxt") == "configs/edge.pbtxt"
    assert chosen("edge", "config.pbtxt", "configs/edge.yaml") == "configs/edge.yaml"
    assert chosen("edge", "config.yaml", "configs/other.pbtxt") == "config.yaml"
    assert chosen("edge") is None


@pytest.mark.parametrize(
    ("config_name", "there"),
    [("", ("config.pbtxt", "config.yaml")), ("edge", ("configs/edge.pbtxt", "configs/edge.yaml", "config.pbtxt"))],
)
def test_two_formats_of_one_configuration_are_an_error_that_names_both(config_name, there):
    with pytest.raises(ValueError, match=f"there are both {there[0]} and {there[1]}; keep one of them"):
        chosen(config_name, *there)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc", "../secret", "a\nb", "\0", "x" * 300])
def test_name_that_is_not_a_plain_file_name_is_refused(name):
    assert config_name_problem(name).startswith("configuration name ")


def test_plain_names_are_accepted():
    assert [config_name_problem(name) for name in ("edge", "v2.1", "gpu_large", "日本")] == [None] * 4
