"""Models of each family as `transformers` writes them: the same logits, gradients and training, on any layout."""

import copy
import functools
import itertools
import json
import random

import jax
import numpy as np
import optax
import pytest

from jvarlen import Bucket, load, make_plan, make_train_step
from jvarlen.data import WeightedTokens
from jvarlen.data.open import open_data
from jvarlen.models import (
    from_hugging_face,
    hugging_face_tensors,
    layered,
    logits,
    make_loss_fn,
    read_config,
    token_log_probs,
)
from jvarlen.testing import assert_layout_invariant
from tests.data.test_prompts import save_tokenizer
from tests.parallel.test_compositions import decoder_params, random_batch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

SIZES = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
# Wavelengths from 6 to 200 positions: short ones are kept, long ones stretched, those between interpolated.
SCALED = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
FAMILIES = {
    "llama3": ("LlamaConfig", {"rope_parameters": SCALED, "rms_norm_eps": 1e-3}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama_head_size": ("LlamaConfig", {"head_dim": 6, "num_key_value_heads": 1, "attention_bias": True}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
    "qwen3": ("Qwen3Config", {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", {"head_dim": 8, "sliding_window": 4}),
}
IN_BFLOAT16, IN_SHARDS = "qwen3", "llama3"

LENGTHS = [1, 2, 24, 5, 13, 8, 21, 3, 16, 7, 10, 24]
ROW, RATE = 24, 1e-2
RNG = np.random.default_rng(0)
TOKENS = [RNG.integers(0, SIZES["vocab_size"], length) for length in LENGTHS]
SAMPLES = [
    WeightedTokens(tokens, RNG.choice([0, 0.5, 1], len(tokens))) if i % 2 else tokens for i, tokens in enumerate(TOKENS)
]


def config_of(family, **sizes):
    name, options = FAMILIES[family]
    return getattr(transformers, name)(**SIZES | options | sizes)


def decoder_of(path, family, **sizes):
    config_of(family, **sizes).save_pretrained(path)
    return read_config(path)


def new_model(family, **sizes):
    """A model of PyTorch in which every parameter matters."""
    config = config_of(family, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, param in model.named_parameters():
            scale = 0.2 if param.ndim == 1 or "embed" in name else param.shape[1] ** -0.5
            param.normal_(1 if "norm" in name else 0, scale)
            if family == IN_BFLOAT16:
                param.copy_(param.to(torch.bfloat16))
    return model


reference = functools.cache(new_model)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    @functools.cache
    def directory_of(family):
        path, model = tmp_path_factory.mktemp(family), reference(family)
        if family == IN_BFLOAT16:
            model = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
            model.load_state_dict(reference(family).state_dict())
        model.save_pretrained(path, **({"max_shard_size": "20KB"} if family == IN_SHARDS else {}))
        return path

    return directory_of


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def opened(path):
    config, params = from_hugging_face(path)
    return config, jax.tree.map(np.float32, params)


@functools.cache
def batches_of(packed):
    """Steps of several microbatches of padded or packed rows, on the host."""
    packing = "best_fit" if packed else "padded"
    plan = make_plan(LENGTHS, [Bucket(2, ROW)], packing=packing, seed=1, num_microbatches=2)
    return jax.tree.map(np.asarray, list(load(plan, SAMPLES)))


def samples_in(batch):
    """The id of each sample, and where its tokens are."""
    for place in np.argwhere(batch.is_real):
        row = tuple(place[:2])
        if hasattr(batch, "lengths"):
            yield batch.ids[row], (*row, slice(batch.lengths[row]))
        else:
            yield batch.ids[tuple(place)], (*row, batch.segment_ids[row] == place[2] + 1)


def microbatches_of(batch):
    """Without what is a number a step."""
    batch = batch._replace(num_sequences=np.broadcast_to(batch.num_sequences, len(batch.tokens)))
    return [jax.tree.map(lambda leaf, m=m: leaf[m], batch) for m in range(len(batch.tokens))]


def weights_of(sample):
    return torch.tensor(getattr(sample, "weights", np.ones(len(sample), np.float32)))


def reference_sums(model, ids):
    """The weighted sum of losses of samples, each by itself, and the sum of the weights of what is predicted."""
    loss_sum, weight_sum = torch.zeros(()), 0.0
    for sample in (SAMPLES[i] for i in ids):
        tokens_T, weights_T = torch.tensor(np.asarray(getattr(sample, "tokens", sample))), weights_of(sample)[1:]
        logits_TxV = model(input_ids=tokens_T[None]).logits[0]
        losses_T = torch.nn.functional.cross_entropy(logits_TxV[:-1], tokens_T[1:], reduction="none")
        loss_sum, weight_sum = loss_sum + losses_T @ weights_T, weight_sum + float(weights_T.sum())
    return loss_sum, weight_sum


def test_logits_and_log_probabilities_are_those_of_samples_by_themselves(directories, family):
    config, params = opened(directories(family))

    @jax.jit
    def found_of(params, microbatch):
        return logits(params, config, microbatch), token_log_probs(params, config, microbatch)

    ids = []
    for batch in batches_of(False):
        found = [found_of(params, microbatch) for microbatch in microbatches_of(batch)]
        for sample, (m, row, places) in samples_in(batch):
            with torch.no_grad():
                expected_TxV = reference(family)(input_ids=torch.tensor(TOKENS[sample])[None]).logits[0]
            logits_TxV, log_probs_T = (of_microbatch[row, places] for of_microbatch in found[m])
            np.testing.assert_allclose(logits_TxV, expected_TxV, rtol=0, atol=1e-5)
            log_softmax = torch.log_softmax(expected_TxV[:-1], -1)
            of_tokens = log_softmax[torch.arange(len(TOKENS[sample]) - 1), torch.tensor(TOKENS[sample][1:])]
            np.testing.assert_allclose(log_probs_T[1:], of_tokens, rtol=0, atol=1e-5)
            assert log_probs_T[0] == 0
            ids.append(sample)
    assert sorted(ids) == list(range(len(SAMPLES)))


def test_gradients_of_packed_rows_are_those_of_samples_one_by_one(directories, family):
    config, params = opened(directories(family))
    batch = batches_of(True)[0]
    sums_of = jax.jit(jax.value_and_grad(make_loss_fn(config), has_aux=True))
    sums = [sums_of(params, microbatch) for microbatch in microbatches_of(batch)]
    (loss_sum, weight_sum), grads = jax.tree.map(lambda *leaves: sum(leaves), *sums)
    model = reference(family)
    model.zero_grad()
    expected_loss_sum, expected_weight_sum = reference_sums(model, [sample for sample, _ in samples_in(batch)])
    (expected_loss_sum / expected_weight_sum).backward()
    np.testing.assert_allclose(weight_sum, expected_weight_sum)
    np.testing.assert_allclose(loss_sum, expected_loss_sum.detach(), rtol=1e-6)
    found = hugging_face_tensors(jax.tree.map(lambda leaf: np.asarray(leaf / weight_sum), grads), config)
    expected = {name: param.grad.numpy() for name, param in model.named_parameters()}
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        np.testing.assert_allclose(found[name], grad, rtol=0, atol=1e-4 * np.abs(grad).max(), err_msg=name)
        assert np.abs(grad).max() > 1e-4, name


def test_steps_of_adamw_have_the_losses_of_samples_one_by_one(directories):
    family = "qwen2"
    config, params = opened(directories(family))
    step = make_train_step(layered(config), optax.adamw(RATE, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1))
    state, compiled = step.init(params), jax.jit(step, donate_argnums=0)
    model = copy.deepcopy(reference(family))
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    losses, expected = [], []
    for batch in itertools.islice(itertools.cycle(batches_of(True)), 10):
        state, metrics = compiled(state, batch)
        losses.append(float(metrics.loss))
        optimizer.zero_grad()
        ids = [sample for sample, _ in samples_in(batch)]
        weight_sum = sum(weights_of(SAMPLES[i])[1:].sum() for i in ids)
        sums = [reference_sums(model, [i])[0] / weight_sum for i in ids]
        for loss in sums:
            loss.backward()  # accumulates
        optimizer.step()
        expected.append(float(sum(sums).detach()))
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_a_family_trains_on_a_layout_as_on_one_device(tmp_path):
    config = decoder_of(tmp_path, "qwen3", use_sliding_window=True, sliding_window=3, max_window_layers=1)
    params = decoder_params(np.random.default_rng(0), config)
    batch = random_batch(random.Random(0), 4, 16, config.vocab_size, packed=True)
    layout = "context2.tensor2.sequence_parallel"
    assert_layout_invariant(layered(config), params, batch, [layout], num_steps=1)


def test_heads_of_keys_that_a_tensor_axis_does_not_divide_are_named(tmp_path):
    config = decoder_of(tmp_path, "llama_head_size")
    step = make_train_step(layered(config), optax.sgd(1.0), layout="data2.tensor4")
    with pytest.raises(ValueError, match=r"'tensor' do not divide .*'k'\]\['kernel'\].*\(dimension 2: 6\)"):
        step.init(decoder_params(np.random.default_rng(0), config))


CHATS = [
    [{"role": "user", "content": "plan steps"}, {"role": "assistant", "content": "a plan of steps"}],
    [{"role": "assistant", "content": "of"}, {"role": "user", "content": "日"}, {"role": "assistant", "content": "本"}],
    [{"role": "system", "content": "plans"}, {"role": "user", "content": "?"}, {"role": "assistant", "content": "ö"}],
]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}\n{% endfor %}"
)


def test_the_loss_on_what_an_assistant_says_is_that_of_labels(tmp_path):
    model = new_model("llama3", vocab_size=280)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(save_tokenizer(tmp_path / "trained.json")), bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))

    config, params = opened(tmp_path / "model")
    options = {"field": "messages", "loss_on": ["assistant"], "tokenizer": tmp_path / "model" / "tokenizer.json"}
    dataset = open_data(path, **options, progress=False)
    plan = make_plan(dataset.lengths, [Bucket(1, 128)], packing="best_fit", order="length")
    (batch,) = load(plan, dataset)
    loss_sum, weight_sum = jax.jit(make_loss_fn(config))(params, microbatches_of(jax.tree.map(np.asarray, batch))[0])

    expected_sum, num_learned = 0.0, 0
    for chat in CHATS:
        encoded = tokenizer.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        learned = encoded["assistant_masks"].bool()
        labels = torch.where(learned, encoded["input_ids"], -100)
        with torch.no_grad():
            output = model(input_ids=encoded["input_ids"], labels=labels, num_items_in_batch=torch.tensor(1))
        expected_sum, num_learned = expected_sum + float(output.loss), num_learned + int(learned.sum())
    np.testing.assert_allclose(loss_sum, expected_sum, rtol=1e-6)
    assert weight_sum == num_learned
