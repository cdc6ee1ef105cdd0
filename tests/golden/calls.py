"""The calls into the library that the goldens need. When an API changes, only this file changes with it.

`package` is "jvarlen" or "torch_ref"; options are passed as they are, and named as in these two.
"""

import importlib
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = ("jvarlen", "torch_ref")


def _of(package: str, name: str) -> Any:
    return getattr(importlib.import_module(package), name)


def make_buckets(package: str, lengths: Any, max_tokens: int, **options: Any) -> Any:
    return _of(package, "make_buckets")(lengths, max_tokens, **options)


def make_pair_buckets(package: str, lengths: Any, max_tokens: int, **options: Any) -> Any:
    return _of(package, "make_pair_buckets")(lengths, max_tokens, **options)


def choose_row_lengths(package: str, lengths: Any, max_tokens: int, **options: Any) -> tuple[int, ...]:
    return _of(package, "choose_row_lengths")(lengths, max_tokens, **options)


def pack_samples(package: str, lengths: Any, row_lengths: Any, **options: Any) -> Any:
    """`lengths` of one feature or several, with `counts` or without."""
    return _of(package, "pack_samples")(lengths, row_lengths, **options)


def make_plan(package: str, lengths: Any, buckets: Any, **options: Any) -> Any:
    """`lengths` of samples or pairs, or what `pack_samples` gave."""
    return _of(package, "make_plan")(lengths, buckets, **options)


def make_mixed_plan(package: str, plan: Any, microbatches_per_step: int) -> Any:
    return _of(package, "make_mixed_plan")(plan, microbatches_per_step)


def pacing(package: str, kind: str, num_steps: int, **options: Any) -> Any:
    """`kind`: linear, root, competence or discrete."""
    return _of(package, f"{kind}_pacing")(num_steps, **options)


def value_pacing(package: str, bound: Any) -> Any:
    return _of(package, "ValuePacing")(bound)


def sample_order(package: str, lengths: Any, order: Any, **options: Any) -> Any:
    return _of(package, "sample_order")(lengths, order, **options)


def batch_by_tokens(package: str, lengths: Any, max_tokens: int, **options: Any) -> Any:
    return _of(package, "batch_by_tokens")(lengths, max_tokens, **options)


def stream_batches(package: str, lengths: Any, buckets: Any = None, **options: Any) -> Any:
    return _of(package, "stream_batches")(lengths, buckets, **options)


def assign_microbatches(package: str, costs: Any, num_ranks: int) -> Any:
    return _of(package, "assign_microbatches")(costs, num_ranks)


def packed_row_costs(package: str, plan: Any, lengths: Any, crossover_length: float) -> Any:
    return _of(package, "packed_row_costs")(plan, lengths, crossover_length=crossover_length)


def balance_plan(package: str, plan: Any, cost: Any, num_ranks: int, **options: Any) -> Any:
    return _of(package, "balance_plan")(plan, cost, num_ranks, **options)


def mixture_counts(package: str, sizes: Any, weights: Any, **options: Any) -> Any:
    return _of(package, "mixture_counts")(sizes, weights, **options)


def cost_model(package: str, constant: float, linear: float, quadratic: float) -> Any:
    return _of(package, "CostModel")(constant=constant, linear=linear, quadratic=quadratic)


def lr_sequence(package: str, plan: Any, base: Any, base_batch_size: float, **options: Any) -> Any:
    return _of(package, "lr_sequence")(plan, base, base_batch_size, **options)


def digest_in_parts(lengths: Any, buckets: Any, num_devices: int, **options: Any) -> str:
    """The digest of a plan of which every process holds its rows only."""
    from jvarlen import data_mesh, plan_distributed

    return plan_distributed(lengths, buckets, data_mesh(num_devices), **options).digest


def digest_on_disk(lengths: Any, buckets: Any, path: Path, **options: Any) -> str:
    """The digest of a plan that is written to `path` in pieces, from lengths in a file."""
    from jvarlen import make_plan

    np.save(path.with_suffix(".npy"), np.asarray(lengths))
    lengths_of_file = np.load(path.with_suffix(".npy"), mmap_mode="r")
    return make_plan(lengths_of_file, buckets, out=path, progress=False, **options).digest


def saved_and_loaded(package: str, plan: Any, path: Path) -> Any:
    plan.save(path)
    return _of(package, "Plan").load(path)
