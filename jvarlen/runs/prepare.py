"""Prepares a training: its data, shapes, layout and plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen._common import terminal
from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import load_dataclass
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.program_store import use_compilation_cache
from jvarlen.data.measure import measure_integers
from jvarlen.data.samples import WeightedTokens
from jvarlen.data.split import Split
from jvarlen.data.tokens import Subset
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement, place
from jvarlen.distributed.processes import agree, broadcast_text, gather_texts, is_main_process, together
from jvarlen.estimates.choice import choose_layout
from jvarlen.estimates.cluster import PRESETS, Cluster
from jvarlen.estimates.communication import estimate_communication
from jvarlen.estimates.memory import estimate_memory
from jvarlen.loading.collate import is_builtin
from jvarlen.loading.loader import Loader, load
from jvarlen.models import with_window
from jvarlen.parallel.layout_checks import check_bucket
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import AUTO, FitConfig, is_run_dir
from jvarlen.runs.data import SamplesOfLengths, TrainingData, agree_on_contents, open_training_data, refuse_changed
from jvarlen.runs.model import RunModel, describe_model, initial_params, model_shapes, optimizer_for
from jvarlen.runs.saved_config import settings_of
from jvarlen.runs.settings import RunSettings, num_shards, resolve
from jvarlen.runs.shapes import (
    SHAPES_FILE,
    ChosenShapes,
    check_for_pairs,
    note_on_candidates,
    note_on_overlong,
    shapes_for,
)
from jvarlen.runs.task import Task
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.report import TargetReport
from jvarlen.targets.target import Target
from jvarlen.training.checkpoint import Place
from jvarlen.training.trainable import select_trained

__all__ = ["Prepared", "compile_run_for", "prepare", "say", "show_estimates"]


class Prepared(NamedTuple):
    """A training before anything is placed or compiled."""

    settings: RunSettings
    shapes: ChosenShapes
    task: Task
    data: TrainingData
    training_plan: TrainingPlan
    lengths: Int64[np.ndarray, " N *2"]
    eval_lengths: dict[str, Int64[np.ndarray, " H *2"]]  # of each set, by name
    placement: Placement | None  # None: on one device

    @property
    def num_microbatches(self) -> int:
        """M."""
        return self.settings.plan.budget.num_microbatches

    def batch_spec(self, epoch: int | None = 0) -> BatchSpec:
        """The shapes of the batches of an epoch, or for None of evaluations."""
        if epoch is None:
            return self.task.batch_spec_for(self.training_plan.eval_plans, self.data.evaluation)
        spec = self.task.batch_spec_for({"": self.training_plan.plan_of_epoch(epoch)}, {"": self.data.train})
        if self.training_plan.windows is None:
            return spec
        return lambda *args: jax.eval_shape(lambda batch: with_window(batch, 0), spec(*args))

    def batch_shapes(self, buckets: Sequence[AnyBucket], epoch: int | None = 0) -> BatchShapes:
        """The batches of some buckets in an epoch, or for None in evaluations."""
        return BatchShapes(
            buckets,
            num_microbatches=self.num_microbatches,
            layout=self.placement,
            batch_spec=self.batch_spec(epoch),
            has_many_groups=epoch is not None and self.settings.plan.sizes_steps,
            rows_per_step=self.training_plan.rows_per_step,
        )

    def load_training(self, place: Place, num_workers: int = 0) -> Loader:
        """The batches of the steps from a place on."""
        return self._load(
            self.training_plan.plan_of_epoch,
            self.data.train,
            lengths=self.lengths if self.task.compares_lengths else None,
            epoch=place.epoch,
            num_epochs=self.training_plan.num_epochs,
            start_step=place.step,
            num_workers=num_workers,
        )

    def load_evaluation(self, name: str) -> Loader:
        """The batches of an evaluation."""
        lengths = self.eval_lengths[name] if self.task.compares_lengths else None
        return self._load(self.training_plan.eval_plans[name], self.data.evaluation[name], lengths=lengths)

    @property
    def _load(self) -> functools.partial[Loader]:
        """`load`, with the arguments of the settings and the task."""
        data, task = self.settings.config.data, self.task
        return functools.partial(
            load,
            layout=self.placement,
            collate=task.collate,
            on_bad_sample=data.on_bad_sample,
            max_bad_fraction=data.max_bad_fraction,
            num_values={"tokens": self.data.num_values} if task.is_language_model else task.num_values,
        )


def prepare(
    config: FitConfig, task: Task, given: Split | SamplesOfLengths | None, placement: Placement | None
) -> Prepared:
    """Opens the given data or those of the settings, chooses shapes and layout, and plans; prints lengths and plan."""
    _check_processes(config)
    of_files = given is None or isinstance(given, SamplesOfLengths)
    with together("plan the training"):
        # A loss that ignores segments would attend across samples, in silence.
        plan = config.plan.resolve(num_shards(config, placement), of_files=of_files, packs=task.loss_fn is None)
    with together("read the model"):
        model = RunModel.of(config)
    if placement is not None and config.hardware.parallel != AUTO:
        placement.batch_shardings(np.empty(plan.budget.num_microbatches))  # refuses shards that do not divide a step
    layout = None if placement is None or config.hardware.layout is None else placement.layout
    _check_task(config, task, model, layout)
    cluster = _cluster_of(config, placement)
    if config.compile.cache_dir is not None and config.target is None:
        use_compilation_cache(config.compile.cache_dir)  # now: drawing the weights is compiled as well
    with together("open the data"):
        data = open_training_data(config, given, model)
        settings = resolve(
            config,
            plan,
            model,
            num_values=data.num_values if task.loss_fn is None else None,
            is_demo=given is None and not config.data.files,
        )
        if (resumed := config.directory.resumed) is not None and is_run_dir(resumed):
            refuse_changed(resumed, data, model.tokenizer)
        lengths = task.measure(data.train, settings.progress)
        eval_lengths = {name: task.measure(dataset, False) for name, dataset in data.evaluation.items()}
        if lengths.ndim == 2:
            check_for_pairs(config.plan)
            if task.loss_fn is None:
                raise UserError("the built-in decoder takes samples of one length: for samples of two, give a loss_fn")
        task = task.with_fields_of(data.train, lengths, is_packed=plan.packing != "padded")
        _check_compared(config, task)
        say("Corpus", *data.describe(lengths))
    agree("the fields of samples", repr(task.collate) if is_builtin(task.collate) else "none")
    with together("read the model"):
        params = initial_params(config, settings.config.decoder) if task.loss_fn is None else None
    agree_on_contents(data)
    with_layout = functools.partial(task.with_decoder, settings.config.decoder, params)
    task = with_layout(layout)
    if config.model is not None:
        say("Model", describe_model(settings.config, task.shapes))
    shapes = _choose_shapes(settings, lengths)
    training_plan = _plan_training(settings, shapes, task, data, lengths, eval_lengths)
    prepared = Prepared(settings, shapes, task, data, training_plan, lengths, eval_lengths, placement)
    if cluster is not None and placement is not None and placement.layout.num_devices > 1:
        layout = _choose_layout(prepared._replace(task=with_layout(Layout(data=2, zero=3))), placement, cluster)
        placement = place(layout, placement.mesh.devices.flatten().tolist())
        prepared = prepared._replace(task=with_layout(layout), placement=placement)
    with together("plan the training"):
        if layout is not None:
            _check_buckets(layout, training_plan, {*training_plan.buckets, *training_plan.eval_buckets})
        raise_if_interrupted()
    named = None if placement is None or config.hardware.parallel is None else placement.layout
    return prepared._replace(settings=settings.on(named))


def _check_processes(config: FitConfig) -> None:
    """Raises ValueError for processes that were set differently."""
    settings = {each.name: repr(each.value) for each in settings_of(config) if each.scope != "process"}
    if len(set(gather_texts("the settings", repr(settings)))) > 1:
        of_processes = {name: gather_texts(name, value) for name, value in settings.items()}
        differing = [f"{name}: {', '.join(values)}" for name, values in of_processes.items() if len(set(values)) > 1]
        raise UserError(f"processes differ in settings, in the order of processes: {'; '.join(differing)}")


def _check_task(config: FitConfig, task: Task, model: RunModel, layout: Layout | None) -> None:
    """Raises ValueError for a task that goes with neither the settings nor the layout."""
    if task.collate is not None:
        _check_compared(config, task)
    for name in ("model", "window_schedule"):
        if task.loss_fn is not None and (given := getattr(config, name)) is not None:
            raise UserError(f"{name} ({given}) is for the built-in decoder, and there is a loss_fn: give one of them")
    if layout is not None:
        task.check_layout(layout, model.decoder)
    # Which raises ValueError for names that no parameter has.
    select_trained(model_shapes(None, model.decoder) if task.loss_fn is None else task.shapes, task.trainable)


def _cluster_of(config: FitConfig, placement: Placement | None) -> Cluster | None:
    """The cluster to choose a layout for; ValueError for another number of devices, or if it is missing."""
    hardware, num_devices = config.hardware, 1 if placement is None else placement.layout.num_devices
    cluster = None if hardware.cluster is None else Cluster.named(hardware.cluster)
    if cluster is not None and cluster.num_devices != num_devices:
        raise UserError(f"the cluster {cluster.name} has {cluster.num_devices} devices, and the run {num_devices}")
    if cluster is None and hardware.parallel == AUTO and num_devices > 1:
        raise UserError(f"parallel='auto' needs cluster=: a file of one, or a known one of {', '.join(PRESETS)}")
    return cluster


def _choose_shapes(settings: RunSettings, lengths: Int64[np.ndarray, " N *2"]) -> ChosenShapes:
    """The shapes for the lengths of the samples; those that a resumed run began with."""
    run_dir = settings.config.directory.resumed
    if run_dir is not None and is_run_dir(run_dir):
        return load_dataclass(ChosenShapes, run_dir / SHAPES_FILE, "chosen shapes")
    num_epochs = settings.num_epochs_over(lengths)
    with together("choose the shapes"):
        return shapes_for(settings.plan, lengths, seed=settings.config.seed, num_epochs=num_epochs)


def _plan_training(
    settings: RunSettings,
    shapes: ChosenShapes,
    task: Task,
    data: TrainingData,
    lengths: Int64[np.ndarray, " N *2"],
    eval_lengths: dict[str, Int64[np.ndarray, " H *2"]],
) -> TrainingPlan:
    """The plans of all epochs, and the optimizer; prints that of the first epoch."""
    config = settings.config
    with together("plan the training"):
        training_plan = TrainingPlan(settings, lengths, eval_lengths, task.optimizer, shapes)
        if task.optimizer is None:
            training_plan.optimizer = optimizer_for(task.shapes, training_plan.optimizer)
        plan, rates_of_epoch = training_plan.plan_of_epoch(0), training_plan.rates_of_epoch
        rates = None if rates_of_epoch is None else rates_of_epoch(0).in_force
        cost, compile_seconds = settings.plan.budget.cost, settings.plan.budget.compile_seconds
        notes = [
            shapes.reason,
            note_on_candidates(settings.plan, shapes, lengths),
        ]
        lost = [note_on_overlong(plan, lengths)]
        has_answers = config.data.files and config.data.loss_on and lengths.ndim == 1
        if plan.num_truncated and has_answers and plan.overlong != "truncate_random":  # others in every epoch
            lost.append(_note_on_cut_answers(plan, lengths, data.train, settings))
        report = plan.report(rates, lengths=lengths, cost=cost, compile_seconds=compile_seconds)
        say("Plan", *filter(None, [*lost, report, training_plan.describe(), *notes]))
    return training_plan


def _note_on_cut_answers(
    plan: Plan, lengths: Int64[np.ndarray, " N"], dataset: DataSource, settings: RunSettings
) -> str | None:
    """How many samples have no token left to learn from after they are cut; None if all have."""
    (longest,) = plan.longest
    keeps_end = plan.overlong == "truncate_start"
    num_learned = measure_integers(
        Subset(dataset, np.flatnonzero(lengths > longest)),
        functools.partial(_num_learned, slice(-longest, None) if keeps_end else slice(longest)),
        "learned tokens",
        shards=None,
        shard_size=1,
        num_workers=settings.config.data.num_workers,
        progress=settings.progress,
    )
    num_without = int((num_learned == 0).sum())
    if not num_without:
        return None
    if keeps_end:
        return f"{num_without:,} of them have no token to learn from in the part that stays"
    return f"{num_without:,} of them are cut before the first token to learn from: --overlong truncate_start keeps ends"


def _num_learned(part: slice, sample: WeightedTokens) -> int:
    """How many tokens of the part of a sample that stays have weight in the loss."""
    return int((sample.weights[part] > 0).sum())


def _check_compared(config: FitConfig, task: Task) -> None:
    """Raises ValueError for settings that do not go with a user's `collate` or `length_fn`."""
    of_user = {
        "collate": task.collate is not None and not is_builtin(task.collate),
        "batch_spec": task.batch_spec is not None,
    }
    if task.loss_fn is None and config.plan.packing == "auto" and any(of_user.values()):
        given = list_first(name for name, is_given in of_user.items() if is_given)
        raise UserError(f'packing="auto" makes batches of samples or of packed rows, and {given} of yours is for one')
    if config.data.on_bad_sample == "skip" and not of_user["collate"] and not task.compares_lengths:
        raise UserError('on_bad_sample="skip" compares `len()` of samples with the plan, not a length_fn of your own')


def _choose_layout(prepared: Prepared, placement: Placement, cluster: Cluster) -> Layout:
    """The layout of the fewest estimated seconds that takes evaluations; the same on all processes."""
    task, training_plan = prepared.task, prepared.training_plan
    plan = training_plan.plan_of_epoch(0)
    assert task.loss_fn is not None  # there is one after `with_decoder`

    def is_taken(layout: Layout) -> bool:
        try:
            _check_buckets(layout, training_plan, training_plan.eval_buckets)
        except ValueError:
            return False
        return True

    with together("choose the layout"):
        choice = choose_layout(
            task.loss_fn,
            training_plan.optimizer,
            plan,
            cluster=cluster,
            params=task.shapes,
            trainable=task.trainable,
            cost=prepared.settings.plan.budget.cost,
            lengths=prepared.lengths,
            batch_spec=task.batch_spec_for({"": plan}, {"": prepared.data.train}),
            extra=task.extra,
        )
        layout = next(filter(is_taken, choice.candidates.layouts()), None)
        if layout is None:
            raise UserError(f"no layout of {placement.layout.num_devices} devices takes the steps of evaluations")
    say("Layout", str(choice), *([f"{layout} is the first that takes evaluations"] * (layout != choice.layout)))
    return Layout.parse(broadcast_text("the chosen layout", str(layout)))


def _check_buckets(layout: Layout, training_plan: TrainingPlan, buckets: Collection[AnyBucket]) -> None:
    """Raises ValueError where a layout does not take steps of a bucket."""
    for bucket in sorted(buckets):
        check_bucket(layout, bucket, training_plan.plan_of_epoch(0).num_microbatches)


def show_estimates(prepared: Prepared) -> None:
    """Prints the memory and communication of a step of the largest shape, which it traces."""
    settings, task, placement = prepared.settings, prepared.task, prepared.placement
    training_plan = prepared.training_plan
    bucket = max(training_plan.buckets, key=lambda bucket: bucket.rows * sum(bucket[1:]))
    layout = Layout(data=1) if placement is None else placement.layout
    memory = estimate_memory(
        task.loss_fn,
        training_plan.optimizer,
        bucket,
        layout=layout,
        params=task.params,
        trainable=task.trainable,
        extra=task.extra,
        batch_spec=prepared.batch_spec(),
        num_microbatches=prepared.num_microbatches,
        many_groups=settings.plan.sizes_steps,
    )
    what = "group" if settings.plan.sizes_steps else "step"
    say(f"Memory of a {what} of {'×'.join(map(str, bucket))} on {layout}", str(memory))
    if placement is None:
        return
    train_step = task.train_step(training_plan.optimizer, placement)
    compiled = compile_buckets(
        train_step,
        task.init_state(train_step, settings.config.seed),
        prepared.batch_shapes([bucket]),
        progress=settings.progress,
        options=settings.compile,
    )
    say(f"Communication of this {what}", str(estimate_communication(compiled, bucket)))
    if settings.plan.sizes_steps:
        say("Communication of the update", str(estimate_communication(compiled, None)))


def compile_run_for(target: Target, prepared: Prepared) -> TargetReport:
    """The programs of all training steps of a run, compiled for the devices that it is placed on."""
    settings, task, training_plan = prepared.settings, prepared.task, prepared.training_plan
    assert task.loss_fn is not None  # there is one after `with_decoder`
    return compile_for(
        task.loss_fn,
        training_plan.optimizer,
        dataclasses.replace(prepared.batch_shapes(training_plan.buckets), plan=training_plan.plan_of_epoch(0)),
        target=target,
        layout=prepared.placement,
        params=task.params,
        trainable=task.trainable,
        seed=task.seed_of_keys(settings.config.seed),
        options=settings.config.compile,
        progress=settings.progress,
    )


def say(title: str, *texts: str) -> None:
    """Prints a part of the run's output, on the main process."""
    if is_main_process():
        terminal.say(f"\n{title}", *texts)
