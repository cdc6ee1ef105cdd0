"""Configuration: frozen dataclasses, checked where they are made, and their JSON form.

The fields are the settings of `jvarlen train`; their docstrings are its help.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import dacite
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int64

from jvarlen.buckets import Bucket, Strategy, choose_row_lengths, make_buckets
from jvarlen.compile_options import CompileOptions
from jvarlen.costs import CostModel
from jvarlen.curriculum import Order
from jvarlen.distributed import data_mesh, divide_processor
from jvarlen.files import write_atomically
from jvarlen.lengths import Overlong
from jvarlen.models import TransformerConfig
from jvarlen.pacing import Pacing, competence_pacing, discrete_pacing, linear_pacing, root_pacing
from jvarlen.packing import Packing, pack_samples
from jvarlen.plan import Plan, make_plan
from jvarlen.processes import initialize_processes

__all__ = [
    "BatchSizeRule",
    "DeviceConfig",
    "FitConfig",
    "OptimizerConfig",
    "PlanConfig",
    "differing_settings",
    "flat_settings",
    "load_config",
    "save_config",
]

BatchSizeRule = Literal["linear", "sqrt", "none"]
PacingName = Literal["none", "linear", "root", "competence", "discrete"]


def _check_at_least(config: object, limit: int, *names: str) -> None:
    _check(config, names, lambda value: value is None or limit <= value < math.inf, f"finite and at least {limit}")


def _check_above(config: object, limit: int, *names: str) -> None:
    _check(config, names, lambda value: limit < value < math.inf, f"finite and above {limit}")


def _check_fraction(config: object, *names: str) -> None:
    _check(config, names, lambda value: 0 <= value < 1, "at least 0 and below 1")


def _check(config: object, names: tuple[str, ...], holds: Any, wanted: str) -> None:
    wrong = [f"{name} ({getattr(config, name)!r})" for name in names if not holds(getattr(config, name))]
    if wrong:
        raise ValueError(f"must be {wanted}: {', '.join(wrong)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How samples become steps."""

    max_tokens: int = 4096
    """Budget of one microbatch in tokens, padding included."""
    max_shapes: int = 12
    """The most buckets, that is compiled shapes."""
    strategy: Strategy = "optimal"
    """How the lengths of the buckets are chosen."""
    max_length: int | None = 1024
    """Longest bucket in tokens; None for the longest sample."""
    overlong: Overlong = "truncate"
    """What becomes of samples longer than that."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update, accumulated."""
    row_multiple: int = 1
    """Rows of a bucket are a multiple of it, where the budget allows one."""
    length_multiple: int = 8
    """Lengths of buckets are rounded up to a multiple of it."""
    order: Order = "shuffle"
    """The order in which samples come."""
    shuffle_steps: bool = False
    """Permute the steps at random, whatever the order of the samples."""
    longest_first: bool = False
    """Begin with a step of the longest bucket, so that running out of memory shows at once."""
    block_size: int | None = None
    """Shuffle within blocks of so many samples: blocks of ids where the order is random, which keeps reading local."""
    pacing: PacingName = "none"
    """How a curriculum admits samples, easiest first; needs order length."""
    pacing_steps: int = 1000
    """The step from which on all samples are admitted."""
    pacing_initial: float = 0.1
    """Share of the samples that the first step draws from."""
    pacing_stages: int = 5
    """Stages of discrete pacing."""
    pack: bool = False
    """Put several samples into a row."""
    row_lengths: tuple[int, ...] = ()
    """Lengths of packed rows. Where none are given: the longest alone, or, by a cost model, up to max_shapes."""
    cost_model: Path | None = None
    """JSON file of a cost model in seconds: what is then minimised, and predicted."""
    max_cost: float | None = None
    """Most seconds of a microbatch, by the cost model."""
    compile_seconds: float | None = None
    """Seconds that each more bucket costs; with a cost model it decides how many are worth having."""
    memory_model: Path | None = None
    """JSON file of a cost model in bytes."""
    max_bytes: float | None = None
    """Most bytes of a bucket, by the memory model."""

    def __post_init__(self):
        _check_at_least(
            self,
            1,
            "max_tokens",
            "max_shapes",
            "max_length",
            "microbatches_per_step",
            "row_multiple",
            "length_multiple",
            "block_size",
            "pacing_steps",
            "pacing_stages",
        )
        _check(self, ("pacing_initial",), lambda share: 0 < share <= 1, "above 0 and at most 1")
        if self.row_lengths and not self.pack:
            raise ValueError(f"row_lengths {self.row_lengths} are for packed rows: set pack as well")
        for name, model in (("max_cost", "cost"), ("compile_seconds", "cost"), ("max_bytes", "memory")):
            if getattr(self, name) is not None and getattr(self, f"{model}_model") is None:
                raise ValueError(f"{name} ({getattr(self, name)!r}) needs {model}_model, a file of such a model")
        if self.pack:
            self._check_packing()

    def _check_packing(self) -> None:
        """Raises ValueError for settings that say nothing of packed rows."""
        if self.strategy != "optimal":
            raise ValueError(
                f"strategy {self.strategy!r} chooses lengths for single samples: packed rows have their own"
            )
        if self.pacing != "none":
            raise ValueError(f"pacing {self.pacing!r} admits samples one by one: packed rows mix short and long ones")
        if self.block_size is not None:
            raise ValueError(f"block_size {self.block_size} keeps samples near each other: packed rows mix them")
        odd = [length for length in self.row_lengths if length % self.length_multiple]
        if odd:
            raise ValueError(f"row_lengths {odd} are no multiples of length_multiple {self.length_multiple}")
        if self.max_length is not None and self.row_lengths and max(self.row_lengths) > self.max_length:
            raise ValueError(f"row_lengths {self.row_lengths} go beyond max_length {self.max_length}")

    @property
    def cost(self) -> CostModel | None:
        """The cost model in seconds, read from its file."""
        return _load_model(self.cost_model, "seconds")

    @property
    def memory(self) -> CostModel | None:
        """The cost model in bytes, read from its file."""
        return _load_model(self.memory_model, "bytes")

    def make_buckets(self, lengths: Int64[np.ndarray, " N"]) -> tuple[Bucket, ...]:
        """`make_buckets` with these settings; for packed rows, of the lengths that the rows have."""
        limits: dict[str, Any] = {
            "microbatches_per_step": self.microbatches_per_step,
            "row_multiple": self.row_multiple,
            "cost": self.cost,
            "max_cost": self.max_cost,
            "memory": self.memory,
            "max_bytes": self.max_bytes,
        }
        choice: dict[str, Any] = {
            "max_shapes": self.max_shapes,
            "max_length": self.max_length,
            "overlong": "drop" if self.overlong == "drop" else "truncate",
            "length_multiple": self.length_multiple,
            "compile_seconds": self.compile_seconds,
        }
        if not self.pack:
            return make_buckets(lengths, self.max_tokens, strategy=self.strategy, **choice, **limits)
        if limits["cost"] is None:
            choice["max_shapes"] = 1  # where only tokens count, nothing packs better than long rows
        row_lengths = self.row_lengths or choose_row_lengths(lengths, self.max_tokens, **choice, **limits)
        rows = pack_samples(lengths, row_lengths, overlong=self.overlong)  # of the same sizes in every epoch
        return make_buckets(rows.num_tokens, self.max_tokens, strategy=row_lengths, **limits)

    def make_plan(
        self, lengths: Int64[np.ndarray, " N"], buckets: tuple[Bucket, ...], *, seed: int, epoch: int
    ) -> Plan:
        """`make_plan` with these settings; packed rows are filled anew in every epoch where the order is random."""
        return make_plan(
            self._rows(lengths, buckets, "shuffle" if self.order == "shuffle" else "dataset", seed, epoch),
            buckets,
            microbatches_per_step=self.microbatches_per_step,
            order=self.order,
            block_size=self.block_size,
            pacing=self._pacing(),
            seed=seed,
            epoch=epoch,
            shuffle_steps=self.shuffle_steps,
            longest_first=self.longest_first,
            overlong="error" if self.pack else self.overlong,
        )

    def make_held_out_plan(self, lengths: Int64[np.ndarray, " H"], buckets: tuple[Bucket, ...]) -> Plan:
        """A plan of samples that are not trained on, in the same buckets, in order of length."""
        return make_plan(
            self._rows(lengths, buckets, "dataset", 0, 0),
            buckets,
            microbatches_per_step=self.microbatches_per_step,
            overlong="error" if self.pack else self.overlong,
        )

    def _pacing(self) -> Pacing | None:
        if self.pacing == "none":
            return None
        if self.pacing == "discrete":
            return discrete_pacing(self.pacing_steps, self.pacing_stages, self.pacing_initial)
        named = {"linear": linear_pacing, "root": root_pacing, "competence": competence_pacing}
        return named[self.pacing](self.pacing_steps, self.pacing_initial)

    def _rows(
        self, lengths: Int64[np.ndarray, " N"], buckets: tuple[Bucket, ...], order: Order, seed: int, epoch: int
    ) -> Int64[np.ndarray, " N"] | Packing:
        """What a plan plans: the samples, or rows of them as long as the buckets are."""
        if not self.pack:
            return lengths
        row_lengths = [bucket.length for bucket in buckets]
        return pack_samples(lengths, row_lengths, order=order, seed=seed, epoch=epoch, overlong=self.overlong)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, warmed up linearly, decayed along a cosine, its rate scaled by the batch size."""

    learning_rate: float = 3e-3
    """Highest base rate."""
    warmup_fraction: float = 0.1
    """Share of training over which the base rate rises, from the last rate of training."""
    final_fraction: float = 0.05
    """The last base rate as a share of the highest."""
    schedule_unit: Literal["steps", "sequences", "tokens"] = "steps"
    """What warm-up and decay are counted in."""
    batch_size_rule: BatchSizeRule = "sqrt"
    """How the rate grows with the batch size of a step."""
    batch_size_unit: Literal["sequences", "tokens"] = "sequences"
    """What the batch size of a step counts."""
    base_batch_size: float = 8
    """Batch size of the step at which the rate is the base rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    max_gradient_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""

    def __post_init__(self):
        _check_above(self, 0, "learning_rate", "base_batch_size", "max_gradient_norm")
        _check_at_least(self, 0, "weight_decay")
        _check_fraction(self, "warmup_fraction", "final_fraction", "b1", "b2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """The devices and processes that compute."""

    devices: int | None = None
    """How many devices, of each process; a machine without accelerators has its processor divided. None for all."""
    distributed: bool = False
    """Several processes compute together, as any of the three settings that follow says too; what these leave out JAX
    finds in its environment (Slurm, Open MPI, cloud TPUs, Kubernetes)."""
    coordinator: str | None = None
    """Host and port of process 0."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this one is."""

    def __post_init__(self):
        _check_at_least(self, 1, "devices", "num_processes")
        _check_at_least(self, 0, "process_id")

    @property
    def has_processes(self) -> bool:
        """Whether several processes compute together."""
        return self.distributed or any(x is not None for x in (self.coordinator, self.num_processes, self.process_id))

    def make_mesh(self) -> Mesh:
        """A mesh of one axis over the devices; before anything else that touches one.

        Raises:
          ValueError: there are not so many devices, or JAX does not find what was not given.
          RuntimeError: JAX has used its devices already, or not all processes came.
        """
        if self.devices is not None:
            divide_processor(self.devices)
        if self.has_processes and not jax.distributed.is_initialized():
            initialize_processes(self.coordinator, self.num_processes, self.process_id)
        return data_mesh(self.devices, of_each_process=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(DeviceConfig):
    """Train a byte-level language model on the built-in corpus or a file, every shape compiled ahead of time."""

    max_steps: int | None = 360
    """Stop after so many steps; None for all epochs."""
    num_epochs: int = 1
    """Passes over the corpus, unless max_steps ends training before."""
    held_out_fraction: float = 0.02
    """Share of the samples that is never trained on, chosen by the hash of their content."""
    data: Path | None = None
    """File to train on instead of the built-in corpus: lines of text (.txt) or JSON (.jsonl), byte values and offsets
    (.npz), or a column (.parquet, .arrow)."""
    field: str = "text"
    """The field of a JSON line, or the column, that holds the text."""
    seed: int = 0
    """Decides the initial weights and every shuffle."""
    num_workers: int = 0
    """Processes that read and collate; 0 for a thread of the main one."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    runs_dir: Path = Path("runs")
    """Where the directories of runs are made."""
    resume: Path | None = None
    """Directory of a run to continue. On the command line its settings are the defaults; those that would make it
    another run cannot be changed."""
    progress: bool = True
    """Show progress bars."""
    devices: int | None = None
    """How many devices, of each process, share the microbatches of a step, whose number they divide; a machine without
    accelerators has its processor divided. None for one, or for all of several processes."""
    plan: PlanConfig = PlanConfig()
    model: TransformerConfig = TransformerConfig()  # noqa: RUF009  # frozen, so it can be shared
    optimizer: OptimizerConfig = OptimizerConfig()
    compile: CompileOptions = dataclasses.field(default_factory=CompileOptions)

    def __post_init__(self):
        super().__post_init__()
        _check_at_least(self, 1, "max_steps", "num_epochs", "checkpoint_every")
        _check_at_least(self, 0, "seed", "num_workers")
        if not 0 < self.held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must lie between 0 and 1, not {self.held_out_fraction}")
        if self.data is not None:  # absolute, so that the run can be resumed from another directory
            object.__setattr__(self, "data", self.data.absolute())


def save_config(config: FitConfig, path: Path) -> None:
    """Writes the settings as JSON."""
    with write_atomically(path) as file:
        file.write((json.dumps(dataclasses.asdict(config), indent=2, default=str) + "\n").encode())


def load_config(path: Path) -> FitConfig:
    """Reads what `save_config` wrote; raises FileNotFoundError or a ValueError that names what is wrong."""
    try:
        settings = json.loads(path.read_text())
        return dacite.from_dict(FitConfig, settings, dacite.Config(cast=[Path, tuple], strict=True, check_types=True))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run to resume: {path} is missing") from None
    except (dacite.DaciteError, ValueError, AttributeError) as error:  # AttributeError: JSON, but no object
        raise ValueError(f"{path} holds no settings of a run: {error}") from error


def _load_model(path: Path | None, unit: str) -> CostModel | None:
    if path is None:
        return None
    model = CostModel.load(path)
    if model.unit != unit:
        raise ValueError(f"{path} holds a cost model in {model.unit}, not in {unit}")
    return model


def differing_settings(one: FitConfig, other: FitConfig) -> list[str]:
    """Names and values of the settings in which two configurations differ: `plan.max_tokens: 4096, 8192`."""
    a, b = flat_settings(one), flat_settings(other)
    return [f"{name}: {a[name]}, {b[name]}" for name in a if a[name] != b[name]]


def flat_settings(config: FitConfig) -> dict[str, Any]:
    """All settings by their dotted names, such as `plan.max_tokens`."""
    return _flat(dataclasses.asdict(config))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
