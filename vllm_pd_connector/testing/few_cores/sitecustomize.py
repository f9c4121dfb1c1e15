"""Python runs this at its start when `testing.machine` puts its folder on PYTHONPATH: more processes than cores.

vLLM's shared-memory queues spin on `os.sched_yield` for a second after each message, with the GIL held. Where spinning
processes outnumber the cores, the kernel may leave one that yields unscheduled for tens of seconds, and with it every
thread of that process, the connector's included. A short sleep gives both the core and the GIL away.
"""

import os
import time

PAUSE_S = 1e-4

os.sched_yield = lambda: time.sleep(PAUSE_S)
