"""Collectives: the compiled step communicates once, whatever it accumulates; those in loops are counted apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jvarlen import Bucket, compile_buckets, make_train_step, scale_by_batch_size
from jvarlen.batches import BatchShapes
from jvarlen.estimates.hlo import Collective, list_collectives
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.training.train_state import new_state
from tests.support.collectives import Collectives, count_collectives
from tests.support.meshes import data_mesh

MODEL = DecoderConfig(num_layers=1, width=8, num_heads=1)


def compiled_on(mesh, function, out_spec):
    split = jax.shard_map(function, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=out_spec)
    return jax.jit(split).lower(jnp.ones(8)).compile()


def test_each_kind_is_counted_once():
    def talk(x):
        total = jax.lax.psum(x, "data")
        return jax.lax.ppermute(total + x, "data", [(0, 1), (1, 0)]) + jax.lax.all_gather(x, "data").sum()

    counts = count_collectives(compiled_on(data_mesh(2), talk, PartitionSpec("data")))
    assert counts["all-reduce"] == Collectives(1, 0)
    assert counts["collective-permute"] == Collectives(1, 0)
    assert sum(count.per_step for count in counts.values()) == 3


@pytest.mark.parametrize("num_turns", [3, 5])
def test_collectives_in_loops_are_counted_apart(num_turns):
    def talk(x):
        def turn(total, _):
            return total + jax.lax.psum(jnp.sin(total + x), "data") / 2, None

        return jax.lax.scan(turn, jax.lax.psum(x, "data"), length=num_turns)[0]

    assert count_collectives(compiled_on(data_mesh(2), talk, PartitionSpec())) == {"all-reduce": Collectives(1, 1)}


ON_A_GPU = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%wrapped (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %all-gather.3 = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, dimensions={0}
}

%called (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8]{0} parameter(0)
  %collective-permute-start = (f32[8]{0}, f32[8]{0}) collective-permute-start(%p.1), source_target_pairs={{0,1}}
  ROOT %collective-permute-done = f32[8]{0} collective-permute-done(%collective-permute-start)
}

%body (carry: (s32[], f32[8])) -> (s32[], f32[8]) {
  %carry = (s32[], f32[8]{0}) parameter(0)
  ROOT %call = (s32[], f32[8]{0}) call(%carry), to_apply=%called
}

%condition (carry.1: (s32[], f32[8])) -> pred[] {
  %carry.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (a: f32[8], b: f32[4]) -> (f32[8], f32[4]) {
  %a = f32[8]{0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %while = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body
  %async-start = ((f32[8]{0}), f32[8]{0}) async-start(%a), calls=%wrapped
  %async-done = f32[8]{0} async-done(%async-start)
  %all-reduce-start = (f32[8]{0}, f32[4]{0}) all-reduce-start(%a, %b), replica_groups={{0,1}}, to_apply=%add
  ROOT %all-reduce-done = (f32[8]{0}, f32[4]{0}) all-reduce-done(%all-reduce-start)
}
"""


def test_collectives_of_a_gpu_start_and_end_and_are_one():
    assert count_collectives(ON_A_GPU) == {
        "all-reduce": Collectives(1, 0),
        "all-gather": Collectives(1, 0),
        "collective-permute": Collectives(0, 1),
    }


ON_TPUS = """
%all-reduce-scatter.1.clone (input: f32[14,4]) -> f32[8,4] {
  %input = f32[14,4]{1,0:T(8,128)} parameter(0)
  %zero = f32[] constant(0)
  %pad = f32[16,4]{1,0:T(8,128)} pad(%input, %zero), padding=0_2x0_0
  %all-reduce = f32[16,4]{1,0:T(8,128)} all-reduce(%pad), replica_groups={{0,1}}, to_apply=%add
  %begin = u32[] constant(0)
  ROOT %slice = f32[8,4]{1,0:T(8,128)S(1)} dynamic-slice(%all-reduce, %begin, %begin), dynamic_slice_sizes={8,4}
}

ENTRY %main (a: f32[14,4]) -> f32[8,4] {
  %a = f32[14,4]{1,0:T(8,128)} parameter(0)
  ROOT %fusion = f32[8,4]{1,0:T(8,128)} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.1.clone
}
"""


def test_a_scatter_of_tpus_that_is_written_as_a_slice_of_an_all_reduce_is_one():
    assert list_collectives(ON_TPUS) == [Collective("reduce-scatter", 16 * 4 * 4, ((0, 1),), 1)]


def test_a_program_without_text_is_refused():
    with pytest.raises(ValueError, match="has no text"):
        count_collectives("")


def test_a_step_reduces_its_gradient_once_whatever_it_accumulates():
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3), scale_by_batch_size(8))
    state = new_state(init_params(MODEL, seed=0), optimizer)
    bucket = Bucket(1, 8)
    for num_shards, num_microbatches in ((2, 8), (4, 4)):
        mesh = data_mesh(num_shards)
        step = make_train_step(make_loss_fn(MODEL), optimizer, layout=mesh)
        compiled = compile_buckets(
            step,
            state,
            BatchShapes([bucket], num_microbatches=num_microbatches, layout=mesh, has_many_groups=False),
            progress=False,
        )
        assert count_collectives(compiled.program_text(bucket)) == {"all-reduce": Collectives(1, 0)}


def test_a_gradient_taken_by_jit_alone_would_be_reduced_in_the_loop():
    """What must not be: XLA places the collectives of a loop over microbatches inside it."""
    mesh = data_mesh(2)
    split = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "data"))
    x_MxBxD = jax.device_put(np.ones((4, 2, 8), np.float32), split)

    def gradient(w_D, x_MxBxD):
        def turn(total, x_BxD):
            return total + jax.grad(lambda w: jnp.sum(jnp.sin(x_BxD * w)))(w_D), None

        return jax.lax.scan(turn, jnp.zeros_like(w_D), x_MxBxD)[0]

    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
    executable = jax.jit(gradient, out_shardings=whole).lower(jnp.ones(8), x_MxBxD).compile()
    assert count_collectives(executable)["all-reduce"].in_loops >= 1
