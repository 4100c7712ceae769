"""The demo: a workload played through real processes and a real bucket, and everything it left there checked.

``script`` is what is played (``workload`` makes one, ``recording`` reads one), ``worker`` and ``crew`` are the processes
that play it, ``conductor`` hands out the calls, ``verify`` knows what must come of them, ``report`` says what did.
"""
