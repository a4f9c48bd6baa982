"""How the documentation is built: `make docs`, offline, with warnings as errors."""

import importlib
import inspect
import sys
import warnings
from pathlib import Path

# What the documented packages' dependencies say when they are imported.
warnings.filterwarnings("ignore")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from trimtab._version import __version__  # noqa: E402

project = "trimtab"
author = copyright = "The trimtab authors"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"trimtab {__version__}"
html_static_path = ["_static"]
html_css_files = ["trimtab.css"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True}
autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source", ("Words", "params_style")]

# A name of ours that leads nowhere is an error. There is no network to look other projects' names up, and annotations
# such as ``Tensor`` are short names of theirs.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!trimtab\.).*")]

PUBLIC = (
    "trimtab",
    "trimtab.control",
    "trimtab.monitors",
    "trimtab.precision",
    "trimtab.formats",
    "trimtab.faults",
    "trimtab.trace",
    "trimtab.integrations.transformers",
    "trimtab.integrations.lightning",
    "trimtab.integrations.loggers",
    "trimtab.testing",
)


def public_names() -> dict[str, str]:
    """Where each public object is documented, by the place in which it is defined."""
    found: dict[str, str] = {}
    for name in PUBLIC:
        module = importlib.import_module(name)
        for public in module.__all__:
            thing = getattr(module, public)
            if inspect.isclass(thing) or inspect.isfunction(thing):
                # The room that has it comes after the house, and is where it is explained in full.
                found[f"{thing.__module__}.{thing.__qualname__}"] = f"{name}.{public}"
    return found


def lead_home(app, env, node, contnode):
    """Resolve a name by where it is defined to where it is documented; leave internal ones as text."""
    target = node.get("reftarget", "")
    if node.get("refdomain") != "py" or not target.startswith("trimtab."):
        return None
    home = app.trimtab_homes.get(target)
    if home is None:
        # An annotation may name what is no public object (a controller, a conversion). Text in a page may not.
        return None if "refexplicit" in node else contnode
    return env.get_domain("py").resolve_xref(env, node["refdoc"], app.builder, "obj", home, node, contnode)


_COLON = "\ue000"
"""Stands for a colon of an attribute's caption: napoleon would take what is before it for a type."""


def hide_colons(app, what, name, obj, options, lines):
    """Before napoleon."""
    if what in ("attribute", "data"):
        lines[:] = [line.replace(":", _COLON) for line in lines]


def show_colons(app, what, name, obj, options, lines):
    """After napoleon."""
    lines[:] = [line.replace(_COLON, ":") for line in lines]


def plain_bars(app, what, name, obj, options, lines):
    """Have the bars of a norm, as in |x - q(x)|, be bars: to docutils they are a substitution."""
    for i, line in enumerate(lines):
        if "|" in line and not line.lstrip().startswith((">>>", "...")):
            parts = line.split("``")
            lines[i] = "``".join(part if k % 2 else part.replace("|", r"\|") for k, part in enumerate(parts))


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", hide_colons, priority=100)
    app.connect("autodoc-process-docstring", show_colons, priority=900)
    app.connect("autodoc-process-docstring", plain_bars, priority=901)
    app.trimtab_homes = public_names()
    app.connect("missing-reference", lead_home)
