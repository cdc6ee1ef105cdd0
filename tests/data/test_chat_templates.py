"""What is learned of chats by the templates of the families, compared with their texts written by hand.

`chat_templates` has the templates. The function of each writes a chat as texts, of which those of the assistant begin
where a prompt ends, and end with the token that ends a turn.
"""

import functools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jvarlen import UserError
from jvarlen.data.chat_template import ChatTemplate
from jvarlen.data.open import open_data
from jvarlen.data.records import RecordFormat

SPECIAL = [
    "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>",
    "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>",
]  # fmt: skip
ENDS = {"llama2": "</s>", "mistral": "</s>", "llama3": "<|eot_id|>", "deepseek": "<｜end▁of▁sentence｜>"}
FOLDER = Path(__file__).with_name("chat_templates")
write_json = functools.partial(json.dumps, ensure_ascii=False)


def template_of(name):
    variables = {"bos_token": "<s>", "eos_token": ENDS.get(name, "<|im_end|>")}
    return ChatTemplate((FOLDER / f"{name}.jinja").read_text(), SPECIAL, variables, name)


def calls_of(message, first):
    for i, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        yield "\n" * bool(i or first) + f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
        yield write_json(function["arguments"]) + "}\n</tool_call>"


def system_of(chat):
    has_system = chat[0]["role"] == "system"
    return chat[0]["content"] if has_system else None, chat[has_system:]


def as_llama3(chat):
    system, chat = system_of(chat)
    yield "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\n", False
    yield f"Today Date: 26 Jul 2024\n\n{(system or '').strip()}<|eot_id|>", False
    for message in chat:
        role, content = message["role"], message["content"].strip()
        if role == "tool":
            role, content = "ipython", write_json(message["content"])
        for call in message.get("tool_calls", ()):
            function = call["function"]
            content = f'{{"name": "{function["name"]}", "parameters": {write_json(function["arguments"])}}}'
        yield f"<|start_header_id|>{role}<|end_header_id|>\n\n", False
        yield f"{content}<|eot_id|>", role == "assistant"


def as_chatml(chat):
    for message in chat:
        yield f"<|im_start|>{message['role']}\n", False
        yield f"{message['content']}<|im_end|>", message["role"] == "assistant"
        yield "\n", False


def as_tool(chat, i):
    roles = ["", *(message["role"] for message in chat), ""]
    yield "<|im_start|>user" * (roles[i] != "tool"), False
    yield f"\n<tool_response>\n{chat[i]['content']}\n</tool_response>", False
    yield "<|im_end|>\n" * (roles[i + 2] != "tool"), False


def as_qwen3(chat):
    is_result = [m["content"].startswith("<tool_response>") and m["content"].endswith("</tool_response>") for m in chat]
    asked = [i for i, message in enumerate(chat) if message["role"] == "user" and not is_result[i]]
    for i, message in enumerate(chat):
        if message["role"] == "tool":
            yield from as_tool(chat, i)
            continue
        content, thoughts = message["content"], message.get("reasoning_content")
        is_assistant, is_last = message["role"] == "assistant", i + 1 == len(chat)
        if is_assistant and thoughts is None:
            thoughts = ""
            if "</think>" in content:
                thoughts = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
                content = content.split("</think>")[-1].lstrip("\n")
        yield f"<|im_start|>{message['role']}\n", False
        written = content
        if is_assistant and i > (asked[-1] if asked else len(chat) - 1) and (is_last or thoughts):
            written = "<think>\n" + thoughts.strip("\n") + "\n</think>\n\n" + content.lstrip("\n")
        yield written + "".join(calls_of(message, bool(content))) + "<|im_end|>", is_assistant
        yield "\n", False


WRITERS = {name.removeprefix("as_"): value for name, value in globals().items() if name.startswith("as_")}
del WRITERS["tool"]
WITH_TOOLS = ("llama3", "qwen3")

PARTS = [
    "", " ", "\n", "\n\n", "  \n ", "\t", "\u3000", "hi", "hi ", " ho", "</th", "<think>", "</think>",
    "<think>\nx\n</think>\n\n", "<t", "<", "[INST]", " [/INST]", "[/INST]", "<s>", "</s>", "<|eot_id|>", "<|im_end|>",
    "<|im_end|>\n", "<|im_start|>", "<|im_start|>assistant\n", "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "assistant", "user\n", "<tool_response>", "</tool_response>", "<tool_call>\n{}\n</tool_call>", "<｜Assistant｜>",
    "{{ bos_token }}", "{% generation %}", "\ue000", "\ue001", "\\n", '"', "日本", "🇩🇪", "\x00",
]  # fmt: skip


@st.composite
def chats(draw, has_tools, has_thoughts):
    def content():
        return "".join(draw(st.lists(st.sampled_from(PARTS), max_size=4)))

    def answer(**more):
        thoughts = {"reasoning_content": content()} if has_thoughts and draw(st.booleans()) else {}
        return {"role": "assistant", "content": content(), **thoughts, **more}

    chat = [{"role": "system", "content": content()}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        chat.append({"role": "user", "content": content()})
        for _ in range(draw(st.integers(0, 2)) if has_tools else 0):
            call = {"type": "function", "function": {"name": "f", "arguments": {"a": content()}}}
            chat.append(answer(tool_calls=[call]) | draw(st.sampled_from([{}, {"content": None}])))
            chat.append({"role": "tool", "content": content()})
        chat.append(answer())
    return chat[: len(chat) - draw(st.integers(0, 1))]


@pytest.mark.parametrize("name", WRITERS)
@given(data=st.data())
@settings(deadline=None)
def test_every_chat_is_learned_from_the_end_of_its_prompts_to_the_tokens_that_end_its_turns(name, data):
    chat = data.draw(chats(name in WITH_TOOLS, name == "qwen3"))
    filled = [{**message, "content": message["content"] or ""} for message in chat]
    pieces = [piece for piece in WRITERS[name](filled) if piece[0]]
    template = template_of(name)
    record_format = RecordFormat(["messages"], loss_on=["assistant"]).with_chat_template(template)
    text, learned, _ = record_format.render({"messages": chat})
    assert text == "".join(piece for piece, _ in pieces)
    parts, end = [], 0
    for piece, is_learned in pieces:
        end += len(piece)
        parts += [(end - len(piece), end)] * is_learned
    assert list(learned) == parts
    if chat[-1]["role"] == "assistant":
        assert text[: learned[-1][0]] == template.render_prompt(chat[:-1]).text


QUESTION, SPACED = [{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi "}]
ANSWER = {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize(
    ("name", "chat", "learned"),
    [
        ("qwen3", [*QUESTION, ANSWER], ["<think>\n\n</think>\n\nho<|im_end|>"]),
        ("qwen3", [*QUESTION, ANSWER, *QUESTION], ["ho<|im_end|>"]),
        (
            "qwen3",
            [*QUESTION, {**ANSWER, "reasoning_content": "so"}],
            ["<think>\nso\n</think>\n\nho<|im_end|>"],
        ),
        (
            "qwen3",
            [*QUESTION, {**ANSWER, "content": "<think>\nso\n</think>\n\nho"}] * 2,
            ["ho<|im_end|>", "<think>\nso\n</think>\n\nho<|im_end|>"],
        ),
        ("qwen3", [{**ANSWER, "content": "<think>so</think>ho"}, *QUESTION], ["ho<|im_end|>"]),
        ("llama2", [*SPACED, ANSWER], [" ho </s>"]),
        ("llama3", [*SPACED, {**ANSWER, "content": "\n\nho\n"}], ["ho<|eot_id|>"]),
        ("mistral", [{"role": "system", "content": "so"}, *SPACED, ANSWER, *QUESTION], [" ho</s>"]),
        ("marked", [*SPACED, {**ANSWER, "content": " ho "}], ["ho<|im_end|>"]),
        ("deepseek", [*QUESTION, {**ANSWER, "content": "<think>\nso</think>ho"}], ["ho<｜end▁of▁sentence｜>"]),
        ("chatml", [ANSWER, *QUESTION], ["ho<|im_end|>"]),
        ("qwen2", [*QUESTION, {**ANSWER, "tool_calls": None}], ["ho<|im_end|>"]),
        ("llama3", [*QUESTION, {**ANSWER, "tool_calls": None}], ["ho<|eot_id|>"]),
    ],
)
def test_the_turns_of_the_assistant_are_learned(name, chat, learned):
    text, parts, _ = template_of(name).render(chat, frozenset(["assistant"]))
    assert [text[start:end] for start, end in parts] == learned


@pytest.mark.parametrize("name", ["llama2", "llama3", "qwen2", "qwen3", "mistral", "chatml"])
def test_of_other_roles_the_content_is_learned_and_the_token_after_it(name):
    chat = [*SPACED, ANSWER, {"role": "user", "content": "<think>so</think>"}]
    text, parts, _ = template_of(name).render(chat, frozenset(["user"]))
    end = "" if name in ("llama2", "mistral") else ENDS.get(name, "<|im_end|>")
    first = "hi" if name in ("llama2", "llama3") else "hi "
    assert [text[start:end] for start, end in parts] == [first + end, "<think>so</think>" + end]


def test_a_template_that_changes_what_it_marks_is_refused():
    source = "{% set each %}{% generation %} {{ messages[0].content }}{% endgeneration %}{% endset %}{{ each | trim }}"
    with pytest.raises(UserError, match="changes the text that it marks as generation"):
        ChatTemplate(source).render([ANSWER], frozenset(["assistant"]))


@pytest.fixture
def save(tmp_path):
    """Saves a tokenizer of which blanks are tokens of their own, and a template beside it."""
    tokenizers = pytest.importorskip("tokenizers")
    pre_tokenizers, processors = tokenizers.pre_tokenizers, tokenizers.processors

    def saved(name, *, trim_offsets=False):
        bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
        pattern = tokenizers.Regex(r" ?\p{L}+| ?[^\s\p{L}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        bpe.decoder = tokenizers.decoders.ByteLevel()
        bpe.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL,
            show_progress=False,
        )
        bpe.train_from_iterator(["hi\n\n\nho   so    \n\n"] * 9, trainer)
        bpe.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text((FOLDER / f"{name}.jinja").read_text())
        (tmp_path / "tokenizer_config.json").write_text(
            write_json({"bos_token": "<s>", "eos_token": ENDS.get(name, "<|im_end|>")})
        )
        return bpe

    return saved


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize(
    ("content", "learned"),
    [
        ("ho", "ho<|im_end|>"),
        ("\n\nho", "ho<|im_end|>"),  # the token of three new lines is that of the header
        ("\n\n", "<|im_end|>"),
        ("    ho", "    ho<|im_end|>"),
        ("ho    ", "ho    <|im_end|>"),
        ("    ", "    <|im_end|>"),
    ],
)
def test_a_token_of_the_header_that_reaches_into_an_answer_is_not_learned(
    tmp_path, save, content, learned, trim_offsets
):
    bpe = save("chatml", trim_offsets=trim_offsets)
    chat = [*QUESTION, {**ANSWER, "content": content}]
    path = tmp_path / "chats.jsonl"
    path.write_text(write_json({"messages": chat}))
    (sample,) = open_data(path, loss_on=["assistant"], tokenizer=tmp_path / "tokenizer.json", progress=False)
    assert bpe.decode(sample.tokens[sample.weights > 0].tolist(), skip_special_tokens=False) == learned


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.jinja")))
def test_chats_have_the_tokens_that_transformers_gives_them(tmp_path, save, name):
    transformers = pytest.importorskip("transformers")
    save(name)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    thoughts = {**ANSWER, "content": "<think>\nso\n</think>\n\nho"}
    chats = [[*SPACED, ANSWER], [*QUESTION, thoughts, *SPACED, ANSWER], [{"role": "system", "content": ""}, *QUESTION]]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(write_json({"messages": chat}) + "\n" for chat in chats[:2]))
    dataset = open_data(path, loss_on=["assistant"], tokenizer=tmp_path / "tokenizer.json", progress=False)
    for chat, sample in zip(chats, dataset, strict=False):
        theirs = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=name == "marked")
        assert sample.tokens.tolist() == theirs["input_ids"]
        if name == "marked":
            assert sample.weights.tolist() == theirs["assistant_masks"]
    template = ChatTemplate.beside(tmp_path / "tokenizer.json", SPECIAL)
    for chat in chats:
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert template.render_prompt(chat).text == prompt
