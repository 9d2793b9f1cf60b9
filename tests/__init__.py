"""The tests. Side by side, each process computes in one thread: more than there are cores wait for one another."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"
