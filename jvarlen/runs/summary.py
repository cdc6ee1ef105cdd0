"""The figures of an evaluation and of a whole run, and the files written at its end."""

from __future__ import annotations

import dataclasses
import json
import math
import signal
from pathlib import Path
from typing import Literal, NamedTuple

from jvarlen._common.files import write_atomically
from jvarlen._common.interrupts import interrupt_signal
from jvarlen._common.text_table import text_table
from jvarlen.compiling.report import CompileReport
from jvarlen.data.split import HELD_OUT
from jvarlen.reports.run_page import plot_curves
from jvarlen.reports.run_records import read_metrics

__all__ = ["EvaluatedIn", "Evaluation", "Summary", "write_summary"]

EvaluatedIn = Literal["bits per byte", "bits per token", "loss"]


class Evaluation(NamedTuple):
    """The result of evaluating one set of samples.

    Attributes:
      loss: Σ loss / Σ weight, in nats for a language model; 0 if nothing has weight.
      weight: Σ weight; for a language model the tokens that are learned, truncated samples with their cut length.
      sums: further scalar sums of the loss, over Σ weight.
    """

    loss: float
    weight: float
    sums: dict[str, float]

    @property
    def bits_per_token(self) -> float:
        """The loss in bits per token; tokens are bytes if the model trains on bytes."""
        return self.loss / math.log(2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
    """The result of a run; `summary.json` holds the same.

    Attributes:
      held_out_before: the evaluation on held-out samples before the first step, in `evaluated_in`.
      held_out_after: the same after the last step; None if the run was interrupted.
      evaluations: the same for every evaluation set, by name; empty if the run was interrupted.
      num_steps: steps done.
      num_tokens: real tokens trained on.
      real_tokens_per_s: real tokens over `train_s`.
      padding: share of the trained positions that held no token.
      num_shapes: buckets compiled for training.
      compile_s: seconds until everything was compiled, for training and evaluation; where steps ran meanwhile, the sum
        of the seconds of all programs.
      stall_s: seconds that steps and evaluations waited for the compiler; all of `compile_s` if everything was compiled
        before the first step.
      num_cache_hits: executables that came from the persistent cache.
      train_s: seconds from the first step to the last; interruptions and evaluations are left out.
      data_wait: share of these spent waiting for data.
      num_adjusted: samples that were cut or left shorter because they do not have the planned length; of process 0 if
        there are several.
      compilations_after_first_step: programs compiled after the first step; 0, or the run would have stopped.
      interrupted: whether the run was stopped before its end.
      evaluated_in: the unit of evaluations: `"bits per byte"` if tokens are the bytes of text, `"bits per token"` for
        other tokens, `"loss"` for a loss of your own.
    """

    held_out_before: float
    held_out_after: float | None
    evaluations: dict[str, float]
    num_steps: int
    num_tokens: int
    real_tokens_per_s: float
    padding: float
    num_shapes: int
    compile_s: float
    num_cache_hits: int
    train_s: float
    data_wait: float
    num_adjusted: int
    compilations_after_first_step: int
    interrupted: bool
    stall_s: float = 0.0
    evaluated_in: EvaluatedIn = "bits per byte"

    @property
    def held_out_bits_per_byte_before(self) -> float | None:
        """`held_out_before` if it is in bits per byte, otherwise None."""
        return self.held_out_before if self.evaluated_in == "bits per byte" else None

    @property
    def held_out_bits_per_byte_after(self) -> float | None:
        """`held_out_after` if it is in bits per byte, otherwise None."""
        return self.held_out_after if self.evaluated_in == "bits per byte" else None

    def __str__(self) -> str:
        after = self.held_out_after
        lines = {
            f"held-out {self.evaluated_in} before": f"{self.held_out_before:.3f}",
            f"held-out {self.evaluated_in} after": "– (interrupted)" if after is None else f"{after:.3f}",
            **{
                f"{self.evaluated_in} on {name}": f"{bits:.3f}"
                for name, bits in self.evaluations.items()
                if name != HELD_OUT
            },
            "steps": f"{self.num_steps:,}",
            "real tokens": f"{self.num_tokens:,}",
            "real tokens per second": f"{self.real_tokens_per_s:,.0f}",
            "padding": f"{self.padding:.2%}",
            "shapes": f"{self.num_shapes}",
            "compile seconds": f"{self.compile_s:.1f} ({self.num_cache_hits} programs from the cache), "
            f"{self.stall_s:.1f} waited for",
            "train seconds": f"{self.train_s:.1f} ({self.data_wait:.2%} waiting for data)",
            **({"samples adjusted": f"{self.num_adjusted:,}"} if self.num_adjusted else {}),
            "compilations after the first step": f"{self.compilations_after_first_step}",
        }
        return text_table(list(lines.items()), align="<", least_widths=(34,), gap=" ")


def write_summary(run_dir: Path, summary: Summary, report: CompileReport) -> None:
    """Writes `summary.json`, `curves.png`, and, if the run took steps, `compile_report.json`.

    After SIGTERM no curves are drawn: time may be short, and such a run is mostly resumed.
    """
    with write_atomically(run_dir / "summary.json") as file:
        file.write((json.dumps(dataclasses.asdict(summary), indent=2) + "\n").encode())
    if interrupt_signal() != signal.SIGTERM:
        plot_curves(read_metrics(run_dir / "metrics.jsonl"), run_dir / "curves.png")
    if report.times_used or not (run_dir / "compile_report.json").exists():
        report.save(run_dir / "compile_report.json")
