"""Several samples in a row, and the plan of such rows. NumPy only.

Lengths, and the lengths that rows may have, determine a `Packing`; `make_plan` takes it in place of lengths. In reading
order:

- `pack`: takes lengths, gives samples row by row; splits samples that are too long.
- `placing`: which samples share a row, of one feature or of several.
- `row_lengths`: which lengths of rows cost least.
- `packed_plan`: from a plan of rows to the plan of their samples, with pieces of split samples in order.
"""
