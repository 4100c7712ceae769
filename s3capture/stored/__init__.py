"""A run as it is kept, whether its rollouts still lie as small objects or were packed into an archive.

The rule of this package: whoever looks at a run looks through it, so that nothing they see depends on where the bytes
lie. It reads and never creates. What the objects mean is not its business.
"""

from __future__ import annotations

from s3capture.stored.rollout import StoredRollout
from s3capture.stored.run import StoredRun
from s3capture.stored.selection import Selection

__all__ = ["Selection", "StoredRollout", "StoredRun"]
