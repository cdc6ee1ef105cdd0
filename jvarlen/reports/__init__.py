"""Pages and pictures of plans, layouts and runs, from values and files.

- `figures`: the style of all pictures, SVG or PNG; one HTML file of pictures and tables, from `page.html.jinja`.
- `plan_page`, `target_page`: a plan; what fits on devices that are elsewhere.
- `run_records`, `run_page`: run directories, read; overlaid in pictures and tables.
"""
