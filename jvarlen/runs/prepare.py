"""What is known of a training before its first step: data, shapes, plan, and what a step holds and sends."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from jvarlen._common import terminal
from jvarlen._common.checks import UserError, list_first
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen.batches.shapes import BatchShapes, BatchSpec
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.program_store import use_compilation_cache
from jvarlen.data.split import Split
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.mesh import Placement
from jvarlen.distributed.processes import agree, gather_texts, is_main_process, together
from jvarlen.loading.collate import is_own
from jvarlen.loading.loader import Loader, load
from jvarlen.parallel.communication import estimate_communication
from jvarlen.parallel.layout_checks import check_bucket
from jvarlen.parallel.memory import estimate_memory
from jvarlen.planning.buckets import AnyBucket
from jvarlen.planning.lengths import DataSource
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import AUTO, FitConfig, changed_contents, is_run_dir, load_config, shared_settings
from jvarlen.runs.model import describe_model, initial_params, model_shapes, optimizer_for, with_model
from jvarlen.runs.plan_config import ChosenShapes, note_on_balance, note_on_candidates, note_on_overlong
from jvarlen.runs.shape_choice import choose_shapes
from jvarlen.runs.task import SamplesOfLengths, Task, TrainingData, open_training_data
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.targets.choice import choose_layout
from jvarlen.targets.cluster import Cluster
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.links import measure_cluster
from jvarlen.targets.report import TargetReport
from jvarlen.targets.target import Target
from jvarlen.training.trainable import select_trained

__all__ = ["Prepared", "compile_run_for", "prepare", "say", "show_estimates"]

_ONE_A_ROW = 'one sample a row: packing="auto" or "best_fit" packs several, for a loss that keeps to segment_ids'
_DEMO_STEPS = 360  # enough to learn from the built-in corpus, in minutes on a CPU


class Prepared(NamedTuple):
    """What is known of a training before its first step."""

    config: FitConfig
    shapes: ChosenShapes
    task: Task
    data: TrainingData
    training_plan: TrainingPlan
    lengths: Int64[np.ndarray, " N *2"]
    eval_lengths: dict[str, Int64[np.ndarray, " H *2"]]  # of each set, by name
    compile_options: CompileOptions  # with what the settings leave open
    placement: Placement | None  # None: on one device
    num_values: Mapping[str, int]  # of arrays of batches, by name, that the loss reads a table by

    def batch_spec(self, epoch: int | None = 0) -> BatchSpec:
        """The shapes of the batches of an epoch; None: of evaluations."""
        if epoch is None:
            return self.task.batch_spec_for(self.training_plan.eval_plans, self.data.evaluation)
        return self.task.batch_spec_for({"": self.training_plan.plan_of_epoch(epoch)}, {"": self.data.train})

    def load(
        self,
        plan: Plan | Callable[[int], Plan],
        dataset: DataSource,
        lengths: Int64[np.ndarray, " N"],
        **where: Any,
    ) -> Loader:
        """The batches of a plan, or of a function from the epoch to its plan, on the devices of the run."""
        return load(
            plan,
            dataset,
            layout=self.placement,
            collate=self.task.collate,
            lengths=lengths if self.task.compares_lengths else None,
            on_bad_sample=self.config.data.on_bad_sample,
            max_bad_fraction=self.config.data.max_bad_fraction,
            num_values=self.num_values,
            **where,
        )


def prepare(
    config: FitConfig, task: Task, given: Split | SamplesOfLengths | None, placement: Placement | None
) -> Prepared:
    """Opens the given data or those of the settings, chooses shapes and layout, and plans; prints lengths and plan."""
    _check_shards(config, placement)
    is_packing_said, takes_packed = config.plan.packing != "unset", task.loss_fn is None
    if not is_packing_said:  # a loss that ignores segments would attend across samples, in silence
        packing: Literal["auto"] | None = "auto" if takes_packed else None
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, packing=packing))
    if task.collate is not None:
        _check_compared(config, task)
    if task.loss_fn is not None and config.model is not None:
        raise UserError(f"model ({config.model}) is for the built-in decoder, and there is a loss_fn: give one of them")
    with together("read the model"):
        config = with_model(config)
    layout = config.hardware.layout
    num_devices = 1 if placement is None else placement.layout.num_devices
    cluster = None if config.hardware.cluster is None else Cluster.named(config.hardware.cluster)
    if cluster is not None and cluster.num_devices != num_devices:
        raise UserError(f"the cluster {cluster.name} has {cluster.num_devices} devices, and the run {num_devices}")
    if cluster is None and config.target is not None and config.hardware.parallel == AUTO and num_devices > 1:
        raise UserError(
            f"parallel='auto' on target ({config.target}) needs cluster=: links are not measured of devices that are "
            "only compiled for"
        )
    if layout is not None:
        task.check_layout(layout, config.decoder)
    # Which raises ValueError for names that no parameter has.
    select_trained(model_shapes(None, config.decoder) if task.loss_fn is None else task.shapes, task.trainable)
    if config.compile.cache_dir is not None and config.target is None:
        use_compilation_cache(config.compile.cache_dir)  # now: drawing the weights is compiled as well
    with together("open the data"):
        data = open_training_data(config, given)
        if task.loss_fn is None:
            size = data.num_values + config.decoder.begins_samples
            config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, vocab_size=size))
        if (resumed := config.directory.resumed) is not None and is_run_dir(resumed):
            _refuse_changed(resumed, data, config.data.tokenizer)
        measure = task.measure
        lengths = measure(data.train, config.progress)
        if lengths.ndim == 2 and task.loss_fn is None:
            raise UserError("the built-in decoder takes samples of one length: for samples of two, give a loss_fn")
        task = task.with_fields_of(data.train, lengths, is_packed=config.plan.packing_in_force[0] is not None)
        _check_compared(config, task)
        say("Corpus", *data.describe(lengths))
        eval_lengths = {name: measure(dataset, False) for name, dataset in data.evaluation.items()}
    agree("the fields of samples", repr(task.collate) if task.collate is not None and is_own(task.collate) else "none")
    with together("read the model"):
        params = initial_params(config) if task.loss_fn is None else None
    agree("the model", data.content_keys.get(str(config.model), "none"))
    with_layout = functools.partial(task.with_decoder, config.decoder, params)
    task = with_layout(layout)

    # While steps run, which is faster; or before, where several processes train.
    when = config.compile.when or ("background" if jax.process_count() == 1 else "ahead")
    compile_options = dataclasses.replace(config.compile, when=when, time_steps=config.compile.time_steps is not False)
    if given is None and not config.data.files and config.max_steps is None and config.num_epochs is None:
        config = dataclasses.replace(config, max_steps=_DEMO_STEPS)
    if config.model is not None:
        say("Model", describe_model(config, task.shapes))
    decided = dataclasses.replace(config, compile=compile_options)
    shapes = choose_shapes(decided, task, data, lengths, num_devices)
    with together("plan the training"):
        training_plan = TrainingPlan(decided, lengths, eval_lengths, task.optimizer, shapes)
        if task.optimizer is None:
            training_plan.optimizer = optimizer_for(task.shapes, training_plan.optimizer)
        plan, rates_of_epoch = training_plan.plan_of_epoch(0), training_plan.rates_of_epoch
        rates = None if rates_of_epoch is None else rates_of_epoch(0).in_force
        seconds: dict[str, Any] = {"cost": config.plan.cost, "compile_seconds": config.plan.compile_seconds}
        report = plan.report(rates, lengths=lengths, **seconds)
        of_plan = note_on_overlong(plan, lengths), note_on_balance(plan, lengths)
        packs = "" if takes_packed or is_packing_said else _ONE_A_ROW
        notes = shapes.reason, packs, note_on_candidates(config.plan, shapes, lengths), *of_plan
        say("Plan", report, training_plan.describe(), *filter(None, notes))
    prepared = Prepared(
        config, shapes, task, data, training_plan, lengths, eval_lengths, compile_options, placement, {}
    )
    if config.hardware.parallel == AUTO:
        if placement is not None and num_devices > 1:
            layout = _choose_layout(prepared._replace(task=with_layout(Layout(data=2, zero=3))), placement, cluster)
            placement = layout.on(placement.mesh.devices.flatten().tolist())
        parallel = None if layout is None else str(layout)
        hardware = dataclasses.replace(config.hardware, parallel=parallel, cluster=None)
        config = dataclasses.replace(config, hardware=hardware)
        prepared = prepared._replace(config=config, task=with_layout(layout), placement=placement)
    with together("plan the training"):
        if layout is not None:
            _check_buckets(layout, training_plan, {*training_plan.buckets, *training_plan.eval_buckets})
        raise_if_interrupted()
        bucket = training_plan.buckets[0]
        batch = prepared.batch_spec()(bucket, training_plan.plan_of_epoch(0).microbatches_per_step)
        return prepared._replace(num_values=prepared.task.num_values(batch, data.num_values))


def _check_compared(config: FitConfig, task: Task) -> None:
    """Raises ValueError for settings that need samples to be the library's, where only the user knows them."""
    own = {"collate": task.collate is not None and not is_own(task.collate), "batch_spec": task.batch_spec is not None}
    if config.plan.packing_in_force[0] == "auto" and any(own.values()):
        given = list_first(name for name, is_given in own.items() if is_given)
        raise UserError(
            f'packing="auto" makes batches of samples or of packed rows, and {given} of your own is for one'
        )
    if config.data.on_bad_sample == "skip" and task.collate is None and not task.compares_lengths:
        raise UserError(
            'on_bad_sample="skip" compares the `len()` of samples with the plan: it cannot go with a length_fn of your '
            "own without a collate"
        )


def _refuse_changed(run_dir: Path, data: TrainingData, tokenizer: Path | None) -> None:
    """Raises ValueError for files that a run began with other content of; before shapes are, which would not fit."""
    saved = load_config(run_dir / "config.json")  # settings that name other files are refused as such, later
    names = set(map(str, (*saved.data.files, *saved.data.eval_data, saved.data.tokenizer, saved.model)))
    changed = changed_contents(run_dir, {name: key for name, key in data.content_keys.items() if name in names})
    if str(tokenizer) in changed:  # which is a part of all other keys
        changed = [str(tokenizer)]
    if changed:
        raise UserError(
            f"{run_dir} began with another content of {list_first(changed)}: put it back, or begin a new run"
        )


def _choose_layout(prepared: Prepared, placement: Placement, cluster: Cluster | None) -> Layout:
    """The layout of the fewest estimated seconds that takes evaluations; the same on all processes."""
    config, task, training_plan = prepared.config, prepared.task, prepared.training_plan
    if cluster is None:
        narrow = "bfloat16" in {str(leaf.dtype) for leaf in jax.tree.leaves(task.shapes)}
        dtype: Any = config.decoder.compute_dtype or ("bfloat16" if narrow else "float32")
        cluster = measure_cluster(placement, dtype=dtype, progress=config.progress)
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
            plan,
            task.loss_fn,
            training_plan.optimizer,
            cluster,
            params=task.shapes,
            trainable=task.trainable,
            cost=config.plan.cost,
            lengths=prepared.lengths,
            batch_spec=task.batch_spec_for({"": plan}, {"": prepared.data.train}),
            extra=task.extra,
        )
        layout = next(filter(is_taken, choice.candidates.layouts()), None)
        if layout is None:
            raise UserError(f"no layout of {placement.layout.num_devices} devices takes the steps of evaluations")
    say("Layout", str(choice), *([f"{layout} is the first that takes evaluations"] * (layout != choice.layout)))
    return Layout.parse(gather_texts("the chosen layout", str(layout))[0])


def _check_buckets(layout: Layout, training_plan: TrainingPlan, buckets: Collection[AnyBucket]) -> None:
    """Raises ValueError where a layout does not take steps of a bucket."""
    for bucket in sorted(buckets):
        check_bucket(layout, bucket, training_plan.plan_of_epoch(0).microbatches_per_step)


def show_estimates(prepared: Prepared) -> None:
    """Prints what a step of the largest shape holds on a device, and what it sends, for which it is compiled."""
    config, task, placement = prepared.config, prepared.task, prepared.placement
    training_plan, batch_spec = prepared.training_plan, prepared.batch_spec()
    bucket = max(training_plan.buckets, key=lambda bucket: bucket.rows * sum(bucket[1:]))
    layout = Layout(data=1) if placement is None else placement.layout
    memory = estimate_memory(
        layout,
        task.params,
        training_plan.optimizer,
        bucket,
        model=task.loss_fn,
        trainable=task.trainable,
        extra=task.extra,
        batch_spec=batch_spec,
        microbatches_per_step=config.plan.num_microbatches,
    )
    say(f"Memory of a step of {'×'.join(map(str, bucket))} on {layout}", str(memory))
    if placement is None:
        return
    train_step = task.train_step(training_plan.optimizer, placement)
    compiled = compile_buckets(
        train_step,
        task.init_state(train_step, config.seed),
        BatchShapes(
            [bucket], microbatches_per_step=config.plan.num_microbatches, layout=placement, batch_spec=batch_spec
        ),
        progress=config.progress,
        options=dataclasses.replace(config.compile, when="ahead"),
    )
    say("Communication of this step", str(estimate_communication(compiled, bucket)))


def compile_run_for(target: Target, prepared: Prepared) -> TargetReport:
    """The programs of all training steps of a run, compiled for the devices that it is placed on."""
    config, task, training_plan = prepared.config, prepared.task, prepared.training_plan
    assert task.loss_fn is not None  # there is one after `with_decoder`
    return compile_for(
        target,
        task.loss_fn,
        training_plan.optimizer,
        BatchShapes(training_plan.buckets, microbatches_per_step=config.plan.num_microbatches),
        layout=prepared.placement,
        params=task.params,
        trainable=task.trainable,
        batch_spec=prepared.batch_spec(),
        options=config.compile,
        progress=config.progress,
    )


def say(title: str, *texts: str) -> None:
    """Prints a part of what a run tells, on the main process."""
    if is_main_process():
        terminal.say(f"\n{title}", *texts)


def _check_shards(config: FitConfig, placement: Placement | None) -> None:
    """Raises ValueError for shards that do not divide a step, and for processes that were set differently."""
    settings = {name: repr(value) for name, value in shared_settings(config).items()}
    if len(set(gather_texts("the settings", repr(settings)))) > 1:
        of_processes = {name: gather_texts(name, value) for name, value in settings.items()}
        differing = [f"{name}: {', '.join(values)}" for name, values in of_processes.items() if len(set(values)) > 1]
        raise UserError(f"processes differ in settings, in the order of processes: {'; '.join(differing)}")
    if placement is not None and config.hardware.parallel != AUTO:
        placement.batch_shardings(np.empty(config.plan.num_microbatches))
