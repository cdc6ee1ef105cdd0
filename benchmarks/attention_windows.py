"""How does the time of attention follow a window that is data?

Forward and backward of `attend` alone, and a training step of the demo, by one program for all windows. Run `python
benchmarks/attention_windows.py [--quick]`. Prints a table and writes it, with versions and hardware, to
`benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import statistics

import jax
import jax.numpy as jnp
import optax
from attention import HEAD_SIZE, NUM_HEADS, in_turn, ratios
from support.timing import report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import full_batch, token_batch_spec
from jvarlen.distributed.launch import keep_memory_of_steps
from jvarlen.models import DecoderConfig, init_params, make_loss_fn, with_window

NUM_ROWS = 2


def measure(length: int, model: DecoderConfig, num_turns: int, turn_s: float) -> list[list[str]]:
    keys, shape = jax.random.split(jax.random.key(0), 4), (NUM_ROWS, length, NUM_HEADS, HEAD_SIZE)
    query, key, value, grad = (jax.random.normal(of, shape) for of in keys)
    lengths = jnp.full(NUM_ROWS, length)

    @jax.jit
    def both(window: jax.Array) -> object:
        attended, pull = jax.vjp(lambda *qkv: jvarlen.attend(*qkv, lengths=lengths, window=window), query, key, value)
        return attended, pull(grad)

    step = jvarlen.make_train_step(make_loss_fn(model), optax.adamw(1e-3))
    state, program = step.init(init_params(model, 0)), jax.jit(step)
    batch = jax.device_put(full_batch(token_batch_spec(jvarlen.Bucket(NUM_ROWS, length), 1)))
    windows = [length // 64, length // 16, length // 4, length]
    rows = []
    for name, call in {
        "attention": both, "step of the demo": lambda window: program(state, with_window(batch, window)),
    }.items():  # fmt: skip
        calls = {str(w): lambda w=w, call=call: jax.block_until_ready(call(jnp.int32(w))) for w in windows}
        seconds = in_turn(calls, num_turns, turn_s)
        for window in windows:
            of_window = seconds[str(window)]
            ratio = ratios(of_window, seconds[str(length // 4)])
            rows.append([name, f"{window:,}", f"{1e3 * statistics.median(of_window):.1f}", ratio])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, and no report")
    quick = parser.parse_args().quick
    keep_memory_of_steps()
    model = DecoderConfig(num_layers=1, width=16, num_heads=1) if quick else DecoderConfig()
    length = 64 if quick else 4096
    rows = measure(length, model, *((1, 0.001) if quick else (5, 0.5)))
    report(
        "attention-windows",
        [
            f"# Attention by windows, {datetime.date.today()}",
            "",
            f"Forward and backward on {jax.devices()[0].platform}, {NUM_ROWS} rows of one sample of {length:,} tokens, "
            f"{NUM_HEADS} heads of {HEAD_SIZE}, float32; and a training step of the demo on such rows. Windows take "
            "turns; medians, and ratios are the median of those of the turns, least and largest in parentheses.",
            "",
            *table(f"what|window|ms|over a window of {length // 4:,}", rows),
            "",
            "Reach of the first row: at most 0.35.",
            "",
            versions_and_hardware("jax"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
