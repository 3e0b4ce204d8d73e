"""Shared secrets."""

from halimede.core.types import Secret


def test_a_secret_is_given_by_its_whole_value_alone() -> None:
    secret = Secret("key", "café")
    assert secret.is_given("café")
    assert secret.is_given("café".encode())
    assert not any(secret.is_given(wrong) for wrong in (None, "", b"", "caf", "café ", "CAFÉ", "\udce9", b"\xff"))
