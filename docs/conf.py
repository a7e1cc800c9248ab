"""Sphinx's configuration. `make docs` builds the manual into docs/_build/html.

The theme is furo: it reads well on a wide screen and on a telephone, in light and dark, without settings of ours, and
it is what pip, attrs and urllib3 use. The pages are Markdown, so that they can be read in the repository too.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "backends"), str(HERE / "_extensions"), str(HERE / "examples")]

import gpuinterop  # noqa: E402

project = "gpuinterop"
author = "the gpuinterop developers"
project_copyright = "the gpuinterop developers; Apache-2.0"
release = gpuinterop.__version__
version = re.match(r"[\d.]*[a-z]*", release)[0]  # 0.1.0 of a release, 0.1.dev of what comes between two

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_parser",
    "sphinx_copybutton",
    "manual_pages",
]
exclude_patterns = ["_build", "_generated", "examples/backend"]
root_doc = "index"
default_role = "py:obj"
language = "en"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch"]  # of gpuinterop.sharing.torch
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 140
python_display_short_literal_types = True
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_preprocess_types = False

# A console's output is not copied, nor are its prompts; blocks of plain text are output.
copybutton_selector = "div:not(.highlight-text) > div.highlight pre"
copybutton_prompt_text = r"\$ |>>> |\.\.\. "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"gpuinterop {version}"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_show_sphinx = False
html_copy_source = False
toc_object_entries_show_parents = "hide"
