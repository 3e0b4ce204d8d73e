"""Checks over the life of models: refusals, cancellation, several instances, unloads, worker processes."""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from statistics import median

from halimede.conformance_kit.hosted import hosted_answers
from halimede.conformance_kit.requests import difference
from halimede.conformance_kit.results import GIVE_REQUESTS, refused_alone
from halimede.conformance_kit.subject import NotTried, Runs, Subject, Wrong, answered, artifact_bytes, on_thread
from halimede.core.types import InferenceError, InferenceRequest, Tensor
from halimede.runtime.malloc import allocated_bytes, release_free_memory

INSTANCES = 4
RUNS = 10
WARM_CYCLES = 3
LEAK_BYTES = 1 << 20
"""How much resident memory a cycle may keep: less is noise of the allocator."""
_THREADS = "/proc/self/task"
_DESCRIPTORS = "/proc/self/fd"


def check_refusals(subject: Subject) -> str:
    """A request that the model refuses gets its error alone; the others of its batch, and later ones, are right."""
    with subject.running() as runs:
        good = [subject.maker.request(20), subject.maker.request(21)]
        expected = [runs.outputs(request, "a usual request", GIVE_REQUESTS) for request in good]
        found = refused_alone(subject, runs)
        if found is None:
            raise NotTried("no request was found that the model refuses; give one with --refused")
        bad, error = found
        if subject.config.max_batch_size < 3 or not _can_share(bad, good[0]):
            _check_answers(subject, runs.batch(good[:1]), expected[:1], "after a refused request")
            return f"a refused request costs only itself ({error.message[:80]!r})"
        replies = runs.batch([good[0], bad, good[1]])
        if not isinstance(replies[1], InferenceError):
            raise Wrong("a request that is refused alone is answered in a batch", "check every row of a batch")
        _check_answers(subject, [replies[0], replies[2]], expected, "beside a refused request of the same batch")
    return "a refused request costs only itself, also in a batch"


def _can_share(one: InferenceRequest, other: InferenceRequest) -> bool:
    return [each.shape[1:] for each in one.inputs] == [each.shape[1:] for each in other.inputs]


_REFUSE = "raise RefusedRequestsError with the positions of the unusable requests before you compute"


def _check_answers(
    subject: Subject,
    replies: Sequence[list[Tensor] | InferenceError | None],
    expected: Sequence[list[Tensor]],
    when: str,
) -> None:
    for reply, wanted in zip(replies, expected, strict=True):
        if found := difference(answered(reply, f"a usual request {when}", _REFUSE), wanted, subject.tolerance):
            raise Wrong(f"a usual request {when} has another result: {found}", _REFUSE)


def check_cancellation(subject: Subject) -> str:
    """A cancelled batch ends, a batch that is cancelled in part answers the others, and the next one is right."""
    advice = "stop only if `context.is_cancelled()`: then all requests of the batch are cancelled"
    with subject.running() as runs:
        request = subject.maker.request(22)
        expected = runs.outputs(request, "a usual request", GIVE_REQUESTS)
        begun = time.monotonic()
        runs.batch([request], cancelled={0: True})
        if time.monotonic() - begun > subject.longest_wait_secs:
            raise Wrong(f"a cancelled batch takes more than {subject.longest_wait_secs:g} s", advice)
        if subject.config.max_batch_size >= 2:
            replies = runs.batch([subject.maker.request(23), request], cancelled={0: True})
            if found := difference(
                answered(replies[1], "a request beside a cancelled one", advice), expected, subject.tolerance
            ):
                raise Wrong(f"a request beside a cancelled one has another result: {found}", advice)
        _check_answers(subject, runs.batch([request]), [expected], "after a cancelled batch")
    return "cancelled requests end, and cost no other request"


def check_instances(subject: Subject) -> str:
    """Several instances of one model on threads of their own, at once; the others run on when one is closed."""
    advice = "share no buffer between instances, or guard it by a lock; free shared state in the model's `close` only"
    model = subject.load()
    requests = [subject.maker.request(30 + at) for at in range(INSTANCES)]
    with ThreadPoolExecutor(1) as alone:
        first = alone.submit(model.create_instance, subject.placement()).result()
        expected = alone.submit(lambda: [Runs(subject, first).batch([each])[0] for each in requests]).result()
        wanted = [answered(reply, "a usual request", GIVE_REQUESTS) for reply in expected]
        barrier = threading.Barrier(INSTANCES)
        problems: list[Wrong | None] = [None] * INSTANCES

        def run(ordinal: int) -> None:
            made = model.create_instance(subject.placement(ordinal + 1))
            runs = Runs(subject, made)
            barrier.wait(subject.longest_wait_secs)
            try:
                for turn in range(RUNS):
                    at = (ordinal + turn) % INSTANCES
                    outputs = answered(runs.batch([requests[at]])[0], "a request on one of several instances", advice)
                    if found := difference(outputs, wanted[at], subject.tolerance):
                        raise Wrong(f"an instance has another result while others run: {found}", advice)
            except Wrong as wrong:
                problems[ordinal] = wrong
            finally:
                made.close()

        with ThreadPoolExecutor(INSTANCES) as pool:
            list(pool.map(run, range(INSTANCES)))
        for problem in problems:
            if problem is not None:
                raise problem
        reply = alone.submit(lambda: Runs(subject, first).batch([requests[0]])[0]).result()
        outputs = answered(reply, "a request after other instances were closed", advice)
        if found := difference(outputs, wanted[0], subject.tolerance):
            raise Wrong(f"an instance has another result after others were closed: {found}", advice)
        alone.submit(first.close).result()
    model.close()
    return f"{INSTANCES} instances on threads give the same results, also while others close"


def check_cycles(subject: Subject) -> str:
    """Loads and unloads keep no threads, descriptors or memory."""

    def cycle() -> None:
        with subject.running() as runs:
            runs.outputs(subject.maker.request(40), "a usual request", GIVE_REQUESTS)

    for _ in range(WARM_CYCLES):
        on_thread(cycle)
    held = [_held()]
    for _ in range(subject.cycles):
        on_thread(cycle)
        held.append(_held())
    advice = "free in the `close` of the instance and of the model what they hold"
    threads, descriptors = (_left(subject, folder, held[0][at]) for at, folder in enumerate((_THREADS, _DESCRIPTORS)))
    # The median: memory of others that this process frees in one cycle must not hide a leak of each.
    per_cycle = max(int(median(new[at] - old[at] for old, new in pairwise(held))) for at in (2, 3))
    if threads >= subject.cycles // 2:
        raise Wrong(f"{subject.cycles} loads and unloads leave {threads} threads", advice)
    if descriptors >= subject.cycles // 2:
        raise Wrong(f"{subject.cycles} loads and unloads leave {descriptors} open file descriptors", advice)
    if per_cycle > max(LEAK_BYTES, artifact_bytes(subject.source.artifact) // 4):
        raise Wrong(f"each load and unload keeps {per_cycle >> 10} KiB of memory", advice)
    return f"{subject.cycles} loads and unloads keep nothing (threads {threads:+}, descriptors {descriptors:+})"


def _left(subject: Subject, folder: str, before: int) -> int:
    """How many more entries the folder has than before the cycles. A runtime may end its threads a little after it is
    closed, so too many are given a second."""
    deadline = time.monotonic() + 1
    while (left := len(os.listdir(folder)) - before) >= subject.cycles // 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _held() -> tuple[int, int, int, int]:
    """Threads, descriptors, resident bytes and allocated bytes of this process. Pages of files come and go, and do not
    count."""
    gc.collect()
    release_free_memory()
    sizes_kib = [
        int(line.split()[1])
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(("RssAnon:", "RssShmem:"))
    ]
    return len(os.listdir(_THREADS)), len(os.listdir(_DESCRIPTORS)), sum(sizes_kib) << 10, allocated_bytes()


def check_process(subject: Subject) -> str:
    """An instance in a worker process gives the same results."""
    request = subject.maker.request(50, rows=min(2, subject.config.max_batch_size or 1))
    with subject.running() as runs:
        expected = runs.outputs(request, "a usual request", GIVE_REQUESTS)
    (((reply,),),) = asyncio.run(hosted_answers(subject, [[request]]))
    advice = "import all that is needed inside the backend's methods, and keep nothing in globals between them"
    outputs = answered(reply, "a request in a worker process", advice)
    if found := difference(outputs, expected, subject.tolerance):
        raise Wrong(f"an instance in a worker process has another result: {found}", advice)
    return "an instance in a worker process gives the same results"
