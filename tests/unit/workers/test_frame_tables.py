"""The tables of frames: each kind has a number of its own, and a limit if the process may send it."""

import pytest

from halimede.channel.frames import ChannelFrame, FrameTable
from halimede.front_processes.frames import FRONT_FRAMES, FrontFrame
from halimede.inference_frames.kinds import InferenceFrame
from halimede.workers.frames.kinds import WORKER_FRAMES, WorkerFrame

FIRST_OF_THE_PROCESS = 32


def test_no_two_frames_have_the_same_number():
    names = [name for part in (ChannelFrame, InferenceFrame, WorkerFrame, FrontFrame) for name in part.__members__]

    assert sorted(names) == sorted({kind.name for kind in (WORKER_FRAMES | FRONT_FRAMES).values()})


@pytest.mark.parametrize("frames", [WORKER_FRAMES, FRONT_FRAMES], ids=["workers", "front ends"])
def test_a_frame_of_the_process_has_a_limit_and_one_of_the_server_has_none(frames: FrameTable):
    assert {kind.name: kind.limit is not None for kind in frames.values()} == {
        kind.name: number >= FIRST_OF_THE_PROCESS for number, kind in frames.items()
    }


def test_the_protocols_share_the_channel_and_answers_of_inferences():
    shared = {InferenceFrame.CALL_ANSWER, InferenceFrame.CANCEL_CALL, InferenceFrame.TAKEN}

    assert set(WORKER_FRAMES.values()) & set(FRONT_FRAMES.values()) == {*ChannelFrame} | shared
