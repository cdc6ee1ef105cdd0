"""Gradients reduced in buckets: the same numbers, one collective a bucket, during the backward pass."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jvarlen
from jvarlen.batches import BatchShapes
from jvarlen.compiling.lowering import make_step_compiler
from jvarlen.distributed.grad_buckets import assign_grad_buckets
from jvarlen.distributed.mesh import replicate
from jvarlen.distributed.placement import place
from jvarlen.training.train_state import new_state
from tests.support.collectives import count_collectives
from tests.support.meshes import batch_shardings

NUM_LAYERS, WIDTH, NUM_ROWS = 6, 16, 4
LAYER_BYTES = 8 * WIDTH * WIDTH  # in float64


def make_params(dtype=np.float64):
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(WIDTH, WIDTH)).astype(dtype) / 4 for _ in range(NUM_LAYERS)]
    return {"layers": layers, "never": np.ones((WIDTH, 100), dtype), "sometimes": np.ones(WIDTH, dtype)}


def loss_fn(params, microbatch):
    """A row without a positive first value does not use one of the parameters."""
    x = microbatch["x"]
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    x = jax.lax.cond(microbatch["x"][0, 0] > 0, lambda x: x * params["sometimes"], lambda x: x, x)
    return jnp.sum(x * microbatch["weights"][:, None]), jnp.sum(microbatch["weights"])


def make_batch(num_microbatches, dtype=np.float64):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(num_microbatches, NUM_ROWS, WIDTH)).astype(dtype)
    x[:, 0, 0] = np.abs(x[:, 0, 0]) * np.where(np.arange(num_microbatches) % 2, 1, -1)
    weights = rng.uniform(size=(num_microbatches, NUM_ROWS)).astype(dtype)
    weights[0] = 0.0  # a shard may have no samples
    return {"x": x, "weights": weights, "num_sequences": np.float32(num_microbatches * NUM_ROWS)}


class Stepped:
    """A step on two devices and its program.

    Attributes:
      texts: the program as `jax.jit` lowers the step, and as `compile_buckets` does.
      params: after the step.
      metrics: of the step.
      collectives: by kind.
      operations: products and all-reduces after the loop in the order in which they are started, with their numbers of
        elements.
      reduced: numbers of elements of each all-reduce.
    """

    def __init__(self, num_microbatches, grad_bucket_bytes=0):
        layout = place(jvarlen.Layout(data=2, grad_bucket_bytes=grad_bucket_bytes))
        mesh = layout.mesh
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
        state = replicate(new_state(make_params(), optimizer), mesh)
        batch = make_batch(num_microbatches)
        step = jvarlen.make_train_step(loss_fn, optimizer, layout=layout)
        step_compiler = make_step_compiler(
            step,
            state,
            BatchShapes(
                [(NUM_ROWS, WIDTH)],
                num_microbatches=num_microbatches,
                layout=layout,
                batch_spec=lambda *_: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch),
                has_many_groups=False,
            ),
            jvarlen.CompileOptions(cache_dir=None),
        )
        lowered = step_compiler.lower(jvarlen.Bucket(NUM_ROWS, WIDTH))
        batch = jax.device_put(batch, batch_shardings(batch, mesh))
        lie = jax.tree.map(lambda leaf: leaf.sharding, state), None
        jitted = jax.jit(step, donate_argnums=0, out_shardings=lie).lower(state, batch)
        self.texts = jitted.as_text(), lowered.program.as_text()
        program = step_compiler.compile(lowered).executable
        state, self.metrics = program(state, batch)
        self.params = state.params
        self.collectives = count_collectives(program)
        text = program.as_text()
        assert "is_scheduled=true" in text
        started = re.findall(r"^ *(?:ROOT )?%\S+ = (\S+) (\S+)\(", text[text.index("\nENTRY") :], re.MULTILINE)
        loop = max((i for i, (_, name) in enumerate(started) if name == "while"), default=-1)
        self.operations = [
            (name, int(np.prod([int(size) for size in re.findall(r"\d+", shape.partition("[")[2].partition("]")[0])])))
            for shape, name in started[loop + 1 :]
            if name in ("dot", "all-reduce")
        ]
        self.reduced = [size for name, size in self.operations if name == "all-reduce"]


def test_buckets_change_no_number_and_are_reduced_during_the_backward_pass():
    with jax.enable_x64(True):
        whole = Stepped(8)
        buckets = Stepped(8, grad_bucket_bytes=2 * LAYER_BYTES)
    np.testing.assert_allclose(buckets.metrics.loss, whole.metrics.loss, rtol=1e-12)
    for one, other in zip(jax.tree.leaves(buckets.params), jax.tree.leaves(whole.params), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)
    assert whole.collectives["all-reduce"] == (1, 0)
    # One of the sums of loss and weight, and three buckets.
    assert buckets.collectives["all-reduce"] == (1 + 3, 0)
    for stepped in (whole, buckets):
        assert stepped.texts[0] == stepped.texts[1]
    assert buckets.texts != whole.texts
    layer = WIDTH * WIDTH
    assert sorted(buckets.reduced)[-3:] == [2 * layer, 2 * layer, 2 * layer + WIDTH]
    # XLA fuses the other products. Those that give gradients of layers are before and after the first bucket.
    names = [name for name, size in buckets.operations if size >= layer]
    assert names.count("dot") == NUM_LAYERS
    assert 0 < names[: names.index("all-reduce")].count("dot") < NUM_LAYERS, names


def test_a_parameter_that_is_never_used_is_not_reduced():
    with jax.enable_x64(True):
        stepped = Stepped(2, grad_bucket_bytes=1)
    assert sorted(stepped.reduced)[1:] == [WIDTH] + NUM_LAYERS * [WIDTH * WIDTH]
    assert np.isfinite(stepped.params["never"]).all()
    assert (np.asarray(stepped.params["sometimes"]) != 1).any()


def test_other_passes_may_be_left_out_as_well():
    options = jvarlen.CompileOptions(xla_options=("xla_disable_hlo_passes=algsimp",))
    passes = {"xla_disable_hlo_passes": "cpu-all-reduce-combiner,algsimp"}
    several = options.compiler_options("cpu", 2, has_grad_buckets=True)
    assert several == passes | {"xla_cpu_experimental_ynn_fusion_type": ""}
    assert options.compiler_options("cpu", 1, has_grad_buckets=True) == {"xla_disable_hlo_passes": "algsimp"}


@pytest.mark.parametrize("sizes", [{"cap": 0}, {"cap": 10, "first_cap": -1}])
def test_buckets_without_a_byte_are_refused(sizes):
    with pytest.raises(ValueError, match="at least 1 byte"):
        assign_grad_buckets([np.zeros(3)], **sizes)
    with pytest.raises(ValueError, match="grad_bucket_bytes"):
        jvarlen.Layout(grad_bucket_bytes=-1)
