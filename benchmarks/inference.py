"""How much of the speed of its compiled programs does `predict` keep for 20,000 embeddings?

`predict` measures lengths, plans, loads, computes and puts the results in order. By hand, the same programs run on
batches that lie on the device already, and results stay there; or on those of `load`, and each result is fetched before
the next step. Compiling is not counted. Run `python benchmarks/inference.py [--quick]`. Prints a table and writes it,
with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.timing import REPEATS, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import Batch
from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.decoder import Rows, graphs_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few samples, and no report")
    quick = parser.parse_args().quick
    num_samples, max_tokens = (40, 512) if quick else (20_000, 8192)
    config = DecoderConfig(num_layers=1, width=16) if quick else DecoderConfig(width=64)
    graph, params = graphs_of(config)[0], init_params(config, seed=0)
    rng = np.random.default_rng(0)
    samples = [rng.integers(0, 256, n).astype(np.int32) for n in rng.geometric(1 / 40, num_samples).clip(1, 256)]

    def embed(params: nnx.State, batch: Batch) -> jax.Array:
        model = nnx.merge(graph, params)
        x_BxTxD = model.run_layers(model.embed_inputs(batch.tokens), Rows(batch.lengths))
        sums_BxD = jnp.sum(x_BxTxD * batch.weights[..., None], axis=1)
        return sums_BxD / jnp.maximum(batch.lengths, 1)[:, None]

    def predict() -> np.ndarray:
        options = {"max_tokens": max_tokens, "max_shapes": 8, "axes": "row", "progress": False}
        return np.stack(jvarlen.predict(embed, params, samples, **options))

    def step(params: nnx.State, batch: Batch) -> tuple[nnx.State, jax.Array]:
        return params, embed(params, jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, batch))

    plan = jvarlen.make_plan([*map(len, samples)], max_tokens=max_tokens, max_shapes=8, order="dataset")
    compiled = jvarlen.compile_buckets(step, params, plan, progress=False)
    on_device = list(jvarlen.load(plan, samples))

    def by_hand() -> list[jax.Array]:
        results = [compiled(params, batch)[1] for batch in on_device]
        jax.block_until_ready(results)
        return results

    def with_load() -> list[np.ndarray]:
        return [np.asarray(compiled(params, batch)[1]) for batch in jvarlen.load(plan, samples)]

    ways = {
        "the compiled programs, by hand": by_hand,
        "by hand, with `load` and fetching": with_load,
        "`predict`": predict,
    }
    predicted = predict()  # which compiles
    for batch, rows in zip(on_device, by_hand(), strict=True):
        assert np.allclose(predicted[batch.ids[batch.is_real]], rows[batch.is_real[0]], atol=1e-4)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}  # wall-clock and CPU
    with jvarlen.no_recompiles():
        for _ in range(REPEATS):
            for name, way in ways.items():  # in turns, so that other work slows all alike
                start, start_cpu = time.perf_counter(), time.process_time()
                way()
                seconds[name].append((time.perf_counter() - start, time.process_time() - start_cpu))
    least = {name: np.min(values, axis=0).tolist() for name, values in seconds.items()}
    wall_alone, cpu_alone = least["the compiled programs, by hand"]
    rows = [
        [name, f"{wall:.2f}", digits(num_samples / wall), f"{wall / wall_alone:.3f}", f"{cpu / cpu_alone:.3f}"]
        for name, (wall, cpu) in least.items()
    ]
    num_tokens = sum(map(len, samples))
    report(
        "inference",
        [
            f"# Inference, {datetime.date.today()}",
            "",
            f"{num_samples:,} embeddings of width {config.width} from {config.num_layers} layers; samples of 1 to "
            f"{max(map(len, samples))} bytes, {num_tokens:,} in all, in {len(plan.buckets.shapes)} shapes and "
            f"{plan.num_steps} steps with {plan.padding:.1%} padding. `predict` includes measuring lengths and "
            f"planning. Best of {REPEATS}, in turns. CPU seconds are those of this process, which other "
            "work on the machine changes less.",
            "",
            *table("way|seconds|embeddings a second|times the programs|CPU seconds, times the programs", rows),
            "",
            versions_and_hardware("jax", "flax"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
