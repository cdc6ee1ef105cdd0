"""The layouts of a search with the fewest estimated seconds, compiled for its devices."""

from __future__ import annotations

import copy
import dataclasses
import functools

import numpy as np

from jvarlen._common.checks import NothingFitsError, UserError
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Extra, Params
from jvarlen.batches.shapes import BatchSpec
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.estimates.choice import Candidates, LayoutChoice
from jvarlen.estimates.step_seconds import StepSeconds
from jvarlen.parallel.layers import LayeredModel, StepLoss
from jvarlen.planning.plan import Plan
from jvarlen.targets.compile_for import DEFAULT_OPTIONS, compile_for, seconds_of_runs
from jvarlen.targets.target import Target
from jvarlen.training.losses import LossFn
from jvarlen.training.train_state import Optimizer
from jvarlen.training.trainable import Trainable

__all__ = ["compile_finalists"]

_FINALISTS = 3


@check_keywords
def compile_finalists(
    choice: LayoutChoice,
    model: LayeredModel | LossFn | StepLoss,
    optimizer: Optimizer,
    plan: Plan,
    *,
    target: Target | str,
    params: Params,
    trainable: Trainable = None,
    extra: Extra = None,
    batch_spec: BatchSpec | None = None,
    options: CompileOptions = DEFAULT_OPTIONS,
    progress: bool = True,
) -> LayoutChoice:
    """Replaces the estimates of the best layouts of a search by the figures of their compiled programs.

    The first three that fit are compiled, at most six. The fastest of them is the new choice. The rates of the devices
    are those of the search.

    Args:
      choice: the result of `choose_layout` for the same model, optimizer and plan.
      model: as for `make_train_step`.
      optimizer: as for `make_train_step`.
      plan: the plan of the search.
      target: as many devices as the cluster has, or their name, as for `Target.parse`.
      params: as for `compile_for`.
      trainable: as for `make_train_step`.
      extra: as for `TrainStep.init`.
      batch_spec: as for `compile_for`.
      options: of the compiler; its cache does not count.
      progress: whether to show progress bars.

    Returns:
      `LayoutChoice`: compiled layouts first, by their seconds, then those that were not, by their estimates. A layout
      of which a program has no prediction keeps its estimated seconds. Compiled layouts that hold more than the memory
      of the search or of the target are rejected.

    Raises:
      ValueError: another number of devices; none of the compiled layouts fits; what `compile_for` refuses.
      ModuleNotFoundError: the compiler is not installed.
    """
    target = Target.parse(target) if isinstance(target, str) else target
    if len(target.devices) != choice.cluster.num_devices:
        raise UserError(
            f"target {target.name} has {len(target.devices)} devices, and the cluster {choice.cluster.name} "
            f"{choice.cluster.num_devices}"
        )
    choice = copy.deepcopy(choice)  # whose figures are replaced
    limit_bytes = min(choice.memory_bytes, target.memory_bytes or choice.memory_bytes)
    target = dataclasses.replace(target, cluster=choice.cluster, memory_bytes=limit_bytes)
    given = functools.partial(
        compile_for, model, optimizer, plan, params=params, trainable=trainable, extra=extra, batch_spec=batch_spec
    )
    candidates, times = choice.candidates, (plan.groups_of_buckets(), plan.num_steps)
    fitting: list[int] = []
    too_large: list[int] = []
    for row in range(len(choice.of_epoch.total)):
        layout = candidates.table.layout(row)
        report = given(layout=layout, target=target, options=options, progress=progress)
        candidates.num_bytes[row] = max(each.total_bytes for each in report)
        (fitting if report.fits else too_large).append(row)
        if report.fits and (seconds := seconds_of_runs(report, *times)):
            candidates.seconds[row] = seconds
            candidates.exposed_s[row] = seconds_of_runs(report, *times, "exposed_s")
        if len(fitting) == _FINALISTS:
            break
    if not fitting:
        nearest = min(too_large, key=lambda row: candidates.num_bytes[row])
        raise NothingFitsError(
            f"none of the {len(too_large)} compiled layouts fits into {limit_bytes:,} bytes a device: the nearest, "
            f"{candidates.table.layout(nearest)}, needs {candidates.num_bytes[nearest] - limit_bytes:,.0f} bytes more"
        )
    return _in_order(choice, sorted(fitting, key=lambda row: candidates.seconds[row]), too_large)


def _in_order(choice: LayoutChoice, fitting: list[int], too_large: list[int]) -> LayoutChoice:
    """The choice with compiled layouts that fit first, and those that do not behind all that do."""
    candidates, is_compiled = choice.candidates, {*fitting, *too_large}
    others = [row for row in range(len(candidates.seconds)) if row not in is_compiled]
    left = candidates.num_fitting - len(is_compiled)
    order = [*fitting, *others[:left], *too_large, *others[left:]]
    shown = [row for row in order[: len(order) - len(too_large)] if row < len(choice.of_epoch.total)]
    seconds, num_bytes, exposed_s = (
        each[order] for each in (candidates.seconds, candidates.num_bytes, candidates.exposed_s)
    )
    reasons = tuple("too large" if row in too_large else candidates.reasons[row] for row in order)
    return choice._replace(
        layout=candidates.table.layout(order[0]),
        seconds=float(seconds[0]),
        num_bytes=float(num_bytes[0]),
        of_epoch=StepSeconds(*(part[shown] for part in choice.of_epoch)),
        candidates=Candidates(candidates.table.take(np.array(order)), seconds, num_bytes, reasons, exposed_s),
    )
