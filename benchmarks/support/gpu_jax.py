"""The JAX process of the GPU benchmark: writes its figures to a JSON file.

Run as a module, `python -m support.gpu_jax full answers.json`. The file is rewritten after each part, so earlier
figures are kept when a later part fails. The exit code is 1 if one did.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.gpu_sizes import SEED, STRATEGIES, VOCAB_SIZE, Sizes, bucket_options, lengths_by_kind, step_flops
from support.gpu_worker import Answer, Save, run_parts, said, say

# Last on the path, so that they stand in only for what is missing.
sys.path.append(str(Path(__file__).parents[2] / "tests" / "gpu" / "stand_ins"))

from support.gpu_attention import compare_attention
from support.gpu_shares import measure_shares

import jvarlen
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import place
from jvarlen.loading.plan_source import PlanSource
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

WARM_UPS = 3  # of an executable on a GPU: to tune, to record its launches, and to replay them

Shape = tuple[int, int]


class Trainer:
    """AdamW steps of the model in bfloat16, and the state that they hand on to one another."""

    def __init__(self, sizes: Sizes, attention: Any):
        config = DecoderConfig(
            num_layers=sizes.num_layers,
            width=sizes.width,
            num_heads=sizes.num_heads,
            compute_dtype="bfloat16",
            attention=attention,
        )
        self._config = config
        self.loss_fn = make_loss_fn(config)
        self.optimizer = optax.chain(optax.adamw(1e-4), jvarlen.scale_by_batch_size(256, rule="sqrt"))
        self._step_fn = jvarlen.make_train_step(self.loss_fn, self.optimizer)
        self.begin()
        self.first: tuple[jvarlen.Plan, jvarlen.compiling.CompiledBuckets] | None = (
            None  # the first plan, and its executables
        )
        self.num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.state.params))

    def begin(self) -> None:
        """A state of its own: a step that fails may have taken the buffers of the one before with it."""
        self.state: Any = None
        self.state = self._step_fn.init(init_params(self._config, seed=SEED))

    def compile(self, shapes: Iterable[Shape], **options: Any) -> jvarlen.compiling.CompiledBuckets:
        """One executable for each shape; their lengths differ. Nothing is kept for the next time."""
        return jvarlen.compile_buckets(
            self._step_fn,
            self.state,
            BatchShapes(sorted(map(tuple, shapes), key=lambda shape: shape[1]), has_many_groups=False),
            progress=False,
            options=jvarlen.CompileOptions(cache_dir=None, **options),
        )

    def step(self, compiled: jvarlen.compiling.CompiledBuckets, batch: Any) -> Any:
        """Dispatches a step; metrics come back."""
        self.state, metrics = compiled(self.state, batch)
        return metrics

    def seconds(self, compiled: jvarlen.compiling.CompiledBuckets, shape: Shape, repeats: int) -> float:
        """Median seconds of a step, waited for, on rows without padding."""
        batch = full_batch(shape)
        found = []
        for _ in range(WARM_UPS + repeats):
            begun = time.perf_counter()
            jax.block_until_ready(self.step(compiled, batch))
            jax.block_until_ready(self.state)
            found.append(time.perf_counter() - begun)
        return float(np.median(found[WARM_UPS:]))


def full_batch(shape: Shape) -> jvarlen.batches.Batch:
    """A batch on the device, of random bytes."""
    batch = jvarlen.batches.full_batch(token_batch_spec(jvarlen.Bucket(*shape), 1))
    tokens = np.random.default_rng(SEED).integers(VOCAB_SIZE, size=batch.tokens.shape, dtype=np.int32)
    return jax.block_until_ready(jax.device_put(batch._replace(tokens=tokens)))


def tell_machine(sizes: Sizes, answer: Answer) -> None:
    device = jax.devices()[0]
    answer["device"] = device.device_kind
    answer["bytes"] = (device.memory_stats() or {}).get("bytes_limit")
    answer["versions"] = {"jax": jax.__version__, "jvarlen": jvarlen.__version__}


def measure_matrices(sizes: Sizes, answer: Answer) -> None:
    """Operations a second of the product of two square matrices in bfloat16, the best of some turns."""
    product = jax.jit(jnp.matmul)
    for size in sizes.matrix_sizes:
        a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))

        def multiply(a: jax.Array = a, b: jax.Array = b) -> jax.Array:
            return product(a, b)

        answer[str(size)] = 2 * size**3 / fastest(multiply, num_in_turn=10, repeats=sizes.repeats)
        say(f"matrices of {size:,}: {answer[str(size)] / 1e12:.4g} TFLOP/s")


def fastest(call: Callable[[], Any], *, num_in_turn: int = 1, repeats: int) -> float:
    """Seconds of a call in the fastest of some turns, several calls of which are dispatched one after the other."""
    jax.block_until_ready(call())
    found = []
    for _ in range(repeats):
        begun = time.perf_counter()
        results = [call() for _ in range(num_in_turn)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - begun) / num_in_turn)
    return min(found)


def measure_attention(sizes: Sizes, answer: Answer) -> None:
    """Seconds of a step in the longest shape by each implementation; why one does not run counts as an answer."""
    shape = (sizes.max_tokens // sizes.longest, sizes.longest)
    for name in sizes.attention if len(sizes.attention) > 1 else ():
        try:
            trainer = Trainer(sizes, name)
            answer[name] = {"step_s": trainer.seconds(trainer.compile([shape]), shape, sizes.repeats)}
        except Exception as error:  # a library of CUDA that is missing or too old, or not enough memory
            answer[name] = {"error": said(error)}
        say(f"attention, {name}: {answer[name]}")
        trainer = None
        gc.collect()  # its state, before the next one's is made


def measure_epochs(sizes: Sizes, answer: Answer, trainer: Trainer, save: Save) -> None:
    """Plans of all strategies, and what each of their shapes takes; those of one plan are compiled together.

    What is measured is saved shape by shape: a process that runs out of its time keeps it.
    """
    answer["num_parameters"] = trainer.num_parameters
    answer |= {"shapes": [], "plans": [], "left_out": [], "compile_wall_s": []}
    known: set[Shape] = set()
    begun = time.perf_counter()
    for kind, lengths in lengths_by_kind(sizes).items():
        useful_flops = float(step_flops(sizes, 1, lengths).sum())
        for strategy in STRATEGIES:
            if time.perf_counter() - begun > sizes.limit_s:
                answer["left_out"].append(f"{strategy}, {kind} lengths")
                continue
            planning = time.perf_counter()
            buckets = jvarlen.make_buckets(lengths, **bucket_options(sizes, strategy))
            plan = jvarlen.make_plan(lengths, buckets, order="shuffle", seed=SEED)
            plan_s = time.perf_counter() - planning
            new = [tuple(map(int, bucket)) for bucket in plan.buckets.shapes if tuple(bucket) not in known]
            if new:
                compiled = compile_shapes(trainer, new, answer["compile_wall_s"])
                measure_shapes(trainer, compiled, sizes, answer["shapes"], save)
                trainer.first = trainer.first or (plan, compiled)
                known |= set(new)
            steps = np.bincount(plan.step_bucket, minlength=len(plan.buckets.shapes))
            answer["plans"].append(
                {
                    "lengths": kind,
                    "strategy": strategy,
                    "shapes": [tuple(map(int, bucket)) for bucket in plan.buckets.shapes],
                    "steps": steps.tolist(),
                    "plan_s": plan_s,
                    "padding": plan.padding,
                    "num_tokens": int(plan.num_tokens.sum()),
                    "useful_flops": useful_flops,
                }
            )
            save()


def compile_shapes(trainer: Trainer, shapes: list[Shape], wall_s: list[float]) -> jvarlen.compiling.CompiledBuckets:
    """Executables of shapes, several of which are compiled at a time; the seconds of all are added to a list."""
    say(f"compiling {len(shapes)} shapes: {', '.join(f'{rows}×{length}' for rows, length in shapes)}")
    begun = time.perf_counter()
    compiled = trainer.compile(shapes)
    wall_s.append(time.perf_counter() - begun)
    say(f"compiled in {wall_s[-1]:.1f} s")
    return compiled


def measure_shapes(
    trainer: Trainer,
    compiled: jvarlen.compiling.CompiledBuckets,
    sizes: Sizes,
    figures: list[dict[str, Any]],
    save: Save,
) -> None:
    """Adds what each shape takes; one that fails, for lack of memory, says so and leaves the others alone."""
    for row in compiled.report:
        shape = (row.bucket.rows, row.bucket.length)
        figures.append(
            {
                "shape": shape,
                "lower_s": row.lower_s,
                "compile_s": row.compile_s,
                "bytes": row.total_bytes,
                "xla_flops": row.flops,
            }
        )
        try:
            figures[-1]["step_s"] = trainer.seconds(compiled, shape, sizes.repeats)
            say(f"{shape[0]}×{shape[1]}: {figures[-1]['step_s'] * 1e3:.4g} ms a step")
        except Exception as error:
            figures[-1]["error"] = said(error)
            say(f"{shape[0]}×{shape[1]}: {figures[-1]['error']}")
            trainer.begin()
        save()


class Bytes:
    """Samples of random bytes: a dataset of the given lengths, parts of one array."""

    def __init__(self, lengths: np.ndarray):
        self._lengths = lengths
        self._bytes = np.random.default_rng(SEED).integers(VOCAB_SIZE, size=4 * int(lengths.max()), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, index: int) -> np.ndarray:
        length = self._lengths[index]
        start = index % (len(self._bytes) - length)
        return self._bytes[start : start + length]


def measure_loop(sizes: Sizes, answer: Answer, trainer: Trainer) -> None:
    """Steps of the first plan as in training: batches are collated while the device works, and nothing compiles."""
    if trainer.first is None:
        raise RuntimeError("no plan was compiled")
    plan, compiled = trainer.first
    lengths = lengths_by_kind(sizes)["long-tailed"]
    source = PlanSource(plan, Bytes(lengths), jvarlen.loading.collate_tokens)
    steps = range(min(sizes.num_loop_steps, plan.num_steps))
    sums: list[Any] = []
    with jvarlen.no_recompiles():
        begun = time.perf_counter()
        for step in steps:
            batch = jax.device_put(source[step])
            jax.block_until_ready(sums[-2:-1])  # the device stays one step ahead, and memory is bounded
            metrics = trainer.step(compiled, batch)
            sums.append((metrics.loss_sum, metrics.weight_sum))
        jax.block_until_ready(trainer.state)
        seconds = time.perf_counter() - begun
    losses = np.divide(*np.array(jax.device_get(sums), np.float64).T)
    if not np.isfinite(losses).all():
        raise RuntimeError(f"losses are not finite: {losses.tolist()}")
    shapes = [tuple(map(int, plan.buckets.shapes[k])) for k in plan.step_bucket[steps.start : steps.stop].tolist()]
    answer |= {
        "seconds": seconds,
        "num_steps": len(steps),
        "num_tokens": int(plan.num_tokens[steps.start : steps.stop].sum()),
        "shapes": shapes,
        "losses": [float(losses[0]), float(losses[-1])],
    }


def measure_command_buffers(sizes: Sizes, answer: Answer, trainer: Trainer) -> None:
    """Seconds of a step with kernels launched together, as XLA chooses, and one by one."""
    shapes = sizes.buffered_shapes
    for name, options in (("on", ()), ("off", ("xla_gpu_enable_command_buffer=",))):
        compiled = trainer.compile(shapes, xla_options=options)
        answer[name] = [[*shape, trainer.seconds(compiled, shape, 3 * sizes.repeats)] for shape in shapes]


def measure_sort(sizes: Sizes, answer: Answer) -> None:
    """Seconds of sorting keys with their index."""
    keys = np.random.default_rng(SEED).integers(-(2**31), 2**31, sizes.num_keys).astype(np.int32)
    mesh = place(Layout(data=1)).mesh
    placed, index = jax.device_put((keys, np.arange(len(keys), dtype=np.int32)))
    sort_pairs = jax.jit(lambda keys, index: jax.lax.sort((keys, index), num_keys=2))
    _, indices = jvarlen.sample_sort(placed, mesh)
    if not np.array_equal(np.asarray(indices), np.argsort(keys, kind="stable")):
        raise RuntimeError("the order is not NumPy's")
    calls = {
        "`sample_sort`": lambda: jvarlen.sample_sort(placed, mesh),
        "`lax.sort` of (key, index)": lambda: sort_pairs(placed, index),
    }
    answer |= {name: fastest(call, repeats=sizes.repeats) for name, call in calls.items()}


def fastest_attention(found: Answer) -> str:
    """The implementation to go on with."""
    times = {name: of["step_s"] for name, of in found.items() if "step_s" in of}
    return min(times, key=lambda name: times[name], default="auto")


def parts(sizes: Sizes, answers: dict[str, Answer], save: Save) -> dict[str, Callable[[Answer], None]]:
    made: list[Trainer] = []

    def trainer() -> Trainer:
        if not made:
            made.append(Trainer(sizes, fastest_attention(answers["attention"])))
        return made[0]

    return {
        "machine": lambda answer: tell_machine(sizes, answer),
        "matrices": lambda answer: measure_matrices(sizes, answer),
        "shares": lambda answer: measure_shares(sizes, answer, fastest),
        "sort": lambda answer: measure_sort(sizes, answer),
        "attention alone": lambda answer: compare_attention(sizes, answer, save, fastest),
        "attention": lambda answer: measure_attention(sizes, answer),
        "command buffers": lambda answer: measure_command_buffers(sizes, answer, trainer()),
        "epochs": lambda answer: measure_epochs(sizes, answer, trainer(), save),
        "loop": lambda answer: measure_loop(sizes, answer, trainer()),
    }


if __name__ == "__main__":
    sys.exit(run_parts("JAX", parts))
