"""Pages and pictures of plans and runs, from values and files.

- `report`: histograms, curves and ledgers, as text and PNG.
- `page`, `svg_figures`: a self-contained HTML page, and the pictures in it.
- `plan_figures`, `plan_page`: a plan as a page.
- `run_records`, `run_lines`, `run_figures`, `run_page`: run directories, read and overlaid.
"""
