"""Layouts as text, and the meshes that they ask for."""

import dataclasses
import itertools
import random
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType

import jvarlen.parallel
from jvarlen import compile_buckets, load, make_plan
from jvarlen.distributed.layout import MESH_AXES, Layout
from jvarlen.distributed.mesh import layout_mesh

SIZES = st.integers(1, 64)
SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble")
LAYOUTS = st.builds(
    dict,
    data=st.integers(2, 64),
    stage=SIZES,
    sequence=SIZES,
    tensor=SIZES,
    zero=st.integers(0, 3),
    schedule=st.sampled_from(SCHEDULES),
    chunks=SIZES,
    sequence_parallel=st.booleans(),
    sequence_from=st.integers(0, 10**6),
    keeps=st.sampled_from([None, "inputs", "residuals"]),
).map(lambda fields: Layout(**fields))


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_a_layout_is_its_text_in_any_order(layout, shuffler):
    assert Layout.parse(str(layout)) == layout
    words = str(layout).split(".")
    shuffler.shuffle(words)
    assert Layout.parse(".".join(words)) == layout


def test_text_leaves_defaults_out():
    assert str(Layout()) == "data1"
    assert Layout.parse("data1") == Layout()
    assert str(Layout.parse("eager_1f1b.zero2.chunks1.data4.stage1.sequence_from0")) == "data4.zero2"
    full = "data2.stage2.sequence2.tensor2.zero3.interleaved.chunks2.sequence_parallel.sequence_from512.keep_residuals"
    assert str(Layout.parse(full)) == full
    assert Layout.parse(full) == Layout(
        data=2,
        stage=2,
        sequence=2,
        tensor=2,
        zero=3,
        schedule="interleaved",
        chunks=2,
        sequence_parallel=True,
        sequence_from=512,
        keeps="residuals",
    )
    assert [Layout.parse(text).kept for text in ("data2", "stage2", "data2.keep_inputs")] == [
        "residuals", "inputs", "inputs"
    ]  # fmt: skip


@pytest.mark.parametrize("words", [(), *itertools.combinations(("data2", "stage3", "tensor5", "zero1"), 2)])
def test_devices_are_the_product_of_the_axes(words):
    product = 1
    for word in words:
        product *= 1 if word == "zero1" else int(word[-1])
    if "zero1" in words and "data2" not in words:
        words, product = (*words, "data2"), product * 2
    assert Layout.parse(".".join(words) or "data1").num_devices == product


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data2.data4", "'data2.data4' says one thing more than once: data2 and data4"),
        ("data2.gpipe.1f1b", "gpipe and 1f1b"),
        ("data2.sequence_parallel.sequence_parallel", "sequence_parallel and sequence_parallel"),
        ("data2.dta4.pipe", "no word 'dta4', 'pipe'; its words are dataN, stageN"),
        ("", "no word ''"),
        ("data2.", "no word ''"),
        ("data-2", "no word 'data-2'"),
        ("data", "no word 'data'"),
        ("data٢", "no word"),
        ("data0.tensor0", r"at least 1 .*data \(0\), tensor \(0\)"),
        ("chunks0", r"chunks \(0\)"),
        ("data2.zero4", "zero must be a level from 0 to 3, not 4"),
        ("zero2", "zero2 shards over 'data' and 'sequence', whose sizes are 1"),
        ("tensor2.zero1.data1", "zero1 shards over 'data' and 'sequence', whose sizes are 1"),
    ],
)
def test_what_is_no_layout_is_refused_by_its_words(text, message):
    with pytest.raises(ValueError, match=message):
        Layout.parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"zero": -1}, r"zero \(-1\)"), ({"sequence_from": -1}, r"sequence_from \(-1\)"), ({"data": 0}, r"data \(0\)")],
)
def test_fields_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        Layout(**fields)


def test_a_layout_does_not_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Layout().data = 2


def test_a_mesh_has_the_axes_of_its_layout():
    mesh = layout_mesh(Layout.parse("data2.stage1.sequence1.tensor3"))
    assert dict(mesh.shape) == {"data": 2, "stage": 1, "sequence": 1, "tensor": 3}
    assert mesh.axis_names == MESH_AXES
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert mesh.devices.flatten().tolist() == jax.devices()[:6]
    chosen = random.Random(0).sample(jax.devices(), 4)
    assert set(layout_mesh(Layout(data=4), chosen).devices.flatten()) == set(chosen)


def test_a_mesh_takes_exactly_the_devices_of_its_layout():
    with pytest.raises(ValueError, match=r"data4.stage4 takes 16 devices, and there are 8.*jax_num_cpu_devices', 16"):
        layout_mesh(Layout(data=4, stage=4))
    with pytest.raises(ValueError, match="data4 takes 4 devices, not the 3 given ones"):
        layout_mesh(Layout(data=4), jax.devices()[:3])


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
    assert parallel == "sequence_parallel must be True or False, not 1"


def test_a_layout_stands_for_its_mesh():
    layout, samples = Layout(data=2), [np.arange(length) for length in (3, 1, 4, 2)]
    plan = make_plan([3, 1, 4, 2], [(1, 4)], order="length", microbatches_per_step=2)
    step = compile_buckets(count_tokens, np.int32(0), plan, layout=layout, progress=False)
    num_tokens = np.int32(0)
    for batch in load(plan, samples, layout=layout):
        assert batch.tokens.sharding.mesh == step.mesh == layout_mesh(layout)
        num_tokens, _ = step(num_tokens, batch)
    assert int(num_tokens) == 10
    other = {"mesh": layout_mesh(Layout(data=4)), "layout": layout}
    for call in (lambda: load(plan, samples, **other), lambda: compile_buckets(count_tokens, 0, plan, **other)):
        with pytest.raises(ValueError, match="not that of the layout data2: it has 'data' 4 where the layout has 2"):
            call()


def count_tokens(state, batch):
    return state + batch.lengths.sum(), {}
