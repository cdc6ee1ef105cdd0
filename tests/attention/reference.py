"""Attention by its definition, in NumPy: one query at a time, over the keys that it sees."""

import numpy as np


def attend_one_by_one(query, key, value, weights, sees, scale=None):
    """Outputs, and the gradients of their sum weighted, of float[B, Q, H, K] and float[B, T, N, K].

    `sees(row, i, j)` tells whether query i of a row sees its key j.
    """
    query, key, value, weights = (np.asarray(x, np.float64) for x in (query, key, value, weights))
    outputs, *grads = (np.zeros_like(x) for x in (query, query, key, value))
    scale = 1 / np.sqrt(query.shape[3]) if scale is None else scale
    for row, i, head in np.ndindex(query.shape[:3]):
        seen = [j for j in range(key.shape[1]) if sees(row, i, j)]
        if not seen:
            continue
        group = head * key.shape[2] // query.shape[2]
        q, ks, vs = query[row, i, head], key[row, seen, group], value[row, seen, group]
        logits = ks @ q * scale
        powers = np.exp(logits - logits.max())
        shares = powers / powers.sum()
        outputs[row, i, head] = shares @ vs
        of_shares = vs @ weights[row, i, head]
        of_logits = shares * (of_shares - shares @ of_shares) * scale
        grads[0][row, i, head] = of_logits @ ks
        grads[1][row, seen, group] += of_logits[:, None] * q
        grads[2][row, seen, group] += shares[:, None] * weights[row, i, head]
    return outputs, grads


def rule(query_ids, key_ids, *, offset=0, causal=True, window=None):
    """What `attend` says a query sees, number by number."""
    query_ids, key_ids = (np.asarray(ids).tolist() for ids in (query_ids, key_ids))
    offsets = np.broadcast_to(offset, len(query_ids)).tolist()
    window = None if window is None or window < 1 else int(window)

    def sees(row, i, j):
        if query_ids[row][i] == 0 or query_ids[row][i] != key_ids[row][j]:
            return False
        distance = offsets[row] + i - j
        return not causal or (distance >= 0 and (window is None or distance < window))

    return sees


def ids_of_lengths(lengths, seq_length):
    """The ids that lengths stand for: 1 before the length, then 0."""
    return [[1] * min(max(n, 0), seq_length) + [0] * (seq_length - max(n, 0)) for n in np.asarray(lengths).tolist()]
