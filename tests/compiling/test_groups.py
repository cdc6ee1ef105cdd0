"""Steps of several groups: a program for each group and one for the update, with the numbers of one program."""

import dataclasses
import gc
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jvarlen import (
    Bucket,
    CompileOptions,
    UnplannedShapeError,
    compile_buckets,
    make_eval_step,
    make_plan,
    make_train_step,
    no_recompiles,
    plan_step,
)
from jvarlen._common.types import StepHalves
from jvarlen.batches import BatchShapes, StepBatch, next_token_targets, token_batch_spec
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.compiling.measure import measure_buckets
from jvarlen.estimates import estimate_communication
from jvarlen.parallel import StepLoss
from tests.support.meshes import data_mesh

SHORT, LONG = BUCKETS = [Bucket(4, 8), Bucket(2, 16)]
SHAPES = BatchShapes(BUCKETS, num_microbatches=2)


def grads_of(state, batch):
    return jnp.cos(state["w"]) * (batch.tokens * batch.weights).sum()


class Step:
    """A step w - Σ grads / Σ count, whole and by halves."""

    __name__ = "train"

    def __init__(self, mesh=None, *, keeps_state=False):
        self.mesh, self.keeps_state = mesh, keeps_state
        self.halves = StepHalves(self.zeros, self.accumulate, self.update)

    def __call__(self, state, batch):
        return self.update(state, self.accumulate(state, batch, self.zeros(state, batch, 0)))

    def zeros(self, state, batch, most_rows):
        sums = {"grads": jnp.zeros((1 if self.mesh is None else self.mesh.size, 3)), "count": jnp.float32(0)}
        return sums if self.mesh is None else self.placed(sums)

    def placed(self, sums):
        """Gradients of each device by itself."""
        shardings = {"grads": NamedSharding(self.mesh, PartitionSpec(self.mesh.axis_names))}
        return sums | {"grads": jax.lax.with_sharding_constraint(sums["grads"], shardings["grads"])}

    def accumulate(self, state, batch, sums):
        shards = 1 if self.mesh is None else self.mesh.size
        of_shards = jax.tree.map(lambda leaf: leaf.reshape(shards, -1, *leaf.shape[1:]), (batch.tokens, batch.weights))
        grads = jax.vmap(lambda *parts: grads_of(state, batch._replace(tokens=parts[0], weights=parts[1])))(*of_shards)
        return {"grads": sums["grads"] + grads, "count": sums["count"] + batch.num_sequences}

    def update(self, state, sums):
        metrics = {"count": sums["count"], "grads": sums["grads"].sum(0)}
        if self.keeps_state:
            return state, metrics
        return {"w": state["w"] - 1e-3 * sums["grads"].sum(0) / sums["count"]}, metrics


class StepWithLoss(Step):
    """The gradient of (Σ tokens · w)², which takes the sum of the whole step, in a second pass over the groups."""

    def __init__(self):
        super().__init__()
        passes = self.between, self.accumulate_again
        self.halves = StepHalves(self.zeros, self.accumulate, self.update, *passes, lambda state, batch: True)
        self.most_rows = []

    def zeros(self, state, batch, most_rows):
        self.most_rows.append(most_rows)
        return {"value": jnp.float32(0), "rows": jnp.zeros(most_rows), "count": jnp.float32(0)}

    def accumulate(self, state, batch, sums):
        value = sums["value"] + batch.tokens.sum() * state["w"].sum()
        return sums | {"value": value, "count": sums["count"] + batch.num_sequences}

    def between(self, state, sums):
        return {"derivative": 2 * sums["value"], "grads": jnp.zeros((1, 3)), "count": sums["count"]}

    def accumulate_again(self, state, batch, sums):
        return sums | {"grads": sums["grads"] + sums["derivative"] * batch.tokens.sum()}


def state_of(mesh=None):
    return {"w": jnp.arange(3.0)}


def group(bucket, seed=0, num_microbatches=2):
    rng = np.random.default_rng(seed)

    def fill(leaf):
        return rng.integers(1, 9, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(fill, token_batch_spec(bucket, num_microbatches))


def step_of(*buckets, seed=0, num_microbatches=2):
    groups = tuple(group(bucket, seed + i, num_microbatches) for i, bucket in enumerate(buckets))
    return StepBatch(groups, np.float32(sum(each.num_sequences for each in groups)))


def compile_step(step, shapes=SHAPES, state=None, **options):
    state = state_of() if state is None else state
    return compile_buckets(
        step, state, shapes, progress=False, options=CompileOptions(**{"cache_dir": None, "when": None} | options)
    )


def expected(batches):
    """The parameters after the steps of `Step`, in float64."""
    w = np.arange(3.0)
    for batch in batches:
        groups = batch.groups if isinstance(batch, StepBatch) else (batch,)
        grads = sum(np.cos(w) * (each.tokens * each.weights).sum() for each in groups)
        w = w - 1e-3 * grads / sum(float(each.num_sequences) for each in groups)
    return w


def plan_of(*step_groups):
    """A plan of groups of the short bucket, then of the long one, in these steps."""
    lengths = [8] * 16 + [16] * 4
    plan = make_plan(lengths, BUCKETS, order="length", num_microbatches=2)
    return dataclasses.replace(plan, step_groups=np.array(step_groups))


@pytest.mark.parametrize("num_devices", [None, 2])
def test_groups_are_one_step_without_compiling(num_devices):
    mesh = None if num_devices is None else data_mesh(num_devices)
    compiled = compile_step(Step(mesh), dataclasses.replace(SHAPES, layout=mesh))
    batches = [step_of(SHORT, LONG, SHORT), group(LONG, 5), step_of(LONG, seed=7), step_of(*[SHORT] * 9, seed=9)]
    state = state_of()
    with no_recompiles():
        for batch in batches:
            state, metrics = compiled(state, batch)
    np.testing.assert_allclose(state["w"], expected(batches), rtol=1e-5)
    assert metrics["count"] == batches[-1].num_sequences
    used = {str(row): (row.program, row.bucket, row.times_used) for row in compiled.report}
    assert used == {
        "4×8": ("accumulation", SHORT, 11),
        "2×16": ("accumulation", LONG, 3),
        "update": ("update", None, 4),
    }
    assert compiled.report.times_used == 4
    last = str(compiled.report).splitlines()[-1]
    assert "never used" not in last
    in_loops = "all-reduce" in compiled.program_text(SHORT), "all-reduce" in compiled.program_text(None)
    assert in_loops == (False, mesh is not None), "gradients are reduced once a step"


def test_the_sums_are_donated_and_the_state_by_the_update_alone():
    compiled = compile_step(Step())
    rows = {str(row): row for row in compiled.report}
    assert rows["2×16"].alias_bytes == 4 * (3 + 1)
    assert rows["update"].alias_bytes == 4 * 3
    state, batch = state_of(), step_of(SHORT, LONG)
    compiled.release_after({LONG: 0})
    with pytest.raises(UnplannedShapeError, match=r"the executable of 2×16 was released"):
        compiled(state, batch)
    assert float(state["w"][1]) == 1, "a step that stops between groups leaves its state"


def test_a_plan_decides_what_is_compiled():
    one_each, many = plan_of(0, 1, 2, 3), plan_of(0, 2, 3)
    fused = compile_step(Step(), one_each)
    assert [(row.program, row.bucket) for row in fused.report] == [("step", SHORT), ("step", LONG)]
    compiled = compile_step(Step(), many)
    assert {str(row): row.planned_steps for row in compiled.report} == {"4×8": 2, "2×16": 1, "update": 2}
    assert [row.padding for row in compiled.report] == [0, 0, None]
    total = str(compiled.report).splitlines()[4].split()
    assert total[0] == "total"
    assert total[-2:] == ["0", "2"]
    by_halves = {
        name: [row.program for row in compile_step(Step(), shapes).report][-1]
        for name, shapes in {
            "alone": SHAPES,
            "said": dataclasses.replace(SHAPES, has_many_groups=False),
            "of a plan": BatchShapes.of_plan(many),
        }.items()
    }
    assert by_halves == {"alone": "update", "said": "step", "of a plan": "update"}
    with pytest.raises(ValueError, match="steps of the plan have several groups"):
        BatchShapes(BUCKETS, num_microbatches=2, plan=many, has_many_groups=False)


def test_steps_of_one_program_refuse_several_groups():
    batch = step_of(SHORT, LONG)
    fused = compile_step(Step(), plan_of(0, 1, 2, 3))
    with pytest.raises(UnplannedShapeError, match=r"train was compiled for steps of one group, .*StepBatch of 2"):
        fused(state_of(), batch)
    with pytest.raises(ValueError, match="update apart"):
        fused.program_text(None)
    state, _ = fused(state_of(), step_of(LONG))
    np.testing.assert_allclose(state["w"], expected([step_of(LONG)]), rtol=1e-5)

    def plain(state, batch):
        return state, batch.tokens.sum()

    with pytest.raises(UnplannedShapeError, match="takes a step of make_train_step"):
        compile_step(plain)(state_of(), batch)
    with pytest.raises(ValueError, match=r"several groups, which takes a step of make_train_step"):
        compile_step(plain, plan_of(0, 2, 3))


def test_an_unplanned_group_is_named_before_any_runs():
    compiled = compile_step(Step())
    batch = step_of(SHORT, LONG)
    other = batch._replace(groups=(batch.groups[0], group(Bucket(3, 16))))
    with pytest.raises(UnplannedShapeError, match=re.escape("group 1 of 2 of the step: no bucket was compiled")):
        compiled(state_of(), other)
    with pytest.raises(UnplannedShapeError, match="this one has none"):
        compiled(state_of(), StepBatch((), np.float32(0)))
    with pytest.raises(UnplannedShapeError, match=r"\['w'\] is float32\[4\], planned was float32\[3\]"):
        compiled({"w": jnp.zeros(4)}, batch)
    assert compiled.report.times_used == 0
    placed = jax.device_put(batch.groups[1], jax.devices()[1])
    with pytest.raises(UnplannedShapeError, match=r"Nearest is 2×16: \.tokens is .* on device 1"):
        compiled(state_of(), batch._replace(groups=(batch.groups[0], placed)))


def test_arrays_that_were_donated_or_are_used_elsewhere():
    compiled = compile_step(Step())
    state, batch = state_of(), step_of(SHORT, LONG)
    following, _ = compiled(state, batch)
    with pytest.raises(ValueError, match=r"state\['w'\] of the arguments was donated"):
        compiled(state, batch)
    gone = jnp.asarray(batch.groups[1].tokens)
    gone.delete()
    others = batch.groups[0], batch.groups[1]._replace(tokens=gone)
    with pytest.raises(ValueError, match=r"batch\.groups\[1\]\.tokens of the arguments was donated"):
        compiled(following, batch._replace(groups=others))
    np.testing.assert_allclose(following["w"], expected([batch]), rtol=1e-5)

    class Tied(Step):
        def update(self, state, sums):
            return {name: leaf + 1 for name, leaf in state.items()}, sums["count"]

    leaf = jnp.arange(3.0)
    state = {"w": leaf, "again": leaf}
    tied, _ = compile_step(Tied(), state=state)(state, batch)
    assert tied["w"].tolist() == tied["again"].tolist() == [1, 2, 3]


def test_a_step_that_returns_its_state_gives_metrics_alone():
    compiled = compile_step(Step(keeps_state=True))
    state, batch = state_of(), step_of(SHORT, LONG)
    for _ in range(2):
        returned, metrics = compiled(state, batch)
    assert returned is state
    np.testing.assert_allclose(metrics["grads"], sum(grads_of(state, each) for each in batch.groups), rtol=1e-6)


def test_a_loss_of_the_whole_step_takes_two_passes():
    step = StepWithLoss()
    compiled = compile_step(step, plan_of(0, 2, 3), time_steps=True)
    assert step.most_rows == [2 * (4 + 4)]
    batch, state = step_of(SHORT, SHORT), state_of()
    _, metrics = compiled(state, batch)
    tokens = sum(each.tokens.sum() for each in batch.groups)
    np.testing.assert_allclose(metrics["grads"], np.full(3, 2 * tokens**2 * 3.0), rtol=1e-6)
    used = {str(row): (row.program, row.times_used, row.planned_steps) for row in compiled.report}
    assert used == {
        "4×8": ("accumulation", 2, 2),
        "4×8 gradients": ("gradients", 2, 2),
        "2×16": ("accumulation", 0, 1),
        "2×16 gradients": ("gradients", 0, 1),
        "update": ("update", 1, 2),
        "loss": ("loss", 1, 2),
    }
    assert compiled.report.unused == (LONG,)
    assert {str(row) for row in compiled.report if row.step_s > 0} == {"4×8", "4×8 gradients", "update", "loss"}
    with pytest.raises(UnplannedShapeError, match="the step has 20 rows, and at most 16 were planned"):
        compiled(state_of(), step_of(SHORT, SHORT, LONG))
    larger = compile_step(step, dataclasses.replace(SHAPES, rows_per_step=20))
    larger(state_of(), step_of(SHORT, SHORT, LONG))


def squares_of_rows(w, microbatch):
    return {}, {"row": w[0] * (microbatch.tokens * microbatch.weights).sum(-1)}


LOSS_OF_ROWS = StepLoss(squares_of_rows, lambda sums, rows: ((rows["row"] ** 2).sum(), {"sum": rows["row"].sum()}))


@pytest.mark.parametrize("make_step", [make_eval_step, lambda loss: make_train_step(loss, optax.sgd(1e-6))])
def test_a_step_loss_has_room_for_the_rows_that_were_planned(make_step):
    init = make_train_step(LOSS_OF_ROWS, optax.sgd(1e-6)).init
    most = [dataclasses.replace(SHAPES, rows_per_step=rows) for rows in (1, lambda: 12)]
    compiled = [compile_step(make_step(LOSS_OF_ROWS), shapes, init(jnp.ones(3))) for shapes in most]
    for each, step in zip(compiled, [step_of(SHORT), step_of(SHORT, LONG)], strict=True):
        rows = np.concatenate([(batch.tokens * batch.weights).sum(-1).ravel() for batch in step.groups])
        metrics = each(init(jnp.ones(3)), step)[1]
        np.testing.assert_allclose([metrics.loss, metrics.sums["sum"]], [(rows**2).sum(), rows.sum()], rtol=1e-5)
    with pytest.raises(UnplannedShapeError, match="the step has 12 rows, and at most 8 were planned"):
        compiled[0](init(jnp.ones(3)), step_of(SHORT, LONG))


@pytest.mark.parametrize("make_step", [make_eval_step, lambda loss: make_train_step(loss, optax.sgd(1e-6))])
def test_a_step_loss_without_rows_takes_any_number_of_rows(make_step):
    loss = StepLoss(
        lambda w, microbatch: {"tokens": w[0] * (microbatch.tokens * microbatch.weights).sum()},
        lambda sums: sums["tokens"] ** 2,
    )
    state = make_train_step(loss, optax.sgd(1e-6)).init(jnp.ones(3))
    step = step_of(SHORT, LONG, SHORT)
    metrics = compile_step(make_step(loss), SHAPES, state)(state, step)[1]
    total = sum((batch.tokens * batch.weights).sum() for batch in step.groups)
    np.testing.assert_allclose(metrics.loss, total**2, rtol=1e-5)


def test_rows_per_step_that_are_none_are_refused():
    with pytest.raises(ValueError, match=r"rows_per_step \(0\)"):
        BatchShapes(BUCKETS, rows_per_step=0)


def test_what_is_compiled_for_a_single_step_takes_others_of_several_groups():
    plan = plan_step([8, 3], BUCKETS, num_microbatches=2)
    assert not plan.has_many_groups
    compiled = compile_step(Step(), plan)
    batch = step_of(SHORT, LONG)
    state, _ = compiled(state_of(), batch)
    np.testing.assert_allclose(state["w"], expected([batch]), rtol=1e-5)
    one_epoch = make_plan([8, 3], BUCKETS, sequences_per_step=2, num_microbatches=2)
    assert [row.program for row in compile_step(Step(), one_epoch).report] == ["step", "step"]


@pytest.mark.parametrize(
    ("error", "note"),
    [
        ("an own mistake", None),
        ("tuple indices must be integers or slices, not str", "named fields"),
        ("mul got incompatible shapes for broadcasting", "microbatches=False"),
    ],
)
def test_steps_that_take_batches_for_others_are_told_what_they_are(error, note):
    def fail(state, batch):
        raise TypeError(error)

    with pytest.raises(TypeError) as raised:
        compile_step(fail, plan_of(0, 1, 2, 3))
    assert [each for each in ("named fields", "microbatches=False") if each in str(raised.value.__notes__)] == (
        [note] if note else []
    )


def test_sums_that_differ_between_buckets_are_named():
    class Widening(Step):
        def accumulate(self, state, batch, sums):
            grads = jnp.zeros((batch.tokens.shape[1], 3)) if batch.tokens.shape[1] == 4 else sums["grads"]
            return sums | {"grads": grads}

    with pytest.raises(ValueError, match=r"train returns sums of 4×8 that differ .*\['grads'\]: .*\[1,3\] -> ") as e:
        compile_step(Widening())
    assert e.value.__notes__[-1] == "while compiling train for bucket 4×8"


def test_every_program_of_a_step_is_timed():
    compiled = compile_step(Step(), time_steps=True)
    compiled(state_of(), step_of(SHORT, SHORT))
    assert {str(row): row.step_s > 0 for row in compiled.report} == {"4×8": True, "2×16": False, "update": True}


def test_programs_are_compiled_in_the_background():
    compiled = compile_step(Step(), plan_of(0, 2, 3), when="background", num_threads=1)
    assert [*map(str, compiled.pending)] == ["4×8", "2×16", "update"]
    state, batches = state_of(), [step_of(SHORT, SHORT), step_of(LONG)]
    with no_recompiles():
        for batch in batches:
            state, _ = compiled(state, batch)
    np.testing.assert_allclose(state["w"], expected(batches), rtol=1e-5)
    assert compiled.wait(LONG, timeout=60)
    assert compiled.report.stall_s > 0


def test_executables_are_released_after_their_last_group():
    compiled = compile_step(StepWithLoss(), dataclasses.replace(SHAPES, rows_per_step=99))
    compiled.release_after({SHORT: 3, LONG: 1})
    state, _ = compiled(state_of(), step_of(SHORT, SHORT, LONG))
    live = {str(row) for row in compiled.report if row.is_live}
    assert live == {"4×8", "4×8 gradients", "update", "loss"}
    compiled(state, step_of(SHORT))
    assert {str(row) for row in compiled.report if row.is_live} == {"update", "loss"}


def test_groups_of_a_step_that_failed_do_not_count_as_uses(monkeypatch):
    compiled = compile_step(Step())
    compiled.release_after({SHORT: 2, LONG: 1})
    state, batch = state_of(), step_of(SHORT, LONG, SHORT)
    run, keys = compiled._run, []

    def interrupt(key, *given):
        keys.append(key)
        if len(keys) == 3:
            raise KeyboardInterrupt
        return run(key, *given)

    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compiled(state, batch)
    following, _ = compiled(state, batch)
    np.testing.assert_allclose(following["w"], expected([batch]), rtol=1e-5)
    assert {str(row) for row in compiled.report if row.is_live} == {"update"}


def test_what_goes_wrong_between_groups_is_raised_by_the_next_step(monkeypatch):
    """The step ends first, so that its state is not lost."""
    compiled = compile_step(Step())

    def fail(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(CompiledBuckets, "advance", fail)
        batch = step_of(SHORT, LONG)
        state, _ = compiled(state_of(), batch)
    np.testing.assert_allclose(state["w"], expected([batch]), rtol=1e-5)
    with pytest.raises(KeyboardInterrupt):
        compiled(state, batch)
    compiled(state, batch)


@pytest.mark.parametrize(("step", "passes"), [(Step(), 1), (StepWithLoss(), 2)])
def test_groups_are_measured_without_updates(step, passes):
    compiled = compile_step(step)
    state = state_of()
    measured = measure_buckets(compiled, state, repeats=2, progress=False)
    assert state["w"].tolist() == [0, 1, 2]
    assert (measured.seconds > 0).all()
    rows = {str(row): row for row in compiled.report}
    assert {rows[str(bucket)].times_used for bucket in BUCKETS} == {3}
    assert rows["update"].times_used == 0
    most = {b: max(row.total_bytes for row in compiled.report if row.bucket == b) for b in BUCKETS}
    assert measured.num_bytes.tolist() == [most[bucket] for bucket in compiled.specs]


def test_nothing_of_a_step_stays_on_the_device():
    compiled = compile_step(Step())
    state, batch = compiled(state_of(), step_of(SHORT, LONG))[0], step_of(LONG, SHORT)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        state = compiled(state, batch)[0]
    gc.collect()
    assert len(jax.live_arrays()) == before


LAYOUTS = [None, "data4", "data4.zero1", "data4.zero2"]


def two_layer_loss(params, batch):
    inputs, targets, weights = next_token_targets(batch)
    logits = jnp.tanh(params["embed"][inputs] @ params["hidden"]) @ params["out"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return (losses * weights).sum(), weights.sum()


def test_a_train_step_is_the_same_by_groups_and_reduces_once_a_step():
    """Five groups of two shapes, in programs of their own."""
    rng, sizes = np.random.default_rng(0), {"embed": (256, 32), "hidden": (32, 64), "out": (64, 256)}
    start = {name: rng.normal(size=size).astype(np.float32) / 8 for name, size in sizes.items()}
    batch = step_of(SHORT, LONG, SHORT, LONG, LONG, num_microbatches=4)
    found, sent, losses = {}, {}, []
    for layout in LAYOUTS:
        step = make_train_step(two_layer_loss, optax.sgd(0.1), layout=layout)
        compiled = compile_step(step, BatchShapes(BUCKETS, num_microbatches=4), step.init(start))
        state, metrics = compiled(step.init(start), batch)
        found[layout] = step.gather_params(state)
        losses.append(float(metrics.loss))
        of_programs = {bucket: estimate_communication(compiled, bucket) for bucket in (SHORT, None)}
        sent[layout] = {
            bucket: {row.kind: row.times for row in rows if row.axes == ("data",) and row.num_bytes > 1024}
            for bucket, rows in of_programs.items()
        }
    assert losses == pytest.approx([losses[0]] * len(LAYOUTS), rel=1e-5)
    for layout, params in found.items():
        for one, other in zip(jax.tree.leaves(params), jax.tree.leaves(found[None]), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6, err_msg=str(layout))
    assert sent["data4"] == {SHORT: {}, None: {"all-reduce": 1}}
    assert sent["data4.zero1"] == {SHORT: {}, None: {"reduce-scatter": 3, "all-gather": 3}}
    assert "reduce-scatter" in sent["data4.zero2"][SHORT]
    assert "reduce-scatter" not in sent["data4.zero2"][None]
