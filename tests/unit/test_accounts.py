"""Accounts of bytes."""

from halimede.core.accounts import Account, ByteKind


def test_an_account_says_whether_the_server_is_within_its_bound():
    account = Account(ByteKind.WIRE, 10)
    assert [account.take(6), account.take(4), account.take(1)] == [True, True, False]
    assert account.held_bytes == account.total_bytes == 11
    account.give_back(11)
    assert account.held_bytes == 0


def test_the_parts_of_several_processes_count_together():
    parts = {"one": 0, "two": 0}

    def part_of(name: str) -> Account:
        def publish(held_bytes: int) -> int:
            parts[name] = held_bytes
            return sum(parts.values())

        return Account(ByteKind.STATE, 10, publish)

    one, two = part_of("one"), part_of("two")
    assert [one.take(6), two.take(5)] == [True, False]
    assert (one.total_bytes, two.total_bytes) == (11, 11)
    two.give_back(5)
    assert (one.total_bytes, one.take(4), parts) == (6, True, {"one": 10, "two": 0})
