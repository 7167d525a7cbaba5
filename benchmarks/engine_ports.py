"""Ports for vLLM engines that start at the same time."""

from __future__ import annotations

import os

_FIRST, _COUNT, _EACH = 12000, 500, 40


def claim_ports() -> None:
    """Have this process's engine search from a port of its own, by the process id.

    vLLM asks the system for a free port, lets go of it and opens it later. Of engines started together two got the
    same: one ended because the address was in use, others waited for a store that was not theirs until they were ended.
    """
    os.environ["VLLM_PORT"] = str(_FIRST + os.getpid() % _COUNT * _EACH)
