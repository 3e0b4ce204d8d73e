"""Shared secrets."""

from halimede.core.types import Secret


def test_only_the_whole_secret_is_accepted() -> None:
    secret = Secret("key", "café")
    assert secret.is_given("café")
    assert secret.is_given("café".encode())
    assert not any(secret.is_given(wrong) for wrong in (None, "", b"", "caf", "café ", "CAFÉ", "\udce9", b"\xff"))
