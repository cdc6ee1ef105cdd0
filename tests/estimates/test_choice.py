"""The chosen layout against brute force over all layouts, on random models, plans and clusters."""

import contextlib
import dataclasses
import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import jvarlen
from jvarlen import Bucket, UserError
from jvarlen.estimates.choice import choose_layout, divisors
from jvarlen.estimates.cluster import Cluster, Link
from jvarlen.estimates.layout_table import REMATS, SCHEDULES, layout_table
from jvarlen.estimates.memory_model import MemoryModel
from jvarlen.estimates.model_costs import AxisTraffic, ModelCosts, PerPass, Work, count_costs
from jvarlen.estimates.step_seconds import step_seconds
from jvarlen.models import DecoderConfig, init_params, layered
from jvarlen.parallel import Layout
from jvarlen.parallel.layers import layers_of_stages, layers_per_part
from jvarlen.parallel.layout_checks import check_bucket

SKEWED = {
    "fast links": {"link": Link(1e15), "host_link": Link(1e15)},
    "slow hosts": {"host_link": Link(1e7, 1e-3)},
    "slow links": {"link": Link(1e8, 1e-3), "host_link": Link(1e6, 1e-2)},
    "slow products": {"flops_per_second": 1e9},
}


class AnyMemory:
    """Bytes that differ from layout to layout, without rule."""

    def __init__(self, seed, buckets):
        self._weights = np.random.default_rng(seed).uniform(0.2, 2, 10)
        self._positions = np.array([bucket.padded_tokens for bucket in buckets])
        self._buckets = buckets

    def state_bytes(self, table):
        return 1e6 * self._weights[0] / table.stage / table.tensor / np.where(table.zero, table.num_shards, 1)

    def memory_bytes(self, table, num_microbatches, many_groups=False):
        spread = np.where(table.is_spread(self._buckets), table.context[:, None], 1)
        of_row = 1 + table.schedule % 3 + self._weights[1] * table.virtual + self._weights[2] * (2 - table.remat)
        return self.state_bytes(table)[:, None] + self._positions / spread * 1e3 * of_row[:, None]

    def exact_bytes(self, layout, bucket, num_microbatches, many_groups):
        of_buckets = self.memory_bytes(layout_table([layout]), num_microbatches)[0]
        return of_buckets[self._buckets.index(bucket)]


def random_case(seed):
    rng = np.random.default_rng(seed)
    num_microbatches = int(rng.choice([4, 6, 8, 12]))
    lengths = np.sort(rng.choice([16, 24, 64, 96, 256], rng.integers(1, 4), replace=False)).tolist()
    buckets = [Bucket(int(rng.integers(1, 5)), length) for length in lengths]
    samples = rng.choice(lengths, 400)
    plan = jvarlen.make_plan(samples, buckets, order="length", num_microbatches=num_microbatches)
    num_buckets = len(buckets)

    axes = ("tensor", "sequence_parallel", "context")

    def passes():
        flops = rng.uniform(1e9, 1e11, num_buckets)
        forward = Work(flops, flops * rng.uniform(), flops * rng.uniform(0, 0.01), np.full(num_buckets, 16.0))
        return PerPass(
            *(
                Work(*(each * by for each in forward))
                for by in (1, rng.uniform(1, 3), rng.uniform(0, 0.5), rng.uniform(0.5, 1))
            )
        )

    def split():
        return PerPass(*(Work(*rng.uniform(0.5, 1, 4)) for _ in range(4)))

    def traffic():
        return PerPass(
            *((AxisTraffic(kind, 2, rng.uniform(0, 3)),) for kind in ("all_reduce", "all_gather", "all_gather", "send"))
        )

    costs = ModelCosts(
        buckets=tuple(buckets),
        num_layers=int(rng.choice([0, 3, 4, 6])),
        layer=passes(),
        ends=passes(),
        layer_split=split(),
        ends_split=split(),
        x_bytes=rng.uniform(1e3, 1e7, num_buckets),
        layer_traffic={axis: traffic() for axis in axes},
        ends_traffic={axis: traffic() for axis in axes},
        layer_params=(int(rng.integers(1e6)), int(rng.integers(1e6))),
        ends_params=(int(rng.integers(1e6)), int(rng.integers(1e6))),
        layer_trained=(int(rng.integers(1e6)), int(rng.integers(1e6))),
        ends_trained=(int(rng.integers(1e6)), int(rng.integers(1e6))),
        param_bytes=4.0,
        tensor_sizes=(1, 2, 4),
        by_positions=bool(rng.integers(2)),
    )
    devices, hosts = rng.choice([2, 4, 6]), rng.choice([1, 2])
    cluster = dataclasses.replace(
        Cluster.named(f"dgx-h100:{hosts}"),
        devices_per_host=int(devices),
        overlap=float(rng.uniform()),
        **SKEWED[list(SKEWED)[seed % len(SKEWED)]],
    )
    return plan, costs, AnyMemory(seed, buckets), cluster, int(rng.uniform(0.3, 20) * 1e6)


def all_layouts(costs, num_devices):
    thresholds = [0, *(bucket.length for bucket in costs.buckets[1:])]
    for data, stage, context, tensor in itertools.product(divisors(num_devices), repeat=4):
        if data * stage * context * tensor != num_devices:
            continue
        if costs.num_layers == 0 and stage > 1:
            continue
        if tensor not in costs.tensor_sizes or (context > 1 and not costs.by_positions):
            continue
        orders = [("gpipe", 1)]
        if stage > 1:
            orders = [(name, 1) for name in SCHEDULES if name != "interleaved"]
            orders += [("interleaved", virtual) for virtual in range(2, 7)]
        for zero, (schedule, virtual), sequence_parallel, remat, context_from in itertools.product(
            range(4 if data * context > 1 else 1),
            orders,
            (False, True) if tensor > 1 else (False,),
            REMATS,
            thresholds if context > 1 else [0],
        ):
            if costs.num_layers == 0 and remat != "none":
                continue
            for layers in range(costs.num_layers + 1 if stage > 1 else 1):
                layout = Layout(
                    data=data, stage=stage, context=context, tensor=tensor, zero=zero, virtual=virtual, remat=remat,
                    sequence_parallel=sequence_parallel, context_from=context_from, schedule=schedule, layers=layers,
                )  # fmt: skip
                with contextlib.suppress(ValueError):
                    if stage == 1 or layers_per_part(costs.num_layers, layout):
                        yield layout


def brute_force(plan, costs, memory, cluster, limit, cost=None):
    """The least seconds of a layout that takes every step and fits; None if there is none."""
    used = np.flatnonzero(np.bincount(plan.step_bucket, minlength=len(costs.buckets)))
    layouts = []
    for layout in all_layouts(costs, cluster.num_devices):
        try:
            for k in used:
                check_bucket(layout, costs.buckets[k], plan.num_microbatches)
        except ValueError:
            continue
        layouts.append(layout)
    if not layouts:
        return None
    table = layout_table(layouts)
    fits = memory.memory_bytes(table, plan.num_microbatches)[:, used].max(axis=1) <= limit
    seconds = step_seconds(
        table, costs, cluster, num_microbatches=plan.num_microbatches, state_bytes=memory.state_bytes(table), cost=cost
    )
    in_all = seconds.total[:, plan.step_bucket].sum(axis=1)
    return in_all[fits].min() if fits.any() else None


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_the_choice_is_that_of_brute_force(first):
    for seed in range(first, first + 25):
        plan, costs, memory, cluster, limit = random_case(seed)
        cost = None if seed % 3 else lambda rows, length: 1e-3 + 1e-6 * rows * length**1.5
        best = brute_force(plan, costs, memory, cluster, limit, cost)
        given = {"params": None, "memory_bytes": limit, "costs": costs, "memory": memory, "cost": cost}
        if best is None:
            with pytest.raises(ValueError, match="no layout of the"):
                choose_layout(None, None, plan, cluster=cluster, **given)
            continue
        choice = choose_layout(None, None, plan, cluster=cluster, **given)
        assert choice.seconds == pytest.approx(best, rel=1e-12), seed
        assert choice.num_bytes <= limit
        assert choice.candidates.layouts(1) == [choice.layout]
        used = np.bincount(plan.step_bucket, minlength=len(costs.buckets))
        assert choice.of_epoch.total[0] == pytest.approx(choice.seconds)
        for layout in choice.candidates.layouts(50):
            for k in np.flatnonzero(used):
                check_bucket(layout, costs.buckets[k], plan.num_microbatches)
        fitting = choice.candidates.seconds[: choice.candidates.num_fitting]
        assert (np.diff(fitting) >= 0).all()
        assert all(choice.candidates.reasons[choice.candidates.num_fitting :])


MODEL = DecoderConfig(num_layers=4, width=64, num_heads=4)
LENGTHS = np.random.default_rng(0).integers(1, 65, 300)
PLAN = jvarlen.make_plan(LENGTHS, [Bucket(8, 32), Bucket(4, 64)], order="length", num_microbatches=8)
EIGHT = Cluster.named("dgx-h100")


@functools.cache
def known():
    """What is traced of the model, once."""
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    costs = count_costs(layered(MODEL), PLAN.buckets.shapes, params=params, tensor_sizes=(1, 2, 4))
    return {
        "params": params,
        "costs": costs,
        "memory": MemoryModel(layered(MODEL), optax.adamw(1e-3), PLAN.buckets.shapes, params=params),
    }


def choose(**options):
    return choose_layout(layered(MODEL), optax.adamw(1e-3), PLAN, cluster=EIGHT, **known(), **options)


ALONG_DATA = {"stage": 1, "context": 1, "tensor": 1}  # few programs to trace


def test_less_memory_takes_a_layout_that_holds_less(monkeypatch):
    memory = known()["memory"]

    def guessed(layout, bucket, num_microbatches, many_groups):
        of_buckets = memory.memory_bytes(layout_table([layout]), num_microbatches)[0]
        return of_buckets[PLAN.buckets.shapes.index(bucket)]

    monkeypatch.setattr(memory, "exact_bytes", guessed)
    free = choose(fixed=ALONG_DATA)
    assert (free.layout.data, free.layout.num_devices) == (8, 8)
    tight = choose(fixed=ALONG_DATA, memory_bytes=int(0.7 * free.num_bytes))
    assert tight.num_bytes <= 0.7 * free.num_bytes
    assert tight.seconds > free.seconds
    assert "too large" in str(tight)
    assert str(free.layout) in free.why()
    tokens, shown = int(LENGTHS.sum()), str(free).splitlines()[1].split()
    operations = 8 * PLAN.num_microbatches / 8 * known()["costs"].step_flops[PLAN.step_bucket].sum() / 8
    assert shown[:3] == [str(free.layout), f"{free.seconds:,.4g}", f"{tokens / free.seconds:,.4g}"]
    assert shown[3] == f"{operations / EIGHT.flops_per_second / free.seconds:.1%}"
    assert shown[4] in ("data", "nothing")


def test_the_first_layouts_are_traced_and_those_that_do_not_fit_are_rejected(monkeypatch):
    """What is guessed is too little for the first two."""
    fitting = choose(fixed=ALONG_DATA).candidates.layouts()
    memory, asked = known()["memory"], []

    def exact_bytes(layout, bucket, num_microbatches, many_groups):
        asked.append(layout)
        return 10**15 if len(asked) < 3 else len(asked)

    monkeypatch.setattr(memory, "exact_bytes", exact_bytes)
    choice = choose(fixed=ALONG_DATA)
    assert asked == fitting[:8]
    assert choice.layout == fitting[2]
    assert choice.candidates.num_bytes[:6].tolist() == [3, 4, 5, 6, 7, 8]
    reasons, num_bytes = choice.candidates.reasons, choice.candidates.num_bytes
    assert [reason for reason, size in zip(reasons, num_bytes, strict=True) if size == 10**15] == ["too large"] * 2


def test_a_model_that_does_not_say_its_layers_gets_stages_of_equal_sizes(monkeypatch):
    monkeypatch.setattr(known()["memory"], "exact_bytes", lambda *_: 1)
    silent = layered(MODEL)._replace(num_layers=None)
    counted = count_costs(silent, PLAN.buckets.shapes, params=known()["params"], tensor_sizes=(1,))
    for costs, is_even in ((counted, True), (known()["costs"], False)):
        found = choose_layout(
            silent,
            optax.adamw(1e-3),
            PLAN,
            cluster=EIGHT,
            **known() | {"costs": costs},
            fixed={"tensor": 1, "stage": 2},
        )
        sizes = [layers_of_stages(4, layout) for layout in found.candidates.layouts()]
        assert all(one == other for one, other in sizes) == is_even
    with pytest.raises(UserError, match="stages of different sizes need num_layers of the model"):
        choose_layout(
            silent,
            optax.adamw(1e-3),
            PLAN,
            cluster=EIGHT,
            **known() | {"costs": counted},
            fixed={"tensor": 1, "layers": 3},
        )


def test_fixed_words_hold(monkeypatch):
    monkeypatch.setattr(known()["memory"], "exact_bytes", lambda *_: 1)  # which takes long, and decides nothing here
    fixed = {"tensor": 2, "context": 1, "sequence_parallel": False, "stage": 2, "schedule": "gpipe"}
    fixed["reduce_dtype"] = "bfloat16"
    choice = choose(fixed=fixed)
    assert {name: getattr(choice.layout, name) for name in fixed} == fixed
    spread = {"stage": 1, "tensor": 1, "context": 2}
    assert choose(fixed=spread | {"context_from": 40}).layout.context_from == 40
    for fixed, message in (
        ({"tensors": 2}, "has no field tensors"),
        ({"zero": 7}, "zero must be a level"),
        ({"tensor": 8}, "no layout takes this model: tensor8 does not divide"),
        (spread | {"context_from": 65}, "context_from65 spreads no rows"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(fixed=fixed)
    with pytest.raises(ValueError, match="memory_bytes"):
        choose(memory_bytes=-5)


def test_a_model_that_is_too_large_names_the_nearest_layout():
    with pytest.raises(ValueError, match=r"fits into 1,000 bytes a device: the nearest, .*, needs .* more than"):
        choose(memory_bytes=1000, fixed=ALONG_DATA)


def test_a_loss_function_with_a_key_and_extra_is_spread_over_data():
    def loss_fn(params, microbatch, *, key, extra):
        hot = jax.nn.one_hot(microbatch.tokens, 16) + jax.random.normal(key, (16,))
        return (hot @ params["w"]).sum(), microbatch.weights.sum(), extra + 1

    params = {"w": jax.ShapeDtypeStruct((16, 16), np.float32)}
    choice = choose_layout(loss_fn, optax.adam(1e-3), PLAN, cluster=EIGHT, params=params, extra=np.float32(0))
    assert choice.layout.data == 8
    assert "stage2 needs as many layers, and the model has 0" in str(choice)


def test_groups_share_what_a_step_does_once(monkeypatch):
    """On every layout, beside the seconds of each group and those that do not grow with groups, once a step."""
    monkeypatch.setattr(known()["memory"], "exact_bytes", lambda *_: 1)  # which takes long, and decides nothing here
    step_groups = np.append(np.arange(0, PLAN.num_steps, 3), PLAN.num_steps)
    plan = dataclasses.replace(PLAN, step_groups=step_groups)
    layouts = [*all_layouts(known()["costs"], 8)]
    table = layout_table([layout for layout in layouts if layout.context == 1])
    given = {"num_microbatches": 8, "state_bytes": known()["memory"].state_bytes(table)}
    alone, many = (
        step_seconds(table, known()["costs"], EIGHT, groups_per_step=groups, **given).total for groups in (1, 1e30)
    )
    in_all = many[:, plan.group_bucket].sum(axis=1) + plan.num_steps * (alone - many)[:, 0]
    np.testing.assert_allclose(alone - many, np.broadcast_to((alone - many)[:, :1], alone.shape), rtol=1e-9)
    choice = choose_layout(
        layered(MODEL), optax.adamw(1e-3), plan, cluster=EIGHT, fixed={"context": 1}, memory_bytes=10**12, **known()
    )
    takes = [not cannot_take(layout) for layout in layouts if layout.context == 1]
    assert choice.seconds == pytest.approx(in_all[takes].min(), rel=1e-9)
    assert choice.of_epoch.total[0] == pytest.approx(choice.seconds)


def cannot_take(layout):
    try:
        for bucket in PLAN.buckets.shapes:
            check_bucket(layout, bucket, PLAN.num_microbatches)
    except ValueError:
        return True
    return False


def test_a_part_of_the_layers_runs_again_where_all_that_is_kept_does_not_fit():
    config = DecoderConfig(num_layers=4, width=128, num_heads=4)
    params, buckets = jax.eval_shape(lambda: init_params(config, seed=0)), [Bucket(16, 256)]
    plan = jvarlen.make_plan([256] * 64, buckets, num_microbatches=2)
    memory = MemoryModel(layered(config), optax.adamw(1e-3), buckets, params=params)
    cluster = dataclasses.replace(Cluster.named("dgx-h100"), devices_per_host=1)
    search = functools.partial(
        choose_layout, layered(config), optax.adamw(1e-3), plan, params=params, cluster=cluster, memory=memory
    )
    none, selective, full = (search(fixed={"remat": name}) for name in REMATS)
    assert none.seconds < selective.seconds < full.seconds
    assert none.num_bytes > 1.1 * selective.num_bytes > 1.2 * full.num_bytes
    assert str(search(memory_bytes=int(none.num_bytes) - 1).layout) == "data1.remat_selective"
    assert [str(each) for each in search().candidates.layouts(3)] == [
        f"data1{word}" for word in ("", ".remat_selective", ".remat_full")
    ]
