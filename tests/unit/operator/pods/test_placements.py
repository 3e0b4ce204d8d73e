"""`status.placements`: lines that the operator reads back, and that any user may have written."""

import pytest

from halimede_operator.core.pods.placements import PodPlacement, read_placements

SLICES = ("1g.10gb MIG-1", "GPU-2")
CLAIMED = ("gpu.nvidia.com/node-1/gpu-0", "gpu.nvidia.com/node-1/gpu-1")


@pytest.mark.parametrize("devices", [(), SLICES[:1], SLICES])
@pytest.mark.parametrize("allocated", [(), CLAIMED[:1], CLAIMED])
def test_a_place_is_read_as_it_was_written(devices: tuple[str, ...], allocated: tuple[str, ...]) -> None:
    pod_placement = PodPlacement("bert-1-a", "node-1", devices, allocated)

    assert list(read_placements({"placements": [pod_placement.as_text()]})) == [pod_placement]


def test_a_place_is_one_line() -> None:
    pod_placement = PodPlacement("bert-1-a", "node-1", SLICES, CLAIMED[:1])

    assert pod_placement.as_text() == "bert-1-a on node-1: 1g.10gb MIG-1, GPU-2; allocated: gpu.nvidia.com/node-1/gpu-0"


def test_malformed_places_are_left_out() -> None:
    for placements in (None, 7, {}, [None, 7, {}, "", "bert-1-a", "bert-1-a on", "a b on node-1"]):
        assert list(read_placements({"placements": placements})) == []
