"""The demo: a workload played through real processes and a real bucket, and everything it left there checked.

``run`` is the whole of it. ``script`` is what is played (``workload`` makes one, ``recording`` reads one), ``place`` is
where; ``worker`` and ``crew`` are the processes that play, ``conductor`` hands out the calls, ``closing`` freezes and
drops, ``verify`` knows what must come of it all, ``outcome`` holds what did, and ``report`` is its JSON.
"""
