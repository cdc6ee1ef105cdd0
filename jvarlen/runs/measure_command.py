"""`jvarlen measure`: what a training step of the built-in model costs, or devices and the links between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jvarlen._common.checks import UserError, check_at_least_one
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.models import TransformerConfig
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.cost_model import CostModel, fit_cost_model

__all__ = ["MeasureCommand", "MeasuredCosts", "measure_costs"]

_SHARES_OF_BUDGET = (1, 4)  # a full bucket and a quarter of one tell what a step costs whatever it holds


class MeasuredCosts(NamedTuple):
    """Cost models of the training steps of a model.

    Attributes:
      seconds: of one microbatch.
      num_bytes: on one device, during a step.
      compile_seconds: of lowering and compiling one bucket, one after the other and without a cache.
    """

    seconds: CostModel
    num_bytes: CostModel
    compile_seconds: float


def measure_costs(
    model: TransformerConfig,
    *,
    max_tokens: int,
    lengths: Sequence[int],
    microbatches_per_step: int = 1,
    packed: bool = False,
    repeats: int = 3,
    progress: bool = True,
) -> MeasuredCosts:
    """Compiles and runs AdamW steps of the built-in model in some shapes, and fits cost models.

    Args:
      model: the model.
      max_tokens: tokens of the full buckets; a quarter of that is measured as well.
      lengths: lengths of rows to measure, at least 2, strictly ascending.
      microbatches_per_step: M.
      packed: whether rows hold several samples.
      repeats: runs of each shape; the fastest counts.
      progress: whether to show progress bars.

    Returns:
      `MeasuredCosts`.

    Raises:
      ValueError: lengths that are not as described, or above a quarter of `max_tokens`; other numbers below 1.
    """
    import optax  # here: settings are read without JAX

    from jvarlen.batches.batches import packed_batch_spec, token_batch_spec
    from jvarlen.batches.shapes import BatchShapes
    from jvarlen.compiling.compile import compile_buckets
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.program_store import without_compilation_cache
    from jvarlen.models import init_params, make_loss_fn
    from jvarlen.parallel.train import make_train_step
    from jvarlen.planning.buckets import Bucket

    check_at_least_one(max_tokens=max_tokens, microbatches_per_step=microbatches_per_step, repeats=repeats)
    check_bucket_lengths(lengths)
    if len(lengths) < 2:
        raise UserError(f"at least 2 lengths are needed to tell what attention costs, not {list(lengths)}")
    too_long = [length for length in lengths if length * max(_SHARES_OF_BUDGET) > max_tokens]
    if too_long:
        raise UserError(f"a quarter of max_tokens {max_tokens} holds no row of {too_long} tokens")
    step = make_train_step(make_loss_fn(model), optax.adamw(1e-3))
    state = step.init(init_params(model, seed=0))
    shapes: list[tuple[int, int]] = []
    seconds: list[float] = []
    num_bytes: list[int] = []
    compile_seconds = []
    for share in _SHARES_OF_BUDGET:
        with without_compilation_cache():  # what is asked is what compiling takes
            compiled = compile_buckets(
                step,
                state,
                BatchShapes(
                    [Bucket(max_tokens // share // length, length) for length in lengths],
                    microbatches_per_step=microbatches_per_step,
                    batch_spec=packed_batch_spec if packed else token_batch_spec,
                ),
                progress=progress,
                options=CompileOptions(cache_dir=None, num_threads=1),
            )
        measured = measure_buckets(compiled, state, repeats=repeats, progress=progress)
        shapes += measured.shapes
        seconds += measured.seconds.tolist()
        num_bytes += measured.num_bytes.tolist()
        compile_seconds.append(measured.compile_seconds)
    name = ", ".join(f"{key} {value}" for key, value in dataclasses.asdict(model).items() if value is not None)
    name += f", {microbatches_per_step} microbatches a step{', packed' if packed else ''}"
    return MeasuredCosts(
        fit_cost_model(shapes, seconds, device=measured.device, model=name),
        fit_cost_model(shapes, num_bytes, unit="bytes", device=measured.device, model=name),
        sum(compile_seconds) / len(compile_seconds),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand(DeviceConfig):
    """Measure time and memory of training steps of the built-in model, for `plan --cost-model` and `--memory-model`.

    With --links, measure devices and the links between them.
    """

    max_tokens: int = 4096
    """Tokens of the largest measured buckets."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows to measure."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update."""
    pack: bool = False
    """Measure rows that hold several samples."""
    links: bool = False
    """Measure all devices and the links between them instead, as a cluster."""
    out: Path | None = None
    """Where to write the cost model in seconds, cost.json by default; with --links the cluster, cluster.json."""
    memory_out: Path = Path("memory.json")
    """Where to write the cost model in bytes."""
    progress: bool = True
    """Show progress bars."""
    decoder: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    """The shape of the built-in model."""

    def run(self) -> None:
        """Measures, prints and saves."""
        if self.links:
            self._measure_links(self.out or Path("cluster.json"))
            return
        if self.devices is not None or self.has_processes:
            raise UserError("steps are measured on one device: devices and processes are for --links")
        out = self.out or Path("cost.json")
        missing = [str(path) for path in (out, self.memory_out) if not path.parent.is_dir()]
        if missing:
            raise FileNotFoundError(f"there is no directory for {', '.join(missing)}")
        costs = measure_costs(
            self.decoder,
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            microbatches_per_step=self.microbatches_per_step,
            packed=self.pack,
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            print(f"{path}: {fitted}")
        print(f"compiling a bucket took {costs.compile_seconds:.2f} s")

    def _measure_links(self, out: Path) -> None:
        from jvarlen.distributed.processes import is_main_process
        from jvarlen.targets.links import measure_cluster

        if not out.parent.is_dir():
            raise FileNotFoundError(f"there is no directory for {out}")
        placement, dtype = launch(self), self.decoder.compute_dtype or "float32"
        cluster = measure_cluster(placement, dtype=dtype, progress=self.progress)
        if not is_main_process():
            return
        cluster.save(out)
        print(f"{out}: {cluster.name}, {cluster.num_hosts} × {cluster.devices_per_host}, each with")
        print(
            f"  {cluster.flops_per_second / 1e9:,.1f} GFLOP/s, {cluster.memory_bytes / 1e9:,.1f} GB of memory at ",
            end="",
        )
        print(f"{cluster.memory_bytes_per_second / 1e9:,.2f} GB/s")
        for name, link in (("link", cluster.link), ("host link", cluster.host_link))[: 1 + (cluster.num_hosts > 1)]:
            print(f"  {name}: {link.bytes_per_second / 1e9:,.2f} GB/s, {1e6 * link.latency_s:,.1f} µs")
        print(cluster.sources)
