"""The page itself: the skeleton, the style, the script and the data, put into one file.

The rule of this module: everything that comes from a bucket is escaped for the place it is put in, here and nowhere
else; and the policy names the one style and the one script by their hashes, so that nothing that slipped through
would run.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files
from string import Template

_SCRIPTS = ("dom.js", "charts.js", "tree.js", "table.js", "detail.js", "page.js")


def render(*, title: str, verdict: str, passed: bool, data: str) -> str:
    """Return the HTML of one audit; ``data`` is the JSON of ``PageData.dump``, the others are plain text."""
    style = _asset("page.css")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, _SCRIPTS)) + "\n})();\n"
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return Template(_asset("page.html")).substitute(
        policy=html.escape(policy, quote=True).replace("&#x27;", "'"),
        title=html.escape(printable(title)),
        verdict=html.escape(printable(verdict)),
        verdict_class="passed" if passed else "failed",
        verdict_mark="\N{CHECK MARK}" if passed else "\N{BALLOT X}",
        style=style,
        script=script,
        data=inert(data),
    )


def inert(data: str) -> str:
    """Return ASCII JSON that means the same and holds nothing that HTML would act upon."""
    return data.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def printable(text: str) -> str:
    """Lone surrogates have no bytes in a file; they are shown as what they are."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode('utf-8')).digest()).decode('ascii')}"
