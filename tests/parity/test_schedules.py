"""Orders of pipeline schedules are those of `torch.distributed.pipelining`, found on mock stages in one process."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
from torch.nn import Identity

from jvarlen.parallel import make_schedule

TRIPLES = [
    (1, 3, 2),
    (2, 2, 1),
    (2, 4, 3),
    (2, 8, 2),
    (3, 9, 2),
    (4, 4, 2),
    (4, 8, 2),
    (4, 12, 4),
    (5, 10, 3),
    (8, 16, 2),
]


def order_of(schedule):
    """For each stage: kind, part of the model, microbatch."""
    return [
        [("FBW"[kind], virtual * schedule.num_stages + s, m) for kind, m, virtual in of_stage.tolist()]
        for s, of_stage in enumerate(schedule.actions)
    ]


def torch_order(make, num_stages, num_microbatches, num_virtual):
    """From the `pipeline_order` of a schedule that has several stages in each process."""
    num_parts = num_stages * num_virtual
    stages = [
        SimpleNamespace(group_size=num_stages, group_rank=0, num_stages=num_parts, stage_index=part, submod=Identity())
        for part in range(0, num_parts, num_stages)
    ]
    order = make(stages, num_microbatches).pipeline_order
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W"}
    return [
        [(kinds[each.computation_type.name], each.stage_index, each.microbatch_index) for each in order[s] if each]
        for s in range(num_stages)
    ]


def torch_calls(make, num_stages, num_microbatches, s):
    """What a schedule calls on a stage; its `pipeline_order` counts microbatches of the last stage from 1."""
    calls = []
    stage = MagicMock(num_stages=num_stages, stage_index=s, is_last=False)
    for name in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        getattr(stage, name).return_value = []
    stage.forward_one_chunk.side_effect = lambda m, *args, **options: calls.append(("F", s, m))
    stage.backward_one_chunk.side_effect = lambda m, **options: calls.append(("B", s, m))
    schedule = make(stage, num_microbatches)
    schedule._initialize_stage = MagicMock()
    schedule._step_microbatches([()] * num_microbatches)
    return calls


@pytest.mark.parametrize(("s", "m", "v"), TRIPLES)
def test_interleaving_is_that_of_torch(s, m, v):
    assert order_of(make_schedule("interleaved", s, m, v)) == torch_order(ScheduleInterleaved1F1B, s, m, v)


@pytest.mark.parametrize(("s", "m"), [(1, 3), (2, 4), (4, 4), (4, 8), (5, 10)])
def test_with_one_virtual_stage_it_is_eager(s, m):
    assert order_of(make_schedule("eager_1f1b", s, m)) == torch_order(ScheduleInterleaved1F1B, s, m, 1)


@pytest.mark.parametrize(("s", "m"), [(1, 3), (2, 4), (4, 4), (4, 8), (5, 10), (8, 16)])
def test_zero_bubble_is_the_one_of_torch_with_one_virtual_stage(s, m):
    assert order_of(make_schedule("zero_bubble", s, m)) == torch_order(ScheduleInterleavedZeroBubble, s, m, 1)


@pytest.mark.parametrize(("s", "m"), [(1, 3), (2, 2), (4, 4), (4, 8), (3, 7)])
def test_gpipe_and_1f1b_are_those_of_torch(s, m):
    for name, peer in (("gpipe", ScheduleGPipe), ("1f1b", Schedule1F1B)):
        assert order_of(make_schedule(name, s, m)) == [torch_calls(peer, s, m, stage) for stage in range(s)]
