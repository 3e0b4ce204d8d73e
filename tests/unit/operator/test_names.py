from halimede_operator.core.names import canonical_json, child_name, hash_of, is_child_name, volume_name


def test_child_name_is_the_owners_name_with_a_suffix() -> None:
    assert child_name("bert") == "bert"
    assert child_name("bert", "pods") == "bert-pods"
    assert child_name("b" * 52) == "b" * 52


def test_a_long_child_name_keeps_its_beginning_and_suffix() -> None:
    name = "a" * 45 + "-long"

    assert child_name(name, "pods") == f"{'a' * 38}-{hash_of(name)}-pods"
    assert child_name(f"{name}er", "pods") != child_name(name, "pods")
    split = "a" * 26 + "-" + "b" * 20
    assert child_name(split, "config-01234567") == f"{'a' * 26}-{hash_of(split)}-config-01234567"


def test_names_of_children_are_recognized_with_any_content() -> None:
    for name in ("bert", "b" * 60):
        for suffix in ("", "pods", "config-01234567", "89abcdef"):
            assert is_child_name(name, child_name(name, suffix))
        for suffix in ("copy", "config", "config-mine", "pods-01234567"):
            assert not is_child_name(name, child_name(name, suffix))
    assert not is_child_name("bert", "bertha")


def test_volume_name_contains_the_object_name_if_it_is_a_label() -> None:
    assert volume_name("credentials", "store-keys") == "credentials-store-keys"
    assert volume_name("credentials", "store.keys") == f"credentials-{hash_of('store.keys')}"
    assert volume_name("credentials", "k" * 60) == f"credentials-{hash_of('k' * 60)}"


def test_equal_values_have_equal_canonical_json() -> None:
    assert canonical_json({"b": [1, "ä"], "a": None}) == '{"a":null,"b":[1,"ä"]}'
