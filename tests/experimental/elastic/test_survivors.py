"""The layout of the devices that are left: the largest that keeps stages and tensor parallelism."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen.experimental.elastic import surviving_layout
from jvarlen.parallel import Layout

SCHEDULES = ("gpipe", "1f1b", "eager_1f1b", "interleaved", "zero_bubble")


@given(
    st.builds(
        lambda **fields: Layout(**fields | {"virtual": 2 if fields["schedule"] == "interleaved" else 1}),
        data=st.integers(2, 8),
        stage=st.integers(1, 3),
        context=st.integers(1, 4),
        tensor=st.integers(1, 3),
        zero=st.integers(0, 3),
        schedule=st.sampled_from(SCHEDULES),
    ),
    st.integers(0, 80),
    st.integers(1, 24),
)
def test_survivors_get_the_largest_layout_that_keeps_stages_and_tensor_parallelism(layout, alive, num_microbatches):
    """Against all layouts with fewer shards: parts of a row count first, then data-parallel shards."""
    multiple = layout.stage if layout.schedule == "interleaved" else 1
    possible = [
        (context, data)
        for context, data in itertools.product(range(1, layout.context + 1), range(1, layout.data + 1))
        if layout.context % context == 0
        and context * data * layout.stage * layout.tensor <= alive
        and num_microbatches % (data * multiple) == 0
    ]
    if not possible:
        with pytest.raises(ValueError, match=r"suit no number of shards|devices at least"):
            surviving_layout(layout, alive, num_microbatches)
        return
    found = surviving_layout(layout, alive, num_microbatches)
    assert (found.context, found.data) == max(possible)
    kept = {"data": found.data, "context": found.context, "zero": layout.zero if found.num_shards > 1 else 0}
    assert found == dataclasses.replace(layout, **kept)
    assert surviving_layout(found, found.num_devices, num_microbatches) == found


@pytest.mark.parametrize(
    ("layout", "alive", "num_microbatches", "survivors"),
    [
        ("data4", 3, 8, "data2"),
        ("data4", 4, 8, "data4"),
        ("data4.zero3", 1, 8, "data1"),
        ("data2.stage2.tensor2.zero1", 7, 8, "data1.stage2.tensor2"),
        ("data4.context2.context_from4096", 7, 8, "data2.context2.context_from4096"),
        ("data2.context4.context_from4096", 3, 8, "data1.context2.context_from4096"),
        ("data2.context2.context_from64.zero2", 1, 8, "data1"),
        ("data6", 5, 12, "data4"),
    ],
)
def test_survivors_go_on_with(layout, alive, num_microbatches, survivors):
    assert str(surviving_layout(Layout.parse(layout), alive, num_microbatches)) == survivors


def test_too_few_survivors_are_named_with_the_devices_that_are_needed():
    few = "data2.stage2.tensor2 goes on with 4 devices at least .stage2.tensor2., and 3 are left"
    with pytest.raises(ValueError, match=few):
        surviving_layout(Layout.parse("data2.stage2.tensor2"), 3, 8)
    with pytest.raises(ValueError, match="3 microbatches a step suit no number of shards of the layout"):
        surviving_layout(Layout.parse("data1.stage2.interleaved.virtual2"), 2, 3)
