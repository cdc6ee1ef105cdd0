"""The calls into the library that the goldens need. When an API changes, only this file changes with it.

`package` is "jvarlen" or "torch_ref"; options are passed as they are, and named as in these two.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax import numpy as jnp

import jvarlen
from jvarlen import parallel
from jvarlen.experimental import asynchronous, large_plans
from jvarlen.experimental.token_slices import attend_over_slices as attend_over_axis
from jvarlen.experimental.token_slices import make_sliced_train_step
from jvarlen.parallel import (
    LayeredModel,
    LayeredParams,
    TensorSpec,
    column_linear,
    enter_tensor_parallel,
    row_linear,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from jvarlen.planning.compare import compare_strategies
from jvarlen.planning.rules import PlanRules
from jvarlen.reports.plan_page import write_html_report
from jvarlen.reports.run_page import read_runs
from tests.support.hand_made import batch_of
from tests.support.meshes import data_mesh

__all__ = [  # what a model calls, as it is
    "attend_over_axis",
    "column_linear",
    "enter_tensor_parallel",
    "row_linear",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
]

PACKAGES = ("jvarlen", "torch_ref")


_ELSEWHERE = {"mixture_counts": jvarlen.data, "beta_sequence": jvarlen.training}


def _of(package: str, name: str) -> Any:
    module = importlib.import_module(package)
    if package == "torch_ref" or name in module.__all__:
        return getattr(module, name)
    return getattr(_ELSEWHERE.get(name, jvarlen.planning), name)


_OF_ORDER = ("block_size", "shuffle_steps", "longest_first", "new_shape_every")


def _with_order(package: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options with one `Order` of those that decide when samples and steps come."""
    switches = {name: value for name, value in options.items() if name in _OF_ORDER}
    others = {name: value for name, value in options.items() if name not in _OF_ORDER}
    return others | {"order": _of(package, "Order")(options.get("order", "length"), **switches)}


def _in_either(name: str) -> Callable[..., Any]:
    """A function of both packages, which takes the package first."""
    return lambda package, *args, **options: _of(package, name)(*args, **options)


make_buckets = _in_either("make_buckets")
choose_row_lengths = _in_either("choose_row_lengths")
pack_samples = _in_either("pack_samples")
batch_by_tokens = _in_either("batch_by_tokens")
stream_batches = _in_either("stream_batches")
balance_plan = _in_either("balance_plan")
mixture_counts = _in_either("mixture_counts")
lr_sequence = _in_either("lr_sequence")
beta_sequence = _in_either("beta_sequence")


def make_plan(package: str, lengths: Any, buckets: Any, **options: Any) -> Any:
    """`lengths` of samples or pairs."""
    return _of(package, "make_plan")(lengths, buckets, **_with_order(package, options))


def plan_rows(package: str, packing: Any, buckets: Any, num_microbatches: int, **options: Any) -> Any:
    """The plan of what `pack_samples` gave, whose rows come in an order of their own."""
    options = {"seed": 0, "epoch": 0} | _with_order(package, options)
    buckets = _of(package, "Buckets")(tuple(buckets), num_microbatches)
    plan_rows = importlib.import_module(f"{package}.planning.make_plan").plan_rows
    if package == "jvarlen":
        return plan_rows(packing, buckets, PlanRules(**options))
    return plan_rows(packing, buckets, **options)


def pacing(package: str, kind: str, num_steps: int, **options: Any) -> Any:
    """`kind`: linear or competence."""
    return _of(package, f"{kind}_pacing")(num_steps, **options)


def sample_order(package: str, lengths: Any, order: Any, **options: Any) -> Any:
    return _of(package, "sample_order")(lengths, **_with_order(package, {"order": order, **options}))


def packed_row_costs(package: str, plan: Any, lengths: Any, crossover_length: float) -> Any:
    return _of(package, "packed_row_costs")(plan, lengths, cost_model(package, 0.0, 1.0, 1.0 / crossover_length))


def cost_model(package: str, constant: float, linear: float, quadratic: float) -> Any:
    return _of(package, "CostModel")(constant=constant, linear=linear, quadratic=quadratic)


def digest_in_parts(lengths: Any, buckets: Any, num_devices: int, **options: Any) -> str:
    """The digest of a plan of which every process holds its rows only."""
    return large_plans.plan_distributed(
        lengths, buckets, data_mesh(num_devices), **_with_order("jvarlen", options)
    ).digest


def digest_on_disk(lengths: Any, buckets: Any, path: Path, **options: Any) -> str:
    """The digest of a plan that is written to `path` in chunks, from lengths in a file."""
    np.save(path.with_suffix(".npy"), np.asarray(lengths))
    lengths_of_file = np.load(path.with_suffix(".npy"), mmap_mode="r")
    return large_plans.plan_on_disk(
        lengths_of_file, buckets, path, progress=False, **_with_order("jvarlen", options)
    ).digest


def saved_and_loaded(package: str, plan: Any, path: Path) -> Any:
    plan.save(path)
    return _of(package, "Plan").load(path)


class Trained(NamedTuple):
    """Figures of every step, and the parameters by name after the first and the last."""

    losses: list[float]
    weight_sums: list[float]
    grad_norms: list[float]
    first_params: dict[str, Any]
    last_params: dict[str, Any]


def tensor_spec(spec: Any, **options: Any) -> Any:
    return TensorSpec(spec, **options)


def layered_model(embed: Any, layer: Any, loss: Any, specs: tuple[Any, Any]) -> Any:
    return LayeredModel(embed, layer, loss, specs=LayeredParams(*specs), by_positions=True)


def layered_params(ends: Any, layers: Any) -> Any:
    return LayeredParams(ends, layers)


def batch(tokens: Any, lengths: Any, weights: Any, num_sequences: float) -> Any:
    return batch_of(tokens, lengths, weights, np.float64(num_sequences))


def _adamw(batch_size: float = 8) -> Any:
    # Its eps keeps the rounding of gradients that should be 0 from becoming updates.
    adamw = optax.adamw(1e-2, eps=1e-5)
    return optax.chain(optax.clip_by_global_norm(0.5), adamw, jvarlen.scale_by_batch_size(batch_size))


def _sgd() -> Any:
    return optax.chain(optax.sgd(0.05, momentum=0.9), jvarlen.scale_by_batch_size(8))


def _by_name(params: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf) for path, leaf in leaves}


def _take_steps(step: Any, params: Any, batches: Any) -> Trained:
    return _trained(jax.jit(step), step.init(params), batches, step.gather_params)


def _trained(step: Any, state: Any, batches: Any, params_of: Any = lambda state: state.params) -> Trained:
    metrics, params = [], []
    for given in batches:
        state, found = step(state, given)
        metrics.append(jax.device_get(found))
        params = [*params[:1], _by_name(params_of(state))]
    return Trained(*_columns(metrics), params[0], params[-1])


def _columns(metrics: list[Any]) -> list[list[float]]:
    """Empty where a step does not give the value."""
    columns = [[getattr(each, name) for each in metrics] for name in ("loss", "weight_sum", "grad_norm")]
    return [[float(value) for value in column if value is not None] for column in columns]


def train(model: Any, params: Any, batches: list[Any], *, layout: str | None, slices: Any = None) -> Trained:
    """In float64, a model by layers on a layout, or on one device; rows may go through stages in slices."""
    with jax.enable_x64(True):
        params, optimizer = jax.tree.map(jnp.asarray, params), _adamw()
        if layout is None:
            step = jvarlen.make_train_step(parallel.layered_loss_fn(model), optimizer, norms=True)
            return _take_steps(step, params, batches)
        parsed = parallel.Layout.parse(layout if "data" in layout else f"data1.{layout}")
        if slices is None:
            step = jvarlen.make_train_step(model, optimizer, norms=True, layout=parsed)
        else:
            step = make_sliced_train_step(model, optimizer, norms=True, slices=slices, layout=parsed)
        assert step.placement is not None
        placed = [jax.device_put(given, step.placement.batch_shardings(given)) for given in batches]
        return _take_steps(step, params, placed)


def train_stale(loss_fn: Any, params: Any, plan: Any, samples: Any, delays: Any) -> Trained:
    """In float64, with parameters of earlier updates."""
    with jax.enable_x64(True):
        optimizer = _sgd()
        state = jvarlen.make_train_step(loss_fn, optimizer).init(params)
        state = asynchronous.keep_versions(state, delays=delays)
        step = jax.jit(asynchronous.make_stale_train_step(loss_fn, optimizer, delays=delays))
        return _trained(step, state, jvarlen.load(plan, samples))


def train_asynchronously(loss_fn: Any, params: Any, plan: Any, samples: Any) -> Trained:
    """In float64, by one worker process, whose gradients are never of earlier parameters."""
    with jax.enable_x64(True):
        optimizer = _sgd()
        state = jvarlen.make_train_step(loss_fn, optimizer).init(params)
        batches = jvarlen.load(plan, samples)
        run = asynchronous.train_async(loss_fn, optimizer, state, plan, batches, num_workers=1, staleness_bound=0)
        return Trained(*_columns(run.metrics), {}, _by_name(run.state.params))


def plan_report(plan: Any, learning_rates: Any, cost: Any, *, compile_seconds: float) -> str:
    return plan.report(learning_rates, cost=cost, compile_seconds=compile_seconds)


def plan_page(path: Path, plan: Any, lengths: Any, cost: Any, options: dict[str, Any]) -> str:
    """The page of a plan, compared with others; `options` are those of the buckets."""
    comparison = compare_strategies(plan, lengths, cost=cost, **options)
    write_html_report(path, plan, lengths, cost=cost, comparison=comparison)
    return path.read_text(encoding="utf-8")


def run_report(run_dir: Path) -> str:
    return read_runs([run_dir]).table()


def run_page(run_dir: Path, path: Path) -> str:
    read_runs([run_dir]).write_html(path)
    return path.read_text(encoding="utf-8")
