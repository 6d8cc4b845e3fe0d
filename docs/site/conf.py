"""The documentation as a site: `make docs` builds it in build/site. Links and headings that are not there, and pages
that no list of docs/site/index.md has, fail the build. Nothing on its pages comes from elsewhere."""

project = "Kedge"
language = "en"

# Sources are where the repository has them, so that their links lead to the same places there and on the site.
root_doc = "docs/site/index"
include_patterns = [
    "*.md",
    "docs/**.md",
    "benchmarks/**.md",
    "assets/training/*.md",
]
exclude_patterns = [".*", "build", "tests"]

extensions = ["myst_parser"]
myst_heading_anchors = 4  # named as GitHub names them
nitpicky = True
smartquotes = False  # options begin with two hyphens
suppress_warnings = ["misc.highlighting_failure"]  # an example may be a part of a file

html_theme = "furo"
html_title = "Kedge"
html_copy_source = False
html_show_copyright = False
html_use_index = False
html_show_sphinx = False
templates_path = ["templates"]
html_additional_pages = {"index": "to_first_page.html"}
