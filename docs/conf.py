"""The site: ``make docs``. Its sources are the pages of the repository, where they lie, so links are the same in both.

Notebooks show the outputs that they keep, which the tests compare with a run; code of pages is run by the tests, too.
``make docs ARGS="-D nb_execution_mode=force"`` runs the notebooks when the site is built.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from fshard import __version__  # noqa: E402 - of this checkout

project, author, copyright = "fshard", "the fshard authors", "the fshard authors"
version = release = __version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "myst_nb",
    "sphinx_copybutton",
    "sphinx_design",
    "site_names",
    "site_examples",
    "site_colab",
]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "examples/**", "benchmarks/*.md", "tests/*/README.md"]
exclude_patterns = [
    ".*",
    "build",
    "dist",
    "fshard",
    "runs",
    "docs/*.py",
    "docs/pictures",
    "docs/templates",
    "docs/theme",
]

autodoc_class_signature = "mixed"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 90
napoleon_use_ivar = True
napoleon_use_rtype = False  # words of sentences are no names of types
toc_object_entries_show_parents = "hide"

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
nb_execution_mode = "off"
nb_execution_raise_on_error = True
nb_execution_timeout = 170
nb_merge_streams = True

html_theme = "furo"
html_title = f"fshard {version}"
html_static_path = ["theme"]
html_css_files = ["site.css"]
html_favicon = "theme/favicon.svg"
html_additional_pages = {"index": "to_index.html"}  # the front page is docs/index.html
templates_path = ["templates"]
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
