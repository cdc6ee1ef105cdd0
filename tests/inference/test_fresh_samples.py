"""Samples that are new in every iteration: generated, scored and trained on in given shapes, compiled once."""

import numpy as np
import optax
import pytest
from flax import nnx

from jvarlen import compile_buckets, load, make_train_step, plan_step, predict
from jvarlen.batches import BatchShapes
from jvarlen.batches.batches import token_batch_spec
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, init_params, layered, stack_layers, unstack_layers
from jvarlen.models.decoder import graphs_of, rows_of
from jvarlen.planning import Buckets

CONFIG = DecoderConfig(num_layers=1, width=16, num_heads=2, vocab_size=31)
SHAPES = [(1, 16), (2, 16), (1, 32)]
MOST_IN_ROW = 6
NUM_NEW = 4
NUM_ITERATIONS = 6


def scores(params, batch):
    """The largest logit of each position."""
    model = nnx.merge(graphs_of(CONFIG)[0], params)
    return model(batch.tokens, rows_of(batch)).max(axis=-1)


@pytest.mark.parametrize(("packing", "layout"), [("padded", "data4"), ("best_fit", "data2.zero3")])
def test_nothing_is_compiled_after_the_first_iteration(compilations, layout, packing):
    packed = {} if packing == "padded" else {"packing": packing, "samples_per_row": MOST_IN_ROW}
    buckets = Buckets(tuple(SHAPES), num_microbatches=4)
    step = make_train_step(layered(CONFIG), optax.adam(1e-3), layout=layout)
    state = step.init(stack_layers(init_params(CONFIG, seed=0)))
    shapes = BatchShapes(
        SHAPES,
        num_microbatches=4,
        layout=layout,
        batch_spec=lambda bucket, M: token_batch_spec(bucket, M, packed.get("samples_per_row")),
    )
    train = compile_buckets(step, state, shapes, progress=False)
    rng = np.random.default_rng(0)
    counts, num_groups = [], set()
    for iteration in range(NUM_ITERATIONS):
        prompts = [rng.integers(0, 30, length) for length in rng.integers(1, 28, rng.integers(1, 40))]
        params = unstack_layers(step.gather_params(state))
        new = generate(
            params, CONFIG, prompts, max_new_tokens=NUM_NEW, temperature=1.0, seed=iteration, buckets=SHAPES,
            layout=layout, progress=False,
        )  # fmt: skip
        samples = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
        found = predict(scores, params, samples, buckets=SHAPES, layout=layout, axes="length", progress=False, **packed)
        assert [*map(len, found)] == [*map(len, samples)]
        plan = plan_step([*map(len, samples)], buckets, **packed)
        num_groups.add(plan.num_groups)
        (batch,) = load(plan, samples, layout=layout)
        state, metrics = train(state, batch)
        assert float(metrics.num_tokens) == sum(map(len, samples))
        counts.append(len(compilations))
    assert len(num_groups) > 3
    assert set(counts) == {counts[0]}, (counts, compilations[counts[0] :])
