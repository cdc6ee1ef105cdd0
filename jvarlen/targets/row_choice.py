"""The most rows of each bucket that fit into a device's memory, by programs that are compiled for it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias, cast

import jax
import numpy as np
from jaxtyping import Int64
from tqdm import tqdm

from jvarlen._common.checks import NothingFitsError, UserError
from jvarlen._common.terminal import text_table
from jvarlen._common.types import Extra, Params
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import StepCompiler, largest_first
from jvarlen.compiling.program_store import without_compilation_cache
from jvarlen.distributed.placement import LayoutLike
from jvarlen.parallel.layers import LayeredModel, StepLoss
from jvarlen.planning.buckets import Bucket, Buckets
from jvarlen.planning.budget import Budget, broken_by_one_row, limits_of_rows, round_caps, steps_and_rows
from jvarlen.planning.plan import Plan
from jvarlen.targets.compile_for import DEFAULT_OPTIONS, TargetStep, compile_programs, layout_of, seconds_of_runs
from jvarlen.targets.compiled_bytes import NEAR, CompiledBytes, fit_costs
from jvarlen.targets.report import SOURCE, TargetReport, TargetRow
from jvarlen.targets.target import Target
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer

__all__ = ["BucketRows", "RowChoice", "choose_rows"]

_MakePlan: TypeAlias = Callable[[Budget | Buckets[Bucket]], Plan]
_SHARE_OF_GPU = 0.9  # temporaries need one free block, and kernels that are tuned on the device can need more memory
_MOST_PROGRAMS = 3  # of one length
_FIRST_TOKENS = 2**15  # of the first program
_MOST_TIMES = 64  # the most tokens of the next program, over those of all programs so far


class BucketRows(NamedTuple):
    """The rows of a length that fit, and the limit that counted for its bucket.

    Attributes:
      bucket: the chosen shape, whose program was compiled and fits.
      most_rows: the most that the limits allow, with bytes interpolated between programs; the bucket has fewer where
        its samples fill whole steps of fewer, and where the last program to be compiled had fewer.
      limit: as in `Plan.limits`.
      num_bytes: of its program, on a device.
      num_programs: compiled programs of this length.
    """

    bucket: Bucket
    most_rows: int
    limit: str
    num_bytes: int
    num_programs: int


@dataclasses.dataclass(frozen=True)
class RowChoice:
    """A plan whose buckets have the most rows that fit; `str` is a table of them.

    Attributes:
      plan: the plan.
      rows: a row for each bucket of the plan.
      report: the compiler's figures for the programs of these buckets.
      budget: the given one, with a `memory` that knows the compiled programs, and with `max_bytes`.
      token_budget: the given budget with the largest `max_tokens` at which all buckets fit, without `memory`.
      token_plan: the plan of `token_budget`. The program of its fullest bucket was compiled as well.
      epoch_s: predicted seconds of all steps of the plan, an estimate; None where those of a step are unknown.
      token_epoch_s: the same for `token_plan`.
    """

    plan: Plan
    rows: tuple[BucketRows, ...]
    report: TargetReport
    budget: Budget
    token_budget: Budget
    token_plan: Plan
    epoch_s: float | None = None
    token_epoch_s: float | None = None

    @property
    def max_bytes(self) -> float:
        """The limit that the buckets were held to."""
        return cast("float", self.budget.max_bytes)

    def __str__(self) -> str:
        """The buckets with their bytes, and both plans beside each other."""
        return (
            f"{self.report.layout} on {self.report.target}, {self.max_bytes / 1e9:.4g} GB a device. {SOURCE}\n"
            f"{text_table(self.bucket_cells(), align='>>>>>>')}\n"
            f"the best single budget of tokens that fits, beside it; seconds are estimates:\n"
            f"{text_table(self.plan_cells(), align='<>>>')}"
        )

    def bucket_cells(self) -> list[list[str]]:
        """A header, and a row for each bucket."""
        rows = [["bucket", "most rows", "limit", "GB", "of the limit", "programs"]]
        for each in self.rows:
            size, share = f"{each.num_bytes / 1e9:.3g}", f"{each.num_bytes / self.max_bytes:.1%}"
            rows.append([str(each.bucket), f"{each.most_rows:,}", each.limit, size, share, str(each.num_programs)])
        return rows

    def plan_cells(self) -> list[list[str]]:
        """A header, and a row for the plan and for that by tokens."""
        by_tokens = f"max_tokens {self.token_budget.max_tokens:,}"
        rows = [["rows by", "padding", "steps", "seconds of an epoch"]]
        for name, plan, seconds in (
            ("memory", self.plan, self.epoch_s),
            (by_tokens, self.token_plan, self.token_epoch_s),
        ):
            text = "–" if seconds is None else f"{seconds:,.4g}"
            rows.append([name, f"{plan.padding:.2%}", f"{plan.num_steps:,}", text])
        return rows


def choose_rows(
    model: LayeredModel | LossFn | StepLoss,
    optimizer: Optimizer,
    plan: _MakePlan,
    *,
    budget: Budget,
    layout: LayoutLike = None,
    params: Params,
    target: Target | str,
    max_bytes: float | None = None,
    extra: Extra = None,
    seed: int | None = None,
    batch_spec: BatchSpec | None = None,
    options: CompileOptions = DEFAULT_OPTIONS,
    progress: bool = True,
) -> RowChoice:
    """Chooses the buckets of a plan with the most rows that fit into the memory of devices that need not be here.

    Bytes are those of programs that are compiled for the devices. The first has the longest length; from its bytes for
    a token follow the lengths of the other buckets. Then the rows of each length are sought, the longest last, with at
    most three programs of a length, the first included. More are compiled only where none of three fits. The program of
    every bucket of the plan is among them, and fits.

    Args:
      model: as for `compile_for`.
      optimizer: as for `compile_for`.
      plan: makes the plan of a budget, or of buckets: `functools.partial(make_plan, lengths, packing="best_fit")`.
      budget: its other limits hold as well. `max_tokens` may be so large that it limits nothing.
      layout: as for `compile_for`.
      params: as for `compile_for`.
      target: as for `compile_for`.
      max_bytes: that a device may hold during a step; None: the part of the target's memory that a process can have,
        and nine tenths of that on a GPU, where temporaries need one free block and tuned kernels can need more memory.
      extra: as for `compile_for`.
      seed: as for `compile_for`.
      batch_spec: as for `compile_for`.
      options: as for `compile_for`.
      progress: as for `compile_for`.

    Returns:
      `RowChoice`. Its plan's buckets, given to `plan`, make the same plan.

    Raises:
      ValueError: not one row of some length fits, and samples of this length are listed; no `max_bytes` for a target
        with unknown memory; a budget with a `memory`, or for pairs; what `compile_for` refuses.
      ModuleNotFoundError: the compiler is not installed.

    Example:
      >>> import functools
      >>> import jax, jax.numpy as jnp, optax
      >>> from jvarlen.planning.make_plan import make_plan
      >>> def loss_fn(params, batch):
      ...     return jnp.sum(jnp.sin(params[batch.tokens]) * batch.weights[..., None]), jnp.sum(batch.weights)
      >>> params, M = jax.ShapeDtypeStruct((256, 64), "float32"), len(jax.devices())
      >>> budget = Budget(max_tokens=2**20, max_shapes=2, num_microbatches=M, row_multiple=8)
      >>> make = functools.partial(make_plan, [3, 4, 4, 9, 16] * 2**12)
      >>> chosen = choose_rows(
      ...     loss_fn, optax.sgd(0.1), make, budget=budget, params=params, target="here", max_bytes=1e6, progress=False
      ... )
      >>> [each.num_bytes <= 1e6 for each in chosen.rows], [each.limit for each in chosen.rows]
      ([True, True], ['memory', 'memory'])
    """
    target = Target.parse(target) if isinstance(target, str) else target
    if budget.memory is not None:
        raise UserError("the memory= of the budget is measured here: leave it out")
    if max_bytes is None and target.memory_bytes is not None:
        max_bytes = target.memory_bytes * (_SHARE_OF_GPU if target.devices[0].platform == "gpu" else 1)
    if max_bytes is None:
        raise UserError(f"the memory of target {target.name!r} is unknown: max_bytes is needed")
    target = dataclasses.replace(target, memory_bytes=int(max_bytes))
    longest = plan(dataclasses.replace(budget, max_sequences=1, max_shapes=1))
    if len(longest.buckets.shapes[0].lengths) > 1:
        raise UserError("rows are chosen by memory for samples of one length each; these have two")
    # Packed rows stay as long in every budget that is tried.
    budget = dataclasses.replace(budget, max_length=_buckets_of(longest)[-1].length)
    step = TargetStep(model, optimizer, target, None, extra, seed, batch_spec, options)
    compiler = step.compiler(longest, layout, params)
    bar = tqdm(desc=f"rows that fit on {target.name}", unit=" programs", disable=not progress)
    with without_compilation_cache(), bar:
        return _RowSearch(plan, target, compiler, batch_spec, budget, max_bytes, bar).choose(longest)


class _RowSearch:
    """Compiles programs until the most rows of every length are known."""

    def __init__(
        self,
        plan: _MakePlan,
        target: Target,
        compiler: StepCompiler,
        batch_spec: BatchSpec | None,
        budget: Budget,
        max_bytes: float,
        bar: tqdm,
    ):
        self._plan, self._target, self._compiler, self._batch_spec, self._bar = plan, target, compiler, batch_spec, bar
        self._max_bytes, self._memory = max_bytes, CompiledBytes(max_bytes)
        self._without_memory = budget
        self._budget = dataclasses.replace(budget, memory=self._memory, max_bytes=max_bytes)
        held = compiler.state_spec, () if compiler.halves is None else compiler.last_sums_spec
        self._state_bytes = sum(map(_bytes_on_device, jax.tree.leaves(held)))
        self._programs: dict[Bucket, TargetRow] = {}  # the fullest of each bucket
        self._rows: dict[Bucket, list[TargetRow]] = {}
        self._once: list[TargetRow] = []

    def choose(self, longest: Plan) -> RowChoice:
        """The choice, from a plan of single rows of the longest length."""
        self._compile_longest(longest)
        with_lengths = self._plan(self._budget)
        last = len(with_lengths.buckets.shapes) - 1
        self._bar.total = _MOST_PROGRAMS * (last + 1)
        self._bar.set_description(f"rows that fit on {self._target.name}, by at most {self._bar.total} programs")
        found = {k: self._seek(with_lengths, k) for k in [*reversed(range(last)), last]}
        buckets = [found[k][0] for k in range(last + 1)]
        num_programs = [len(self._compiled_rows(bucket.length)) for bucket in buckets]
        chosen = self._plan(Buckets(tuple(buckets), self._budget.num_microbatches))
        token_budget, token_plan = self._seek_max_tokens(chosen)
        rows = tuple(
            BucketRows(bucket, found[k][1], limit, self._programs[bucket].total_bytes, num_programs[k])
            for k, (bucket, limit) in enumerate(zip(buckets, chosen.limits(self._budget), strict=True))
        )
        programs = [row for bucket in largest_first(buckets) for row in self._rows[cast("Bucket", bucket)]]
        seconds = self._compiler.clock.seconds
        return RowChoice(
            plan=chosen,
            rows=rows,
            report=TargetReport([*programs, *self._once], self._target.name, str(layout_of(self._compiler)), *seconds),
            budget=self._budget,
            token_budget=token_budget,
            token_plan=token_plan,
            epoch_s=self._seconds(chosen),
            token_epoch_s=self._seconds(token_plan),
        )

    def _compile_longest(self, single: Plan) -> None:
        """Compiles a program of the longest length, which a plan of single rows has; and if need be one of one row."""
        length, held = _buckets_of(single)[-1].length, np.array([single.num_rows])
        _, [most] = steps_and_rows(self._without_memory, held, self._without_memory.row_caps(np.array([length])))
        rows = self._round_rows(_FIRST_TOKENS // length)
        while (rows := min(rows, int(most))) not in self._compiled_rows(length):
            self._compile(single, Bucket(rows, length))
            if self._budget.row_caps(np.array([length]))[0]:
                break
            rows = self._most_rows(length)

    def _seek(self, plan: Plan, k: int) -> tuple[Bucket, int]:
        """The bucket of the k-th length of a plan, and the most rows of it that fit."""
        length, held = _buckets_of(plan)[k].length, _rows_held(plan)[k]

        def rows_of(most: int) -> tuple[int, int]:
            """The steps, and the rows that they need."""
            steps, rows = steps_and_rows(self._budget, held, np.array(most))
            return int(steps), int(rows)

        while len(compiled := self._compiled_rows(length)) < _MOST_PROGRAMS or not self._fitting_rows(length):
            most = self._most_rows(length)
            is_near = self._memory(most, length) > (1 - NEAR) * self._max_bytes  # and may not fit
            if not self._fitting_rows(length) and len(compiled) >= _MOST_PROGRAMS - 1 and is_near:
                most = self._round_rows(min(most, *compiled) - self._budget.row_multiple)  # better too few than none
            steps, rows = rows_of(most)
            if rows in compiled:
                is_sure = steps <= 1 or limits_of_rows(self._budget, np.array([length])) != ["memory"]
                # More rows may take less than those between which bytes are interpolated: then more of them are tried.
                tried = [rows] if is_sure else [most, most + self._budget.row_multiple]
                rows = next((rows for rows in tried if rows not in compiled), rows)
            if rows in compiled:
                break
            self._compile(plan, Bucket(rows, length))
        fitting = self._fitting_rows(length)
        if not fitting:
            broken = broken_by_one_row(self._budget, length)
            raise NothingFitsError(f"{broken} leaves no row for a bucket of {length} tokens")
        rows = min(fitting, key=lambda rows: (rows_of(rows)[0], rows)) if held else max(fitting)
        return Bucket(rows, length), self._most_rows(length)

    def _seek_max_tokens(self, chosen: Plan) -> tuple[Budget, Plan]:
        """The largest budget of tokens with which every bucket fits, and its plan."""
        buckets = _buckets_of(chosen)
        longest, max_tokens = buckets[-1].length, self._most_tokens(buckets)
        while True:
            of_tokens = dataclasses.replace(self._without_memory, max_tokens=max_tokens)
            planned = self._plan(of_tokens)
            buckets = _buckets_of(planned)
            fullest = max(buckets, key=lambda bucket: self._memory(*bucket))
            if self._fits(fullest) and fullest not in self._programs:
                self._compile(planned, fullest)
            too_large = [bucket for bucket in buckets if not self._fits(bucket)]
            if not too_large or max_tokens <= longest:
                return of_tokens, planned
            max_tokens = max(longest, min(max_tokens - 1, self._most_tokens(too_large)))

    def _most_tokens(self, buckets: Sequence[Bucket]) -> int:
        """The largest budget of tokens with which buckets of these lengths have no more rows than fit."""
        length = np.array([bucket.length for bucket in buckets])
        most, multiple = self._budget.row_caps(length), self._budget.row_multiple
        within = (most + np.where(most < multiple, 1, multiple)) * length - 1
        is_memory = np.array(limits_of_rows(self._budget, length)) == "memory"
        return int(within[is_memory].min(initial=self._budget.max_tokens))

    def _seconds(self, plan: Plan) -> float | None:
        """Seconds of all steps of a plan: of its buckets' programs, or fitted to the others."""
        found = {bucket: seconds_of_runs(rows, {bucket: 1}, 0) for bucket, rows in self._rows.items()}
        known = {bucket: seconds for bucket, seconds in found.items() if seconds is not None}
        updates = seconds_of_runs(self._once, {}, plan.num_steps)
        if not known or updates is None:
            return None
        fit = fit_costs(known, max(known.values()))
        groups = cast("Mapping[Bucket, int]", plan.groups_of_buckets())
        return updates + sum(num * known.get(bucket, float(fit(*bucket))) for bucket, num in groups.items())

    def _compiled_rows(self, length: int) -> set[int]:
        """The rows of the programs of a length."""
        return {bucket.rows for bucket in self._programs if bucket.length == length}

    def _fitting_rows(self, length: int) -> set[int]:
        return {rows for rows in self._compiled_rows(length) if self._fits(Bucket(rows, length))}

    def _fits(self, bucket: Bucket) -> bool | None:
        """Whether a bucket fits, by its program or else by the fit."""
        if bucket in self._programs:
            return self._programs[bucket].fits
        return bool(self._memory(*bucket) <= self._max_bytes)

    def _most_rows(self, length: int) -> int:
        """The most rows of a length that fit by the fit, at least one."""
        most_tokens = _MOST_TIMES * max(bucket.padded_tokens for bucket in self._programs)
        most = int(self._budget.row_caps(np.array([length]))[0])
        return min(most, self._round_rows(most_tokens // length)) if most else 1

    def _round_rows(self, rows: int) -> int:
        return int(round_caps(self._budget, np.array(max(rows, 1))))

    def _compile(self, plan: Plan, bucket: Bucket) -> None:
        """Compiles the program of a bucket that is as long as one of the plan's."""
        self._bar.set_postfix_str(str(bucket))
        others = tuple(each if each.length != bucket.length else bucket for each in _buckets_of(plan))
        as_long = dataclasses.replace(plan, buckets=Buckets(others, plan.num_microbatches))
        layout = self._compiler.shapes.layout
        shapes = BatchShapes.of_plan(as_long, layout=layout, batch_spec=self._batch_spec)
        compiler = dataclasses.replace(self._compiler, shapes=shapes)
        self._rows[bucket] = compile_programs(compiler, compiler.passes(bucket), self._target)
        self._programs[bucket] = row = max(self._rows[bucket], key=lambda row: (not row.fits, row.total_bytes))
        if not self._once:
            self._once = compile_programs(compiler, compiler.once_a_step, self._target)
            if too_large := [each for each in self._once if each.fits is False]:
                most = f"{too_large[0].total_bytes:,} bytes a device, and {int(self._max_bytes):,} may be held"
                raise NothingFitsError(f"{too_large[0].of_what} of a step takes {most}")
        least = 0 if row.fits else int(self._max_bytes) + 1
        self._memory.add(bucket, max(row.total_bytes, least), self._state_bytes)
        self._bar.update()


def _buckets_of(plan: Plan) -> Sequence[Bucket]:
    """The buckets of a plan of rows of one length."""
    return cast("Sequence[Bucket]", plan.buckets.shapes)


def _rows_held(plan: Plan) -> Int64[np.ndarray, " K"]:
    """How many rows with samples each bucket holds."""
    offsets = plan.group_offsets
    if plan.row_offsets is not None:
        offsets = np.searchsorted(plan.row_offsets, offsets)
    return np.bincount(plan.group_bucket, np.diff(offsets), len(plan.buckets.shapes)).astype(np.int64)


def _bytes_on_device(spec: jax.ShapeDtypeStruct) -> int:
    shape = spec.shape if spec.sharding is None else spec.sharding.shard_shape(spec.shape)
    return math.prod(shape) * spec.dtype.itemsize
