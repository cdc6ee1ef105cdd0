"""Prompts: they begin as samples do and do not end, and what was encoded is decoded."""

import json

import numpy as np
import pytest

from jvarlen import UserError
from jvarlen.data.samples import MarkedText
from jvarlen.data.tokenizer import ByteTokenizer, FileTokenizer

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["a plan of steps", "plans of plans", "ö 日本 \n"]


def save_tokenizer(path, template=None):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280, show_progress=False, initial_alphabet=alphabet, special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    if template is not None:
        special = [("<s>", 0), ("</s>", 1)]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=special)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    ("template", "prefix", "suffix"),
    [(None, [], []), ("<s> $A", [0], []), ("$A </s>", [], [1]), ("<s> <s> $A </s> <s>", [0, 0], [1, 0])],
)
def test_a_prompt_begins_as_a_sample_and_does_not_end(tmp_path, template, prefix, suffix):
    path = save_tokenizer(tmp_path / "tokenizer.json", template)
    codec = FileTokenizer(path)
    for text in TEXTS:
        sample = codec.sample(MarkedText(text))
        assert [*codec.prompt(MarkedText(text)).tolist(), *suffix] == sample.tolist()
        assert codec.decode(sample) == text
    assert codec.prompt(MarkedText("")).tolist() == prefix
    assert codec.end_token == (suffix[0] if suffix else None)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("eos_token", "expected"), [("</s>", 1), ({"content": "</s>"}, 1), ("<unknown>", None), (None, None)]
)
def test_without_an_added_end_token_it_is_that_of_the_configuration(tmp_path, eos_token, expected, file):
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / file).write_text(json.dumps({"eos_token": eos_token}))
    assert FileTokenizer(path).end_token == expected


def test_what_is_damaged_or_missing_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no tokenizer file .*tokenizer\.json"):
        FileTokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(UserError, match=r"/dev/zero is a pipe or a device"):
        FileTokenizer("/dev/zero")
    path = save_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is damaged"):
        _ = FileTokenizer(path).end_token


def test_bytes_are_those_of_utf_8():
    codec = ByteTokenizer()
    for text in [*TEXTS, ""]:
        assert codec.prompt(MarkedText(text)).tolist() == list(text.encode())
        assert codec.decode(codec.prompt(MarkedText(text))) == text
    assert codec.decode(np.array([255, 97])) == "\ufffda"
    with pytest.raises(ValueError, match="half a surrogate pair"):
        codec.prompt(MarkedText("\ud800"))
