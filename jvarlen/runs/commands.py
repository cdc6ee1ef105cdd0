"""The commands of what is trained or measured: `report`, `sample`, `export` and `measure`.

Each is imported for its settings, and imports what it runs when it runs.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import tyro
from jaxtyping import Int32

from jvarlen import models
from jvarlen._common.checks import (
    UserError,
    check_at_least_one,
    check_at_least_zero,
    check_counts,
    is_integer,
    list_first,
)
from jvarlen._common.files import (
    check_new_directory,
    check_outputs,
    read_object,
    regular_file,
    write_atomically,
)
from jvarlen._common.terminal import say
from jvarlen.compiling.compile_options import CompileOptions
from jvarlen.data.line_files import read_json
from jvarlen.data.open import NUM_BYTES
from jvarlen.data.records import ChatTemplate, MarkedText, RecordFormat
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.distributed.launch import DeviceConfig, launch
from jvarlen.models.config import DecoderConfig, check_temperature
from jvarlen.planning.budget import check_bucket_lengths
from jvarlen.planning.cost_model import CostModel, fit_cost_model
from jvarlen.planning.packing import PackingMethod
from jvarlen.runs.config import DataConfig, files_read, load_config
from jvarlen.runs.model import (
    MODEL_DIR,
    TOKENIZER,
    decoder_of,
    optimizer_for,
    params_dtype,
)

__all__ = [
    "ExportCommand",
    "MeasureCommand",
    "MeasuredCosts",
    "ReportCommand",
    "SampleCommand",
    "measure_costs",
]

_SHARES_OF_BUDGET = (1, 4)  # a full bucket and a quarter of one tell what a step costs whatever it holds

_WhichCheckpoint = Annotated[Literal["latest", "best"], tyro.conf.arg(name="from")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """Report on runs, finished or not: a table, and a page of pictures with the runs overlaid."""

    run_dirs: tyro.conf.Positional[tuple[Path, ...]]
    """Run directories."""
    html: Path | None = None
    """Where to write the page, one file that works offline.
    None: report.html in the run directory, or in the current directory for several runs."""

    def run(self) -> None:
        """Prints the table, then writes the page."""
        from jvarlen.reports.run_page import read_runs

        page = self.html or (self.run_dirs[0] if len(self.run_dirs) == 1 else Path()) / "report.html"
        check_outputs({"html": self.html})
        # Only then: a page also shows runs with settings that this version does not know.
        for run_dir in self.run_dirs if self.html is not None and self.html.exists() else ():
            check_outputs({"html": self.html}, *files_read(load_config(run_dir / "config.json").data))
        report = read_runs(self.run_dirs)
        say(report.table())
        report.write_html(page)
        say(f"\n{page}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleCommand:
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
        check_counts(self, 1, "max_new_tokens", "max_tokens", "max_shapes", "devices")
        check_at_least_zero(seed=self.seed)
        check_temperature(self.temperature)

    def run(self) -> None:
        """Samples, writes the file, and prints prompts with their continuations, or the answers to them."""
        layout = None if self.devices is None else launch(DeviceConfig(devices=self.devices))
        check_outputs({"out": self.out}, self.prompts, self.tokenizer)
        prompts = self._named_prompts()
        trained = _read_trained(self.directory, self.checkpoint, self.tokenizer)
        check_outputs({"out": self.out}, *trained.files)
        codec = trained.codec
        if codec is None:
            raise UserError(
                f"the {trained.decoder.num_values:,} tokens of {self.directory} are no bytes, and it has no tokenizer: "
                "give one with --tokenizer"
            )
        write: Callable[[str], MarkedText] = MarkedText
        if self.chat:
            if trained.chats is None:
                raise UserError(f"{self.directory} has no template of chats: its prompts are texts, without --chat")
            write = trained.chats.render_prompt
        texts = {name: write(text) for name, text in prompts.items()}
        tokens = _encode(codec, texts, trained.decoder, self.max_tokens - self.max_new_tokens)
        continued = models.generate(
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
        samples, lines = [], []
        for prompt, given, new in zip(prompts.values(), tokens, continued, strict=True):
            shown = given[:0] if self.chat else given
            text = codec.decode(np.concatenate([shown, new]))
            end = text.find(self.stop, len(codec.decode(shown))) if self.stop else -1
            samples.append(text if end < 0 else text[:end])
            line = {"prompt": prompt, "text": samples[-1], "tokens": new.tolist()}
            lines.append(json.dumps(line, ensure_ascii=False) + "\n")
        if self.out is not None:
            with write_atomically(self.out) as file:
                file.write("".join(lines).encode())
        for name, text in zip(prompts, samples, strict=True):
            say(text if len(samples) == 1 else f"── {name}\n{text}")
        if self.out is not None:
            say(self.out)

    def _named_prompts(self) -> dict[str, str]:
        """All prompts, by where they come from."""
        named = {f"prompt {i}": text for i, text in enumerate(self.prompt, 1)}
        file = b"" if self.prompts is None else regular_file(self.prompts).read_bytes()
        for i, line in enumerate(file.removeprefix(codecs.BOM_UTF8).splitlines(), 1):
            try:
                named[f"{self.prompts} line {i}"] = line.decode()
            except UnicodeDecodeError:
                raise UserError(f"{self.prompts}: line {i} is not UTF-8") from None
        if not named:
            raise UserError("there is nothing to continue: give --prompt TEXT, or --prompts FILE with lines")
        return named


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
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
    files: Sequence[str | Path]  # that it was read from, or trained on


def _read_trained(directory: Path, which: Literal["latest", "best"], tokenizer: Path | None) -> _Trained:
    if not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"{directory} is not the directory of a run, nor of a model of Hugging Face: there is no config.json"
        )
    fields, folder, num_steps, end_token = read_object(directory / "config.json"), directory, 0, None
    record_format: RecordFormat | None = None
    files: Sequence[str | Path] = [*directory.iterdir()]
    if "model_type" in fields:
        decoder, params = models.from_hugging_face(directory)
    else:
        from jvarlen.models.decoder import param_shapes  # here: settings are read without JAX
        from jvarlen.training.checkpoint import read_params
        from jvarlen.training.initial_params import take_params

        settings, folder = load_config(directory / "config.json"), directory / MODEL_DIR
        arrays, place = read_params(directory / "checkpoints", which)
        decoder, num_steps, end_token = settings.decoder, place.num_steps_done, settings.data.end_token
        try:
            params = take_params(arrays, param_shapes(decoder))
        except UserError as error:
            raise UserError(f"{directory} is a run of a model of your own, not of the built-in one: {error}") from None
        record_format = RecordFormat(settings.data.field, settings.data.template, settings.data.loss_on)
        files = files_read(settings.data, settings.model)
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
    return _Trained(decoder, params, num_steps, codec, ends, chats, own_folder, files)


def _encode(
    codec: Tokenizer, prompts: dict[str, MarkedText], decoder: DecoderConfig, longest: int
) -> list[Int32[np.ndarray, " L"]]:
    """The tokens of the prompts; raises ValueError that lists prompts without, too long, or of unknown tokens."""
    encoded, wrong = [], []
    for name, text in prompts.items():
        try:
            tokens = codec.prompt(text)
        except UserError as error:
            wrong.append(f"{name}: {error}")
            continue
        if (outside := tokens[tokens >= decoder.num_values]).size:
            wrong.append(
                f"{name}: tokens {list_first(outside.tolist())}, but the model's are below {decoder.num_values}"
            )
        if not tokens.size and decoder.begin_token is None:
            wrong.append(f"{name}: no tokens, and the model has none that begins a text")
        if len(tokens) > longest:
            wrong.append(f"{name}: {len(tokens):,} tokens, but max_tokens leaves room for {max(longest, 0):,}")
        encoded.append(tokens)
    if wrong:
        raise UserError(f"prompts that cannot be continued: {list_first(wrong, '; ')}")
    return encoded


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
    microbatches_per_step: int = 1,
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

    check_at_least_one(max_tokens=max_tokens, microbatches_per_step=microbatches_per_step, repeats=repeats)
    check_bucket_lengths(lengths)
    if len(lengths) < 2:
        raise UserError(f"at least 2 lengths are needed to tell what attention costs, not {list(lengths)}")
    too_long = [length for length in lengths if length * max(_SHARES_OF_BUDGET) > max_tokens]
    if too_long:
        raise UserError(f"a quarter of max_tokens {max_tokens} holds no row of {too_long} tokens")
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
                    microbatches_per_step=microbatches_per_step,
                    batch_spec=functools.partial(token_batch_spec, samples_per_row=1) if packed else token_batch_spec,
                ),
                progress=progress,
                options=CompileOptions(cache_dir=None, num_threads=1),
            )
        measured.append(measure_buckets(compiled, state, repeats=repeats, progress=progress))
    shapes = [shape for each in measured for shape in each.shapes]
    seconds, num_bytes = (
        np.concatenate([getattr(each, name) for each in measured]) for name in ("seconds", "num_bytes")
    )
    demo, sizes = DecoderConfig(), ("num_layers", "width", "num_heads", "vocab_size")
    given = {key: value for key, value in vars(model).items() if key in sizes or value != getattr(demo, key)}
    name = ", ".join(f"{key} {value}" for key, value in given.items())
    name += f", {dtype}, {microbatches_per_step} microbatches a step{', packed' if packed else ''}"
    return MeasuredCosts(
        fit_cost_model(shapes, seconds, device=measured[0].device, model=name),
        fit_cost_model(shapes, num_bytes, unit="bytes", device=measured[0].device, model=name),
        sum(each.compile_seconds for each in measured) / len(measured),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureCommand(DeviceConfig):
    """Measure time and memory of training steps of the decoder, for `plan --cost-model` and `--memory-model`.

    With --links, measure devices and the links between them.
    """

    max_tokens: int = 4096
    """Tokens of the largest measured buckets."""
    lengths: tuple[int, ...] = (32, 128, 512, 1024)
    """Lengths of rows to measure."""
    microbatches_per_step: int = 1
    """Microbatches of one optimizer update."""
    packing: PackingMethod | None = None
    """Measure rows that hold several samples, packed by whichever method."""
    links: bool = False
    """Measure all devices and the links between them instead, as a cluster."""
    out: Path | None = None
    """Where to write the cost model in seconds, cost.json by default; with --links the cluster, cluster.json."""
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
        check_counts(self, 1, "max_tokens", "microbatches_per_step")

    def run(self) -> None:
        """Measures, prints and saves."""
        if self.links:
            self._measure_links(self.out or Path("cluster.json"))
            return
        if self.devices is not None or self.has_processes:
            raise UserError("steps are measured on one device: devices and processes are for --links")
        out = self.out or Path("cost.json")
        check_outputs({"out": out, "memory_out": self.memory_out}, *files_read(DataConfig(), self.model))
        costs = measure_costs(
            decoder_of(self.model, self.decoder),
            dtype=params_dtype(self.model),
            max_tokens=self.max_tokens,
            lengths=self.lengths,
            microbatches_per_step=self.microbatches_per_step,
            packed=self.packing is not None,
            progress=self.progress,
        )
        for fitted, path in ((costs.seconds, out), (costs.num_bytes, self.memory_out)):
            fitted.save(path)
            say(f"{path}: {fitted}")
        say(f"compiling a bucket took {costs.compile_seconds:.2f} s")

    def _measure_links(self, out: Path) -> None:
        from jvarlen.distributed.processes import is_main_process
        from jvarlen.targets.links import measure_cluster

        check_outputs({"out": out})
        placement, dtype = launch(self), self.decoder.compute_dtype or params_dtype(self.model)
        cluster = measure_cluster(placement, dtype=dtype, progress=self.progress)
        if not is_main_process():
            return
        cluster.save(out)
        flops, num_bytes, bandwidth = (
            value / 1e9 for value in (cluster.flops_per_second, cluster.memory_bytes, cluster.memory_bytes_per_second)
        )
        say(f"{out}: {cluster.name}, {cluster.num_hosts} × {cluster.devices_per_host}, each with")
        say(f"  {flops:,.1f} GFLOP/s, {num_bytes:,.1f} GB of memory at {bandwidth:,.2f} GB/s")
        for name, link in (("link", cluster.link), ("host link", cluster.host_link))[: 1 + (cluster.num_hosts > 1)]:
            say(f"  {name}: {link.bytes_per_second / 1e9:,.2f} GB/s, {1e6 * link.latency_s:,.1f} µs")
        say(cluster.sources)
