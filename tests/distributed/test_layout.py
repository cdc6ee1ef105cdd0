"""Layouts as text, and the meshes that they ask for."""

import math
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

import jvarlen.parallel
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.distributed.layout import MESH_AXES, Layout
from jvarlen.distributed.placement import place, placement_of

SIZES = st.integers(1, 64)
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble")
LAYOUTS = st.builds(
    dict,
    data=st.sampled_from([-1, *range(2, 65)]),
    stage=SIZES,
    context=SIZES,
    tensor=SIZES,
    zero=st.integers(0, 3),
    schedule=st.sampled_from(SCHEDULES),
    virtual=SIZES,
    sequence_parallel=st.booleans(),
    context_from=st.integers(0, 10**6),
    remat=st.sampled_from([None, "full", "selective", "none"]),
).map(lambda fields: Layout(**fields))


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_a_layout_is_its_text_in_any_order(layout, shuffler):
    assert Layout.parse(str(layout)) == layout
    words = str(layout).split(".")
    shuffler.shuffle(words)
    assert Layout.parse(".".join(words)) == layout


def test_text_leaves_defaults_out():
    assert str(Layout()) == "data"
    assert Layout.parse("data") == Layout()
    assert str(Layout(data=1, tensor=2)) == "data1.tensor2"
    assert Layout.parse("tensor2") == Layout(tensor=2) == Layout.parse("data.tensor2")
    assert str(Layout.parse("eager_1f1b.zero2.virtual1.data4.stage1.context_from0")) == "data4.zero2"
    full = "data2.stage2.context2.tensor2.zero3.interleaved.virtual2.sequence_parallel.context_from512.remat_none"
    assert str(Layout.parse(full)) == full
    assert Layout.parse(full) == Layout(
        data=2, stage=2, context=2, tensor=2, zero=3, schedule="interleaved", virtual=2, sequence_parallel=True,
        context_from=512, remat="none",
    )  # fmt: skip
    assert [Layout.parse(text).remat_in_force for text in ("data2", "stage2", "data2.remat_full")] == [
        "none", "full", "full"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data2.data4", "'data2.data4' says one thing more than once: data2 and data4"),
        ("data2.gpipe.1f1b", "gpipe and 1f1b"),
        ("data2.sequence_parallel.sequence_parallel", "sequence_parallel and sequence_parallel"),
        ("data2.dta4.pipe", "no word 'dta4', 'pipe'; its words are data, sequence_parallel, .*dataN, stageN"),
        ("", "no word ''"),
        ("data2.", "no word ''"),
        ("data-2", "no word 'data-2'"),
        ("data.data2", "data and data2"),
        ("data2.remat_some", "no word 'remat_some'"),
        ("data٢", "no word"),
        ("data0.tensor0", r"at least 1 .*data \(0\), tensor \(0\)"),
        ("virtual0", r"virtual \(0\)"),
        ("data2.zero4", "zero must be a level from 0 to 3, not 4"),
        ("zero2.data1", "zero2 shards over 'data' and 'context', whose sizes are 1"),
        ("tensor2.zero1.data1", "zero1 shards over 'data' and 'context', whose sizes are 1"),
    ],
)
def test_what_is_no_layout_is_refused_by_its_words(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize("name", ["zero", "context_from"])
def test_a_level_or_a_length_below_0_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name} \(-1\)"):
        Layout(**{name: -1})


def test_data_shards_are_what_the_devices_leave():
    assert str(Layout.parse("tensor2").for_devices(8)) == "data4.tensor2"
    assert Layout.parse("data2.stage3.tensor5.context7.zero1").num_devices == 210
    assert Layout.parse("data4").for_devices(4) == Layout(data=4)
    assert place("zero3.stage2").layout == Layout(data=4, stage=2, zero=3)
    with pytest.raises(ValueError, match="layout tensor2 has as many data shards as devices leave: say how many"):
        Layout.parse("tensor2").num_devices  # noqa: B018
    for layout, num_devices, message in (
        ("tensor3", 8, "layout tensor3 takes a multiple of 3 devices, not 8"),
        ("tensor3", 0, "a multiple of 3 devices, not 0"),
        ("data2", 8, "data2 takes 2 devices, not the 8 given ones"),
        ("zero1", 1, "zero1 shards over 'data' and 'context', whose sizes are 1"),
    ):
        with pytest.raises(ValueError, match=message):
            Layout.parse(layout).for_devices(num_devices)


def test_a_placement_has_the_axes_of_its_layout():
    mesh = place("data2.stage1.context1.tensor3").mesh
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "context": 1, "tensor": 3}
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.flatten().tolist() == jax.devices()[:6]
    chosen = random.Random(0).sample(jax.devices(), 4)
    for layout in ("data4", "data"):
        placement = place(layout, chosen)
        assert (placement.layout, set(placement.mesh.devices.flatten())) == (Layout(data=4), set(chosen))


def test_a_layout_takes_exactly_its_devices():
    with pytest.raises(ValueError, match=r"data4.stage4 takes 16 devices, and there are 8.*jax_num_cpu_devices', 16"):
        place(Layout(data=4, stage=4))
    with pytest.raises(ValueError, match="data4 takes 4 devices, not the 3 given ones"):
        place(Layout(data=4), jax.devices()[:3])
    with pytest.raises(ValueError, match=r"axes \({'data': 'dp'}\) name axes of a mesh"):
        place(Layout(), jax.devices(), axes={"data": "dp"})


def mesh_with(**axes):
    devices = jax.devices()[: math.prod(axes.values())]
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(AxisType.Explicit,) * len(axes), devices=devices
    )


def test_an_existing_mesh_keeps_its_names_and_the_compilers_axes():
    for layout, axes in ((Layout(), {"data": "dp"}), (Layout(data=4), {"data": "dp"})):
        placement = place(layout, mesh_with(dp=4, model=2), axes=axes)
        assert (placement.layout, placement.data_axis) == (Layout(data=4), "dp")
        assert dict(placement.mesh.shape) == {"dp": 4, "model": 2}
        assert set(placement.mesh.axis_types) == {AxisType.Auto}
        assert placement.batch_shardings(np.zeros((8, 3))).spec == PartitionSpec("dp")
        assert placement.local_microbatches(8).tolist() == list(range(8))
        assert placement.program_mesh.axis_names[0] == "data"
    placement = place(Layout(tensor=2), mesh_with(dp=4, tp=2), axes={"data": "dp", "tensor": "tp"})
    assert placement.layout == Layout(data=4, tensor=2)
    assert placement.program_mesh.axis_names == ("data", "tensor")
    assert place(Layout(tensor=2), mesh_with(data=4, tensor=2)).program_mesh.axis_names == ("data", "tensor")


@pytest.mark.parametrize(
    ("layout", "mesh", "axes", "message"),
    [
        (Layout(data=2), {"data": 4}, None, "not that of the layout data2: it has 'data' 4 where the layout has 2"),
        (Layout(data=2), {"dp": 4}, {"data": "dp"}, "it has 'dp' 4 where the layout has 2"),
        (Layout(tensor=2), {"data": 4}, None, "it has 'tensor' 1 where the layout has 2"),
        (Layout(), {"data": 4, "tensor": 2}, None, "it has 'tensor' 2 where the layout has 1"),
        (Layout(), {"x": 4, "y": 2}, None, "axes x, y, but no 'data'"),
        (Layout(), {"x": 4, "y": 2}, {"data": "z"}, "axes x, y, but no 'z'"),
        (Layout(), {"x": 4, "y": 2}, {"data": "x", "model": "y"}, "no axis 'model', but data, stage"),
    ],
)
def test_a_mesh_that_is_not_the_layouts_is_refused(layout, mesh, axes, message):
    with pytest.raises(ValueError, match=message):
        place(layout, mesh_with(**mesh), axes=axes)


def test_an_argument_layout_takes_a_layout_its_text_a_placement_or_a_mesh():
    assert placement_of(None) is None
    placement = place(Layout(data=2))
    assert placement_of("data2") == placement_of(Layout(data=2)) == placement_of(placement) == placement
    assert placement_of("data").layout == placement_of(Layout()).layout == Layout(data=8)
    assert placement_of(mesh_with(x=4)).data_axis == "x"
    of_the_compiler = placement_of(mesh_with(tensor=2, data=4))
    assert (of_the_compiler.layout, of_the_compiler.axes) == (Layout(data=4), {"data": "data"})
    with pytest.raises(ValueError, match="which axis of the mesh is for data, 'x' or 'y'"):
        placement_of(mesh_with(x=4, y=2))
    with pytest.raises(ValueError, match="layout must be a Layout, its text, a Placement, a Mesh or None, not a int"):
        placement_of(5)


def test_the_package_exports_what_its_modules_have():
    for name in jvarlen.parallel.__all__:
        exported = getattr(jvarlen.parallel, name)
        assert name in sys.modules[exported.__module__].__all__
    assert set(jvarlen.parallel.__all__) <= set(dir(jvarlen.parallel))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jvarlen.parallel.nothing  # noqa: B018


def test_a_layout_is_read_without_jax_and_checks_types():
    """In a process of its own, where no other checker sees the types first."""
    program = """
import sys
from jvarlen.parallel import Layout

assert str(Layout.parse("zero1.data2")) == "data2.zero1"
for fields in ({"data": 2.0}, {"stage": True}, {"schedule": "2f2b"}, {"sequence_parallel": 1}):
    try:
        print(Layout(**fields))
    except ValueError as error:
        print(error)
assert "jax" not in sys.modules
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    data, stage, schedule, parallel = run.stdout.splitlines()
    assert "data (2.0)" in data
    assert "stage (True)" in stage
    assert "schedule ('2f2b') must be one of 'gpipe', '1f1b', 'eager_1f1b', 'interleaved', 'zero_bubble'" in schedule
    assert parallel == "sequence_parallel (1) must be True or False"


def test_a_command_takes_devices_of_each_process():
    assert launch(DeviceConfig(devices=3)).mesh.devices.flatten().tolist() == jax.devices()[:3]
    assert launch(DeviceConfig()).layout == Layout(data=8)
    assert launch(DeviceConfig(devices=4), Layout(tensor=2)).layout == Layout(data=2, tensor=2)
    with pytest.raises(ValueError, match=r"devices must be between 1 and 8, not 9: process 0 has 8. A CPU is split"):
        launch(DeviceConfig(devices=9))


def test_scalars_of_a_batch_are_replicated_and_arrays_are_spread():
    shardings = place("data4").batch_shardings({"x": np.zeros((8, 3)), "n": np.float32(1)})
    assert shardings["n"].is_fully_replicated
    assert shardings["x"].shard_shape((8, 3)) == (2, 3)
