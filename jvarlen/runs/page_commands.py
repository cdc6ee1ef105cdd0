"""`jvarlen plan` and `jvarlen report`: tables and pages of the plan of any file of lengths, and of runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from jaxtyping import Float64, Int64

from jvarlen._common.checks import UserError
from jvarlen._common.files import check_place, load_array
from jvarlen.planning.lengths import PackedOverlong, check_lengths
from jvarlen.planning.order import OrderWord
from jvarlen.planning.plan import Plan
from jvarlen.reports.compare import StrategyFigures, compare_strategies, comparison_table
from jvarlen.reports.run_page import read_runs
from jvarlen.runs.plan_config import BatchSizeRule, PlanConfig, epoch_plan, shapes_for
from jvarlen.training.rates import lr_sequence

if TYPE_CHECKING:
    from jvarlen.targets.cluster import Cluster
    from jvarlen.targets.model_file import ModelFile

__all__ = ["PlanCommand", "ReportCommand"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(PlanConfig):
    """Print the plan of an epoch for any file of lengths, and save it."""

    lengths: tyro.conf.Positional[Path]
    """A .npy file of integers, tokens a sample."""
    max_tokens: int = dataclasses.field()
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int = 16
    """The most buckets, that is, compiled shapes."""
    max_length: int | None = None
    """Longest bucket in tokens; None for the longest sample."""
    overlong: PackedOverlong = "error"
    """What happens to samples longer than that; split, which needs pack, plans them in pieces."""
    length_multiple: int = 1
    """Lengths of buckets are rounded up to a multiple of this."""
    order: OrderWord = "length"
    """The order in which samples come."""
    seed: int = 0
    """Seed of every shuffle, together with the epoch."""
    epoch: int = 0
    """The epoch to plan."""
    learning_rate: float | None = None
    """Base learning rate at base_batch_size. If given, the learning rates of the steps are shown."""
    base_batch_size: float | None = None
    """Sequences in a step for which the base rate is meant."""
    batch_size_rule: BatchSizeRule = "sqrt"
    """How the learning rate scales with the sequences of a step."""
    out: Path | None = None
    """Where to save the plan, a .npz file."""
    compare: bool = False
    """Also print a table of all strategies, packing, and batching without a plan."""
    html: Path | None = None
    """Where to write a page with pictures of the plan: one file that works offline.
    With cluster, the page shows layouts instead of the plan."""
    cluster: str | None = None
    """Devices to choose a layout for: a file of `jvarlen measure --links`, or a known machine such as dgx-h100:4 for
    four hosts. Needs model."""
    model: Path | None = None
    """JSON file of the model: layers, width, heads, vocabulary, params_dtype, compute_dtype, optimizer."""

    def run(self) -> None:
        """Prints the plan, the comparison and the layouts, and writes the requested files."""
        if (self.cluster is None) != (self.model is None):
            raise UserError("cluster and model go together: layouts are chosen for a model on a cluster")
        if self.compare and self.cluster is not None and self.html is not None:
            raise UserError("compare, cluster and html exclude each other: the page shows layouts, and no comparison")
        for path in (self.html, self.out):
            if path is not None:
                check_place(path)
        described = None if self.cluster is None or self.model is None else _read_description(self.cluster, self.model)
        lengths = check_lengths(load_array(self.lengths, "lengths"))
        shapes = shapes_for(self, lengths)
        plan = epoch_plan(self, shapes, lengths, seed=self.seed, epoch=self.epoch)
        rates = self._learning_rates(plan)
        print(plan.report(rates, cost=self.cost, compile_seconds=self.compile_seconds))
        print(f"digest {plan.digest}")
        comparison = self._compare(lengths) if self.compare else None
        if comparison is not None:
            print(f"\n{comparison_table(comparison)}")
        if self.out is not None:
            plan.save(self.out)
            print(self.out)
        if described is not None:
            self._choose_layout(plan, *described)
        elif self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, learning_rates=rates, cost=self.cost, comparison=comparison)
            print(self.html)

    def _choose_layout(self, plan: Plan, cluster: Cluster, model: ModelFile) -> None:
        from jvarlen.batches.batches import packed_batch_spec, token_batch_spec  # here: they import JAX
        from jvarlen.targets.choice import choose_layout

        choice = choose_layout(
            plan,
            model.model,
            model.make_optimizer(),
            cluster,
            params=model.params,
            cost=self.cost,
            batch_spec=packed_batch_spec if plan.is_packed else token_batch_spec,
        )
        print(f"\n{choice}")
        if self.html is not None:
            from jvarlen.reports.choice_page import write_choice_page  # here: it draws with matplotlib

            write_choice_page(self.html, plan, choice, cluster)
            print(self.html)

    def _learning_rates(self, plan: Plan) -> Float64[np.ndarray, " S"] | None:
        if self.learning_rate is None and self.base_batch_size is None:
            return None
        if self.learning_rate is None or self.base_batch_size is None:
            raise UserError("learning_rate and base_batch_size go together: a rate, and the sequences it is for")
        rule = None if self.batch_size_rule == "none" else self.batch_size_rule
        return lr_sequence(plan, self.learning_rate, self.base_batch_size, rule=rule)

    def _compare(self, lengths: Int64[np.ndarray, " N"]) -> list[StrategyFigures]:
        if self.overlong == "split":
            raise UserError("compare has strategies that cannot split: choose another overlong for it")
        return compare_strategies(lengths, self.budget, overlong=self.overlong)


def _read_description(cluster: str, model: Path) -> tuple[Cluster, ModelFile]:
    """The cluster and the model that layouts are chosen for."""
    from jvarlen.targets.cluster import Cluster  # here: they import JAX
    from jvarlen.targets.model_file import ModelFile

    return Cluster.named(cluster), ModelFile.load(model)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Report on runs, finished or not: a table, and a page of pictures with the runs overlaid."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    html: Path | None = None
    """Where to write the page, one file that works offline.
    None: report.html in the run directory, or in the current directory for several runs."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        report = read_runs(self.run_dirs)
        print(report.table())
        page = self.html or (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"
        report.write_html(page)
        print(f"\n{page}")
