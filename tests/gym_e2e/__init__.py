"""What stands around a real Gym model server in the end-to-end test.

``engine``, ``relay``, ``harness`` and ``server`` run in the process of the tests; ``launch``, ``collect`` and
``stand_in`` are programs (and a pytest plugin) that only Gym's own environment can run.
"""
