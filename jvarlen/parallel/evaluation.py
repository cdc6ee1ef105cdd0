"""The eval step: the sums of a step, without gradients and update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

import optax

from jvarlen._common.checks import UserError
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Batch, PyTree
from jvarlen.compiling.compiled_buckets import CompiledBuckets
from jvarlen.distributed.placement import LayoutLike, Placement, placement_of
from jvarlen.parallel.layers import LayeredModel, Model, StepLoss, model_of, needs_key
from jvarlen.parallel.train import program_of
from jvarlen.training.averages import keeps_average
from jvarlen.training.groups import step_over_groups
from jvarlen.training.step import StepFn, StepHalves, metrics_of
from jvarlen.training.train_state import Metrics, TrainState, check_state

__all__ = ["EvalStep", "make_eval_step"]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class EvalStep:
    """An evaluation step, a plain function `step(state, batch) -> (state, Metrics)`. `make_eval_step` makes it."""

    __name__ = "eval_step"

    function: StepFn
    """What a call does with a step of one group."""
    halves: StepHalves
    """What a call does with a step of several groups."""
    placement: Placement | None
    """Where a step runs; None means one device."""
    programs: dict[Hashable, list[CompiledBuckets]] = dataclasses.field(default_factory=dict, repr=False)
    """What `evaluate` has compiled, for its next call."""

    def __call__(self, state: PyTree, batch: Batch) -> tuple[PyTree, Metrics]:
        """The same state, and the metrics of a step."""
        return step_over_groups(self.function, self.halves, state, batch)


@check_keywords
def make_eval_step(model: Model | StepLoss, *, layout: LayoutLike = None) -> EvalStep:
    """An evaluation step: the sums of a step without a gradient.

    A model by layers gets no key, nor does a function with an attribute `needs_key`, so that nothing is dropped out.
    With stages, microbatches follow each other through them, whatever the schedule; at ZeRO-3 parameters are gathered
    as in training.

    Args:
      model: as for `make_train_step`.
      layout: as for `make_train_step`.

    Returns:
      `EvalStep`, a plain function `step(state, batch) -> (state, Metrics)`. The state is that of a train step on the
      layout, or, where that does not shard it, only parameters, for a loss that takes nothing else. It is returned
      unchanged, and `compile_buckets` does not donate it. Where the optimizer keeps an average, it takes
      `train_step.for_evaluation(state)`.

    Raises:
      ValueError: as `make_train_step`; when it is traced: a state with an average that is not evaluated.
    """
    placement = placement_of(layout)
    sums_of = program_of(model, optax.identity(), placement).sums_of(None)

    def given_of(state: PyTree) -> TrainState:
        if hasattr(state, "opt_state"):
            check_state(state)
            if keeps_average(state.opt_state):
                raise UserError(
                    "the optimizer keeps an average of the parameters, which is evaluated in place of them: pass "
                    "train_step.for_evaluation(state), or state.params for the trained ones"
                )
        given = state if isinstance(state, TrainState) else TrainState(state, None)
        return given._replace(key=None) if isinstance(model_of(model), LayeredModel) or needs_key(model) else given

    def eval_step(state: PyTree, batch: Batch) -> tuple[PyTree, Metrics]:
        return state, metrics_of(sums_of.whole(given_of(state), batch), batch)

    def update(state: PyTree, sums: PyTree) -> tuple[PyTree, Metrics]:
        return state, metrics_of(*sums_of.halves.update(given_of(state), sums))

    def of_given(part: Callable[..., PyTree] | None) -> Callable[..., PyTree] | None:
        return None if part is None else lambda state, *given: part(given_of(state), *given)

    halves = StepHalves._make(map(of_given, sums_of.halves))._replace(update=update)
    return EvalStep(function=eval_step, halves=halves, placement=placement)
