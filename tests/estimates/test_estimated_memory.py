"""The estimate of memory is what compilers for devices that are not here say, of a model whose arrays are large."""

import dataclasses
import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest

from jvarlen import with_float32_master
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.estimates import estimate_memory
from jvarlen.models import DecoderConfig, layered
from jvarlen.models.decoder import param_shapes
from jvarlen.targets.compile_for import compile_for
from tests.targets.cases import LAYOUTS

LLAMA_3_8B = DecoderConfig(
    num_layers=32, width=4096, mlp_width=14336, num_heads=32, num_kv_heads=8, vocab_size=128256, begins_samples=False,
    norm_epsilon=1e-5, rotary_base=500_000.0,
)  # fmt: skip
OF_FEW_LAYERS = dataclasses.replace(LLAMA_3_8B, num_layers=4)

OF_GPUS = pytest.mark.skipif(importlib.util.find_spec("jax_cuda12_plugin") is None, reason="XLA's compiler for GPUs")
OF_TPUS = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="XLA's compiler for TPUs")


@OF_GPUS
@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "data8.zero3.remat_full",
        "data8.zero3",
        "data8.zero2.remat_full",
        "data2.tensor4.zero1.remat_full",
        "data2.tensor4.zero1.sequence_parallel.remat_full",
        "data4.stage2.zero1",
        "data2.context4.zero3.remat_full",
    ],
)
def test_the_estimate_is_at_most_a_tenth_above_the_compiled_bytes(text):
    assert 1 <= of_llama_over_compiled("8xh100", text, LLAMA_3_8B) <= 1.1


@OF_GPUS
@pytest.mark.slow
@pytest.mark.parametrize("text", LAYOUTS)
def test_the_estimate_is_near_the_compiled_bytes_on_every_layout(text):
    assert 1 <= of_llama_over_compiled("8xh100", text, OF_FEW_LAYERS) <= 1.1


@OF_TPUS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "text"), [("v5e:2x4", "data8.zero3.remat_full"), *(("v6e:2x4", text) for text in LAYOUTS)]
)
def test_the_estimate_is_near_the_compiled_bytes_on_tpus(target, text):
    assert 1 <= of_llama_over_compiled(target, text, OF_FEW_LAYERS) <= 1.1


def of_llama_over_compiled(target, text, config):
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), param_shapes(config))
    optimizer = with_float32_master(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)))
    return estimated_over_compiled(target, text, config, params, optimizer, (1, 8192))


@OF_GPUS
@pytest.mark.slow
def test_of_many_short_rows_and_rounded_products_too():
    config = DecoderConfig(num_layers=2, width=512, num_heads=8, vocab_size=32_000, compute_dtype="bfloat16")
    of_step = config, param_shapes(config), optax.adamw(3e-4), (328, 2048)
    assert 1 <= estimated_over_compiled("8xh100", "data8.zero3", *of_step) <= 1.12


def estimated_over_compiled(target, text, config, params, optimizer, bucket):
    model, num_microbatches = layered(config), 8

    def batch_spec(bucket, num):
        return token_batch_spec(bucket, num, 16)

    shapes = BatchShapes([bucket], num_microbatches=num_microbatches, batch_spec=batch_spec, has_many_groups=False)
    (row,) = compile_for(model, optimizer, shapes, target=target, layout=text, params=params, progress=False)
    of_step = {"batch_spec": batch_spec, "num_microbatches": num_microbatches}
    estimate = estimate_memory(model, optimizer, bucket, layout=text, params=params, **of_step)
    return estimate.total / row.total_bytes
