"""A JAX process of the end-to-end benchmark: writes the figures of runs to JSON files.

The plain loops are what one writes with Flax and Optax alone, with `jax.nn.dot_product_attention`; only the model and
its loss come from `jvarlen`. Letters: B rows, T positions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import grain  # here, before any watch runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
from support.end_to_end_run import (
    MAX_GRADIENT_NORM,
    OPTIMIZER,
    PADDED_SHAPES,
    Batch,
    Data,
    Settings,
    Stopwatch,
    answer_all,
    bits_per_byte,
    eval_batches,
    pad,
)

import jvarlen
from jvarlen.batches.batches import PackedBatch
from jvarlen.data.tokens import TokenDataset
from jvarlen.distributed import split_cpu
from jvarlen.distributed.launch import keep_memory_of_steps
from jvarlen.models import DecoderConfig, decoder, make_loss_fn
from jvarlen.models.hugging_face import params_from_tensors
from jvarlen.planning.budget import Budget
from jvarlen.training.losses import LossFn

Attend = Callable[..., jax.Array]  # with the arguments of `jvarlen.attend`

PACKING_BINS = 256  # open at a time; few more samples fit with more


def adamw(learning_rate: Any) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(MAX_GRADIENT_NORM), optax.adamw(learning_rate, **OPTIMIZER))


class JaxRun:
    """The model with its weights on the device, and its evaluation."""

    def __init__(self, settings: Settings, data: Data, attend: Attend | None = None):
        self.settings = settings
        model = DecoderConfig(**settings.model)
        self.about: dict[str, Any] = {}
        self.loss_fn = with_attention(make_loss_fn(model), attend)
        with np.load(settings.weights) as stored:
            self.params = jax.tree.map(jnp.asarray, params_from_tensors(dict(stored), model))
        self.num_params = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        held_out = eval_batches(data.held_out, settings.longest)
        self._held_out = [jax.device_put(token_batch(*batch)) for batch in held_out]
        self._num_bytes = sum(map(len, data.held_out))
        self._eval_step = evaluation(model)
        jax.block_until_ready((self.params, self._held_out))

    def wait(self, pending: Any) -> None:
        """Returns when the arrays are there."""
        jax.block_until_ready(pending)

    def evaluate(self) -> float:
        """Bits per byte of all held-out samples."""
        return bits_per_byte(lambda batch: float(self._eval_step(self.params, batch)), self._held_out, self._num_bytes)

    def close(self) -> None:
        """Has nothing to note."""


def with_attention(function: LossFn, attend: Attend | None) -> LossFn:
    """The loss of a model whose attention is another one, unless it is None."""
    if attend is None:
        return function

    def loss(params: Any, batch: Any) -> Any:
        # Layers are traced once for all that have the same settings: not for those with another attention.
        decoder.run_layer.clear_cache()
        with mock.patch.object(decoder, "attend", attend):
            sums = function(params, batch)
        decoder.run_layer.clear_cache()
        return sums

    return loss


def attend_by_jax(query: Any, key: Any, value: Any, *, segment_ids: Any = None, **_: Any) -> jax.Array:
    """What one calls without jvarlen, with a mask for packed rows; causal queries see no padding after them."""
    mask = None if segment_ids is None else segment_ids[:, None, :, None] == segment_ids[:, None, None, :]
    return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)


@functools.cache
def evaluation(model: DecoderConfig) -> Callable[..., jax.Array]:
    """The jitted sum of the losses of a batch; runs of one process share what is compiled for it."""
    loss_fn = make_loss_fn(model)
    return jax.jit(lambda params, batch: loss_fn(params, batch)[0])


def token_batch(tokens_BxT: np.ndarray, lengths_B: np.ndarray) -> jvarlen.batches.Batch:
    """A batch of one microbatch, without the axis of microbatches."""
    weights_BxT = (np.arange(tokens_BxT.shape[1]) < lengths_B[:, None]).astype(np.float32)
    is_real_B = lengths_B > 0
    ids_B = np.where(is_real_B, np.arange(len(lengths_B), dtype=np.int32), np.int32(-1))
    return jvarlen.batches.Batch(tokens_BxT, lengths_B, weights_BxT, np.float32(is_real_B.sum()), ids_B, is_real_B)


class Gated:
    """A dataset that lets no thread read while its gate is shut, so that nothing is read ahead while the watch stands.

    The main thread is `load`, which looks at a sample.
    """

    def __init__(self, dataset: Any):
        self._dataset = dataset
        self.gate = threading.Event()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.gate.wait()
        return self._dataset[index]


class PlannedRun(JaxRun):
    """`jvarlen`: the epoch planned, every shape compiled, the rate scaled by the batch size of each step.

    Args:
      settings: of the run.
      data: samples.
      watch: counts the seconds.
      packing: `"best_fit"`: one packed shape, as `fit` has by default; `"padded"`: padded shapes.
      num_shapes: the most padded shapes: more take longer to compile than to train to the target.
      attend: in place of `jvarlen.attend`.
    """

    def __init__(
        self,
        settings: Settings,
        data: Data,
        watch: Stopwatch,
        *,
        packing: Literal["padded", "best_fit"] = "best_fit",
        num_shapes: int = PADDED_SHAPES,
        attend: Attend | None = None,
    ):
        super().__init__(settings, data, attend)
        self._watch, self._packing, self._num_shapes = watch, packing, num_shapes
        self._layout = None if settings.num_devices == 1 else f"data{settings.num_devices}"
        self._cache_dir = None if settings.programs is None else Path(settings.programs)
        self._train = TokenDataset.from_bytes([sample.tobytes() for sample in data.train])
        self._step: Any = None
        with watch("planning"):
            self.plan, reason = self._make_plan()
            # Packed rows hold about as many tokens a step, and now 1 sample, now 20.
            rates = jvarlen.scale_by_planned_rate(
                self.plan, settings.schedule, settings.max_tokens, rule="sqrt", unit="tokens", counted_in="tokens"
            )
        with watch("compile"):
            optimizer = optax.chain(adamw(1.0), rates)
            self._train_step = jvarlen.make_train_step(self.loss_fn, optimizer, layout=self._layout)
            # A copy: steps take the buffers of their state over.
            self._state = self._train_step.init(self.params)
        # The specs of all rows of a step.
        shapes = [(settings.num_devices * bucket.rows, bucket.length) for bucket in self.plan.buckets.shapes]
        self.num_compiled = len(shapes)
        self.about = {"reason": reason, "is_packed": self.plan.is_packed}
        self.samples = Gated(self._train)
        with watch("data"):
            self.batches = (
                Batch(batch, shapes[bucket], int(num_tokens))
                for batch, bucket, num_tokens in zip(
                    jvarlen.load(self.plan, self.samples, layout=self._layout),
                    self.plan.step_bucket,
                    self.plan.num_tokens,
                    strict=True,
                )
            )

    def _make_plan(self) -> tuple[jvarlen.Plan, str]:
        """The plan of an epoch, and why it has these shapes."""
        settings = self.settings
        lengths = jvarlen.measure_lengths(self._train, progress=False)
        budget = Budget(
            max_tokens=settings.max_tokens // settings.num_devices,
            num_microbatches=settings.num_devices,
            max_length=settings.longest,
            length_multiple=settings.length_multiple,
        )
        plan = functools.partial(jvarlen.make_plan, lengths, seed=settings.seed)
        if self._packing == "best_fit":
            return plan(
                dataclasses.replace(budget, strategy=(settings.longest,)), packing="best_fit"
            ), "one packed shape"
        return plan(dataclasses.replace(budget, max_shapes=self._num_shapes)), "padded shapes"

    def compile(self, when: Literal["ahead", "background"] = "background") -> None:
        """Compiles the step in all shapes of the plan, or begins to."""
        self._step = jvarlen.compile_buckets(
            self._train_step,
            self._state,
            self.plan,
            progress=False,
            options=jvarlen.CompileOptions(cache_dir=self._cache_dir, when=when),
        )

    def evaluate(self) -> float:
        """Bits per byte of all held-out samples; until then, nothing more is read ahead.

        The watch does not stop while programs are compiled.
        """
        self.samples.gate.clear()
        if self._step is not None:  # evaluations are the same for all ways: on one device
            whole = self._train_step.gather_params(self._state)
            self.params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf)), whole)
        is_compiling = self._step is not None and self._step.pending
        try:
            with self._watch("compile") if is_compiling else contextlib.nullcontext():
                return super().evaluate()
        finally:
            self.samples.gate.set()

    def compiles(self, batch: Batch) -> bool:
        """The first step starts compiling; later ones wait for their programs."""
        return self._step is None

    def step(self, batch: Batch, num_tokens_before: int) -> Any:
        """Calls what was compiled for the shape; the rate is in the plan."""
        if self._step is None:
            self.compile()
        self._state, metrics = self._step(self._state, batch.arrays)
        return metrics

    def close(self) -> None:
        """Notes what compiling took."""
        rows = self._step.report
        self.about |= {
            "lower_s": sum(row.lower_s for row in rows),
            "compile_s": sum(row.compile_s for row in rows),
            "cache_hits": rows.num_cache_hits,
        }


class PlainRun(JaxRun):
    """A jitted step on whatever comes: each new shape compiles when it comes."""

    def __init__(self, settings: Settings, data: Data, watch: Stopwatch, batches: Callable[..., Iterator[Batch]]):
        super().__init__(settings, data, attend_by_jax)
        optimizer = optax.inject_hyperparams(adamw)(learning_rate=settings.learning_rate)

        def train_step(params: Any, opt_state: Any, batch: Any, learning_rate: Any) -> tuple[Any, Any, jax.Array]:
            def mean_loss(params: Any) -> jax.Array:
                loss_sum, weight_sum = self.loss_fn(params, batch)
                return loss_sum / weight_sum

            loss, grads = jax.value_and_grad(mean_loss)(params)
            opt_state.hyperparams["learning_rate"] = learning_rate
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, loss

        with watch("compile"):
            self._step = jax.jit(train_step, donate_argnums=(0, 1))
            self._opt_state = optimizer.init(self.params)
        with watch("data"):
            self.batches = batches(settings, data.train)
        self._compiled: set[tuple[int, int]] = set()

    @property
    def num_compiled(self) -> int:
        """Shapes that the step was called with."""
        return len(self._compiled)

    def compiles(self, batch: Batch) -> bool:
        """Whether it is the first of its shape."""
        return batch.shape not in self._compiled

    def step(self, batch: Batch, num_tokens_before: int) -> Any:
        """Calls the jitted step at the rate of the schedule."""
        learning_rate = np.float32(self.settings.schedule(num_tokens_before))
        self.params, self._opt_state, loss = self._step(self.params, self._opt_state, batch.arrays, learning_rate)
        self._compiled.add(batch.shape)
        return loss


def padded_batch(samples: list[np.ndarray], rows: int, length: int) -> Batch:
    tokens_BxT, lengths_B = pad(samples, rows, length)
    return Batch(token_batch(tokens_BxT, lengths_B), (rows, length), int(lengths_B.sum()))


def pad_to_longest(settings: Settings, samples: list[np.ndarray]) -> Iterator[Batch]:
    """Shuffled samples, a fixed number a batch, all padded to the longest of the data."""
    order, rows = np.random.default_rng(settings.seed).permutation(len(samples)), settings.fixed_rows
    for start in range(0, len(order), rows):
        yield padded_batch([samples[i] for i in order[start : start + rows]], rows, settings.longest)


def pad_to_powers_of_two(settings: Settings, samples: list[np.ndarray]) -> Iterator[Batch]:
    """Shuffled samples by powers of two, as `bucket_by_sequence_length` of tf.data batches them: a full bucket is one.

    Batches that are not full at the end of the epoch are filled up with rows without a sample.
    """
    pending: dict[int, list[np.ndarray]] = {}
    for i in np.random.default_rng(settings.seed).permutation(len(samples)):
        length = min(1 << (len(samples[i]) - 1).bit_length(), settings.longest)
        bucket = pending.setdefault(length, [])
        bucket.append(samples[i])
        if len(bucket) == settings.max_tokens // length:
            yield padded_batch(bucket, len(bucket), length)
            bucket.clear()
    for length, bucket in pending.items():
        if bucket:
            yield padded_batch(bucket, settings.max_tokens // length, length)


def pack_by_grain(settings: Settings, samples: list[np.ndarray]) -> Iterator[Batch]:
    """Shuffled samples, packed by Grain into rows as long as the longest."""
    # What is in memory comes faster without threads that read ahead.
    reading = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    elements = [{"tokens": sample.astype(np.int32)} for sample in samples]
    shuffled = grain.MapDataset.source(elements).shuffle(seed=settings.seed).to_iter_dataset(reading)
    packed = grain.experimental.BestFitPackIterDataset(
        shuffled, length_struct={"tokens": settings.longest}, num_packing_bins=PACKING_BINS, seed=settings.seed
    )
    for rows in packed.batch(settings.fixed_rows, drop_remainder=True):
        segment_ids_BxT = rows["tokens_segment_ids"]
        is_token_BxT = segment_ids_BxT > 0
        arrays = PackedBatch(
            tokens=rows["tokens"],
            segment_ids=segment_ids_BxT,
            positions=rows["tokens_positions"],
            weights=is_token_BxT.astype(np.float32),
            num_sequences=np.float32(segment_ids_BxT.max(axis=1).sum()),
            ids=np.zeros((len(segment_ids_BxT), 1), np.int32),  # which Grain does not tell, and no loss reads
            is_real=np.ones((len(segment_ids_BxT), 1), bool),
        )
        yield Batch(arrays, segment_ids_BxT.shape, int(is_token_BxT.sum()))


def plain(batches: Callable[..., Iterator[Batch]]) -> Callable[..., PlainRun]:
    return lambda settings, data, watch: PlainRun(settings, data, watch, batches)


def earlier(settings: Settings, data: Data, watch: Stopwatch) -> PlannedRun:
    """Leaves its programs for `jvarlen_cached`, and need not train."""
    run = PlannedRun(settings, data, watch)
    run.compile("ahead")
    return run


WAYS = {
    "jvarlen": PlannedRun,
    "jvarlen_earlier": earlier,
    "jvarlen_cached": PlannedRun,  # with the programs of that one
    "jvarlen_padded": functools.partial(PlannedRun, packing="padded"),
    "longest": plain(pad_to_longest),
    "powers": plain(pad_to_powers_of_two),
    "grain": plain(pack_by_grain),
}

if __name__ == "__main__":
    runs = json.loads(sys.argv[1])
    if all(given["way"].startswith("jvarlen") for given, _ in runs):
        keep_memory_of_steps()
    split_cpu(max(given["num_devices"] for given, _ in runs))
    answer_all(WAYS, runs)
