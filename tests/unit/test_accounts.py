"""Accounts of bytes."""

from halimede.core.accounts import ASK_BYTES, COPIES, Account, ByteKind, MemoryBounds

MIB = 1 << 20


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


class Container:
    """A container with 400 MiB of memory, whose usage the test sets."""

    def __init__(self, used_bytes: int = 0) -> None:
        self.used_bytes = used_bytes
        self.asked: list[int] = []
        self.bounds = MemoryBounds(400 * MIB, self.has_free)

    def has_free(self, size_bytes: int) -> bool:
        self.asked.append(size_bytes)
        return self.used_bytes + size_bytes <= 400 * MIB


def test_a_bound_is_at_most_a_quarter_of_the_memory():
    assert Account(ByteKind.WIRE, 1 << 30, memory=Container().bounds).limit_bytes == 100 * MIB
    assert Account(ByteKind.WIRE, 10, memory=Container().bounds).limit_bytes == 10


def test_bytes_are_refused_without_memory_for_what_is_made_from_them():
    container = Container()
    account = Account(ByteKind.WIRE, 1 << 30, memory=container.bounds)
    container.used_bytes = (400 - 60) * MIB
    assert account.take(15 * MIB)
    assert not account.take(MIB)
    account.give_back(16 * MIB)
    container.used_bytes = 0
    assert account.take(16 * MIB)


def test_free_memory_is_asked_for_once_per_mebibyte_until_it_is_enough():
    container = Container()
    account = Account(ByteKind.WIRE, 1 << 30, memory=container.bounds)
    taken = [account.take(ASK_BYTES // 4) for _ in range(8)]
    assert (taken, container.asked) == ([True] * 8, [COPIES * ASK_BYTES, 2 * COPIES * ASK_BYTES])

    container.used_bytes = 400 * MIB
    assert [account.take(ASK_BYTES // 4) for _ in range(6)] == [True, True, True, False, False, False]
    container.used_bytes = 0
    assert account.take(1)


def test_half_of_the_memory_is_left_free_by_what_is_kept():
    container = Container(used_bytes=150 * MIB)
    assert [container.bounds.can_keep(50 * MIB), container.bounds.can_keep(51 * MIB)] == [True, False]
    assert MemoryBounds().can_keep(1 << 50)
