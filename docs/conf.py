"""Sphinx's configuration of the documentation site, for `make docs`.

The front page is README.md, and the list in its section "Documentation" is the table of contents, so that the pages are
the same here and in a plain view of the repository. A page that the list lacks, a broken link and a broken anchor are
warnings, which fail the build.
"""

import re
from pathlib import Path
from typing import Any

import mermaidx
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.directives.patches import Code
from sphinx.transforms import SphinxTransform

PAGE = re.compile(r"\]\(([^)#]*\.md)\)")
"""A link to a page."""

project = "relaxd"
copyright = "relaxd's authors, Apache-2.0"
extensions = ["myst_parser"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "relaxd", "services", "tests", "benchmarks", "deploy", "protos", "examples", "runs"]
myst_heading_anchors = 6
myst_links_external_new_tab = False
myst_fence_as_directive = ["mermaid"]
suppress_warnings = ["misc.highlighting_failure"]  # console examples with placeholders

html_theme = "furo"
html_title = "relaxd"
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "index.html"}
templates_path = ["."]


class Mermaid(Code):
    """A diagram, drawn while the site is built, so that a page needs no script and no other server."""

    required_arguments = 0

    def run(self) -> list[nodes.Node]:
        """Return the diagram as SVG."""
        svg = mermaidx.render("\n".join(self.content)).svg()
        return [nodes.raw("", f'<figure class="diagram">{svg}</figure>', format="html")]


class LinksToFolders(SphinxTransform):
    """Turns links to folders of the repository into text: a site has no listing to show."""

    default_priority = 5

    def apply(self, **kwargs: Any) -> None:
        """Replace the links of one page."""
        here = Path(self.env.doc2path(self.env.docname)).parent
        for link in list(self.document.findall(addnodes.pending_xref)):
            if (here / link["reftarget"]).is_dir():
                link.replace_self(nodes.inline("", "", *link.children))


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Add the tables of contents to the front page: one for each entry of the list in its section "Documentation"."""
    if name != root_doc:
        return
    _, *entries = source[0].partition("## Documentation")[2].split("\n- **")
    for entry in entries:
        caption, _, links = entry.partition("**")
        pages = "\n".join(PAGE.findall(links))
        source[0] += f"\n\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    """Register what is above."""
    app.add_directive("mermaid", Mermaid)
    app.add_transform(LinksToFolders)
    app.connect("source-read", add_contents)
