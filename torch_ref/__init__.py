"""Lengths in, plans, learning rates and batches out: an independent PyTorch reference of the planning contract."""

from torch_ref.batching import Batches, batch_by_tokens
from torch_ref.buckets import Bucket, make_buckets
from torch_ref.lengths import check_lengths
from torch_ref.loader import Batch, PlanBatchSampler, load
from torch_ref.lr import VariableBatchSizeLR, lr_scale, lr_sequence
from torch_ref.model import Transformer, load_params
from torch_ref.order import sample_order
from torch_ref.plan import Plan, make_plan
from torch_ref.train import loss_sums, train_step

__all__ = [
    "Batch",
    "Batches",
    "Bucket",
    "Plan",
    "PlanBatchSampler",
    "Transformer",
    "VariableBatchSizeLR",
    "batch_by_tokens",
    "check_lengths",
    "load",
    "load_params",
    "loss_sums",
    "lr_scale",
    "lr_sequence",
    "make_buckets",
    "make_plan",
    "sample_order",
    "train_step",
]
