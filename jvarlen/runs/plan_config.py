"""Planning settings, and their resolved values."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from jvarlen._common.checks import UserError, check_counts, check_setting
from jvarlen._common.keywords import check_keywords
from jvarlen.distributed.layout import Layout
from jvarlen.planning.buckets import check_buckets
from jvarlen.planning.budget import Budget, BudgetSettings, Strategy, check_bucket_lengths
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import Overlong, PackedOverlong
from jvarlen.planning.order import Order, OrderSettings, OrderWord, Pacing, competence_pacing, linear_pacing
from jvarlen.planning.ramps import BatchSizeStages, first_size
from jvarlen.planning.row_lengths import decide_packing
from jvarlen.planning.rules import PackingChoice
from jvarlen.planning.step_sizes import StepSize

__all__ = ["BatchSizeRule", "PlanConfig", "PlanSettings", "check_grows", "first_step_size", "shards_of"]

_USUAL_LENGTH = 1024
_ONE_A_ROW = 'one sample a row: packing="best_fit" packs several, for a loss that keeps to segment_ids'
_PACKED = "packed rows of one shape; a cost_model would compare them with padded ones"

BatchSizeRule = Literal["linear", "sqrt", "none"]
PacingName = Literal["none", "linear", "competence"]


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(BudgetSettings, OrderSettings):
    """How samples become steps."""

    max_tokens: int = 4096
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int | Literal["auto"] = BudgetSettings.max_shapes  # type: ignore[assignment]
    """The most buckets, that is, compiled shapes; auto for as many of up to 16 as take the fewest seconds, compiling
    included, which needs cost_model and compile_seconds."""
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
    length_offset: int = 0
    """Lengths of buckets are this much above a multiple of length_multiple, below which it must be."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Buckets as pairs of rows and length, in place of chosen ones."""
    sequences_per_step: int | str | None = None
    """Samples of every step, the last one of an epoch fewer: a step then has several groups of microbatches, each of
    its own shape, and makes one update. Or stages of them by tokens seen, such as 0:32,1000000:64, or 0:32,50%:64 of
    the tokens of num_epochs. None: a step has one shape, and as many samples as fit."""
    tokens_per_step: int | str | None = None
    """The same by tokens, without padding: the most that a step has. No sample may be longer."""
    overlong: PackedOverlong | None = None
    """What happens to samples longer than max_length. truncate keeps their beginning, truncate_start their end, such as
    the answer to a prompt, truncate_random another part in every epoch; split, which needs packing, trains on them in
    chunks. None: split, or truncate in padded rows and with sequences_per_step. Samples given to `fit` are refused
    (error)."""
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
    end to end and cuts them at the ends of rows. auto is best_fit in rows of one shape; or with a cost_model padded
    shapes, packed shapes or one packed shape, whichever takes the fewest seconds. Settings that only single
    samples or only packed rows have decide it. For your own loss, which may not support packed rows, auto is padded."""
    row_lengths: tuple[int, ...] = ()
    """Lengths of packed rows. If none are given: one, or with a cost model up to max_shapes."""
    cost_model: Path | None = None
    """JSON file of a cost model in seconds, which is then minimised and used for predictions."""

    def __post_init__(self):
        super().__post_init__()
        if self.cost_model is not None:
            object.__setattr__(self, "cost_model", self.cost_model.absolute())
        if self.buckets:
            check_buckets(tuple(self.buckets))
        if self.row_lengths:
            check_bucket_lengths(self.row_lengths, "row_lengths")
        given = {name: getattr(self, name) for name in ("sequences_per_step", "tokens_per_step")}
        check_counts(self, 1, "pacing_steps", *(name for name, size in given.items() if not isinstance(size, str)))
        check_setting(self, ("pacing_initial",), lambda share: 0 < share <= 1, "above 0 and at most 1")
        for name in ("max_cost", "compile_seconds"):
            if getattr(self, name) is not None and self.cost_model is None:
                raise UserError(f"{name} ({getattr(self, name)!r}) needs cost_model, a file of such a model")
        if self.max_shapes == "auto" and None in (self.cost_model, self.compile_seconds):
            raise UserError("max_shapes 'auto' is chosen by seconds: it needs cost_model and compile_seconds")
        self._budget()  # checks what needs no model
        self._order(self.new_shape_every)
        if self.pacing != "none" and self.new_shape_every:
            raise UserError(f"new_shape_every ({self.new_shape_every}) and pacing exclude each other")
        self._check_step_size()
        if odd := [length for length in self.row_lengths if length % self.length_multiple]:
            raise UserError(f"row_lengths {odd} are not multiples of length_multiple {self.length_multiple}")
        if self.packing in ("best_fit", "wrapped"):
            for name in ("pacing", "strategy"):
                if name in self._given_for_single:
                    raise UserError(f"{name} {getattr(self, name)!r} is for single samples, and packed rows mix them")
        elif self.packing == "padded":
            self._decide_packing(packs=False)
        self._decide_packing()  # refuses settings for both

    def _check_step_size(self) -> None:
        """Raises ValueError for settings that steps of a given size do not have."""
        names = "sequences_per_step", "tokens_per_step"
        given = [f"{name} ({getattr(self, name)})" for name in names if getattr(self, name) is not None]
        if given and self.pacing != "none":
            given.append(f"pacing ({self.pacing})")
        if given and self.new_shape_every:
            given.append(f"new_shape_every ({self.new_shape_every})")
        if len(given) > 1:
            raise UserError(f"{', '.join(given)} each say what a step holds: give one of them")
        first_size(self._stages)  # checks the text
        if self._stages is not None and self.shuffle_steps:
            raise UserError(f"shuffle_steps moves steps whose sizes come in stages, {self._stages}: leave it out")
        if self.sequences_per_step is not None and (self.packing == "wrapped" or self.overlong == "split"):
            cutting = f"packing ({self.packing})" if self.packing == "wrapped" else f"overlong ({self.overlong})"
            raise UserError(f"{given[0]} counts whole samples, which {cutting} cuts: give tokens_per_step")

    @property
    def _stages(self) -> str | None:
        """The stages of the size of a step, if it has some."""
        return next((size for size in (self.sequences_per_step, self.tokens_per_step) if isinstance(size, str)), None)

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

    def _decide_packing(self, *, packs: bool = True) -> tuple[PackingChoice, str]:
        """How samples are packed, or auto if seconds decide, and the reason. `packs`: whether auto may pack."""
        if not packs and self.packing in ("auto", "padded"):
            for name in self._given_for_packed:
                raise UserError(f'{name} ({getattr(self, name)}) is for packed rows: it needs packing="best_fit"')
            return "padded", _ONE_A_ROW if self.packing == "auto" else ""
        if self.packing != "auto":
            return self.packing, ""
        method, reason = decide_packing(self._given_for_packed, self._given_for_single)
        return ("best_fit", _PACKED) if method == "auto" and self.cost_model is None else (method, reason)

    def _budget(self, cost: CostModel | None = None, num_shards: int = 1) -> Budget:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(BudgetSettings)}
        if self.max_shapes == "auto":
            del given["max_shapes"]
        if cost is None:  # what these limit is checked where the model is there
            given |= {"max_cost": None, "compile_seconds": None}
        given |= {
            "num_microbatches": num_shards if self.num_microbatches is None else self.num_microbatches,
            "strategy": self.row_lengths or self.strategy,
        }
        budget = Budget(**given, cost=cost)  # which refuses what no longest bucket follows from
        return dataclasses.replace(budget, max_length=self.longest_bucket())

    def longest_bucket(self) -> int:
        """The longest bucket that may be chosen, in tokens."""
        if self.max_length is not None:
            return self.max_length
        given = self.row_lengths or [length for _, length in self.buckets]
        if given:
            return given[-1]
        longest = min(self.max_tokens, max(_USUAL_LENGTH, self.max_tokens // 4))
        longest -= (longest - self.length_offset) % self.length_multiple
        return longest if longest > 0 else self.length_offset or self.length_multiple

    def _order(self, new_shape_every: int) -> Order:
        """The order of samples and steps, with this distance between new shapes."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(OrderSettings)}
        return Order(self.order, **given | {"new_shape_every": new_shape_every})

    def resolve(self, num_shards: int = 1, *, of_files: bool = False, packs: bool = True) -> PlanSettings:
        """Fills in what the settings leave open.

        Args:
          num_shards: microbatches of a step where `num_microbatches` is None.
          of_files: whether samples come from files; long ones are then split by default, or cut in padded rows.
          packs: whether auto may pack samples.

        Returns:
          Plain values; the cost model is read from its file.

        Raises:
          ValueError: a file without such a cost model.
        """
        packing, reason = self._decide_packing(packs=packs)
        is_given = self.buckets or self.row_lengths or self.strategy != "optimal" or packing == "wrapped"
        by_seconds = self.cost_model is not None and not is_given and "auto" in (packing, self.max_shapes)
        # Chunks lie in packed rows, and a step that counts samples has none. Wrapped rows cut at their ends alone.
        splits = packing == "best_fit" and self.sequences_per_step is None
        overlong: PackedOverlong = "error"
        if of_files and packing != "wrapped":
            overlong = "split" if splits else "truncate"
        make_pacing = {"none": None, "linear": linear_pacing, "competence": competence_pacing}[self.pacing]
        return PlanSettings(
            budget=self._budget(_load_model(self.cost_model), num_shards),
            buckets=self.buckets,
            packing=packing,
            reason=reason,
            by_seconds=by_seconds,
            takes_longer_rows=self.max_length is None,
            overlong=self.overlong or overlong,
            sequences_per_step=first_size(self.sequences_per_step),
            tokens_per_step=first_size(self.tokens_per_step),
            stages=self._stages,
            order=self._order(0),
            first_order=self._order(self.new_shape_every),
            pacing=None if make_pacing is None else make_pacing(self.pacing_steps, self.pacing_initial),
        )


def shards_of(layout: Layout | None) -> int:
    """Microbatches of a step on a layout, by default; one where none is named."""
    return 1 if layout is None else max(1, layout.data) * layout.stage * (layout.context if layout.context_from else 1)


def first_step_size(plan: PlanConfig, unit: Literal["sequences", "tokens"]) -> int | None:
    """The size of the first step, if it is given in this unit."""
    return first_size(plan.sequences_per_step if unit == "sequences" else plan.tokens_per_step)


def check_grows(plan: PlanConfig, unit: Literal["sequences", "tokens"]) -> None:
    """Raises ValueError for settings of steps that cannot grow by a schedule, in this unit of batch sizes."""
    if first_step_size(plan, unit) is None:
        raise UserError(f"schedule seesaw grows batches in {unit}: give {unit}_per_step, or change batch_size_unit")
    given = {"shuffle_steps": plan.shuffle_steps}
    given |= {f"the stages {size}": isinstance(size, str) for size in (plan.sequences_per_step, plan.tokens_per_step)}
    if others := [name for name, is_given in given.items() if is_given]:
        raise UserError(f"schedule seesaw decides how large each step is: leave out {' and '.join(others)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Resolved planning settings."""

    budget: Budget  # of a microbatch; `max_length` is the longest bucket, `strategy` holds given lengths of rows
    buckets: tuple[tuple[int, ...], ...]  # given ones
    packing: PackingChoice  # auto: seconds decide
    reason: str  # for the packing
    by_seconds: bool  # whether seconds decide the shapes: their number, or whether rows are packed
    takes_longer_rows: bool  # whether packed rows may be longer than `max_length`, where no sample is
    overlong: PackedOverlong
    sequences_per_step: StepSize | None
    tokens_per_step: StepSize | None  # None, like the other: steps of one shape; a first size, where steps grow
    stages: str | None  # by which they grow
    order: Order
    first_order: Order  # of epoch 0, in which shapes may appear one by one
    pacing: Pacing | None

    @property
    def sizes_steps(self) -> bool:
        """Whether steps have a given number of samples or tokens, and so several groups."""
        return self.sequences_per_step is not None or self.tokens_per_step is not None

    def growing(self, stages: BatchSizeStages | None) -> PlanSettings:
        """The same with sizes of steps that grow in these stages, if there are some."""
        if stages is None:
            return self
        if self.tokens_per_step is None:
            return dataclasses.replace(self, sequences_per_step=stages)
        return dataclasses.replace(self, tokens_per_step=stages)

    @property
    def padded_overlong(self) -> Overlong:
        """The rule for single samples that no bucket holds."""
        return "error" if self.overlong == "split" else self.overlong


def _load_model(path: Path | None) -> CostModel | None:
    if path is None:
        return None
    model = CostModel.load(path)
    if model.unit != "seconds":
        raise UserError(f"{path} holds a cost model in {model.unit}, not in seconds")
    return model
