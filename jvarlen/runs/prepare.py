"""What `fit` trains and on what, and all that is known before the first step: data, shapes, layout and plan."""

from __future__ import annotations

import dataclasses
import functools
import json
import timeit
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Int64

from jvarlen._common import terminal
from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import load_dataclass, regular_file
from jvarlen._common.interrupts import raise_if_interrupted
from jvarlen._common.jaxprs import count_operations
from jvarlen.attention.attention import WHOLE_BELOW
from jvarlen.batches.shapes import BatchShapes, BatchSpec, plan_specs
from jvarlen.compiling.compile import compile_buckets
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.compiling.lowering import LoweredBucket, StepCompiler, make_step_compiler
from jvarlen.compiling.program_store import use_compilation_cache
from jvarlen.data.find_files import distinct_names, without_credentials
from jvarlen.data.length_cache import content_key
from jvarlen.data.measure import LengthFn, PairLengths, known_lengths, measure_integers, measure_lengths
from jvarlen.data.mixtures import Mixture
from jvarlen.data.open import NUM_BYTES, StoredDataset, open_stored, roles_error
from jvarlen.data.samples import OnBadSample, WeightedTokens
from jvarlen.data.split import HELD_OUT, Split, split_held_out
from jvarlen.data.stdlib_corpus import stdlib_functions
from jvarlen.data.tokens import Subset
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement, place
from jvarlen.distributed.processes import agree, broadcast_text, gather_arrays, gather_texts, is_main_process, together
from jvarlen.estimates.choice import choose_layout
from jvarlen.estimates.cluster import PRESETS, Cluster
from jvarlen.estimates.communication import estimate_communication
from jvarlen.estimates.memory import estimate_memory
from jvarlen.loading.collate import CollateFields, CollateFn, is_own
from jvarlen.loading.fields import FieldAxes, find_fields_among, spread_over
from jvarlen.loading.loader import Loader, load
from jvarlen.loading.plan_source import spec_of_steps
from jvarlen.models import DecoderConfig, layered, make_loss_fn
from jvarlen.parallel.layers import LayeredModel, StepLoss, layered_loss_fn, model_of
from jvarlen.parallel.layout_checks import check_bucket, check_layout
from jvarlen.parallel.portable import PortableForm, portable_form, portable_params
from jvarlen.parallel.state_layout import stacked_for
from jvarlen.parallel.tensor import split_params
from jvarlen.parallel.train import TrainStep, make_eval_step, make_train_step
from jvarlen.planning.buckets import AnyBucket, Bucket, make_buckets
from jvarlen.planning.compare import length_histogram
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import DataSource, check_pair_lengths
from jvarlen.planning.plan import Plan, make_plan
from jvarlen.runs.config import (
    AUTO,
    FitConfig,
    changed_contents,
    evaluation_name,
    is_run_dir,
    load_config,
    shared_settings,
)
from jvarlen.runs.model import (
    MODEL_DIR,
    TOKENIZER,
    describe_model,
    has_checkpoint,
    has_weights,
    initial_params,
    model_key,
    model_shapes,
    optimizer_for,
    with_model,
)
from jvarlen.runs.plan_config import SHAPES_FILE, ChosenShapes, note_on_candidates, note_on_overlong, shapes_for
from jvarlen.runs.training_plan import TrainingPlan
from jvarlen.targets.compile_for import compile_for
from jvarlen.targets.report import TargetReport
from jvarlen.targets.target import Target
from jvarlen.training.losses import LossFn, takes_argument
from jvarlen.training.master_weights import EvalParams
from jvarlen.training.step import StepFn
from jvarlen.training.train_state import Metrics, TrainState
from jvarlen.training.trainable import select_trained

__all__ = [
    "PairLengthsFn", "Prepared", "SamplesOfLengths", "Task", "TrainingData", "choose_shapes", "compile_run_for",
    "estimate_costs", "open_training_data", "prepare", "say", "show_estimates",
]  # fmt: skip

PairLengthsFn = Callable[[Any], tuple[int, int]]

_ONE_A_ROW = 'one sample a row: packing="best_fit" packs several, for a loss that keeps to segment_ids'
_DEMO_STEPS = 360  # enough to learn from the built-in corpus, in minutes on a CPU


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The model that is trained, and the batches that it is trained on: the arguments of `fit`."""

    loss_fn: LossFn | LayeredModel | StepLoss | None = None  # None: the built-in language model, until `with_decoder`
    params: Any = None
    eval_loss_fn: LossFn | LayeredModel | StepLoss | None = None
    extra: Any = None
    optimizer: optax.GradientTransformation | None = None
    fields: FieldAxes | None = None
    collate: CollateFn | None = None
    batch_spec: BatchSpec | None = None
    length_fn: LengthFn | PairLengthsFn | None = None
    on_bad_sample: OnBadSample = "error"
    trainable: tuple[str, ...] | None = None
    eval_params: EvalParams | None = None
    num_values: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of arrays of batches, as for `load`
    is_language_model: bool = False  # whether the loss is in nats a token

    def __post_init__(self):
        if (self.loss_fn is None) != (self.params is None):
            raise UserError("loss_fn and params go together: give both for a model of your own, or neither")
        if self.loss_fn is None and (self.eval_loss_fn is not None or self.extra is not None):
            raise UserError("eval_loss_fn and extra go with a loss_fn of your own")
        if self.fields is not None and self.collate is not None:
            raise UserError("fields= are for samples that the library collates: give them without collate=")

    def with_decoder(self, decoder: DecoderConfig, params: Any, layout: Layout | None = None) -> Task:
        """The same with the built-in model, if there is none of the user's."""
        if self.loss_fn is not None:
            return self
        loss_fn = _built_in_loss(decoder, layout)
        return dataclasses.replace(self, loss_fn=loss_fn, params=params, is_language_model=True)

    def check_layout(self, layout: Layout, model: DecoderConfig) -> None:
        """Raises ValueError if a layout is not for this model, or for the built-in one; computes nothing."""
        loss_fn, params = self.model, self.shapes
        if loss_fn is None:
            loss_fn = _built_in_loss(model, layout)
            params = model_shapes(None, model)
            heads = {"num_heads": (model.num_heads, "attention"), "num_kv_heads": (model.kv_heads, "key_value")}
            for name, (size, of_file) in heads.items():
                if size % layout.tensor:
                    raise UserError(
                        f"tensor{layout.tensor} of the layout {layout} does not divide the model's {name} ({size}), "
                        f"of a config.json num_{of_file}_heads"
                    )
        check_layout(layout, params, loss_fn)
        loss_fn, params, *_ = stacked_for(layout, loss_fn, params, optax.identity())
        if layout.tensor > 1:
            split = functools.partial(split_params, specs=loss_fn.specs, num_devices=layout.tensor)
            jax.eval_shape(split, params)

    def measure(self, dataset: DataSource, progress: bool) -> Int64[np.ndarray, " N *2"]:
        """The lengths of the samples: one each, or two."""
        length_fn: Any = self.length_fn
        if length_fn is None:
            named = {axes: name for name, axes in reversed([*(self.fields or {}).items()])}  # the first of each
            of_fields = (named.get("source"), named.get("target"))
            length_fn = of_fields if all(of_fields) else named.get("length")
        if length_fn is None and hasattr(dataset, "lengths"):
            return check_pair_lengths(dataset.lengths) if np.ndim(dataset.lengths) == 2 else known_lengths(dataset)
        length_fn = length_fn or len
        if callable(length_fn) and length_fn is not len and _gives_two(length_fn, dataset):
            length_fn = PairLengths(length_fn)
        return measure_lengths(dataset, length_fn, progress=progress, on_bad_sample=self.on_bad_sample)

    def with_fields_of(self, dataset: DataSource, lengths: Int64[np.ndarray, " N *2"], *, is_packed: bool) -> Task:
        """The same with what collates the fields of the samples, if they have any."""
        if self.collate is not None:
            return self
        sides = lengths.reshape(len(lengths), -1)
        ids = dict.fromkeys([0, *sides.argmin(axis=0).tolist(), *sides.argmax(axis=0).tolist()])
        ids |= dict.fromkeys([len(lengths) - 1, *spread_over(len(lengths))])
        known = lengths if lengths.ndim == 2 else None  # without them, two lengths cannot be told apart
        fields = find_fields_among(dataset, ids, self.fields, sides.shape[1], is_packed=is_packed, lengths=known)
        return self if fields is None else dataclasses.replace(self, fields=None, collate=CollateFields(fields))

    @property
    def compares_lengths(self) -> bool:
        """Whether samples tell their length, so the loader can compare it with the plan."""
        return isinstance(self.collate, CollateFields) or (self.collate is None and self.length_fn is None)

    def batch_spec_for(self, plans: Mapping[str, Plan], datasets: Mapping[str, DataSource]) -> BatchSpec:
        """The shapes of the batches of plans with the same buckets, each with the dataset of its name."""
        if self.batch_spec is not None:
            return self.batch_spec
        if self.collate is None:
            return plan_specs(next(iter(plans.values())))
        if isinstance(self.collate, CollateFields):
            return plan_specs(next(iter(plans.values())), self.collate.fields)
        return spec_of_steps({plan: datasets[name] for name, plan in plans.items()}, self.collate, self.on_bad_sample)

    def train_step(self, optimizer: optax.GradientTransformation, placement: Placement | None = None) -> TrainStep:
        """The step to compile, which also makes the first state."""
        assert self.loss_fn is not None  # there is one after `with_decoder`
        options: dict[str, Any] = {"trainable": self.trainable, "eval_params": self.eval_params}
        return make_train_step(self.loss_fn, optimizer, layout=placement, **options)

    def init_state(self, step: TrainStep, seed: int) -> TrainState:
        """The state before the first step; it has keys if a loss takes one."""
        losses = [] if self.is_language_model else [self.loss_fn, self.eval_loss_fn]
        takes_key = any(takes_argument(_whole_loss(loss_fn), "key") for loss_fn in losses if loss_fn is not None)
        return step.init(self.params, extra=self.extra, seed=seed if takes_key else None)

    def form_of(self, state: TrainState, step: TrainStep) -> PortableForm | None:
        """The form of states on one device, which checkpoints hold; None if states have it already."""
        if step.placement is None or step.placement.layout.is_data_parallel:
            return None
        return portable_form(
            state,
            self.model,
            step.optimizer,
            layout=step.placement,
            params=self.params,
            trainable=self.trainable,
        )

    def eval_step(self, placement: Placement | None = None) -> StepFn:
        """The step of evaluations to compile."""
        loss_fn, trained = self.eval_loss_fn or self.loss_fn, self.model
        assert loss_fn is not None
        if placement is None or placement.layout.is_data_parallel:
            return make_eval_step(loss_fn, layout=placement)
        layout = placement.layout
        model = model_of(loss_fn)
        if isinstance(model, LayeredModel) and isinstance(trained, LayeredModel) and model.stack is trained.stack:
            return make_eval_step(loss_fn, layout=placement)
        step = make_eval_step(loss_fn, layout=place(Layout(), placement.mesh, axes={"data": "data"}))

        def eval_step(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
            params = portable_params(state.params, self.shapes, layout=layout, model=trained)
            return state, step(state._replace(params=params), batch)[1]

        return eval_step

    @property
    def model(self) -> Any:
        """The loss function or model by layers whose parameters are trained."""
        return model_of(self.loss_fn)

    @property
    def shapes(self) -> Any:
        """Those of the parameters, of which nothing is read."""
        return jax.eval_shape(lambda params: params, self.params)


def _built_in_loss(model: DecoderConfig, layout: Layout | None) -> LossFn | LayeredModel:
    """The loss of the built-in model, by layers but on devices that all hold the whole state."""
    if layout is None or (layout.is_data_parallel and layout.remat_in_force == "none"):
        return make_loss_fn(model)
    return layered(model)


def _whole_loss(loss_fn: LossFn | LayeredModel | StepLoss | None) -> LossFn:
    """The loss of the whole model, on one device; of a `StepLoss` what it takes and where it stands."""
    model = model_of(loss_fn)
    assert model is not None  # there is one after `with_decoder`
    return layered_loss_fn(model) if isinstance(model, LayeredModel) else model


def _gives_two(length_fn: Any, dataset: DataSource) -> bool:
    """Whether a function gives two lengths of the first sample; what it raises is told where all are measured."""
    try:
        return np.shape(length_fn(dataset[0])) == (2,)
    except Exception:
        return False


class TrainingData(NamedTuple):
    """The data of a training."""

    train: DataSource
    evaluation: dict[str, DataSource]  # by name; the first is "held_out", which is split off the data
    num_values: int  # how many values a token can have
    content_keys: dict[str, str]  # of each file, of the tokenizer and of the model, by its name
    skipped: list[dict[str, Any]]  # records of files that are no samples, as a run lists them

    def describe(self, lengths: Int64[np.ndarray, " N *2"]) -> list[str]:
        """The lengths of the samples to train on, how many others there are, and what is none."""
        others = ", ".join(f"{len(dataset):,} of {name}" for name, dataset in self.evaluation.items())
        bad = [f"{each['file']}, {each['record']}: {each['reason']}" for each in self.skipped]
        left_out = [f"{len(bad):,} records that are no samples are left out: {list_first(bad, '; ')}"] if bad else []
        # A second length may be 0, but not both.
        histogram = length_histogram(lengths if lengths.ndim == 1 else lengths.sum(axis=1))
        both = ["of both lengths together:"] if lengths.ndim == 2 else []
        evaluated = [f"evaluated on other samples: {others}"] if others else []
        return [*both, histogram, *evaluated, *left_out]


class SamplesOfLengths:
    """Stand for samples to train on of which only the lengths are known, int64[N]; nothing is held out."""

    def __init__(self, lengths: Int64[np.ndarray, " N"]):
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> np.ndarray:
        return np.zeros(self.lengths[i], np.int32)


def open_training_data(config: FitConfig, given: Split | SamplesOfLengths | None = None) -> TrainingData:
    """Opens the given samples, the files of the settings, each split by itself, or the built-in corpus."""
    own, num_values = config.data, config.decoder.num_values
    if given is not None and own.files:
        raise UserError(
            f"data are given twice, as an argument and as settings: {', '.join(map(without_credentials, own.files))}"
        )
    if given is None and not own.files and has_weights(config.model) and num_values != NUM_BYTES:
        raise UserError(f"model ({config.model}) has other tokens than the bytes of the built-in corpus: give files=")
    split: Split | SamplesOfLengths
    opened = {path: _open(path, config) for path in dict.fromkeys([*own.files, *own.eval_data])}
    if (error := roles_error([*opened.values()])) is not None:
        raise error
    if own.files:
        splits = [_split(without_credentials(path), opened[path], own.held_out_fraction) for path in own.files]
        mixed = Mixture(
            [split.train for split in splits],
            own.weights or None,
            num_samples=own.mixture_samples,
            seed=config.seed,
            loss_weights=own.loss_weights or None,
        )
        split = Split(mixed, Mixture([split.held_out for split in splits]))
    elif given is None:
        split = split_held_out(stdlib_functions(progress=config.progress), own.held_out_fraction)
    else:
        split = given
    names = distinct_names(opened)
    keys = {name: dataset.content_key for name, dataset in zip(names, opened.values(), strict=True)}
    if (tokenizer := _tokenizer_file(config)) is not None:
        keys[str(own.tokenizer)] = content_key(regular_file(tokenizer))
    if config.model is not None and not has_checkpoint(config.directory.resumed):  # of a run with one it is not read
        keys[str(config.model)] = model_key(config.model)
    sets: dict[str, DataSource] = {evaluation_name(path): opened[path] for path in own.eval_data}
    return TrainingData(
        train=split if isinstance(split, SamplesOfLengths) else split.train,
        evaluation=sets if isinstance(split, SamplesOfLengths) else {HELD_OUT: split.held_out} | sets,
        num_values=max([config.decoder.num_values, *(dataset.num_values or 0 for dataset in opened.values())]),
        content_keys=keys,
        skipped=[
            {"step": None, "file": name, "record": record, "reason": reason}
            for name, dataset in zip(names, opened.values(), strict=True)
            for record, reason in dataset.skipped
        ],
    )


def _open(path: Path | str, config: FitConfig) -> StoredDataset:
    """Opens a file or directory by the settings."""
    tokenizer, model, num_values = _tokenizer_file(config), config.model, config.decoder.num_values
    dataset = open_stored(
        path,
        field=config.data.field,
        template=config.data.template,
        loss_on=config.data.loss_on,
        tokenizer=tokenizer,
        num_values=None if tokenizer is not None and model is None else num_values,
        end_token=config.data.end_token,
        block_length=config.plan.longest,
        num_workers=config.data.num_workers,
        progress=config.progress,
        on_bad_sample=config.data.on_bad_sample,
        max_bad_fraction=config.data.max_bad_fraction,
    )
    path = without_credentials(path)
    if dataset.num_values is None:
        raise UserError(
            f"{path} holds tokens and no text, which the tokenizer {config.data.tokenizer} could not have made"
        )
    if model is not None and dataset.num_values > num_values:
        raise UserError(
            f"{path} has tokens up to {dataset.num_values - 1:,}, and those of {model} are below {num_values:,}"
        )
    if has_weights(model) and tokenizer is None and dataset.num_values == NUM_BYTES != num_values:
        raise UserError(
            f"{path} holds text, and there is no {TOKENIZER} in {model}: give tokenizer=, the one of this model"
        )
    return dataset


def _tokenizer_file(config: FitConfig) -> Path | None:
    """The tokenizer of the settings, or the copy that the resumed run has of it, if that is gone."""
    own, resumed = config.data.tokenizer, config.directory.resumed
    copy = None if resumed is None else resumed / MODEL_DIR / TOKENIZER
    return copy if own is not None and copy is not None and not own.exists() and copy.exists() else own


def _split(path: Path | str, dataset: DataSource, fraction: float) -> Split:
    try:
        return split_held_out(dataset, fraction)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


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

    def batch_spec(self, epoch: int | None = 0) -> BatchSpec:
        """The shapes of the batches of an epoch; None: of evaluations."""
        if epoch is None:
            return self.task.batch_spec_for(self.training_plan.eval_plans, self.data.evaluation)
        return self.task.batch_spec_for({"": self.training_plan.plan_of_epoch(epoch)}, {"": self.data.train})

    def load(
        self, plan: Plan | Callable[[int], Plan], dataset: DataSource, lengths: Int64[np.ndarray, " N"], **where: Any
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
            num_values={"tokens": self.data.num_values} if self.task.is_language_model else self.task.num_values,
            **where,
        )


def prepare(
    config: FitConfig, task: Task, given: Split | SamplesOfLengths | None, placement: Placement | None
) -> Prepared:
    """Opens the given data or those of the settings, chooses shapes and layout, and plans; prints lengths and plan."""
    _check_shards(config, placement)
    leaves_packing = config.plan.packing == "auto" and task.loss_fn is not None
    if leaves_packing:  # a loss that ignores segments would attend across samples, in silence
        config = dataclasses.replace(config, plan=dataclasses.replace(config.plan, packing="padded"))
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
    if cluster is None and config.hardware.parallel == AUTO and num_devices > 1:
        raise UserError(f"parallel='auto' needs cluster=: a file of one, or a known one of {', '.join(PRESETS)}")
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
        task = task.with_fields_of(data.train, lengths, is_packed=config.plan.packing_in_force[0] != "padded")
        _check_compared(config, task)
        say("Corpus", *data.describe(lengths))
        eval_lengths = {name: measure(dataset, False) for name, dataset in data.evaluation.items()}
    agree("the fields of samples", repr(task.collate) if task.collate is not None and is_own(task.collate) else "none")
    with together("read the model"):
        params = initial_params(config) if task.loss_fn is None else None
    _agree_on_contents(data)
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
        packs = _ONE_A_ROW if leaves_packing else ""
        notes = [shapes.reason, packs, note_on_candidates(config.plan, shapes, lengths)]
        notes.append(note_on_overlong(plan, lengths))
        if plan.num_truncated and config.data.files and config.data.loss_on and lengths.ndim == 1:
            notes.append(_note_on_cut_answers(plan, lengths, data.train, config))
        say("Plan", report, training_plan.describe(), *filter(None, notes))
    prepared = Prepared(config, shapes, task, data, training_plan, lengths, eval_lengths, compile_options, placement)
    if config.hardware.parallel == AUTO:
        if placement is not None and num_devices > 1:
            assert cluster is not None
            layout = _choose_layout(prepared._replace(task=with_layout(Layout(data=2, zero=3))), placement, cluster)
            placement = place(layout, placement.mesh.devices.flatten().tolist())
        parallel = None if layout is None else str(layout)
        hardware = dataclasses.replace(config.hardware, parallel=parallel, cluster=None)
        config = dataclasses.replace(config, hardware=hardware)
        prepared = prepared._replace(config=config, task=with_layout(layout), placement=placement)
    with together("plan the training"):
        if layout is not None:
            _check_buckets(layout, training_plan, {*training_plan.buckets, *training_plan.eval_buckets})
        raise_if_interrupted()
    return prepared


def _agree_on_contents(data: TrainingData) -> None:
    """Raises ValueError that lists the files, tokenizer, model and datasets whose contents differ between processes."""
    if jax.process_count() == 1:
        return
    agree("the files of data and model", json.dumps([*data.content_keys]))
    given = {"the training data": data.train, **{f"the data of {name}": each for name, each in data.evaluation.items()}}
    known = data.content_keys | {name: getattr(each, "content_key", None) for name, each in given.items()}
    of_processes = gather_arrays(np.array([bytes.fromhex(key or "") for key in known.values()], "S32"))
    keys = {name: {*column.tolist()} - {b""} for name, column in zip(known, of_processes.T, strict=True)}
    if different := [name for name, found in keys.items() if len(found) > 1]:
        raise UserError(f"processes have different contents of {list_first(different)}: give all the same")


def _note_on_cut_answers(
    plan: Plan, lengths: Int64[np.ndarray, " N"], dataset: DataSource, config: FitConfig
) -> str | None:
    """How many samples have no token left to learn from after they are cut; None if all have."""
    (longest,) = np.max([bucket.lengths for bucket in plan.buckets.shapes], axis=0)
    too_long = Subset(dataset, np.flatnonzero(lengths > longest))
    options: dict[str, Any] = {"num_workers": config.data.num_workers, "progress": config.progress}
    function = functools.partial(_num_learned, int(longest))
    num_learned = measure_integers(too_long, function, "learned tokens", shards=None, shard_size=1, **options)
    num_without = int((num_learned == 0).sum())
    return f"{num_without:,} of them are cut before the first token to learn from" if num_without else None


def _num_learned(longest: int, sample: WeightedTokens) -> int:
    """How many tokens of a cut sample have weight in the loss."""
    return int((sample.weights[:longest] > 0).sum())


def _check_compared(config: FitConfig, task: Task) -> None:
    """Raises ValueError for settings that need samples to be the library's, where only the user knows them."""
    own = {"collate": task.collate is not None and not is_own(task.collate), "batch_spec": task.batch_spec is not None}
    if config.plan.packing_in_force[0] == "auto" and any(own.values()):
        given = list_first(name for name, is_given in own.items() if is_given)
        raise UserError(f'packing="auto" makes batches of samples or of packed rows, and {given} of yours is for one')
    if config.data.on_bad_sample == "skip" and not own["collate"] and not task.compares_lengths:
        raise UserError('on_bad_sample="skip" compares `len()` of samples with the plan, not a length_fn of your own')


def _refuse_changed(run_dir: Path, data: TrainingData, tokenizer: Path | None) -> None:
    """Raises ValueError for files that a run began with other content of; before shapes are, which would not fit."""
    saved = load_config(run_dir / "config.json")  # settings that name other files are refused as such, later
    names = {*distinct_names((*saved.data.files, *saved.data.eval_data)), str(saved.data.tokenizer), str(saved.model)}
    changed = changed_contents(run_dir, {name: key for name, key in data.content_keys.items() if name in names})
    if str(tokenizer) in changed:  # which is a part of all other keys
        changed = [str(tokenizer)]
    if changed:
        raise UserError(f"{run_dir} began with another content of {list_first(changed)}: put it back, or begin another")


def _choose_layout(prepared: Prepared, placement: Placement, cluster: Cluster) -> Layout:
    """The layout of the fewest estimated seconds that takes evaluations; the same on all processes."""
    config, task, training_plan = prepared.config, prepared.task, prepared.training_plan
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
            cost=config.plan.cost,
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
    """Prints what a step of the largest shape holds on a device, and what it sends, for which it is compiled."""
    config, task, placement = prepared.config, prepared.task, prepared.placement
    training_plan, batch_spec = prepared.training_plan, prepared.batch_spec()
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
        batch_spec=batch_spec,
        num_microbatches=config.plan.num_microbatches_in_force,
    )
    say(f"Memory of a step of {'×'.join(map(str, bucket))} on {layout}", str(memory))
    if placement is None:
        return
    train_step = task.train_step(training_plan.optimizer, placement)
    compiled = compile_buckets(
        train_step,
        task.init_state(train_step, config.seed),
        BatchShapes(
            [bucket], num_microbatches=config.plan.num_microbatches_in_force, layout=placement, batch_spec=batch_spec
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
        task.loss_fn,
        training_plan.optimizer,
        BatchShapes(training_plan.buckets, num_microbatches=config.plan.num_microbatches_in_force),
        target=target,
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
        placement.batch_shardings(np.empty(config.plan.num_microbatches_in_force))


# Measured with the built-in model on a CPU with two cores: compiling a step and its evaluation takes some 13 times as
# long as lowering a second shape, and a step has half the speed of a product of matrices.
_COMPILING_OVER_LOWERING = 13.0
_SHARE_OF_PEAK = 0.5
_MATRIX_SIZE = 1024


def choose_shapes(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N *2"], num_devices: int = 1
) -> ChosenShapes:
    """The shapes for the lengths of the samples; the same on all processes, those of process 0, and after a resume."""
    plan, run_dir = config.plan, config.directory.resumed
    if run_dir is not None and is_run_dir(run_dir):
        return load_dataclass(ChosenShapes, run_dir / SHAPES_FILE, "chosen shapes")
    if lengths.ndim == 2 or not plan.chooses_by_seconds or config.target is not None:
        with together("plan the training"):
            return shapes_for(plan, lengths, seed=config.seed)
    with together("choose the shapes"):
        cost, compile_s, known = plan.cost, plan.compile_seconds, "as given"
        if cost is None or compile_s is None:
            estimated, estimated_s = _estimate(config, task, data, lengths, num_devices)
            cost, compile_s, known = cost or estimated, estimated_s, "estimated"
        most_epochs = config.num_epochs or (1 if config.max_steps is None else np.inf)
        # Steps are nearly full, whatever the shapes.
        most_tokens = (config.max_steps or np.inf) * plan.num_microbatches_in_force * plan.max_tokens
        chosen = shapes_for(
            plan,
            lengths,
            seed=config.seed,
            budget=dataclasses.replace(plan.budget, cost=cost, compile_seconds=compile_s),
            num_epochs=float(min(most_epochs, most_tokens / lengths.sum())),
            whole_below=WHOLE_BELOW if jax.default_backend() == "cpu" else 0,
        )
        chosen = dataclasses.replace(chosen, reason=f"{chosen.reason} ({compile_s:.1f} s a shape, {known})")
    shared = json.loads(broadcast_text("the chosen shapes", json.dumps(dataclasses.asdict(chosen))))
    return ChosenShapes(**shared | {"buckets": tuple(map(tuple, shared["buckets"]))})


def _estimate(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N"], num_devices: int
) -> tuple[CostModel, float]:
    """Seconds of a microbatch, and of compiling a shape, with a usual optimizer."""
    buckets, batch_spec = _probe(config, task, data, lengths)
    step = task.train_step(task.optimizer or optimizer_for(task.shapes, optax.adamw(1e-3)))
    state = dataclasses.replace(task, params=task.shapes).init_state(step, config.seed)
    shapes = BatchShapes(buckets, num_microbatches=config.plan.num_microbatches_in_force, batch_spec=batch_spec)
    return estimate_costs(make_step_compiler(step, state, shapes, config.compile), buckets, num_devices)


def _probe(
    config: FitConfig, task: Task, data: TrainingData, lengths: Int64[np.ndarray, " N"]
) -> tuple[tuple[AnyBucket, ...], BatchSpec]:
    """Two shapes of which the operations can be counted, and the batches of them."""
    plan = config.plan
    of_plan: dict[str, Any] = {"num_microbatches": plan.num_microbatches_in_force, "order": "length"}
    longest = min(int(lengths.max()), plan.longest)
    if task.collate is not None and not is_own(task.collate) and task.batch_spec is None:  # which takes samples
        limits = dataclasses.replace(plan.budget, strategy="quantile", max_shapes=2, max_length=longest)
        of_plan["overlong"] = plan.padded_overlong
        made = make_plan(lengths, make_buckets(lengths, limits, overlong=plan.padded_overlong), **of_plan)
    else:
        # Rows that attention computes as a whole: of what it skips by the data, nothing could be counted.
        multiple = plan.length_multiple
        most = max(1, min(-(-longest // multiple), (WHOLE_BELOW - 1) // multiple))
        sizes = sorted({max(1, most // part) * multiple for part in (1, 2)})
        made = make_plan(sizes, [Bucket(max(1, plan.max_tokens // size), size) for size in sizes], **of_plan)
    return made.buckets.shapes, task.batch_spec_for({"": made}, {"": data.train})


def estimate_costs(
    step_compiler: StepCompiler, buckets: Sequence[AnyBucket], num_devices: int = 1
) -> tuple[CostModel, float]:
    """Seconds of a microbatch, and of compiling a shape, from lowering a step on one device for two lengths."""
    lowered = [step_compiler.lower(bucket) for bucket in buckets]
    operations = np.array([_operations(step_compiler, each) for each in lowered])
    if not (operations > 0).all():
        raise UserError(
            "shapes are chosen by seconds, and the operations of this step cannot be counted: give a cost model "
            '(cost_model), or a number for max_shapes and packing="padded"'
        )
    of_token = operations / step_compiler.shapes.num_microbatches / [each.padded_tokens for each in buckets]
    linear, quadratic = float(of_token.mean()), 0.0
    if len(buckets) > 1:
        line = np.polyfit([bucket.lengths[0] for bucket in buckets], of_token, 1).tolist()
        if min(line) >= 0:
            quadratic, linear = line
    seconds = 1.0 / (_SHARE_OF_PEAK * _operations_per_second(step_compiler.device) * num_devices)
    cost = CostModel(0.0, linear * seconds, quadratic * seconds, device=step_compiler.device_text, model="estimated")
    return cost, (1 + _COMPILING_OVER_LOWERING) * min(each.seconds for each in lowered)


def _operations(step_compiler: StepCompiler, lowered: LoweredBucket) -> float:
    """Those of all products of matrices of a step, on any platform; where there are none, what XLA counts."""
    # XLA counts the body of a loop once, and neither what kernels compute nor, on most platforms, anything before it
    # has compiled.
    products = count_operations(lowered.jaxpr.jaxpr, ())["flops"]
    num_microbatches = step_compiler.shapes.num_microbatches
    return float(products or num_microbatches * (lowered.program.cost_analysis() or {}).get("flops", 0.0))


def _operations_per_second(device: jax.Device) -> float:
    """Floating-point operations a second of a product of matrices in float32."""
    matrix = jax.device_put(jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    # The first also compiles.
    seconds = timeit.repeat(lambda: multiply(matrix, matrix).block_until_ready(), number=1, repeat=4)
    return 2 * _MATRIX_SIZE**3 / min(seconds)
