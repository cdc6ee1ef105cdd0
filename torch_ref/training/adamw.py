"""AdamW for batches of varying size: moments, rate and epsilon of each step follow its batch size."""

import math
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.optim import Optimizer

from torch_ref.checks import check_number, known_keywords
from torch_ref.planning.plan import Plan
from torch_ref.training.batch_sizes import UNITS, StepValues
from torch_ref.training.lr import Rule, lr_scale

__all__ = ["AdamWByBatchSize"]


@known_keywords
class AdamWByBatchSize(Optimizer):
    """AdamW whose moments forget by samples (or tokens) in place of steps, and whose rate follows the batch size.

    At a step of n samples, r = n / base_batch_size and s = rule(r):

    - each moment keeps beta ** r of its value and takes 1 - beta ** r of the gradient, or of its square;
    - bias corrections divide by 1 - beta ** R, R the sum of r over the steps of a parameter;
    - the parameter moves by -lr * s * (m / (sqrt(v) + eps) + weight_decay * parameter).

    Batches of `base_batch_size` give `torch.optim.AdamW`, and one of twice the size counts as two for the half-life of
    both moments. A batch of 0 leaves the moments as they are.

    The batch size comes from `batch_sizes`, or the loop sets it before each step, in all groups:
    `for group in optimizer.param_groups: group["batch_size"] = n`. The train steps of `torch_ref` do, in the unit of
    `group["unit"]` where the batch tells it. A step takes it away, so that the next one cannot use it again. Where both
    are there, they must be equal.

    `group["lr"]` stays unscaled, for torch's schedulers; `VariableBatchSizeLR` would scale a second time and refuses.
    The count of steps, which is the place in `batch_sizes`, is in `state_dict()`; batch sizes and rule are not. A
    `GradScaler` leaves unscaling to the optimizer, as with `fused=True`: a step whose gradients overflow changes
    nothing, but uses its batch up.

    Args:
        params: parameters or groups of them, real and dense. Groups may have their own `lr`, `betas`, `eps` and
            `weight_decay`.
        lr: the rate at `base_batch_size`, a number or a tensor of one.
        base_batch_size: the batch size for which rate and betas were chosen, > 0, in `unit`.
        betas: what is left of the first and the second moment after a batch of `base_batch_size`, in [0, 1).
        eps: added to the root of the second moment, >= 0.
        weight_decay: at least 0.
        rule: how the rate follows the ratio, as in `lr_scale`.
        unit: what batch sizes count: "sequences" (real samples of the step) or "tokens" (real tokens).
        eps_rule: "sqrt" divides `eps` by the root of r; None leaves it.
        batch_sizes: as in `VariableBatchSizeLR`: a plan, the plans of all epochs, or [S] numbers >= 0 in `unit`.

    Raises:
        ValueError: if an argument is out of its range; and later, if a step has no batch size, another one than
            planned, or comes after the last of `batch_sizes`; if a gradient is sparse or complex; or if a state is of
            another unit or optimizer.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> optimizer = AdamWByBatchSize([weight], 0.1, 32, batch_sizes=[128, 32])
        >>> weight.grad = torch.ones(2)
        >>> optimizer.step()
        >>> round(float(optimizer.state[weight]["exp_avg"][0]), 4)  # 1 - 0.9 ** 4
        0.3439

    References:
        Half-lives in tokens: Marek et al. 2025, "Small Batch Size Training for Language Models". The square root for
        rate and epsilon: Malladi et al. 2022, "On the SDEs and Scaling Rules for Adaptive Gradient Algorithms".
    """

    # A `GradScaler` then calls `step()` for gradients that overflow, too.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        base_batch_size: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rule: Rule = "sqrt",
        unit: str = "sequences",
        eps_rule: str | None = None,
        batch_sizes: Plan | Iterable[Plan] | ArrayLike | None = None,
    ) -> None:
        """Check the arguments; states of parameters are made at their first step."""
        if unit not in UNITS:
            raise ValueError(f'unit must be "sequences" or "tokens", got {unit!r}')
        if eps_rule not in ("sqrt", None):
            raise ValueError(f'eps_rule must be "sqrt" or None, got {eps_rule!r}')
        lr_scale(base_batch_size, base_batch_size, rule)
        self._base_batch_size, self._rule, self._eps_rule = float(base_batch_size), rule, eps_rule
        self._sizes: StepValues | None = None
        if batch_sizes is not None:

            def checked(sizes: Any) -> Any:
                lr_scale(sizes, base_batch_size, rule)
                return sizes.astype(np.float64)

            self._sizes = StepValues(batch_sizes, unit, checked)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "unit": unit, "batch_size": None, "num_steps": 0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, whose moments begin with the next step.

        Args:
            param_group: as of torch's optimizers.

        Raises:
            ValueError: if a setting is out of its range.
        """
        group = {**self.defaults, **param_group}
        if group["unit"] != self.defaults["unit"]:
            raise ValueError(f"all groups count {self.defaults['unit']}, got a group of unit {group['unit']!r}")
        rate = group["lr"]
        check_number("lr", rate.item() if isinstance(rate, Tensor) else rate)
        for name in ("eps", "weight_decay"):
            check_number(name, group[name])
        if len(group["betas"]) != 2 or any(check_number("beta", beta) >= 1 for beta in group["betas"]):
            raise ValueError(f"betas must be two numbers below 1, got {group['betas']!r}")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies need, which for torch is not all attributes."""
        own = ("_base_batch_size", "_rule", "_eps_rule", "_sizes")
        return {**super().__getstate__(), **{name: self.__dict__[name] for name in own}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back.

        Args:
            state_dict: what `state_dict` gave, from an optimizer of the same unit.

        Raises:
            ValueError: if it is of another unit or optimizer.
        """
        units = [group.get("unit") for group in state_dict["param_groups"]]
        if any(unit != self.defaults["unit"] for unit in units):
            raise ValueError(
                f"the state must be of AdamWByBatchSize(unit={self.defaults['unit']!r}), its groups have units {units}"
            )
        super().load_state_dict(state_dict)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the gradients of one batch.

        Args:
            closure: computes the gradients, and returns the loss; it may set the batch size.

        Returns:
            What the closure returns, or None.

        Raises:
            ValueError: as the class says, before anything has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if _only_prepares_state():
            sizes = [0.0] * len(self.param_groups)
        else:
            sizes = self._sizes_of_groups()
            self._check_gradients()
            num_steps = self.param_groups[0]["num_steps"] + 1
            for group in self.param_groups:
                group.update(batch_size=None, num_steps=num_steps)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is None or not float(found_inf):
            for group, size in zip(self.param_groups, sizes, strict=True):
                self._update(group, size)
        return loss

    def _sizes_of_groups(self) -> list[float]:
        """Return the batch size of this step for each group."""
        step = self.param_groups[0]["num_steps"]
        given = [group["batch_size"] for group in self.param_groups]
        missing = [index for index, size in enumerate(given) if size is None]
        if self._sizes is not None:
            self._sizes.check(step)
            planned = self._sizes.at(step)
            if others := [size for size in given if size is not None and float(size) != planned]:
                raise ValueError(
                    f"step {step} has a batch of {others[0]} {self.defaults['unit']}, batch_sizes say {planned:g}: the "
                    "steps must come as planned; a resumed run needs load_state_dict"
                )
            return [planned] * len(given)
        if missing:
            raise ValueError(
                f"step {step} has no batch size in parameter groups {missing}: before each step, set "
                'group["batch_size"] of all optimizer.param_groups, because a step takes it away; or give the '
                "optimizer batch_sizes=, such as the plans of all epochs"
            )
        return [check_number("batch_size", size.item() if isinstance(size, Tensor) else size) for size in given]

    def _check_gradients(self) -> None:
        gradients = (parameter.grad for group in self.param_groups for parameter in group["params"])
        bad = [tuple(each.shape) for each in gradients if each is not None and (each.is_sparse or each.is_complex())]
        if bad:
            raise ValueError(f"gradients must be dense and real, got sparse or complex ones of shapes {bad}")

    def _update(self, group: dict[str, Any], size: float) -> None:
        ratio = size / self._base_batch_size
        rate = float(group["lr"]) * float(lr_scale(size, self._base_batch_size, self._rule))
        eps = group["eps"]
        if self._eps_rule == "sqrt":
            eps = eps / math.sqrt(ratio) if ratio else math.inf
        for parameters in _updated_together([each for each in group["params"] if each.grad is not None]):
            self._update_alike(parameters, group["betas"], ratio, rate, eps, group["weight_decay"])

    def _update_alike(
        self,
        parameters: list[Tensor],
        betas: tuple[float, float],
        ratio: float,
        rate: float,
        eps: float,
        weight_decay: float,
    ) -> None:
        """Update parameters of one kind, which torch's operations take together."""
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if (scale := getattr(self, "grad_scale", None)) is not None:
            torch._foreach_mul_(gradients, 1 / float(scale))
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
                state["num_base_batches"] = 0.0
            state["num_base_batches"] += ratio
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, _taken(betas[0], ratio))
        torch._foreach_mul_(squares, betas[1] ** ratio)
        torch._foreach_addcmul_(squares, gradients, gradients, _taken(betas[1], ratio))
        if not rate:
            return
        # Without any samples so far, moments are 0 and need no correction.
        corrections = [[_taken(beta, state["num_base_batches"]) or 1.0 for state in states] for beta in betas]
        torch._foreach_mul_(parameters, 1 - rate * weight_decay)
        roots = torch._foreach_sqrt(squares)
        torch._foreach_div_(roots, [math.sqrt(correction) for correction in corrections[1]])
        torch._foreach_add_(roots, eps)
        torch._foreach_addcdiv_(parameters, means, roots, [-rate / correction for correction in corrections[0]])


def _updated_together(parameters: list[Tensor]) -> list[list[Tensor]]:
    """Return lists of parameters of one kind and place; on a CPU one at a time, which its caches hold."""
    alike: dict[Any, list[Tensor]] = {}
    for each in parameters:
        own = id(each) if each.device.type == "cpu" else None
        alike.setdefault((type(each), each.device, each.dtype, own), []).append(each)
    return list(alike.values())


def _taken(beta: float, ratio: float) -> float:
    """Return 1 - beta ** ratio without cancellation."""
    return -math.expm1(ratio * math.log(beta)) if beta else float(ratio > 0)


def _only_prepares_state() -> bool:
    """Return whether `torch.distributed.checkpoint` takes a step with gradients of 0, so that states are there."""
    frame: FrameType | None = sys._getframe(2)
    names: list[str] = []
    while frame is not None and len(names) < 8:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return "_init_optim_state" in names
