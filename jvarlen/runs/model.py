"""The model of a run: that of a Hugging Face directory, of the sizes of a config.json, or of the settings."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jvarlen._common.checks import UserError, list_first
from jvarlen._common.files import read_object
from jvarlen.data.length_cache import combine_keys, content_key
from jvarlen.models.config import DecoderConfig
from jvarlen.models.hugging_face_config import read_config
from jvarlen.runs.config import FitConfig, is_run_dir, load_config

if TYPE_CHECKING:
    import optax

__all__ = [
    "MODEL_DIR",
    "TOKENIZER",
    "config_file",
    "copy_files",
    "decoder_of",
    "describe_model",
    "has_checkpoint",
    "has_weights",
    "initial_params",
    "model_key",
    "model_shapes",
    "named_params",
    "optimizer_for",
    "params_dtype",
    "peak_rate",
    "tokenizer_of",
    "with_model",
]

TOKENIZER, MODEL_DIR = "tokenizer.json", "model"  # the latter of a run, with what came with its model and tokenizer
_SCRATCH_RATE = 3e-3  # of the demo, which learns in minutes
# At 32, 64 and 128 sequences a step 1e-5, 1.4e-5 and 2e-5: about those of LIMA, Llama 2 and Alpaca.
_FINE_TUNING_RATE = 5e-6
_OURS = ("attention", "compute_dtype")  # settings of a decoder that no config.json has
_DTYPES = ("float32", "bfloat16")
_KEY_BYTES = 1 << 20  # of each end of a file of weights


def has_weights(model: Path | None) -> bool:
    """Whether `model` gives weights: a directory does, a config.json gives sizes alone."""
    return model is not None and model.suffix != ".json"


def config_file(model: Path) -> Path:
    """The config.json of a model."""
    return model / "config.json" if has_weights(model) else model


def decoder_of(model: Path | None, given: DecoderConfig) -> DecoderConfig:
    """The decoder of `model` with the given settings that no config.json has; of None the given one."""
    if model is None:
        return given
    ours, default = {name: getattr(given, name) for name in _OURS}, DecoderConfig()
    sizes = {field.name: getattr(given, field.name) for field in dataclasses.fields(given) if field.name not in _OURS}
    if twice := [f"{name} ({size})" for name, size in sizes.items() if size != getattr(default, name)]:
        raise UserError(f"model ({model}) and {list_first(twice)} both say the shape of the decoder: give one of them")
    return dataclasses.replace(read_config(model), **ours)


def tokenizer_of(model: Path | None) -> Path | None:
    """The tokenizer file in the directory of a model, if there is one."""
    if model is None or not has_weights(model) or not (model / TOKENIZER).exists():
        return None
    return model / TOKENIZER


def copy_files(config: FitConfig, run_dir: Path) -> None:
    """Copies tokenizer, chat template and config.json into a run, which then needs their directory no more."""
    from jvarlen.models.hugging_face import files_beside  # here: settings are read without JAX

    model, tokenizer = config.model, config.data.tokenizer
    copied = files_beside(model if tokenizer is None and has_weights(model) else tokenizer)
    copied.pop("config.json", None)
    if model is not None:
        copied["config.json"] = config_file(model)
    if copied:
        (run_dir / MODEL_DIR).mkdir(exist_ok=True)
    for name, source in copied.items():
        shutil.copyfile(source, run_dir / MODEL_DIR / name)


def peak_rate(config: FitConfig) -> float:
    """The peak of the base learning rate: as given, or what suits weights that a model has, or random ones."""
    rate = config.optimizer.learning_rate
    if rate is not None:
        return rate
    return _FINE_TUNING_RATE if has_weights(config.model) else _SCRATCH_RATE


def with_model(config: FitConfig) -> FitConfig:
    """The settings with the decoder, tokenizer and learning rate that their model means; of a resumed run its own."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=peak_rate(config))
    config = dataclasses.replace(config, optimizer=optimizer)
    model, resumed = config.model, config.directory.resumed
    if model is None:
        return config
    if resumed is not None and is_run_dir(resumed):  # whose model may be gone
        own, given = load_config(resumed / "config.json"), config.decoder
        ours = {name: getattr(given, name) for name in _OURS}
        is_default = given == dataclasses.replace(DecoderConfig(), **ours)
        decoder, tokenizer = dataclasses.replace(own.decoder, **ours) if is_default else given, own.data.tokenizer
    else:
        decoder, tokenizer = decoder_of(model, config.decoder), tokenizer_of(model)
    data = dataclasses.replace(config.data, tokenizer=config.data.tokenizer or tokenizer)
    return dataclasses.replace(config, decoder=decoder, data=data)


def model_key(model: Path) -> str:
    """A content key that reads no gigabytes: of config.json, and of each file of weights its size and both ends."""
    keys = [content_key(config_file(model))]
    for path in sorted(model.glob("*.safetensors")) if has_weights(model) else ():
        size = path.stat().st_size
        with path.open("rb") as file:  # which begins with names, types and places of all tensors
            ends = file.read(_KEY_BYTES)
            file.seek(max(0, size - _KEY_BYTES))
            ends += file.read(_KEY_BYTES)
        keys += [path.name, str(size), hashlib.sha256(ends).hexdigest()]
    return combine_keys(*keys)


def has_checkpoint(run_dir: Path | None) -> bool:
    """Whether a run has a checkpoint, so that it needs its model no more."""
    return run_dir is not None and any((run_dir / "checkpoints").glob("[0-9]*"))


def initial_params(config: FitConfig) -> Any:
    """The parameters that a run of the built-in model begins with.

    Shapes, if a checkpoint has those of its `model`, or if they are random and only compiled for.
    """
    import jax  # here: settings are read without it

    from jvarlen.models import init_params
    from jvarlen.models.hugging_face import from_hugging_face
    from jvarlen.training.checkpoint import read_shapes

    model, resumed = config.model, config.directory.resumed
    if config.target is not None and not has_weights(model):
        return model_shapes(model, config.decoder)
    if model is None:
        return init_params(config.decoder, config.seed)
    if resumed is not None and has_checkpoint(resumed):
        try:
            return named_params(config.decoder, read_shapes(resumed / "checkpoints"))
        except UserError:  # a damaged checkpoint, or other settings: which is told where the run is opened
            return model_shapes(None, config.decoder)
    dtype = params_dtype(model)
    if not has_weights(model):
        return jax.tree.map(lambda leaf: leaf.astype(dtype), init_params(config.decoder, config.seed))
    params = from_hugging_face(model)[1]
    if others := sorted({str(leaf.dtype) for leaf in jax.tree.leaves(params)}.difference(_DTYPES)):
        raise UserError(f"{model}: parameters in {list_first(others)} are not trained, only {' and '.join(_DTYPES)}")
    return params


def describe_model(config: FitConfig, params: Any) -> str:
    """What a run with a `model` trains, and at which rate."""
    import jax  # here: settings are read without it

    leaves, own = jax.tree.leaves(params), config.optimizer
    types = " and ".join(sorted({str(leaf.dtype) for leaf in leaves}))
    weights = "its weights" if has_weights(config.model) else "random weights"
    return (
        f"{config.model}: {sum(leaf.size for leaf in leaves):,} parameters in {types}, {weights}\n"
        f"learning rate {peak_rate(config):g} at {own.base_batch_size:g} {own.batch_size_unit} a step"
    )


def model_shapes(model: Path | None, decoder: DecoderConfig) -> Any:
    """The parameters as `jax.ShapeDtypeStruct`, in the type of config.json; nothing of their size is made."""
    import jax  # here: settings are read without it

    from jvarlen.models.decoder import param_shapes

    dtype = params_dtype(model)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), param_shapes(decoder))


def named_params(decoder: DecoderConfig, arrays: Mapping[str, Any]) -> Any:
    """The parameters of a decoder from those of a checkpoint by name; ValueError if they are of another model."""
    import jax  # here: settings are read without it

    from jvarlen._common.pytree import describe, plain_names

    shapes = model_shapes(None, decoder)
    names = [name.removesuffix(".value") for name in plain_names(shapes)]  # as some versions of NNX name leaves
    expected = dict(zip(names, jax.tree.leaves(shapes), strict=True))
    if differing := [
        f"{name} {describe(arrays.get(name))}, of the decoder {describe(expected.get(name))}"
        for name in {**arrays, **expected}
        if getattr(arrays.get(name), "shape", None) != getattr(expected.get(name), "shape", None)
    ]:
        raise UserError(f"these are no parameters of the decoder of the settings: {list_first(differing, '; ')}")
    return jax.tree.unflatten(jax.tree.structure(shapes), [arrays[name] for name in expected])


def optimizer_for(params: Any, optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, with float32 copies of parameters that have fewer bits."""
    import jax
    import jax.numpy as jnp

    from jvarlen.training.master_weights import with_float32_master

    dtypes = {leaf.dtype for leaf in jax.tree.leaves(params)}
    is_narrow = any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)
    return with_float32_master(optimizer) if is_narrow else optimizer


def params_dtype(model: Path | None) -> Literal["float32", "bfloat16"]:
    """The type of parameters that a config.json names; float32 where none is named."""
    if model is None:
        return "float32"
    path = config_file(model)
    fields = read_object(path)
    name: Any = fields.get("dtype") or fields.get("torch_dtype") or "float32"
    if name not in _DTYPES:
        raise UserError(f"{path}: parameters in {name!r} are not trained, only {' and '.join(_DTYPES)}")
    return name
