"""Build entry point; metadata lives in pyproject.toml.

With ASCEND_HOME_PATH set, the wheel also holds the Ascend C kernels and their binding as one shared object,
`vllm_ext/_ascend*.so` (see docs/ascend.md); without it the package is pure Python.

The package list is computed here because `benchmarks/` stands beside the package in the tree and is installed as
`vllm_ext.benchmarks`, which static discovery cannot express.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
BINDING = ROOT / "csrc_ascend" / "binding"


def load_file(name: str, path: Path) -> ModuleType:
    """Import one file: a build front end does not put the project's folder on the path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cann = load_file("vllm_ext_cann", BINDING / "cann.py")


def torch_options() -> dict[str, str]:
    """What CMake must know of torch and torch_npu: folders, libraries, the C++ standard and ABI of their headers."""
    torch = cann.torch_facts(os.environ)
    # torch_npu's headers name CANN's by two paths: from its own root, and from third_party.
    includes = [*torch.includes, *(torch.npu / "include" / part for part in ("", "third_party/acl/inc"))]
    libraries = [*(torch.libraries / f"lib{name}.so" for name in ("torch", "torch_cpu", "c10"))]
    return {
        "CMAKE_CXX_STANDARD": str(torch.standard),
        "CMAKE_CXX_FLAGS": f"-D_GLIBCXX_USE_CXX11_ABI={torch.abi} {os.environ.get('CXXFLAGS', '')}".strip(),
        "VLLM_EXT_INCLUDES": ";".join(map(str, includes)),
        "VLLM_EXT_LIBRARIES": ";".join(map(str, [*libraries, torch.npu / "lib" / "libtorch_npu.so"])),
    }


class BuildAscend(build_ext):
    """Compiles the kernels with bisheng, the binding with the C++ compiler, and links them, through CMake."""

    def build_extension(self, ext: Extension) -> None:
        try:
            self._build(ext)
        except cann.CannError as error:
            raise SystemExit(f"vllm_ext: the Ascend kernels cannot be built: {error}") from None

    def _build(self, ext: Extension) -> None:
        found = cann.from_environment()
        assert found is not None
        environment = cann.cmake_environment(os.environ)
        options = torch_options()
        output = Path(self.get_ext_fullpath(ext.name)).resolve()
        output.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(self.build_temp).resolve() / "ascend"
        folder.mkdir(parents=True, exist_ok=True)
        options["VLLM_EXT_LIBRARIES"] += "".join(f";{path}" for path in found.libraries)
        options |= {
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": str(output.parent),
            "VLLM_EXT_OUTPUT_NAME": output.name,
            "VLLM_EXT_NPU": "ON",
            "VLLM_EXT_TARGETS": ";".join(cann.targets(os.environ)),
            "VLLM_EXT_PYTHON": sys.executable,
            "VLLM_EXT_BISHENG": str(found.compiler),
            "VLLM_EXT_CANN_INCLUDES": ";".join(map(str, found.includes)),
            "VLLM_EXT_DEVICE_FLAGS": ";".join(os.environ.get("VLLM_EXT_DEVICE_FLAGS", "").split()),
        }
        print(f"vllm_ext: Ascend kernels for {options['VLLM_EXT_TARGETS']} with {found.compiler}", flush=True)
        commands = (
            ["cmake", "-S", str(BINDING), "-B", str(folder), *(f"-D{key}={value}" for key, value in options.items())],
            ["cmake", "--build", str(folder), "--parallel", os.environ.get("MAX_JOBS", str(os.cpu_count() or 1))],
        )
        for command in commands:
            if subprocess.run(command, env=environment, check=False).returncode:
                raise cann.CannError(f"`{' '.join(command[:2])}` failed in {folder}; its messages are above")


setup(
    packages=[*find_packages(include=["vllm_ext", "vllm_ext.*"]), "vllm_ext.benchmarks"],
    ext_modules=[Extension("vllm_ext._ascend", sources=[])] if os.environ.get("ASCEND_HOME_PATH") else [],
    cmdclass={"build_ext": BuildAscend},
)
