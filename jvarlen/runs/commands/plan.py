"""`jvarlen plan`: the plan of a training, compared with simpler ones; `jvarlen compile`: its steps, compiled."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int64

from jvarlen import models
from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen._common.files import check_outputs, load_array, regular_file
from jvarlen._common.options import POSITIONAL
from jvarlen._common.terminal import say
from jvarlen.distributed.layout import Layout
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.order import check_seed
from jvarlen.runs.config import FLAT, DataConfig, FitConfig, HardwareConfig, ProgramConfig
from jvarlen.runs.model import RunModel, model_shapes, optimizer_for
from jvarlen.runs.plan_config import PlanSettings, shards_of
from jvarlen.runs.shapes import (
    ChosenShapes,
    budget_of_rows,
    epoch_plan,
    note_on_candidates,
    note_on_overlong,
    shapes_for,
)

if TYPE_CHECKING:
    from jvarlen.runs.training_plan import TrainingPlan

__all__ = ["CompileCommand", "PlanCommand", "PlannedData"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedData(DataConfig):
    """The data to plan."""

    files: tuple[str | Path, ...] = dataclasses.field(default=(), metadata=POSITIONAL | {"name": "data"})
    """What `jvarlen train --data` takes; none for the built-in corpus. Or integers, tokens a sample, in a .npy or .json
    file."""

    def read_lengths(self) -> Int64[np.ndarray, " N"] | None:
        """The tokens of each sample, of a file of lengths; None for data."""
        files = self.files
        if not any(str(path).endswith((".npy", ".json")) for path in files):
            return None
        given = ((each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self))
        if others := [name for name, value, default in given if value not in (files[:1], default)]:
            listed = list_first(f"{name} must not be given" for name in others)
            raise UserError(f"a .npy or .json file holds lengths: it is planned alone, {listed}")
        return check_lengths(_load_lengths(Path(files[0])))


def _load_lengths(path: Path) -> np.ndarray | list[int]:
    if not regular_file(path).exists():
        raise FileNotFoundError(f"there is no lengths file {path}")
    if path.suffix == ".npy":
        return load_array(path, "lengths")
    try:
        lengths = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(lengths, list) or not all(map(is_integer, lengths)):
        raise UserError(f"{path} holds no list of integers, tokens a sample; samples are lines of a .jsonl file")
    return lengths


def _fixed_by(parallel: str | None, num_devices: int) -> dict[str, object]:
    """The fields of a named layout, all to be taken as they are."""
    if parallel is None:
        return {}
    layout = Layout.parse(parallel).for_devices(num_devices)
    fields = dataclasses.asdict(layout) | {"remat": layout.remat_in_force}
    return fields if layout.stage > 1 else {name: value for name, value in fields.items() if name != "schedule"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(ProgramConfig):
    """Print the plan of a training run, or of any lengths, beside simpler ones; it takes the settings of train."""

    data: PlannedData = dataclasses.field(default_factory=PlannedData, metadata=FLAT)
    """The data to plan."""
    epoch: int = 0
    """The epoch to plan. With max_steps, num_epochs, or steps that grow, the steps, tokens and rates of the whole run
    are told as well."""
    out: Path | None = None
    """Where to save the plan, a .npz file."""
    html: Path | None = None
    """Where to write a page with pictures of the plan: one file that works offline."""
    cluster: str | None = None
    """Devices to choose a layout for, which needs model: a known machine such as dgx-h100:4, four hosts, or a file."""
    parallel: str | None = None
    """How a step spreads over devices, as for train. None: with cluster the layout of the fewest estimated seconds."""

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, self.epoch)
        if self.cluster is not None and self.model is None:
            raise UserError("cluster= needs model=: a layout is chosen for a model on a cluster")

    def _read_lengths(self, config: FitConfig, model: RunModel) -> tuple[Int64[np.ndarray, " N"], list[str]]:
        """The lengths in a file, or of the samples that a run of these settings trains on, and a description."""
        if (lengths := self.data.read_lengths()) is not None:
            return lengths, []
        from jvarlen.data.measure import find_lengths
        from jvarlen.runs.data import open_training_data  # here: it imports JAX

        data = open_training_data(config, model=model)
        lengths = find_lengths(data.train, progress=self.progress)
        return lengths, [*data.describe(lengths), ""]

    def run(self) -> None:
        """Prints the plan, its comparison with simpler ones, and layouts; writes the requested files."""
        from jvarlen.planning.compare import compare_strategies, comparison_table

        read = self.model, self.cluster, self.plan.cost_model
        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs, *read)
        cluster = None
        if self.cluster is not None:
            from jvarlen.estimates.cluster import Cluster  # here: it imports JAX

            cluster = Cluster.named(self.cluster)
        config = self.run_config(hardware=HardwareConfig(parallel=self.parallel))
        model, settings = RunModel.of(config), self.plan.resolve(shards_of(config.hardware.layout), of_files=True)
        lengths, corpus = self._read_lengths(config, model)
        shapes, training = self._shapes_and_training(config, model, settings, lengths)
        if training is None:
            plan = epoch_plan(settings, shapes, lengths, seed=self.seed, epoch=self.epoch)
        else:
            plan = training.plan_of_epoch(self.epoch)
        if self.out is not None:
            plan.save(self.out)  # first: the rest only shows it
        cost, compile_seconds = settings.budget.cost, settings.budget.compile_seconds
        report = plan.report(cost=cost, lengths=lengths, compile_seconds=compile_seconds)
        notes = shapes.reason, note_on_candidates(settings, shapes, lengths)
        lost = note_on_overlong(plan, lengths)
        say(*corpus, *filter(None, [lost, report, *notes]), f"digest {plan.digest}")
        comparison = compare_strategies(plan, lengths, budget_of_rows(settings, lengths))
        say(f"\n{comparison_table(comparison)}")
        if training is not None:
            say(f"\n{training.describe(tells_rates=True)}")
        if self.out is not None:
            say(self.out)
        if cluster is not None:
            import optax  # here: they import JAX

            from jvarlen.batches.shapes import plan_specs
            from jvarlen.estimates.choice import choose_layout

            params = model_shapes(config.model, model.decoder)
            choice = choose_layout(
                models.layered(model.decoder),
                optimizer_for(params, optax.adamw(1e-3)),
                plan,
                cluster=cluster,
                params=params,
                batch_spec=plan_specs(plan),
                fixed=_fixed_by(self.parallel, cluster.num_devices),
                cost=cost,
                lengths=lengths,
            )
            say(f"\n{choice}")
        if self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, cost=cost, comparison=comparison)
            say(self.html)

    def _shapes_and_training(
        self, config: FitConfig, model: RunModel, plan: PlanSettings, lengths: Int64[np.ndarray, " N"]
    ) -> tuple[ChosenShapes, TrainingPlan | None]:
        """The shapes; and the plans and rates of the run, where settings say how long it is, or its steps grow."""
        grows = plan.stages is not None or self.optimizer.schedule == "seesaw"
        if self.max_steps is self.num_epochs is None and not grows:
            return shapes_for(plan, lengths, seed=self.seed), None
        from jvarlen.runs.settings import resolve  # here: they import JAX
        from jvarlen.runs.training_plan import TrainingPlan

        settings = resolve(config, plan, model, is_demo=not config.data.files)
        shapes = shapes_for(plan, lengths, seed=self.seed, num_epochs=settings.num_epochs_over(lengths))
        return shapes, TrainingPlan(settings, lengths, {}, shapes=shapes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCommand(ProgramConfig):
    """Compile the train step of every bucket for devices that need not be here, and print which fit."""

    target: str
    """The devices: 8xh100 or 2x8xh100, hosts × devices, of a100, h100 or h200; v5e:2x4, of v5e, v5p or v6e; or
    here. Their compilers come with the extras target-gpu and target-tpu."""
    data: PlannedData = dataclasses.field(default_factory=PlannedData, metadata=FLAT)
    """The data to plan."""
    parallel: str | None = None
    """As for train, on all devices of target."""
    out: Path | None = None
    """Where to save the figures of the compiler, a .json file."""
    html: Path | None = None
    """Where to write a page with these figures: one file that works offline."""

    def run(self) -> int:
        """Plans, compiles, prints the compiler's figures, and saves them; returns 1 where a bucket does not fit."""
        from jvarlen.runs.fit import dry_run  # here: it imports JAX

        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs, self.model, self.plan.cost_model)
        hardware, lengths = HardwareConfig(parallel=self.parallel), self.data.read_lengths()
        data = self.data if lengths is None else DataConfig()
        report = dry_run(self.run_config(data=data, hardware=hardware, dry_run=True, target=self.target), lengths)
        if self.out is not None:
            report.save(self.out)
            say(self.out)
        if self.html is not None:
            from jvarlen.reports.target_page import write_target_page  # here: it draws with matplotlib

            write_target_page(self.html, report)
            say(self.html)
        return int(report.fits is False)
