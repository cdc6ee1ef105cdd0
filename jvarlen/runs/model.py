"""The model of a run: a Hugging Face directory, adapters of PEFT, another run, sizes of a config.json, or settings."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import read_object
from jvarlen._common.types import Array, Params
from jvarlen.data.length_cache import combine_keys, content_key
from jvarlen.models.adapter_config import ADAPTER_CONFIG, base_of, is_adapter
from jvarlen.models.config import DecoderConfig, LoraConfig
from jvarlen.models.hugging_face_config import read_config
from jvarlen.runs.config import FitConfig, is_run_dir
from jvarlen.runs.saved_config import load_config

if TYPE_CHECKING:
    import optax

__all__ = [
    "MODEL_DIR", "TOKENIZER", "RunModel", "config_file", "copy_files", "decoder_of", "describe_model", "folder_of",
    "has_checkpoint", "has_weights", "initial_params", "is_run", "model_key", "model_shapes", "optimizer_for",
    "params_dtype", "peak_rate",
]  # fmt: skip

TOKENIZER, MODEL_DIR = "tokenizer.json", "model"  # the latter of a run, with what came with its model and tokenizer
_SCRATCH_RATE = 3e-3  # of the demo, which learns in minutes
# At 32, 64 and 128 sequences a step 1e-5, 1.4e-5 and 2e-5: about those of LIMA, Llama 2 and Alpaca.
_FINE_TUNING_RATE = 5e-6
# At 16 sequences a step 1.4e-4, at 32 2e-4: QLoRA has 2e-4 at 16 (Dettmers et al. 2023), LoRA's GPT-3 2e-4 at 128
# (Hu et al. 2021).
_LORA_RATE = 1e-4
_OURS = ("attention", "compute_dtype")  # settings of a decoder that no config.json has
_DTYPES = ("float32", "bfloat16")
_KEY_BYTES = 1 << 20  # of each end of a file of weights


def has_weights(model: Path | None) -> bool:
    """Whether `model` gives weights: a directory does, a config.json gives sizes alone."""
    return model is not None and model.suffix != ".json"


def is_run(model: Path) -> bool:
    """Whether `model` is the directory of a run, which gives the parameters of its newest checkpoint."""
    path = model / "config.json"
    is_directory = has_weights(model) and path.exists() and not is_adapter(model)
    return is_directory and "model_type" not in read_object(path)


def folder_of(model: Path) -> Path:
    """The directory of tokenizer and chat template of a model that has weights."""
    if is_adapter(model):
        return model if (model / TOKENIZER).exists() else base_of(model)
    return model / MODEL_DIR if is_run(model) else model


def config_file(model: Path) -> Path:
    """The config.json of a model."""
    if is_adapter(model):
        return base_of(model) / "config.json"
    return folder_of(model) / "config.json" if has_weights(model) else model


def decoder_of(
    model: Path | None, given: DecoderConfig, *, takes_part: bool = False, lora: LoraConfig | None = None
) -> DecoderConfig:
    """The decoder of `model`, with the given settings that may differ from it; without a model the given one.

    `takes_part`: not all of the model is taken, so that the vocabulary may have another size. `lora`: new adapters.
    """
    if model is None:
        return given
    kept, default = _beside_model(given, takes_part), DecoderConfig()
    names = [field.name for field in dataclasses.fields(given) if field.name not in {*kept, "lora"}]
    sizes = {name: getattr(given, name) for name in names}
    if twice := [f"{name} ({size})" for name, size in sizes.items() if size != getattr(default, name)]:
        raise UserError(f"model ({model}) and {list_first(twice)} both say the shape of the decoder: give one of them")
    decoder = load_config(model / "config.json").decoder if is_run(model) else read_config(model)
    if decoder.lora is not None and lora is not None:
        raise UserError(
            f"{model} has adapters of rank {decoder.lora.rank}, and new ones of rank {lora.rank} are asked for: train "
            "those that it has, or merge them into a model by export, and train new ones of that"
        )
    return dataclasses.replace(decoder, **kept, lora=lora or decoder.lora)


def _beside_model(given: DecoderConfig, takes_part: bool) -> dict[str, Any]:
    """The settings of a decoder that go with a model."""
    names = (*_OURS, "vocab_size") if takes_part and given.vocab_size != DecoderConfig().vocab_size else _OURS
    return {name: getattr(given, name) for name in names}


def copy_files(model: Path | None, tokenizer: Path | None, run_dir: Path) -> None:
    """Copies tokenizer, chat template and config.json into a run, which then no longer needs their directory."""
    from jvarlen.models.hugging_face import files_beside  # here: settings are read without JAX

    folder = folder_of(model) if tokenizer is None and model is not None and has_weights(model) else tokenizer
    copied = {} if folder is None or not folder.exists() else files_beside(folder)
    copied.pop("config.json", None)
    if model is not None and config_file(model).exists():
        copied["config.json"] = config_file(model)
    if copied:
        (run_dir / MODEL_DIR).mkdir(exist_ok=True)
    for name, source in copied.items():
        shutil.copyfile(source, run_dir / MODEL_DIR / name)


def peak_rate(config: FitConfig, decoder: DecoderConfig) -> float:
    """The peak of the base learning rate: as given, or what suits adapters, a model's weights, or random ones."""
    rate = config.optimizer.learning_rate
    if rate is not None:
        return rate
    if decoder.lora is not None:
        return _LORA_RATE
    return _FINE_TUNING_RATE if has_weights(config.model) else _SCRATCH_RATE


class RunModel(NamedTuple):
    """The decoder and the tokenizer that the settings of a run mean; a resumed run has those that it began with."""

    decoder: DecoderConfig  # the data may enlarge its vocabulary
    tokenizer: Path | None

    @classmethod
    def of(cls, config: FitConfig) -> RunModel:
        """Reads them from the model's directory, or from that of the resumed run, if there is one."""
        model, resumed, given = config.model, config.directory.resumed, config.decoder
        if model is None:
            return cls(given, config.data.tokenizer)
        if resumed is not None and is_run_dir(resumed):  # its model may be gone
            saved, kept = load_config(resumed / "config.json"), _beside_model(given, config.takes_part)
            is_default = given == dataclasses.replace(DecoderConfig(), **kept, lora=given.lora)
            lora = config.lora or saved.decoder.lora
            decoder = dataclasses.replace(saved.decoder, **kept, lora=lora) if is_default else given
            return cls(decoder, config.data.tokenizer or saved.data.tokenizer)
        decoder = decoder_of(model, given, takes_part=config.takes_part, lora=config.lora)
        beside = folder_of(model) / TOKENIZER
        return cls(decoder, config.data.tokenizer or (beside if beside.exists() else None))


def model_key(model: Path) -> str:
    """A content key of config.json, and of the size and both ends of each file of weights, which may be huge."""
    if is_run(model):
        steps = [int(path.name) for path in (model / "checkpoints").glob("[0-9]*") if path.name.isdecimal()]
        if not steps:
            raise FileNotFoundError(f"{model} is a run without a checkpoint")
        return content_key(model / "checkpoints" / str(max(steps)) / "manifest.json")
    keys = [content_key(config_file(model))]
    folders = [model] if has_weights(model) else []
    if is_adapter(model):
        keys.append(content_key(model / ADAPTER_CONFIG))
        folders.append(base_of(model))
    for path in (path for folder in folders for path in sorted(folder.glob("*.safetensors"))):
        size = path.stat().st_size
        with path.open("rb") as file:  # it begins with names, types and places of all tensors
            ends = file.read(_KEY_BYTES)
            file.seek(max(0, size - _KEY_BYTES))
            ends += file.read(_KEY_BYTES)
        keys += [path.name, str(size), hashlib.sha256(ends).hexdigest()]
    return combine_keys(*keys)


def has_checkpoint(run_dir: Path | None) -> bool:
    """Whether a run has a checkpoint, so that it no longer needs its model."""
    return run_dir is not None and any((run_dir / "checkpoints").glob("[0-9]*"))


def initial_params(config: FitConfig, decoder: DecoderConfig) -> Params:
    """The parameters that a run of the built-in model begins with.

    They are shapes if a checkpoint has the values, or if random ones are only compiled for.
    """
    import jax  # here: settings are read without it

    from jvarlen.models import add_lora, init_params
    from jvarlen.models.hugging_face import from_hugging_face
    from jvarlen.training.checkpoint import read_params, read_shapes
    from jvarlen.training.trainable import take_params

    model, resumed = config.model, config.directory.resumed
    if config.target is not None and not has_weights(model):
        return model_shapes(model, decoder)
    if model is None:
        return init_params(decoder, config.seed)
    if resumed is not None and has_checkpoint(resumed):
        try:
            shapes = read_shapes(resumed / "checkpoints")
            return take_params(shapes, model_shapes(None, decoder), progress=False)
        except UserError:  # a damaged checkpoint, or other settings: opening the run says which
            return model_shapes(None, decoder)
    whole, dtype = decoder, params_dtype(model)
    is_new = decoder.lora is not None and decoder_of(model, DecoderConfig()).lora is None
    if is_new:
        decoder = dataclasses.replace(decoder, lora=None)
    if not has_weights(model):
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(decoder, config.seed))
        return add_lora(params, whole, config.seed) if is_new else params
    params = _draw_params(config, decoder, dtype) if config.takes_part else None
    fresh, resized, progress = config.fresh, config.resized, config.progress
    if is_run(model):
        arrays = read_params(model / "checkpoints")[0]
        like = params or model_shapes(model, decoder)
        params = take_params(arrays, like, fresh=fresh, resized=resized, progress=progress)
    else:
        params = from_hugging_face(model, params, fresh=fresh, resized=resized, progress=progress)[1]
    if others := sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)}.difference(_DTYPES)):
        raise UserError(f"{model}: parameters in {list_first(others)} are not trained, only {' and '.join(_DTYPES)}")
    return add_lora(params, whole, config.seed) if is_new else params


def _draw_params(config: FitConfig, decoder: DecoderConfig, dtype: str) -> Params:
    """Random parameters where not all are taken from a model, and shapes of the others, which are not drawn."""
    import jax  # here: settings are read without it

    from jvarlen.models.decoder import init_params
    from jvarlen.training.trainable import names_of

    params, patterns = model_shapes(config.model, decoder), (*config.fresh, *config.resized)
    is_drawn = [any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) for name in names_of(params)]

    @jax.jit  # leaves out what is not returned
    def draw() -> list[Array]:
        leaves = jax.tree.leaves(init_params(decoder, config.seed))
        return [leaf.astype(dtype) for leaf, draws in zip(leaves, is_drawn, strict=True) if draws]

    drawn, (shapes, structure) = iter(draw()), jax.tree.flatten(params)
    leaves = [next(drawn) if draws else shape for shape, draws in zip(shapes, is_drawn, strict=True)]
    return jax.tree.unflatten(structure, leaves)


def describe_model(config: FitConfig, params: Params) -> str:
    """Describes which parameters of a `model` are trained, and at which rate."""
    import jax  # here: settings are read without it

    from jvarlen.training.trainable import names_of

    leaves, decoder, optimizer, adapters = jax.tree.leaves(params), config.decoder, config.optimizer, ""
    types = " and ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    weights = "its weights" if has_weights(config.model) else "random weights"
    if decoder.lora is not None:
        named = zip(names_of(params), leaves, strict=True)
        size = sum(leaf.size for name, leaf in named if fnmatch.fnmatchcase(name, decoder.trainable or ""))
        adapters = f"of these, {size:,} of adapters of rank {decoder.lora.rank}: {', '.join(decoder.adapted)}\n"
    return (
        f"{config.model}: {sum(leaf.size for leaf in leaves):,} parameters in {types}, {weights}\n{adapters}"
        f"learning rate {optimizer.learning_rate:g} at {config.base_batch_size:g} {optimizer.batch_size_unit} a step"
    )


def model_shapes(model: Path | None, decoder: DecoderConfig) -> Params:
    """The parameters as `jax.ShapeDtypeStruct`, in the type of config.json; nothing of their size is made."""
    import jax  # here: settings are read without it

    from jvarlen.models.decoder import param_shapes
    from jvarlen.training.trainable import names_of

    dtype, (leaves, structure) = params_dtype(model), jax.tree.flatten(shapes := param_shapes(decoder))
    in_types = [
        leaf if fnmatch.fnmatchcase(name, decoder.trainable or "") else jax.ShapeDtypeStruct(leaf.shape, dtype)
        for name, leaf in zip(names_of(shapes), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, in_types)


def optimizer_for(params: Params, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with float32 copies of parameters that have fewer bits."""
    import jax
    import jax.numpy as jnp

    from jvarlen.training.optimizers import with_float32_master

    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    is_narrow = any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)
    return with_float32_master(optimizer) if is_narrow else optimizer


def params_dtype(model: Path | None) -> Literal["float32", "bfloat16"]:
    """The dtype of the parameters by a config.json or a checkpoint; float32 by default."""
    if model is None:
        return "float32"
    if is_run(model):
        from jvarlen.training.checkpoint import read_shapes  # here: settings are read without JAX

        return next((leaf.dtype.name for leaf in read_shapes(model / "checkpoints").values()), "float32")
    path = config_file(model)
    fields = read_object(path)
    name: Any = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UserError(f"{path}: parameters in {name!r} are not trained, only {' and '.join(_DTYPES)}")
    return name
