"""The commands besides `train` and `sort`. Each is imported for its settings, and imports what it runs when it runs."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Int64

from jvarlen import inference, models
from jvarlen._common.checks import (
    UserError,
    check_above,
    check_at_least_one,
    check_at_least_zero,
    check_counts,
    is_integer,
    list_first,
)
from jvarlen._common.files import (
    check_new_directory,
    check_outputs,
    load_array,
    read_object,
    regular_file,
    write_atomically,
)
from jvarlen._common.settings import Settings
from jvarlen._common.terminal import say
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.data.line_files import read_json
from jvarlen.data.open import NUM_BYTES
from jvarlen.data.records import ChatTemplate, MarkedText, RecordFormat
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.planning.buckets import Bucket, Buckets
from jvarlen.planning.budget import Budget, check_bucket_lengths, round_up
from jvarlen.planning.cost_model import CostModel, fit_cost_model
from jvarlen.planning.lengths import check_lengths
from jvarlen.planning.order import check_seed
from jvarlen.planning.packing import RowPacking
from jvarlen.planning.plan import Plan
from jvarlen.runs.config import FLAT, DataConfig, FitConfig, HardwareConfig, ProgramConfig, load_config
from jvarlen.runs.model import MODEL_DIR, TOKENIZER, decoder_of, model_shapes, optimizer_for, params_dtype, with_model
from jvarlen.runs.plan_config import (
    ChosenShapes,
    PlanConfig,
    budget_of_rows,
    epoch_plan,
    note_on_candidates,
    note_on_overlong,
    shapes_for,
)

__all__ = [
    "CompileCommand", "ExportCommand", "MeasureCommand", "MeasuredCosts", "PlanCommand", "ReportCommand",
    "SampleCommand", "measure_costs",
]  # fmt: skip

_NO_LIMIT = 2**40  # tokens of a microbatch
_SHARES_OF_BUDGET = (1, 4)  # a full bucket and a quarter of one tell what a step costs whatever it holds

_WhichCheckpoint = Annotated[Literal["latest", "best"], tyro.conf.arg(name="from")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _PlannedData(DataConfig):
    """The data to plan."""

    files: tyro.conf.Positional[tuple[str | Path, ...]] = dataclasses.field(default=(), metadata={"name": "data"})
    """What `jvarlen train --data` takes; none for the built-in corpus. Or integers, tokens a sample, in a .npy or .json
    file."""

    def read_lengths(self) -> Int64[np.ndarray, " N"] | None:
        """The tokens of each sample, of a file of lengths; None for data."""
        files = self.files
        if not any(str(path).endswith((".npy", ".json")) for path in files):
            return None
        given = ((each.name, getattr(self, each.name), each.default) for each in dataclasses.fields(self))
        if others := [name for name, value, default in given if value not in (files[:1], default)]:
            listed = list_first(f"{name} must not be given" for name in others)
            raise UserError(f"a .npy or .json file holds lengths: it is planned alone, {listed}")
        return check_lengths(_load_lengths(Path(files[0])))


def _load_lengths(path: Path) -> np.ndarray | list[int]:
    if not regular_file(path).exists():
        raise FileNotFoundError(f"there is no lengths file {path}")
    if path.suffix == ".npy":
        return load_array(path, "lengths")
    try:
        lengths = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(lengths, list) or not all(map(is_integer, lengths)):
        raise UserError(f"{path} holds no list of integers, tokens a sample; samples are lines of a .jsonl file")
    return lengths


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RowsPlanned(PlanConfig):
    """Planning settings of a command that can choose rows by memory."""

    max_tokens: int | None = None  # type: ignore[assignment]
    """Budget of one microbatch in tokens, padding included. None: 4,096; with target no limit."""
    limits_tokens: ClassVar[bool] = True  # whether it was given, of an instance
    # What a device may hold a target tells as well.
    _needing_models: ClassVar[tuple[tuple[str, str], ...]] = PlanConfig._needing_models[:2]

    def __post_init__(self):
        object.__setattr__(self, "limits_tokens", self.max_tokens is not None)
        if self.max_tokens is None:
            object.__setattr__(self, "max_tokens", PlanConfig.max_tokens)
        super().__post_init__()
        check_above(self, 0, *(["max_bytes"] if self.max_bytes is not None else []))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanCommand(Settings):
    """Print the plan of a training run, or of any lengths, beside simpler ones; settings are those of train."""

    data: tyro.conf.OmitArgPrefixes[_PlannedData] = dataclasses.field(default_factory=_PlannedData, metadata=FLAT)
    """The data to plan."""
    plan: tyro.conf.OmitArgPrefixes[_RowsPlanned] = dataclasses.field(default_factory=_RowsPlanned, metadata=FLAT)
    """How samples become steps."""
    vocab_size: Annotated[int, tyro.conf.arg(name="decoder.vocab-size")] = dataclasses.field(
        default=DecoderConfig.vocab_size, metadata={"name": "decoder.vocab-size"}
    )
    """Size of the vocabulary of files of tokens, without a tokenizer; 256 for bytes."""
    seed: int = 0
    """Seed of mixtures and of every shuffle, together with the epoch."""
    epoch: int = 0
    """The epoch to plan."""
    progress: bool = True
    """Show progress where lengths are measured and programs compiled."""
    model: Path | None = None
    """As for train: a Hugging Face directory, whose tokenizer tells the lengths, or a config.json."""
    out: Path | None = None
    """Where to save the plan, a .npz file."""
    html: Path | None = None
    """Where to write a page with pictures of the plan: one file that works offline."""
    cluster: str | None = None
    """Devices to choose a layout for, which needs model: a known machine such as dgx-h100:4, four hosts, or a file."""
    target: str | None = None
    """Devices whose memory chooses the rows of every bucket, the most that fit, as for compile. Needs model. max_bytes
    is what a device may hold; without max_tokens nothing limits the tokens of a microbatch."""
    parallel: str | None = None
    """With target, how a step spreads over its devices, such as data8.zero3; None: data parallelism."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "vocab_size")
        check_seed(self.seed, self.epoch)
        if self.target is None:
            if self.parallel is not None:
                raise UserError(f"parallel ({self.parallel}) needs target=, the devices that it is for")
            if self.plan.max_bytes is not None and self.plan.memory_model is None:
                raise UserError(f"max_bytes ({self.plan.max_bytes!r}) needs memory_model, or target=")
            return
        if self.model is None:
            raise UserError(f"target ({self.target}) needs model=: rows are chosen by the memory of its steps")
        if self.parallel == "auto":
            raise UserError("parallel (auto) is for training: rows are chosen for one layout, such as data8.zero3")
        given = {"cluster": self.cluster, "memory_model": self.plan.memory_model, "buckets": self.plan.buckets}
        if others := [f"{name}=" for name, value in given.items() if value]:
            raise UserError(f"target ({self.target}) chooses rows by its memory: leave out {', '.join(others)}")

    def _config(self) -> FitConfig:
        """The settings of a run of this plan."""
        return with_model(
            FitConfig(
                data=self.data,
                plan=self.plan,
                seed=self.seed,
                progress=self.progress,
                model=self.model,
                decoder=DecoderConfig(vocab_size=self.vocab_size),
                target=self.target,
                dry_run=self.target is not None,
                hardware=HardwareConfig(parallel=self.parallel),
            )
        )

    def _read_lengths(self, config: FitConfig) -> tuple[Int64[np.ndarray, " N"], list[str]]:
        """Of a file of lengths, or of the samples that a run of these settings trains on; and what to say of these."""
        if (lengths := self.data.read_lengths()) is not None:
            return lengths, []
        from jvarlen.data.measure import known_lengths
        from jvarlen.runs.prepare import open_training_data  # here: it imports JAX

        data = open_training_data(config)
        lengths = known_lengths(data.train, progress=self.progress)
        return lengths, [*data.describe(lengths), ""]

    def run(self) -> None:
        """Prints the plan, what there is without it, and layouts, and writes the requested files."""
        from jvarlen.planning.compare import compare_strategies, comparison_table

        if self.target is not None:
            self._choose_rows()
            return
        if self.cluster is not None and self.model is None:
            raise UserError("cluster= needs model=: a layout is chosen for a model on a cluster")
        settings = self.plan.of_files()
        read = self.model, self.cluster, settings.cost_model, settings.memory_model
        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs, *read)
        cluster = None
        if self.cluster is not None:
            from jvarlen.estimates.cluster import Cluster  # here: it imports JAX

            cluster = Cluster.named(self.cluster)
        config = self._config()
        lengths, corpus = self._read_lengths(config)
        shapes = shapes_for(settings, lengths, seed=self.seed)
        plan = epoch_plan(settings, shapes, lengths, seed=self.seed, epoch=self.epoch)
        if self.out is not None:
            plan.save(self.out)  # first: the rest only shows it
        report = plan.report(cost=settings.cost, lengths=lengths, compile_seconds=settings.compile_seconds)
        notes = shapes.reason, note_on_candidates(settings, shapes, lengths), note_on_overlong(plan, lengths)
        say(*corpus, report, *filter(None, notes), f"digest {plan.digest}")
        comparison = compare_strategies(plan, lengths, budget_of_rows(settings, lengths, settings.budget))
        say(f"\n{comparison_table(comparison)}")
        if self.out is not None:
            say(self.out)
        if cluster is not None:
            import optax  # here: they import JAX

            from jvarlen.batches.shapes import plan_specs
            from jvarlen.estimates.choice import choose_layout

            params = model_shapes(config.model, config.decoder)
            choice = choose_layout(
                models.layered(config.decoder),
                optimizer_for(params, optax.adamw(1e-3)),
                plan,
                cluster=cluster,
                params=params,
                cost=settings.cost,
                lengths=lengths,
                batch_spec=plan_specs(plan),
            )
            say(f"\n{choice}")
        if self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, cost=settings.cost, comparison=comparison)
            say(self.html)

    def _choose_rows(self) -> None:
        """Prints the plan of the most rows that fit, and writes the requested files."""
        from jvarlen.distributed.layout import Layout  # here: they import JAX
        from jvarlen.runs.fit import target_of
        from jvarlen.runs.prepare import Task
        from jvarlen.runs.training_plan import optimizer_of
        from jvarlen.targets.row_choice import choose_rows

        settings = self.plan.of_files()
        if settings.packing_in_force[0] == "auto" and settings.cost_model is not None:
            raise UserError("packing auto chooses by seconds of given rows: with target, say padded or best_fit")
        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs, self.model, settings.cost_model)
        config = self._config()
        target = target_of(config)
        layout = (config.hardware.layout or Layout()).for_devices(len(target.devices))
        Task().check_layout(layout, config.decoder)
        settings = settings.of_shards(layout.data * layout.stage * (layout.context if layout.context_from else 1))
        lengths, corpus = self._read_lengths(config)
        settings = dataclasses.replace(settings, max_bytes=None)
        if not self.plan.limits_tokens:
            settings = dataclasses.replace(settings, max_tokens=_NO_LIMIT)
            if settings.max_length is None and not settings.row_lengths:
                longest = round_up(int(lengths.max()), settings.length_multiple)
                settings = dataclasses.replace(settings, max_length=longest)
        method = settings.packing_in_force[0]
        method = "padded" if method == "auto" else method
        if method != "padded" and settings.max_length is None:
            *_, longest = shapes_for(settings, lengths, seed=self.seed).buckets[-1]
            settings = dataclasses.replace(settings, max_length=longest)

        def make(by: Budget | Buckets[Bucket]) -> Plan:
            if isinstance(by, Budget):
                shapes = shapes_for(settings, lengths, seed=self.seed, budget=by)
            else:
                shapes = ChosenShapes(buckets=tuple(map(tuple, by.shapes)), packing=method)
            return epoch_plan(settings, shapes, lengths, seed=self.seed, epoch=self.epoch)

        params = model_shapes(config.model, config.decoder)
        most_steps = -(-len(lengths) // settings.num_microbatches_in_force)  # whose rates are held
        task = Task().with_decoder(config.decoder, params, layout)
        assert task.loss_fn is not None
        chosen = choose_rows(
            task.loss_fn,
            optimizer_for(params, optimizer_of(config.optimizer, np.zeros(most_steps))),
            make,
            budget=settings.budget,
            target=target,
            layout=layout,
            params=params,
            max_bytes=self.plan.max_bytes,
            options=config.compile,
            progress=self.progress,
        )
        plan = chosen.plan
        if self.out is not None:
            plan.save(self.out)
        report = plan.report(cost=settings.cost, lengths=lengths, budget=chosen.budget)
        notes = filter(None, [note_on_overlong(plan, lengths)])
        say(*corpus, report, *notes, f"digest {plan.digest}", f"\n{chosen}")
        buckets = " ".join(str(number) for bucket in plan.buckets.shapes for number in bucket)
        of_run = f"--packing {method} --num-microbatches {plan.num_microbatches} --buckets {buckets}"
        say(f"\nto train in these buckets: {of_run}")
        if self.out is not None:
            say(self.out)
        if self.html is not None:
            from jvarlen.reports.plan_page import write_html_report  # here: it draws with matplotlib

            write_html_report(self.html, plan, lengths, cost=settings.cost, by_memory=chosen)
            say(self.html)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileCommand(ProgramConfig):
    """Compile the train step of every bucket for devices that need not be here, and print which fit."""

    target: str = dataclasses.field()  # which hides the default
    """The devices: 8xh100 or 2x8xh100, hosts × devices, of a100, h100 or h200; v5e:2x4, of v5e, v5p or v6e; or
    here. Their compilers come with the extras target-gpu and target-tpu."""
    data: tyro.conf.OmitArgPrefixes[_PlannedData] = dataclasses.field(default_factory=_PlannedData, metadata=FLAT)
    """The data to plan."""
    parallel: str | None = None
    """As for train, on all devices of target; auto needs cluster."""
    cluster: str | None = None
    """With parallel auto, the devices and links to choose for: a known machine such as dgx-h100, or a file of one."""

    def run(self) -> None:
        """Plans, compiles, prints what the compiler says, and saves it."""
        from jvarlen.runs.fit import dry_run  # here: it imports JAX

        check_outputs({"out": self.out, "html": self.html}, *self.data.inputs)
        given = {each.name: getattr(self, each.name) for each in dataclasses.fields(ProgramConfig)}
        hardware = HardwareConfig(parallel=self.parallel, cluster=self.cluster)
        if (lengths := self.data.read_lengths()) is not None:
            del given["data"]
        dry_run(FitConfig(**given, hardware=hardware, dry_run=True), lengths)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand(Settings):
    """Report on runs, finished or not: a table, and a page of pictures with the runs overlaid."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    html: Path | None = None
    """Where to write the page, one file that works offline.
    None: report.html in the run directory, or in the current directory for several runs."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        from jvarlen.reports.run_page import read_runs

        own = (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"  # which may be made again
        page = self.html or own
        check_outputs({} if page == own else {"html": page}, *self.run_dirs)
        report = read_runs(self.run_dirs)
        say(report.table())
        report.write_html(page)
        say(f"\n{page}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleCommand(Settings):
    """Continue prompts with the model of a run or of a Hugging Face directory."""

    directory: tyro.conf.Positional[Path]
    """Run directory, or Hugging Face directory."""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A text to continue; may be given several times. An empty one is a sample from its beginning."""
    prompts: Path | None = None
    """File with more texts to continue, a line each."""
    chat: bool = False
    """Each prompt is what a user says: it is written by the chat template, and the sample is the answer."""
    max_new_tokens: int = 128
    """The most tokens that a prompt is continued by; it ends earlier where the model writes the end token."""
    temperature: float = 0.0
    """Logits are divided by it; 0 always takes the likeliest token."""
    stop: str | None = None
    """Text before which a sample ends, such as the one that follows every answer in the data."""
    seed: int = 0
    """Seed of the random choice of tokens."""
    checkpoint: _WhichCheckpoint = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint of a run to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, for a model that has none."""
    out: Path | None = None
    """Where to write the samples as well: a JSON object a line, with prompt, text and the new tokens."""
    max_tokens: int = 16_384
    """Budget of prompts and new tokens that are held at once on a device, padding included."""
    max_shapes: int = 4
    """The most buckets, that is, compiled shapes."""
    devices: int | None = None
    """Number of devices. Without accelerators the CPU is split into this many. None for one."""
    progress: bool = True
    """Show progress bars."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "max_new_tokens", "max_tokens", "max_shapes", "devices")
        check_at_least_zero(seed=self.seed)
        check_temperature(self.temperature)

    def run(self) -> None:
        """Samples, writes the file, and prints prompts with their continuations, or the answers to them."""
        layout = None if self.devices is None else launch(DeviceConfig(devices=self.devices))
        check_outputs({"out": self.out}, self.directory, self.prompts, self.tokenizer)
        prompts = [*self.prompt]
        if self.prompts is not None:
            of_file = regular_file(self.prompts).read_bytes().splitlines()  # text has more ends of lines than bytes
            prompts += [line.decode("utf-8-sig", "surrogateescape") for line in of_file]
        if not prompts:
            raise UserError("there is nothing to continue: give --prompt TEXT, or --prompts FILE with lines")
        trained = _read_trained(self.directory, self.checkpoint, self.tokenizer)
        codec = trained.codec
        if codec is None:
            raise UserError(
                f"the {trained.decoder.num_values:,} tokens of {self.directory} are no bytes, and it has no tokenizer: "
                "give one with --tokenizer"
            )
        if self.chat and trained.chats is None:
            raise UserError(f"{self.directory} has no template of chats: its prompts are texts, without --chat")
        write = trained.chats.render_prompt if self.chat and trained.chats is not None else MarkedText
        tokens = [codec.prompt(write(prompt)) for prompt in prompts]
        continued = inference.generate(
            trained.params,
            trained.decoder,
            tokens,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            seed=self.seed,
            end_token=trained.end_tokens,
            max_tokens=self.max_tokens,
            max_shapes=self.max_shapes,
            layout=layout,
            progress=self.progress,
        )
        samples = []
        for given, new in zip(tokens, continued, strict=True):
            shown = given[:0] if self.chat else given
            text = codec.decode(np.concatenate([shown, new]))
            end = text.find(self.stop, len(codec.decode(shown))) if self.stop else -1
            samples.append(text if end < 0 else text[:end])
        if self.out is not None:
            rows = zip(prompts, samples, continued, strict=True)
            lines = ({"prompt": prompt, "text": text, "tokens": new.tolist()} for prompt, text, new in rows)
            with write_atomically(self.out) as file:
                file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
        for i, text in enumerate(samples, 1):
            say(text if len(samples) == 1 else f"── prompt {i}\n{text}")
        if self.out is not None:
            say(self.out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand(Settings):
    """Write the trained model of a run as a Hugging Face directory, with its tokenizer."""

    run_dir: tyro.conf.Positional[Path]
    """Run directory."""
    out: tyro.conf.Positional[Path]
    """The directory to write, which `transformers` opens; it must be empty or new."""
    checkpoint: _WhichCheckpoint = dataclasses.field(default="latest", metadata={"name": "from"})
    """The checkpoint to take: the latest, or the one with the best evaluation."""
    tokenizer: Path | None = None
    """Tokenizer file, for a run that has none."""

    def run(self) -> None:
        """Writes the directory, and prints what it holds."""
        import jax  # here: settings are read without it

        check_new_directory(self.out)
        trained = _read_trained(self.run_dir, self.checkpoint, self.tokenizer)
        models.to_hugging_face(
            self.out,
            trained.params,
            trained.decoder,
            tokenizer=self.tokenizer or trained.folder,
            end_token=trained.end_tokens[0] if len(trained.end_tokens) == 1 else trained.end_tokens or None,
        )
        size = sum(leaf.size for leaf in jax.tree.leaves(trained.params))
        say(f"{self.out}: {size:,} parameters after {trained.num_steps:,} steps")


class _Trained(NamedTuple):
    """A model, of a checkpoint of a run or of a Hugging Face directory, with what is between texts and its tokens."""

    decoder: DecoderConfig
    params: Any
    num_steps: int
    codec: Tokenizer | None  # None: its tokens are no bytes, and there is no tokenizer
    end_tokens: tuple[int, ...]  # each of which ends a sample
    chats: RecordFormat | None  # how a chat is written, if it has any
    folder: Path | None  # of files that come with the model, if there are any


def _read_trained(directory: Path, which: Literal["latest", "best"], tokenizer: Path | None) -> _Trained:
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"{directory} is not the directory of a run, nor of a model of Hugging Face: there is no config.json"
        )
    fields, folder, num_steps, end_token = read_object(directory / "config.json"), directory, 0, None
    record_format: RecordFormat | None = None
    if "model_type" in fields:
        decoder, params = models.from_hugging_face(directory)
    else:
        from jvarlen.models.decoder import param_shapes  # here: settings are read without JAX
        from jvarlen.training.checkpoint import read_params
        from jvarlen.training.trainable import take_params

        settings, folder = load_config(directory / "config.json"), directory / MODEL_DIR
        arrays, place = read_params(directory / "checkpoints", which)
        decoder, num_steps, end_token = settings.decoder, place.num_steps_done, settings.data.end_token
        try:
            params = take_params(arrays, param_shapes(decoder), progress=False)
        except UserError as error:
            raise UserError(f"{directory} is a run of a model of your own, not of the built-in one: {error}") from None
        record_format = RecordFormat(settings.data.field, settings.data.template, settings.data.loss_on)
    if (folder / TOKENIZER).exists():
        if tokenizer is not None:
            raise UserError(f"tokenizer ({tokenizer}) is for models without one, and {directory} has its own")
        tokenizer = folder / TOKENIZER
    codec: Tokenizer | None = ByteTokenizer() if decoder.num_values == NUM_BYTES else None
    if tokenizer is not None:
        codec = from_file = FileTokenizer(tokenizer)
        chat = ChatTemplate.beside(tokenizer, from_file.special_tokens)
        if chat is not None and (record_format is None or record_format.takes_chat_template):
            record_format = (record_format or RecordFormat()).with_chat_template(chat)
    named: list[Any] = [end_token, None if codec is None else codec.end_token]
    for name in ("config.json", "generation_config.json"):
        also = read_json(folder / name).get("eos_token_id")
        named += also if isinstance(also, list) else [also]
    ends = tuple(dict.fromkeys(end for end in named if is_integer(end) and 0 <= end < decoder.num_values))
    chats = record_format if record_format is not None and record_format.takes_chats else None
    own_folder = folder if folder.exists() else None
    return _Trained(decoder, params, num_steps, codec, ends, chats, own_folder)


class MeasuredCosts(NamedTuple):
    """Cost models of the training steps of a model."""

    seconds: CostModel  # of one microbatch
    num_bytes: CostModel  # on one device, during a step
    compile_seconds: float  # of lowering and compiling one bucket, one after the other and without a cache


def measure_costs(
    model: DecoderConfig,
    *,
    dtype: str = "float32",
    max_tokens: int,
    lengths: Sequence[int],
    num_microbatches: int = 1,
    packed: bool = False,
    repeats: int = 3,
    progress: bool = True,
) -> MeasuredCosts:
    """Compiles and runs AdamW steps of a decoder in rows of these lengths, and fits cost models."""
    import jax  # here: settings are read without it
    import optax

    from jvarlen.batches.batches import token_batch_spec
    from jvarlen.batches.shapes import BatchShapes
    from jvarlen.compiling.compile import compile_buckets
    from jvarlen.compiling.measure import measure_buckets
    from jvarlen.compiling.program_store import without_compilation_cache
    from jvarlen.parallel.train import make_train_step
    from jvarlen.planning.buckets import Bucket

    check_at_least_one(max_tokens=max_tokens, num_microbatches=num_microbatches, repeats=repeats)
    check_bucket_lengths(lengths)
    if len(lengths) < 2:
        raise UserError(f"at least 2 lengths are needed to tell what attention costs, not {list(lengths)}")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), models.init_params(model, seed=0))
    step = make_train_step(models.make_loss_fn(model), optimizer_for(params, optax.adamw(1e-3)))
    state = step.init(params)
    measured = []
    for share in _SHARES_OF_BUDGET:
        with without_compilation_cache():  # what is asked is what compiling takes
            compiled = compile_buckets(
                step,
                state,
                BatchShapes(
                    [Bucket(max_tokens // share // length, length) for length in lengths],
                    num_microbatches=num_microbatches,
                    batch_spec=functools.partial(token_batch_spec, samples_per_row=1) if packed else token_batch_spec,
                ),
                progress=progress,
                options=CompileOptions(cache_dir=None, num_threads=1),
            )
        measured.append(measure_buckets(compiled, state, repeats=repeats, progress=progress))
    shapes = [shape for each in measured for shape in each.shapes]
    seconds, num_bytes = (np.concatenate([getattr(x, name) for x in measured]) for name in ("seconds", "num_bytes"))
    name = f"{model.num_layers} layers of width {model.width}, {dtype}, {num_microbatches} microbatches a step"
    name += ", packed" if packed else ""
    return MeasuredCosts(
        fit_cost_model(shapes, seconds, device=measured[0].device, model=name),
        fit_cost_model(shapes, num_bytes, unit="bytes", device=measured[0].device, model=name),
        sum(each.compile_seconds for each in measured) / len(measured),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand(Settings):
    """Measure time and memory of training steps of the decoder, for `plan --cost-model` and `--memory-model`."""

    max_tokens: int = 4096
    """Tokens of the largest measured buckets."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows to measure."""
    num_microbatches: int = 1
    """Microbatches of one optimizer update."""
    packing: RowPacking = "padded"
    """Measure rows that hold one sample, or several, packed by whichever method."""
    out: Path = Path("cost.json")
    """Where to write the cost model in seconds."""
    memory_out: Path = Path("memory.json")
    """Where to write the cost model in bytes."""
    progress: bool = True
    """Show progress bars."""
    model: Path | None = None
    """Hugging Face directory or config.json, whose sizes are measured with random weights. None: decoder."""
    decoder: DecoderConfig = dataclasses.field(default_factory=DecoderConfig)
    """The shape of the built-in model, without model."""

    def __post_init__(self):
        super().__post_init__()
        check_counts(self, 1, "max_tokens", "num_microbatches")

    def run(self) -> None:
        """Measures, prints and saves."""
        check_outputs({"out": self.out, "memory_out": self.memory_out}, self.model)
        costs = measure_costs(
            decoder_of(self.model, self.decoder),
            dtype=params_dtype(self.model),
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            num_microbatches=self.num_microbatches,
            packed=self.packing != "padded",
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, self.out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            say(f"{path}: {fitted}")
        say(f"compiling a bucket took {costs.compile_seconds:.2f} s")
