"""How many frames of no use a client may send."""

import pytest

from halimede.core.wire.http2.codes import ConnectionFault, H2Code
from halimede.core.wire.http2.floods import BURST, CHEAP, PER_SECOND, RESET, WINDOW_UPDATES_PER_DATA, FloodGuard


def spent(guard: FloodGuard, cost: float, now: float, most: int = 20_000) -> int:
    """How often the cost can be spent before the connection ends."""
    for count in range(most):
        try:
            guard.spend(cost, now, "frames")
        except ConnectionFault as fault:
            assert (fault.code, fault.text) == (H2Code.ENHANCE_YOUR_CALM, "too many frames")  # noqa: PT017
            return count
    return most


@pytest.mark.parametrize("cost", [CHEAP, RESET])
def test_a_burst_is_allowed_at_once(cost: float) -> None:
    assert spent(FloodGuard(7), cost, 7) == BURST / cost


def test_the_allowance_grows_with_time_up_to_a_burst() -> None:
    guard = FloodGuard(0)
    assert spent(guard, 1, 0, most=int(BURST)) == BURST
    assert spent(guard, 1, 0.5) == PER_SECOND / 2
    guard = FloodGuard(0)
    assert spent(guard, 1, 0, most=int(BURST)) == BURST
    assert spent(guard, 1, 1e6) == BURST + 1  # The frame that finds the allowance used up is paid by the time.


def test_a_steady_rate_below_the_limit_is_never_too_much() -> None:
    guard = FloodGuard(0)
    for second in range(20):
        assert spent(guard, 1, second, most=int(PER_SECOND)) == PER_SECOND


def test_each_data_frame_pays_for_window_updates() -> None:
    guard = FloodGuard(0)
    for _ in range(3):
        guard.data_sent()
    for _ in range(int(3 * WINDOW_UPDATES_PER_DATA)):
        guard.window_update(0)
    assert spent(guard, 1, 0, most=int(BURST)) == BURST
    with pytest.raises(ConnectionFault, match="too many WINDOW_UPDATE frames"):
        guard.window_update(0)
