"""Planning settings, the shapes that they lead to, and plans of both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, check_counts, check_setting
from jvarlen._common.keywords import check_keywords
from jvarlen.planning.balance import balance_plan, packed_row_costs
from jvarlen.planning.buckets import check_buckets, cost_of_candidates, make_buckets
from jvarlen.planning.budget import Budget, BudgetSettings, Strategy, check_bucket_lengths
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import Overlong, PackedOverlong
from jvarlen.planning.order import Order, OrderSettings, OrderWord
from jvarlen.planning.pacing import Pacing, competence_pacing, linear_pacing
from jvarlen.planning.packing import Packing, PackingChoice, RowPacking, orders_of_packing, pack_samples
from jvarlen.planning.pair_buckets import make_pair_buckets
from jvarlen.planning.plan import Plan, make_plan
from jvarlen.planning.row_lengths import choose_candidate, choose_packed_buckets, decided_packing

__all__ = [
    "SHAPES_FILE", "BatchSizeRule", "ChosenShapes", "PlanConfig", "budget_of_rows", "epoch_plan", "evaluation_plans",
    "note_on_candidates", "note_on_overlong", "shapes_for",
]  # fmt: skip

_USUAL_LENGTH = 1024
_PAIRS = CostModel(constant=0.0, linear=0.0, quadratic=1.0)
_UNKNOWN_COST = "one sample a row; training packs rows where that takes fewer seconds: here a cost_model would tell"
SHAPES_FILE = "shapes.json"  # in a run directory

BatchSizeRule = Literal["linear", "sqrt", "none"]
PacingName = Literal["none", "linear", "competence"]


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(BudgetSettings, OrderSettings):
    """How samples become steps: what is asked for, from which `ChosenShapes` follow for the lengths at hand."""

    max_tokens: int = 4096
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int | Literal["auto"] = BudgetSettings.max_shapes  # type: ignore[assignment]
    """The most buckets, that is, compiled shapes; auto for as many of up to 16 as take the fewest seconds, compiling
    included. With packing auto, a number is the most."""
    num_microbatches: int | None = None  # type: ignore[assignment]
    """Microbatches of one optimizer update (M), over all devices and accumulation. None: one for each data shard and
    stage of parallel, or each device without it."""
    max_length: int | None = None
    """Longest bucket in tokens, and the length of packed rows. None: that of buckets or row_lengths, if they are given;
    else a quarter of max_tokens, but at least 1,024, or max_tokens if that is less. Where no sample is longer, packed
    rows then hold at least two of the longest samples, if max_tokens has room for them."""
    strategy: Strategy = "optimal"
    """How the lengths of the buckets are chosen."""
    length_multiple: int = 8
    """Lengths of buckets are rounded up to a multiple of this."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Buckets as pairs of rows and length, in place of chosen ones."""
    overlong: PackedOverlong | None = None
    """What happens to samples longer than max_length; split, which needs packing, trains on them in chunks.
    None: they are cut (truncate). Samples given to `fit` are refused (error)."""
    order: OrderWord = "shuffle"
    """The order in which samples come."""
    pacing: PacingName = "none"
    """Curriculum pacing, which admits the easiest samples first; needs order length."""
    pacing_steps: int = 1000
    """First step that admits all samples."""
    pacing_initial: float = 0.1
    """Share of the samples that the first step admits."""
    packing: PackingChoice = "auto"
    """padded has one sample a row. The others pack several into each: best_fit keeps samples whole, wrapped lays them
    end to end and cuts them at the ends of rows. auto takes padded shapes, packed shapes or one packed shape, whichever
    takes least by the seconds that steps and compiling take on this machine; settings that are for one of them decide
    it. For a loss of your own, which packed samples may be wrong for, auto is padded."""
    row_lengths: tuple[int, ...] = ()
    """Lengths of packed rows. If none are given: one, or with a cost model up to max_shapes."""
    cost_model: Path | None = None
    """JSON file of a cost model in seconds, which is then minimised and used for predictions."""
    memory_model: Path | None = None
    """JSON file of a cost model in bytes."""

    _needing_models: ClassVar[tuple[tuple[str, str], ...]] = (
        ("max_cost", "cost"),
        ("compile_seconds", "cost"),
        ("max_bytes", "memory"),
    )

    def __post_init__(self):
        super().__post_init__()
        for name in ("cost_model", "memory_model"):
            if (path := getattr(self, name)) is not None:
                object.__setattr__(self, name, path.absolute())
        if self.buckets:
            check_buckets(tuple(self.buckets))
        if self.row_lengths:
            try:
                check_bucket_lengths(self.row_lengths)
            except UserError as error:
                raise UserError(f"row_lengths: {error}") from None
        check_counts(self, 1, "pacing_steps")
        check_setting(self, ("pacing_initial",), lambda share: 0 < share <= 1, "above 0 and at most 1")
        for name, model in self._needing_models:
            if getattr(self, name) is not None and getattr(self, f"{model}_model") is None:
                raise UserError(f"{name} ({getattr(self, name)!r}) needs {model}_model, a file of such a model")
        self._make_budget(max_cost=None, max_bytes=None, compile_seconds=None)  # checks what needs no model
        self._make_order(self.new_shape_every)
        if self.pacing != "none" and self.new_shape_every:
            raise UserError(f"new_shape_every ({self.new_shape_every}) and pacing exclude each other")
        if odd := [length for length in self.row_lengths if length % self.length_multiple]:
            raise UserError(f"row_lengths {odd} are no multiples of length_multiple {self.length_multiple}")
        for_packed, for_single = self._given_for_packed, self._given_for_single
        if self.packing in ("best_fit", "wrapped"):
            for name in ("pacing", "strategy"):
                if name in for_single:
                    raise UserError(f"{name} {getattr(self, name)!r} is for single samples, and packed rows mix them")
        elif self.packing == "padded" and for_packed:
            name = for_packed[0]
            raise UserError(f'{name} ({getattr(self, name)}) is for packed rows: it needs packing="best_fit"')
        _ = self.packing_in_force  # which refuses settings for both

    @property
    def _given_for_packed(self) -> list[str]:
        """The given settings that only packed rows have."""
        given = ["row_lengths"] if self.row_lengths else []
        return [*given, "overlong"] if self.overlong == "split" else given

    @property
    def _given_for_single(self) -> list[str]:
        """The given settings that only single samples have, or that mean something else for packed rows."""
        usual = {"strategy": "optimal", "pacing": "none", "buckets": (), "order": "shuffle"}
        given = [name for name, value in usual.items() if getattr(self, name) != value]
        return given if self.block_size in ("auto", None) else [*given, "block_size"]

    @property
    def packing_in_force(self) -> tuple[PackingChoice, str]:
        """How samples are packed, as the settings decide it, and which do; auto where seconds are to decide."""
        if self.packing != "auto":
            return self.packing, ""
        return decided_packing(self._given_for_packed, self._given_for_single)

    @property
    def chooses_by_seconds(self) -> bool:
        """Whether seconds decide the shapes of samples of one length: their number, or whether rows are packed."""
        method, _ = self.packing_in_force
        is_given = self.buckets or self.row_lengths or self.strategy != "optimal" or method == "wrapped"
        return not is_given and (method == "auto" or self.max_shapes == "auto")

    @property
    def num_microbatches_in_force(self) -> int:
        """M."""
        return self.num_microbatches or 1

    def of_shards(self, num_shards: int) -> PlanConfig:
        """The same for a layout.

        Args:
          num_shards: how many microbatches a step has where `num_microbatches` is None.

        Returns:
          `PlanConfig` with a number of them.
        """
        if self.num_microbatches is not None:
            return self
        return dataclasses.replace(self, num_microbatches=num_shards)

    def of_files(self) -> PlanConfig:
        """The same for samples of files, which are cut where nothing is said of long ones."""
        if self.overlong is not None or self.packing == "wrapped":
            return self
        return dataclasses.replace(self, overlong="truncate")

    @functools.cached_property
    def cost(self) -> CostModel | None:
        """The cost model in seconds, read from its file once."""
        return _load_model(self.cost_model, "seconds")

    @functools.cached_property
    def memory(self) -> CostModel | None:
        """The cost model in bytes, read from its file once."""
        return _load_model(self.memory_model, "bytes")

    @functools.cached_property
    def budget(self) -> Budget:
        """The budget of a microbatch; for packed rows with their lengths, if these are given."""
        return self._make_budget(cost=self.cost, memory=self.memory)

    def _make_budget(self, **changes: Any) -> Budget:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BudgetSettings)}
        if self.max_shapes == "auto":
            del fields["max_shapes"]
        if self.num_microbatches is None:
            del fields["num_microbatches"]
        if self.row_lengths:
            fields["strategy"] = self.row_lengths
        return dataclasses.replace(Budget(**fields | changes), max_length=self.longest)

    @property
    def longest(self) -> int:
        """The longest bucket that may be chosen, in tokens."""
        if self.max_length is not None:
            return self.max_length
        given = self.row_lengths or [length for _, length in self.buckets]
        if given:
            return given[-1]
        longest = min(self.max_tokens, max(_USUAL_LENGTH, self.max_tokens // 4))
        return max(longest - longest % self.length_multiple, self.length_multiple)

    def _make_order(self, new_shape_every: int) -> Order:
        """The order of samples and steps, in which shapes come so far apart."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(OrderSettings)}
        return Order(self.order, **fields | {"new_shape_every": new_shape_every})

    def make_pacing(self) -> Pacing | None:
        """The curriculum pacing, if there is one."""
        if self.pacing == "none":
            return None
        make = linear_pacing if self.pacing == "linear" else competence_pacing
        return make(self.pacing_steps, self.pacing_initial)

    @property
    def padded_overlong(self) -> Overlong:
        """The rule for single samples that no bucket holds."""
        return "error" if self.overlong is None or self.overlong == "split" else self.overlong

    @property
    def packed_overlong(self) -> PackedOverlong:
        """The rule for samples that are longer than the longest packed row."""
        return self.overlong or "error"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenShapes:
    """The shapes that settings lead to for the lengths of a run, which keeps them."""

    buckets: tuple[tuple[int, ...], ...]  # packed rows are as long as these
    packing: RowPacking = "padded"
    reason: str = ""  # for the choice; empty where the settings say it all


def _check_for_pairs(plan: PlanConfig) -> None:
    """Raises ValueError for settings that samples of two lengths do not have."""
    settings = {
        "packing": plan.packing if plan.packing == "wrapped" else None,
        "max_shapes": "auto" if plan.max_shapes == "auto" else None,
        **{name: getattr(plan, name) for name in ("buckets", "row_lengths", "cost_model", "memory_model")},
        "overlong": plan.overlong if plan.overlong not in (None, "error", "drop") else None,
    }
    if given := [f"{name} ({value})" for name, value in settings.items() if value]:
        raise UserError(f"of samples of two lengths, `fit` takes no {', '.join(given)}: leave it out")


def budget_of_rows(plan: PlanConfig, lengths: Integer[np.ndarray, " N *2"], budget: Budget) -> Budget:
    """The budget of packed rows, which may be longer than a `max_length` that nobody gave and no sample reaches."""
    is_usual = plan.max_length is None and lengths.max() <= plan.longest
    return dataclasses.replace(budget, max_length=None) if is_usual else budget


def shapes_for(
    plan: PlanConfig,
    lengths: Integer[np.ndarray, " N *2"],
    *,
    seed: int = 0,
    budget: Budget | None = None,
    num_epochs: float = 1.0,
    whole_below: int = 0,
) -> ChosenShapes:
    """The shapes for int64[N] tokens of samples, or [N, 2], by the budget of the settings or another one.

    The others are as in `choose_candidate`.
    """
    if lengths.ndim == 2:
        _check_for_pairs(plan)
    (method, reason), limits = plan.packing_in_force, plan.budget if budget is None else budget
    if method != "padded":
        limits = budget_of_rows(plan, lengths, limits)
    packed: dict[str, Any] = {"overlong": plan.packed_overlong, "order": plan._make_order(0), "seed": seed}
    buckets: Sequence[tuple[int, ...]] = plan.buckets
    if plan.chooses_by_seconds and limits.cost is None and plan.max_shapes == "auto":
        raise UserError("max_shapes 'auto' is chosen by seconds, which training estimates: here it needs a cost_model")
    if plan.chooses_by_seconds and limits.cost is not None:
        chosen, reason = choose_candidate(
            lengths, limits, method=method, num_epochs=num_epochs, whole_below=whole_below, **packed
        )
        method, buckets = chosen.method, chosen.buckets.shapes
    elif method == "auto":
        method, reason = "padded", _UNKNOWN_COST
    if not buckets and method != "padded":
        buckets = choose_packed_buckets(lengths, limits, method=method, **packed)[0].shapes
    elif not buckets and lengths.ndim == 2:
        buckets = make_pair_buckets(lengths, limits, overlong=cast(Any, plan.padded_overlong)).shapes
    elif not buckets:
        buckets = make_buckets(lengths, limits, overlong=plan.padded_overlong).shapes
    return ChosenShapes(buckets=tuple(map(tuple, buckets)), packing=method, reason=reason)


def note_on_candidates(plan: PlanConfig, shapes: ChosenShapes, lengths: Integer[np.ndarray, " N"]) -> str | None:
    """What it costs at most that only some of very many lengths were candidates; None where all were tried."""
    if plan.buckets or shapes.packing != "padded" or plan.strategy != "optimal" or lengths.ndim == 2:
        return None
    budget = dataclasses.replace(plan.budget, max_shapes=len(shapes.buckets))
    share = cost_of_candidates(lengths, budget, plan.padded_overlong)
    return (
        f"bucket lengths were chosen from every k-th of very many: at most {share:.2%} from the best" if share else None
    )


def note_on_overlong(plan: Plan, lengths: Integer[np.ndarray, " N"]) -> str | None:
    """How many samples, and of int64[N] their tokens, are cut or dropped; None if none is."""
    if not plan.num_dropped + plan.num_truncated:
        return None
    longest, done = np.max([bucket.lengths for bucket in plan.buckets.shapes], axis=0), "cut to that"
    sides = lengths.reshape(len(lengths), -1)
    too_long = sides[(sides > longest).any(axis=1)]
    lost = int(too_long.sum())
    if plan.num_dropped:
        done = "dropped"
    else:
        lost -= int(longest.sum()) * len(too_long)
    return (
        f"{len(too_long):,} of {len(lengths):,} samples are longer than "
        f"{'+'.join(f'{length:,}' for length in longest)} tokens and are {done}, which "
        f"leaves out {lost / lengths.sum():.1%} of all tokens: max_length and overlong change that"
    )


def epoch_plan(
    plan: PlanConfig, shapes: ChosenShapes, lengths: Integer[np.ndarray, " N"], *, seed: int, epoch: int
) -> Plan:
    """The plan of an epoch over int64[N] tokens of samples; rows in random order are packed again in every epoch."""
    # Packed rows are dealt to microbatches by their attention, all else being equal within a step. By pairs of tokens
    # alone and for any devices: a run resumes on others, or with costs measured anew, and its plans stay the same.
    order = plan._make_order(plan.new_shape_every if epoch == 0 else 0)  # later, all shapes have appeared
    method = shapes.packing
    of_samples, of_rows = (order, order) if method == "padded" else orders_of_packing(order, method)
    made = make_plan(
        _rows_of(plan, shapes, lengths, of_samples, seed, epoch, method=method),
        shapes.buckets,
        num_microbatches=plan.num_microbatches_in_force,
        order=of_rows,
        pacing=plan.make_pacing(),
        seed=seed,
        epoch=epoch,
        overlong=plan.padded_overlong if method == "padded" else "error",
    )
    is_dealt = made.is_packed and lengths.ndim == 1 and made.num_microbatches > 1
    return balance_plan(made, packed_row_costs(made, lengths, _PAIRS)) if is_dealt else made


def evaluation_plans(
    plan: PlanConfig, shapes: ChosenShapes, lengths: Mapping[str, Int64[np.ndarray, " H"]]
) -> dict[str, Plan]:
    """Plans of sets of samples, int64[H] tokens each, in order of length and in the same buckets."""
    if not lengths:
        return {}
    buckets = shapes.buckets
    is_packed = shapes.packing != "padded"
    overlong = "error" if is_packed else plan.padded_overlong
    if any(each.ndim == 2 for each in lengths.values()):  # which buckets of other pairs may not hold: one for each side
        buckets = shapes_for(plan, np.concatenate(list(lengths.values()))).buckets
    of_rows = dataclasses.replace(shapes, buckets=buckets)
    plans = {}
    for name, lengths_of_set in lengths.items():
        try:
            plans[name] = make_plan(
                # Wrapped rows would cut samples that other runs evaluate whole.
                _rows_of(plan, of_rows, lengths_of_set, "dataset", 0, 0, method="best_fit" if is_packed else "padded"),
                buckets,
                order="length",
                num_microbatches=plan.num_microbatches_in_force,
                overlong=overlong,
            )
        except UserError as error:
            raise UserError(f"samples of the evaluation {name}: {error}") from None
    most = tuple(np.max([each.samples_per_row for each in plans.values()], axis=0).tolist())  # all share their programs
    return {name: dataclasses.replace(each, samples_per_row=most) for name, each in plans.items()}


def _rows_of(
    plan: PlanConfig,
    shapes: ChosenShapes,
    lengths: Integer[np.ndarray, " N"],
    order: str | Order,
    seed: int,
    epoch: int,
    *,
    method: RowPacking,
) -> Integer[np.ndarray, " N"] | Packing:
    """What a plan plans: the samples, or packed rows as long as the buckets."""
    if method == "padded":
        return lengths
    cuts_too_long = shapes.packing == "wrapped" and method == "best_fit"
    buckets = shapes.buckets
    return pack_samples(
        lengths,
        buckets[0][1:] if lengths.ndim == 2 else [length for _, length in buckets],
        method=method,
        order=order,
        seed=seed,
        epoch=epoch,
        overlong="split" if cuts_too_long else plan.packed_overlong,
    )


def _load_model(path: Path | None, unit: str) -> CostModel | None:
    if path is None:
        return None
    model = CostModel.load(path)
    if model.unit != unit:
        raise UserError(f"{path} holds a cost model in {model.unit}, not in {unit}")
    return model
