"""Settings as frozen dataclasses, checked when they are made.

The fields are the settings of `jvarlen train`; their docstrings are its help.
"""

from __future__ import annotations

import collections
import dataclasses
import glob
import threading
from pathlib import Path, PurePosixPath
from typing import Literal

from jvarlen._common.checks import UserError, check_above, check_at_least, check_counts, check_setting, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.settings import Settings
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.data.find_files import HIDDEN_QUERY, is_remote, without_credentials
from jvarlen.data.records import RecordFormat
from jvarlen.data.samples import OnBadSample
from jvarlen.data.split import HELD_OUT
from jvarlen.distributed.launch import DeviceConfig
from jvarlen.distributed.layout import Layout
from jvarlen.models import DecoderConfig, LoraConfig, WindowSchedule
from jvarlen.planning.order import check_seed
from jvarlen.runs.plan_config import BatchSizeRule, PlanConfig, check_grows, first_step_size

__all__ = [
    "AUTO", "FLAT", "CheckpointConfig", "DataConfig", "DirectoryConfig", "FitConfig", "HardwareConfig",
    "OptimizerConfig", "PlanConfig", "ProgramConfig", "Scope", "TrackerName", "evaluation_name", "is_run_dir",
]  # fmt: skip


AUTO = "auto"  # as `parallel`

TrackerName = Literal["tensorboard"]

Scope = Literal["run", "resumed", "process", "call"]
"""What a setting belongs to, in the metadata of its field; nested settings have the scope of their field.

- run, if none is given: it decides what is computed. A resumed run keeps it.
- resumed: it may change when the run is resumed, such as how far the run goes.
- process: it may also differ between processes.
- call: the run directory does not keep it.
"""


_RESUMED, _PROCESS, _CALL = ({"scope": scope} for scope in ("resumed", "process", "call"))
_OF_LORA = ("lora_rank", "lora_alpha", "lora_on", "lora_dropout")
FLAT = {"prefix": ""}  # a group whose settings have no prefix, here and on the command line


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Settings):
    """AdamW with linear warm-up, cosine decay, and a learning rate scaled by the batch size."""

    schedule: Literal["cosine", "seesaw"] = "cosine"
    """Decay after warm-up. seesaw doubles the batch wherever cosine would halve the rate, which then falls by the root
    of 2: it needs sequences_per_step or tokens_per_step, the first batch, and decays over the tokens of num_epochs."""
    max_batch_size: int | None = None
    """Largest batch of seesaw, from which on the rate falls as by cosine. None: no limit."""
    learning_rate: float | None = None
    """Peak of the base learning rate. None: 3e-3, or for weights that a model already has 5e-6, and 1e-4 for
    adapters of it."""
    warmup_fraction: float = 0.1
    """Share of training spent on warm-up; it starts from the final rate."""
    final_fraction: float = 0.05
    """Final base rate as a share of the peak."""
    schedule_unit: Literal["steps", "sequences", "tokens"] | None = None
    """Unit in which warm-up and decay are counted. None: steps, or tokens by seesaw."""
    batch_size_rule: BatchSizeRule = "sqrt"
    """How the learning rate scales with the batch size of a step."""
    batch_size_unit: Literal["sequences", "tokens"] = "sequences"
    """Unit of the batch size of a step."""
    base_batch_size: float | None = None
    """Batch size for which the base rate is meant. None: the first of sequences_per_step or tokens_per_step where it is
    given in this unit, so that full steps have the base rate; else 8."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.95
    """Decay of the second moment."""
    betas_by_batch_size: bool = False
    """Let moments forget by samples, or tokens, in place of steps: b1 and b2 are then those of base_batch_size."""
    max_gradient_norm: float = 1.0
    """Gradients with a larger global norm are clipped to it."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the parameters, such as 0.999, which is evaluated, sampled from and
    exported in place of the trained ones. None keeps no average."""

    def __post_init__(self):
        super().__post_init__()
        given = [name for name in ("learning_rate", "base_batch_size") if getattr(self, name) is not None]
        check_above(self, 0, *given, "max_gradient_norm")
        check_at_least(self, 0, "weight_decay")
        check_counts(self, 1, "max_batch_size")
        shares = ("warmup_fraction", "final_fraction", "b1", "b2")
        check_setting(self, shares, lambda share: 0 <= share < 1, "at least 0 and below 1")
        if self.schedule == "seesaw" and (self.schedule_unit not in (None, "tokens") or self.batch_size_rule != "sqrt"):
            of_rates = f"schedule_unit ({self.schedule_unit}) and batch_size_rule ({self.batch_size_rule})"
            raise UserError(f"schedule seesaw is counted in tokens and has the rule sqrt, not {of_rates}")
        if self.max_batch_size is not None and self.schedule != "seesaw":
            raise UserError(f"max_batch_size ({self.max_batch_size}) is for batches that grow: give schedule seesaw")
        averages = () if self.ema_decay is None else ("ema_decay",)
        check_setting(self, averages, lambda decay: 0 < decay < 1, "above 0 and below 1")

    @property
    def counted_in(self) -> Literal["steps", "sequences", "tokens"]:
        """The unit in which warm-up and decay are counted."""
        return self.schedule_unit or ("tokens" if self.schedule == "seesaw" else "steps")


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(Settings):
    """The data to train and evaluate on."""

    files: tuple[str | Path, ...] = dataclasses.field(default=(), metadata={"name": "data"})
    """Files to train on instead of the built-in corpus: lines of text (.txt) or JSON (.jsonl),
    a column (.csv, .tsv, .parquet, .arrow), tokens (.bin, .npz), or a directory of a Hugging Face dataset.
    Each may be a directory, a quoted glob, or a URL of an object store; text may be compressed (.gz, .zst)."""
    field: tuple[str, ...] = ("text",)
    """JSON field or column that holds the text, the tokens, or a list of messages with role and content, which may be
    in messages where there is no text. Several are joined by newlines."""
    template: str | None = None
    """Text with the names of fields in braces, such as "Q: {question}\\nA: {answer}\\n"; \\n is a newline.
    For messages, the template of one, with {role} and {content}."""
    loss_on: tuple[str, ...] = ()
    """Fields, or roles of messages, to learn; the rest has loss weight 0. Without, everything is learned."""
    tokenizer: Path | None = None
    """Tokenizer file (tokenizer.json); None: that of the model's directory, or bytes."""
    end_token: int | None = None
    """Token that ends every document of a .bin without index; None for blocks of max_length."""
    weights: tuple[float, ...] = ()
    """Relative share of each file in an epoch. Samples are drawn once, so all epochs have the same samples.
    Without weights, an epoch has every sample of all files."""
    loss_weights: tuple[float, ...] = ()
    """Factor of each file's loss weights in training. Without, and in evaluations, all files count alike."""
    mixture_samples: int | None = None
    """Samples in an epoch mixed by weights; None for the most without repeats."""
    held_out_fraction: float = 0.02
    """Share of the samples held out from training, at least one, chosen by the hash of their content."""
    eval_data: tuple[str | Path, ...] = ()
    """More files to evaluate on, each separately, besides the held-out samples."""
    on_bad_sample: OnBadSample = dataclasses.field(default="error", metadata=_RESUMED)
    """A record that is not a sample, or a sample that cannot be read or is not as planned, ends the run (error),
    or is left out and listed in bad_samples.jsonl (skip)."""
    max_bad_fraction: float = dataclasses.field(default=0.01, metadata=_RESUMED)
    """Largest share of the samples of each file and of each epoch that may be left out."""
    num_workers: int = dataclasses.field(default=0, metadata=_PROCESS)
    """Worker processes that read, collate, and measure lengths; 0 for a thread of the main process."""

    def __post_init__(self):
        if isinstance(self.field, str):
            object.__setattr__(self, "field", (self.field,))
        super().__post_init__()
        check_counts(self, 0, "num_workers", "end_token")
        check_counts(self, 1, "mixture_samples")
        check_setting(self, ("max_bad_fraction",), lambda share: 0 <= share <= 1, "between 0 and 1")
        check_setting(self, ("held_out_fraction",), lambda share: 0 < share < 1, "above 0 and below 1")
        for name in ("weights", "loss_weights"):
            if (given := getattr(self, name)) and len(given) != len(self.files):
                raise UserError(f"{name} {given} must have one number for each file of data, {len(self.files)} in all")
        if self.mixture_samples is not None and not self.weights:
            raise UserError(f"mixture_samples ({self.mixture_samples}) needs weights=: without, all come once")
        # Absolute, so that the run can be resumed from another directory.
        for name in ("files", "eval_data"):
            object.__setattr__(self, name, tuple(map(_absolute, getattr(self, name))))
        names = collections.Counter([HELD_OUT, *map(evaluation_name, self.eval_data)])
        if repeated := [name for name, count in names.items() if count > 1]:
            raise UserError(f"eval_data name their evaluations, so that names must differ: {list_first(repeated)}")
        if self.template is not None:  # as a shell hands it over
            object.__setattr__(self, "template", self.template.replace("\\n", "\n").replace("\\t", "\t"))
        RecordFormat(self.field, self.template, self.loss_on)  # checks them
        if self.tokenizer is not None:
            object.__setattr__(self, "tokenizer", self.tokenizer.absolute())

    @property
    def inputs(self) -> tuple[str | Path | None, ...]:
        """Files, directories, globs and URLs to read."""
        return *self.files, *self.eval_data, self.tokenizer


def evaluation_name(path: Path | str) -> str:
    """The name of the evaluation on files: that of the file without its ending, or of the directory."""
    shown = without_credentials(path).removesuffix(HIDDEN_QUERY)
    names = [name for name in PurePosixPath(shown).parts if not glob.has_magic(name)]
    last = PurePosixPath(names[-1])
    return last.with_suffix("").stem if last.suffix in (".gz", ".zst") else last.stem


def _absolute(path: Path | str) -> Path | str:
    return str(path) if is_remote(path) else Path(path).absolute()


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class HardwareConfig(DeviceConfig):
    """The devices and processes that train, and how a step spreads over them."""

    devices: int | None = dataclasses.field(default=None, metadata=_PROCESS)
    """Number of devices, for each process; all devices together must divide the microbatches of a step.
    Without accelerators the CPU is split into this many. None takes one device; with parallel, those of the layout;
    with several processes, all."""
    parallel: str | None = dataclasses.field(default=None, metadata=_PROCESS)
    """How a step spreads over all devices, such as data4.zero2 or data2.stage2.tensor2.zero1: data-parallel shards,
    stages, context and tensor parallelism, and a ZeRO level from 0 to 3. Results do not depend on it. "auto" takes
    the layout that fits with the least estimated time, for all devices. None: data parallelism."""
    cluster: str | None = dataclasses.field(default=None, metadata=_PROCESS)
    """With parallel auto, the devices and links to choose for: a known machine such as dgx-h100, or a file of one."""

    def __post_init__(self):
        super().__post_init__()
        _ = self.layout  # raises ValueError for a text that is not a layout
        if self.cluster is not None and self.parallel != AUTO:
            raise UserError(f"cluster ({self.cluster}) is for parallel='auto', not {self.parallel}")

    @property
    def layout(self) -> Layout | None:
        """The layout of `parallel`; None for data parallelism over all devices, or one that is yet to be chosen."""
        return None if self.parallel in (None, AUTO) else Layout.parse(self.parallel)


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Settings):
    """When checkpoints are written, and which of them are kept."""

    checkpoint_every: int = 100
    """Steps between checkpoints."""
    keep_last: int = 2
    """Number of newest checkpoints to keep."""
    keep_best: int = 0
    """Number of checkpoints with the lowest held-out loss to keep as well; needs eval_every."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "checkpoint_every", "keep_last")
        check_counts(self, 0, "keep_best")


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class DirectoryConfig(Settings):
    """Where a run writes, and which run it resumes."""

    runs_dir: Path = Path("runs")
    """Directory in which run directories are created."""
    run_dir: Path | None = None
    """Directory of this run: created if missing, otherwise its run is resumed."""
    resume: Path | None = None
    """Directory of a run to resume. On the command line its settings are the defaults;
    those that would make it another run cannot be changed."""
    resume_from: Literal["latest", "best"] = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint to resume from: the latest, or the one with the best evaluation.
    Later checkpoints and records are then discarded."""

    def __post_init__(self):
        super().__post_init__()
        if self.resume_from != "latest" and self.resume is None and self.run_dir is None:
            raise UserError(f"resume_from={self.resume_from!r} needs resume=, the directory of a run")
        if self.run_dir is not None and self.resume is not None:
            raise UserError(f"run_dir ({self.run_dir}) and resume ({self.resume}) both name the run: give one of them")

    @property
    def resumed(self) -> Path | None:
        """The directory of the run to resume, if there is one."""
        return self.run_dir if self.run_dir is not None and is_run_dir(self.run_dir) else self.resume


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig(Settings):
    """Settings that decide the programs of a run, besides devices; and a target to only compile for."""

    data: DataConfig = dataclasses.field(default_factory=DataConfig, metadata=FLAT)
    """The data to train and evaluate on."""
    max_steps: int | None = dataclasses.field(default=None, metadata=_RESUMED)
    """Steps to train, over as many epochs as they take. None for all steps of num_epochs."""
    num_epochs: int | None = dataclasses.field(default=None, metadata=_RESUMED)
    """Passes over the data, unless max_steps ends training earlier.
    With neither, training takes one epoch, or 360 steps on the built-in corpus."""
    seed: int = 0
    """Seed of the initial weights, of mixtures, and of every shuffle."""
    trainable: tuple[str, ...] = ()
    """Patterns of the names of parameters that are trained, such as "layers.*.attention.*"; none for all. The others
    stay as they are."""
    progress: bool = dataclasses.field(default=True, metadata=_PROCESS)
    """Show progress: bars on a terminal, otherwise a line now and then."""
    target: str | None = dataclasses.field(default=None, metadata=_CALL)
    """With dry_run, devices to compile every shape for, which need not be here: 8xh100 or 2x8xh100, hosts × devices, of
    a100, h100 or h200; v5e:2x4, of v5e, v5p or v6e; or here. A run takes the first of these devices, or all."""
    out: Path | None = dataclasses.field(default=None, metadata=_CALL)
    """Where to save the figures of the compiler for target, a .json file."""
    html: Path | None = dataclasses.field(default=None, metadata=_CALL)
    """Where to write a page with these figures: one file that works offline."""
    plan: PlanConfig = dataclasses.field(default_factory=PlanConfig, metadata=FLAT)
    """How samples become steps."""
    model: Path | None = None
    """Model to train: a Hugging Face directory, with its tokenizer and chat template; a directory of adapters of PEFT;
    the directory of a run, from its newest checkpoint; or a config.json, whose sizes get random weights. None: the
    sizes of decoder."""
    fresh: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not taken from model, such as "head.*": they begin random."""
    resized: tuple[str, ...] = ()
    """Patterns of the names of parameters that have the vocabulary of --decoder.vocab-size in place of model's, such as
    "embed.*": rows that both have are taken, the others are random."""
    lora_rank: int | None = None
    """Train low-rank adapters (LoRA) of this rank, and nothing else of model. None: no adapters, or those that model
    already has."""
    lora_alpha: float | None = None
    """What adapters add is multiplied by lora_alpha / lora_rank. None: 16."""
    lora_on: tuple[str, ...] = ()
    """Patterns of the names of kernels that have adapters, such as "layers.*.mlp.*.kernel", in all layers or none.
    Without, queries and values: "layers.*.attention.[qv].kernel"."""
    lora_dropout: float | None = None
    """The probability that an input of an adapter is 0 in training. None: 0."""
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """The shape of the built-in model, without model."""
    window_schedule: str | None = None
    """How far tokens see in training, as FIRST:LAST:SHARE: 32:1024:0.6 grows from 32 tokens to 1,024 over 0.6 of the
    steps. Evaluations see all, as does training without it."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """AdamW with linear warm-up, cosine decay, and a learning rate scaled by the batch size."""
    compile: CompileOptions = dataclasses.field(default_factory=CompileOptions, metadata=_RESUMED)
    """How the step is compiled and run."""

    def __post_init__(self):
        for name in ("trainable", "fresh", "resized", "lora_on"):
            if isinstance(patterns := getattr(self, name), str):
                object.__setattr__(self, name, (patterns,))
        super().__post_init__()
        if self.takes_part and self.model is None:
            raise UserError("fresh= and resized= name parameters not taken from a model: give model=")
        if self.lora_rank is not None and self.model is None:
            raise UserError(f"lora_rank ({self.lora_rank}) adds adapters to the weights of a model: give model=")
        others = [name for name in _OF_LORA[1:] if getattr(self, name) not in (None, ())]
        if others and self.lora_rank is None:
            raise UserError(f"{list_first(others)} are for adapters: give lora_rank= as well")
        _ = self.lora, self.windows  # checked by them
        check_counts(self, 1, "max_steps", "num_epochs")
        if self.model is not None:
            object.__setattr__(self, "model", self.model.absolute())
        check_seed(self.seed, epoch=0)
        if self.optimizer.schedule == "seesaw":
            check_grows(self.plan, self.optimizer.batch_size_unit)

    def run_config(self, **others: object) -> FitConfig:
        """The same settings as those of a run, with others."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(ProgramConfig)}
        return FitConfig(**given | others)

    @property
    def base_batch_size(self) -> float:
        """The batch size for which the base rate is meant."""
        return self.optimizer.base_batch_size or first_step_size(self.plan, self.optimizer.batch_size_unit) or 8

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters that are asked for, if any."""
        if self.lora_rank is None:
            return self.decoder.lora
        values = (getattr(self, name) for name in _OF_LORA)
        given = zip(("rank", "alpha", "targets", "dropout"), values, strict=True)
        return LoraConfig(**{name: value for name, value in given if value not in (None, ())})

    @property
    def windows(self) -> WindowSchedule | None:
        """The windows of attention in training, if they grow."""
        return None if self.window_schedule is None else WindowSchedule.parse(self.window_schedule)

    @property
    def takes_part(self) -> bool:
        """Whether not all parameters of `model` are taken."""
        return bool(self.fresh or self.resized)


@check_keywords
@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(ProgramConfig):
    """Train a language model on the built-in corpus or your own data, with every shape compiled ahead of time."""

    eval_every: int | None = dataclasses.field(default=None, metadata=_RESUMED)
    """Steps between evaluations; None evaluates only before the first step and after the last."""
    patience: int | None = dataclasses.field(default=None, metadata=_RESUMED)
    """Training ends when more than this many evaluations in a row, of those after every eval_every steps, have not
    lowered the held-out loss. The best checkpoint is then kept: --from best. None trains to the end."""
    min_delta: float = dataclasses.field(default=0.0, metadata=_RESUMED)
    """How much below the lowest held-out loss one must be to count as lower, for patience."""
    stall_timeout_s: float = dataclasses.field(default=600.0, metadata=_RESUMED)
    """With several processes, all end when none has taken a step for this many seconds.
    Must exceed the time of an evaluation."""
    trackers: tuple[TrackerName, ...] = dataclasses.field(default=(), metadata=_RESUMED)
    """Also log to TensorBoard; metrics.jsonl is always written."""
    profile: int = dataclasses.field(default=0, metadata=_CALL)
    """Steps to trace with the profiler once training is steady, into profile/ in the run directory."""
    dry_run: bool = dataclasses.field(default=False, metadata=_CALL)
    """Print the plan, and the memory and communication of a step of its largest shape, and train nothing. With
    target, compile the steps of all shapes for it."""
    hardware: HardwareConfig = dataclasses.field(default_factory=HardwareConfig, metadata=FLAT)
    """The devices and processes that train, and how a step spreads over them."""
    checkpoints: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig, metadata=FLAT | _RESUMED)
    """When checkpoints are written, and which of them stay."""
    directory: DirectoryConfig = dataclasses.field(default_factory=DirectoryConfig, metadata=FLAT | _CALL)
    """Where a run writes, and which run it resumes."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "eval_every")
        check_counts(self, 0, "profile", "patience")
        check_at_least(self, 0, "min_delta")
        most = threading.TIMEOUT_MAX
        check_setting(self, ("stall_timeout_s",), lambda seconds: 0 < seconds <= most, f"above 0 and at most {most:g}")
        needing = {"keep_best": self.checkpoints.keep_best or None, "patience": self.patience}
        for name, value in needing.items():
            if value is not None and self.eval_every is None:
                raise UserError(f"{name} ({value}) needs eval_every: only evaluations find the best")
        if self.min_delta and self.patience is None:
            raise UserError(f"min_delta ({self.min_delta}) needs patience, the evaluations that may not lower the loss")
        for name in ("out", "html"):
            if (path := getattr(self, name)) is not None and self.target is None:
                raise UserError(f"{name} ({path}) needs target=: the compiler's figures are written there")
        if self.target is not None and not self.dry_run:
            raise UserError(f"target ({self.target}) is compiled for and does not train: it needs dry_run=True")

    @property
    def num_best(self) -> int:
        """Number of checkpoints with the lowest held-out loss to keep; with patience at least one."""
        return max(self.checkpoints.keep_best, self.patience is not None)

    @property
    def has_processes(self) -> bool:
        """Whether several processes train together."""
        return self.hardware.has_processes


def is_run_dir(path: Path) -> bool:
    """Whether a run has begun there."""
    return (path / "config.json").exists()
