"""The model that is trained, and the batches that it is trained on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jaxtyping import Int64

from jvarlen._common.checks import UserError
from jvarlen._common.types import Batch, Extra, Params, Shapes
from jvarlen.batches.fields import FieldAxes, axes_of
from jvarlen.batches.shapes import BatchSpec, plan_specs
from jvarlen.data.measure import LengthFn, measure_lengths
from jvarlen.data.samples import OnBadSample
from jvarlen.distributed.layout import Layout
from jvarlen.distributed.placement import Placement, place
from jvarlen.loading.collate import CollateFields, CollateFn
from jvarlen.loading.fields import find_fields_among, spread_over
from jvarlen.loading.plan_source import read_spec
from jvarlen.models import DecoderConfig, layered, make_loss_fn
from jvarlen.parallel.evaluation import make_eval_step
from jvarlen.parallel.layers import LayeredModel, StepLoss, layered_loss_fn, model_of, needs_key
from jvarlen.parallel.layout_checks import check_layout
from jvarlen.parallel.portable import PortableForm, portable_params
from jvarlen.parallel.state_layout import extend_params, stacked_for
from jvarlen.parallel.train import TrainStep, make_train_step
from jvarlen.planning.lengths import DataSource, check_sample_lengths
from jvarlen.planning.plan import Plan
from jvarlen.runs.model import model_shapes
from jvarlen.training.averages import EvalParams
from jvarlen.training.losses import LossFn, takes_argument
from jvarlen.training.step import StepFn
from jvarlen.training.train_state import Metrics, TrainState

__all__ = ["Task"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The model that is trained, and the batches that it is trained on: the arguments of `fit`."""

    loss_fn: LossFn | LayeredModel | StepLoss | None = None  # None: the built-in language model, until `with_decoder`
    params: Params = None
    eval_loss_fn: LossFn | LayeredModel | StepLoss | None = None
    extra: Extra = None
    optimizer: optax.GradientTransformation | None = None
    fields: FieldAxes | None = None
    collate: CollateFn | None = None
    batch_spec: BatchSpec | None = None
    length_fn: LengthFn | None = None
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

    def with_decoder(self, decoder: DecoderConfig, params: Params, layout: Layout | None = None) -> Task:
        """The same with the built-in model, unless the user gave one."""
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
                if size % layout.tensor and (name == "num_heads" or layout.tensor % size):
                    raise UserError(
                        f"tensor{layout.tensor} of the layout {layout} does not divide the model's {name} ({size}), "
                        f"of a config.json num_{of_file}_heads"
                    )
        check_layout(layout, params, loss_fn)
        loss_fn, params, *_ = stacked_for(layout, loss_fn, params, optax.identity())
        jax.eval_shape(lambda params: extend_params(params, loss_fn, layout), params)

    def measure(self, dataset: DataSource, progress: bool) -> Int64[np.ndarray, " N *2"]:
        """The lengths of the samples: one each, or two."""
        length_fn: Any = self.length_fn
        if length_fn is None:
            of_names = reversed([*(self.fields or {}).items()])
            named = {axes_of(said): name for name, said in of_names}  # the first of each
            of_fields = (named.get("source"), named.get("target"))
            length_fn = of_fields if all(of_fields) else named.get("length")
        if length_fn is None and hasattr(dataset, "lengths"):
            lengths = check_sample_lengths(dataset.lengths)
        else:
            lengths = measure_lengths(dataset, length_fn or len, progress=progress, on_bad_sample=self.on_bad_sample)
        if lengths.ndim == 2 and lengths.shape[1] > 2:
            raise UserError(f"fit trains on samples of one or two lengths, not of {lengths.shape[1]}")
        return lengths

    def with_fields_of(self, dataset: DataSource, lengths: Int64[np.ndarray, " N *2"], *, is_packed: bool) -> Task:
        """The same with a collate function for the fields of the samples, if they have any."""
        if self.collate is not None:
            return self
        sides = lengths.reshape(len(lengths), -1)
        ids = dict.fromkeys([0, *sides.argmin(axis=0).tolist(), *sides.argmax(axis=0).tolist()])
        ids |= dict.fromkeys([len(lengths) - 1, *spread_over(len(lengths))])
        known = lengths if lengths.ndim == 2 else None  # without them, nothing tells two lengths apart
        fields = find_fields_among(dataset, ids, self.fields, sides.shape[1], is_packed=is_packed, lengths=known)
        return self if fields is None else dataclasses.replace(self, fields=None, collate=CollateFields(fields))

    @property
    def compares_lengths(self) -> bool:
        """Whether samples know their length, so that the loader can compare it with the plan."""
        return isinstance(self.collate, CollateFields) or (self.collate is None and self.length_fn is None)

    def batch_spec_for(self, plans: Mapping[str, Plan], datasets: Mapping[str, DataSource]) -> BatchSpec:
        """The shapes of the batches of plans with the same buckets, each with the dataset of its name."""
        if self.batch_spec is not None:
            return self.batch_spec
        if self.collate is None:
            return plan_specs(next(iter(plans.values())))
        if isinstance(self.collate, CollateFields):
            return plan_specs(next(iter(plans.values())), self.collate.fields)
        return read_spec({plan: datasets[name] for name, plan in plans.items()}, self.collate, self.on_bad_sample)

    def train_step(self, optimizer: optax.GradientTransformation, placement: Placement | None = None) -> TrainStep:
        """The step to compile, which also makes the first state."""
        assert self.loss_fn is not None  # there is one after `with_decoder`
        return make_train_step(
            self.loss_fn, optimizer, layout=placement, trainable=self.trainable, eval_params=self.eval_params
        )

    def init_state(self, step: TrainStep, seed: int) -> TrainState:
        """The state before the first step."""
        return step.init(self.params, extra=self.extra, seed=self.seed_of_keys(seed))

    def seed_of_keys(self, seed: int) -> int | None:
        """The seed, if a loss takes keys; else None."""
        losses = [] if self.is_language_model else [self.loss_fn, self.eval_loss_fn]
        takes_key = any(takes_argument(_whole_loss(loss_fn), "key") for loss_fn in losses if loss_fn is not None)
        return seed if takes_key or needs_key(self.model) else None

    def form_of(self, state: TrainState, step: TrainStep) -> PortableForm | None:
        """Converts states to the form on one device, which checkpoints hold; None if they have it already."""
        return step.portable_form(state, self.params)

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

        def eval_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
            params = portable_params(state.params, self.shapes, layout=layout, model=trained)
            return state, step(state._replace(params=params), batch)[1]

        return eval_step

    @property
    def model(self) -> LossFn | LayeredModel:
        """The loss function or model by layers whose parameters are trained."""
        return model_of(self.loss_fn)

    @property
    def shapes(self) -> Shapes:
        """The shapes of the parameters; nothing of the arrays is read."""
        return jax.eval_shape(lambda params: params, self.params)


def _built_in_loss(model: DecoderConfig, layout: Layout | None) -> LossFn | LayeredModel:
    """The loss of the built-in model: whole where every device holds the whole state, otherwise by layers."""
    if layout is None or (layout.is_data_parallel and layout.remat_in_force == "none"):
        return make_loss_fn(model)
    return layered(model)


def _whole_loss(loss_fn: LossFn | LayeredModel | StepLoss | None) -> LossFn:
    """The loss of the whole model on one device, also for a model by layers or a `StepLoss`."""
    model = model_of(loss_fn)
    assert model is not None  # there is one after `with_decoder`
    return layered_loss_fn(model) if isinstance(model, LayeredModel) else model
