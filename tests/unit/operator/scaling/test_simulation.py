"""The presets against steps, ramps, spikes and a day's curve, in simulated time: they do not flap, and are in time.

The served model takes 0.1 s for a request, so 10 requests per second fill a pod; a new pod is ready after 20 s.
"""

import pytest

from halimede_operator.core.spec.types import Preset
from support.hpa import Autoscaler, Behavior, Metric
from support.hpa_simulation import Pipeline, Served, day, preset, ramp, simulate, steps

HOUR_S = 3600.0
STEP = steps((0, 6.0), (300, 24.0), (900, 6.0))
"""1x, 4x, 1x. Four times as much needs three pods."""
PROMISED_S = 60.0


@pytest.mark.parametrize("name", Preset)
@pytest.mark.parametrize(("rate", "first"), [(6.0, 1), (14.0, 2)])
def test_steady_load_does_not_flap(name: Preset, rate: float, first: int) -> None:
    found = simulate(preset(name), steps((0, rate)), seconds=HOUR_S, first=first)
    assert (found.reversals, len(found.changes) <= 2) == (0, True), found.changes


def test_without_the_window_of_scale_up_chance_adds_pods() -> None:
    found = simulate(preset(Preset.QUEUE, behavior={}), steps((0, 6.0)), seconds=HOUR_S)
    assert found.reversals >= 1, found.changes


@pytest.mark.parametrize(
    "metric", [Metric("halimede_queue_requests", 4000), Metric("halimede_inflight_requests", 8000)]
)
def test_requests_without_the_busy_fraction_flap(metric: Metric) -> None:
    found = simulate(Autoscaler((metric,), 8, behavior=Behavior()), steps((0, 24.0)), seconds=HOUR_S, first=3)
    assert found.reversals >= 3, found.changes


@pytest.mark.parametrize("name", [Preset.QUEUE, Preset.CONCURRENCY])
def test_step_is_answered_within_a_minute_and_taken_back_once(name: Preset) -> None:
    found = simulate(preset(name), STEP, seconds=2400)
    assert found.wanted_by(3, since_s=300) <= PROMISED_S
    assert found.ready_by(3, since_s=300) <= PROMISED_S + 20
    assert found.reversals == 0, found.changes
    assert found.last() == 1
    assert found.late_share < 0.08


def test_gpu_preset_answers_a_step_slowly() -> None:
    # The busy fraction is at most 1, so each decision adds at most ceil(1 / 0.7).
    found = simulate(preset(Preset.GPU), STEP, seconds=2400)
    assert PROMISED_S < found.wanted_by(3, since_s=300) <= 120
    assert (found.reversals, found.last()) == (0, 1)


@pytest.mark.parametrize("name", Preset)
def test_spike_is_taken_back_once(name: Preset) -> None:
    found = simulate(preset(name), steps((0, 6.0), (300, 60.0), (310, 6.0)), seconds=1500)
    assert (found.reversals, found.last()) == (0, 1), found.changes


@pytest.mark.parametrize("name", Preset)
def test_ramp_of_ten_minutes_costs_next_to_nothing(name: Preset) -> None:
    found = simulate(preset(name), ramp(4.0, 40.0, 300, 900), seconds=1800)
    assert found.reversals == 0, found.changes
    assert found.late_share < 0.02


def test_day_goes_up_and_down() -> None:
    slow = Served(service_s=2.0, pending_s=5.0, loading_s=55.0, deadline_s=20.0)
    found = simulate(preset(Preset.QUEUE), day(0.2, 2.4), seconds=86_400, served=slow)
    assert found.most >= slow.needed(2.4)
    # Once up and once down, and a little back and forth by chance; one that flaps has hundreds.
    assert found.reversals <= 5, found.changes
    assert found.late_share < 0.01


def test_scraping_more_often_does_not_flap_either() -> None:
    found = simulate(preset(Preset.QUEUE), steps((0, 7.0)), seconds=HOUR_S, pipeline=Pipeline(scrape_s=5.0))
    assert (found.reversals, len(found.changes)) == (0, 1), found.changes
