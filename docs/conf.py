"""Sphinx: ``make docs``. The pages are plain MyST Markdown and read as well without it."""

project = "jupyter_agentbox"
author = "The jupyter_agentbox Authors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 3
html_theme = "furo"
html_title = project
