"""The model of a run or of a Hugging Face directory, as `sample` and `export` read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

from jvarlen import models
from jvarlen._common.checks import UserError, is_integer
from jvarlen._common.types import Params
from jvarlen.data.chat_template import ChatTemplate
from jvarlen.data.line_files import read_json
from jvarlen.data.open import NUM_BYTES
from jvarlen.data.records import RecordFormat
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from jvarlen.models.adapter_config import is_adapter
from jvarlen.models.config import DecoderConfig
from jvarlen.runs.model import MODEL_DIR, TOKENIZER, config_file, folder_of, is_run
from jvarlen.runs.saved_config import load_config

__all__ = ["TrainedModel", "WhichCheckpoint", "read_trained"]

WhichCheckpoint = Literal["latest", "best"]


class TrainedModel(NamedTuple):
    """A model from a checkpoint of a run or a Hugging Face directory, with its tokenizer and chat template."""

    decoder: DecoderConfig
    params: Params
    num_steps: int
    codec: Tokenizer | None  # None if tokens are not bytes and there is no tokenizer
    end_tokens: tuple[int, ...]  # each ends a sample
    chats: RecordFormat | None  # how a chat is written, if it has any
    folder: Path | None  # of files that come with the model, if there are any


def read_trained(directory: Path, which: Literal["latest", "best"], tokenizer: Path | None) -> TrainedModel:
    """Reads a checkpoint of a run, or a Hugging Face directory; `tokenizer` is for models without one."""
    if not is_adapter(directory) and not (directory / "config.json").exists():
        raise FileNotFoundError(
            f"{directory} is not the directory of a run, nor of a model of Hugging Face: there is no config.json"
        )
    folder, num_steps, end_token = directory, 0, None
    record_format: RecordFormat | None = None
    if not is_run(directory):
        decoder, params = models.from_hugging_face(directory)
        folder = folder_of(directory)
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
    beside = config_file(directory)
    for path in (beside, beside.with_name("generation_config.json"), folder / "generation_config.json"):
        also = read_json(path).get("eos_token_id")
        named += also if isinstance(also, list) else [also]
    ends = tuple(dict.fromkeys(end for end in named if is_integer(end) and 0 <= end < decoder.num_values))
    chats = record_format if record_format is not None and record_format.takes_chats else None
    own_folder = folder if folder.exists() else None
    return TrainedModel(decoder, params, num_steps, codec, ends, chats, own_folder)
