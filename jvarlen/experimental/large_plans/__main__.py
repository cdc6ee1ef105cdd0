"""`python -m jvarlen.experimental.large_plans lengths.npy plan --max-tokens N` plans on disk."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from jvarlen._common.files import check_outputs, load_array
from jvarlen._common.options import POSITIONAL
from jvarlen._common.terminal import say
from jvarlen.cli import run_command
from jvarlen.experimental.large_plans.histogram import LargeOverlong, histogram_in_pieces
from jvarlen.experimental.large_plans.out_of_core import plan_on_disk
from jvarlen.planning.make_buckets import make_buckets
from jvarlen.planning.order import OrderWord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
    """Plan an epoch of more samples than fit memory, on disk. An interrupted command goes on when it is repeated."""

    lengths: Path = dataclasses.field(metadata=POSITIONAL)
    """A .npy file of integers, tokens a sample."""
    out: Path = dataclasses.field(metadata=POSITIONAL)
    """The file of the plan."""
    max_tokens: int
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int = 16
    """The most buckets, that is, compiled shapes."""
    max_length: int | None = None
    """Longest bucket in tokens; None for the longest sample."""
    overlong: LargeOverlong = "error"
    """What happens to samples longer than that."""
    num_microbatches: int = 1
    """Microbatches of one optimizer update, over all devices and accumulation."""
    row_multiple: int = 1
    """Rows of a bucket are a multiple of this where the budget allows it."""
    length_multiple: int = 1
    """Lengths of buckets are rounded up to a multiple of this."""
    order: OrderWord = "shuffle"
    """The order in which samples come."""
    seed: int = 0
    """Seed of every shuffle, together with the epoch."""
    epoch: int = 0
    """The epoch to plan."""
    progress: bool = True
    """Show progress bars."""

    def run(self) -> None:
        """Plans, and prints the plan."""
        check_outputs({"out": self.out}, self.lengths)
        lengths = load_array(self.lengths, "lengths")
        values, counts = histogram_in_pieces(lengths)
        buckets = make_buckets(
            values,
            self.max_tokens,
            counts=counts,
            max_shapes=self.max_shapes,
            max_length=self.max_length,
            overlong=self.overlong,
            num_microbatches=self.num_microbatches,
            row_multiple=self.row_multiple,
            length_multiple=self.length_multiple,
        )
        plan = plan_on_disk(
            lengths,
            buckets,
            self.out,
            num_microbatches=self.num_microbatches,
            order=self.order,
            seed=self.seed,
            epoch=self.epoch,
            overlong=self.overlong,
            progress=self.progress,
        )
        say(plan.report(), f"digest {plan.digest}", self.out)


def main(args: list[str] | None = None) -> int:
    """Runs the command; a user's mistake is one line and exit code 2."""
    given = sys.argv[1:] if args is None else args
    return run_command("experimental.large_plans.__main__", "Command", given, prog="large_plans")


if __name__ == "__main__":
    sys.exit(main())
