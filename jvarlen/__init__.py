"""Training on samples of different lengths in a few static shapes."""
# fmt: off
# ruff: noqa: I001  # names that belong together share a line

from jvarlen.attention import attend, attend_within_segments
from jvarlen.batching import Batches, batch_by_tokens
from jvarlen.buckets import Bucket, PairBucket, make_buckets
from jvarlen.collate import Batch, PackedBatch, PairBatch, StepSamples, full_batch, pack_to_bucket
from jvarlen.collate import packed_batch_spec, pad_pairs_to_bucket, pad_to_bucket, pair_batch_spec, token_batch_spec
from jvarlen.compilation_cache import use_compilation_cache
from jvarlen.compile import compile_buckets, load_compiled
from jvarlen.compile_options import CompileOptions
from jvarlen.compiled_buckets import CompiledBuckets
from jvarlen.ledger import Ledger
from jvarlen.config import FitConfig
from jvarlen.costs import CostModel, fit_cost_model
from jvarlen.curriculum import sample_order
from jvarlen.distributed import data_mesh, replicate
from jvarlen.distributed_plan import DistributedPlan, count_lengths, plan_distributed
from jvarlen.fit import FitResult, fit
from jvarlen.lengths import check_lengths
from jvarlen.ids_digest import planned_ids_digest
from jvarlen.loader import BatchIterator, load, load_stream
from jvarlen.lr import lr_scale, lr_sequence, planned_schedule, scale_by_batch_size
from jvarlen.mixtures import Mixture, mixture_counts
from jvarlen.masks import attention_mask, padding_mask, segment_mask
from jvarlen.pacing import competence_pacing, discrete_pacing, linear_pacing, root_pacing
from jvarlen.measure import measure_buckets
from jvarlen.measure_samples import measure_difficulty, measure_lengths
from jvarlen.ordered_file import write_ordered
from jvarlen.packing import Packing, pack_samples
from jvarlen.pairs import make_pair_buckets
from jvarlen.plan import Plan, make_plan
from jvarlen.processes import agree, initialize_processes, together
from jvarlen.recompiles import RecompileError, no_recompiles
from jvarlen.row_lengths import choose_row_lengths
from jvarlen.sharded_rows import shard_local_rows
from jvarlen.sort import local_sort, sample_sort
from jvarlen.streams import StreamBatches, StreamStep, stream_batches
from jvarlen.train import Metrics, TrainState, init_train_state, make_eval_step, make_train_step
from jvarlen.unplanned import UnplannedShapeError

__version__ = "0.1.0"

__all__ = [
    "Batch", "BatchIterator", "Batches", "Bucket", "CompileOptions", "CompiledBuckets", "CostModel",
    "DistributedPlan", "FitConfig", "FitResult", "Ledger", "Metrics", "Mixture", "PackedBatch", "Packing", "PairBatch",
    "PairBucket", "Plan", "RecompileError", "StepSamples", "StreamBatches", "StreamStep", "TrainState",
    "UnplannedShapeError", "agree", "attend", "attend_within_segments", "attention_mask", "batch_by_tokens",
    "check_lengths", "choose_row_lengths", "competence_pacing", "compile_buckets", "count_lengths", "data_mesh",
    "discrete_pacing", "fit", "fit_cost_model", "full_batch", "init_train_state", "initialize_processes",
    "linear_pacing", "load", "load_compiled", "load_stream", "local_sort", "lr_scale", "lr_sequence", "make_buckets",
    "make_eval_step", "make_pair_buckets", "make_plan", "make_train_step", "measure_buckets", "measure_difficulty",
    "measure_lengths", "mixture_counts", "no_recompiles", "pack_samples", "pack_to_bucket", "packed_batch_spec",
    "pad_pairs_to_bucket", "pad_to_bucket", "padding_mask", "pair_batch_spec", "plan_distributed",
    "planned_ids_digest", "planned_schedule", "replicate", "root_pacing", "sample_order", "sample_sort",
    "scale_by_batch_size", "segment_mask", "shard_local_rows", "stream_batches", "together", "token_batch_spec",
    "use_compilation_cache", "write_ordered",
]
