"""How long does attention take, against PyTorch's called sample by sample?

`attend`, forward and backward, in float32, over a loop of `scaled_dot_product_attention` over the samples, which
computes nothing between samples and no padding; and over the implementation before blocks were skipped, alone and in a
training step of the demo. Run `python benchmarks/attention.py [--quick]`. Prints tables and writes them, with versions
and hardware, to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.attention_baseline import attend_in_chunks
from support.timing import digits, report, table, versions_and_hardware

import jvarlen
from jvarlen.batches import token_batch_spec
from jvarlen.distributed.launch import keep_memory_of_steps
from jvarlen.models import DecoderConfig, decoder, init_params, make_loss_fn

NUM_HEADS, HEAD_SIZE = 4, 64
BEFORE = "before"
MOST_BEFORE = 2**26  # pairs of positions of rows for which the implementation before is timed as well

Call = Callable[[], object]


class Case(NamedTuple):
    """Rows of samples; `of_row` are the lengths of the samples of each row, which need not fill it."""

    name: str
    of_row: list[list[int]]
    seq_length: int
    reach: float  # the largest ratio that is good enough
    is_packed: bool = True
    causal: bool = True

    @property
    def pairs(self) -> float:
        """Causal pairs of the rows over those of the samples."""
        return len(self.of_row) * self.seq_length**2 / sum(n**2 for row in self.of_row for n in row)


def filled(seq_length: int, lengths: Iterator[float]) -> list[int]:
    """Lengths of the samples of a row; the last one is cut to end with it."""
    row: list[int] = []
    while (left := seq_length - sum(row)) > 0:
        row.append(min(max(round(next(lengths)), 1), left))
    return row


def lognormal(median: float, sigma: float) -> Iterator[float]:
    rng = np.random.default_rng(0)
    while True:
        yield float(rng.lognormal(math.log(median), sigma))


def cases(*, quick: bool) -> list[Case]:
    long_ones, questions = (1, 256 if quick else 8192), (2, 128) if quick else (4, 2048)
    sizes = [(2, 64)] if quick else [(4, 1024), (8, 512)]
    padded = (2, 64) if quick else (8, 512)
    of_questions, sigma = lognormal(235 * math.exp(-(0.3**2) / 2), 0.3), "median 300, sigma 1"
    packed = [filled(long_ones[1], lognormal(300, 1.0))]
    ends = np.random.default_rng(0).integers(padded[1] // 2, padded[1] + 1, padded[0])
    found = [
        Case(f"1 × {long_ones[1]:,}, lognormal lengths ({sigma})", packed, long_ones[1], 1.3),
        Case(
            f"{questions[0]} × {questions[1]:,}, lengths as of short questions (mean 235)",
            [filled(questions[1], of_questions) for _ in range(questions[0])],
            questions[1],
            1.4,
        ),
        *(
            Case(f"{rows} × {length:,}, one sample a row", [[length]] * rows, length, reach, is_packed=False)
            for (rows, length), reach in zip(sizes, (1.1, 0.9), strict=False)
        ),
        Case(
            f"{padded[0]} × {padded[1]:,} padded, lengths {padded[1] // 2} to {padded[1]}",
            [[int(end)] for end in ends],
            padded[1],
            1.1,
            is_packed=False,
        ),
        Case(f"1 × {long_ones[1]:,}, lognormal lengths, not causal", packed, long_ones[1], 1.5, causal=False),
    ]
    if not quick:
        of_rows = [filled(32_768, lognormal(300, 1.0))]
        found.insert(2, Case(f"1 × 32,768, lognormal lengths ({sigma})", of_rows, 32_768, 1.5))
    return found


def compiled(case: Case, attend: Callable[..., jax.Array]) -> tuple[Call, int, float]:
    """A call for outputs and gradients, bytes of the program's temporaries, and the seconds of compiling it."""
    rows, length = len(case.of_row), case.seq_length
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, grad = (jax.random.normal(of, (rows, length, NUM_HEADS, HEAD_SIZE)) for of in keys)
    if case.is_packed:
        ids = [np.repeat(np.arange(1, len(row) + 1), row) for row in case.of_row]
        where = {"segment_ids": jnp.asarray(np.stack(ids), jnp.int32)}
    else:
        where = {"lengths": jnp.asarray([row[0] for row in case.of_row], jnp.int32)}

    def both(grad: jax.Array, where: dict[str, jax.Array], *qkv: jax.Array) -> object:
        attended, pull = jax.vjp(lambda *qkv: attend(*qkv, causal=case.causal, **where), *qkv)
        return attended, pull(grad)

    begun = time.perf_counter()
    program = jax.jit(both).lower(grad, where, query, key, value).compile()
    seconds, memory = time.perf_counter() - begun, program.memory_analysis()
    return (
        lambda: jax.block_until_ready(program(grad, where, query, key, value)),
        0 if memory is None else memory.temp_size_in_bytes,
        seconds,
    )


def of_torch(case: Case) -> Call | None:
    """The same by PyTorch, a call a sample; None where it is not installed."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    torch.set_num_threads(os.cpu_count() or 1)
    generator = torch.Generator().manual_seed(0)
    samples = [
        [torch.randn(1, NUM_HEADS, length, HEAD_SIZE, generator=generator) for _ in range(4)]
        for row in case.of_row
        for length in row
    ]
    for *qkv, _ in samples:
        for array in qkv:
            array.requires_grad_()

    def call() -> object:
        attend = torch.nn.functional.scaled_dot_product_attention
        return [torch.autograd.grad(attend(*qkv, is_causal=case.causal), qkv, grad) for *qkv, grad in samples]

    return call


def in_turn(calls: dict[str, Call], num_turns: int, turn_s: float) -> dict[str, list[float]]:
    """The median seconds of each turn of each.

    The first call of a turn does not count: the threads of the turn before still wait busily for more, and caches hold
    what it left.
    """
    for call in calls.values():
        call()
    medians: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(num_turns):
        for name in list(calls) if turn % 2 else reversed(calls):
            calls[name]()
            seconds: list[float] = []
            while sum(seconds) < turn_s:
                begun = time.perf_counter()
                calls[name]()
                seconds.append(time.perf_counter() - begun)
            medians[name].append(statistics.median(seconds))
    return medians


def ratios(these: list[float], those: list[float]) -> str:
    """The median over turns, and the least and the largest."""
    of_turns = [one / other for one, other in zip(these, those, strict=True)]
    return f"{statistics.median(of_turns):.2f} ({min(of_turns):.2f}–{max(of_turns):.2f})"


def measure(case: Case, num_turns: int, turn_s: float) -> list[str]:
    ours, temporaries, compile_s = compiled(case, jvarlen.attend)
    theirs = of_torch(case)
    calls = {"ours": ours} | ({} if theirs is None else {"PyTorch": theirs})
    seconds = in_turn(calls, num_turns, turn_s)
    if case.causal and len(case.of_row) * case.seq_length**2 <= MOST_BEFORE:
        before, of_before, _ = compiled(case, attend_in_chunks)
        seconds |= in_turn({BEFORE: before}, 1, turn_s)
        temporary_before = f"{of_before / 1e6:.1f}"
    else:
        temporary_before = "–"
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    has_torch = "PyTorch" in medians
    return [
        case.name,
        f"{case.pairs:.1f}",
        f"{1e3 * medians['ours']:.1f}",
        f"{1e3 * medians['PyTorch']:.1f}" if has_torch else "not installed",
        digits(medians[BEFORE] / medians["PyTorch"]) if has_torch and BEFORE in medians else "–",
        ratios(seconds["ours"], seconds["PyTorch"]) if has_torch else "–",
        f"≤ {case.reach}",
        f"{temporaries / 1e6:.1f}",
        temporary_before,
        f"{compile_s:.2f}",
    ]


def step_of(shape: tuple[int, int], model: DecoderConfig, attend: Callable[..., jax.Array]) -> Call:
    """A training step of the demo's model whose attention is this; rows are three quarters full or more."""
    decoder.run_layer.clear_cache()  # it has been traced with another attention
    rows, length = shape
    rng = np.random.default_rng(0)
    spec = token_batch_spec(jvarlen.Bucket(rows, length), 1)
    batch = jvarlen.batches.full_batch(spec)
    lengths = rng.integers(length - length // 4, length + 1, batch.lengths.shape)
    is_token = np.arange(length) < lengths[..., None]
    batch = batch._replace(
        tokens=rng.integers(0, 256, batch.tokens.shape).astype(np.int32) * is_token,
        lengths=lengths.astype(batch.lengths.dtype),
        weights=is_token.astype(batch.weights.dtype),
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    step = jvarlen.make_train_step(make_loss_fn(model), optimizer)
    state, batch = step.init(init_params(model, 0)), jax.device_put(batch)
    with mock.patch.object(decoder, "attend", attend):
        program = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    decoder.run_layer.clear_cache()

    def call() -> object:
        nonlocal state
        state, metrics = jax.block_until_ready(program(state, batch))
        return metrics

    return call


def measure_step(shape: tuple[int, int], model: DecoderConfig, num_turns: int, turn_s: float) -> list[str]:
    calls = {"ours": step_of(shape, model, jvarlen.attend), BEFORE: step_of(shape, model, attend_in_chunks)}
    seconds = in_turn(calls, num_turns, turn_s)
    return [
        f"{shape[0]} × {shape[1]:,}",
        *(f"{1e6 * statistics.median(seconds[name]) / math.prod(shape):.1f}" for name in calls),
        ratios(seconds["ours"], seconds[BEFORE]),
        "≤ 1",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small shapes, and no report")
    quick = parser.parse_args().quick
    keep_memory_of_steps()
    num_turns, turn_s = (1, 0.001) if quick else (9, 0.5)
    model = DecoderConfig(num_layers=1, width=16, num_heads=1) if quick else DecoderConfig()
    shapes = [(2, 16)] if quick else [(16, 64), (56, 72), (12, 336)]
    rows = [measure(case, num_turns, turn_s) for case in cases(quick=quick)]
    of_steps = [measure_step(shape, model, num_turns, turn_s) for shape in shapes]
    report(
        "attention",
        [
            f"# Attention, {datetime.date.today()}",
            "",
            f"Forward and backward on {jax.devices()[0].platform}, {NUM_HEADS} heads of {HEAD_SIZE}, float32, causal "
            "but for the last row, on all cores. PyTorch: `scaled_dot_product_attention` sample by sample. The ways "
            "take turns; medians, and ratios are the median of those of the turns, least and largest in parentheses. "
            "Pairs: of positions of the rows over those of the samples. Before: chunks of queries, which skip what is "
            "above the diagonal and no other sample.",
            "",
            *table(
                "rows × length|pairs|ms|of PyTorch, ms|before / PyTorch's|ours / PyTorch's|reach|temporaries, MB|"
                "before, MB|compile s",
                rows,
            ),
            "",
            "The first row's temporaries should be at most 45 MB.",
            "",
            "A training step of the demo in padded rows, a sample a row, three quarters full or more:",
            "",
            *table("rows × length|microseconds a position|before|ours / before|reach", of_steps),
            "",
            versions_and_hardware("jax", "torch"),
        ],
        write=not quick,
    )


if __name__ == "__main__":
    main()
