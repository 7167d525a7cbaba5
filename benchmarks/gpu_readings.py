"""Temperature and clocks of the GPU beside a measurement, what tells a warm run from a cold one; and its memory."""

from __future__ import annotations

import shutil
import subprocess

import torch

_FIELDS = {
    "temperature_c": "temperature.gpu",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_w": "power.draw",
}


def readings(index: int = 0) -> dict[str, float]:
    """Degrees Celsius, MHz and watts as nvidia-smi reports them; empty where there is none, or it does not say."""
    if shutil.which("nvidia-smi") is None:
        return {}
    query = f"--query-gpu={','.join(_FIELDS.values())}"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", str(index)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for name, text in zip(_FIELDS, done.stdout.strip().split(","), strict=False):
        try:
            found[name] = float(text)
        except ValueError:
            continue
    return found


def memory_used() -> float | None:
    """Bytes of the GPU that are taken, those of its driver too; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return float(total - free)
