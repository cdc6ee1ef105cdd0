"""Predicted seconds of steps against simulated schedules and formulas."""

import contextlib
import dataclasses
import itertools

import numpy as np
import pytest

from jvarlen import Bucket
from jvarlen.estimates import step_seconds as module
from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.estimates.layout_table import SCHEDULES, layout_table
from jvarlen.estimates.model_costs import AxisTraffic, ModelCosts, PerPass, Work
from jvarlen.estimates.step_seconds import cuts_of_layers, step_seconds
from jvarlen.experimental.operators.cutting import cut_layers
from jvarlen.parallel import Layout, make_schedule
from jvarlen.parallel.layers import layers_per_part


def unit_cluster(**changes):
    """A device takes a second for each operation; messages take none."""
    free = Link(1e30, 0)
    fields = {"flops_per_second": 1.0, "efficiency": 1.0, "memory_bytes_per_second": 1e30, "link": free}
    fields |= {"memory_efficiency": 1.0, "attention_efficiency": 1.0, "kernel_s": 0, "overlap": 0.0}
    return dataclasses.replace(Cluster.named("dgx-h100"), **fields | {"host_link": free} | changes)


def model_costs(num_layers=8, forward=1.0, backward=2.0, ends=0.0, again=None, share=1.0, **changes):
    def passes(forward, backward, again=None):
        again = forward if again is None else again
        values = forward, backward, again / 2, again
        return PerPass(*(Work(*np.array([[value], [0.0], [0.0], [0.0]])) for value in values))

    def split(share):
        return PerPass(*[Work(share, share, share, 0.0)] * 4)

    fields = {
        "buckets": (Bucket(1, 64),),
        "num_layers": num_layers,
        "layer": passes(forward, backward, again),
        "ends": passes(ends, 2 * ends),
        "layer_split": split(share),
        "ends_split": split(share),
        "x_bytes": np.array([1e6]),
        "layer_traffic": {},
        "ends_traffic": {},
        "layer_params": (1000, 3000),
        "ends_params": (0, 8000),
        "layer_trained": (1000, 3000),
        "ends_trained": (0, 8000),
        "param_bytes": 4.0,
        "tensor_sizes": (1, 2, 4, 8),
        "by_positions": True,
    }
    return ModelCosts(**fields | changes)


def seconds_of(text, costs, cluster, num_microbatches=8, **options):
    table = layout_table([Layout.parse(text)])
    found = step_seconds(table, costs, cluster, num_microbatches=num_microbatches, **options)
    return type(found)(*(part.item() for part in found))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager_1f1b", "zero_bubble"])
@pytest.mark.parametrize("num_stages", [2, 4])
def test_stages_take_what_the_simulated_schedule_takes(schedule, num_stages):
    of_stage = 8 / num_stages
    costs = {"F": of_stage, "B": 2 * of_stage}
    if schedule == "zero_bubble":
        costs = {"F": of_stage, "B": of_stage, "W": of_stage}
    simulated = make_schedule(schedule, num_stages, 8).simulate(costs, "synchronous")
    found = seconds_of(f"data1.stage{num_stages}.{schedule}.remat_none", model_costs(), unit_cluster())
    assert found.total == pytest.approx(simulated.makespan)
    assert found.bubble / found.total == pytest.approx(simulated.bubble)


def test_kept_inputs_run_layers_again():
    plain = seconds_of("data1.stage4.remat_none", model_costs(), unit_cluster())
    again = seconds_of("data1.stage4", model_costs(), unit_cluster())
    assert again.total == pytest.approx(plain.total * 4 / 3)
    whole, kept = (seconds_of(text, model_costs(), unit_cluster()).compute for text in ("data1", "data1.remat_full"))
    assert (whole, kept) == (8 * 8 * 3, 8 * 8 * 4)
    assert seconds_of("data1.remat_selective", model_costs(), unit_cluster()).compute == 8 * 8 * 3.5
    # Weight gradients run the backward pass again as well, but not where layers keep a part.
    for word, costs in (("", {"F": 2, "B": 4, "W": 6}), (".remat_selective", {"F": 2, "B": 3, "W": 3})):
        simulated = make_schedule("zero_bubble", 4, 8).simulate(costs, "synchronous")
        found = seconds_of(f"data1.stage4.zero_bubble{word}", model_costs(), unit_cluster())
        assert found.total == pytest.approx(simulated.makespan)


@pytest.mark.parametrize(("layout", "ticks"), [("data1.remat_full", 8), ("data1.stage4", 11)])
def test_a_layer_that_runs_again_need_not_give_its_output(layout, ticks):
    """It forms 8 layers of a device, or two of a stage."""
    found = seconds_of(layout, model_costs(again=0.5), unit_cluster())
    assert found.total == pytest.approx(ticks * (8 if ticks == 8 else 2) * 3.5)


def test_the_last_stage_computes_the_loss():
    """In each of its backward passes, one a microbatch."""
    without = seconds_of("data1.stage4.remat_none", model_costs(), unit_cluster()).total
    found = seconds_of("data1.stage4.remat_none", model_costs(ends=0.5), unit_cluster()).total
    assert found == pytest.approx(without + 8 * 1.5)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_ticks_of_many_microbatches_are_counted_without_making_them(schedule, monkeypatch):
    for num_stages in (2, 3, 5):
        for num_microbatches in (6 * num_stages, 9 * num_stages, 7 * num_stages + 1):
            key = (SCHEDULES.index(schedule), num_stages, 1, num_microbatches)
            found = module._ticks_of.__wrapped__(*key)
            with monkeypatch.context() as patch:
                patch.setattr(module, "_STEADY", 10**6)
                assert found == module._ticks_of.__wrapped__(*key)


def test_virtual_stages_make_the_bubble_smaller():
    made = make_schedule("interleaved", 4, 8, 2).simulate({"F": 1, "B": 2}, "synchronous")
    found = seconds_of("data1.stage4.interleaved.virtual2.remat_none", model_costs(), unit_cluster())
    assert found.total == pytest.approx(made.makespan)
    assert found.total / seconds_of("data1.stage4.remat_none", model_costs(), unit_cluster()).total == 19 / 22


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "zero_bubble", "interleaved"])
def test_devices_that_wait_for_their_neighbours_alone_take_as_long(schedule):
    """Every tick ends with a message to both; a stage in its longer pass is next to one that waits for it."""
    virtual = 2 if schedule == "interleaved" else 1
    made = make_schedule(schedule, 4, 16, virtual)
    costs = {"F": 1, "B": 1, "W": 1} if schedule == "zero_bubble" else {"F": 1, "B": 2}
    seconds = np.array([0, *costs.values()])[made.tables().kind + 1]  # in each tick and stage
    free = np.zeros(4)
    for tick in seconds:
        free = np.max([free, *(np.roll(free, by) for by in (1, -1))], axis=0) + tick
    lockstep = seconds.max(axis=1).sum()
    assert free.max() == pytest.approx(lockstep, rel=0.02)
    assert made.simulate(costs).makespan == lockstep


@pytest.mark.parametrize(("word", "virtual"), [("1f1b", 1), ("interleaved.virtual2", 2)])
def test_stages_that_are_programs_of_their_own_wait_for_inputs(word, virtual):
    found = seconds_of(f"data1.stage4.{word}.remat_none", model_costs(), unit_cluster(), 16, of_own_programs=True)
    made = make_schedule(word.partition(".")[0], 4, 16, virtual)
    assert found.total == made.simulate({"F": 2 / virtual, "B": 4 / virtual}, "mpmd").makespan


@pytest.mark.parametrize(
    ("text", "num_layers", "ends", "as_long"),
    [("stage4", 30, 0.0, 8), ("stage4", 30, 4 / 3, 8), ("stage4.layers9", 32, 8 / 3, 9)],
)
def test_a_stage_with_fewer_layers_has_time_for_the_ends(text, num_layers, ends, as_long):
    """In the ticks of its backward passes, which take 2 a layer."""
    whole = seconds_of("data1.stage4.remat_none", model_costs(num_layers=32), unit_cluster()).total
    found = seconds_of(f"data1.{text}.remat_none", model_costs(num_layers=num_layers, ends=ends), unit_cluster())
    assert found.total == pytest.approx(whole * as_long / 8)
    assert found.compute == pytest.approx(8 * 3 * (num_layers + ends) / 4)
    more = seconds_of(f"data1.{text}.remat_none", model_costs(num_layers=num_layers, ends=ends + 1), unit_cluster())
    spare = 2 * (4 * as_long - num_layers) - 3 * ends
    assert more.total == pytest.approx(whole * as_long / 8 + 8 * max(3 - spare, 0))


def test_more_stages_than_layers_are_refused():
    with pytest.raises(ValueError, match=r"^6 layers do not make these stages.*: data1.stage8"):
        seconds_of("data1.stage8", model_costs(num_layers=6), unit_cluster())
    with pytest.raises(ValueError, match=r"^8 layers do not make these stages.*: data1.stage2.layers3"):
        seconds_of("data1.stage2.layers3", model_costs(num_layers=8), unit_cluster())


def test_cuts_to_try_have_the_least_largest_part():
    for num_layers, ends, num_parts in itertools.product((8, 12, 30, 31), (0.0, 0.4, 2.0, 7.0), (2, 4, 5)):
        sizes = cuts_of_layers(model_costs(num_layers=num_layers, ends=ends), num_parts)
        largest = [
            max(size, max(num_layers - size * (num_parts - 1), 0) + ends)
            for size in (-(-num_layers // num_parts), *sizes[1:])
        ]
        best = cut_layers(np.ones(num_layers), num_parts, last=ends)
        assert min(largest) <= max(*best[:-1], best[-1] + ends)
        for layers in sizes:
            layers_per_part(num_layers, Layout(stage=num_parts, layers=layers))
    assert cuts_of_layers(model_costs(), 2) == [0]
    assert cuts_of_layers(model_costs(), 2, given=5) == [5]


def test_tables_take_the_layers_that_layouts_do():
    layouts = [
        Layout(data=1, stage=stage, virtual=virtual, layers=layers)
        for stage, virtual, layers in itertools.product((2, 3, 4), (1, 2, 3), range(8))
    ]
    for num_layers in (2, 5, 9, 12):
        takes = layout_table(layouts).takes_layers(num_layers)
        for layout, taken in zip(layouts, takes.tolist(), strict=True):
            with contextlib.nullcontext() if taken else pytest.raises(ValueError, match="layers"):
                layers_per_part(num_layers, layout)


def test_attention_elementwise_kernels_and_launches_take_their_own_time():
    """ "tensor" splits the first three, by what each is split."""
    work = Work(*np.array([[1.0], [2.0], [3.0], [5.0]]))
    costs = model_costs(layer=PerPass(work, work, work, work))
    rates = {"attention_efficiency": 0.5, "memory_bytes_per_second": 12.0, "memory_efficiency": 0.5, "kernel_s": 0.1}
    cluster = unit_cluster(**rates)
    alone = seconds_of("data1", costs, cluster, 1).compute
    assert alone == pytest.approx(8 * 2 * (1 + 2 / 0.5 + 3 / 6 + 5 * 0.1))
    assert seconds_of("data1.tensor2", costs, cluster, 1).compute == pytest.approx(8 * 2 * (5.5 / 2 + 0.5))
    measured = seconds_of("data1", costs, cluster, 1, cost=lambda rows, length: 3.0 + 0 * length)
    assert measured.compute == pytest.approx(3)


def test_gradients_take_what_a_ring_takes():
    cluster = unit_cluster(link=Link(1e3, 0), flops_per_second=1e30)
    costs = model_costs(num_layers=2)
    num_bytes = 4 * (2 * 4000 + 8000)
    of_shard = num_bytes / 1e3 * 3 / 4
    data = {text: seconds_of(text, costs, cluster).data for text in ("data4", *(f"data4.zero{i}" for i in (1, 2, 3)))}
    assert data["data4"] == pytest.approx(2 * of_shard)
    assert data["data4.zero1"] == pytest.approx(2 * of_shard)
    assert data["data4.zero2"] == pytest.approx((2 + 1) * of_shard)  # reduced in both microbatches
    gathered = (2 * 2 * 4 * 2 * 4000 + 4 * 8000) / 1e3 * 3 / 4  # layers twice in each, the ends once
    assert data["data4.zero3"] == pytest.approx(2 * of_shard + gathered)
    of_loss = seconds_of("data4.zero3", model_costs(num_layers=0), cluster).data  # all parameters in each microbatch
    assert of_loss == pytest.approx((2 + 2) * 4 * 8000 / 1e3 * 3 / 4)
    halves = seconds_of("data2.tensor2", costs, cluster).data
    assert halves == pytest.approx(2 * 4 * (2 * (1000 + 1500) + 4000) / 1e3 / 2)
    staged = seconds_of("data2.stage2.zero3", costs, cluster).data  # once a step, and the ends' gradients over stages
    assert staged == pytest.approx((2 * 4 * (4000 + 8000) / 2 + 4 * 8000) / 1e3)


@pytest.mark.parametrize(("layout", "hides"), [("data4.zero3", 2 * 8 * 0.3), ("data4.zero2", 0), ("data2.stage2", 0)])
def test_layers_that_are_gathered_early_are_not_waited_for(layout, hides):
    slow = {"link": Link(1e3, 0)}
    free, hidden = (
        seconds_of(layout, model_costs(forward=0.1, backward=0.2), unit_cluster(overlap=overlap, **slow)).data
        for overlap in (0.0, 0.5)
    )
    assert hidden == pytest.approx(free - hides)  # both microbatches of a shard


def test_axes_inside_a_microbatch_divide_its_products_and_add_their_collectives():
    traffic = PerPass((AxisTraffic("all_reduce", 2, 2.0),), (AxisTraffic("all_reduce", 2, 2.0),), (), ())
    costs = model_costs(layer_traffic={"tensor": traffic, "context": traffic})
    cluster = unit_cluster(link=Link(1e6, 1e-3))
    found = seconds_of("data1.tensor2", costs, cluster, 1)
    assert found.compute == pytest.approx(8 * 3 / 2)
    assert found.tensor == pytest.approx(8 * 4 * (2 * 1e-3 + 1))  # a ring of two sends the whole x
    spread = seconds_of("data1.context2.tensor2", costs, cluster, 1)
    assert spread.compute == pytest.approx(8 * 3 / 4)
    assert spread.tensor == spread.context == pytest.approx(8 * 4 * (2 * 1e-3 + 0.5))
    short = seconds_of("data1.context2.context_from65", costs, cluster, 2)
    assert (short.compute, short.context) == (8 * 3, 0)


def test_only_devices_that_share_heads_gather_them():
    traffic = PerPass((AxisTraffic("all_gather", 2, 2.0),), (AxisTraffic("reduce_scatter", 2, 2.0),), (), ())
    costs = model_costs(layer_traffic={"shared_heads": traffic}, shared_heads=2)
    cluster = unit_cluster(link=Link(1e6, 1e-3))
    seconds = [seconds_of(f"data1.tensor{size}", costs, cluster, 1).tensor for size in (2, 4, 8)]
    assert seconds == pytest.approx([0, 8 * 2 * (2 * 1e-3 + 1), 8 * 2 * (4 * 1e-3 + 1.5)])


def test_what_tensor_does_not_split_every_device_computes():
    costs = model_costs(share=0.5)
    assert seconds_of("data1.tensor4", costs, unit_cluster(), 1).compute == pytest.approx(8 * 3 * (0.5 + 0.5 / 4))


def test_stages_on_several_hosts_wait_for_the_slow_link():
    cluster = dataclasses.replace(unit_cluster(host_link=Link(1e6, 0)), num_hosts=2)
    within, across = (
        seconds_of(text, model_costs(), cluster, 4).stage for text in ("data2.stage8", "data1.stage4.tensor4")
    )
    assert within == pytest.approx(0)
    sends = 2 * (4 + 4 - 1)  # activations after forward passes, gradients after backward passes
    assert across == pytest.approx(sends / 4)  # of 1e6 bytes, of which each device of "tensor" sends its part
    gathering = dataclasses.replace(cluster, link=Link(1e7, 0))
    of_gathers = sends * 3 / 4 * 1e6 / 1e7
    assert seconds_of("data1.stage4.tensor4", model_costs(), gathering, 4).stage == pytest.approx(across + of_gathers)
    parts = seconds_of("data1.stage4.tensor4.sequence_parallel", model_costs(), gathering, 4).stage
    assert parts == pytest.approx(across)
    kind = make_schedule("1f1b", 4, 4).tables().kind
    sends = sum(np.sum((kind == each).any(axis=1)) for each in (0, 1))  # both, in ticks of F and B at once
    assert seconds_of("data1.stage4.tensor4.1f1b", model_costs(), cluster, 4).stage == pytest.approx(sends / 4)


def test_measured_seconds_replace_operations():
    found = seconds_of("data2", model_costs(), unit_cluster(), cost=lambda rows, length: 0.5 + 0 * length)
    assert found.compute == pytest.approx(4 * 0.5)
    with pytest.raises(ValueError, match=r"must be finite and above 0 s: .*nan"):
        seconds_of("data2", model_costs(), unit_cluster(), cost=lambda rows, length: np.nan * length)


def test_an_update_reads_and_writes_the_state():
    cluster = unit_cluster(memory_bytes_per_second=1e3)
    assert seconds_of("data2", model_costs(), cluster, state_bytes=np.array([5e3])).update == pytest.approx(10)


def test_groups_of_a_step_share_its_reduction_and_its_update():
    """Sums of zero0 and zero1 are reduced once a step, after all backward passes; shards in every microbatch."""
    cluster = unit_cluster(link=Link(1e3, 0), memory_bytes_per_second=1e3, overlap=0.5)
    costs = model_costs(num_layers=2, forward=0.5, backward=1.0)
    of_shard = 4 * (2 * 4000 + 8000) / 1e3 * 3 / 4
    state = {"state_bytes": np.array([5e3])}

    def of_group(text, **options):
        return seconds_of(text, costs, cluster, **state, **options)

    for text in ("data4", "data4.zero1"):
        found = of_group(text, groups_per_step=5)
        assert found.data == pytest.approx(2 * of_shard / 5), "which no pass hides"
        assert found.update == pytest.approx(10 / 5)
    assert of_group("data4.zero2", groups_per_step=5).data == pytest.approx(2 * of_shard + of_shard / 5)
    whole, group = of_group("data4.zero3"), of_group("data4.zero3", groups_per_step=5)
    assert group.data == whole.data, "gathers and reduces in every microbatch"
    staged = of_group("data2.stage2", groups_per_step=5)
    assert staged.bubble == of_group("data2.stage2").bubble > 0, "once a group"
