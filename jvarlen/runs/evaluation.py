"""Evaluates the parameters of a run on every set of samples, and tells the log."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jvarlen._common.progress import show_line
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.distributed.processes import Heartbeat, is_interrupted_at
from jvarlen.runs.bad_samples import BadSamples
from jvarlen.runs.prepare import Prepared
from jvarlen.runs.trackers import Trackers
from jvarlen.training.checkpoint import Place
from jvarlen.training.train_state import Metrics, MetricSums, TrainState

__all__ = ["Evaluator", "Means", "means_of"]


class Means(NamedTuple):
    """The loss and the scalar sums of some steps over Σ weight."""

    loss: float | None  # in nats for a language model; None, like all sums, if nothing has weight
    weight: float  # Σ weight; for a language model the tokens that are learned, those of cut samples as cut
    sums: dict[str, float | None]


def means_of(total: Metrics) -> Means:
    """The means of sums, as `MetricSums` gives them."""
    scalars = {name: value for name, value in sorted(total.sums.items()) if np.ndim(value) == 0}
    weight = float(total.weight_sum)
    if not weight:
        return Means(None, weight, dict.fromkeys(scalars))
    return Means(float(total.loss), weight, {name: float(value) / weight for name, value in scalars.items()})


@dataclasses.dataclass
class Evaluator:
    """Evaluates on every set of a run, once at a place."""

    prepared: Prepared
    eval_step: CompiledBuckets
    trackers: Trackers
    bad_samples: BadSamples
    heartbeat: Heartbeat
    for_evaluation: Callable[[TrainState], TrainState]
    _num_skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    _latest: tuple[int, dict[str, float | None]] | None = None

    def evaluate(self, state: TrainState, place: Place) -> dict[str, float | None] | None:
        """The loss of each set: nats a token, or the user's own. None: it was interrupted.

        The loss of a set in which nothing has weight is None.
        """
        if self._latest is not None and self._latest[0] == place.num_steps_done:
            return self._latest[1]
        means = self._take_steps(state)
        if means is None:
            return None
        in_nats = self.prepared.task.is_language_model
        losses = {name: mean.loss for name, mean in means.items()}
        told = [f"evaluation after step {place.num_steps_done:,}"]
        for name, loss in losses.items():
            if loss is None:
                told.append(f"{name} has no value: none of its tokens has weight in the loss")
            else:
                told.append(f"{name} loss {loss:.3f} nats/token" if in_nats else f"{name} loss {loss:.4g}")
                told += [f"{of_sum} {mean:.4g}" for of_sum, mean in means[name].sums.items()]
            figure = "nats_per_token" if in_nats else "mean_loss"  # by which readers tell a loss of the user's own
            record = {"step": place.num_steps_done, "time_s": place.train_s, "evaluation": name, figure: loss}
            if num_skipped := self._num_skipped[name]:
                told.append(f"without {num_skipped:,} bad samples")
                record["num_skipped"] = num_skipped
            self.trackers.log(record | {"num_tokens": round(means[name].weight)} | means[name].sums)
        show_line(" · ".join(told), progress=self.prepared.config.progress)
        self._latest = place.num_steps_done, losses
        return losses

    def warm_up(self, state: TrainState) -> None:
        """Takes a step of each set, without a result: its first evaluation then compiles nothing."""
        self._take_steps(state, max_steps=1)

    def _take_steps(self, state: TrainState, max_steps: int | None = None) -> dict[str, Means] | None:
        """The means of each set over so many steps; None if it was interrupted."""
        state = self.for_evaluation(state)
        means: dict[str, Means] = {}
        num_steps = itertools.count()
        for name, plan in self.prepared.training_plan.eval_plans.items():
            dataset, lengths = self.prepared.data.evaluation[name], self.prepared.eval_lengths[name]
            sums = MetricSums()
            with contextlib.closing(self.prepared.load(plan, dataset, lengths)) as batches:
                for batch in itertools.islice(batches, max_steps):
                    self.bad_samples.log_evaluation(name, batches.skipped_in_batch)
                    self.heartbeat.step()
                    if is_interrupted_at(next(num_steps)):
                        return None
                    sums.add(self.eval_step(state, batch)[1])
                self._num_skipped[name] = batches.num_skipped
            means[name] = means_of(sums.total)
        return means
