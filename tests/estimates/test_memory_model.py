"""The memory of many layouts at once is near the estimate of each."""

import jax
import optax
import pytest

from jvarlen import Bucket
from jvarlen.estimates import estimate_memory
from jvarlen.estimates.layout_table import layout_table
from jvarlen.estimates.memory_model import MemoryModel
from jvarlen.models import DecoderConfig, init_params, layered, make_loss_fn
from jvarlen.parallel import Layout

MODEL = DecoderConfig(num_layers=4, width=32, num_heads=4, vocab_size=50)
BUCKETS = [Bucket(8, 32), Bucket(2, 96)]
M = 16  # microbatches of a step
TEXTS = [
    "data1",
    "data8.zero1",
    "data1.remat_selective",
    "data4.zero3.remat_full",
    "data2.tensor4.zero2",
    "data2.tensor4.sequence_parallel.remat_full",
    "data4.context2.context_from48.zero1",
    "data2.stage2.gpipe.remat_none",
    "data1.stage2.virtual2.interleaved",
    "data1.stage4.zero_bubble.remat_none",
]


@pytest.mark.parametrize(("trainable", "texts"), [(None, TEXTS[4:]), ("layers.*.attention.*", TEXTS[:4])])
def test_the_memory_model_is_near_the_estimate(trainable, texts):
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    model, optimizer, layouts = layered(MODEL), optax.adamw(1e-3), [*map(Layout.parse, texts)]
    memory = MemoryModel(model, optimizer, BUCKETS, params=params, trainable=trainable)
    found = memory.memory_bytes(layout_table(layouts), M)
    of_step = {"params": params, "trainable": trainable, "num_microbatches": M}
    ratios = {
        str(layout): found[i, i % 2] / estimate_memory(model, optimizer, BUCKETS[i % 2], layout=layout, **of_step).total
        for i, layout in enumerate(layouts)
    }
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios


def test_a_loss_function_has_no_layers():
    params, optimizer = jax.eval_shape(lambda: init_params(MODEL, seed=0)), optax.sgd(1e-3)
    memory = MemoryModel(make_loss_fn(MODEL), optimizer, BUCKETS, params=params)
    layouts = [Layout(data=1), Layout(data=4, zero=2)]
    found = memory.memory_bytes(layout_table(layouts), M)
    for i, layout in enumerate(layouts):
        of_step = make_loss_fn(MODEL), optimizer, BUCKETS[0]
        estimate = estimate_memory(*of_step, layout=layout, params=params, num_microbatches=M)
        assert 0.9 < found[i, 0] / estimate.total < 1.1


def test_many_layouts_are_traced_once(monkeypatch):
    params = jax.eval_shape(lambda: init_params(MODEL, seed=0))
    model = MemoryModel(layered(MODEL), optax.sgd(1e-3), BUCKETS[:1], params=params)
    few = model.memory_bytes(layout_table([Layout(data=2), Layout(data=4, zero=1)]), M)
    monkeypatch.setattr(jax, "make_jaxpr", None)
    many = model.memory_bytes(layout_table([Layout(data=2), Layout(data=4, zero=1)] * 500), 2 * M)
    assert many.shape == (1000, 1)
    assert (many[:2] > few).all()  # more microbatches are a larger batch
