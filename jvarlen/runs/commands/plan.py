"""`jvarlen plan`: the plan of a training, compared with simpler ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int64

from jvarlen import models
from jvarlen._common.checks import UserError, is_integer, list_first
from jvarlen._common.files import check_outputs, load_array, regular_file
from jvarlen._common.options import POSITIONAL
from jvarlen._common.terminal import say
from jvarlen.distributed.layout import Layout
from jvarlen.estimates.cluster import Cluster
from jvarlen.planning.buckets import Bucket, Buckets
from jvarlen.planning.budget import Budget, round_up
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.order import check_seed
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import FLAT, DataConfig, FitConfig, HardwareConfig, ProgramConfig
from jvarlen.runs.model import RunModel, model_shapes, optimizer_for
from jvarlen.runs.plan_config import PlanConfig, PlanSettings, shards_of
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

__all__ = ["PlanCommand", "PlannedData"]

_NO_LIMIT = 2**40  # tokens of a microbatch


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


def _shards_on(cluster: Cluster | None, layout: Layout | None) -> int:
    """Microbatches of a step by default: as a named layout needs, or one for each device of the cluster."""
    if cluster is None:
        return shards_of(layout)
    return cluster.num_devices if layout is None else shards_of(layout.for_devices(cluster.num_devices))


def _fixed_by(parallel: str | None, num_devices: int) -> dict[str, object]:
    """The fields of a named layout, all to be taken as they are."""
    if parallel in (None, "auto"):
        return {}
    layout = Layout.parse(parallel).for_devices(num_devices)
    fields = dataclasses.asdict(layout) | {"remat": layout.remat_in_force}
    return fields if layout.stage > 1 else {name: value for name, value in fields.items() if name != "schedule"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RowsPlanned(PlanConfig):
    """Planning settings of a command that can choose rows by memory."""

    max_tokens: int | None = None  # type: ignore[assignment]
    """Budget of one microbatch in tokens, padding included. None: 4,096; with target no limit."""
    limits_tokens: ClassVar[bool] = True  # whether it was given, of an instance

    def __post_init__(self):
        object.__setattr__(self, "limits_tokens", self.max_tokens is not None)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", PlanConfig.max_tokens)
        super().__post_init__()


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(ProgramConfig):
    """Print the plan of a training run, or of any lengths, beside simpler ones; it takes the settings of train."""

    data: PlannedData = dataclasses.field(default_factory=PlannedData, metadata=FLAT)
    """The data to plan."""
    plan: _RowsPlanned = dataclasses.field(default_factory=_RowsPlanned, metadata=FLAT)
    """How samples become steps."""
    epoch: int = 0
    """The epoch to plan. With max_steps, num_epochs, or steps that grow, the steps, tokens and rates of the whole run
    are told as well."""
    out: Path | None = None
    """Where to save the plan, a .npz file."""
    html: Path | None = None
    """Where to write a page with pictures of the plan: one file that works offline."""
    cluster: str | None = None
    """Devices to choose a layout for, which needs model: a known machine such as dgx-h100:4, four hosts, or a file."""
    target: str | None = None
    """Devices whose memory chooses the rows of every bucket, the most that fit, as for compile. Needs model.
    Without max_tokens nothing limits the tokens of a microbatch. With cluster, the three
    layouts of the fewest estimated seconds are compiled for these devices, and their figures decide."""
    parallel: str | None = None
    """How a step spreads over devices, as for train. None: with target data parallelism, with cluster the layout of the
    fewest estimated seconds."""

    def __post_init__(self):
        super().__post_init__()
        check_seed(self.seed, self.epoch)
        if self.cluster is not None and self.model is None:
            raise UserError("cluster= needs model=: a layout is chosen for a model on a cluster")
        if self.target is None or self.cluster is not None:
            return
        if self.model is None:
            raise UserError(f"target ({self.target}) needs model=: rows are chosen by the memory of its steps")
        if self.parallel == "auto":
            raise UserError("parallel (auto) is for training: rows are chosen for one layout, such as data8.zero3")
        given = {name: getattr(self.plan, name) for name in ("buckets", "sequences_per_step", "tokens_per_step")}
        if others := [f"{name}=" for name, value in given.items() if value]:
            raise UserError(f"target ({self.target}) chooses rows by its memory: leave out {', '.join(others)}")

    def _config(self) -> FitConfig:
        """The settings of a run of this plan."""
        hardware = HardwareConfig(parallel=self.parallel)
        return self.run_config(hardware=hardware, dry_run=self.target is not None, out=None, html=None)

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
        if self.target is not None and self.cluster is None:
            self._choose_rows()
            return
        cluster = None if self.cluster is None else Cluster.named(self.cluster)
        config, target = self._config(), None
        if self.target is not None:
            from jvarlen.runs.fit import target_of

            target = target_of(config)
        model, num_shards = RunModel.of(config), _shards_on(cluster, config.hardware.layout)
        settings = self.plan.resolve(num_shards, of_files=True)
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
        comparison = compare_strategies(plan, lengths, budget_of_rows(settings, lengths, settings.budget))
        say(f"\n{comparison_table(comparison)}")
        steps = None if training is None else training.steps_of_run
        if training is not None:
            say(f"\n{training.describe(tells_rates=True)}")
        if self.out is not None:
            say(self.out)
        if cluster is not None:
            import optax  # here: they import JAX

            from jvarlen.batches.shapes import plan_specs
            from jvarlen.estimates.choice import choose_layout

            params = model_shapes(config.model, model.decoder)
            step = models.layered(model.decoder), optimizer_for(params, optax.adamw(1e-3)), plan
            known = {"params": params, "batch_spec": plan_specs(plan)}
            fixed = _fixed_by(self.parallel, cluster.num_devices)
            choice = choose_layout(*step, cluster=cluster, fixed=fixed, cost=cost, lengths=lengths, **known)
            if target is not None:
                from jvarlen.targets.finalists import compile_finalists

                choice = compile_finalists(choice, *step, target=target, progress=self.progress, **known)
            say(f"\n{choice}")
        if self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, cost=cost, comparison=comparison, steps=steps)
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

    def _choose_rows(self) -> None:
        """Prints the plan of the most rows that fit, and writes the requested files."""
        from jvarlen.runs.fit import target_of  # here: they import JAX
        from jvarlen.runs.task import Task
        from jvarlen.runs.training_plan import optimizer_of
        from jvarlen.targets.row_choice import choose_rows

        config = self._config()
        target, model = target_of(config), RunModel.of(config)
        layout = (config.hardware.layout or Layout()).for_devices(len(target.devices))
        Task().check_layout(layout, model.decoder)
        lengths, corpus = self._read_lengths(config, model)
        settings = self._settings_for(layout, lengths)
        method = settings.packing
        if method == "auto":
            raise UserError("packing auto chooses by seconds of given rows: with target, say padded or best_fit")

        def make(by: Budget | Buckets[Bucket]) -> Plan:
            if isinstance(by, Budget):
                shapes = shapes_for(settings, lengths, seed=self.seed, budget=by)
            else:
                shapes = ChosenShapes(buckets=tuple(map(tuple, by.shapes)), packing=method)
            return epoch_plan(settings, shapes, lengths, seed=self.seed, epoch=self.epoch)

        params = model_shapes(config.model, model.decoder)
        most_steps = -(-len(lengths) // settings.budget.num_microbatches)  # their rates are held in memory
        task = Task().with_decoder(model.decoder, params, layout)
        assert task.loss_fn is not None
        chosen = choose_rows(
            task.loss_fn,
            optimizer_for(params, optimizer_of(config.optimizer, config.base_batch_size, np.zeros(most_steps))),
            make,
            budget=settings.budget,
            target=target,
            layout=layout,
            params=params,
            options=config.compile,
            progress=self.progress,
        )
        plan = chosen.plan
        if self.out is not None:
            plan.save(self.out)
        report = plan.report(cost=settings.budget.cost, lengths=lengths, budget=chosen.budget)
        notes = filter(None, [note_on_overlong(plan, lengths)])
        say(*corpus, report, *notes, f"digest {plan.digest}", f"\n{chosen}")
        buckets = " ".join(str(number) for bucket in plan.buckets.shapes for number in bucket)
        of_run = f"--packing {method} --num-microbatches {plan.num_microbatches} --buckets {buckets}"
        say(f"\nto train in these buckets: {of_run}")
        if self.out is not None:
            say(self.out)
        if self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, cost=settings.budget.cost, by_memory=chosen)
            say(self.html)

    def _settings_for(self, layout: Layout, lengths: Int64[np.ndarray, " N"]) -> PlanSettings:
        """Resolved planning settings for a layout whose memory limits rows, up to the longest sample."""
        asked, num_shards = self.plan, shards_of(layout)
        max_tokens = asked.max_tokens if asked.limits_tokens else _NO_LIMIT
        max_length = asked.max_length
        if max_length is None and not asked.limits_tokens and not asked.row_lengths:
            offset = asked.length_offset
            max_length = round_up(int(lengths.max()) - offset, asked.length_multiple) + offset
        asked = dataclasses.replace(asked, max_tokens=max_tokens, max_length=max_length)
        settings = asked.resolve(num_shards, of_files=True)
        if settings.packing == "padded" or max_length is not None:
            return settings
        *_, longest = shapes_for(settings, lengths, seed=self.seed).buckets[-1]
        return dataclasses.replace(asked, max_length=longest).resolve(num_shards, of_files=True)
