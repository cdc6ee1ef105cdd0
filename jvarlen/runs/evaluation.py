"""The evaluations of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Generator

from jvarlen._common.terminal import show_line
from jvarlen._common.types import Batch
from jvarlen.inference.evaluate import sum_metrics
from jvarlen.runs.open_run import Run
from jvarlen.runs.steps import Means, means_of
from jvarlen.training.checkpoint import Place
from jvarlen.training.train_state import TrainState

__all__ = ["Evaluator"]


@dataclasses.dataclass
class Evaluator:
    """Evaluates on every set of a run, once at a place."""

    run: Run
    _num_skipped: dict[str, int] = dataclasses.field(default_factory=dict)
    _latest: tuple[int, dict[str, float | None]] | None = None

    def evaluate(self, state: TrainState, place: Place) -> dict[str, float | None] | None:
        """The loss of each set: nats a token, or by the user's loss. Returns None if interrupted.

        The loss of a set in which nothing has weight is None.
        """
        if (known := self.losses_at(place)) is not None:
            return known
        means = self._take_steps(state)
        if means is None:
            return None
        in_nats = self.run.prepared.task.is_language_model
        losses = {name: mean.loss for name, mean in means.items()}
        lines = [f"evaluation after step {place.num_steps_done:,}"]
        for name, loss in losses.items():
            if loss is None:
                lines.append(f"{name} has no value: none of its tokens has weight in the loss")
            else:
                lines.append(f"{name} loss {loss:.3f} nats/token" if in_nats else f"{name} loss {loss:.4g}")
                lines += [f"{sum_name} {mean:.4g}" for sum_name, mean in means[name].sums.items()]
            figure = "nats_per_token" if in_nats else "mean_loss"  # readers recognize a user's loss by this
            record = {"step": place.num_steps_done, "time_s": place.train_s, "evaluation": name, figure: loss}
            if num_skipped := self._num_skipped[name]:
                lines.append(f"without {num_skipped:,} bad samples")
                record["num_skipped"] = num_skipped
            self.run.trackers.log(record | {"num_tokens": round(means[name].weight)} | means[name].sums)
        show_line(" · ".join(lines), progress=self.run.prepared.settings.progress)
        self._latest = place.num_steps_done, losses
        return losses

    def losses_at(self, place: Place) -> dict[str, float | None] | None:
        """The losses that `evaluate` found at this place, if it was there."""
        return self._latest[1] if self._latest is not None and self._latest[0] == place.num_steps_done else None

    def warm_up(self, state: TrainState) -> None:
        """Takes a step of each set, without a result: its first evaluation then compiles nothing."""
        self._take_steps(state, max_steps=1)

    def _take_steps(self, state: TrainState, max_steps: int | None = None) -> dict[str, Means] | None:
        """The means of each set over `max_steps` steps; None if it was interrupted."""
        run, means = self.run, {}
        state = run.step.for_evaluation(state)
        for name in run.prepared.training_plan.eval_plans:
            with contextlib.closing(self._batches(name, max_steps)) as batches:
                total = sum_metrics(run.eval_step, state, batches)
            if total is None:
                return None
            means[name] = means_of(total)
        return means

    def _batches(self, name: str, max_steps: int | None) -> Generator[Batch]:
        run = self.run
        with contextlib.closing(run.prepared.load_evaluation(name)) as batches:
            for batch in itertools.islice(batches, max_steps):
                run.bad_samples.log_evaluation(name, batches.skipped_in_batch)
                run.heartbeat.step()
                yield batch
            self._num_skipped[name] = batches.num_skipped
