"""The summary of a run."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from jvarlen._common import terminal
from jvarlen._common.files import read_object, save_dataclass
from jvarlen._common.terminal import text_table
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed import processes
from jvarlen.reports.run_page import plot_curves
from jvarlen.reports.run_records import read_metrics
from jvarlen.runs.directory import BAD_SAMPLES
from jvarlen.runs.loop import Trained
from jvarlen.runs.open_run import Run
from jvarlen.runs.prepare import say

__all__ = ["Summary", "summarize"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; `summary.json` holds the same.

    Attributes:
      held_out_before: the evaluation on held-out samples before the first step, in `evaluated_in`; None if none of
        their tokens has weight in the loss.
      held_out_after: the same after the last step; None also if the run was interrupted.
      evaluations: the same for every evaluation set, by name; empty if the run was interrupted.
      num_steps: steps done.
      num_tokens: tokens trained on, without padding.
      tokens_per_s: these over `train_s`, stalls left out.
      padding: share of padding in all tokens, padding included.
      num_shapes: buckets compiled for training.
      compile_s: wall-clock seconds in which something was compiled.
      compile_cpu_s: seconds of CPU time of this process meanwhile: of all compiling threads, and of steps that ran.
      num_cache_hits: executables that came from the persistent cache.
      train_s: seconds from the first step to the last; interruptions and evaluations are left out.
      stall_s: how many of these steps waited for the compiler, or for a checkpoint.
      data_wait: share of the others spent waiting for data.
      num_skipped: bad samples of all processes that were left out of steps, each as often as steps should have had it.
      num_skipped_evaluation: bad samples of all processes that were left out of evaluations, each counted once.
      num_skipped_records: records of the data files that are not samples, and were left out before planning.
      num_without_target: samples of process 0 that had no token with weight in the loss, as those that are cut before
        their first learned token; `num_sequences` counts them. 0, as unknown, if you give `collate`.
      num_steps_without_weight: steps in which no sample had one: they have no loss, and a gradient of 0.
      num_nonfinite_grads: steps whose gradient was not finite, which the optimizer rejected.
      compilations_after_first_step: programs compiled after the first step; 0, or the run would have stopped.
      interrupted: whether the run was stopped before its end.
      evaluated_in: the unit of evaluations: `"nats a token"`, or `"loss"` for your own loss.
    """

    held_out_before: float | None
    held_out_after: float | None
    evaluations: dict[str, float | None]
    num_steps: int
    num_tokens: int
    tokens_per_s: float
    padding: float
    num_shapes: int
    compile_s: float
    compile_cpu_s: float
    num_cache_hits: int
    train_s: float
    stall_s: float
    data_wait: float
    num_without_target: int
    num_steps_without_weight: int
    num_nonfinite_grads: int
    compilations_after_first_step: int
    interrupted: bool
    evaluated_in: Literal["nats a token", "loss"]
    num_skipped: int = 0
    num_skipped_evaluation: int = 0
    num_skipped_records: int = 0

    def __str__(self) -> str:
        shown = {name: value for name, value in vars(self).items() if name != "evaluations"}
        shown |= {f"after on {name}": loss for name, loss in self.evaluations.items() if name != HELD_OUT}
        return text_table([(name.replace("_", " "), _format_value(value)) for name, value in shown.items()])


def _format_value(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return (
            f"{value:,.0f}" if abs(value) >= 1000 else np.format_float_positional(value, 4, fractional=False, trim="-")
        )
    return f"{value:,}" if type(value) is int else str(value)


def summarize(run: Run, trained: Trained) -> Summary:
    """Prints and writes the summary."""
    prepared, run_dir, place, evaluations = run.prepared, run.run_dir, trained.place, trained.evaluations
    report = run.train_step.report.with_plan(prepared.training_plan.plan_of_epoch(0))
    step_s = max(place.train_s - place.stall_s, 1e-9)
    of_evaluation = run.eval_step.report
    summary = Summary(
        held_out_before=place.held_out_before,
        held_out_after=None if evaluations is None else evaluations[HELD_OUT],
        evaluations=evaluations or {},
        num_steps=place.num_steps_done,
        num_tokens=place.num_tokens_done,
        tokens_per_s=place.num_tokens_done / step_s,
        padding=1.0 - place.num_tokens_done / max(place.padded_tokens_done, 1),
        num_shapes=len({row.bucket for row in report} - {None}),
        compile_s=report.wall_s + of_evaluation.wall_s,
        compile_cpu_s=report.cpu_s + of_evaluation.cpu_s,
        num_cache_hits=report.num_cache_hits + of_evaluation.num_cache_hits,
        train_s=place.train_s,
        stall_s=place.stall_s,
        data_wait=place.data_wait_s / step_s,
        num_skipped=run.bad_samples.num_in_steps(),
        num_skipped_evaluation=run.bad_samples.num_in_evaluations(),
        num_skipped_records=run.bad_samples.num_in_files,
        num_without_target=place.num_without_target_done,
        num_steps_without_weight=place.num_steps_without_weight,
        num_nonfinite_grads=place.num_nonfinite_grads,
        compilations_after_first_step=trained.num_compilations,
        interrupted=evaluations is None,
        evaluated_in="nats a token" if prepared.task.is_language_model else "loss",
    )
    with processes.together("write the summary"):
        if processes.is_main_process():
            if evaluations is None:
                how = "jvarlen train --resume " if prepared.task.is_language_model else "fit with resume="
                say("Interrupted", f"{place.num_steps_done:,} steps are saved", f"{how}{run_dir}")
            plot_curves(read_metrics(run_dir / "metrics.jsonl"), run_dir / "curves.png")
            if report.times_used or not (run_dir / "compile_report.json").exists():
                report.save(run_dir / "compile_report.json")
            path = run_dir / "summary.json"  # last, when all is done; that of a run which had ended stays
            if report.times_used or not path.exists() or read_object(path).get("interrupted", True):
                save_dataclass(summary, path)
            say("Compile report", report.table())
            say("Summary", str(summary))
            if num_bad := summary.num_skipped + summary.num_skipped_evaluation + summary.num_skipped_records:
                say("Warning", f"{num_bad:,} bad samples were left out, and are listed in {run_dir / BAD_SAMPLES}")
            terminal.say(run_dir)
    return summary
