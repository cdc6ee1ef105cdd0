"""Learning rates from batch sizes: single rates, the table of a plan, and a torch scheduler."""

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, SequentialLR

from torch_ref.checks import check_number, known_keywords, list_offenders
from torch_ref.planning.plan import Plan
from torch_ref.training.batch_sizes import UNITS, StepValues, step_sizes

__all__ = ["Rule", "VariableBatchSizeLR", "beta_sequence", "lr_scale", "lr_sequence"]

Rule = Literal["linear", "sqrt"] | None | Callable[[NDArray[np.float64]], ArrayLike]


@known_keywords
def lr_scale(batch_size: ArrayLike, base_batch_size: float, rule: Rule = "linear") -> Any:
    """Return the factor on the learning rate that a batch size calls for.

    Args:
        batch_size: a number or an array of them, >= 0; sequences, or tokens when the base counts tokens.
        base_batch_size: the batch size for which the base rate was chosen, > 0, in the same unit.
        rule: "linear" (the ratio), "sqrt" (its square root), None (1), or a function of the ratio, which it gets as
            float64 of `batch_size`'s shape and answers with as many scales.

    Returns:
        float64 of `batch_size`'s shape.

    Raises:
        ValueError: if a batch size is negative or not finite (the first are listed), if the base is not above 0, if
            the rule is unknown, or if its scales have another shape, are negative or not finite.

    Example:
        >>> float(lr_scale(10, 2)), float(lr_scale(8, 2, "sqrt"))
        (5.0, 2.0)
    """
    sizes = np.asarray(batch_size, dtype=np.float64)
    check_number("base_batch_size", base_batch_size, above=0)
    _check_not_negative("batch sizes", sizes)
    ratio = sizes / np.float64(base_batch_size)
    if rule == "linear":
        return np.float64(ratio) if ratio.ndim == 0 else ratio
    if rule == "sqrt":
        return np.sqrt(ratio)
    if rule is None:
        return np.ones_like(ratio)[()]
    if callable(rule):
        scales = np.asarray(rule(ratio), dtype=np.float64)
        if scales.shape != ratio.shape:
            raise ValueError(f"the rule answered ratios of shape {ratio.shape} with scales of shape {scales.shape}")
        _check_not_negative("scales that the rule gives", scales)
        return scales[()]
    raise ValueError(f'rule must be "linear", "sqrt", None or a function, got {rule!r}')


@known_keywords
def lr_sequence(
    plan: Plan | Iterable[Plan | int] | ArrayLike,
    base_schedule: float | ArrayLike | Callable[[int], float],
    base_batch_size: float,
    *,
    rule: Rule = "linear",
    unit: str = "sequences",
    counted_in: str = "steps",
) -> NDArray[np.float64]:
    """Return the learning rate of every step of a plan, or of several plans that follow each other.

    As a torch scheduler, over an optimizer of rate 1, the table is `LambdaLR(optimizer, lambda t: rates[t])`, where
    `rates = [*table.tolist(), 0.0]`: torch looks up one more after the last step, and NumPy's scalars in a state would
    keep `torch.load(weights_only=True)` from reading it.

    Args:
        plan: a plan, or one for each epoch; S steps together, and every count continues from one to the
            next. Or integers [S], the batch size of each step in `unit`, without a plan.
        base_schedule: the rate at `base_batch_size`: a number, a function of a count, or an array [S].
        base_batch_size: the batch size for which that rate was chosen, > 0, in `unit`.
        rule: as in `lr_scale`.
        unit: what a batch size counts: "sequences" (real samples of the step) or "tokens" (real tokens).
        counted_in: what a function's argument counts, of all that came before the step: "steps", "sequences" or
            "tokens". Counted in samples or tokens, a schedule takes as many of them whatever the steps' sizes are.

    Returns:
        float64[S].

    Raises:
        ValueError: if an argument is out of its range, if batch sizes are not integers or should be counted in another
            unit, if the schedule has another number of values than the plan has steps, or is an array and not counted
            in steps; or if a plan whose `size` is not the sum should count tokens.

    Example:
        >>> from torch_ref.planning.make_plan import make_plan
        >>> plan = make_plan([3] * 14, [(10, 3)], order="length")
        >>> lr_sequence([plan, plan], lambda seen: 1.0 + seen, 1, rule=None, counted_in="sequences").tolist()
        [1.0, 11.0, 15.0, 25.0]
    """
    if unit not in UNITS:
        raise ValueError(f'unit must be "sequences" or "tokens", got {unit!r}')
    if counted_in not in ("steps", "sequences", "tokens"):
        raise ValueError(f'counted_in must be "steps", "sequences" or "tokens", got {counted_in!r}')
    sizes, counts = step_sizes(plan, unit, counted_in)
    scales = lr_scale(sizes, base_batch_size, rule)
    if callable(base_schedule):
        before = np.concatenate([[0], counts[:-1].cumsum()])
        base = np.array([float(base_schedule(count)) for count in before.tolist()])
    else:
        base = np.asarray(base_schedule)
        if base.dtype.kind not in "iuf":
            raise ValueError(f"base_schedule must be a number, a function or an array, got {base_schedule!r}")
        base = base.astype(np.float64)
        if base.ndim and counted_in != "steps":
            raise ValueError(f"base_schedule must be a function or a number to be counted in {counted_in}")
        if base.shape not in ((), scales.shape):
            raise ValueError(f"base_schedule must be a number or {len(scales)} values, got shape {base.shape}")
    rates: NDArray[np.float64] = base * scales
    return rates


@known_keywords
def beta_sequence(
    plan: Plan | Iterable[Plan | int] | ArrayLike, beta: float, base_batch_size: float, *, unit: str = "sequences"
) -> NDArray[np.float64]:
    """Return what is left of a moment after every step of `AdamWByBatchSize`: beta ** (batch size / base_batch_size).

    Args:
        plan: as in `lr_sequence`: a plan, several, or integers [S], S steps together.
        beta: what is left after a step of `base_batch_size`, at least 0 and below 1.
        base_batch_size: the batch size for which beta was chosen, > 0, in `unit`.
        unit: what a batch size counts: "sequences" (real samples of the step) or "tokens" (real tokens).

    Returns:
        float64[S]; 1 for a batch of 0.

    Raises:
        ValueError: if an argument is out of its range, or if a plan whose `size` is not the sum should count tokens.

    Example:
        >>> beta_sequence([1, 2, 4, 0], 0.25, 2).tolist()
        [0.5, 0.25, 0.0625, 1.0]
    """
    if unit not in UNITS:
        raise ValueError(f'unit must be "sequences" or "tokens", got {unit!r}')
    if check_number("beta", beta) >= 1:
        raise ValueError(f"beta must be below 1, got {beta!r}")
    (sizes,) = step_sizes(plan, unit)
    betas: NDArray[np.float64] = np.float64(beta) ** lr_scale(sizes, base_batch_size)
    return betas


@known_keywords
class VariableBatchSizeLR(LRScheduler):
    """Scale the learning rate of each step by its batch size, on top of any other scheduler.

    The wrapped scheduler never sees the scaling: before it steps, every group gets its unscaled rate back, because most
    of torch's schedulers compute the next rate from the one in the group. Call `step()` on this object only, once for
    each step of the optimizer; one that a `GradScaler` skips counts too, because its batch is used up. Each parameter
    group keeps its base rate; all have the same scale. A group that is added later comes with its base rate, which is
    scaled from the optimizer's next step on; whether the wrapped scheduler accepts one group more is up to it, as
    without scaling.

    Trainers of others call `step()` themselves. accelerate's prepared scheduler calls it once a process: all calls that
    follow one step of the optimizer advance it once. When a `GradScaler` skips a step, accelerate and transformers'
    Trainer call nothing, so in float16 they need an optimizer with `fused=True`, whose steps a `GradScaler` never
    skips.

    Args:
        optimizer_or_scheduler: an optimizer (a constant base rate), or a scheduler of one; of the wrappers of
            accelerate and Lightning, what they hold is taken. Schedulers are combined below the scale:
            `VariableBatchSizeLR(ChainedScheduler([...]), ...)`, and likewise `SequentialLR`.
        batch_sizes: a plan, whose real samples count, or the plans of the epochs that follow each other; or [S] numbers
            >= 0, the batch size of each step. An iterator of plans is read as they come; with one, the scheduler cannot
            be copied or pickled.
        base_batch_size: the batch size for which the base rate was chosen, > 0, in the same unit.
        rule: as in `lr_scale`.
        repeat: after the last batch size, begin again with the first: for epochs of the same steps in the same order.
        grad_scaler: a `GradScaler` of your own loop or of Lightning may skip steps of the optimizer, so that `step()`
            may follow none. A second `step()` in a step then goes unnoticed. It skips none with `fused=True`.

    Raises:
        ValueError: if `batch_sizes` are neither plans nor 1-D with at least one element, or for what `lr_scale`
            refuses; and later, if the optimizer takes a step that has no batch size any more, or two without `step()`
            between them, if `step()` is called without a step of the optimizer before it, if accelerate drives an
            optimizer without `fused=True` in float16, and if it is made a member of a `ChainedScheduler` or
            `SequentialLR`, whose others would count scaled rates in.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        >>> VariableBatchSizeLR(optimizer, [10, 4], 2).get_last_lr()
        [0.005]

        Over a schedule:

        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1e-3)
        >>> cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        >>> scheduler = VariableBatchSizeLR(cosine, [10, 4], 2, rule="sqrt")

        Over all epochs, each shuffled anew:

        >>> from torch_ref.planning.make_plan import make_plan
        >>> plans = [make_plan([3] * 14, [(10, 3)], epoch=epoch) for epoch in range(3)]
        >>> scheduler = VariableBatchSizeLR(torch.optim.SGD([torch.zeros(1)], lr=1e-3), plans, 2)
    """

    def __init__(
        self,
        optimizer_or_scheduler: Optimizer | LRScheduler,
        batch_sizes: Plan | Iterable[Plan] | ArrayLike,
        base_batch_size: float,
        *,
        rule: Rule = "linear",
        repeat: bool = False,
        grad_scaler: bool = False,
    ) -> None:
        """Put the first step's rate in force."""
        self._may_skip = grad_scaler
        scales = partial(lr_scale, base_batch_size=base_batch_size, rule=rule)
        self._scales = StepValues(batch_sizes, "sequences", scales, repeat=repeat)
        inner = _unwrap(optimizer_or_scheduler)
        wrapped = None if isinstance(inner, Optimizer) else inner
        optimizer = inner if wrapped is None else _unwrap(wrapped.optimizer)
        if any("batch_size" in group for group in optimizer.param_groups):
            raise ValueError(
                "the optimizer scales its rates by batch sizes itself, and would a second time: leave out "
                "VariableBatchSizeLR, and step the scheduler that it wraps"
            )
        self._unscaled_lrs = _get_rates(optimizer)
        # The base class takes a first step, on which the wrapped scheduler, which is in its first state, must not move.
        self._wrapped: LRScheduler | None = None
        self._has_updated = False
        super().__init__(optimizer)
        self._wrapped = wrapped
        self._follow(optimizer)

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer whose rates are scaled."""
        # torch tells a member nothing of its owner. Both owners read this property first, before they change anything,
        # so the object whose method reads it is taken from the caller's frame.
        asking = sys._getframe(1).f_locals.get("self")
        if isinstance(asking, ChainedScheduler | SequentialLR):
            name = type(asking).__name__
            raise ValueError(
                f"VariableBatchSizeLR cannot be a member of {name}, where other schedulers see its scaled rates: put "
                f"it around them, VariableBatchSizeLR({name}(...), batch_sizes, base_batch_size)"
            )
        return self._optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def _follow(self, optimizer: Optimizer) -> None:
        """Have the optimizer tell of its updates, without keeping the scheduler alive."""
        for register, method in (
            (optimizer.register_step_pre_hook, weakref.WeakMethod(self._before_update)),
            (optimizer.register_step_post_hook, weakref.WeakMethod(self._after_update)),
        ):

            def hook(*_: Any, method: Any = method) -> None:
                if (tell := method()) is not None:
                    tell()

            weakref.finalize(self, register(hook).remove)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the attributes of a copy, whose optimizer has lost its hooks."""
        self.__dict__.update(state)
        self._follow(self._optimizer)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the wrapped scheduler, then scale its rates for the next step.

        Called by accelerate's wrapper, it does nothing unless the optimizer has taken a step since it advanced last.

        Args:
            *args: for the wrapped scheduler (`ReduceLROnPlateau` wants a metric).
            **kwargs: likewise.

        Raises:
            ValueError: if all batch sizes are used up; after the last one, it may be called once. Or if the optimizer
                has taken no step since it was called last.
        """
        caller = sys._getframe(1).f_locals.get("self")
        if type(caller).__name__ == "AcceleratedScheduler" and not self._has_updated:
            return
        self._check_scale(self.last_epoch)
        is_first = self.last_epoch < 0  # of the base class
        if not (self._has_updated or self._may_skip or is_first):
            raise ValueError(
                f"scheduler.step() came before the optimizer has taken step {self.last_epoch}: call it once after each "
                "step of the optimizer, not once a microbatch or process. Where a GradScaler skips steps of the "
                "optimizer in your loop: VariableBatchSizeLR(..., grad_scaler=True), or an optimizer with fused=True. "
                "To go on from a checkpoint: load_state_dict"
            )
        self._has_updated = False
        self._scale_new_groups()
        if self._wrapped is not None:
            _set_rates(self.optimizer, self._unscaled_lrs)
            self._wrapped.step(*args, **kwargs)
            self._unscaled_lrs = _get_rates(self.optimizer)
        super().step()

    def get_last_lr(self) -> list[float | Tensor]:
        """Return the rate in force of each parameter group, whoever set it."""
        self._scale_new_groups()
        return _get_rates(self.optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each parameter group at the current step, `last_epoch`."""
        return [rate * self._scale for rate in self._unscaled_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the sequence, the unscaled rates and the wrapped scheduler's state; no batch sizes."""
        self._scale_new_groups()
        kept = ("last_epoch", "_step_count", "_unscaled_lrs", "_has_updated")
        wrapped = None if self._wrapped is None else self._wrapped.state_dict()
        return {**{name: self.__dict__[name] for name in kept}, "wrapped": wrapped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back; the optimizer has the right rates at once.

        Args:
            state_dict: what `state_dict` gave, from a scheduler built alike.

        Raises:
            ValueError: if only one of the two wraps a scheduler, the optimizer has not as many parameter groups, or
                there are fewer batch sizes than steps were taken.
        """
        state = dict(state_dict)
        wrapped = state.pop("wrapped")
        if (wrapped is None) != (self._wrapped is None):
            raise ValueError("the state and this scheduler must both wrap a scheduler, or neither")
        num_groups, num_in_state = len(self.optimizer.param_groups), len(state["_unscaled_lrs"])
        if num_groups != num_in_state:
            raise ValueError(
                f"the optimizer has {num_groups} parameter groups, the state {num_in_state}: give the optimizer all "
                "groups first, those included that were added on the way"
            )
        self._check_scale(state["last_epoch"] - 1)
        if self._wrapped is not None:
            self._wrapped.load_state_dict(wrapped)
        self.__dict__.update(state)
        _set_rates(self.optimizer, self.get_lr())

    @property
    def _scale(self) -> float:
        """The scale of the current step, or after the last one that of the last."""
        return self._scales.at(self.last_epoch)

    def _check_scale(self, step: int) -> None:
        self._scales.check(step, "; or repeat=True where every epoch has the same steps in the same order")

    def _before_update(self) -> None:
        self._check_scale(self.last_epoch)
        if self._has_updated:
            raise ValueError(
                f"the optimizer has taken step {self.last_epoch}, and the scheduler was not stepped since: call "
                'scheduler.step() after each step of the optimizer; in Lightning, with "interval": "step" beside '
                '"scheduler"'
            )
        optimizer = self._optimizer
        # accelerate puts a function of this name in place of the method where a `GradScaler` may skip the step.
        is_scaled = "patch_optimizer_step" in getattr(optimizer.step, "__qualname__", "")
        if is_scaled and not getattr(optimizer, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"accelerate does not tell schedulers which steps of {type(optimizer).__name__} a GradScaler skips, "
                "and later steps would have the rates of other batches: make the optimizer with fused=True, or train "
                'with mixed_precision="bf16"'
            )
        self._scale_new_groups()

    def _after_update(self) -> None:
        self._has_updated = True

    def _scale_new_groups(self) -> None:
        groups = self.optimizer.param_groups
        for group in groups[len(self._unscaled_lrs) :]:
            rate = group["lr"]
            # A default rate that is a tensor is that of other groups too, and scaled already.
            known = zip(groups, self._unscaled_lrs, strict=False)
            shared = [unscaled for other, unscaled in known if isinstance(rate, Tensor) and other["lr"] is rate]
            unscaled = shared[0] if shared else _plain(rate)
            self._unscaled_lrs = [*self._unscaled_lrs, unscaled]
            _set_rate(group, unscaled * self._scale)


def _unwrap(given: Any) -> Any:
    """Return the optimizer or scheduler of torch that wrappers of accelerate and Lightning hold."""
    while isinstance(given, Optimizer) and isinstance(inner := getattr(given, "optimizer", None), Optimizer):
        given = inner
    while not isinstance(given, Optimizer | LRScheduler) and hasattr(given, "scheduler"):
        given = given.scheduler
    if not isinstance(given, Optimizer | LRScheduler):
        raise ValueError(f"give an optimizer or a scheduler of torch, got {type(given).__name__}")
    return given


def _check_not_negative(what: str, values: NDArray[np.float64]) -> None:
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        raise ValueError(f"{what} must be finite and at least 0: {list_offenders(bad, values.reshape(-1)[bad], 0)}")


def _get_rates(optimizer: Optimizer) -> list[float | Tensor]:
    # A tensor rate is changed in place by torch: keep a copy. Others become plain numbers, which safe loading reads.
    return [_plain(group["lr"]) for group in optimizer.param_groups]


def _plain(rate: float | Tensor) -> float | Tensor:
    return rate.clone() if isinstance(rate, Tensor) else float(rate)


def _set_rates(optimizer: Optimizer, rates: list[float | Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        _set_rate(group, rate)


def _set_rate(group: dict[str, Any], rate: float | Tensor) -> None:
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate.item() if isinstance(rate, Tensor) else rate)
    else:
        group["lr"] = rate
