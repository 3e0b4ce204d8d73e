from collections.abc import Callable
from dataclasses import replace

import pytest

from halimede.core.config.instances import completed_groups, first_device, plan_instances
from halimede.core.config.model_config import InstanceKind, ModelConfig, ModelEnsembling, ModelInstanceGroup
from halimede.core.inventory import Inventory
from halimede.core.types import Device, DeviceKind, ErrorCode, Placement
from support.refusals import error_of

AUTO, GPU, CPU, MODEL = InstanceKind.KIND_AUTO, InstanceKind.KIND_GPU, InstanceKind.KIND_CPU, InstanceKind.KIND_MODEL
NOTHING = Inventory()
GPU0 = Device(DeviceKind.GPU, 0, "GPU-0")
GPU1 = Device(DeviceKind.MIG, 1, "MIG-1")
TWO_GPUS = Inventory((GPU0, GPU1))


def one(kind: str) -> int:
    return 1


def two_on_cpu(kind: str) -> int:
    return {"CPU": 2, "GPU": 1, "MODEL": 1}[kind]


def model(*groups: ModelInstanceGroup) -> ModelConfig:
    return ModelConfig(name="ident", backend="onnxruntime", instance_group=groups)


def planned(
    config: ModelConfig,
    inventory: Inventory,
    default_count: Callable[[str], int] = one,
    *,
    backend_gpu: bool,
) -> tuple[Placement, ...]:
    groups = complete(config, inventory, default_count, backend_gpu)
    return plan_instances(replace(config, instance_group=groups), inventory)


def plan(
    config: ModelConfig,
    inventory: Inventory = NOTHING,
    default_count: Callable[[str], int] = one,
    backend_gpu: bool = True,
) -> list[tuple[str, str, Device | None]]:
    placements = planned(config, inventory, default_count, backend_gpu=backend_gpu)
    assert [placement.ordinal for placement in placements] == list(range(len(placements)))
    return [(placement.name, placement.kind, placement.device) for placement in placements]


def complete(
    config: ModelConfig,
    inventory: Inventory = NOTHING,
    default_count: Callable[[str], int] = one,
    backend_gpu: bool = True,
) -> tuple[ModelInstanceGroup, ...]:
    return completed_groups(config, inventory, default_count=default_count, backend_gpu=backend_gpu)


def refusal(config: ModelConfig, inventory: Inventory = NOTHING, backend_gpu: bool = True) -> str:
    error = error_of(planned, config, inventory, backend_gpu=backend_gpu)
    assert error.code is ErrorCode.INVALID_ARG
    return error.message


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ((), GPU0),
        ((ModelInstanceGroup(kind=CPU), ModelInstanceGroup(kind=GPU, gpus=(1, 0))), GPU1),
        ((ModelInstanceGroup(kind=AUTO, gpus=(1,)),), GPU1),
        ((ModelInstanceGroup(kind=AUTO, gpus=(7,)),), None),
        ((ModelInstanceGroup(kind=CPU), ModelInstanceGroup(kind=MODEL)), None),
    ],
)
def test_the_first_device_of_a_model(groups, expected):
    assert first_device(model(*groups), TWO_GPUS) == expected
    assert first_device(model(*groups), NOTHING) is None


def test_a_model_without_groups_gets_one_of_its_own_name():
    assert plan(model()) == [("ident_0", "CPU", None)]
    assert complete(model()) == (ModelInstanceGroup(name="ident", kind=CPU, count=1),)


def test_backend_default_may_be_two_instances_on_cpu():
    assert plan(model(), default_count=two_on_cpu) == [("ident_0", "CPU", None), ("ident_1", "CPU", None)]
    assert complete(model(), default_count=two_on_cpu) == (ModelInstanceGroup(name="ident", kind=CPU, count=2),)


def test_without_groups_there_is_one_instance_per_gpu():
    assert plan(model(), TWO_GPUS, two_on_cpu) == [("ident_0", "GPU", GPU0), ("ident_1", "GPU", GPU1)]
    assert complete(model(), TWO_GPUS) == (ModelInstanceGroup(name="ident", kind=GPU, count=1, gpus=(0, 1)),)


def test_a_backend_that_cannot_use_a_gpu_stays_on_cpu():
    assert plan(model(), TWO_GPUS, backend_gpu=False) == [("ident_0", "CPU", None)]


def test_groups_without_a_name_are_numbered_by_their_position():
    config = model(
        ModelInstanceGroup(kind=CPU), ModelInstanceGroup(name="big", kind=MODEL, count=2), ModelInstanceGroup(kind=CPU)
    )

    assert plan(config) == [
        ("ident_0_0", "CPU", None),
        ("big_0", "MODEL", None),
        ("big_1", "MODEL", None),
        ("ident_2_0", "CPU", None),
    ]
    assert complete(config) == (
        ModelInstanceGroup(name="ident_0", kind=CPU, count=1),
        ModelInstanceGroup(name="big", kind=MODEL, count=2),
        ModelInstanceGroup(name="ident_2", kind=CPU, count=1),
    )


def test_count_is_per_gpu_and_instances_alternate_devices():
    assert plan(model(ModelInstanceGroup(kind=GPU, count=2, gpus=(1, 0))), TWO_GPUS) == [
        ("ident_0_0", "GPU", GPU1),
        ("ident_0_1", "GPU", GPU0),
        ("ident_0_2", "GPU", GPU1),
        ("ident_0_3", "GPU", GPU0),
    ]


def test_kind_auto_uses_the_listed_gpu_or_falls_back_to_cpu():
    assert plan(model(ModelInstanceGroup(gpus=(1,))), TWO_GPUS) == [("ident_0_0", "GPU", GPU1)]
    assert plan(model(ModelInstanceGroup(gpus=(1, 7))), TWO_GPUS) == [("ident_0_0", "CPU", None)]
    assert complete(model(ModelInstanceGroup(gpus=(1, 7))), TWO_GPUS) == (
        ModelInstanceGroup(name="ident_0", kind=CPU, count=1),
    )


def test_passive_and_profile_travel_with_the_instance():
    config = model(ModelInstanceGroup(name="a", kind=CPU), ModelInstanceGroup(name="b", passive=True, profile=("1",)))

    assert planned(config, NOTHING, backend_gpu=False) == (
        Placement("a_0", 0, "CPU"),
        Placement("b_0", 1, "CPU", profile=("1",), passive=True),
    )


def test_completing_twice_changes_nothing():
    config = model(ModelInstanceGroup(count=3), ModelInstanceGroup(kind=CPU), ModelInstanceGroup(gpus=(9,)))
    groups = complete(config, TWO_GPUS, two_on_cpu)

    assert complete(model(*groups), TWO_GPUS, two_on_cpu) == groups


def test_an_ensemble_has_no_instances():
    config = ModelConfig(name="e", platform="ensemble", ensemble_scheduling=ModelEnsembling())

    assert complete(config, TWO_GPUS) == ()
    assert plan(config, TWO_GPUS) == []


def test_missing_gpu_is_an_error():
    group = ModelInstanceGroup(name="g", kind=GPU)

    assert refusal(model(group)) == "instance group g of model ident has kind KIND_GPU but no GPUs are available"
    assert refusal(model(group), TWO_GPUS, backend_gpu=False) == (
        "instance group g of model ident has kind KIND_GPU but server does not support GPUs: what is installed for "
        "backend 'onnxruntime' runs on CPU only"
    )
    assert refusal(model(ModelInstanceGroup(kind=GPU, gpus=(0, 5))), TWO_GPUS) == (
        "instance group ident_0 of model ident specifies invalid or unsupported gpu id 5, available are: 0, 1"
    )


def test_the_number_of_instances_is_bounded_after_devices_are_known():
    assert len(plan(model(ModelInstanceGroup(kind=GPU, count=128)), TWO_GPUS)) == 256
    assert refusal(model(ModelInstanceGroup(kind=GPU, count=129)), TWO_GPUS) == (
        "model ident asks for 258 instances, at most 256 are allowed"
    )
    assert refusal(model(ModelInstanceGroup(kind=CPU, count=2**31 - 1))) == (
        "model ident asks for 2147483647 instances, at most 256 are allowed"
    )
