"""Samples that hold a prompt once, with several of its answers behind it. Letters: N samples, L tokens of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int64

from jvarlen._common.checks import UserError, check_at_least_one, if_given, list_first
from jvarlen._common.keywords import check_keywords
from jvarlen._common.types import Array
from jvarlen.data.samples import Sample, WeightedTokens, named_values, to_tokens

__all__ = ["share_prompts"]


@check_keywords
def share_prompts(
    prompts: Sequence[Sample],
    answers: Sequence[Sequence[Sample]],
    *,
    max_length: int | None = None,
) -> tuple[list[dict[str, np.ndarray]], Int64[np.ndarray, " N"]]:
    """Makes samples in which several answers share their prompt, for a model that computes it once.

    A prompt of P tokens with G answers of R takes P − 1 + G·(R + 1) tokens: the prompt without its last token, and each
    answer behind this token, from which its first one is predicted. The built-in decoder, `attend`,
    `next_token_targets` and `sample_positions` read `answer_ids`, and treat each answer as if it alone followed its
    prompt.

    Args:
      prompts: 1-D integers of at least one token each. Tokens of prompts have no loss weight, unless they are
        `WeightedTokens`; these count as often as the prompt has answers.
      answers: of each prompt, one or more answers of at least one token: 1-D integers, `WeightedTokens`, or mappings of
        `tokens` and of further arrays along these, such as `weights` or the advantages of a policy gradient, but not
        `answer_ids`.
      max_length: tokens of the longest row; a prompt whose answers take more makes several samples, each with the
        prompt. None: all answers of a prompt are one sample.

    Returns:
      N samples, dicts of arrays of L tokens: `tokens`; `weights`, float32; `answer_ids`, int32, 0 in the prompt and 1,
      2, … in its answers (0 everywhere in a sample of one answer); and the further arrays, 0 in prompts. Besides,
      int64[N], the prompt of each sample, from 0: `group_ids` of `make_plan`. A plan counts each of these samples as
      one sequence.

    Raises:
      ValueError: no answers, an empty prompt or answer, an answer that is too long with its prompt, or arrays that do
        not fit.

    Example:
      >>> samples, group_ids = share_prompts([[5, 6, 7]], [[[8, 9], [4]]])
      >>> samples[0]["tokens"].tolist(), samples[0]["weights"].tolist()
      ([5, 6, 7, 8, 9, 7, 4], [0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0])
      >>> samples[0]["answer_ids"].tolist(), group_ids.tolist()
      ([0, 0, 1, 1, 1, 2, 2], [0])
    """
    check_at_least_one(**if_given(max_length=max_length))
    if len(prompts) != len(answers):
        raise UserError(f"{len(prompts):,} prompts need answers to each, not to {len(answers):,}")
    of_prompts = [_fields(prompt, 0.0) for prompt in prompts]
    of_answers = [[_fields(answer, 1.0) for answer in each] for each in answers]
    _check_fields(of_prompts, of_answers)
    _check_sizes(of_prompts, of_answers, max_length)
    parts = [
        (i, part)
        for i, (prompt, each) in enumerate(zip(of_prompts, of_answers, strict=True))
        for part in _split(len(prompt["tokens"]) - 1, each, max_length)
    ]
    return [_join(of_prompts[i], part) for i, part in parts], np.array([i for i, _ in parts], np.int64)


def _fields(sample: Sample, weight: float) -> dict[str, np.ndarray]:
    """The arrays of a prompt or an answer by name, with weights."""
    named = named_values(sample) if isinstance(sample, Mapping) else {"tokens": sample}
    if "tokens" not in named:
        raise UserError(f"an answer has tokens, not only the fields {list_first(map(repr, named))}")
    tokens = to_tokens(named["tokens"])
    weights: Array = np.full(len(tokens), weight)
    if isinstance(named["tokens"], WeightedTokens):
        weights = named["tokens"].weights
    fields = {"weights": weights, **named, "tokens": tokens}
    arrays = {name: np.asarray(values) for name, values in fields.items()}
    arrays["weights"] = arrays["weights"].astype(np.float32)
    if wrong := [f"{name} {array.shape}" for name, array in arrays.items() if array.shape[:1] != tokens.shape]:
        raise UserError(f"arrays of {len(tokens)} tokens have as many entries, not {list_first(wrong)}")
    return arrays


def _split(
    prompt_size: int, answers: list[dict[str, np.ndarray]], max_length: int | None
) -> list[list[dict[str, np.ndarray]]]:
    """The answers of a prompt in parts whose rows hold them, in their order."""
    parts: list[list[dict[str, np.ndarray]]] = []
    room = 0
    for answer in answers:
        added = 1 + len(answer["tokens"])
        if not parts or (max_length is not None and added > room):
            parts.append([])
            room = (max_length or 0) - prompt_size
        parts[-1].append(answer)
        room -= added
    return parts


def _check_fields(prompts: list[dict[str, np.ndarray]], answers: list[list[dict[str, np.ndarray]]]) -> None:
    """Raises ValueError that lists prompts and answers whose fields are not those of samples."""
    own = [
        f"prompt {i} has {list_first(sorted(map(repr, more)))}"
        for i, each in enumerate(prompts)
        if (more := each.keys() - {"tokens", "weights"})
    ]
    if own:
        raise UserError(f"prompts have tokens and weights alone: {list_first(own)}; give such fields to answers")
    fields = {name: array.shape[1:] for each in answers for answer in each for name, array in answer.items()}
    if "answer_ids" in fields:
        raise UserError("answer_ids are numbered here, from 1 for each prompt: give this field of answers another name")

    def differs(answer: dict[str, np.ndarray]) -> bool:
        return {name: array.shape[1:] for name, array in answer.items()} != fields

    if lacking := [i for i, each in enumerate(answers) if any(map(differs, each))]:
        described = (f"{name!r}{f' of {list(shape)} a token' * bool(shape)}" for name, shape in sorted(fields.items()))
        raise UserError(
            f"all answers need the same fields, {list_first(described)}: those of "
            f"{list_first(f'prompt {i}' for i in lacking)} have others"
        )


def _check_sizes(
    prompts: list[dict[str, np.ndarray]], answers: list[list[dict[str, np.ndarray]]], max_length: int | None
) -> None:
    """Raises ValueError that lists prompts and answers of which no samples can be made."""
    sizes = [[len(answer["tokens"]) for answer in each] for each in answers]
    of_prompts = [len(prompt["tokens"]) for prompt in prompts]
    if empty := [i for i, each in enumerate(sizes) if not each or not min(each) or not of_prompts[i]]:
        raise UserError(
            "prompts, and at least one answer to each, need a token: "
            f"{list_first(f'prompt {i} of {of_prompts[i]} has answers of {sizes[i]}' for i in empty)}"
        )
    longest = [size + max(each) for size, each in zip(of_prompts, sizes, strict=True)]
    if max_length is not None and (over := [i for i, size in enumerate(longest) if size > max_length]):
        raise UserError(
            f"prompts with their longest answer above max_length ({max_length}): "
            f"{list_first(f'prompt {i}: {longest[i]}' for i in over)}; cut or leave out these"
        )


def _join(prompt: dict[str, np.ndarray], answers: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The sample of a prompt and these answers."""
    last = {name: array[-1:] for name, array in prompt.items()}
    parts = [{name: array[:-1] for name, array in prompt.items()}]
    for number, answer in enumerate(answers):
        # From the end of the prompt, its last token is predicted once, in the first answer.
        weights = last["weights"] * len(answers) * (number == 0)
        parts += [last | {"weights": weights}, answer]
    parts[0]["weights"] = parts[0]["weights"] * len(answers)
    sizes = [len(parts[0]["tokens"]), *(1 + len(answer["tokens"]) for answer in answers)]
    numbers = np.arange(len(sizes), dtype=np.int32) * (len(answers) > 1)
    joined = {"answer_ids": np.repeat(numbers, sizes)}
    for name, like in answers[0].items():
        zeros = (np.zeros((len(part["tokens"]), *like.shape[1:]), like.dtype) for part in parts)
        joined[name] = np.concatenate([part.get(name, zero) for part, zero in zip(parts, zeros, strict=True)])
    return joined
