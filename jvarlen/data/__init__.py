"""From files to a dataset with known lengths. No JAX.

A path or any sequence comes in; random access by sample id and int64 lengths go out. In reading order:

- `tokens`: datasets of tokens. `split`: samples to hold out. `stdlib_corpus`: the built-in corpus.
- `open`, `line_files`, `arrow_files`, `tokenized`: files of text, JSON, tokens, Parquet, Arrow.
- `measure`, `sample_workers`, `shard_files`: lengths of samples, measured by processes, resumable.
- `content_key`, `length_cache`: lengths that are measured once.
- `mixtures`: several datasets as one, with exact counts.
"""
