"""Ahead-of-time compilation: a train step with one graph a bucket, and no other.

Sizes: m microbatches, B rows, T positions, K buckets.
"""

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torch_ref.checks import known_keywords
from torch_ref.loading.batch import Batch, StepBatch, groups_of
from torch_ref.planning.buckets import Bucket, MultiLengthBucket, given_buckets
from torch_ref.planning.plan import Plan
from torch_ref.training.graphs import (
    Backend,
    choose_mode,
    compile_loss,
    count_graphs,
    keep_state,
    no_recompiles,
    room_for,
)
from torch_ref.training.train import LossFn, Metrics, loss_sums, take_microbatch, train_step
from torch_ref.training.unplanned import UnplannedShapeError, explain_unplanned, layout_of, name_of

__all__ = ["CompileRow", "CompiledBuckets", "compile_buckets"]

# Modes in which torch replays CUDA graphs, and how often a shape runs until it only replays: once each to compile, to
# warm up and to record.
_GRAPH_MODES = ("reduce-overhead", "max-autotune")
_RUNS_TO_RECORD = 3
_COMPILE_THE_MODEL = (
    "For named fields or several lengths, give train_step the model torch.compile(model, dynamic=False), and set "
    "torch._dynamo.config.recompile_limit to the number of shapes"
)


class CompileRow(NamedTuple):
    """What a bucket cost and how it was used.

    Attributes:
        bucket: its shape.
        compile_s: seconds of its first run, forward and backward, which compiles.
        num_graphs: graphs that torch captured in it.
        from_cache: whether all its code was in Inductor's cache on disk.
        num_steps: steps it was used for.
    """

    bucket: Bucket
    compile_s: float
    num_graphs: int
    from_cache: bool
    num_steps: int = 0


class CompiledBuckets:
    """One graph a bucket, chosen by the batch: `metrics = compiled(optimizer, batch)` is a `train_step`.

    Attributes:
        model: the model that it updates.
        buckets: the K shapes, by ascending length.
        mode: torch.compile's mode.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets: tuple[Bucket, ...],
        *,
        samples_per_row: tuple[int, ...] | None,
        loss_fn: LossFn,
        backend: Backend,
        mode: str,
        progress: bool,
    ) -> None:
        """Compile every bucket; `compile_buckets` has checked the arguments."""
        self.model = model
        self.buckets = buckets
        self.mode = mode
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
        self._specs = {
            bucket: _dummy_batch(bucket, num_slots, self._device)
            for bucket, num_slots in zip(buckets, samples_per_row or [None] * len(buckets), strict=True)
        }
        self._by_layout = {layout_of(spec): bucket for bucket, spec in self._specs.items()}
        self._compiled_loss = compile_loss(model, loss_fn, backend, mode)
        # The parameters that get a gradient, for each bucket that is compiled.
        self._trained: dict[Bucket, list[nn.Parameter]] = {}
        rows: dict[Bucket, CompileRow] = {}
        # The largest first: running out of memory shows at once.
        largest_first = sorted(buckets, key=lambda bucket: -bucket.rows * bucket.length)
        with keep_state(model, self._device), room_for(len(buckets)):
            for number, bucket in enumerate(largest_first, start=1):
                if progress:
                    print(f"compile {number} of {len(buckets)}: {name_of(bucket)}", file=sys.stderr)
                rows[bucket] = self._compile(bucket)
        self._rows = {bucket: rows[bucket] for bucket in buckets}

    def __call__(self, optimizer: Optimizer, batch: Batch | StepBatch) -> Metrics:
        """Take one step under `no_recompiles`; any number of microbatches will do.

        Args:
            optimizer: of the model's parameters; its gradients are overwritten.
            batch: this replica's share of the step, of one group or several, on the model's device.

        Returns:
            What `train_step` returns.

        Raises:
            UnplannedShapeError: if the batch, or a group of it, fits no bucket; it names what differs and the nearest
                bucket. Nothing has changed then.
            RuntimeError: from torch, if something would be compiled nevertheless: where the model's mode, autocast or
                an attribute that it reads changed, or the optimizer compiles.
        """
        for group in groups_of(batch):
            if type(group) is not Batch or layout_of(group) not in self._by_layout:
                raise UnplannedShapeError(explain_unplanned(group, self._specs))
        with no_recompiles():
            metrics = train_step(
                self.model,
                optimizer,
                batch,
                loss_fn=lambda _, part: self._loss_of(Bucket(*part.tokens.shape), part),
            )
        for bucket in {self._by_layout[layout_of(group)] for group in groups_of(batch)}:
            row = self._rows[bucket]
            self._rows[bucket] = row._replace(num_steps=row.num_steps + 1)
        return metrics

    @property
    def rows(self) -> tuple[CompileRow, ...]:
        """A row for each bucket, by ascending length."""
        return tuple(self._rows.values())

    @property
    def never_used(self) -> tuple[Bucket, ...]:
        """The buckets that were not used for any step so far."""
        return tuple(row.bucket for row in self.rows if not row.num_steps)

    def report(self) -> str:
        """Return the rows as a table, and below it the buckets that were never used."""
        lines = [f"{'rows x length':>20} {'graphs':>7} {'seconds':>9} {'cached':>7} {'steps':>9}"]
        lines += [
            f"{name_of(row.bucket):>20} {row.num_graphs:>7} {row.compile_s:>9.1f} "
            f"{'yes' if row.from_cache else 'no':>7} {row.num_steps:>9,}"
            for row in self.rows
        ]
        return "\n".join([*lines, f"never used: {', '.join(map(name_of, self.never_used)) or 'none'}"])

    def _loss_of(self, bucket: Bucket, microbatch: Batch) -> tuple[Tensor, Tensor]:
        if self.mode in _GRAPH_MODES:
            # A gradient that autograd takes over as it comes is memory of the graph, which the next microbatch
            # overwrites. To one that is there already it adds.
            for weight in self._trained.get(bucket, ()):
                if weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
            if self._device.type == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
        return self._compiled_loss(microbatch)

    def _compile(self, bucket: Bucket) -> CompileRow:
        before, start = count_graphs(), time.perf_counter()
        try:
            trained = self._run(bucket)
        except torch._dynamo.exc.Unsupported as error:
            error.add_note(f"compile_buckets calls loss_fn with a Batch of tokens. {_COMPILE_THE_MODEL}")
            raise
        compile_s = time.perf_counter() - start
        after = count_graphs()
        if after.graphs == before.graphs:  # newer versions of torch say so themselves
            raise RuntimeError(
                f"torch compiled nothing for bucket {name_of(bucket)}: it is switched off, by TORCHDYNAMO_DISABLE say"
            )
        self._trained[bucket] = trained
        with no_recompiles():  # a second run shows that the graph of the first one fits its shape
            for _ in range(_RUNS_TO_RECORD - 1 if self.mode in _GRAPH_MODES else 1):
                self._run(bucket)
        from_cache = after.cache_hits > before.cache_hits and after.cache_misses == before.cache_misses
        return CompileRow(bucket, compile_s, after.graphs - before.graphs, from_cache)

    def _run(self, bucket: Bucket) -> list[nn.Parameter]:
        """Run a dummy microbatch forward and backward, as a train step would; return the parameters it reached."""
        loss_sum, _ = self._loss_of(bucket, take_microbatch(self._specs[bucket], 0))
        torch.autograd.backward(loss_sum)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        trained = [weight for weight in self.model.parameters() if weight.grad is not None]
        for weight in trained:
            weight.grad = None
        return trained


@known_keywords
def compile_buckets(
    model: nn.Module,
    plan: Plan | Sequence[tuple[int, ...]],
    *,
    loss_fn: LossFn = loss_sums,
    backend: Backend = "inductor",
    mode: str | None = None,
    progress: bool = True,
) -> CompiledBuckets:
    """Compile forward and backward of a microbatch for every bucket, with `torch.compile(dynamic=False)`.

    Weights, gradients, buffers and random states are afterwards as before. Compile under the conditions of training:
    autocast, `model.train()`, number of threads. Each graph is whole: where torch would break it, it raises.

    Args:
        model: gives logits [B, T, V] for inputs int64[B, T]; not itself compiled, nor wrapped in
            DistributedDataParallel. Its parameters are on the device that the batches will be on.
        plan: a plan; or `Buckets` or (rows, length) pairs, whose rows are samples, not packed.
        loss_fn: gives the two sums of a microbatch, a `Batch` of tokens and not of named fields, like `loss_sums`. It
            must not read the batch's `num_sequences`, a Python number, since each value would need a graph.
        backend: torch.compile's backend; "eager" captures the graphs and compiles no code.
        mode: torch.compile's mode. None: "reduce-overhead", which replays CUDA graphs, with Inductor on one CUDA
            device; "default" elsewhere and where `torch.distributed` has several processes.
        progress: whether to print to stderr which bucket is compiled.

    Returns:
        `CompiledBuckets`.

    Raises:
        ValueError: if buckets are not as described or of pairs, or an argument is out of its range.
        RuntimeError: if a bucket needs more than one graph, or torch does not compile at all.
        torch._dynamo.exc.FailOnRecompileLimitHit: if torch wants more graphs than there are buckets. It would
            otherwise turn to eager execution without an error.

    Example:
        >>> model = nn.Sequential(nn.Embedding(256, 4), nn.Linear(4, 256))
        >>> compiled = compile_buckets(model, [(2, 4), (1, 8)], backend="eager", progress=False)
        >>> [(row.bucket.length, row.num_graphs) for row in compiled.rows]
        [(4, 1), (8, 1)]
    """
    buckets = given_buckets(plan.buckets if isinstance(plan, Plan) else plan, {}).shapes
    if isinstance(buckets[0], MultiLengthBucket):
        raise ValueError(
            f"compile_buckets takes buckets of one length, got some of several like {tuple(buckets[0])}. "
            f"{_COMPILE_THE_MODEL}"
        )
    shapes = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
    return CompiledBuckets(
        model,
        tuple(shapes),
        samples_per_row=plan.samples_per_row if isinstance(plan, Plan) and plan.row_offsets is not None else None,
        loss_fn=loss_fn,
        backend=backend,
        mode=choose_mode(model, backend) if mode is None else mode,
        progress=progress,
    )


def _dummy_batch(bucket: Bucket, num_slots: int | None, device: torch.device) -> Batch:
    """Return one microbatch [1, B, T] of full rows, laid out like the loader's; if packed, with P entries a row."""
    shape = (1, bucket.rows, bucket.length)
    of_samples = shape[:2] if num_slots is None else (*shape[:2], num_slots)
    tokens = torch.zeros(shape, dtype=torch.int64, device=device)
    positions = torch.arange(bucket.length, device=device).expand(shape).contiguous()
    return Batch(
        tokens=tokens,
        lengths=torch.full(shape[:2], bucket.length, device=device),
        weights=torch.ones(shape, dtype=torch.float32, device=device),
        num_sequences=float(bucket.rows),
        segment_ids=None if num_slots is None else torch.ones_like(tokens),
        positions=None if num_slots is None else positions,
        ids=torch.zeros(of_samples, dtype=torch.int64, device=device),
        is_real=torch.ones(of_samples, dtype=torch.bool, device=device),
    )
