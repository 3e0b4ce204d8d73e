"""When a model whose files have changed is due for a reload."""

from halimede.core.repository.changes import ABSENT, Changes

SETTLE = 100


class Checks:
    """Checks one model `m`, at intervals of 60."""

    def __init__(self, loaded: str | None = "a") -> None:
        self.changes = Changes(SETTLE)
        self.loaded = {} if loaded is None else {"m": loaded}
        self.now = 0

    def check(self, *fingerprints: str) -> list[bool]:
        due = []
        for fingerprint in fingerprints:
            self.now += 60
            due.append(self.changes.due({"m": fingerprint}, self.loaded, self.now) == ["m"])
        return due


def test_model_that_does_not_change_is_never_due():
    assert Checks().check(*"aaaa") == [False] * 4


def test_changed_model_is_due_once_when_its_files_are_unchanged():
    assert Checks().check(*"abbbbbb") == [False, False, False, True, False, False, False]


def test_files_that_are_still_written_are_waited_for():
    assert Checks().check(*"abcdefff") == [False] * 7 + [True]


def test_change_before_the_first_check_is_detected():
    assert Checks().check(*"bbbb") == [False, False, True, False]


def test_files_restored_within_the_settle_time_are_no_change():
    assert Checks().check(*"abaaa") == [False] * 5


def test_load_that_was_requested_meanwhile_is_not_repeated():
    looks = Checks()
    looks.check("a", "b")
    looks.loaded["m"] = "b"
    assert looks.check(*"bbbb") == [False] * 4
    # Back to what was loaded before is a change again.
    assert looks.check(*"aaa") == [False, False, True]


def test_failed_load_is_tried_again_when_the_files_change_again():
    looks = Checks()
    assert looks.check(*"abbbbb") == [False, False, False, True, False, False]
    # Also to what failed before, or to what is loaded.
    assert looks.check(*"ccc") == [False, False, True]
    assert looks.check(*"bbb") == [False, False, True]


def test_model_that_is_not_loaded_is_due_when_it_changes():
    looks = Checks(loaded=None)
    assert looks.check(*"aaaa") == [False] * 4
    assert looks.check(*"bbb") == [False, False, True]


def test_models_are_independent_and_forgotten_when_they_are_removed():
    changes = Changes(SETTLE)
    changes.due({"m": "a", "n": "a"}, {"m": "a", "n": "a"}, 0)
    assert changes.due({"m": "b", "n": "a"}, {"m": "a", "n": "a"}, 60) == []
    assert changes.due({"n": "a"}, {"n": "a"}, 200) == []
    assert changes.due({"m": "b", "n": "a"}, {"m": "b", "n": "a"}, 400) == []


def test_a_new_model_is_due_when_its_files_are_unchanged():
    looks = Checks(loaded=ABSENT)
    assert looks.check(*"abbbb") == [False, False, False, True, False]
    # Its load has failed. The model is due again when its files change.
    assert looks.check(*"bccc") == [False, False, False, True]


def test_a_model_whose_directory_is_replaced_is_not_unloaded():
    assert Checks().check("a", ABSENT, "a", "a") == [False] * 4
    assert Checks().check("a", ABSENT, ABSENT, ABSENT, ABSENT) == [False, False, False, True, False]
