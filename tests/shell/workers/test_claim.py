"""Both sides of the record of batches."""

from collections.abc import Iterator

import pytest

from halimede.workers.claim import Claim


@pytest.fixture
def sides() -> Iterator[tuple[Claim, Claim]]:
    """The server's and the process's."""
    server = Claim()
    process = Claim(server.share())
    yield server, process
    server.close()
    process.close()


def test_one_side_gets_the_token(sides: tuple[Claim, Claim]) -> None:
    server, process = sides
    server.publish(0, 7)
    assert process.try_take(0, 7)
    assert not server.try_take(0, 7)
    server.publish(0, 9)
    assert server.try_take(0, 9)
    assert not process.try_take(0, 9)


def test_the_token_of_a_later_batch_is_kept_for_it(sides: tuple[Claim, Claim]) -> None:
    """The process finds the frame of a batch that was taken back before that of the next one with the same token."""
    server, process = sides
    server.publish(1, 7)
    assert server.try_take(1, 7)
    server.publish(1, 8)
    assert not process.try_take(1, 7)
    assert process.try_take(1, 8)
    assert not process.try_take(1, 8)


def test_the_tokens_are_independent(sides: tuple[Claim, Claim]) -> None:
    server, process = sides
    server.publish(0, 7)
    server.publish(1, 8)
    assert server.try_take(1, 8)
    assert process.try_take(0, 7)


def test_batches_up_to_the_last_that_began_have_begun(sides: tuple[Claim, Claim]) -> None:
    server, process = sides
    assert not server.has_begun(1)
    process.begin(2)
    assert [server.has_begun(number) for number in (1, 2, 3)] == [True, True, False]
    server.close()
    process.begin(3)
    assert not server.has_begun(3), "as at the end"


def test_the_numbers_of_batches_start_again(sides: tuple[Claim, Claim]) -> None:
    server, process = sides
    process.begin(0xFFFFFFFF)
    assert server.has_begun(0xFFFFFFFF)
    assert not server.has_begun(0)
    process.begin(0)
    assert server.has_begun(0xFFFFFFFF)
