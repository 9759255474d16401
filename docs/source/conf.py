"""Configuration of Sphinx; ``make docs`` builds with it and takes every warning for an error."""

from __future__ import annotations

project = "torchpin"
author = "the torchpin contributors"
copyright = "the torchpin contributors"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "torchpin"
# Examples are shown as they are; an unknown language is no reason to fail.
suppress_warnings = ["misc.highlighting_failure"]
