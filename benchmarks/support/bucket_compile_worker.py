"""A JAX process of the bucket benchmark: answers questions into a JSON file.

Arguments: the questions with their settings as JSON, and the file for the answers. JAX's own environment variables say
where compiled programs are kept. Imports are not timed.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tqdm import tqdm

import jvarlen
from jvarlen.batches import BatchShapes, token_batch_spec
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.data.tokens import TokenDataset
from jvarlen.models import DecoderConfig, init_params, make_loss_fn

Call = Callable[[], Any]
Shape = tuple[int, int]

SEED = 0
AS_JAX_IS_SET = jvarlen.CompileOptions(cache_dir=None)


class Trained(NamedTuple):
    """A model's train step and the state before the first one."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any


def corpus(longest: int) -> TokenDataset:
    """The samples of the built-in corpus that are not longer."""
    whole = stdlib_functions(progress=False)
    return TokenDataset.from_bytes([sample.tobytes() for sample in whole if len(sample) <= longest])


def build(model: dict[str, int]) -> Trained:
    config, optimizer = DecoderConfig(**model), optax.adamw(1e-3)
    step = jvarlen.make_train_step(make_loss_fn(config), optimizer)
    return Trained(step, step.init(init_params(config, seed=SEED)))


def compile_all(
    trained: Trained, shapes: Iterable[Iterable[int]], is_packed: bool = False
) -> jvarlen.compiling.CompiledBuckets:
    """The step compiled for shapes of any lengths, equal ones too, which one call of `compile_buckets` refuses."""
    return jvarlen.compile_buckets(
        trained.step,
        trained.state,
        BatchShapes(
            sorted(map(tuple, shapes), key=lambda shape: shape[1]),
            batch_spec=batch_spec(is_packed),
            has_many_groups=False,
        ),
        progress=False,
        options=AS_JAX_IS_SET,
    )


def batch_spec(is_packed: bool) -> Callable[[Any, int], Any]:
    return functools.partial(token_batch_spec, samples_per_row=1) if is_packed else token_batch_spec


def text_batch(shape: Iterable[int], dataset: TokenDataset, is_packed: bool = False) -> Any:
    """A batch on the device whose rows are full of text, a sample each."""
    batch = jvarlen.batches.full_batch(batch_spec(is_packed)(jvarlen.Bucket(*shape), 1))
    tokens = np.resize(dataset.tokens, batch.tokens.shape).astype(np.int32)
    return jax.block_until_ready(jax.device_put(batch._replace(tokens=tokens)))


class Chain:
    """A copy of a state that calls of steps hand on to one another, as steps donate theirs."""

    def __init__(self, state: Any):
        self._state = jax.block_until_ready(jax.tree.map(jnp.array, state))

    def call(self, step: Callable[[Any, Any], tuple[Any, Any]], batch: Any) -> Call:
        """A call that takes one step."""

        def call() -> Any:
            self._state, metrics = step(self._state, batch)
            return self._state, metrics

        return call

    def run(self, step: Callable[[Any, Any], tuple[Any, Any]], batches: Iterable[Any]) -> float:
        """Seconds of steps as a training loop runs them: the host waits for the step before, at last for all."""
        begun, before = time.perf_counter(), None
        for batch in batches:
            self._state, metrics = step(self._state, batch)
            jax.block_until_ready(before)
            before = metrics
        jax.block_until_ready(self._state)
        return time.perf_counter() - begun


def seconds_of(call: Call) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Rounds:
    """Steps of many shapes that take turns, so that what else the machine does slows all of them.

    A round takes a step of each shape in the order given; one that is given twice is timed twice.
    """

    def __init__(self, trained: Trained, dataset: TokenDataset, shapes: list[tuple[bool, int, int]], name: str):
        self.name = name
        self.seconds: dict[tuple[bool, int, int], list[float]] = {shape: [] for shape in shapes}
        self._order = shapes
        self._calls: dict[tuple[bool, int, int], Call] = {}
        chain = Chain(trained.state)
        for is_packed, of_distinct_lengths in distinct_lengths(self.seconds):
            compiled = compile_all(trained, of_distinct_lengths, is_packed)
            for shape in of_distinct_lengths:
                self._calls[is_packed, *shape] = chain.call(compiled, text_batch(shape, dataset, is_packed))

    def run(self, num_rounds: int = 1, *, counted: bool = True) -> None:
        """Runs all shapes some times."""
        for _ in range(num_rounds):
            for shape in tqdm(self._order, desc=self.name, unit="step", mininterval=5):
                seconds = seconds_of(self._calls[shape])
                if counted:
                    self.seconds[shape].append(seconds)

    @property
    def rows(self) -> list[list[Any]]:
        """[whether packed, rows, length, median seconds] of each shape."""
        return [[*shape, statistics.median(values)] for shape, values in self.seconds.items()]


def distinct_lengths(shapes: Iterable[tuple[bool, int, int]]) -> Iterator[tuple[bool, list[Shape]]]:
    """The shapes in groups of one kind in which no length comes twice, as buckets need it."""
    groups: dict[tuple[bool, int], list[Shape]] = {}
    num_seen: dict[tuple[bool, int], int] = {}
    for is_packed, rows, length in shapes:
        place = num_seen.setdefault((is_packed, length), 0)
        num_seen[is_packed, length] += 1
        groups.setdefault((is_packed, place), []).append((rows, length))
    for (is_packed, _), group in groups.items():
        yield is_packed, group


def measure_costs(model: dict[str, int], longest: int, shapes: list[list[Any]], num_rounds: int) -> list[list[Any]]:
    """Median seconds of a step of each shape."""
    rounds = Rounds(build(model), corpus(longest), [tuple(shape) for shape in shapes], "cost of a step")
    rounds.run(counted=False)
    rounds.run(num_rounds)
    return rounds.rows


def start(model: dict[str, int], buckets: list[list[int]], is_packed: bool) -> dict[str, float]:
    """Seconds from the call to the first step's result, and of compiling."""
    batch = jax.tree.map(np.asarray, jvarlen.batches.full_batch(batch_spec(is_packed)(jvarlen.Bucket(*buckets[0]), 1)))
    jax.devices()  # starting the backend is no part of what is compared
    begun = time.perf_counter()
    trained = build(model)
    built = time.perf_counter()
    compiled = compile_all(trained, buckets, is_packed)
    ready = time.perf_counter()
    jax.block_until_ready(compiled(trained.state, jax.device_put(batch)))
    first_step = time.perf_counter()
    return {"build_s": built - begun, "compile_s": ready - built, "first_step_s": first_step - begun}


def train_epoch(
    model: dict[str, int],
    longest: int,
    buckets: list[list[int]],
    shapes: list[list[Any]],
    num_rounds: int,
    max_steps: int | None,
) -> dict[str, Any]:
    """One epoch through the whole pipeline, in parts between rounds of steps of all shapes.

    So the seconds of steps and of the epoch are of the same time, whatever else the machine does.
    """
    trained, dataset = build(model), corpus(longest)
    rounds = Rounds(trained, dataset, [tuple(shape) for shape in shapes], "steps of all shapes")
    plan = jvarlen.make_plan(jvarlen.measure_lengths(dataset, progress=False), buckets, order="shuffle", seed=SEED)
    num_steps = min(plan.num_steps, max_steps or plan.num_steps)
    compiled, chain = compile_all(trained, buckets), Chain(trained.state)
    batches = itertools.islice(jvarlen.load(plan, dataset), num_steps)
    seconds, num_compilations, num_done = 0.0, 0, 0
    for part in range(num_rounds):
        rounds.run()
        num_in_part = (num_steps * (part + 1)) // num_rounds - num_done
        with jvarlen.no_recompiles("count") as count:
            seconds += chain.run(compiled, itertools.islice(batches, num_in_part))
        num_compilations += count.num_compilations
        num_done += num_in_part
        print(f"epoch: {num_done:,} of {num_steps:,} steps, {seconds:.0f} s", file=sys.stderr)
    return {
        "rows": rounds.rows,
        "epoch_s": seconds,
        "num_steps": num_done,
        "step_bucket": plan.step_bucket[:num_done].tolist(),
        "num_tokens": int(plan.num_tokens[:num_done].sum()),
        "num_compilations": num_compilations,
    }


def jit_raw_shapes(model: dict[str, int], longest: int, max_tokens: int, limit_s: float) -> dict[str, Any]:
    """Batches of shuffled samples, each in its own shape, jitted, until the time is up; one at least.

    Each new shape takes two steps: the first one compiles, the second one shows how much of that was the step.
    """
    dataset = corpus(longest)
    lengths = jvarlen.measure_lengths(dataset, progress=False)
    batches = jvarlen.batch_by_tokens(lengths, max_tokens, order="shuffle", seed=SEED)
    ordered = lengths[batches.sample_ids]
    longest_of_batch = np.maximum.reduceat(ordered, batches.offsets[:-1])
    shapes = list(zip(batches.num_sequences.tolist(), longest_of_batch.tolist(), strict=True))
    begun = time.perf_counter()
    trained = build(model)
    step, state = jax.jit(trained.step, donate_argnums=0), trained.state
    built = time.perf_counter()
    first_s = None
    compile_s: list[float] = []
    step_s: list[float] = []
    for shape in dict.fromkeys(shapes):
        if compile_s and time.perf_counter() - built > limit_s:
            break
        batch = text_batch(shape, dataset)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        middle = time.perf_counter()
        first_s = first_s or (built - begun) + (middle - start)
        state, _ = jax.block_until_ready(step(state, batch))
        step_s.append(time.perf_counter() - middle)
        compile_s.append(middle - start - step_s[-1])
    return {
        "num_batches": len(shapes),
        "num_shapes": len(set(shapes)),
        "num_compiled": len(compile_s),
        "compile_s": compile_s,
        "step_s": step_s,
        "first_step_s": first_s,
        "num_positions": int((batches.num_sequences * longest_of_batch).sum()),
    }


def measure_dispatch(models: dict[str, dict[str, int]], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Seconds until a call comes back, of `CompiledBuckets` and of the jitted function, in turn; a small batch."""
    answer = {}
    for name, model in models.items():
        trained, shape = build(model), (2, 16)
        batch = jax.device_put(jvarlen.batches.full_batch(token_batch_spec(jvarlen.Bucket(*shape), 1)))
        steps = {
            "CompiledBuckets": compile_all(trained, [shape]),
            "jitted function": jax.jit(trained.step, donate_argnums=0),
        }
        calls = {kind: Chain(trained.state).call(step, batch) for kind, step in steps.items()}
        answer[name] = seconds_to_return(calls, repeats)
    return answer


def seconds_to_return(calls: dict[str, Call], repeats: int) -> dict[str, list[float]]:
    """Seconds until each call comes back, its result not waited for; calls take turns, in alternating order."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call())
    for repeat in range(repeats):
        for name in list(calls)[:: 1 if repeat % 2 else -1]:
            start = time.perf_counter()
            result = calls[name]()
            seconds[name].append(time.perf_counter() - start)
            jax.block_until_ready(result)
    return seconds


def measure_idle(
    model: dict[str, int], longest: int, bucket: list[int], repeats: int, steps_per_repeat: int, buffered_steps: int
) -> dict[str, list[float]]:
    """Seconds of steps in one bucket through the pipeline, and with batches that are on the device, in turn."""
    samples = [sample.tobytes() for sample in corpus(min(longest, bucket[1]))]
    # One epoch that is long enough: between epochs the pipeline starts anew.
    num_steps = steps_per_repeat + repeats * (buffered_steps + steps_per_repeat)
    dataset = TokenDataset.from_bytes(samples * -(-num_steps * bucket[0] // len(samples)))
    trained = build(model)
    plan = jvarlen.make_plan(jvarlen.measure_lengths(dataset, progress=False), [bucket], order="shuffle", seed=SEED)
    compiled, chain = compile_all(trained, [bucket]), Chain(trained.state)
    loaded = jvarlen.load(plan, dataset)
    held = list(itertools.islice(loaded, steps_per_repeat))
    seconds: dict[str, list[float]] = {"pipeline": [], "on the device": []}
    for _ in range(repeats):
        # What was loaded while nobody took it would make the pipeline look faster than it is.
        chain.run(compiled, itertools.islice(loaded, buffered_steps))
        for name, batches in (("pipeline", itertools.islice(loaded, steps_per_repeat)), ("on the device", held)):
            seconds[name].append(chain.run(compiled, batches))
    return seconds


QUESTIONS: dict[str, Callable[..., Any]] = {
    "costs": measure_costs,
    "start": start,
    "epoch": train_epoch,
    "raw": jit_raw_shapes,
    "dispatch": measure_dispatch,
    "idle": measure_idle,
}


def main() -> None:
    questions, path = sys.argv[1:]
    answers = {name: QUESTIONS[name](**settings) for name, settings in json.loads(questions).items()}
    Path(path).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
