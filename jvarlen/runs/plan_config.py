"""Planning settings, and the buckets and plans made from them."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal, cast

import numpy as np
from jaxtyping import Int64, Integer

from jvarlen._common.checks import UserError, check_at_least, check_setting
from jvarlen.planning.buckets import Bucket, check_buckets, make_buckets
from jvarlen.planning.budget import Budget, Strategy
from jvarlen.planning.cost_model import CostModel
from jvarlen.planning.lengths import Overlong, PackedOverlong
from jvarlen.planning.order import Order, OrderWord
from jvarlen.planning.pacing import Pacing, competence_pacing, discrete_pacing, linear_pacing, root_pacing
from jvarlen.planning.packing.pack import Packing, pack_samples
from jvarlen.planning.packing.row_lengths import choose_packed_buckets
from jvarlen.planning.plan import Plan, make_plan

__all__ = ["DEFAULT_MAX_SHAPES", "MODEL_FILES", "BatchSizeRule", "PlanConfig"]

DEFAULT_MAX_SHAPES = 12
MODEL_FILES = ("cost_model", "memory_model")  # settings that name files, of which a run directory has copies

PacingName = Literal["none", "linear", "root", "competence", "discrete"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How samples become steps."""

    max_tokens: int = 4096
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int | Literal["auto"] = DEFAULT_MAX_SHAPES
    """The most buckets, that is, compiled shapes; auto for as many as the run is worth,
    by the seconds that steps and compiling take on this machine."""
    strategy: Strategy = "optimal"
    """How the lengths of the buckets are chosen."""
    max_length: int | None = 1024
    """Longest bucket in tokens; None for the longest sample."""
    overlong: PackedOverlong | None = None
    """What happens to samples longer than that; split, which needs pack, trains on them in pieces.
    None: an error, except that the built-in corpus is cut."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update, over all devices and accumulation."""
    buckets: tuple[tuple[int, int], ...] = ()
    """Buckets as pairs of rows and length, in place of chosen ones. A run keeps those that auto chose here."""
    eval_lengths: tuple[int, ...] = ()
    """Lengths of the buckets that evaluate. Without, those that train."""
    row_multiple: int = 1
    """Rows of a bucket are a multiple of this where the budget allows it."""
    length_multiple: int = 8
    """Lengths of buckets are rounded up to a multiple of this."""
    max_sequences: int | None = None
    """The most rows of a microbatch, however short they are; None for any number."""
    order: OrderWord = "shuffle"
    """The order in which samples come."""
    shuffle_steps: bool = False
    """Shuffle the steps, whatever the order of the samples."""
    longest_first: bool = False
    """Start with a step of the longest bucket, so that running out of memory shows at once."""
    new_shape_every: int = 0
    """In the first epoch, shape n comes no earlier than step n times this. 0: shapes come as the order has them."""
    block_size: int | None = None
    """Shuffle within blocks of this many samples.
    With order shuffle these are blocks of consecutive ids, which keeps reading local."""
    pacing: PacingName = "none"
    """Curriculum pacing, which admits the easiest samples first; needs order length."""
    pacing_steps: int = 1000
    """First step that admits all samples."""
    pacing_initial: float = 0.1
    """Share of the samples that the first step admits."""
    pacing_stages: int = 5
    """Number of stages of discrete pacing."""
    pack: bool = False
    """Pack several samples into each row."""
    row_lengths: tuple[int, ...] = ()
    """Lengths of packed rows. If none are given: only the longest, or with a cost model up to max_shapes."""
    max_samples_per_row: int | None = None
    """The most samples in a packed row; None for any number."""
    chunks_in_order: bool = False
    """Train on the pieces of a split sample in their order, none before an earlier one of its epoch."""
    cost_model: Path | None = None
    """JSON file of a cost model in seconds, which is then minimised and used for predictions."""
    max_cost: float | None = None
    """The most seconds of a microbatch, by the cost model."""
    compile_seconds: float | None = None
    """Seconds of compiling one bucket; with a cost model this decides how many are worth compiling."""
    memory_model: Path | None = None
    """JSON file of a cost model in bytes."""
    max_bytes: float | None = None
    """The most bytes of a bucket, by the memory model."""

    def __post_init__(self):
        if self.buckets:
            check_buckets(self.buckets)
        check_at_least(
            self,
            1,
            "max_tokens",
            *(() if self.max_shapes == "auto" else ("max_shapes",)),
            "max_length",
            "microbatches_per_step",
            "row_multiple",
            "length_multiple",
            "max_sequences",
            "max_samples_per_row",
            "block_size",
            "pacing_steps",
            "pacing_stages",
        )
        check_at_least(self, 0, "new_shape_every")
        check_setting(self, ("pacing_initial",), lambda share: 0 < share <= 1, "above 0 and at most 1")
        if self.row_lengths and not self.pack:
            raise UserError(f"row_lengths {self.row_lengths} are for packed rows: set pack as well")
        for name in ("max_samples_per_row", "chunks_in_order"):
            if (value := getattr(self, name)) and not self.pack:
                raise UserError(f"{name} ({value}) is for packed rows: set pack as well")
        for name, value in (("pacing", self.pacing != "none"), ("chunks_in_order", self.chunks_in_order)):
            if self.new_shape_every and value:
                raise UserError(f"new_shape_every ({self.new_shape_every}) and {name} exclude each other")
        if self.overlong == "split" and not self.pack:
            raise UserError("overlong split packs long samples in pieces: set pack as well")
        for name, model in (("max_cost", "cost"), ("compile_seconds", "cost"), ("max_bytes", "memory")):
            if getattr(self, name) is not None and getattr(self, f"{model}_model") is None:
                raise UserError(f"{name} ({getattr(self, name)!r}) needs {model}_model, a file of such a model")
        if self.pack:
            self._check_packing()

    def _check_packing(self) -> None:
        """Raises ValueError for settings that do not apply to packed rows."""
        if self.strategy != "optimal":
            raise UserError(
                f"strategy {self.strategy!r} chooses lengths for single samples: packed rows have their own"
            )
        if self.pacing != "none":
            raise UserError(f"pacing {self.pacing!r} admits samples one by one: packed rows mix short and long ones")
        if self.eval_lengths:
            raise UserError(
                f"eval_lengths {self.eval_lengths} are for single samples: packed rows evaluate as they train"
            )
        if self.chunks_in_order and self.shuffle_steps:
            raise UserError("chunks_in_order and shuffle_steps exclude each other: both decide the order of the steps")
        if self.block_size is not None:
            raise UserError(f"block_size {self.block_size} keeps samples near each other: packed rows mix them")
        odd = [length for length in self.row_lengths if length % self.length_multiple]
        if odd:
            raise UserError(f"row_lengths {odd} are no multiples of length_multiple {self.length_multiple}")
        if self.max_length is not None and self.row_lengths and max(self.row_lengths) > self.max_length:
            raise UserError(f"row_lengths {self.row_lengths} go beyond max_length {self.max_length}")

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
        """The budget of a microbatch."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(Budget)}
        if self.max_shapes == "auto":
            del fields["max_shapes"]
        return Budget(**fields | ({"strategy": self.row_lengths} if self.row_lengths else {}))

    @property
    def can_space(self) -> bool:
        """Whether `new_shape_every` may change the order of the steps."""
        return self.pacing == "none" and not self.chunks_in_order

    def make_buckets(self, lengths: Integer[np.ndarray, " N"]) -> tuple[Bucket, ...]:
        """`make_buckets` with these settings; with packing, for the lengths of the rows.

        Args:
          lengths: int64[N], tokens a sample.

        Returns:
          A tuple of `Bucket`.
        """
        if self.buckets:
            return cast("tuple[Bucket, ...]", check_buckets(self.buckets))
        if self.max_shapes == "auto":
            raise UserError("max_shapes 'auto' is chosen by a training run, which knows what its steps cost")
        if self.pack:
            return choose_packed_buckets(lengths, self.budget, self.packed_overlong, self.max_samples_per_row)
        return make_buckets(lengths, self.budget, overlong=self.bucket_overlong)

    def make_plan(
        self,
        lengths: Integer[np.ndarray, " N"],
        buckets: tuple[Bucket, ...],
        *,
        seed: int,
        epoch: int,
        out: Path | None = None,
        progress: bool = True,
    ) -> Plan:
        """`make_plan` with these settings; with a random order, rows are packed again in every epoch.

        `new_shape_every` is for epoch 0: in later ones all shapes have appeared.

        Args:
          lengths: integers[N], tokens a sample.
          buckets: from `make_buckets`.
          seed: 0 ≤ seed < 2**63.
          epoch: 0 ≤ epoch < 2**63.
          out: as in `make_plan`.
          progress: likewise.

        Returns:
          A `Plan`.
        """
        return make_plan(
            self._rows(lengths, buckets, "shuffle" if self.order == "shuffle" else "dataset", seed, epoch),
            buckets,
            microbatches_per_step=self.microbatches_per_step,
            order=Order(
                self.order,
                block_size=self.block_size,
                shuffle_steps=self.shuffle_steps,
                longest_first=self.longest_first,
                new_shape_every=self.new_shape_every if epoch == 0 else 0,
                chunks_in_order=self.chunks_in_order,
            ),
            pacing=self._pacing(),
            seed=seed,
            epoch=epoch,
            overlong=self.bucket_overlong,
            out=out,
            progress=progress,
        )

    def make_eval_buckets(self, lengths: Int64[np.ndarray, " H"], buckets: tuple[Bucket, ...]) -> tuple[Bucket, ...]:
        """The buckets that evaluate: those of training, or of the given lengths.

        Args:
          lengths: int64[H], tokens a sample of all evaluations.
          buckets: of training.

        Returns:
          A tuple of `Bucket`.
        """
        if not self.eval_lengths:
            return buckets
        budget = dataclasses.replace(self.budget, strategy=self.eval_lengths, max_length=None, compile_seconds=None)
        return make_buckets(lengths, budget, overlong=self.bucket_overlong)

    def make_eval_plan(self, lengths: Int64[np.ndarray, " H"], buckets: tuple[Bucket, ...]) -> Plan:
        """A plan of evaluation samples in the same buckets, in order of length.

        Args:
          lengths: int64[H], tokens a sample.
          buckets: from `make_eval_buckets`.

        Returns:
          A `Plan`.
        """
        return make_plan(
            self._rows(lengths, buckets, "dataset", 0, 0),
            buckets,
            order="length",
            microbatches_per_step=self.microbatches_per_step,
            overlong=self.bucket_overlong,
        )

    @property
    def bucket_overlong(self) -> Overlong:
        """The rule for samples that no bucket holds; a packing has its own."""
        if self.pack or self.overlong is None or self.overlong == "split":
            return "error"
        return self.overlong

    @property
    def packed_overlong(self) -> PackedOverlong:
        """The rule for samples that are longer than the longest packed row."""
        return self.overlong or "error"

    def _pacing(self) -> Pacing | None:
        if self.pacing == "none":
            return None
        if self.pacing == "discrete":
            return discrete_pacing(self.pacing_steps, self.pacing_stages, self.pacing_initial)
        named = {"linear": linear_pacing, "root": root_pacing, "competence": competence_pacing}
        return named[self.pacing](self.pacing_steps, self.pacing_initial)

    def _rows(
        self, lengths: Integer[np.ndarray, " N"], buckets: tuple[Bucket, ...], order: OrderWord, seed: int, epoch: int
    ) -> Integer[np.ndarray, " N"] | Packing:
        """What a plan plans: the samples, or packed rows as long as the buckets."""
        if not self.pack:
            return lengths
        return pack_samples(
            lengths,
            [bucket.length for bucket in buckets],
            max_samples_per_row=self.max_samples_per_row,
            order=order,
            seed=seed,
            epoch=epoch,
            overlong=self.packed_overlong,
        )


def _load_model(path: Path | None, unit: str) -> CostModel | None:
    if path is None:
        return None
    model = CostModel.load(path)
    if model.unit != unit:
        raise UserError(f"{path} holds a cost model in {model.unit}, not in {unit}")
    return model


BatchSizeRule = Literal["linear", "sqrt", "none"]
