"""Sections of the GPU benchmark in JAX: packed rows, padded shapes, and steps of many shapes.

Run as a module, `python -m support.gpu_jax full answer.json packed`, by `gpu.py`.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from support.gpu_sizes import SEED, Model, Sizes, bucket_options, lengths_by_kind, pack_options, step_flops
from support.gpu_worker import Answer, Save, run_section, said, say

# Last on the path, so that they stand in only for what is missing.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "gpu" / "stand_ins"))

import jvarlen
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.loading.plan_source import PlanSource
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

WARM_UPS = 3  # of an executable on a GPU: to tune, to record its launches, and to replay them

Rows = tuple[int, int]


class Trainer:
    """Steps of a model in bfloat16, and the state that they hand on to one another."""

    def __init__(self, model: Model, attention: Any = "auto"):
        self.config = DecoderConfig(**model._asdict(), compute_dtype="bfloat16", attention=attention)
        self.loss_fn = make_loss_fn(self.config)
        self.optimizer = optax.chain(optax.adamw(1e-4), jvarlen.scale_by_batch_size(256, rule="sqrt"))
        self.step_fn = jvarlen.make_train_step(self.loss_fn, self.optimizer)
        self.begin()

    def begin(self) -> None:
        """A state of its own: a step that fails may have taken the buffers of the one before with it."""
        self.state: Any = None
        gc.collect()
        self.state = self.step_fn.init(init_params(self.config, seed=SEED))

    def compile(self, plan: Any, **options: Any) -> jvarlen.compiling.CompiledBuckets:
        """One executable for each shape. Nothing is kept for the next time."""
        options = jvarlen.CompileOptions(cache_dir=None, **options)  # type: ignore[assignment]
        return jvarlen.compile_buckets(self.step_fn, self.state, plan, progress=False, options=options)  # type: ignore[arg-type]

    def run(self, compiled: jvarlen.compiling.CompiledBuckets, batches: list[Any]) -> float:
        """Seconds of steps on batches that are on the device, dispatched one after the other; nothing compiles."""
        losses = []
        with jvarlen.no_recompiles():
            jax.block_until_ready(self.state)
            begun = time.perf_counter()
            for batch in batches:
                self.state, metrics = compiled(self.state, batch)
                losses.append(metrics.loss_sum)
            jax.block_until_ready((self.state, losses))
            seconds = time.perf_counter() - begun
        if not np.isfinite(jax.device_get(losses)).all():
            raise RuntimeError(f"losses are not finite: {jax.device_get(losses)}")
        return seconds

    def seconds(self, compiled: jvarlen.compiling.CompiledBuckets, batch: Any, repeats: int) -> float:
        """Those of a step, in the fastest of some turns."""
        self.run(compiled, [batch] * WARM_UPS)
        return min(self.run(compiled, [batch] * 3) / 3 for _ in range(repeats))


def shapes_of(shapes: list[Rows], samples_per_row: dict[Rows, int] | None = None) -> BatchShapes:
    """Shapes of steps of one microbatch; of packed rows with the most samples of a row."""
    most = samples_per_row or {}
    return BatchShapes(
        sorted(shapes, key=lambda shape: (shape[1], shape[0])),
        has_many_groups=False,
        batch_spec=lambda bucket, num_microbatches: token_batch_spec(bucket, num_microbatches, most.get(tuple(bucket))),
    )


def full_batch(trainer: Trainer, shapes: BatchShapes, shape: Rows) -> Any:
    """A batch on the device, of rows without padding and random tokens."""
    batch = jvarlen.batches.full_batch(shapes.spec(jvarlen.Bucket(*shape)))
    values = np.random.default_rng(SEED).integers(trainer.config.num_values, size=batch.tokens.shape, dtype=np.int32)
    return jax.block_until_ready(jax.device_put(batch._replace(tokens=values)))


class RandomTokens:
    """Samples of random tokens: a dataset of the given lengths, parts of one array."""

    def __init__(self, lengths: np.ndarray, num_values: int):
        self._lengths = lengths
        self._tokens = np.random.default_rng(SEED).integers(num_values, size=4 * int(lengths.max()), dtype=np.int32)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        length = self._lengths[index]
        start = index % (len(self._tokens) - length)
        return self._tokens[start : start + length]


def batches_of(plan: Any, lengths: np.ndarray, num_values: int, num_steps: int) -> list[Any]:
    """The first batches of a plan, on the device."""
    source = PlanSource(plan, RandomTokens(lengths, num_values), jvarlen.loading.collate_tokens)
    batches = [jax.device_put(source[step]) for step in range(min(num_steps, plan.num_steps))]
    return jax.block_until_ready(batches)


def measure_plan(
    trainer: Trainer, compiled: Any, plan: Any, lengths: np.ndarray, num_steps: int, **flops: int
) -> Answer:
    """Seconds of the first steps of a plan, their tokens, and operations as if each sample were a row of its own."""
    batches = batches_of(plan, lengths, trainer.config.num_values, num_steps)
    trainer.run(compiled, batches[:WARM_UPS])
    groups = [group for step in range(len(batches)) for group in plan.groups(step)]
    used = np.concatenate([ids[ids >= 0] for ids in (plan.rows(group) for group in groups)])
    model = Model(**{name: getattr(trainer.config, name) for name in Model._fields})
    return {
        "num_steps": len(batches),
        "seconds": trainer.run(compiled, batches),
        "num_tokens": int(lengths[used].sum()),
        "flops": float(step_flops(model, 1, lengths[used], **flops).sum()),
        "padding": float(plan.padding),
    }


def measure_packed(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Steps of packed plans of both kinds of lengths as the decoder attends by default, then by cuDNN."""
    answer["plans"] = []
    first = sizes.packed_rows[0]
    turns: list[tuple[str, list[Rows], str]] = [(kind, [*sizes.packed_rows], "auto") for kind in lengths_by_kind(sizes)]
    if jax.default_backend() == "gpu":
        turns += [("uniform", [first], "cudnn")]  # where the decoder takes Triton, as rows hold many samples
    for kind, shapes, attention in turns:
        lengths = lengths_by_kind(sizes)[kind]
        plans = {rows: jvarlen.make_plan(lengths, **pack_options(rows)) for rows in shapes}
        most = {rows: plan.samples_per_row[0] for rows, plan in plans.items()}
        trainer, made = Trainer(sizes.model, attention), shapes_of(shapes, most)
        compiled, wall_s = timed(lambda t=trainer, made=made: t.compile(made))
        for rows in shapes:
            row = next(each for each in compiled.report if tuple(each.bucket) == rows)
            told = {"lengths": kind, "rows": rows, "attention": attention, "samples_per_row": most[rows]}
            of_plan = (trainer, compiled, plans[rows], lengths, sizes.num_steps)
            found = attempt(trainer, lambda of_plan=of_plan: measure_plan(*of_plan))
            answer["plans"].append(told | {"compile_s": row.compile_s, "bytes": row.total_bytes, **found})
            say(f"packed: {answer['plans'][-1]}")
            save()
        say(f"compiled in {wall_s:.1f} s")


def measure_padded(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Steps in each shape of the optimal plan of both kinds of lengths, and what an epoch of them takes."""
    answer |= {"shapes": [], "plans": []}
    trainer = Trainer(sizes.model)
    for kind, lengths in lengths_by_kind(sizes).items():
        plan = jvarlen.make_plan(lengths, **bucket_options(sizes), order="shuffle", seed=SEED)
        shapes: list[Rows] = [(each.rows, each.length) for each in plan.buckets.shapes]
        known = [each["shape"] for each in answer["shapes"]]
        if new := [shape for shape in shapes if shape not in known]:
            measure_shapes(sizes, answer["shapes"], save, trainer, shapes_of(new))
        answer["plans"].append(
            {
                "lengths": kind,
                "shapes": shapes,
                "steps": np.bincount(plan.step_bucket, minlength=len(shapes)).tolist(),
                "padding": float(plan.padding),
                "num_tokens": int(lengths.sum()),
                "flops": float(step_flops(sizes.model, 1, lengths).sum()),
            }
        )
        save()


def measure_shapes(sizes: Sizes, figures: list[Answer], save: Save, trainer: Trainer, shapes: BatchShapes) -> None:
    """Adds what a step takes in each shape, on rows without padding."""
    compiled, wall_s = timed(lambda: trainer.compile(shapes))
    say(f"{len(shapes.buckets)} shapes compiled in {wall_s:.1f} s")

    def step_of(shape: Rows) -> Answer:
        return {"step_s": trainer.seconds(compiled, full_batch(trainer, shapes, shape), sizes.repeats)}

    for row in compiled.report:
        shape = (row.bucket.rows, row.bucket.length)
        told = {"shape": shape, "compile_s": row.compile_s, "bytes": row.total_bytes}
        told["flops"] = float(step_flops(sizes.model, *shape))
        figures.append(told | attempt(trainer, lambda shape=shape: step_of(shape)))
        say(f"padded: {figures[-1]}")
        save()


def measure_many_shapes(sizes: Sizes, answer: Answer, save: Save) -> None:
    """Steps of several groups, each of its own shape, with one update."""
    lengths = lengths_by_kind(sizes)["long-tailed"]
    options = bucket_options(sizes) | {"max_shapes": max(3 * sizes.max_shapes // 4, 2)}
    plan = jvarlen.make_plan(
        lengths, **options, sequences_per_step=sizes.sequences_per_step, order="shuffle", seed=SEED
    )
    trainer = Trainer(sizes.model)
    compiled, answer["compile_s"] = timed(lambda: trainer.compile(plan))
    answer |= {"shapes": len(plan.buckets.shapes), "groups_per_step": plan.num_groups / plan.num_steps}
    save()
    num_steps = max(sizes.num_steps // 4, 1)  # of more than ten groups each
    answer |= measure_plan(trainer, compiled, plan, lengths, num_steps)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call returns, and its seconds."""
    begun = time.perf_counter()
    return call(), time.perf_counter() - begun


def attempt(trainer: Trainer, call: Callable[[], Answer]) -> Answer:
    """What was measured; or why not, for lack of memory say, with a new state for what follows."""
    try:
        return call()
    except Exception as error:
        trainer.begin()
        return {"error": said(error)}


def fastest(call: Callable[[], Any], *, num_in_turn: int = 1, repeats: int) -> float:
    """Seconds of a call in the fastest of some turns, several calls of which are dispatched one after the other."""
    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        _, seconds = timed(lambda: jax.block_until_ready([call() for _ in range(num_in_turn)]))
        found.append(seconds / num_in_turn)
    return min(found)


SECTIONS = {"packed": measure_packed, "padded": measure_padded, "many shapes": measure_many_shapes}

if __name__ == "__main__":
    sys.exit(run_section(SECTIONS))
