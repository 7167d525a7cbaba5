"""Compile the Ascend C kernels with the bisheng compiler of a CANN installation.

    ASCEND_HOME_PATH=/path/to/cann make ascend-check           # ASCEND_ARCH=dav-3002 for a 310B

Writes the kernels' constants from their plan, compiles every `.cpp` below `csrc_ascend/kernels` to an object file and
keeps nothing; it runs nothing on a device.
Without ASCEND_HOME_PATH nothing is checked, and this says so.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "csrc_ascend" / "binding")]

from cann import find_compiler, include_folders  # noqa: E402

from vllm_ext.ha_npu.kernel_header import write_kernel_headers  # noqa: E402

KERNELS = ROOT / "csrc_ascend" / "kernels"
DEFAULT_ARCH = "dav-2002"  # 310P


def compile_command(compiler: Path, arch: str, source: Path, target: Path, includes: tuple[Path, ...]) -> list[str]:
    """The command that compiles one kernel file; the plans' headers lie beside the target, `includes` are CANN's."""
    return [
        str(compiler),
        *("-x", "asc", f"--npu-arch={arch}", "-std=c++17", "-O2"),
        *(part for folder in (source.parent, KERNELS, target.parent, *includes) for part in ("-I", str(folder))),
        *("-c", str(source), "-o", str(target)),
    ]


def main() -> int:
    """Compile the kernels; 0 when all compile or nothing could be checked, 1 otherwise."""
    home = os.environ.get("ASCEND_HOME_PATH")
    if not home:
        print("ascend-check: ASCEND_HOME_PATH is not set: nothing was checked")
        return 0
    compiler = find_compiler(Path(home))
    if compiler is None:
        print(f"ascend-check: no bisheng compiler below ASCEND_HOME_PATH={home}", file=sys.stderr)
        return 1
    sources = sorted(KERNELS.rglob("*.cpp"))
    if not sources:
        print(f"ascend-check: no kernel files below {KERNELS}: nothing was checked", file=sys.stderr)
        return 1
    arch = os.environ.get("ASCEND_ARCH", DEFAULT_ARCH)
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        write_kernel_headers(Path(folder))
        for number, source in enumerate(sources, 1):
            name = source.relative_to(ROOT)
            print(f"[{number}/{len(sources)}] {name} for {arch}", flush=True)
            command = compile_command(compiler, arch, source, Path(folder) / "kernel.o", include_folders(Path(home)))
            if subprocess.run(command, check=False).returncode:
                failed.append(str(name))
    print(f"{len(sources) - len(failed)} compiled, {len(failed)} failed{': ' if failed else ''}{', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
