"""From lengths to a plan, in NumPy.

- `lengths`, `order`, `pacing`: checked lengths, the order of samples, and curricula.
- `costs`, `budget`, `fitting`: what a microbatch costs, how large it may be, and which samples fit.
- `bucket_lengths`, `buckets`, `several_lengths`, `make_buckets`: the static shapes of samples of one length and of
  several.
- `batching`: greedy token batches, without buckets.
- `packing`, `packer`, `placing`, `joint`: several samples in a row, by best fit or end to end; pairs. `row_lengths`,
  `choice`: how long rows are, and whether to pack.
- `plan`, `steps`, `plan_file`: a plan and what holds for every one, and its file.
- `assign`, `emission`: samples into buckets, and steps in order. `make_plan`, `packed_plan`: plans of samples
  and of packed rows.
- `step_sizes`, `groups`, `sized_plan`: steps of given sizes, in groups of several buckets. `group_ids`: samples that
  share a step. `single_step`: one step of new data. `settings`: of any plan.
- `windows`: what stays of samples that are too long.
- `balance`: rows assigned to ranks.
- `streams`: batches of samples whose lengths are not known in advance. `stream_shapes`, `stream_packing`: their shapes,
  and packed rows.
"""
