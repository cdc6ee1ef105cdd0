"""Pages and pictures of plans and runs, from values and files.

- `histogram`: a histogram of lengths as text.
- `compare`: the figures of several strategies for the same lengths, as a table.
- `figures`: how all pictures are drawn, as SVG or PNG.
- `page`: a self-contained HTML page of pictures and tables, from the template `page.html.jinja`.
- `plan_figures`, `plan_page`: a plan as a page. `choice_page`: the choice of a layout as a page.
- `schedule_figures`, `memory_figures`: pictures of simulated pipeline schedules, and of the memory of steps.
- `run_records`, `run_figures`, `run_page`: run directories, read and overlaid; the pictures that a run leaves behind.
"""
