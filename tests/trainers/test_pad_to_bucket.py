"""`pad_to_bucket`: collators of torch, of transformers and of one's own give the shapes of a plan."""

import pickle
from itertools import chain

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import torch_ref
from torch_ref.loading.varlen import varlen

LENGTHS = [1 + (7 * i) % 11 for i in range(23)]
PAD_ID = 9


def plan_of(**keywords):
    defaults = {"order": "shuffle", "num_microbatches": 2}
    return torch_ref.make_plan(LENGTHS, keywords.pop("buckets", [(3, 5), (2, 11)]), **(defaults | keywords))


def packed_plan(**keywords):
    return plan_of(buckets=[(2, 14)], packing="best_fit", **keywords)


def tokens_of(i):
    return [10 + (i + place) % 7 for place in range(LENGTHS[i])]


def samples_of(labels):
    """Tokens, and as many labels or one for each sample."""
    return [{"input_ids": tokens_of(i), "labels": labels(i)} for i in range(len(LENGTHS))]


def batches_of(plan, samples, collate, padding_rows="omit", **keywords):
    sampler = torch_ref.PlanBatchSampler(plan, padding_rows=padding_rows, **keywords)
    return list(DataLoader(torch_ref.PlannedDataset(sampler, samples), batch_sampler=sampler, collate_fn=collate))


def own_collator(samples):
    """Pads to its longest sample by itself."""
    longest = max(len(sample["input_ids"]) for sample in samples)
    padded = {
        name: torch.tensor([sample[name] + [fill] * (longest - len(sample[name])) for sample in samples])
        for name, fill in (("input_ids", 0), ("labels", -100))
    }
    return padded | {"attention_mask": (padded["input_ids"] > 0).long()}


def as_tensors(samples):
    return [{name: torch.tensor(value) for name, value in sample.items()} for sample in samples]


@pytest.mark.parametrize("padding_rows", ["omit", "repeat"])
@pytest.mark.parametrize("collator", [default_collate, own_collator], ids=["stacks", "pads"])
def test_batches_have_the_shape_of_their_bucket_and_every_sample_once(collator, padding_rows):
    """Labels of padding are -100, in rows that repeat a sample too; an empty microbatch holds nothing else."""
    plan = plan_of(sequences_per_step=7)
    samples = samples_of(lambda i: [i] * LENGTHS[i])
    collate = torch_ref.pad_to_bucket(
        collator, plan, pad={"labels": -100}, also=("ids", "is_real", "num_sequences", "num_tokens")
    )
    given = as_tensors(samples) if collator is default_collate else samples
    most = 2 * int(np.diff(plan.step_groups).max())
    batches = batches_of(plan, given, pickle.loads(pickle.dumps(collate)), padding_rows, num_microbatches=most)
    seen = []
    for number, batch in enumerate(batches):
        assert batch["num_sequences"] == plan.num_sequences[number // most]
        assert batch["num_tokens"] == plan.num_tokens[number // most]
        assert tuple(batch["input_ids"].shape) in plan.buckets.shapes
        for tokens, labels, i in zip(batch["input_ids"], batch["labels"], batch["ids"].tolist(), strict=True):
            expected = LENGTHS[i] if i >= 0 else 0
            assert labels.tolist() == [i] * expected + [-100] * (len(labels) - expected)
            if i >= 0:
                assert tokens.tolist() == tokens_of(i) + [0] * (len(tokens) - expected)
            elif padding_rows == "omit":
                assert not tokens.any()
            else:
                assert tokens.any()
        if "attention_mask" in batch:
            assert torch.equal(batch["attention_mask"], (batch["input_ids"] > 0).long())
        assert batch["is_real"].tolist() == (batch["ids"] >= 0).tolist()
        seen += batch["ids"][batch["is_real"]].tolist()
    assert sorted(seen) == [*range(len(LENGTHS))]
    is_empty = [not batch["is_real"].any() for batch in batches]
    assert any(is_empty)


class LabelCollator:
    """Knows the padding value of labels, as collators of transformers do."""

    label_pad_token_id = -100

    def __call__(self, samples):
        made = own_collator(samples)
        return made | {"mask": made["attention_mask"], "tags": made["labels"]}


def test_repeated_rows_have_no_targets_where_the_collator_knows_their_padding_value_too():
    """A mask, which is no target, stays, so that no row is without tokens."""
    plan = plan_of(sequences_per_step=7)
    collate = torch_ref.pad_to_bucket(LabelCollator(), plan, pad={"mask": 0, "tags": -100})
    most = 2 * int(np.diff(plan.step_groups).max())
    batches = batches_of(plan, samples_of(tokens_of), collate, "repeat", num_microbatches=most)
    for name in ("labels", "tags"):
        assert sum(int((batch[name] != -100).sum()) for batch in batches) == sum(LENGTHS)
    assert all(batch["mask"].any(dim=1).all() for batch in batches)


def test_rows_of_tuples_and_tensors_are_padded_by_their_place():
    plan = plan_of(num_microbatches=1)
    samples = [(torch.tensor(tokens_of(i)), float(i)) for i in range(len(LENGTHS))]
    for tokens, score in batches_of(plan, samples, torch_ref.pad_to_bucket(default_collate, plan, pad={1: np.nan})):
        assert tuple(tokens.shape) in plan.buckets.shapes
        assert (score.isnan() == ~tokens.any(dim=1)).all()
    collate = torch_ref.pad_to_bucket(default_collate, plan)
    shapes = {tuple(batch.shape) for batch in batches_of(plan, [tokens for tokens, _ in samples], collate)}
    assert shapes <= {*plan.buckets.shapes}


@pytest.mark.parametrize("order", ["length", "length_descending"])
def test_an_axis_of_another_size_is_never_padded_by_chance(order):
    """A vector of 11, and first or last a sample of 11 tokens: told, or an error in either order."""
    plan = plan_of(num_microbatches=1, order=order)
    samples = [{"input_ids": torch.ones(length), "kinds": torch.ones(11)} for length in LENGTHS]
    for pad, message in (
        (None, r"kinds must have a padding value.*\('row', number\)"),
        ({"kinds": 0}, r"'kinds' is \[1, 11\] where samples are \d+ long.*pad=\{'kinds': \('row', 0\)\}"),
    ):
        with pytest.raises(ValueError, match=message):
            batches_of(plan, samples, torch_ref.pad_to_bucket(default_collate, plan, pad=pad))
    collate = torch_ref.pad_to_bucket(default_collate, plan, pad={"kinds": ("row", 0)})
    assert {batch["kinds"].shape[1] for batch in batches_of(plan, samples, collate)} == {11}


def collate_names(*names):
    """Pads to the longest sample, but for `kinds`, which has 3 numbers."""

    def collate(samples):
        tokens = own_collator(samples)["input_ids"]
        made = {"tokens": tokens, "kinds": torch.ones(len(samples), 3), "heads": tokens[..., None].expand(-1, -1, 5)}
        return {name: made[name] for name in names}

    return collate


def test_the_length_is_no_matter_of_which_tensor_comes_first():
    """Nor of the first batch, which has samples of 5 tokens, as the last axis of `heads` is long."""
    plan = torch_ref.make_plan([3, 5, 9], [(1, 5), (1, 9)], order=np.array([1, 0, 2]))
    samples = [{"input_ids": [1] * length, "labels": [0] * length} for length in (3, 5, 9)]
    collate = torch_ref.pad_to_bucket(collate_names("kinds", "tokens"), plan, pad={"kinds": 0, "tokens": 0})
    with pytest.raises(ValueError, match=r"sizes \{'kinds': 3, 'tokens': 5\}.*pad=\{'kinds': \('row', 0\)\}"):
        batches_of(plan, samples, collate)
    pad = {"kinds": ("row", 0), "heads": 0}
    with pytest.raises(ValueError, match=r"'heads' is \[1, 3, 5\].*pad=\{'heads': \('token', 0\)\}"):
        batches_of(plan, samples, torch_ref.pad_to_bucket(collate_names("kinds", "heads"), plan, pad=pad))
    pad |= {"heads": ("token", 0), "tokens": 0}
    collate = torch_ref.pad_to_bucket(collate_names("kinds", "heads", "tokens"), plan, pad=pad)
    found = [[tuple(each.shape) for each in batch.values()] for batch in batches_of(plan, samples, collate)]
    assert found == [[(1, 3), (1, length, 5), (1, length)] for length in (5, 5, 9)]


REFUSED = {
    "no value for labels": (own_collator, {}, "labels must have a padding value.*pad={'labels': -100}"),
    "-100 elsewhere": (
        lambda samples: {"targets": own_collator(samples)["labels"]},
        {},
        r"targets holds -100.*pad={'targets': -100}",
    ),
    "an unknown name": (own_collator, {"pad": {"label": -100}}, r"pad names \['label'\], and the collator returned"),
    "targets of another name": (
        lambda samples: {"input_ids": own_collator(samples)["input_ids"], "tags": torch.ones(len(samples))},
        {},
        r"tags must have a padding value: pad=\{'tags': -100\}",
    ),
    "a flat batch": (
        lambda samples: {"input_ids": torch.ones(1, sum(len(sample["input_ids"]) for sample in samples))},
        {},
        r"returned 'input_ids': \[1, \d+\].*flatten nothing",
    ),
    "text": (lambda samples: {"text": ["a"] * len(samples)}, {}, "returned 'text': list"),
    "longer than planned": (
        lambda samples: {"input_ids": torch.ones(len(samples), 12)},
        {},
        r"12 positions for a bucket of 5.*length_multiple=",
    ),
    "a value that the dtype lacks": (own_collator, {"pad": {"labels": 0.5}}, "holds no padding value of 0.5"),
    "also without names": (
        lambda samples: torch.ones(len(samples), 2),
        {"also": ["is_real"]},
        "the collator must return a dict",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_would_be_padded_wrong_is_refused(kind):
    collator, keywords, message = REFUSED[kind]
    plan = plan_of(order="length")
    with pytest.raises(ValueError, match=message):
        batches_of(plan, samples_of(lambda i: [i] * LENGTHS[i]), torch_ref.pad_to_bucket(collator, plan, **keywords))


def test_other_words_and_two_packed_lengths_are_refused():
    plan = plan_of()
    for keywords, message in (
        ({"also": ["weights"]}, "also has 'weights'"),
        ({"also": ["max_length_q"]}, "also has 'max_length_q'"),
        ({"pad": {"labels": ("length", 0)}}, r'\("row", number\).*labels'),
    ):
        with pytest.raises(ValueError, match=message):
            torch_ref.pad_to_bucket(default_collate, plan, **keywords)
    with pytest.raises(ValueError, match=r"PlannedDataset\(sampler, dataset\)"):
        torch_ref.pad_to_bucket(default_collate, plan)([torch.ones(2)])


@pytest.mark.parametrize("packing", ["padded", "best_fit"])
@pytest.mark.parametrize("collator", [default_collate, own_collator], ids=["stacks", "pads"])
@pytest.mark.parametrize("overlong", ["truncate", "truncate_start"])
def test_what_stays_of_long_samples_is_what_the_plan_says(overlong, collator, packing):
    plan = plan_of(buckets=[(2, 6)], overlong=overlong, packing=packing)
    samples = samples_of(tokens_of)
    given = as_tensors(samples) if collator is default_collate else samples
    collate = torch_ref.pad_to_bucket(collator, plan, pad={"labels": -100}, also=["ids"])
    for batch in batches_of(plan, given, collate):
        for row, ids in enumerate(batch["ids"].reshape(2, -1).tolist()):
            kept = [tokens_of(i)[-6:] if overlong == "truncate_start" else tokens_of(i)[:6] for i in ids if i >= 0]
            tokens = [*chain(*kept)]
            assert batch["input_ids"][row].tolist() == tokens + [0] * (6 - len(tokens))


def test_the_second_length_of_a_tensor_of_another_name_is_an_error_that_says_which_names_have_it():
    plan = torch_ref.make_plan([(4, 2), (5, 3)], [(2, 5, 4)])
    samples = [{"mel": torch.ones(4, 80), "text": torch.ones(2)}, {"mel": torch.ones(5, 80), "text": torch.ones(3)}]
    both = torch_ref.pad_to_bucket(default_collate, plan, pad={"mel": 0, "text": 0})
    with pytest.raises(ValueError, match=r"second axes have sizes.*names that begin with decoder_ or target"):
        batches_of(plan, samples, both)
    frames = torch_ref.pad_to_bucket(default_collate, plan, pad={"mel": 0, "text": ("row", 0)})
    with pytest.raises(ValueError, match=r"of the target; the second length is that of labels"):
        batches_of(plan, samples, frames)


def test_two_lengths_are_padded_each_to_its_own():
    pairs = np.array([(1 + i % 5, 1 + i % 3) for i in range(9)])
    plan = torch_ref.make_plan(pairs, [(2, 5, 4)])
    samples = [{"input_ids": torch.ones(s), "decoder_input_ids": torch.ones(t), "labels": t} for s, t in pairs.tolist()]
    collate = torch_ref.pad_to_bucket(default_collate, plan, pad={"labels": -100})
    for batch in batches_of(plan, samples, collate):
        assert [tuple(batch[name].shape) for name in batch] == [(2, 5), (2, 4), (2,)]
        assert torch.equal(batch["decoder_input_ids"].sum(1), batch["labels"].clamp(min=0).float())


@pytest.mark.parametrize(("padding_rows", "pad"), [("omit", -100), ("repeat", -100), ("omit", ("token", -100))])
def test_packed_rows_hold_their_samples_one_after_the_other(padding_rows, pad):
    """The first label of each sample is padding, unless labels are those of their own tokens; positions restart."""
    plan = packed_plan()
    also = ("ids", "is_real", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    collate = torch_ref.pad_to_bucket(own_collator, plan, pad={"labels": pad}, also=also)
    for batch in batches_of(plan, samples_of(tokens_of), collate, padding_rows):
        assert "attention_mask" not in batch
        starts = []
        for row in range(2):
            ids = [i for i in batch["ids"][row].tolist() if i >= 0]
            tokens = [*chain(*map(tokens_of, ids))]
            labels = [*chain(*([tokens_of(i)[0] if isinstance(pad, tuple) else -100, *tokens_of(i)[1:]] for i in ids))]
            missing = 14 - len(tokens)
            assert batch["labels"][row].tolist() == labels + [-100] * missing
            if ids or padding_rows == "omit":
                assert batch["input_ids"][row].tolist() == tokens + [0] * missing
                positions = [place for i in ids for place in range(LENGTHS[i])] + [*range(missing)]
                assert batch["position_ids"][row].tolist() == positions
            starts += [14 * row + place for place, at in enumerate(batch["position_ids"][row].tolist()) if at == 0]
        size = 2 * (plan.samples_per_row[0] + 1)
        assert batch["cu_seq_lens_q"].dtype == torch.int32
        assert batch["cu_seq_lens_q"].tolist() == starts + [28] * (size + 1 - len(starts))
        assert batch["max_length_k"] == 14


def test_varlen_of_packed_batches_is_where_segments_start():
    plan = packed_plan()
    samples = [np.array(tokens_of(i)) for i in range(len(LENGTHS))]
    for batch in torch_ref.load(plan, samples):
        made = varlen(batch)
        flat = batch.segment_ids.reshape(-1, 14)
        starts = [
            14 * row + place
            for row, segments in enumerate(flat.tolist())
            for place in range(14)
            if place == 0 or segments[place] != segments[place - 1]
        ]
        assert made.cu_seqlens.tolist() == starts + [56] * (4 * (plan.samples_per_row[0] + 1) + 1 - len(starts))
        is_real = batch.segment_ids > 0
        assert torch.equal(made.position_ids[is_real], batch.positions[is_real])
        compiled = torch.compile(lambda taken: varlen(taken).cu_seqlens, backend="eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(batch), made.cu_seqlens)
    with pytest.raises(ValueError, match="batches of packed rows"):
        varlen(next(iter(torch_ref.load(plan_of(), samples))))


# The collators of transformers


@pytest.fixture(scope="module")
def tokenizer():
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {str(number): number for number in range(30)}
    fast = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=fast, pad_token=str(PAD_ID), mask_token="8")


COLLATORS = {
    "DataCollatorWithPadding": (lambda i: i % 3, {"pad": {"labels": -100}}),
    "DataCollatorForTokenClassification": (lambda i: [i % 3] * LENGTHS[i], {}),
    "DataCollatorForSeq2Seq": (lambda i: [i % 3] * LENGTHS[i], {}),
    "DataCollatorForLanguageModeling": (tokens_of, {"pad": {"labels": -100}}),
}


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", COLLATORS)
def test_collators_of_transformers_give_the_shapes_of_the_plan(tokenizer, name, side):
    transformers = pytest.importorskip("transformers")
    labels, keywords = COLLATORS[name]
    options = {"mlm": False} if name.endswith("Modeling") else {}
    tokenizer.padding_side = side
    collator = getattr(transformers, name)(tokenizer, **options)
    plan, samples = plan_of(), samples_of(labels)
    if name.endswith("Modeling"):
        samples = [{"input_ids": sample["input_ids"]} for sample in samples]
    seen = []
    for batch in batches_of(plan, samples, torch_ref.pad_to_bucket(collator, plan, also=["ids"], **keywords)):
        rows, length = batch["input_ids"].shape
        assert (rows, length) in plan.buckets.shapes
        for row, i in enumerate(batch["ids"].tolist()):
            tokens, targets = (tokens_of(i), labels(i)) if i >= 0 else ([], [] if isinstance(labels(0), list) else -100)
            missing = length - len(tokens)

            def padded(values, fill, missing=missing):
                return values + [fill] * missing if side == "right" else [fill] * missing + values

            assert batch["input_ids"][row].tolist() == padded(tokens, PAD_ID)
            assert batch["attention_mask"][row].tolist() == padded([1] * len(tokens), 0)
            expected = padded(targets, -100) if isinstance(targets, list) else targets
            assert batch["labels"][row].tolist() == expected
            seen += [i] * (i >= 0)
    assert sorted(seen) == [*range(len(LENGTHS))]
