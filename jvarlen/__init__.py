"""Training on samples of different lengths in a few static shapes.

A table of contents: each name is imported from its module when it is first used.
"""

# fmt: off
# ruff: noqa: I001  # names that belong together share a line

from __future__ import annotations

from typing import TYPE_CHECKING

from jvarlen._common.lazy_imports import lazy_imports
from jvarlen._version import __version__ as __version__

if TYPE_CHECKING:
    from jvarlen._common.checks import UserError
    from jvarlen._common.interrupts import exit_code_of_interrupt, remembered_interrupts
    from jvarlen.attention.attention import attend, attend_within_segments
    from jvarlen.attention.masks import attention_mask, padding_mask, segment_mask
    from jvarlen.batches.batches import Batch, PackedBatch, PackedPairBatch, PairBatch
    from jvarlen.batches.batches import full_batch
    from jvarlen.compiling.program_store import use_compilation_cache
    from jvarlen.compiling.compile import compile_buckets, load_compiled
    from jvarlen.compiling.compile_options import CompileOptions
    from jvarlen.compiling.compiled_buckets import CompiledBuckets
    from jvarlen.compiling.report import CompileReport
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.arguments import UnplannedShapeError
    from jvarlen.compiling.recompiles import RecompileError, no_recompiles
    from jvarlen.data.measure import measure_difficulty, measure_lengths
    from jvarlen.data.mixtures import Mixture, mixture_counts
    from jvarlen.distributed.processes import agree, initialize_processes, together
    from jvarlen.loading.collate import (
        StepSamples, pack_pairs_to_bucket, pack_to_bucket, pad_pairs_to_bucket, pad_to_bucket,
    )
    from jvarlen.loading.loader import Loader, load
    from jvarlen.loading.plan_source import planned_ids_digest
    from jvarlen.parallel.train import TrainStep, make_eval_step, make_train_step
    from jvarlen.planning.balance import assign_microbatches, balance_plan, packed_row_costs
    from jvarlen.planning.batching import Batches, batch_by_tokens
    from jvarlen.planning.budget import Budget
    from jvarlen.planning.buckets import Bucket, PairBucket, make_buckets
    from jvarlen.planning.cost_model import CostModel, fit_cost_model
    from jvarlen.planning.lengths import check_lengths
    from jvarlen.planning.order import Order, sample_order
    from jvarlen.planning.pacing import ValuePacing, competence_pacing, discrete_pacing, linear_pacing, root_pacing
    from jvarlen.planning.packing import PackedHistogram, Packing, pack_samples
    from jvarlen.planning.row_lengths import choose_row_lengths
    from jvarlen.planning.pair_buckets import make_pair_buckets
    from jvarlen.planning.plan import Plan, make_plan
    from jvarlen.planning.samples import WeightedTokens
    from jvarlen.planning.streams import StreamBatches, StreamStep, stream_batches
    from jvarlen.runs.config import FitConfig
    from jvarlen.runs.fit import FitResult, fit
    from jvarlen.sorting.sample_sort import local_sort, sample_sort
    from jvarlen.sorting.sharded_rows import shard_local_rows
    from jvarlen.targets.choice import choose_layout
    from jvarlen.targets.cluster import Cluster
    from jvarlen.targets.links import measure_cluster
    from jvarlen.targets.model_file import ModelFile
    from jvarlen.training.optimizers import planned_schedule, scale_by_batch_size, with_float32_master
    from jvarlen.training.rates import lr_scale, lr_sequence
    from jvarlen.training.train_state import Metrics, TrainState

_NAMES_OF = {
    "_common.checks": ("UserError",),
    "_common.interrupts": ("exit_code_of_interrupt", "remembered_interrupts",),
    "attention.attention": ("attend", "attend_within_segments",),
    "attention.masks": ("attention_mask", "padding_mask", "segment_mask",),
    "batches.batches": (
        "Batch", "PackedBatch", "PackedPairBatch", "PairBatch",
        "full_batch",
    ),
    "compiling.program_store": ("use_compilation_cache",),
    "compiling.compile": ("compile_buckets", "load_compiled",),
    "compiling.compile_options": ("CompileOptions",),
    "compiling.compiled_buckets": ("CompiledBuckets",),
    "compiling.report": ("CompileReport",),
    "compiling.measure": ("measure_buckets",),
    "compiling.arguments": ("UnplannedShapeError",),
    "compiling.recompiles": ("RecompileError", "no_recompiles",),
    "data.measure": ("measure_difficulty", "measure_lengths",),
    "data.mixtures": ("Mixture", "mixture_counts",),
    "distributed.processes": ("agree", "initialize_processes", "together",),
    "loading.collate": (
        "StepSamples", "pack_pairs_to_bucket", "pack_to_bucket", "pad_pairs_to_bucket", "pad_to_bucket",
    ),
    "loading.loader": ("Loader", "load",),
    "loading.plan_source": ("planned_ids_digest",),
    "parallel.train": ("TrainStep", "make_eval_step", "make_train_step",),
    "planning.balance": ("assign_microbatches", "balance_plan", "packed_row_costs",),
    "planning.batching": ("Batches", "batch_by_tokens",),
    "planning.budget": ("Budget",),
    "planning.buckets": ("Bucket", "PairBucket", "make_buckets",),
    "planning.cost_model": ("CostModel", "fit_cost_model",),
    "planning.lengths": ("check_lengths",),
    "planning.order": ("Order", "sample_order",),
    "planning.pacing": ("ValuePacing", "competence_pacing", "discrete_pacing", "linear_pacing", "root_pacing",),
    "planning.packing": ("PackedHistogram", "Packing", "pack_samples",),
    "planning.row_lengths": ("choose_row_lengths",),
    "planning.pair_buckets": ("make_pair_buckets",),
    "planning.plan": ("Plan", "make_plan",),
    "planning.samples": ("WeightedTokens",),
    "planning.streams": ("StreamBatches", "StreamStep", "stream_batches",),
    "runs.config": ("FitConfig",),
    "runs.fit": ("FitResult", "fit",),
    "sorting.sample_sort": ("local_sort", "sample_sort",),
    "sorting.sharded_rows": ("shard_local_rows",),
    "targets.choice": ("choose_layout",),
    "targets.cluster": ("Cluster",),
    "targets.links": ("measure_cluster",),
    "targets.model_file": ("ModelFile",),
    "training.optimizers": ("planned_schedule", "scale_by_batch_size", "with_float32_master",),
    "training.rates": ("lr_scale", "lr_sequence",),
    "training.train_state": ("Metrics", "TrainState",),
}

__all__ = [
    "Batch", "Batches", "Bucket", "Budget", "Cluster", "CompileOptions", "CompileReport", "CompiledBuckets",
    "CostModel", "FitConfig", "FitResult", "Loader", "Metrics", "Mixture", "ModelFile", "Order", "PackedBatch",
    "PackedHistogram", "PackedPairBatch", "Packing", "PairBatch", "PairBucket", "Plan", "RecompileError",
    "StepSamples", "StreamBatches", "StreamStep", "TrainState", "TrainStep", "UnplannedShapeError", "UserError",
    "ValuePacing", "WeightedTokens", "agree", "assign_microbatches", "attend", "attend_within_segments",
    "attention_mask", "balance_plan", "batch_by_tokens", "check_lengths", "choose_layout", "choose_row_lengths",
    "competence_pacing", "compile_buckets", "discrete_pacing", "exit_code_of_interrupt", "fit", "fit_cost_model",
    "full_batch", "initialize_processes", "linear_pacing", "load", "load_compiled", "local_sort", "lr_scale",
    "lr_sequence", "make_buckets", "make_eval_step", "make_pair_buckets", "make_plan", "make_train_step",
    "measure_buckets", "measure_cluster", "measure_difficulty", "measure_lengths", "mixture_counts", "no_recompiles",
    "pack_pairs_to_bucket", "pack_samples", "pack_to_bucket", "packed_row_costs", "pad_pairs_to_bucket",
    "pad_to_bucket", "padding_mask", "planned_ids_digest", "planned_schedule", "remembered_interrupts", "root_pacing",
    "sample_order", "sample_sort", "scale_by_batch_size", "segment_mask", "shard_local_rows", "stream_batches",
    "together", "use_compilation_cache", "with_float32_master",
]

__getattr__, __dir__ = lazy_imports(__name__, _NAMES_OF)
