"""The check of decoupled models: the answers to each request, in a worker process, where these models run."""

import asyncio

from halimede.conformance_kit.hosted import Answers, hosted_answers
from halimede.conformance_kit.requests import difference
from halimede.conformance_kit.results import GIVE_REQUESTS, check_declared
from halimede.conformance_kit.subject import NotTried, Subject, Wrong, answered


def check_responses(subject: Subject) -> str:
    """Each request of a decoupled model is ended, and has the same answers in a batch, and later, as alone."""
    if not subject.config.is_decoupled:
        raise NotTried("the model is not decoupled")
    one, other = subject.maker.request(80), subject.maker.request(81)
    batches = [[one], [other], [one, other] if subject.config.max_batch_size >= 2 else [other], [one]]
    alone, expected, *further = asyncio.run(hosted_answers(subject, batches))
    wanted = [alone[0], expected[0]]
    for answers in wanted:
        for reply in answers:
            check_declared(subject, answered(reply, "a request", GIVE_REQUESTS))
    together, again = further
    advice = "answer each request by its own `respond`, from its own inputs only"
    for answers, before in zip(together, wanted[-len(together) :], strict=True):
        _compare(subject, answers, before, "beside another request", advice)
    _compare(subject, again[0], wanted[0], "after others", "keep no state between requests")
    counts = sorted({len(answers) for answers in wanted})
    return f"requests get {' or '.join(map(str, counts))} answers each, in a batch as alone, and an end"


def _compare(subject: Subject, answers: Answers, expected: Answers, when: str, advice: str) -> None:
    if len(answers) != len(expected):
        raise Wrong(f"a request {when} gets {len(answers)} answers instead of {len(expected)}", advice)
    for at, (reply, before) in enumerate(zip(answers, expected, strict=True)):
        outputs, wanted = answered(reply, f"a request {when}", advice), answered(before, "a request", GIVE_REQUESTS)
        if found := difference(outputs, wanted, subject.tolerance):
            raise Wrong(f"answer {at + 1} to a request {when} has another result: {found}", advice)
