"""The plug-in in a process without a usable nemo-gym: it imports, and says what is missing when it is used."""

from __future__ import annotations

import json
import sys
from typing import Any

from s3capture import errors
from s3capture.gym import GymCaptureLedger, GymLineageResolver, GymTokenSink, GymTokenSource, preflight


def using() -> dict[str, Any]:
    """What each attempt to use something raised: whether it was an ImportError, and its message."""
    told = {}
    for make in (GymTokenSink, GymTokenSource, GymLineageResolver, GymCaptureLedger, preflight):
        try:
            make(url="s3://bucket/p", run="r")
        except errors.CaptureError as error:
            told[make.__name__] = [isinstance(error, ImportError), str(error)]
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(using()))
