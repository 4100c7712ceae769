"""Load and faults on a real server: programs that act and log, and a judge that knows only logs and the bucket.

The rule of this package: those who act (``worker``, ``duel``) never judge, and the judge never asks how the protocol
works. An operation counts as acknowledged only when its line is in the log of the process that performed it, written
after the call returned; so whatever the judge demands had truly been promised.

``python -m tests.stress --help`` runs it at any size; tests/test_stress.py runs it small.
"""
