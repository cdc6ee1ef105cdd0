"""Settings as frozen dataclasses, checked when they are made, and their JSON form.

The fields are the settings of `jvarlen train`; their docstrings are its help.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import dacite
import jax
from jax.sharding import Mesh

from jvarlen._common.checks import check_above, check_at_least, check_fraction, check_setting, list_first
from jvarlen._common.files import write_atomically
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed.mesh import data_mesh, split_cpu
from jvarlen.distributed.processes import initialize_processes
from jvarlen.models import TransformerConfig
from jvarlen.runs.plan_config import BatchSizeRule, PlanConfig
from jvarlen.runs.trackers import TrackerName

__all__ = [
    "DataConfig",
    "DeviceConfig",
    "FitConfig",
    "OptimizerConfig",
    "PlanConfig",
    "differing_settings",
    "flat_settings",
    "load_config",
    "save_config",
    "saved_settings",
]


_MODELS = ("cost_model", "memory_model")  # files that a run directory has copies of


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
        check_above(self, 0, "learning_rate", "base_batch_size", "max_gradient_norm")
        check_at_least(self, 0, "weight_decay")
        check_fraction(self, "warmup_fraction", "final_fraction", "b1", "b2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained and evaluated on."""

    data: tuple[Path, ...] = ()
    """Files to train on instead of the built-in corpus: lines of text (.txt) or JSON (.jsonl), tokens and offsets
    (.npz), a column (.parquet, .arrow), or a directory of a Hugging Face dataset."""
    field: str = "text"
    """The field of a JSON line, or the column, that holds the text or the tokens."""
    tokenizer: Path | None = None
    """JSON file of a tokenizer; None trains on bytes."""
    weights: tuple[float, ...] = ()
    """How much of an epoch comes of each file, relative to each other; drawn once, so that all epochs have the same
    samples. Without weights, every sample of all files."""
    mixture_samples: int | None = None
    """Samples of an epoch that is mixed by weights; None for the most at which none comes twice."""
    held_out_fraction: float = 0.02
    """Share of the samples that is never trained on, chosen by the hash of their content."""
    eval_data: tuple[Path, ...] = ()
    """More files to evaluate on, each by itself, besides the held-out samples."""
    on_mismatch: Literal["error", "adjust"] = "error"
    """A sample of another length than planned ends the run, or is cut or left shorter, and counted."""
    num_workers: int = 0
    """Processes that read and collate, and that measure lengths; 0 for a thread of the main one."""

    def __post_init__(self):
        check_at_least(self, 0, "num_workers")
        check_at_least(self, 1, "mixture_samples")
        check_setting(self, ("held_out_fraction",), lambda share: 0 < share < 1, "above 0 and below 1")
        if self.weights and len(self.weights) != len(self.data):
            raise ValueError(f"weights {self.weights} must be one for each file of data, of which are {len(self.data)}")
        if self.mixture_samples is not None and not self.weights:
            raise ValueError(f"mixture_samples ({self.mixture_samples}) needs weights: without, all come once")
        names = collections.Counter([HELD_OUT, *(path.stem for path in self.eval_data)])
        if repeated := [name for name, count in names.items() if count > 1]:
            raise ValueError(f"eval_data name their evaluations, so that names must differ: {list_first(repeated)}")
        # Absolute, so that the run can be resumed from another directory.
        for name in ("data", "eval_data"):
            object.__setattr__(self, name, tuple(path.absolute() for path in getattr(self, name)))
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", self.tokenizer.absolute())


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
        check_at_least(self, 1, "devices", "num_processes")
        check_at_least(self, 0, "process_id")

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
            split_cpu(self.devices)
        if self.has_processes and not jax.distributed.is_initialized():
            initialize_processes(self.coordinator, self.num_processes, self.process_id)
        return data_mesh(self.devices, of_each_process=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(DataConfig, DeviceConfig):
    """Train a language model on the built-in corpus or data of your own, every shape compiled ahead of time."""

    max_steps: int | None = 360
    """Stop after so many steps; None for all epochs."""
    num_epochs: int = 1
    """Passes over the corpus, unless max_steps ends training before."""
    seed: int = 0
    """Decides the initial weights, the draw of a mixture, and every shuffle."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates before the first step and after the last."""
    checkpoint_every: int = 100
    """Steps between checkpoints."""
    keep_last: int = 2
    """How many of the newest checkpoints are kept."""
    keep_best: int = 0
    """How many are kept besides of those with the fewest bits per token on held-out samples; needs eval_every."""
    runs_dir: Path = Path("runs")
    """Where the directories of runs are made."""
    run_dir: Path | None = None
    """Directory of this run: made where there is none, else its run is continued as by resume."""
    resume: Path | None = None
    """Directory of a run to continue. On the command line its settings are the defaults; those that would make it
    another run cannot be changed."""
    stall_timeout_s: float = 600.0
    """Of several processes, all end when none has taken a step for so many seconds; longer than an evaluation takes."""
    verify: bool = True
    """Check that the samples read are those planned, step by step."""
    trackers: tuple[TrackerName, ...] = ()
    """Log to TensorBoard, or to Weights & Biases offline, as well; metrics.jsonl is written always."""
    profile: int = 0
    """Steps to trace by the profiler once training is steady, below profile/ in the directory of the run."""
    progress: bool = True
    """Show progress: bars on a terminal, else a line now and then."""
    devices: int | None = None
    """How many devices, of each process, share the microbatches of a step, whose number they divide; a machine without
    accelerators has its processor divided. None for one, or for all of several processes."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
    """How samples become steps."""
    model: TransformerConfig = dataclasses.field(default_factory=TransformerConfig)
    """The shape of the decoder."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """AdamW, warmed up linearly, decayed along a cosine, its rate scaled by the batch size."""
    compile: CompileOptions = dataclasses.field(default_factory=CompileOptions)
    """How the step is compiled and run."""

    def __post_init__(self):
        DataConfig.__post_init__(self)
        DeviceConfig.__post_init__(self)
        check_at_least(self, 1, "max_steps", "num_epochs", "checkpoint_every", "eval_every", "keep_last")
        check_at_least(self, 0, "seed", "keep_best", "profile")
        check_above(self, 0, "stall_timeout_s")
        if self.keep_best and self.eval_every is None:
            raise ValueError(f"keep_best ({self.keep_best}) needs eval_every: which is best only evaluations tell")
        if self.run_dir is not None and self.resume is not None:
            raise ValueError(f"run_dir ({self.run_dir}) and resume ({self.resume}) both name the run: give one of them")


def saved_settings(config: FitConfig) -> dict[str, Any]:
    """The settings of a run as JSON has them: cost models by their file names, and nothing that belongs to one call."""
    settings = dataclasses.asdict(_of_this_call(config))
    for name in _MODELS:
        if settings["plan"][name] is not None:
            settings["plan"][name] = settings["plan"][name].name
    return json.loads(json.dumps(settings, default=str))


def save_config(config: FitConfig, path: Path) -> None:
    """Writes `saved_settings`."""
    with write_atomically(path) as file:
        file.write((json.dumps(saved_settings(config), indent=2) + "\n").encode())


def load_config(path: Path) -> FitConfig:
    """Reads what `save_config` wrote, on this machine or another.

    Files of unknown origin are safe to read: they cannot say where a run writes, nor name cost models elsewhere than in
    their own directory. Data, which are only read, may lie anywhere.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it holds no settings; what is wrong is named.
    """
    try:
        settings = json.loads(path.read_text())
        config = dacite.from_dict(FitConfig, settings, dacite.Config(cast=[Path, tuple], strict=True, check_types=True))
        models = {name: model for name in _MODELS if (model := getattr(config.plan, name)) is not None}
        is_name = {name: model.name == str(model) != ".." for name, model in models.items()}
        if outside := [f"plan.{name} ({str(models[name])!r})" for name in models if not is_name[name]]:
            raise ValueError(f"{', '.join(outside)} must be the name of a file in its directory")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"there is no run to resume: {path} is missing") from None
    except (dacite.DaciteError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} holds no settings of a run: {error}") from error
    own = {name: path.parent.absolute() / model for name, model in models.items()}
    return dataclasses.replace(_of_this_call(config), plan=dataclasses.replace(config.plan, **own))


def _of_this_call(config: FitConfig) -> FitConfig:
    """The settings with defaults for what belongs to one call: which processes, where it writes, compiler options."""
    here = CompileOptions().cache_dir
    return dataclasses.replace(
        config,
        distributed=False,
        coordinator=None,
        num_processes=None,
        process_id=None,
        runs_dir=FitConfig.runs_dir,
        run_dir=None,
        resume=None,
        profile=0,
        # Options of the compiler are files that it writes and programs that it calls, too.
        compile=dataclasses.replace(
            config.compile, xla_options=(), cache_dir=None if config.compile.cache_dir is None else here
        ),
    )


def differing_settings(one: FitConfig, other: FitConfig) -> list[str]:
    """Names and values of the settings in which two configurations differ: `plan.max_tokens: 4096, 8192`."""
    a, b = flat_settings(one), flat_settings(other)
    return [f"{name}: {_as_text(a[name])}, {_as_text(b[name])}" for name in a if a[name] != b[name]]


def flat_settings(config: FitConfig) -> dict[str, Any]:
    """All settings by their dotted names, such as `plan.max_tokens`."""
    return _flat(dataclasses.asdict(config))


def _as_text(value: object) -> str:
    return " ".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat
