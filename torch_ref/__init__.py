"""The same contract as `jvarlen` in PyTorch, written independently of it."""

from torch_ref.loading.batch import Batch, PairBatch, StepBatch
from torch_ref.loading.loader import load
from torch_ref.loading.mixtures import Mixture, mixture_counts
from torch_ref.loading.pad import pad_to_bucket
from torch_ref.loading.planned import PlannedDataset, PlannedRow
from torch_ref.loading.sampler import PlanBatchSampler
from torch_ref.loading.varlen import Varlen, varlen
from torch_ref.loading.weighted import WeightedTokens
from torch_ref.parallel.sort import sample_sort
from torch_ref.planning.balance import balance_plan, packed_row_costs
from torch_ref.planning.batching import Batches, batch_by_tokens
from torch_ref.planning.buckets import Bucket, Buckets, MultiLengthBucket
from torch_ref.planning.budget import Budget
from torch_ref.planning.costs import CostModel, fit_cost_model
from torch_ref.planning.lengths import check_lengths
from torch_ref.planning.make_buckets import make_buckets
from torch_ref.planning.make_plan import make_plan
from torch_ref.planning.order import Order, sample_order
from torch_ref.planning.pacing import competence_pacing, linear_pacing
from torch_ref.planning.packing import Packing, pack_samples
from torch_ref.planning.plan import Plan
from torch_ref.planning.row_lengths import choose_row_lengths
from torch_ref.planning.single_step import plan_step
from torch_ref.planning.streams import StreamBatches, StreamStep, stream_batches
from torch_ref.training.adamw import AdamWByBatchSize
from torch_ref.training.compile import CompiledBuckets, CompileRow, compile_buckets
from torch_ref.training.decoder import Decoder, DecoderConfig, RotaryScaling, generate, load_params
from torch_ref.training.graphs import no_recompiles
from torch_ref.training.growing_batches import Seesaw, seesaw
from torch_ref.training.hugging_face import load_model, read_config
from torch_ref.training.lr import VariableBatchSizeLR, beta_sequence, lr_scale, lr_sequence
from torch_ref.training.targets import next_token_targets
from torch_ref.training.train import Metrics, loss_sums, to_device, train_step
from torch_ref.training.unplanned import UnplannedShapeError

__all__ = [
    "AdamWByBatchSize",
    "Batch",
    "Batches",
    "Bucket",
    "Buckets",
    "Budget",
    "CompileRow",
    "CompiledBuckets",
    "CostModel",
    "Decoder",
    "DecoderConfig",
    "Metrics",
    "Mixture",
    "MultiLengthBucket",
    "Order",
    "Packing",
    "PairBatch",
    "Plan",
    "PlanBatchSampler",
    "PlannedDataset",
    "PlannedRow",
    "RotaryScaling",
    "Seesaw",
    "StepBatch",
    "StreamBatches",
    "StreamStep",
    "UnplannedShapeError",
    "VariableBatchSizeLR",
    "Varlen",
    "WeightedTokens",
    "balance_plan",
    "batch_by_tokens",
    "beta_sequence",
    "check_lengths",
    "choose_row_lengths",
    "competence_pacing",
    "compile_buckets",
    "fit_cost_model",
    "generate",
    "linear_pacing",
    "load",
    "load_model",
    "load_params",
    "loss_sums",
    "lr_scale",
    "lr_sequence",
    "make_buckets",
    "make_plan",
    "mixture_counts",
    "next_token_targets",
    "no_recompiles",
    "pack_samples",
    "packed_row_costs",
    "pad_to_bucket",
    "plan_step",
    "read_config",
    "sample_order",
    "sample_sort",
    "seesaw",
    "stream_batches",
    "to_device",
    "train_step",
    "varlen",
]
