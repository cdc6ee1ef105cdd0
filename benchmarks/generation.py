"""What does a cache of keys and values save where prompts of different lengths are continued?

`generate` continues prompts greedily in a few compiled shapes. Against it, one compiled program runs whole rows, padded
to the longest, again for every token. Compiling is not counted. Run `python benchmarks/generation.py [--quick]`. Prints
a table and writes it, with versions and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support.timing import REPEATS, best_seconds, digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.inference import generate
from jvarlen.models import DecoderConfig, init_params
from jvarlen.models.decoder import Rows, graphs_of


def make_prompts(num_prompts: int, longest: int) -> list[np.ndarray]:
    """Random bytes, 1 to `longest` of them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.int32) for length in rng.integers(1, longest + 1, num_prompts)]


def continue_whole_rows(
    params: nnx.State, config: DecoderConfig, prompts: list[np.ndarray], num_new: int
) -> Callable[[], list[np.ndarray]]:
    """Continues all prompts in one batch, of which every row runs again for each token."""
    graphdef = graphs_of(config)[0]
    lengths_B = np.array([len(prompt) for prompt in prompts])
    tokens_BxT = np.zeros((len(prompts), lengths_B.max() + num_new), np.int32)
    for row, prompt in zip(tokens_BxT, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def step(params: nnx.State, tokens_BxT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        inputs_BxT = jnp.pad(tokens_BxT[:, :-1], ((0, 0), (1, 0)), constant_values=config.begin_token)
        logits_BxTxV = nnx.merge(graphdef, params)(inputs_BxT, Rows(lengths=lengths_B + 1))
        rows_B = jnp.arange(len(lengths_B))
        logits_BxV = logits_BxTxV[rows_B, lengths_B, : config.num_values]
        return tokens_BxT.at[rows_B, lengths_B].set(jnp.argmax(logits_BxV, axis=-1))

    def run() -> list[np.ndarray]:
        tokens = jnp.asarray(tokens_BxT)
        for new in range(num_new):
            tokens = step(params, tokens, lengths_B + new)
        return [row[length : length + num_new] for row, length in zip(np.asarray(tokens), lengths_B, strict=True)]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few prompts, and no report")
    quick = parser.parse_args().quick
    config = DecoderConfig(num_layers=1, width=16) if quick else DecoderConfig()
    num_prompts, longest, num_new = (4, 12, 4) if quick else (100, 200, 64)
    params, prompts = init_params(config, seed=0), make_prompts(num_prompts, longest)

    def continue_in_shapes(max_shapes: int) -> list[np.ndarray]:
        return generate(params, config, prompts, max_new_tokens=num_new, max_shapes=max_shapes, progress=False)

    ways = {
        "`generate`, at most 4 shapes": lambda: continue_in_shapes(4),
        "`generate`, 1 shape": lambda: continue_in_shapes(1),
        "whole rows for every token": continue_whole_rows(params, config, prompts, num_new),
    }
    continued, seconds, compiled = {}, {}, {}
    for name, way in ways.items():
        with jvarlen.no_recompiles("count") as counted:
            way()
        compiled[name] = counted.num_compilations
        with jvarlen.no_recompiles("count") as counted:
            seconds[name], continued[name] = best_seconds(way, limit_s=20)
        assert not counted.num_compilations
    same = sum(
        all(np.array_equal(one, other) for other in others) for one, *others in zip(*continued.values(), strict=True)
    )
    fastest = next(iter(seconds.values()))
    rows = [
        [name, f"{value:.3f}", digits(num_prompts * num_new / value), digits(value / fastest), str(compiled[name])]
        for name, value in seconds.items()
    ]
    report(
        "generation",
        [
            f"# Generation, {datetime.date.today()}",
            "",
            f"{num_prompts} prompts of 1 to {longest} bytes, {num_new} new tokens each, greedy. The model has "
            f"{config.num_layers} layers of width {config.width}. {same} of {num_prompts} continuations are the same. "
            f"Best of {REPEATS}.",
            "",
            *table("way|seconds|new tokens a second|times the seconds|compiled before", rows),
            "",
            versions_and_hardware("jax", "flax"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
