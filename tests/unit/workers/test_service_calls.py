"""The codec of service calls: both ends agree on every call and every result."""

from enum import IntEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halimede.backends.service_calls import (
    METRIC_KINDS,
    DeleteMetricFamily,
    IsModelReady,
    LoadModel,
    MetricValue,
    NewMetric,
    NewMetricFamily,
    ServiceCall,
    ServiceResult,
    UnloadModel,
)
from halimede.channel.frames import HEADER, MAX_CONTROL_BYTES, MAX_TEXT_BYTES, FrameError
from halimede.core.types import ErrorCode, InferenceError
from halimede.workers.frames.kinds import WorkerFrame
from halimede.workers.frames.services import (
    MAX_ENTRIES,
    decode_service_call,
    decode_service_result,
    encode_service_call,
    encode_service_result,
    service_call_frame,
)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IDS = st.integers(0, 2**64 - 1)
CALLS: st.SearchStrategy[ServiceCall[ServiceResult]] = st.one_of(
    st.builds(LoadModel, TEXTS, TEXTS, st.dictionaries(TEXTS, st.binary(max_size=50), max_size=3)),
    st.builds(UnloadModel, TEXTS, st.booleans()),
    st.builds(IsModelReady, TEXTS, TEXTS),
    st.builds(NewMetricFamily, TEXTS, TEXTS, st.sampled_from(METRIC_KINDS)),
    st.builds(DeleteMetricFamily, IDS),
    st.builds(NewMetric, IDS, st.dictionaries(TEXTS, TEXTS, max_size=3), st.lists(st.floats(allow_nan=False))),
    st.builds(MetricValue, IDS),
)
ERRORS = st.builds(InferenceError, st.sampled_from(ErrorCode), TEXTS)


def body_of(frame: bytes, kind: IntEnum) -> bytes:
    assert HEADER.unpack_from(frame) == (len(frame) - HEADER.size, kind)
    return frame[HEADER.size :]


@given(st.integers(0, 2**32 - 1), CALLS)
def test_the_server_reads_the_call_that_the_worker_wrote(number: int, call: ServiceCall[ServiceResult]) -> None:
    frame = service_call_frame(number, encode_service_call(call))
    assert decode_service_call(body_of(frame, WorkerFrame.SERVICE_CALL)) == (number, call)


@given(st.integers(0, 2**32 - 1), st.none() | st.booleans() | IDS | st.floats(allow_nan=False) | ERRORS)
def test_the_worker_reads_the_result_that_the_server_wrote(number: int, result: ServiceResult | InferenceError) -> None:
    read = decode_service_result(body_of(encode_service_result(number, result), WorkerFrame.SERVICE_RESULT))
    assert read == (number, result)
    assert type(read[1]) is type(result)


@given(CALLS, st.data())
def test_a_call_that_ends_too_early_is_refused(call: ServiceCall[ServiceResult], data: st.DataObject) -> None:
    body = bytes(4) + encode_service_call(call)
    with pytest.raises(FrameError):
        decode_service_call(body[: data.draw(st.integers(0, len(body) - 1))])


def test_half_of_a_surrogate_pair_is_replaced() -> None:
    encoded = encode_service_call(IsModelReady("a\ud800", ""))
    assert decode_service_call(bytes(4) + encoded) == (0, IsModelReady("a?", ""))


def test_the_text_of_an_error_is_cut() -> None:
    frame = encode_service_result(1, InferenceError(ErrorCode.INTERNAL, "x" * (MAX_TEXT_BYTES + 1)))
    _, error = decode_service_result(body_of(frame, WorkerFrame.SERVICE_RESULT))
    assert error == InferenceError(ErrorCode.INTERNAL, "x" * MAX_TEXT_BYTES)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (LoadModel("m", "", {"f": bytes(MAX_CONTROL_BYTES)}), "at most 16777216 are taken"),
        (LoadModel("m", "", dict.fromkeys(map(str, range(MAX_ENTRIES + 1)), b"")), "100001 files, at most 100000"),
        (NewMetric(1, dict.fromkeys(map(str, range(MAX_ENTRIES + 1)), ""), []), "100001 labels, at most 100000"),
        (NewMetric(1, {}, [1.0] * (MAX_ENTRIES + 1)), "100001 buckets, at most 100000"),
    ],
)
def test_call_that_the_server_would_refuse_is_not_sent(call: ServiceCall[ServiceResult], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        encode_service_call(call)
