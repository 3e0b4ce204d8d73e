"""Checks of models of sequences: each sequence has the results that it has alone.

All checks run two sequences of a few requests. With the direct strategy a sequence slot is a row of each
batch, in which one without a request is a null row.
"""

from collections.abc import Sequence

from halimede.conformance_kit.requests import difference
from halimede.conformance_kit.results import GIVE_REQUESTS
from halimede.conformance_kit.subject import NotTried, Runs, Subject, Wrong, answered
from halimede.core.config.sequence_plan import sequence_plan
from halimede.core.types import InferenceRequest, Tensor

STEPS = 4
Results = list[list[Tensor]]


def check_sequences(subject: Subject) -> str:
    """Two sequences at once have the results that they have alone."""
    advice = "keep what a sequence needs in the states of the configuration, or by its row or its correlation id"
    one, other, alone, expected = _two_sequences(subject)
    batches = subject.config.max_batch_size >= 2
    fixed_rows = _has_fixed_rows(subject)
    with subject.running() as runs:
        for step in range(STEPS):
            requests, sequence_slots, wanted = [one[step], other[step]], [0, 1], [alone[step], expected[step]]
            if step % 2 and not fixed_rows:
                requests, sequence_slots, wanted = requests[::-1], sequence_slots[::-1], wanted[::-1]
            if batches:
                found = runs.batch(requests, sequence_slots=sequence_slots)
            else:
                found = [
                    runs.batch([request], sequence_slots=[sequence_slot])[0]
                    for request, sequence_slot in zip(requests, sequence_slots, strict=True)
                ]
            for reply, results in zip(found, wanted, strict=True):
                outputs = answered(reply, "a request of one of two sequences", advice)
                _compare(subject, outputs, results, step, "beside another sequence", advice)
    how = "in one batch" if batches else "by turns"
    return f"two sequences of {STEPS} requests, {how}, get the same results as alone"


def check_restart(subject: Subject) -> str:
    """A sequence begins anew where another one ended, or was given up without an end."""
    advice = "begin anew for a request with START, whatever there was before"
    one, other, alone, expected = _two_sequences(subject)
    with subject.running() as runs:
        _run(runs, one)
        for step, outputs in enumerate(_run(runs, other[:-1])):
            _compare(subject, outputs, expected[step], step, "after another one has ended", advice)
        for step, outputs in enumerate(_run(runs, one)):
            _compare(subject, outputs, alone[step], step, "after another one was given up", advice)
    return "a sequence begins anew where another one was"


def check_null_rows(subject: Subject) -> str:
    """Rows without a request change no sequence, neither their own nor those of others."""
    if not _has_fixed_rows(subject) or subject.config.max_batch_size < 2:
        raise NotTried("batches have no null rows: they have them with the direct strategy and max_batch_size above 1")
    advice = "change nothing for a row whose control READY is false"
    one, other, alone, expected = _two_sequences(subject)
    with subject.running() as runs:
        # The first sequence stands still while the second runs.
        outputs = runs.outputs(one[0], "the first request of a sequence", GIVE_REQUESTS)
        _compare(subject, outputs, alone[0], 0, "on an empty instance", advice)
        for step, outputs in enumerate(_run(runs, other, sequence_slot=1)):
            _compare(subject, outputs, expected[step], step, "beside a null row", advice)
        for step, outputs in enumerate(_run(runs, one[1:]), 1):
            _compare(subject, outputs, alone[step], step, "whose row was a null row meanwhile", advice)
    return "null rows change no sequence"


def _two_sequences(subject: Subject) -> tuple[list[InferenceRequest], list[InferenceRequest], Results, Results]:
    """The requests of two sequences, and the results of each on an instance of its own."""
    if subject.config.sequence_batching is None:
        raise NotTried("the model has no sequence_batching")
    one, other = (subject.maker.sequence(seed, STEPS) for seed in (60, 70))
    results = []
    for requests in (one, other):
        with subject.running() as runs:
            results.append(_run(runs, requests))
    return one, other, results[0], results[1]


def _has_fixed_rows(subject: Subject) -> bool:
    plan = sequence_plan(subject.config)
    return plan is not None and plan.fills_rows


def _run(runs: Runs, requests: Sequence[InferenceRequest], sequence_slot: int = 0) -> Results:
    what = "a request of a sequence"
    return [
        answered(runs.batch([request], sequence_slots=[sequence_slot])[0], what, GIVE_REQUESTS) for request in requests
    ]


def _compare(
    subject: Subject, outputs: list[Tensor], expected: list[Tensor], step: int, when: str, advice: str
) -> None:
    if found := difference(outputs, expected, subject.tolerance):
        raise Wrong(f"request {step + 1} of a sequence {when} has another result: {found}", advice)
