"""Run every check in `benchmarks/gpu_checks` on this machine's CUDA device.

    make gpu-check PYTHON=python3      # the Python whose torch sees the GPU, with this project installed in it

Each check is a script of its own that exits with 0 when what it claims holds. Without a CUDA device nothing is checked,
and this says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKS = ROOT / "benchmarks" / "gpu_checks"


def device_name() -> str | None:
    """The first CUDA device's name, None where torch or a device is missing."""
    probe = "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None if found.returncode == 0 else None


def main() -> int:
    """Run the checks; 0 when all pass, 1 when one fails or the project is not installed."""
    checks = sorted(path for path in CHECKS.glob("*.py") if not path.name.startswith("_"))
    device = device_name()
    if device is None or not checks:
        reason = "there are no checks" if device else f"{sys.executable} sees no CUDA device"
        print(f"gpu-check: {reason}: nothing was checked")
        return 0
    installed = subprocess.run([sys.executable, "-c", "import vllm_ext.benchmarks"], cwd=os.sep, check=False)
    if installed.returncode:
        print(f"gpu-check: vllm_ext is not installed for {sys.executable}: pip install --no-deps -e .", file=sys.stderr)
        return 1
    failed = []
    for number, check in enumerate(checks, 1):
        print(f"[{number}/{len(checks)}] {check.stem} on {device}", flush=True)
        start = time.monotonic()
        status = subprocess.run([sys.executable, str(check)], cwd=ROOT, check=False).returncode
        print(f"    {'ok' if status == 0 else f'FAILED (exit {status})'} after {time.monotonic() - start:.0f} s")
        if status:
            failed.append(check.stem)
    print(f"{len(checks) - len(failed)} passed, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
