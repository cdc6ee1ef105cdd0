"""What only torch_ref has: sampler, loader, model and train step."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torch_ref

from .inputs import few, make_plan, plan_arguments


def small_model(**sizes):
    torch.manual_seed(0)
    sizes = {"width": 12, "num_layers": 2, "num_heads": 3} | sizes
    model = torch_ref.Decoder(torch_ref.DecoderConfig(**sizes)).double()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return model


def dataset_of(lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.uint8) for length in lengths]


# Sampler and loader


@few
@given(arguments=plan_arguments(), share=st.sampled_from([(1, 1), (1, 3), (2, 1), (4, 1), (2, 2)]))
def test_replicas_partition_every_step(arguments, share):
    """Each replica yields as many microbatches, and together they are the plan's."""
    num_replicas, per_replica = share
    plan = make_plan(torch_ref, arguments | {"num_microbatches": num_replicas * per_replica})
    samplers = [torch_ref.PlanBatchSampler(plan, rank, num_replicas) for rank in range(num_replicas)]
    microbatches = [list(sampler) for sampler in samplers]
    assert {len(sampler) for sampler in samplers} == {len(share) for share in microbatches}
    assert {len(share) for share in microbatches} == {plan.num_steps * per_replica}
    for step in range(plan.num_steps):
        together = [rows for share in microbatches for rows in share[step * per_replica : (step + 1) * per_replica]]
        assert together == [[i for i in rows if i >= 0] for rows in plan.rows(step).tolist()]


@pytest.mark.parametrize(("rank", "num_replicas", "named"), [(0, 3, "3"), (4, 4, "rank"), (-1, 2, "rank"), (0, 0, "0")])
def test_replicas_that_do_not_divide_the_step_are_refused(rank, num_replicas, named):
    """num_replicas must divide M, and ranks exist."""
    plan = torch_ref.make_plan([1, 2, 3], [(1, 3)], order="length", num_microbatches=4)
    with pytest.raises(ValueError, match=named):
        torch_ref.PlanBatchSampler(plan, rank, num_replicas)
    with pytest.raises(ValueError, match=named):
        torch_ref.load(plan, dataset_of([1, 2, 3]), rank=rank, num_replicas=num_replicas)


@pytest.mark.parametrize(
    "sample", [np.ones(2), np.ones((2, 1), np.uint8), np.empty(0, np.uint8), (np.ones(2, np.uint8), 1), {"tokens": [1]}]
)
def test_samples_that_are_not_token_arrays_are_named(sample):
    """A sample is a 1-D integer array with at least one element."""
    plan = torch_ref.make_plan([2, 2], [(2, 2)], order="length")
    with pytest.raises(ValueError, match=r"id 1\b"):
        list(torch_ref.load(plan, [np.ones(2, dtype=np.uint8), sample]))


@pytest.mark.parametrize("start", [-1, 4])
def test_a_start_step_outside_the_plan_is_refused(start):
    """0 <= start_step <= num_steps."""
    plan = torch_ref.make_plan([1, 2, 3], [(1, 3)], order="length")
    with pytest.raises(ValueError, match="start_step"):
        torch_ref.load(plan, dataset_of([1, 2, 3]), start_step=start)


# Padded and packed rows


@st.composite
def packed_plans(draw, num_microbatches):
    """Draw lengths, and a plan of their packed rows in one or two buckets."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=14))
    edges = draw(st.sets(st.integers(1, 14), max_size=1)) | {draw(st.integers(4, 14))}
    buckets = [(draw(st.integers(1, 3)), edge) for edge in sorted(edges)]
    options = {"packing": "best_fit", "overlong": "truncate", "num_microbatches": num_microbatches}
    return lengths, torch_ref.make_plan(lengths, buckets, **options)


@st.composite
def single_plans(draw, num_microbatches):
    """Draw lengths, and a plan with one sample a row, the longest cut."""
    arguments = draw(plan_arguments()) | {"num_microbatches": num_microbatches, "overlong": "truncate"}
    return arguments["lengths"], make_plan(torch_ref, arguments)


@few
@given(
    drawn=st.one_of(packed_plans(num_microbatches=4), single_plans(num_microbatches=4)),
    rank=st.integers(0, 1),
    data=st.data(),
)
def test_batches_hold_the_samples_of_the_plan_row_by_row(drawn, rank, data):
    """From any start step: tokens one sample after the other, segments from 1, positions from 0 in each."""
    lengths, plan = drawn
    samples, longest = dataset_of(lengths), plan.buckets.shapes[-1].length
    start = data.draw(st.integers(0, plan.num_steps))
    batches = list(torch_ref.load(plan, samples, rank=rank, num_replicas=2, start_step=start))
    assert len(batches) == plan.num_steps - start
    for step, batch in enumerate(batches, start=start):
        rows = plan.rows(step)[2 * rank : 2 * rank + 2]
        shape = (*rows.shape[:2], plan.buckets.shapes[plan.step_bucket[step]].length)
        assert batch.num_sequences == float(plan.num_sequences[step])
        assert (batch.tokens.dtype, batch.weights.dtype) == (torch.int64, torch.float32)
        fields = [batch.tokens, batch.weights]
        if plan.row_offsets is not None:
            fields += [batch.segment_ids, batch.positions]
        assert all(field.shape == shape for field in fields)
        for place in np.ndindex(shape[:2]):
            held = [samples[i][:longest].tolist() for i in np.ravel(rows[place]) if i >= 0]
            tokens = [token for sample in held for token in sample]
            padding = [0] * (shape[-1] - len(tokens))
            segments = [k for k, sample in enumerate(held, start=1) for _ in sample]
            positions = [t for sample in held for t in range(len(sample))]
            assert batch.lengths[place] == len(tokens)
            for field, expected in zip(fields, (tokens, [1.0] * len(tokens), segments, positions), strict=False):
                assert field[place].tolist() == expected + padding


def test_the_sampler_gives_the_samples_of_packed_rows():
    """Lists of rows, each a list of ids."""
    plan = torch_ref.make_plan([3, 3, 2, 1], [(1, 5)], packing="best_fit", order="length", num_microbatches=2)
    shares = [list(torch_ref.PlanBatchSampler(plan, rank, 2)) for rank in range(2)]
    held = [[i for i in row if i >= 0] for row in plan.rows(0)[:, 0].tolist()]
    assert [share[0] for share in shares] == [[row] for row in held]


# A plain DataLoader


class Letters(Dataset):
    """Map-style, and answers to any index, -1 too."""

    def __init__(self, num_samples):
        self.samples = [chr(97 + i) for i in range(num_samples)]

    def __getitem__(self, index):
        return "".join(self.samples[i] for i in index) if isinstance(index, list) else self.samples[index]


PLANS = {
    "one a row": lambda: torch_ref.make_plan([3] * 10, [(4, 3)], num_microbatches=4),
    "packed": lambda: torch_ref.make_plan(
        [3, 2, 1, 4, 5, 6, 1, 2, 2, 3], [(2, 6)], packing="best_fit", num_microbatches=4
    ),
    "pairs": lambda: torch_ref.make_plan([[3, 2]] * 10, [(4, 3, 2)], num_microbatches=4),
}


def letters_of(items):
    """Return what is real, and what is not, of the items of one microbatch."""
    return [row.sample for row in items if row.is_real], [row.sample for row in items if not row.is_real]


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_plain_data_loader_reads_every_sample_once(kind, num_replicas):
    """No padding row is a sample: the last one was read seven times."""
    plan = PLANS[kind]()
    samplers = [torch_ref.PlanBatchSampler(plan, rank, num_replicas) for rank in range(num_replicas)]
    shares = [list(DataLoader(Letters(10), batch_sampler=sampler, collate_fn=list)) for sampler in samplers]
    assert {len(share) for share in shares} == {plan.num_steps * 4 // num_replicas}
    assert sorted("".join(item for share in shares for items in share for item in items)) == Letters(10).samples


def test_a_packed_row_is_refused_by_a_dataset_of_single_ids():
    sampler = torch_ref.PlanBatchSampler(PLANS["packed"]())
    with pytest.raises(ValueError, match=r"a packed row is read by a list of ids.*PlannedDataset\(sampler, dataset\)"):
        list(DataLoader([*range(10)], batch_sampler=sampler, collate_fn=list))
    rows = [row for rows in DataLoader(torch.arange(10), batch_sampler=sampler, collate_fn=list) for row in rows]
    assert sorted(torch.cat(rows).tolist()) == [*range(10)]


@pytest.mark.parametrize("kind", PLANS)
def test_repeated_rows_are_marked_and_only_a_planned_dataset_takes_them(kind):
    """B rows a microbatch, of which the real ones hold every sample once."""
    plan = PLANS[kind]()
    sampler = torch_ref.PlanBatchSampler(plan, padding_rows="repeat")
    tensor = torch.arange(10)
    for dataset in (Letters(10), [*range(10)], tensor, TensorDataset(tensor), tensor.numpy()):
        with pytest.raises(ValueError, match=r"PlannedDataset\(sampler, dataset\)"):
            list(DataLoader(dataset, batch_sampler=sampler, collate_fn=list))
    planned = torch_ref.PlannedDataset(sampler, Letters(10))
    microbatches = list(DataLoader(planned, batch_sampler=sampler, collate_fn=list))
    assert {len(rows) for rows in microbatches} == {plan.buckets.shapes[0].rows}
    assert {row.bucket for rows in microbatches for row in rows} == set(plan.buckets.shapes)
    real, repeated = zip(*map(letters_of, microbatches), strict=True)
    assert sorted(letter for samples in real for row in samples for letter in row) == Letters(10).samples
    assert sum(map(len, repeated)) == 4 * plan.buckets.shapes[0].rows * plan.num_steps - plan.num_rows > 0


@pytest.mark.parametrize("padding_rows", ["omit", "repeat"])
@pytest.mark.parametrize("fields", [None, {"tokens": "length"}])
def test_a_microbatch_counts_the_samples_of_its_whole_step(padding_rows, fields):
    """4 and 1, where a replica that holds half of them said 2.0 and 0.0."""
    plan = torch_ref.make_plan([3, 3, 3, 3, 3], [(2, 4)], num_microbatches=2, order="length")
    samples = [[1, 2, 3]] * 5 if fields is None else [{"tokens": np.arange(3)}] * 5
    for rank in range(2):
        sampler = torch_ref.PlanBatchSampler(plan, rank, 2, padding_rows=padding_rows)
        planned = torch_ref.PlannedDataset(sampler, samples, fields=fields)
        batches = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
        assert [torch_ref.loading.batch.values_of(batch)["num_sequences"] for batch in batches] == [4.0, 1.0]


@pytest.mark.parametrize("padding_rows", ["omit", "repeat"])
@few
@given(drawn=st.one_of(packed_plans(num_microbatches=4), single_plans(num_microbatches=4)), rank=st.integers(0, 1))
def test_collated_items_are_the_microbatches_of_load(padding_rows, drawn, rank):
    """Shapes are static; repeated rows have their tokens, and no weight. A run resumes after any step."""
    lengths, plan = drawn
    samples = dataset_of(lengths)
    sampler = torch_ref.PlanBatchSampler(plan, rank, 2, padding_rows=padding_rows)
    planned = torch_ref.PlannedDataset(sampler, samples)
    start = plan.num_steps // 2
    sampler.load_state_dict(torch_ref.PlanBatchSampler(plan).state_dict(start))
    later = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
    assert len(later) == 2 * plan.num_steps
    expected = [
        torch_ref.training.train.take_microbatch(batch, m)
        for batch in torch_ref.load(plan, samples, rank=rank, num_replicas=2, start_step=start)
        for m in range(2)
    ]
    for batch, other in zip(later, expected, strict=True):
        assert torch.equal(batch.weights[0], other.weights)
        is_real = batch.weights[0].sum(dim=-1) > 0
        assert batch.num_sequences == other.num_sequences
        for name in ("tokens", "lengths", "segment_ids", "positions"):
            one, two = getattr(batch, name), getattr(other, name)
            assert (one is None) == (two is None)
            if one is not None:
                assert torch.equal(one[0][is_real], two[is_real])
                assert one[0].shape == two.shape
        assert bool((batch.lengths[0] > 0).all()) or padding_rows == "omit"


@pytest.mark.parametrize("fields", [None, {"tokens": "length"}])
def test_a_train_step_refuses_one_of_several_microbatches(fields):
    """Each was an update, of which the report counted the samples of the whole step."""
    lengths = [3, 3, 3, 3, 3]
    plan = torch_ref.make_plan(lengths, [(2, 4)], num_microbatches=2, order="length")
    samples = dataset_of(lengths) if fields is None else [{"tokens": np.arange(3)}] * 5
    sampler = torch_ref.PlanBatchSampler(plan)
    planned = torch_ref.PlannedDataset(sampler, samples, fields=fields)
    model = torch_ref.Decoder(torch_ref.DecoderConfig(width=8, num_layers=1))
    optimizer, before = SGD(model.parameters(), lr=0.1), {k: v.clone() for k, v in model.state_dict().items()}
    batches = list(DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate))
    for batch in [*batches, torch_ref.to_device(batches[0], "cpu")]:
        with pytest.raises(ValueError, match=r"1 of the 2 microbatches.*torch_ref.load.*gradient_accumulation_steps=2"):
            torch_ref.train_step(model, optimizer, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    # The sampler of one of two replicas gives whole shares of steps.
    sampler = torch_ref.PlanBatchSampler(plan, 1, 2)
    shares = DataLoader(planned, batch_sampler=sampler, collate_fn=planned.collate)
    assert all(torch_ref.loading.batch.values_of(batch).get("num_microbatches") is None for batch in shares)


def test_a_loss_without_its_weight_is_refused():
    """A mean, which would be iterated over."""
    model = torch_ref.Decoder(torch_ref.DecoderConfig(width=8, num_layers=1))
    (batch,) = torch_ref.load(torch_ref.make_plan([3, 2], [(2, 4)]), dataset_of([3, 2]))
    with pytest.raises(ValueError, match=r"return \(sum of losses, sum of weights\)"):
        torch_ref.train_step(
            model, SGD(model.parameters(), lr=0.1), batch, loss_fn=lambda model, part: model(part.tokens).mean()
        )


def test_what_a_sampler_cannot_say_is_refused():
    """Other words, and chunks of samples, which no index names."""
    with pytest.raises(ValueError, match=r"padding_rows.*'zeros'"):
        torch_ref.PlanBatchSampler(PLANS["packed"](), padding_rows="zeros")
    split = torch_ref.make_plan([9, 3], [(2, 6)], packing="best_fit", overlong="split")
    with pytest.raises(ValueError, match=r"splits samples.*load"):
        torch_ref.PlanBatchSampler(split)


def test_packed_rows_that_grew_are_named():
    """The samples of a row no longer fit it."""
    plan = torch_ref.make_plan([3, 2], [(1, 5)], packing="best_fit", order="length")
    with pytest.raises(ValueError, match=r"id 0: 3 \(limit 5\), id 1: 4 \(limit 5\)"):
        list(torch_ref.load(plan, dataset_of([3, 4])))
    with pytest.raises(ValueError, match=r"\b0\b.*\b9\b.*\b5\b"):
        list(torch_ref.load(plan, dataset_of([9, 2])))


# Model


def test_no_logit_sees_later_inputs():
    """A changed input t changes all logits from t on and none before."""
    model = small_model()
    tokens = torch.arange(10)[None] * 20
    logits = model(tokens)
    for t in range(9):
        other = tokens.clone()
        other[0, t] = 255
        same = (model(other) == logits)[0].all(dim=1)
        assert same.tolist() == [True] * t + [False] * (10 - t)


def test_parameters_that_do_not_fit_are_all_listed_and_none_is_copied():
    """Missing, unexpected and misshapen names in one message."""
    model = small_model()
    before = [weight.clone() for weight in model.parameters()]
    params = {name: np.zeros(tuple(value.shape)) for name, value in model.named_parameters()}
    del params["model.norm.weight"], params["model.layers.1.mlp.up_proj.weight"]
    out = "model.layers.0.self_attn.o_proj.weight"
    params |= {"lm_head.bias": np.zeros(257), out: np.zeros((12, 13))}
    with pytest.raises(ValueError, match="fit") as caught:
        torch_ref.load_params(model, params)
    for name in ("model.norm.weight", "1.mlp.up_proj.weight", "lm_head.bias", out, "(12, 13)", "(12, 12)"):
        assert name in str(caught.value)
    assert "embed_tokens" not in str(caught.value)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"width": 9}, r"width \(9\) must be an even multiple of num_heads \(3\)"),
        ({"head_size": 5}, r"head_size \(5\) must be even"),
        ({"num_heads": 0}, "num_heads must be an integer from 1"),
        ({"num_layers": 0}, "num_layers must be an integer from 1"),
        ({"vocab_size": 1}, "vocab_size must be an integer from 2"),
        ({"num_kv_heads": 2}, r"num_kv_heads \(2\) must divide num_heads \(3\)"),
        ({"windows": (4,)}, "windows must be one a layer: got 1 for 2 layers"),
        ({"windows": (4, -1)}, "windows must be an integer from 0"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be a finite number above 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        small_model(**sizes)


def test_continuations_begin_as_samples_do():
    """By the likeliest token each, with the begin token before the prompt, which never follows, or without any."""
    for begins, prompts in ((True, [[], [2, 0, 1]]), (False, [[3], [2, 0, 1]])):
        model, num_beginning = small_model(begins_samples=begins, vocab_size=4), 0
        model.lm_head.weight.data[3] = 3 * model.lm_head.weight.data[0]  # its logit is often the largest
        for prompt, new in zip(prompts, torch_ref.generate(model, prompts, 12), strict=True):
            inputs = [3, *prompt] if begins else list(prompt)
            for token in new.tolist():
                logits = model(torch.tensor([inputs]))[0, -1]
                assert token == logits[: 4 - begins].argmax()
                num_beginning += logits.argmax() == 3
                inputs.append(token)
        assert num_beginning > 0
    with pytest.raises(ValueError, match="prompt 1 is empty, and no token begins the samples of this model"):
        torch_ref.generate(model, [[1], []], 2)
    with pytest.raises(ValueError, match=r"prompt 0 holds tokens that are not from 0 to 3: \[-1, 4\]"):
        torch_ref.generate(model, [[1, -1, 4]], 2)


# Train step


def gradients_of(batches, **sizes):
    """Return metrics and gradients of one step whose microbatches are those of all batches."""
    tensors = {name for name, value in batches[0]._asdict().items() if isinstance(value, Tensor)}
    step = batches[0]._replace(**{name: torch.cat([getattr(batch, name) for batch in batches]) for name in tensors})
    model = small_model(**sizes)
    metrics = torch_ref.train_step(model, SGD(model.parameters(), lr=0.0), step)
    gradients = [weight.grad for weight in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return metrics, [gradient for gradient in gradients if gradient is not None]


def reference_gradients(samples, **sizes):
    """Return loss and gradients by definition: the mean over the targets of all samples, each run alone."""
    model = small_model(**sizes)
    begin = [256] if model.config.begins_samples else []
    losses = [
        torch.nn.functional.cross_entropy(model(tokens[None, :-1])[0], tokens[1:], reduction="none")
        for tokens in (torch.tensor([*begin, *sample.tolist()]) for sample in samples)
        if len(tokens) > 1
    ]
    loss = torch.cat(losses).mean()
    return loss, list(torch.autograd.grad(loss, list(model.parameters())))


@few
@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=9),
    num_microbatches=st.integers(1, 5),
    extra_rows=st.integers(0, 2),
    num_replicas=st.integers(1, 2),
)
def test_any_split_of_a_step_gives_the_same_gradient(lengths, num_microbatches, extra_rows, num_replicas):
    """Rows, microbatches, padding rows and microbatches of padding rows make no difference in float64."""
    total = num_microbatches * num_replicas
    samples = dataset_of(lengths)
    plan = torch_ref.make_plan(
        lengths, [(-(-len(lengths) // total) + extra_rows, 8)], order="length", num_microbatches=total
    )
    loaders = [torch_ref.load(plan, samples, rank=rank, num_replicas=num_replicas) for rank in range(num_replicas)]
    shares = [next(iter(loader)) for loader in loaders]
    metrics, gradients = gradients_of(shares)
    loss, expected = reference_gradients(samples)
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-11, atol=1e-12)
    assert metrics["weight"] == sum(lengths)
    assert metrics["num_sequences"] == len(lengths)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sizes", [{}, {"begins_samples": False, "windows": (3, 0)}], ids=str)
@few
@given(drawn=packed_plans(num_microbatches=2), num_replicas=st.integers(1, 2))
def test_packing_changes_no_gradient(sizes, drawn, num_replicas):
    """Loss and gradient of a packed step are those of its samples, each run alone; with or without a begin token."""
    lengths, plan = drawn
    samples = dataset_of(lengths)
    loaders = [torch_ref.load(plan, samples, rank=rank, num_replicas=num_replicas) for rank in range(num_replicas)]
    for step, shares in enumerate(zip(*loaders, strict=True)):
        metrics, gradients = gradients_of(list(shares), **sizes)
        ids = plan.sample_ids[plan.step_offsets[step] : plan.step_offsets[step + 1]]
        held = [samples[i][: plan.buckets.shapes[-1].length] for i in ids]
        assert metrics["weight"] == sum(len(sample) - ("begins_samples" in sizes) for sample in held)
        if metrics["weight"] == 0:
            assert metrics["loss"] == 0
            continue
        loss, expected = reference_gradients(held, **sizes)
        torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-11, atol=1e-12)
        assert metrics["num_sequences"] == len(held)
        for gradient, other in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-11)


def test_the_optimizer_takes_a_step_without_weight():
    """Its gradient is 0, which AdamW's decay does not depend on."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 2.0)
    tokens = torch.zeros(1, 1, 1, dtype=torch.int64)
    batch = torch_ref.Batch(tokens, tokens[..., 0], torch.zeros(1, 1, 1), 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)

    def loss_fn(model, microbatch):
        return model.weight.sum() * microbatch.weights.sum(), microbatch.weights.sum()

    assert torch_ref.train_step(model, optimizer, batch, loss_fn=loss_fn)["loss"] == 0
    assert model.weight.item() == pytest.approx(1.98, rel=1e-6)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_the_step_whose_gradient_breaks_the_parameters_says_so(max_norm):
    """At a root of 0 the loss is finite."""

    def root_loss(model, microbatch):
        return torch.sqrt(model.weight * microbatch.weights.sum()).sum(), torch.ones(())

    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for weight in (1.0, 0.0, 1.0):
        tokens = torch.zeros(1, 1, 1, dtype=torch.int64)
        batch = torch_ref.Batch(tokens, tokens[..., 0], torch.full((1, 1, 1), weight), 1.0)
        metrics = torch_ref.train_step(model, optimizer, batch, loss_fn=root_loss, max_norm=max_norm)
        found.append((math.isfinite(metrics["loss"]), bool(metrics["grads_finite"]), bool(metrics["params_finite"])))
    assert found == [(True, True, True), (True, False, False), (False, False, False)]


def test_loss_sums_are_nats_and_tokens():
    """Zero logits cost log(257) a token, whatever is on the padding."""
    model = small_model()
    torch.nn.init.zeros_(model.lm_head.weight)
    batch = next(iter(torch_ref.load(torch_ref.make_plan([3, 5], [(3, 8)], order="length"), dataset_of([3, 5]))))
    microbatch = torch_ref.Batch(batch.tokens[0], batch.lengths[0], batch.weights[0], batch.num_sequences)
    loss_sum, weight_sum = torch_ref.loss_sums(model, microbatch)
    assert float(weight_sum) == 8
    assert float(loss_sum.detach()) == pytest.approx(8 * math.log(257), rel=1e-12)


@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_a_loss_in_bfloat16_are_exact(sign):
    """Which itself holds 257 as 256; and a step whose weights add up to less than 0 is divided by them."""
    tokens = torch.zeros(1, 257, 1, dtype=torch.int64)
    batch = torch_ref.Batch(tokens, tokens[..., 0], torch.full((1, 257, 1), float(sign)), 257.0)
    model = torch.nn.Linear(1, 1, bias=False)

    def loss_fn(model, microbatch):
        return (model.weight.sum() * microbatch.weights.sum()).bfloat16(), microbatch.weights.sum()

    metrics = torch_ref.train_step(model, SGD(model.parameters(), lr=0.0), batch, loss_fn=loss_fn)
    assert metrics["weight"] == 257 * sign
    torch.testing.assert_close(metrics["loss"], model.weight.sum().detach(), rtol=1e-2, atol=0)
    torch.testing.assert_close(model.weight.grad, torch.ones(1, 1), rtol=1e-2, atol=0)
