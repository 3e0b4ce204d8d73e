from halimede_operator.cluster.kinds import MODELS, PODS
from halimede_operator.cluster.watch_health import STUCK_S, Collection, WatchHealth

A, B, C = Collection(PODS, "a"), Collection(PODS, "b"), Collection(MODELS, "a")


def test_the_age_of_a_kind_is_that_of_its_longest_silent_watch():
    watch_health = WatchHealth([A, B, C], now=100.0)
    watch_health.record_answer(A, 150.0)
    watch_health.record_answer(C, 155.0)
    assert watch_health.ages(160.0) == {"Pod": 60.0, "InferenceModel": 5.0}


def test_a_watch_without_requests_and_answers_is_stuck():
    watch_health = WatchHealth([A, B, C], now=0.0)
    watch_health.record_answer(A, 10.0)
    watch_health.record_request(B, 20.0)
    assert watch_health.stuck(STUCK_S) == []
    assert watch_health.stuck(STUCK_S + 1) == [C]
    assert watch_health.stuck(STUCK_S + 15) == [A, C]


def test_a_restarted_watch_is_not_stuck():
    watch_health = WatchHealth([A], now=0.0)
    watch_health.restarted(100.0)
    assert (watch_health.stuck(100 + STUCK_S), watch_health.stuck(101 + STUCK_S)) == ([], [A])


def test_a_watch_is_unlisted_until_its_first_complete_list():
    watch_health = WatchHealth([A, B], now=0.0)
    watch_health.listed(A)
    assert (watch_health.unlisted(), str(B)) == ([B], "pods in b")
    watch_health.listed(B)
    assert watch_health.unlisted() == []


def test_kinds_that_are_no_longer_expected_count_no_more():
    watch_health = WatchHealth([A, B], now=0.0)
    watch_health.listed(A)
    watch_health.record_answer(B, 50.0)
    watch_health.expect([B, C], now=100.0)
    assert watch_health.unlisted() == [B, C]
    assert watch_health.ages(110.0) == {"Pod": 60.0, "InferenceModel": 10.0}
    assert watch_health.stuck(100 + STUCK_S) == []


def test_kopf_ignores_what_it_does_not_ask_for_when_it_asks_for_others():
    watch_health = WatchHealth([A, B], now=0.0)
    watch_health.expect([A, B], now=0.0)
    assert watch_health.ignored() == []
    watch_health.record_request(A, 1.0)
    assert watch_health.ignored() == [B]
    watch_health.expect([A, B], now=2.0)
    assert watch_health.ignored() == []
