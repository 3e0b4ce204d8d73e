from halimede_operator.core.names import canonical_json, child_name, hash_of, volume_name


def test_a_child_is_called_like_its_owner_and_what_it_is() -> None:
    assert child_name("bert") == "bert"
    assert child_name("bert", "pods") == "bert-pods"
    assert child_name("b" * 52) == "b" * 52


def test_a_name_that_would_be_too_long_keeps_both_ends() -> None:
    name = "a" * 45 + "-long"

    assert child_name(name, "pods") == f"{'a' * 38}-{hash_of(name)}-pods"
    assert child_name(f"{name}er", "pods") != child_name(name, "pods")
    split = "a" * 26 + "-" + "b" * 20
    assert child_name(split, "config-01234567") == f"{'a' * 26}-{hash_of(split)}-config-01234567"


def test_a_volume_is_called_like_what_it_holds_where_that_is_a_label() -> None:
    assert volume_name("credentials", "store-keys") == "credentials-store-keys"
    assert volume_name("credentials", "store.keys") == f"credentials-{hash_of('store.keys')}"
    assert volume_name("credentials", "k" * 60) == f"credentials-{hash_of('k' * 60)}"


def test_equal_values_have_one_text() -> None:
    assert canonical_json({"b": [1, "ä"], "a": None}) == '{"a":null,"b":[1,"ä"]}'
