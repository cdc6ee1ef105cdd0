"""Plans that do not fit memory: made in pieces on disk, and opened as memory maps.

They turn a file of lengths into the file of a plan, with the digest of the plan that `make_plan` makes in memory. In
reading order:

- `raw_plan`: one file of raw arrays with a header, opened in milliseconds.
- `columns`: files of values by sample, which stages append to and read from.
- `stages`: sort, group into buckets, and put into the order of the steps, each in pieces.
- `out_of_core`: runs the stages, and continues after an interruption.
"""
