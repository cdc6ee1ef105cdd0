"""Training on samples of different lengths in a few static shapes.

A table of contents: each name is imported from its module when it is first used.
"""

# fmt: off
# names that belong together share a line

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common import __version__ as __version__
from jvarlen._common.lazy_imports import lazy_imports

if TYPE_CHECKING:
    from jvarlen._common.checks import UserError
    from jvarlen.attention.attention import attend
    from jvarlen.compiling.compile import compile_buckets
    from jvarlen.compiling.compile_options import CompileOptions
    from jvarlen.compiling.compiled_buckets import CompiledBuckets
    from jvarlen.compiling.recompiles import RecompileError, no_recompiles
    from jvarlen.compiling.unplanned import UnplannedShapeError
    from jvarlen.data.measure import measure_lengths
    from jvarlen.data.mixtures import Mixture
    from jvarlen.distributed.layout import Layout
    from jvarlen.distributed.placement import place
    from jvarlen.estimates.choice import choose_layout
    from jvarlen.inference.evaluate import evaluate
    from jvarlen.inference.predict import predict
    from jvarlen.loading.loader import Loader, load
    from jvarlen.parallel.evaluation import make_eval_step
    from jvarlen.parallel.layers import LayeredModel
    from jvarlen.parallel.train import TrainStep, make_train_step
    from jvarlen.planning.balance import balance_plan
    from jvarlen.planning.batching import batch_by_tokens
    from jvarlen.planning.buckets import Bucket
    from jvarlen.planning.budget import Budget
    from jvarlen.planning.cost_model import CostModel, fit_cost_model
    from jvarlen.planning.make_buckets import make_buckets
    from jvarlen.planning.make_plan import make_plan, plan_step
    from jvarlen.planning.order import Order, sample_order
    from jvarlen.planning.packing import Packing, pack_samples
    from jvarlen.planning.plan import Plan
    from jvarlen.planning.streams import stream_batches
    from jvarlen.runs.config import FitConfig
    from jvarlen.runs.fit import fit
    from jvarlen.sorting.sample_sort import sample_sort
    from jvarlen.targets.compile_for import compile_for
    from jvarlen.training.optimizers import scale_by_batch_size, scale_by_planned_rate, with_float32_master
    from jvarlen.training.rates import lr_scale, lr_sequence
    from jvarlen.training.train_state import Metrics, MetricSums, TrainState

__all__ = [
    "Bucket", "Budget", "CompileOptions", "CompiledBuckets", "CostModel", "FitConfig", "LayeredModel", "Layout",
    "Loader", "MetricSums", "Metrics", "Mixture", "Order", "Packing", "Plan", "RecompileError", "TrainState",
    "TrainStep", "UnplannedShapeError", "UserError", "attend", "balance_plan", "batch_by_tokens", "choose_layout",
    "compile_buckets", "compile_for", "evaluate", "fit", "fit_cost_model", "load", "lr_scale", "lr_sequence",
    "make_buckets", "make_eval_step", "make_plan", "make_train_step", "measure_lengths", "no_recompiles",
    "pack_samples", "place", "plan_step", "predict", "sample_order", "sample_sort", "scale_by_batch_size",
    "scale_by_planned_rate", "stream_batches", "with_float32_master",
]  # fmt: skip

__getattr__, __dir__ = lazy_imports(__name__)
