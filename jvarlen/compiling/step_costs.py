"""What a step of a model and its compilation cost on this machine: remembered from earlier runs, or estimated.

A run whose number of shapes is `"auto"` needs both before its plan. The first run of a model estimates them: the
operations of a step come from lowering it for two shapes, the speed of the device from a product of matrices, and the
seconds of compiling from those of lowering. Each run then writes what its report measured into the directory of the
compilation cache.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dacite
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64

from jvarlen._common.checks import UserError
from jvarlen._common.files import write_atomically
from jvarlen._common.pytree import describe, leaves_by_name
from jvarlen.compiling.lowering import Recipe
from jvarlen.compiling.report import CompileReport
from jvarlen.planning.buckets import Bucket
from jvarlen.planning.cost_model import CostModel

__all__ = ["RunCosts", "costs_from_report", "costs_path", "estimate_costs", "load_costs", "model_key", "save_costs"]

# Measured with the built-in model on a CPU with two cores: compiling takes some 10 times as long as lowering a second
# shape, and a step has half the speed of a product of matrices. Both only have to hold for the first run.
_COMPILING_OVER_LOWERING = 10.0
_SHARE_OF_PEAK = 0.5
_MATRIX_SIZE = 1024
_MOST_PROGRAMS = 16  # of which the shapes are remembered, the newest


@dataclasses.dataclass(frozen=True)
class RunCosts:
    """What a step of a model costs on a kind of device.

    Attributes:
      device: number and kind of the devices.
      model: what tells models apart, as `model_key` makes it.
      seconds: of a microbatch.
      compile_seconds: of lowering and compiling one shape.
      compiled: (rows, length) of the shapes that earlier runs compiled, by what tells their programs apart.
      is_estimate: whether nothing was measured.
    """

    device: str
    model: str
    seconds: CostModel
    compile_seconds: float
    compiled: dict[str, tuple[tuple[int, int], ...]] = dataclasses.field(default_factory=dict)
    is_estimate: bool = False


def model_key(state_spec: Any, loss_fn: Any, *details: object) -> str:
    """What tells models apart: names, shapes and dtypes of the parameters, the loss, and other details."""
    leaves = {name: describe(leaf) for name, leaf in leaves_by_name(state_spec).items()}
    loss = f"{getattr(loss_fn, '__module__', '')}.{getattr(loss_fn, '__qualname__', type(loss_fn).__name__)}"
    text = repr((sorted(leaves.items()), loss, details))
    return hashlib.sha256(text.encode()).hexdigest()


def costs_path(cache_dir: Path, device: str, model: str) -> Path:
    """Where the costs of a model on a kind of device lie: beside its compiled programs."""
    name = hashlib.sha256(f"{device}\0{model}".encode()).hexdigest()[:32]
    return cache_dir / "costs" / f"{name}.json"


def load_costs(path: Path, device: str, model: str) -> RunCosts | None:
    """The costs that `save_costs` wrote; None if there are none, or, with a warning, if they cannot be used."""
    try:
        costs = dacite.from_dict(RunCosts, json.loads(path.read_text()), dacite.Config(cast=[tuple], strict=True))
    except FileNotFoundError:
        return None
    except (dacite.DaciteError, OSError, ValueError, TypeError, AttributeError) as error:
        warnings.warn(f"{path} holds no costs of a model, and is not used: {error}", stacklevel=2)
        return None
    for name, found, here in (("device", costs.device, device), ("model", costs.model, model)):
        if found != here:
            warnings.warn(f"{path} is of another {name}, and is not used: {found}, here {here}", stacklevel=2)
            return None
    return costs


def save_costs(costs: RunCosts, path: Path) -> None:
    """Writes costs, atomically; where that is impossible, a warning says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(path) as file:
            file.write(json.dumps(dataclasses.asdict(costs), indent=2).encode() + b"\n")
    except OSError as error:
        warnings.warn(f"what the model costs could not be kept in {path}: {error}", stacklevel=2)


def estimate_costs(recipe: Recipe, buckets: Sequence[Bucket], model: str, num_devices: int = 1) -> RunCosts:
    """Costs from lowering a step on one device for two shapes of different lengths; nothing of it is compiled.

    It takes about a second. With several devices, `num_devices` microbatches take the time of one.
    """
    positions, lengths, operations, lower_s = [], [], [], []
    for bucket in buckets:
        lowered = recipe.lower(bucket)
        counted = (lowered.program.cost_analysis() or {}).get("flops", math.nan)
        if counted > 0:
            positions.append(bucket.padded_tokens)
            lengths.append(bucket.length)
            operations.append(counted)
        lower_s.append(lowered.seconds)
    if not positions:
        raise UserError('max_shapes "auto" needs a cost model here: XLA does not count the operations of this step')
    linear, quadratic = _line(lengths, np.array(operations) / positions)
    seconds = 1.0 / (_SHARE_OF_PEAK * _operations_per_second(recipe.device) * num_devices)
    return RunCosts(
        recipe.device_text,
        model,
        CostModel(0.0, linear * seconds, quadratic * seconds, device=recipe.device_text, model="estimated"),
        (1 + _COMPILING_OVER_LOWERING) * min(lower_s),
        is_estimate=True,
    )


def costs_from_report(report: CompileReport, microbatches_per_step: int, before: RunCosts, program: str) -> RunCosts:
    """The costs that a run measured; where it measured too little, those known before.

    Args:
      report: of the run.
      microbatches_per_step: M.
      before: what was known.
      program: what tells its programs from those of other runs of the model.
    """
    timed = [row for row in report if row.times_used > 1 and row.step_s > 0]
    cold = [row.lower_s + row.compile_s for row in report if not row.cache_hit]
    seconds, is_estimate = before.seconds, before.is_estimate
    if timed:
        positions = np.array([row.bucket.padded_tokens for row in timed])
        measured = np.array([row.step_s for row in timed]) / microbatches_per_step / positions
        linear, quadratic = _line([row.bucket.lengths[0] for row in timed], measured)
        seconds, is_estimate = CostModel(0.0, linear, quadratic, device=before.device, model="measured in a run"), False
    compiled = {name: shapes for name, shapes in before.compiled.items() if name != program}
    here = ((row.bucket.rows, row.bucket.lengths[0]) for row in report)
    compiled[program] = tuple(dict.fromkeys((*before.compiled.get(program, ()), *here)))
    return dataclasses.replace(
        before,
        seconds=seconds,
        compile_seconds=float(np.median(cold)) if cold else before.compile_seconds,
        compiled=dict(list(compiled.items())[-_MOST_PROGRAMS:]),
        is_estimate=is_estimate,
    )


def _line(lengths: Sequence[int], of_position: Float64[np.ndarray, " K"]) -> tuple[float, float]:
    """What a position costs, and what it costs more for each position of its row; neither is below 0.

    Full buckets hold nearly as many positions each, which does not tell what a step costs whatever it holds.
    """
    if len(set(lengths)) > 1:
        quadratic, linear = np.polyfit(lengths, of_position, 1).tolist()
        if linear >= 0 and quadratic >= 0:
            return linear, quadratic
    return float(of_position.mean()), 0.0


def _operations_per_second(device: jax.Device) -> float:
    """Floating-point operations a second of a product of matrices in float32."""
    matrix = jax.device_put(jnp.ones((_MATRIX_SIZE, _MATRIX_SIZE), jnp.float32), device)
    multiply = jax.jit(jnp.matmul)
    multiply(matrix, matrix).block_until_ready()
    fastest = math.inf
    for _ in range(3):
        start = time.perf_counter()
        multiply(matrix, matrix).block_until_ready()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * _MATRIX_SIZE**3 / fastest
