from halimede_operator.cluster.kinds import MODELS, PODS
from halimede_operator.cluster.pulse import STUCK_S, Pulse, Where

A, B, C = Where(PODS, "a"), Where(PODS, "b"), Where(MODELS, "a")


def test_the_age_of_a_kind_is_that_of_its_oldest_watch():
    pulse = Pulse([A, B, C], now=100.0)
    pulse.told(A, 150.0)
    pulse.told(C, 155.0)
    assert pulse.ages(160.0) == {"Pod": 60.0, "InferenceModel": 5.0}


def test_a_watch_that_neither_hears_nor_asks_is_stuck():
    pulse = Pulse([A, B, C], now=0.0)
    pulse.told(A, 10.0)
    pulse.tried(B, 20.0)
    assert pulse.stuck(STUCK_S) == []
    assert pulse.stuck(STUCK_S + 1) == [C]
    assert pulse.stuck(STUCK_S + 15) == [A, C]


def test_it_is_listed_when_every_watch_has_listed():
    pulse = Pulse([A, B], now=0.0)
    pulse.listed(A)
    assert (pulse.is_listed(), pulse.unlisted(), str(B)) == (False, [B], "pods in b")
    pulse.listed(B)
    assert (pulse.is_listed(), pulse.unlisted()) == (True, [])
