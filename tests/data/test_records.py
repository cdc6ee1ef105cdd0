"""Records of several fields and chats: what is asked for is learned and nothing else; bad records are named by row."""

import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jvarlen import FitConfig, UserError
from jvarlen.data import WeightedTokens
from jvarlen.data.chat_template import ChatTemplate
from jvarlen.data.open import open_data
from jvarlen.data.records import RecordFormat
from jvarlen.data.samples import MarkedText
from jvarlen.data.split import sample_hash
from jvarlen.runs.config import DataConfig

RECORDS = [
    {"question": "1 + 1?", "answer": "2", "id": 0},
    {"question": "Größe?", "answer": "groß\nund öde", "id": 1},
    {"question": "", "answer": "alone", "id": 2},
]
CHATS = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "user"}],
    [{"role": "assistant", "content": "öha"}],
]
CHAT_ML = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>"]


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_file(path, records):
    if path.suffix == ".jsonl":
        return write_lines(path, records)
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(records)
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=2)
    elif path.suffix == ".csv":
        from pyarrow import csv

        csv.write_csv(table, path)
    else:
        from pyarrow import feather

        feather.write_feather(table, path)
    return path


def learned_text(sample):
    """The text of a sample of bytes, and the learned bytes of it with the others as dots."""
    shown = np.where(sample.weights > 0, sample.tokens, ord("."))
    return sample.tokens.tobytes().decode(), shown.astype(np.uint8).tobytes().decode(errors="replace")


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".csv", ".arrow"])
def test_fields_are_joined_and_only_those_asked_for_are_learned(tmp_path, ending):
    path = write_file(tmp_path / f"t{ending}", RECORDS)
    joined = open_data(path, field=["question", "answer"], progress=False)
    assert [joined[i].tobytes().decode() for i in range(3)] == [f"{r['question']}\n{r['answer']}" for r in RECORDS]
    weighted = open_data(path, field=["question", "answer"], loss_on=["answer"], progress=False)
    for i, record in enumerate(RECORDS):
        text, learned = learned_text(weighted[i])
        assert text == f"{record['question']}\n{record['answer']}"
        assert learned == "." * (len(record["question"].encode()) + 1) + record["answer"]
    assert weighted.lengths.tolist() == joined.lengths.tolist() == [len(joined[i]) for i in range(3)]
    again = pickle.loads(pickle.dumps(weighted))
    assert [learned_text(again[i]) for i in range(3)] == [learned_text(weighted[i]) for i in range(3)]
    assert weighted.content_key != joined.content_key


def test_a_template_names_its_fields_and_what_follows_the_last_is_learned_with_it(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", RECORDS[:2])
    template = "{{Q}}: {question} A: {answer}\n"
    dataset = open_data(path, template=template, loss_on=["answer"], progress=False)
    assert learned_text(dataset[0]) == ("{Q}: 1 + 1? A: 2\n", "." * 15 + "2\n")
    asked = open_data(path, template=template, loss_on=["question"], progress=False)
    assert learned_text(asked[0]) == ("{Q}: 1 + 1? A: 2\n", "." * 5 + "1 + 1?" + "." * 6)
    assert isinstance(open_data(path, template=template, progress=False)[0], np.ndarray)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=3, max_size=3),
    st.sets(st.sampled_from("abc"), min_size=1),
)
def test_learned_parts_are_the_texts_of_their_fields(texts, loss_on):
    record = dict(zip("abc", texts, strict=True))
    marked = RecordFormat(template="{a}<{b}>{c}", loss_on=sorted(loss_on)).render(record)
    assert marked.text == f"{texts[0]}<{texts[1]}>{texts[2]}"
    assert "".join(marked.text[start:end] for start, end in marked.learned) == "".join(
        record[name] for name in "abc" if name in loss_on
    )


@pytest.mark.parametrize("ending", [".jsonl", ".parquet", ".arrow"])
def test_a_chat_is_written_by_message_and_roles_are_learned(tmp_path, ending):
    path = write_file(tmp_path / f"t{ending}", [{"messages": chat} for chat in CHATS])
    dataset = open_data(path, field="messages", loss_on=["assistant"], progress=False)
    assert learned_text(dataset[0]) == ("user: a\nassistant: a\nuser: user\n", "." * 19 + "a\n" + "." * 11)
    assert learned_text(dataset[1]) == ("assistant: öha\n", "." * 11 + "öha\n")
    found = open_data(path, loss_on=["assistant"], progress=False)  # there is no text
    assert [learned_text(sample) for sample in found] == [learned_text(sample) for sample in dataset]
    other = write_file(tmp_path / f"both{ending}", [{"text": "a", "messages": chat} for chat in CHATS])
    assert {sample.tobytes() for sample in open_data(other, progress=False)} == {b"a"}
    whole = open_data(path, field="messages", template="<{role}>{content}", progress=False)
    assert whole[1].tobytes().decode() == "<assistant>öha"
    with pytest.raises(UserError, match=r"(id 1|line 2): no token to learn from"):
        open_data(path, field="messages", template="<{role}>{content}", loss_on=["user"], progress=False)


def test_a_prompt_is_a_chat_up_to_where_the_assistant_answers():
    assert RecordFormat(("messages",)).render_prompt("hi").text == "user: hi\nassistant: "
    own = RecordFormat(("messages",), "<{role}>{content}</>", ["assistant"])
    assert own.render_prompt("hi").text == "<user>hi</><assistant>"
    written = "{% for each in messages %}{{ each.role }}|{{ each.content }}{% endfor %}"
    template = ChatTemplate(f"{written}{{% if add_generation_prompt %}}>{{% endif %}}")
    chat = RecordFormat(("messages",)).with_chat_template(template)
    assert chat.render_prompt("hi") == MarkedText("user|hi>", None, True)
    assert chat.render({"messages": [{"role": "user", "content": "hi"}]}).text == "user|hi"
    takes = [RecordFormat(), own, chat, RecordFormat(("a", "b")), RecordFormat(template="Q {q}")]
    assert [each.takes_chats for each in takes] == [True, True, True, False, False]


def test_a_chat_template_marks_the_content_and_the_token_that_ends_it():
    template = ChatTemplate(CHAT_ML, SPECIAL, {"bos_token": "<s>"})
    text, learned, has_special_tokens = template.render(CHATS[0], frozenset(["assistant"]))
    assert text == (
        "<s><|im_start|>user\na<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n<|im_start|>user\nuser<|im_end|>\n"
    )
    assert [text[start:end] for start, end in learned] == ["a<|im_end|>"]
    assert text[: learned[0][0]].endswith("assistant\n")
    assert has_special_tokens
    spaced = [{"role": "user", "content": " \n x  "}]
    text, learned, _ = pickle.loads(pickle.dumps(template)).render(spaced, frozenset(["user"]))
    assert [text[start:end] for start, end in learned] == ["x<|im_end|>"]


@pytest.mark.parametrize(
    ("source", "chat", "said"),
    [
        (CHAT_ML, [{"role": "tool", "content": "x"}], "rejects it: unknown role tool"),
        ("{{ messages[0]['content'] }}", CHATS[0], "leaves out message 2, of role 'assistant'"),
        (
            "{% for each in messages %}{{ each.content | length }}{% endfor %}",
            CHATS[0],
            "leaves out message 1, of role 'us",
        ),
        ("{{ messages.nothing.more }}", CHATS[0], "rejects it"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", CHATS[0], "rejects it: .*unsafe"),
    ],
)
def test_what_a_chat_template_cannot_write_is_refused(source, chat, said):
    with pytest.raises(UserError, match=said):
        ChatTemplate(source).render(chat, frozenset(["user", "assistant"]))


def test_templates_have_what_those_of_transformers_have():
    def text_of(source):
        return ChatTemplate(source).render(CHATS[1], frozenset()).text

    is_none = "{{ tools is none }} {{ documents is defined and documents is none }} {{ add_generation_prompt }}"
    assert text_of(is_none) == "True True False"
    dumped = "{{ {'b': 'ö', 'a': 1} | tojson(separators=(',', ':'), sort_keys=true) }}"
    assert text_of(dumped) == '{"a":1,"b":"ö"}'
    assert text_of("{{ 'ö' | tojson(true) }} {{ [1] | tojson(indent=1) }}") == '"\\u00f6" [\n 1\n]'


def test_a_chat_has_the_same_tokens_on_every_day():
    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}").render(CHATS[1], frozenset()).text == "26 Jul 2024"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("\n{% for %}", "jinja, line 2, is not a Jinja template: "),
        ("{{ " + "(" * 2000 + "1" + ")" * 2000 + " }}", "jinja is not a Jinja template: RecursionError"),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "jinja is not a Jinja template: SyntaxError: too many"),
        ("{% break %}", "jinja is not a Jinja template: SyntaxError: 'break' outside loop"),
        ("\n{{ 1 + messages }}", "jinja rejects it: TypeError: unsupported operand"),
        ("{% macro m() %}{{ m() }}{% endmacro %}\n{{ m() }}", "jinja rejects it: RecursionError"),
        ("{{ '%(a)s' % {} }}", "jinja rejects it: KeyError: 'a'"),
        ("\n\n{% include 'x' %}", "jinja rejects it: TypeError: no loader"),
    ],
)
def test_a_damaged_chat_template_is_refused_by_path(source, said):
    with pytest.raises(UserError, match=re.escape(said)):
        ChatTemplate(source, name="chat_template.jinja").render(CHATS[0], frozenset())


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"chat_template": {"default": "x"}}, "has no text as chat_template"),
        ({"chat_template": [{"name": "tools", "template": "x"}]}, "nor one of the name 'default'"),
        ({"chat_template": [{"name": ["default"]}, 3, {"name": "default"}]}, "has no text as chat_template"),
    ],
)
def test_settings_without_a_usable_chat_template_are_refused_by_path(tmp_path, config, said):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=rf"tokenizer_config\.json {said}|tokenizer_config\.json .*{said}"):
        ChatTemplate.beside(tmp_path / "tokenizer.json", SPECIAL)


def test_chat_templates_are_found_beside_a_tokenizer_and_read_as_utf_8(tmp_path):
    place, own = tmp_path / "tokenizer.json", tmp_path / "chat_template.jinja"
    assert ChatTemplate.beside(place, SPECIAL) is None
    config = {"bos_token": {"no": "content"}, "eos_token": {"content": "</s>"}}
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ eos_token ~ bos_token }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    assert ChatTemplate.beside(place, SPECIAL).render(CHATS[0], frozenset()).text == "</s>"
    own.write_text("ö", encoding="utf-8-sig")
    assert ChatTemplate.beside(place, SPECIAL).render(CHATS[0], frozenset()).text == "ö"
    own.write_text("{{ bos_token }}|{{ pad_token }}|{{ eos_token }}")
    older = {"bos_token": {"content": "<s>"}, "pad_token": "<p>", "eos_token": "<e>", "unk_token": None}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    (tmp_path / "tokenizer_config.json").unlink()
    assert ChatTemplate.beside(place, SPECIAL).render(CHATS[0], frozenset()).text == "<s>|<p>|<e>"
    for newer, text in ((config, "<s>|<p>|<e>"), (config | {"added_tokens_decoder": {}}, "||</s>")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(newer))
        assert ChatTemplate.beside(place, SPECIAL).render(CHATS[0], frozenset()).text == text
    own.write_bytes(b"ab\xff")
    with pytest.raises(UserError, match=r"chat_template\.jinja is not UTF-8 at byte 2"):
        ChatTemplate.beside(place, SPECIAL)


@pytest.fixture
def tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    texts = ["the answer is plain text, user and assistant"] * 3
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=[*SPECIAL, "</s>"], show_progress=False
    )
    bpe.train_from_iterator(texts, trainer)
    ends = [(token, bpe.token_to_id(token)) for token in ("<s>", "</s>")]
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    bpe.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokens_with_a_learned_character_are_learned_and_so_is_the_end_after_them(tmp_path, tokenizer):
    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(str(tokenizer))
    path = write_lines(tmp_path / "t.jsonl", [{"q": "the answer", "a": "the text is öde"}])
    for loss_on, learned in (("a", "the text is öde</s>"), ("q", "the answer")):
        dataset = open_data(path, template="{q} ? {a}", loss_on=[loss_on], tokenizer=tokenizer, progress=False)
        tokens, weights = dataset[0].tokens, dataset[0].weights
        assert bpe.decode(tokens.tolist(), skip_special_tokens=False) == "<s>the answer ? the text is öde</s>"
        assert bpe.decode(tokens[weights > 0].tolist(), skip_special_tokens=False).strip() == learned
    assert dataset.lengths.tolist() == [len(tokens)]


def test_a_chat_is_written_by_the_template_beside_the_tokenizer(tmp_path, tokenizer):
    from tokenizers import Tokenizer

    bpe = Tokenizer.from_file(str(tokenizer))
    path = write_lines(tmp_path / "t.jsonl", [{"messages": chat} for chat in CHATS])
    without = open_data(path, field="messages", tokenizer=tokenizer, progress=False)
    assert "user: a\n" in bpe.decode(without[0].tolist())
    keys = {without.content_key}
    config = {"bos_token": {"content": "<s>"}, "chat_template": [{"name": "default", "template": CHAT_ML}]}
    tokenizer.with_name("tokenizer_config.json").write_text(json.dumps(config))
    dataset = open_data(path, field="messages", loss_on=["assistant"], tokenizer=tokenizer, progress=False)
    text = "<s><|im_start|>assistant\nöha<|im_end|>\n"
    tokens, weights = dataset[1].tokens, dataset[1].weights
    assert bpe.decode(tokens.tolist(), skip_special_tokens=False) == text
    assert bpe.decode(tokens[weights > 0].tolist(), skip_special_tokens=False) == "öha<|im_end|>"
    keys.add(dataset.content_key)
    tokenizer.with_name("chat_template.jinja").write_text(CHAT_ML.replace("<|im_end|>\n", "<|im_end|>"))
    newer = open_data(path, field="messages", loss_on=["assistant"], tokenizer=tokenizer, progress=False)
    assert bpe.decode(newer[1].tokens.tolist(), skip_special_tokens=False) == text.rstrip("\n")
    keys.add(newer.content_key)
    assert len(keys) == 3
    write_lines(path, [{"messages": CHATS[0]}, {"messages": [{"role": "tool", "content": "x"}]}])
    said = r"t\.jsonl: .* line 2: .*chat_template\.jinja rejects it: unknown role tool"
    with pytest.raises(UserError, match=said):
        open_data(path, field="messages", loss_on=["assistant"], tokenizer=tokenizer, progress=False)
    tokenizer.with_name("chat_template.jinja").write_text("{% for %}")
    with pytest.raises(UserError, match=r"chat_template\.jinja, line \d, is not a Jinja template"):
        open_data(path, field="messages", tokenizer=tokenizer, progress=False)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"question": "x"}, "no such field 'answer', but 'question'"),
        ({}, "no such field 'question', 'answer', but none"),
        ({"question": "x", "answer": None}, "no string in 'answer', but None"),
        ({"question": "x", "answer": True}, "no string in 'answer', but True"),
        ({"question": "x", "answer": ["y"]}, r"no string in 'answer', but \['y'\]"),
        ({"question": "x", "answer": float("nan")}, "no string in 'answer', but nan"),
        ({"question": "x", "answer": float("inf")}, "no string in 'answer', but inf"),
        ({"question": "x", "answer": ""}, "no token to learn from"),
        ({"question": "x", "answer": "\ud800"}, "half a surrogate pair"),
        ([], "no JSON object"),
    ],
)
def test_records_that_do_not_fill_the_format_are_refused_by_row(tmp_path, record, said):
    path = write_lines(tmp_path / "t.jsonl", [RECORDS[0], record, RECORDS[1], record])
    with pytest.raises(UserError, match=rf"t\.jsonl: .* line 2: {said}.*; line 4: {said}"):
        open_data(path, field=["question", "answer"], loss_on=["answer"], progress=False)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "no messages"),
        (["hi"], "message 1 has no role and content that are strings: 'hi'"),
        ([*CHATS[0], {"role": "user"}], "message 4 has no role and content"),
        ([{"role": "user", "content": "x"}], "no token to learn from"),
        ("hi", "no token to learn from"),
    ],
)
def test_chats_that_are_none_are_refused_by_row(tmp_path, messages, said):
    path = write_lines(tmp_path / "t.jsonl", [{"messages": chat} for chat in (CHATS[0], messages)])
    with pytest.raises(UserError, match=rf"t\.jsonl: .*'messages'.* line 2: {said}"):
        open_data(path, field="messages", loss_on=["assistant"], progress=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"template": "no field"}, "has no field, such as"),
        ({"template": "{a"}, "cannot be filled"),
        ({"template": "{a.b}{c!r}{}"}, "nothing else"),
        ({"fields": ["a", "b"], "template": "{a}{c}"}, "has 'a', 'c', the fields are 'a', 'b'"),
        ({"fields": ["a", "b"], "loss_on": ["c"]}, "must name fields, which are 'a', 'b', not 'c'"),
        ({"fields": ["a", "a"]}, "named twice"),
    ],
)
def test_formats_that_contradict_themselves_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        RecordFormat(**settings)


def test_files_without_fields_are_refused(tmp_path):
    (tmp_path / "t.txt").write_text("a")
    with pytest.raises(UserError, match=r"t\.txt has no fields"):
        open_data(tmp_path / "t.txt", loss_on=["answer"], progress=False)


def test_the_same_tokens_have_one_hash_with_and_without_weights():
    assert sample_hash(WeightedTokens(np.frombuffer(b"ab", np.uint8), [0, 1])) == sample_hash("ab")


def test_settings_take_a_template_as_a_shell_hands_it_over(tmp_path):
    config = DataConfig(template=r"Q: {question}\nA:\t{answer}", loss_on=("answer",))
    assert config.template == "Q: {question}\nA:\t{answer}"
    assert DataConfig(field="body").field == ("body",)
    with pytest.raises(UserError, match="must name fields"):
        FitConfig(data=DataConfig(field=("a", "b"), loss_on=("c",)))


def test_what_is_learned_is_a_sequence_of_names():
    with pytest.raises(ValueError, match="loss_on must be a sequence of names, not the text 'assistant'"):
        RecordFormat(["messages"], loss_on="assistant")
