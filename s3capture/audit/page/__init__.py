"""An audit as one page that a person opens first: no network, no server, no library, only the file.

The rule of this package: what a bucket holds is anyone's words. It reaches the page as JSON in which nothing can end
the script element that carries it, and the page writes it as text and never as markup; a policy in the page forbids
every request and every script but its own. Token arrays never get here.
"""

from __future__ import annotations

from s3capture.audit.page.collect import PageData
from s3capture.audit.page.render import render

__all__ = ["PageData", "render"]
