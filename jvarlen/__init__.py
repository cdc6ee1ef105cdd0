"""Training on samples of different lengths in few static shapes."""

from jvarlen.batching import Batches, batch_by_tokens
from jvarlen.buckets import Bucket, make_buckets
from jvarlen.collate import Batch, StepSamples, pad_to_bucket, token_batch_spec
from jvarlen.compile import CompiledBuckets, RecompileError, UnplannedShapeError, compile_buckets, no_recompiles
from jvarlen.config import FitConfig
from jvarlen.curriculum import sample_order
from jvarlen.distributed import data_mesh
from jvarlen.fit import FitResult, fit
from jvarlen.lengths import check_lengths, measure_lengths
from jvarlen.loader import load
from jvarlen.lr import lr_scale, lr_sequence, scale_by_batch_size
from jvarlen.masks import attention_mask, padding_mask
from jvarlen.plan import Plan, make_plan
from jvarlen.train import TrainState, init_train_state, make_eval_step, make_train_step

__version__ = "0.1.0"

__all__ = [
    "Batch",
    "Batches",
    "Bucket",
    "CompiledBuckets",
    "FitConfig",
    "FitResult",
    "Plan",
    "RecompileError",
    "StepSamples",
    "TrainState",
    "UnplannedShapeError",
    "attention_mask",
    "batch_by_tokens",
    "check_lengths",
    "compile_buckets",
    "data_mesh",
    "fit",
    "init_train_state",
    "load",
    "lr_scale",
    "lr_sequence",
    "make_buckets",
    "make_eval_step",
    "make_plan",
    "make_train_step",
    "measure_lengths",
    "no_recompiles",
    "pad_to_bucket",
    "padding_mask",
    "sample_order",
    "scale_by_batch_size",
    "token_batch_spec",
]
