"""Capture directories of nemo-gym 0.7.0, brought into a bucket and written out of one.

The rule of this package: a directory is read as Gym's own file store reads it and is never changed; what goes into a
bucket goes through the endpoints, so that every fence is asked; and nothing is called verified that was not read back
and compared. Needs no nemo_gym: the format is that of its source (docs/gym-directories.md).
"""

from __future__ import annotations

from s3capture.gymdir.checked import CheckedRollout
from s3capture.gymdir.checking import check_directory, check_rollout
from s3capture.gymdir.exporting import export_directory
from s3capture.gymdir.importing import import_directory
from s3capture.gymdir.layout import DirectoryInUseError, Fault, GymState
from s3capture.gymdir.report import ExportReport, Fate, ImportReport, RolloutReport, Show, Silent

__all__ = [
    "CheckedRollout",
    "DirectoryInUseError",
    "ExportReport",
    "Fate",
    "Fault",
    "GymState",
    "ImportReport",
    "RolloutReport",
    "Show",
    "Silent",
    "check_directory",
    "check_rollout",
    "export_directory",
    "import_directory",
]
