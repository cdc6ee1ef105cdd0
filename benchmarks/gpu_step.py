"""How many bytes does the training step move beside its products on a GPU, how many kernels start, and how exact is it?

XLA's compiler for an H200, which runs on a CPU, compiles the decoder of `gpu.py`, about 100 million parameters in
bfloat16, with AdamW. Nothing runs there: bytes, kernels and seconds are told from the program, as `compile_for` tells
them. Then gradients in bfloat16 are held against those in float32, on this CPU. Run `python benchmarks/gpu_step.py
[--quick]`, with the extra `target-gpu`; `--quick` compiles nothing for it. Prints tables and writes them, with
versions and hardware, to `benchmarks/results/`. To compare two versions, run it in both.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.models import DecoderConfig, init_params, make_loss_fn
from jvarlen.models.decoder import param_shapes
from jvarlen.targets.compile_for import compile_for

MODEL = DecoderConfig(num_layers=8, width=1024, num_heads=8, compute_dtype="bfloat16")
SHAPES = [(255, 256), (16, 4096), (2, 128)]
# Layers, width, heads, and heads of keys and values.
EXACT = [(2, 128, 4, 4), (8, 256, 4, 2), (12, 128, 2, 2)]
QUICK = [(1, 32, 2, 2), (1, 64, 2, 1), (2, 32, 2, 2)]
SEEDS = range(4)


def compiled_row(rows: int, length: int) -> list[str]:
    plan = jvarlen.make_plan([length] * rows, [(rows, length)])
    (row,) = compile_for(
        make_loss_fn(MODEL),
        optax.adamw(3e-4),
        plan,
        params=param_shapes(MODEL),
        target="1xh200",
        progress=False,
    )
    seconds, products_s = row.seconds or math.nan, row.products_s or math.nan
    num_bytes, temp_bytes = row.elementwise_bytes or math.nan, row.temp_bytes or math.nan
    figures = num_bytes / 1e9, row.num_kernels or 0, 1e3 * seconds, 100 * products_s / seconds, temp_bytes / 1e9
    return [f"{rows} × {length:,}", *map(digits, figures)]


def relative_error(config: DecoderConfig, seed: int) -> float:
    """The error of a gradient in bfloat16, by norms, over the gradient in float32."""
    rng = np.random.default_rng(seed)
    samples = [rng.integers(97, 123, 128).astype(np.int32) for _ in range(8)]
    batch = next(iter(jvarlen.load(jvarlen.make_plan([128] * 8, [(8, 128)]), samples)))
    microbatch = jax.tree.map(lambda leaf: jnp.asarray(leaf)[0] if np.ndim(leaf) else leaf, batch)
    params = jax.tree.map(
        lambda leaf: leaf * (1 + 0.2 * rng.normal(size=leaf.shape).astype(np.float32)), init_params(config, seed)
    )
    exact, rounded = (
        np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(grads)])
        for grads in (
            jax.jit(jax.grad(make_loss_fn(each), has_aux=True))(params, microbatch)[0]
            for each in (config, dataclasses.replace(config, compute_dtype="bfloat16"))
        )
    )
    return float(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models on the CPU only")
    quick = parser.parse_args().quick
    lines = [
        "# Bytes, kernels and exactness of the training step on a GPU",
        "",
        f"{datetime.datetime.now(tz=datetime.UTC).date()}. {versions_and_hardware('jax', 'jaxlib', 'optax')}",
    ]
    if not quick:
        header = "shape|GB beside products|kernels|told milliseconds|of it products and attention, %|temporaries, GB"
        lines += ["", "Compiled for one H200, 8 layers of width 1,024:", ""]
        lines += table(header, [compiled_row(*shape) for shape in SHAPES])
    rows = []
    for layers, width, heads, kv_heads in QUICK if quick else EXACT:
        config = DecoderConfig(num_layers=layers, width=width, num_heads=heads, num_kv_heads=kv_heads)
        errors = [1e3 * relative_error(config, seed) for seed in (range(1) if quick else SEEDS)]
        rows.append([f"{layers} × {width}", *map(digits, (np.mean(errors), min(errors), max(errors)))])
    lines += ["", "Gradients in bfloat16 against float32, ‖difference‖ / ‖gradient‖ in thousandths:", ""]
    lines += table("layers × width|mean|least|most", rows)
    report("gpu-step", lines, write=not quick)


if __name__ == "__main__":
    main()
