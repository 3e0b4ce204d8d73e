import pickle

import pytest

from halimede.backends.trees.files import FILENAMES, default_type, looks_like, mismatch, type_of

HEADS = {
    b'{"learner":{': "xgboost_json",
    b' {\n  "learner"': "xgboost_json",
    b"{L\0\0\0\0\0\0\0\7learner": "xgboost_ubj",
    b"tree\nversion=v4\n": "lightgbm",
    b"tree\r\nversion=v4\r\n": "lightgbm",
    b"binf\0\0\0?": "xgboost",
    b"\4\0\0\0\x08\0\0\0\1\0\0\0": "treelite_checkpoint",
    pickle.dumps({"a": 1}): "a pickle",
    b"\0\0\0?\5\0\0\0\0\0\0\0": None,
    b"": None,
}


@pytest.mark.parametrize("head", HEADS, ids=repr)
def test_the_type_of_a_file_is_told_by_its_first_bytes(head):
    assert looks_like(head) == HEADS[head]


def test_the_type_follows_from_the_default_name():
    assert {default_type(["labels.txt", name]) for name in FILENAMES.values()} == set(FILENAMES)
    assert default_type(["labels.txt"]) is None


def test_the_type_of_another_name_follows_from_content_then_suffix():
    assert type_of("m.bin", b"tree\n") == "lightgbm"
    assert type_of("m.tl", b"\0\0\0?") == "treelite_checkpoint"
    assert type_of("m.bin", b"\0\0\0?") == "xgboost"


def test_a_hint_names_the_type_that_the_file_looks_like():
    assert mismatch("xgboost_json", b"tree\n") == "; the file looks like one of model_type 'lightgbm'"
    assert "'sklearn'" in mismatch("xgboost", pickle.dumps(1))
    assert (mismatch("lightgbm", b"tree\n"), mismatch("lightgbm", b"?")) == ("", "")
