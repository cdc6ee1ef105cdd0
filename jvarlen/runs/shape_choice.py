"""Chooses the shapes of a run: padded or packed, and how many, where its settings leave that open."""

from __future__ import annotations

import ast
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Int64

from jvarlen._common.files import load_dataclass
from jvarlen.attention.attention import WHOLE_BELOW
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.auto_shapes import (
    MOST_SHAPES,
    Compiler,
    RunCosts,
    choose_shapes,
    costs_from_report,
    estimate_costs,
    load_costs,
    model_key,
    save_costs,
)
from jvarlen.compiling.lowering import make_step_compiler
from jvarlen.compiling.report import CompileReport
from jvarlen.distributed.processes import gather_texts, is_main_process, together
from jvarlen.loading.collate import is_own
from jvarlen.planning.buckets import Bucket, make_buckets
from jvarlen.planning.cost_model import MOST_ERROR, CostModel, beyond_measured
from jvarlen.planning.plan import Plan, make_plan
from jvarlen.planning.steps import cost_of_plan
from jvarlen.runs.config import FitConfig, is_run_dir
from jvarlen.runs.model import optimizer_for
from jvarlen.runs.plan_config import SHAPES_FILE, ChosenShapes, PlanConfig, shapes_for
from jvarlen.runs.task import Task, TrainingData, whole_loss

__all__ = ["SLOWDOWN_ON_CPU", "ShapeChooser"]

SLOWDOWN_ON_CPU = 0.8  # a program is compiled by more than one thread, which take cores from the steps
_EVALUATION_SHARE = 1 / 3  # of the seconds of a training step, and of compiling it: no backward pass, no update


class ShapeChooser:
    """Chooses the shapes of a run on so many devices, and remembers afterwards what they cost."""

    def __init__(self, config: FitConfig, task: Task, data: TrainingData, num_devices: int = 1):
        self._config = config
        self._task = task
        self._data = data
        self._num_devices = num_devices
        self._costs: RunCosts | None = None

    def choose(
        self, lengths: Int64[np.ndarray, " N"], eval_lengths: Mapping[str, Int64[np.ndarray, " H"]]
    ) -> ChosenShapes:
        """The shapes for the lengths of the samples; the same on all processes, those of process 0."""
        plan, run_dir = self._config.plan, self._config.directory.resumed
        method, _ = plan.packing_in_force
        is_said = bool(plan.buckets or plan.row_lengths) or plan.strategy != "optimal" or method == "wrapped"
        if is_said or lengths.ndim == 2 or (method != "auto" and plan.max_shapes != "auto"):
            if plan.max_shapes == "auto" and lengths.ndim == 1:
                plan = dataclasses.replace(plan, max_shapes=PlanConfig.max_shapes)
            with together("plan the training"):
                return shapes_for(plan, lengths, seed=self._config.seed)
        if run_dir is not None and is_run_dir(run_dir):
            return load_dataclass(ChosenShapes, run_dir / SHAPES_FILE, "chosen shapes")
        if self._config.target is not None:  # of whose seconds nothing is known here
            return shapes_for(plan, lengths, seed=self._config.seed)
        with together("choose the shapes"):
            self._costs = self._known_costs(lengths)
            # What the settings give is not remembered.
            given: dict[str, Any] = {"seconds": plan.cost, "compile_seconds": plan.compile_seconds}
            given = {name: value for name, value in given.items() if value is not None}
            chosen = self._choose(dataclasses.replace(self._costs, **given), lengths, eval_lengths)
        shared = gather_texts("the chosen shapes", repr(dataclasses.asdict(chosen)))[0]
        return ChosenShapes(**ast.literal_eval(shared))

    def remember(self, report: CompileReport, plan: Plan, lengths: Int64[np.ndarray, " N"]) -> None:
        """Writes what the run measured beside the compiled programs, if it chose its shapes and keeps programs."""
        if self._costs is None or self._cache_dir is None or not is_main_process():
            return
        pairs = None
        if plan.is_packed:
            rows, row_lengths = np.array(plan.buckets).T
            of_pairs = cost_of_plan(plan, CostModel(0.0, 0.0, 1.0), lengths)
            assert of_pairs is not None
            counted = np.where(row_lengths < _whole_below(), rows * row_lengths**2, of_pairs(rows, row_lengths))
            pairs = dict(zip(map(tuple, plan.buckets), counted.tolist(), strict=True))
        program = self._program(is_packed=plan.is_packed)
        measured = costs_from_report(report, self._config.plan.num_microbatches, self._costs, program, pairs)
        save_costs(measured, self._cache_dir)

    @property
    def _cache_dir(self) -> Path | None:
        """The directory of compiled programs; None if they are not kept."""
        settings: Any = jax.config
        return self._config.compile.cache_dir if settings.jax_enable_compilation_cache else None

    def _known_costs(self, lengths: Int64[np.ndarray, " N"]) -> RunCosts:
        """What earlier runs measured, or an estimate from a step with a usual optimizer in two shapes."""
        plan, task = self._config.plan, self._task
        buckets, batch_spec = self._probe(lengths)
        step = task.train_step(task.optimizer or optimizer_for(task.shapes, optax.adamw(1e-3)))
        state = dataclasses.replace(task, params=task.shapes).init_state(step, self._config.seed)
        of_batches = BatchShapes(buckets, microbatches_per_step=plan.num_microbatches, batch_spec=batch_spec)
        step_compiler = make_step_compiler(step, state, of_batches, self._config.compile)
        model = model_key(step_compiler.state_spec, whole_loss(task.loss_fn), plan.num_microbatches, self._num_devices)
        known = None if self._cache_dir is None else load_costs(self._cache_dir, step_compiler.device_text, model)
        return known or estimate_costs(step_compiler, buckets, model, self._num_devices)

    def _probe(self, lengths: Int64[np.ndarray, " N"]) -> tuple[tuple[Bucket, ...], BatchSpec]:
        """Two shapes of which the operations can be counted, and the batches of them."""
        plan, task = self._config.plan, self._task
        of_plan: dict[str, Any] = {"microbatches_per_step": plan.num_microbatches, "order": "length"}
        longest = min(int(lengths.max()), plan.longest)
        if task.collate is not None and not is_own(task.collate) and task.batch_spec is None:  # which takes samples
            limits = dataclasses.replace(plan.budget, strategy="quantile", max_shapes=2, max_length=longest)
            of_plan["overlong"] = plan.padded_overlong
            made = make_plan(lengths, make_buckets(lengths, limits, overlong=plan.padded_overlong), **of_plan)
        else:
            # Rows that attention computes as a whole: of what it skips by the data, nothing could be counted.
            multiple = plan.length_multiple
            most = max(1, min(-(-longest // multiple), (WHOLE_BELOW - 1) // multiple))
            sizes = sorted({max(1, most // part) * multiple for part in (1, 2)})
            shapes = [Bucket(max(1, plan.max_tokens // size), size) for size in sizes]
            made = make_plan(sizes, shapes, **of_plan)
        buckets = tuple(Bucket(*bucket) for bucket in made.buckets)
        return buckets, task.batch_spec_for({"": made}, {"": self._data.train})

    def _choose(
        self, costs: RunCosts, lengths: Int64[np.ndarray, " N"], eval_lengths: Mapping[str, Int64[np.ndarray, " H"]]
    ) -> ChosenShapes:
        config, plan = self._config, self._config.plan
        method, _ = plan.packing_in_force
        # Nobody is warned of what earlier runs measured in far smaller shapes: the reason tells of it.
        seconds = costs.seconds if plan.cost is not None else dataclasses.replace(costs.seconds, measured=())
        budget = dataclasses.replace(plan.budget, cost=seconds, compile_seconds=None)
        choice = choose_shapes(
            lengths,
            budget,
            self._compiler(costs.compile_seconds),
            num_epochs=config.num_epochs,
            num_steps=config.max_steps,
            compiled=costs.compiled.get(self._program(is_packed=False), ()),
            can_space=plan.can_space,
            most_shapes=MOST_SHAPES if plan.max_shapes == "auto" else plan.max_shapes,
            max_length=plan.longest,
            overlong=plan.padded_overlong,
            pad=method != "best_fit",
            pack=None if method is None else plan.packed_buckets(lengths, config.seed),
            compiled_packed=costs.compiled.get(self._program(is_packed=True), ()),
            whole_below=_whole_below(),
        )
        known = "as given" if plan.compile_seconds is not None else "estimated" if costs.is_estimate else "measured"
        if beyond_measured(costs.seconds, choice.buckets):
            known += " in far smaller shapes"
        if costs.seconds.largest_error > MOST_ERROR:
            known += f"; the cost model is off by up to {costs.seconds.largest_error:.0%}"
        spaced = f", the next after {choice.new_shape_every:,} steps each" if choice.new_shape_every else ""
        others = "".join(f"; {other} would take {other.seconds:,.0f} s" for other in choice.others)
        reason = (
            f"{choice}{spaced}: compiling and training are expected to take {choice.seconds:,.0f} s "
            f"({costs.compile_seconds:.1f} s a shape, {known}){others}"
        )
        shapes = ChosenShapes(
            buckets=tuple((rows, length) for rows, length in choice.buckets),
            new_shape_every=plan.new_shape_every or choice.new_shape_every,
            packing="best_fit" if choice.is_packed else None,
            reason=reason,
        )
        if choice.is_packed:
            return shapes
        # Every evaluation waits for its shapes, so these are some of the longer ones of training.
        bucket_lengths = np.array([bucket.length for bucket in choice.buckets])
        held_out = np.concatenate(list(eval_lengths.values()))
        rounded = bucket_lengths[np.minimum(np.searchsorted(bucket_lengths, held_out), len(bucket_lengths) - 1)]
        num_evaluations = 2
        if config.eval_every is not None:
            num_evaluations += choice.num_steps // config.eval_every
        eval_buckets = make_buckets(
            rounded,
            dataclasses.replace(budget, compile_seconds=costs.compile_seconds / num_evaluations),
            max_shapes=len(bucket_lengths),
        )
        to_evaluate = {*(bucket.length for bucket in eval_buckets[:-1]), int(bucket_lengths[-1])}
        return dataclasses.replace(shapes, eval_lengths=tuple(sorted(to_evaluate)))

    def _compiler(self, seconds: float) -> Compiler:
        """When programs are compiled, which take so many seconds each."""
        cores = os.cpu_count() or 1
        options = self._config.compile
        threads = options.num_threads or (max(1, cores // 2) if options.in_background else cores)
        shares_cores = jax.default_backend() == "cpu" and options.in_background
        seconds *= 1 + _EVALUATION_SHARE / 2  # about half of the shapes evaluate as well
        return Compiler(seconds, threads, SLOWDOWN_ON_CPU if shares_cores else 0.0, options.in_background)

    def _program(self, *, is_packed: bool) -> str:
        """What tells the programs of this run from those of others of the model."""
        config, own = self._config, self._config.optimizer  # whose rates are data
        optimizer = own.b1, own.b2, own.weight_decay, own.max_gradient_norm, own.batch_size_rule, own.batch_size_unit
        where = config.hardware.devices, config.hardware.parallel
        # Arrays of packed rows are as wide as the data have samples in a row.
        packed = [config.plan.max_samples_per_row, *sorted(self._data.content_keys.items())] if is_packed else []
        return model_key(None, None, optimizer, where, config.compile.xla_options, jax.__version__, *packed)


def _whole_below() -> int:
    """The tokens of a row below which attention computes all its pairs, whatever samples share it."""
    return WHOLE_BELOW if jax.default_backend() == "cpu" else 0
