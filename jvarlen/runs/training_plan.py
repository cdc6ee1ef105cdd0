"""The plans of all epochs of a training, with the learning rate of every step.

Letters: S steps of an epoch.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, cast

import numpy as np
import optax
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.terminal import text_table
from jvarlen._common.types import JsonObject
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.plan import Plan
from jvarlen.planning.ramps import BatchSizeStages, read_stages
from jvarlen.runs.config import OptimizerConfig
from jvarlen.runs.settings import RunSettings
from jvarlen.runs.shapes import ChosenShapes, epoch_plan, evaluation_plans, shapes_for
from jvarlen.training.averages import ema_of_params
from jvarlen.training.checkpoint import Place
from jvarlen.training.growing_batches import seesaw
from jvarlen.training.moments import adamw_by_batch_size
from jvarlen.training.optimizers import scale_by_batch_size, scale_by_rates
from jvarlen.training.rates import BaseSchedule, Rule, StepsOfRun, base_rates, before_each, lr_scale, step_sizes

__all__ = ["Rates", "TrainingPlan", "optimizer_of"]

_CACHED_EPOCHS = 3  # the one that trains, the one whose steps are loaded ahead, and the one that is planned ahead


class Rates(NamedTuple):
    """Learning rates of an epoch."""

    base: Float64[np.ndarray, " S"]  # of the schedule
    scale: Float64[np.ndarray, " S"]  # the factor for the batch size of each step
    in_force: Float64[np.ndarray, " S"]  # their product


def optimizer_of(
    settings: OptimizerConfig, base_batch_size: float, rates: Float64[np.ndarray, " S"]
) -> optax.GradientTransformation:
    """The optimizer of the settings, with these rates."""
    unit, adamw = settings.batch_size_unit, optax.adamw
    if settings.betas_by_batch_size:
        adamw = functools.partial(adamw_by_batch_size, base_batch_size=base_batch_size, unit=unit, rule=None)
    return optax.chain(
        optax.clip_by_global_norm(settings.max_gradient_norm),
        adamw(1.0, b1=settings.b1, b2=settings.b2, weight_decay=settings.weight_decay),
        scale_by_rates(rates),
        scale_by_batch_size(1, rule=_rule_of(settings), unit=unit),
        *([] if settings.ema_decay is None else [ema_of_params(settings.ema_decay)]),
    )


def _rule_of(settings: OptimizerConfig) -> Rule:
    return None if settings.batch_size_rule == "none" else settings.batch_size_rule


def _cosine(settings: OptimizerConfig, total: int) -> optax.Schedule:
    """The schedule of the settings, with a peak, over a total of steps, samples or tokens."""
    assert settings.learning_rate is not None
    lowest_rate = settings.learning_rate * settings.final_fraction
    return optax.warmup_cosine_decay_schedule(
        init_value=lowest_rate,
        peak_value=settings.learning_rate,
        warmup_steps=int(settings.warmup_fraction * total),
        decay_steps=total,
        end_value=lowest_rate,
    )


def _growing_batches(
    settings: RunSettings, shapes: ChosenShapes, lengths: Int64[np.ndarray, " N"]
) -> tuple[BatchSizeStages | None, BaseSchedule | None]:
    """The stages of the size of a step, if it grows; and the schedule of rates that goes with them, if it is Seesaw."""
    plan, optimizer, num_tokens = settings.plan, settings.config.optimizer, 0
    is_seesaw = optimizer.schedule == "seesaw"
    if is_seesaw or "%" in (plan.stages or ""):
        if settings.max_epochs == math.inf:
            what = "schedule seesaw decays over" if is_seesaw else f"{plan.stages} are shares of"
            raise UserError(f"{what} the tokens of num_epochs: give it")
        of_epoch = epoch_plan(plan, shapes, lengths, seed=settings.config.seed, epoch=0).num_tokens
        num_tokens = int(of_epoch.sum()) * int(settings.max_epochs)
    if is_seesaw:
        size = cast("int", plan.sequences_per_step if plan.tokens_per_step is None else plan.tokens_per_step)
        schedule = _cosine(optimizer, num_tokens)
        return seesaw(schedule, num_tokens, size, max_batch_size=optimizer.max_batch_size)
    return (None if plan.stages is None else read_stages(plan.stages, num_tokens)), None


class TrainingPlan:
    """All steps of a training. `plan_of_epoch` and `rates_of_epoch` give the plan and the rates of an epoch."""

    def __init__(
        self,
        settings: RunSettings,
        lengths: Int64[np.ndarray, " N"],
        eval_lengths: Mapping[str, Int64[np.ndarray, " H"]],
        optimizer: optax.GradientTransformation | None = None,
        shapes: ChosenShapes | None = None,
    ):
        self._seed = settings.config.seed
        chosen = shapes_for(settings.plan, lengths, seed=self._seed) if shapes is None else shapes
        self.stages, schedule = _growing_batches(settings, chosen, lengths)
        if schedule is not None and optimizer is not None:
            raise UserError("schedule seesaw decides rates, and there is an optimizer: give one of them")
        plan_settings = settings.plan.growing(self.stages)
        self.eval_plans = evaluation_plans(plan_settings, chosen, eval_lengths)
        used = {
            bucket: None for plan in self.eval_plans.values() for bucket, n in plan.groups_of_buckets().items() if n
        }
        self.eval_buckets = sorted(used, key=lambda bucket: bucket.lengths)

        @functools.lru_cache(maxsize=_CACHED_EPOCHS)
        def plan_of_epoch(epoch: int) -> Plan:
            return epoch_plan(plan_settings, chosen, lengths, seed=self._seed, epoch=epoch)

        self.plan_of_epoch = plan_of_epoch
        first = plan_of_epoch(0)
        self.buckets, self.rows_per_step = first.buckets.shapes, first.rows_per_step  # the most of all epochs
        self._has_many_groups = plan_settings.sizes_steps
        # The steps before each epoch that is begun, and those at its end. No shuffle changes how many samples a bucket
        # has, but rows that are packed again may be more or fewer, and steps of a given size have other groups.
        self.epoch_starts: Sequence[int]
        self._groups_of_epochs: list[dict[AnyBucket, int]] | None = None
        most_steps = settings.config.max_steps or math.inf
        most_epochs = settings.max_epochs
        order = plan_settings.order
        is_mixed = order.is_by("shuffle") or order.sample_blocks is not None
        if self.stages is not None or (is_mixed and (chosen.packing == "best_fit" or plan_settings.sizes_steps)):
            self.epoch_starts, self._groups_of_epochs = [0], []
            while self.epoch_starts[-1] < most_steps and len(self._groups_of_epochs) < most_epochs:
                plan = plan_of_epoch(len(self._groups_of_epochs))
                self._groups_of_epochs.append(plan.groups_of_buckets())
                self.rows_per_step = max(self.rows_per_step, plan.rows_per_step)
                self.epoch_starts.append(self.epoch_starts[-1] + plan.num_steps)
        else:
            num_epochs = int(min(most_epochs, -(-most_steps // first.num_steps)))
            self.epoch_starts = range(0, num_epochs * first.num_steps + 1, first.num_steps)
        self.num_epochs = len(self.epoch_starts) - 1  # begun, if not finished
        self.num_steps = int(min(most_steps, self.epoch_starts[-1]))

        windows = settings.config.windows
        self.windows = None if windows is None else windows.windows(self.num_steps)  # of attention
        self.rates_of_epoch: Callable[[int], Rates] | None = None
        if optimizer is None:
            config = settings.config
            self._schedule_rates(config.optimizer, config.base_batch_size, schedule)
        else:
            self.optimizer = optimizer

    def _schedule_rates(self, settings: OptimizerConfig, base_batch_size: float, schedule: BaseSchedule | None) -> None:
        """Sets the optimizer of the settings, and its rates; those of a schedule, if it is given."""
        plan_of_epoch = self.plan_of_epoch
        if settings.counted_in == "steps":
            counted = np.ones(self.num_steps, np.int64)
        else:  # how far training has come depends on all epochs before
            sizes = step_sizes(map(plan_of_epoch, range(self.num_epochs)))
            counted = sizes[settings.counted_in][: self.num_steps]
        if schedule is None:
            schedule = _cosine(settings, int(counted.sum()))
        rates_of_all_steps = base_rates(schedule, before_each(counted))
        rule = _rule_of(settings)
        # The base batch size is in the table too, and so in no program.
        self.optimizer = optimizer_of(
            settings, base_batch_size, rates_of_all_steps * lr_scale(1, base_batch_size, rule)
        )

        @functools.lru_cache(maxsize=_CACHED_EPOCHS)
        def rates_of_epoch(epoch: int) -> Rates:
            base = rates_of_all_steps[slice(*self.epoch_starts[epoch : epoch + 2])]  # training may end within the epoch
            sizes = step_sizes(plan_of_epoch(epoch))[settings.batch_size_unit][: len(base)]
            scale = lr_scale(sizes, base_batch_size, rule)
            return Rates(base, scale, base * scale)

        self.rates_of_epoch = rates_of_epoch

    def describe(self, *, tells_rates: bool = False) -> str:
        """How many steps training takes, and an epoch has. With rates, or where steps grow, tokens and rates too."""
        sizes = {self.steps_of_epoch(epoch) for epoch in range(self.num_epochs if self._groups_of_epochs else 1)}
        words = " to ".join(f"{size:,}" for size in sorted({min(sizes), max(sizes)}))
        described = f"training takes {self.num_steps:,} steps, an epoch has {words}"
        if self.rates_of_epoch is None or not (tells_rates or self.stages):
            return described if self.stages is None else f"{described}\nbatch sizes by tokens seen: {self.stages}"
        steps, rates = self.steps_of_run, self.steps_of_run.learning_rates
        described += (
            f"\n{steps.num_tokens.sum():,} tokens; learning rate {rates[0]:.3g} in the first step, {rates[-1]:.3g} in "
            f"the last, {rates.max():.3g} at most"
        )
        if self.stages is None:
            return described
        starts, batch_sizes = zip(*self.stages.stages, strict=True)
        edges = [*np.searchsorted(before_each(steps.num_tokens), starts).tolist(), self.num_steps]
        rows = [["from token", "from step", "batch size", "learning rate"]]
        for start, size, first, last in zip(starts, batch_sizes, edges, edges[1:], strict=False):
            if first < last:
                of_stage = rates[first:last]
                rows.append([f"{start:,}", f"{first:,}", f"{size:,}", f"{of_stage.min():.3g} to {of_stage.max():.3g}"])
        return f"{described}\n{text_table(rows, align='>')}"

    @functools.cached_property
    def steps_of_run(self) -> StepsOfRun:
        """The size and the rate of every step of the whole training; for an optimizer of the settings."""
        assert self.rates_of_epoch is not None
        sizes = step_sizes(map(self.plan_of_epoch, range(self.num_epochs)))
        rates = [self.rates_of_epoch(epoch).in_force for epoch in range(self.num_epochs)]
        of_run = slice(self.num_steps)
        return StepsOfRun(sizes["sequences"][of_run], sizes["tokens"][of_run], np.concatenate(rates))

    def steps_of_epoch(self, epoch: int) -> int:
        """How many steps an epoch has."""
        return self.epoch_starts[epoch + 1] - self.epoch_starts[epoch]

    def first_place(self) -> Place:
        """The place before the first step."""
        return Place(num_steps_done=0, epoch=0, step=0, plan_digest=self.plan_of_epoch(0).digest, seed=self._seed)

    def next_place(self, place: Place) -> Place:
        """The place after the step at `place`; after the last step the end of its epoch."""
        plan = self.plan_of_epoch(place.epoch)
        place = dataclasses.replace(
            place,
            num_steps_done=place.num_steps_done + 1,
            step=place.step + 1,
            num_tokens_done=place.num_tokens_done + int(plan.num_tokens[place.step]),
            padded_tokens_done=place.padded_tokens_done + int(plan.padded_tokens_per_step[place.step]),
        )
        return self._within_epoch(place)

    def resumed_place(self, place: Place) -> Place:
        """Where training goes on from a checkpoint; ValueError for one of another plan, or beyond the end."""
        planned = self.plan_of_epoch(place.epoch).digest
        if place.plan_digest != planned:
            raise UserError(f"the checkpoint belongs to plan {place.plan_digest}, epoch {place.epoch} is {planned}")
        if place.seed != self._seed:
            raise UserError(f"the checkpoint is of seed {place.seed}, training is of seed {self._seed}")
        if place.num_steps_done > self.num_steps:
            raise UserError(f"the checkpoint is at step {place.num_steps_done}, training takes {self.num_steps}")
        here = self.epoch_starts[min(place.epoch, self.num_epochs)] + place.step
        if place.num_steps_done != here:  # shares of another num_epochs
            raise UserError(
                f"the checkpoint is at step {place.num_steps_done}, which is step {here} by these settings: sizes of "
                "steps that grow depend on num_epochs, so leave it as it was"
            )
        return self._within_epoch(place)

    def _within_epoch(self, place: Place) -> Place:
        """The beginning of the next epoch, if there is one, in place of the end of an epoch."""
        if place.num_steps_done == self.num_steps or place.step < self.steps_of_epoch(place.epoch):
            return place
        epoch = place.epoch + 1
        return dataclasses.replace(place, epoch=epoch, step=0, plan_digest=self.plan_of_epoch(epoch).digest)

    def groups_at(self, place: Place) -> dict[AnyBucket, int]:
        """The buckets of the step at `place`, and how many groups it has of each."""
        plan = self.plan_of_epoch(place.epoch)
        return dict(collections.Counter(plan.buckets.shapes[plan.group_bucket[i]] for i in plan.groups(place.step)))

    def groups_left(self, place: Place) -> dict[AnyBucket, int]:
        """How many groups each bucket has from `place` on, if any, in the order in which buckets first come."""
        last_epoch = bisect.bisect_right(self.epoch_starts, self.num_steps) - 1
        steps_of_last = self.num_steps - self.epoch_starts[last_epoch]
        current = self.plan_of_epoch(place.epoch)
        every, done = current.groups_of_buckets(), current.groups_of_buckets(0, place.step)
        # The order decides which steps are taken in an epoch within which training ends.
        last = self.plan_of_epoch(last_epoch).groups_of_buckets(0, steps_of_last) if steps_of_last else {}
        num_whole = last_epoch - place.epoch
        left = {bucket: num_whole * every[bucket] + last.get(bucket, 0) - done[bucket] for bucket in self.buckets}
        for of_epoch in (self._groups_of_epochs or [])[place.epoch + 1 : last_epoch]:  # those that differ
            left = {bucket: number + of_epoch[bucket] - every[bucket] for bucket, number in left.items()}
        num_buckets = sum(number > 0 for number in left.values())
        ordered: dict[AnyBucket, int] = {}
        for epoch in range(place.epoch, self.num_epochs):
            if len(ordered) == num_buckets:
                break
            plan = self.plan_of_epoch(epoch)
            first = place.step if epoch == place.epoch else 0
            last_step = min(self.num_steps - self.epoch_starts[epoch], plan.num_steps)
            groups = plan.group_bucket[plan.step_groups[first] : plan.step_groups[last_step]]
            used, first_use = np.unique(groups, return_index=True)
            ordered |= {plan.buckets.shapes[k]: left[plan.buckets.shapes[k]] for k in used[np.argsort(first_use)]}
        return ordered

    def record(self, place: Place) -> JsonObject:
        """The plan's figures of the step at `place`, for the log."""
        plan, groups = self.plan_of_epoch(place.epoch), self.groups_at(place)
        num_tokens, padded_tokens = int(plan.num_tokens[place.step]), int(plan.padded_tokens_per_step[place.step])
        record: JsonObject = {
            "step": place.num_steps_done,
            "epoch": place.epoch,
            "num_sequences": int(plan.num_sequences[place.step]),
            "num_tokens": num_tokens,
            "padded_tokens": padded_tokens,
            "padding": 1.0 - num_tokens / padded_tokens,
        }
        if self._has_many_groups:
            record["num_groups"] = sum(groups.values())
            record["groups"] = [_sizes_of(bucket) | {"num_groups": number} for bucket, number in groups.items()]
        else:
            [bucket] = groups
            record |= {f"bucket_{name}": size for name, size in _sizes_of(bucket).items()}
        if self.windows is not None:
            record["attention_window"] = int(self.windows[place.num_steps_done])
        if self.rates_of_epoch is not None:
            rates = self.rates_of_epoch(place.epoch)
            record |= {
                "base_learning_rate": float(rates.base[place.step]),
                "learning_rate_scale": float(rates.scale[place.step]),
                "learning_rate": float(rates.in_force[place.step]),
            }
        return record


def _sizes_of(bucket: AnyBucket) -> dict[str, int]:
    """The sizes of a bucket by the names that they have in records."""
    return dict(zip(("rows", "length", "target_length"), bucket, strict=False))
