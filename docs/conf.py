"""The settings of the documentation's build, and what its docstrings need: ``make docs`` runs it by `tools/docs.py`.

In docstrings `x` is a name of the code and ``x`` is text. A name that is public becomes a link, the others become code.
Types in signatures are named by modules of the package's inside; they resolve to the public names.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from myst_parser.parsers.sphinx_ import MystParser
from sphinx.util.nodes import make_refnode

import zcactor

if TYPE_CHECKING:
    from docutils.nodes import Element, document
    from sphinx.addnodes import pending_xref
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

__all__ = ["Notebook", "linked", "setup"]

project = "zcactor"
author = "The zcactor maintainers"
project_copyright = "the zcactor maintainers, Apache License 2.0"
version = release = zcactor.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "zcactor"
html_favicon = "icon.svg"  # without one, browsers ask for a file that is not there, and log an error
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_use_index = False  # the page of names and the search lead to each name
html_domain_indices = False
templates_path: list[str] = []

myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = False  # so that attributes are objects, to which links lead

napoleon_custom_sections = [
    "Remedy", "Usual causes", ("Raises when awaited", "Raises"), ("Raises when entered", "Raises")
]  # fmt: skip

nitpick_ignore_regex = [
    ("py:.*", r"(asyncio|collections|concurrent|contextlib|numpy|np|npt|os|pathlib|types|typing)\..*"),
    (
        "py:class",
        r"(zcactor\.[\w.]+\.)?(AbstractAsyncContextManager|AbstractContextManager|ActorClass|ActorDecorator|ActorOptions|ActorT|Array|Broken|Call|CopyCount|DeviceHolder|Fault"
        r"|FurtherSettings|GraphEdge|Init|Method|MethodDecorator|NDArray|Op|P(\.args|\.kwargs)?|Plan|Progress|R|S|Shape|Spawning|StreamMethod|T|T_co)",
    ),
]
"""Names of Python's and NumPy's own documentation, which is not asked for as builds need no network; and type variables
and types of the package's inside, which signatures have for type checkers."""
OPTIONS: Final = frozenset({"ActorDeclaration", "CallOptions", "MethodOptions", "SpawnOptions"})
"""Types of keyword arguments that have a page of their own."""


def _public() -> dict[str, str]:
    """The names that docstrings may use for what is public, with the documented name of each."""
    found: dict[str, str] = {}
    public: dict[str, Any] = {name: getattr(zcactor, name) for name in zcactor.__all__}
    for name, module in list(public.items()):
        if inspect.ismodule(module):
            public |= {f"{name}.{each}": getattr(module, each) for each in module.__all__ if each not in public}
    for name, value in public.items():
        members = [
            member
            for base in (inspect.getmro(value) if inspect.isclass(value) else ())
            if base.__module__.startswith("zcactor")
            for member in vars(base)
            if not member.startswith("_")
        ]
        for path in (name, *(f"{name}.{member}" for member in members)):
            for prefix in ("", "zc.", "zcactor."):
                found[prefix + path] = f"zcactor.{path}"
        if name.startswith("gpu.") and inspect.isclass(value):
            found[value.__name__] = f"zcactor.{name}"  # signatures and docstrings name classes alone
    return found


UNSEARCHED: Final = (
    "adding-a-transport", "budgets", "changelog", "contributing", "explanation/decisions/", "explanation/walks",
)  # fmt: skip
"""The beginnings of names of pages that the search leaves out: they are for developers of zcactor, and have the words
of all other pages."""
FIELDS: Final = frozenset({"attribute", "data", "property"})
PUBLIC: Final = _public()
_ROLE: Final = re.compile(r"(?<![`:\w])`([^`<>]+)`(?!`)")


_MADE_INSIDE: Final = frozenset(
    f"zcactor.{name}" for name in (*zcactor.__all__, *(f"gpu.{each}" for each in zcactor.gpu.__all__))
) - {"zcactor.Config"}
_before: dict[str, list[str]] = {}
"""The texts of fields as they were before napoleon, by the names of the fields."""


def linked(line: str) -> str:
    """A line of a docstring in reStructuredText: with its names as links or as code."""

    def replace(found: re.Match[str]) -> str:
        target = PUBLIC.get(found[1].removesuffix("()"))
        return f"``{found[1]}``" if target is None else f":py:obj:`{found[1]} <{target}>`"

    return _ROLE.sub(replace, line)


def _docstring(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    del app, obj, options
    lines[:] = map(linked, lines)
    for at, line in enumerate(lines[:-1], 1):
        if line.strip() in {"Returns:", "Yields:"}:  # without a colon first, napoleon takes words before one for a type
            text = lines[at].lstrip()
            lines[at] = f"{lines[at][: -len(text)]}: {text}"
    if what in FIELDS:
        _before[name] = list(lines)


def _after_napoleon(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Give fields their text back: napoleon takes the words before a colon in its first line for a type."""
    del app, obj, options
    if what in FIELDS:
        lines[:] = _before.pop(name)


def _signature(
    app: Sphinx, what: str, name: str, obj: object, options: object, signature: str | None, returned: str | None
) -> tuple[str, None] | None:
    """Leave out how objects are made that only the package makes."""
    del app, obj, options, returned
    given = what == "class" and (name in _MADE_INSIDE or name.startswith("zcactor.testing."))
    # Sphinx 9 takes an answer only where it has found a signature itself.
    return ("", None) if given and signature else None


def _resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, contents: Element) -> Element | None:
    """Resolve a name of the package's inside to the public name of the same thing."""
    target = str(node.get("reftarget"))
    name, page = target.rpartition(".")[2], str(node["refdoc"])
    if node.get("refdomain") != "py":
        return None
    if name in OPTIONS:
        return make_refnode(app.builder, page, "reference/options", "", contents, f"{name}: options")
    public = PUBLIC.get(name)
    if public in (None, target):
        return None
    return env.domains.python_domain.resolve_xref(env, page, app.builder, "obj", public, node, contents)


def _leave_out(app: Sphinx, tree: document) -> None:
    """Leave a page out of the search."""
    del tree
    if app.env.docname.startswith(UNSEARCHED):
        app.env.metadata[app.env.docname]["nosearch"] = "true"


class Notebook(MystParser):
    """The parser of notebooks: their texts, programs and what these print, as Markdown. Nothing is run here."""

    supported = ("notebook",)

    def parse(self, inputstring: str, document: document) -> None:
        """See `docutils.parsers.Parser.parse`."""
        parts = []
        for cell in json.loads(inputstring)["cells"]:
            text = "".join(cell["source"])
            parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
            for output in cell.get("outputs", ()):
                shown = "".join(output["text"] if "text" in output else output["data"]["text/plain"])
                parts.append(f"```text\n{shown.rstrip()}\n```")
        super().parse("\n\n".join(parts), document)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the parts above; Sphinx calls this."""
    app.connect("autodoc-process-docstring", _docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", _after_napoleon, priority=600)
    app.connect("autodoc-process-signature", _signature)
    app.connect("doctree-read", _leave_out)
    app.connect("missing-reference", _resolve)
    app.add_source_suffix(".ipynb", "notebook")
    app.add_source_parser(Notebook)
    return {"parallel_read_safe": True}
