"""Features that are tested and documented, but may change or be removed in any release.

A folder each, with a README of its own. The rest of the library does without them: only the command line imports this
package.

- `asynchronous`: workers that don't wait for each other.
- `elastic`: training that goes on when workers are lost.
- `large_plans`: plans of more samples than fit the memory of one process.
- `operators`: splits of operators, and stages of layers whose costs differ.
- `ordered_file`: one file of a sorted array, written by many processes.
- `simulation`: a plan played out on a cluster.
- `token_slices`: rows go through the stages of a pipeline in slices of positions.
"""
