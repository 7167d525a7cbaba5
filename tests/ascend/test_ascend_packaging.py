"""What `pip install` and `python -m build` make of the project: without CANN, with a broken one, with a whole one."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import ascend_environment as environment
import pytest

ROOT = environment.ROOT
sys.path.insert(0, str(ROOT / "csrc_ascend" / "binding"))

import cann  # noqa: E402

PARTS = {
    "compiler bisheng": "bin/bisheng",
    "kernel_operator.h": "compiler/tikcpp/tikcfw/kernel_operator.h",
    "acl/acl.h": "include/acl/acl.h",
    "libascendcl.so": "lib64/libascendcl.so",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """dist/ of `python -m build` in a copy of the tree: the wheel is made from the sdist, as pip does it."""
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in ("vllm_ext", "benchmarks", "csrc_ascend", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignore, symlinks=True)
    (tree / "vllm_ext" / "benchmarks").unlink(missing_ok=True)  # a link that GPU runs make
    for path in ROOT.iterdir():
        if path.is_file() and not path.name.startswith("."):
            shutil.copy(path, tree)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tree / "dist")]
    result = subprocess.run(
        command, cwd=tree, env=clean_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return tree / "dist"


def clean_environment(**variables: str) -> dict[str, str]:
    """The environment without a trace of CANN, and `variables`."""
    kept = {key: value for key, value in environment.os.environ.items() if not key.startswith(("ASCEND", "VLLM_EXT"))}
    return {**kept, **variables}


def hide_packages(folder: Path) -> None:
    """With `folder` on PYTHONPATH, hide the environment's packages as pip does from a build in isolation."""
    text = "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    (folder / "sitecustomize.py").write_text(text, encoding="utf-8")


def fake_home(folder: Path) -> Path:
    """A CANN with every part the build asks for; nothing in it works."""
    for part in PARTS.values():
        (folder / part).parent.mkdir(parents=True, exist_ok=True)
        (folder / part).touch()
    return folder


def test_without_cann_the_wheel_is_pure_and_has_one_package(built: Path) -> None:
    """A stray top-level package (benchmarks, csrc_ascend, tests) would land in everyone's site-packages."""
    (wheel,) = built.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_ext"}
    assert len(tops) == 2
    assert not [name for name in names if name.endswith((".so", ".cpp"))]
    for needed in ("py.typed", "ha_npu/chips/310p3.json", "benchmarks/registry.py", "model_executor/ascend/gdn.py"):
        assert f"vllm_ext/{needed}" in names


def test_the_sdist_holds_what_the_ascend_build_needs(built: Path) -> None:
    """Someone with a 310P builds from the sdist and checks it: kernels, binding, simulator, planner, smoke script."""
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "csrc_ascend").rglob("*")
        if path.suffix in (".h", ".cpp", ".py", ".txt") and "__pycache__" not in path.parts
    }
    assert "csrc_ascend/binding/CMakeLists.txt" in tracked
    checked = {"Makefile", "tools/ascend_check.py", "tools/ascend_smoke.py"}
    assert {"setup.py", "vllm_ext/ha_npu/kernel_header.py", *checked, *tracked} <= names


@pytest.mark.parametrize("part", PARTS)
def test_an_incomplete_cann_is_an_error_that_names_what_is_missing(part: str, tmp_path: Path) -> None:
    """A runtime-only CANN has no compiler; finding that out from a missing symbol at import costs a day."""
    home = fake_home(tmp_path)
    (home / PARTS[part]).unlink()
    with pytest.raises(cann.CannError) as caught:
        cann.find_cann(home)
    message = str(caught.value)
    assert part in message
    assert not [other for other in PARTS if other != part and other in message.partition("lacks")[2]]
    assert str(home) in message
    assert "unset ASCEND_HOME_PATH" in message


def test_building_with_a_broken_cann_fails_in_one_line(tmp_path: Path) -> None:
    """setup.py ends with the reason, not with a traceback, and leaves nothing behind that looks like a build."""
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path / "lib")]
    command += ["--build-temp", str(tmp_path / "temporary")]
    variables = clean_environment(ASCEND_HOME_PATH=str(tmp_path / "nowhere"))
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode != 0
    assert "is not a folder" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_a_build_in_isolation_finds_the_torch_it_installs_beside(tmp_path: Path) -> None:
    """`pip install .` hides the environment's packages from the build by PYTHONPATH; headers must still be found."""
    hide_packages(tmp_path)
    hidden = clean_environment(PYTHONPATH=str(tmp_path))
    probe = [sys.executable, "-c", "import torch"]
    assert subprocess.run(probe, env=hidden, capture_output=True, check=False).returncode, "torch is hidden"
    # Torch is found all the same; what this environment really lacks is torch_npu.
    with pytest.raises(cann.CannError, match="torch_npu is not installed: install torch and torch-npu"):
        cann.torch_facts(hidden)
    beside = clean_environment(PYTHONPATH=str(environment.torch_npu_folder()))
    facts = cann.torch_facts(beside)
    assert (facts.npu / "include" / "torch_npu" / "csrc").is_dir()
    assert (facts.libraries / "libtorch_cpu.so").is_file()
    assert any((Path(folder) / "torch" / "library.h").is_file() for folder in facts.includes)


def test_a_build_in_isolation_runs_a_cmake_that_pip_installed(tmp_path: Path) -> None:
    """The package index's cmake is a script of the environment's Python; `pip install .` hid its package from it."""
    hide_packages(tmp_path)
    script = tmp_path / "cmake"
    variables = clean_environment(PATH=str(tmp_path), PYTHONPATH=str(tmp_path))
    with pytest.raises(cann.CannError, match="not on the path: pip install cmake"):
        cann.cmake_environment(variables)
    for module, found in (("pytest", True), ("no_such_module", False)):
        script.write_text(f"#!{sys.executable}\nimport {module}\n", encoding="utf-8")
        script.chmod(0o755)
        assert subprocess.run([script], env=variables, capture_output=True, check=False).returncode
        if found:
            assert "PYTHONPATH" not in cann.cmake_environment(variables)
        else:
            with pytest.raises(cann.CannError, match=r"does not run .*no_such_module"):
                cann.cmake_environment(variables)


def test_targets_are_the_named_ones_the_machines_or_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM_EXT_ASCEND_TARGETS wins, then npu-smi, then every target there are kernels for."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cann.targets({}) == ["dav-2002", "dav-3002"]
    assert cann.targets({"VLLM_EXT_ASCEND_TARGETS": "dav-3002, dav-2002 dav-3002"}) == ["dav-3002", "dav-2002"]
    with pytest.raises(cann.CannError, match=r"names dav-2201; the kernels are written for dav-2002 \(310P\)"):
        cann.targets({"VLLM_EXT_ASCEND_TARGETS": "dav-2201"})
    tool = tmp_path / "npu-smi"
    for chip, expected in (("310P3", ["dav-2002"]), ("310B4", ["dav-3002"]), ("910B4", ["dav-2002", "dav-3002"])):
        tool.write_text(f"#!/bin/sh\necho '| 0       {chip}     | OK            | 69.1        49  |'\n")
        tool.chmod(0o755)
        assert cann.targets({}) == expected, chip


def test_a_complete_cann_makes_a_platform_wheel_with_one_object() -> None:
    """Compiled by the stand-in compiler against real torch_npu headers; the other tests of this folder load it."""
    (wheel,) = environment.built_extension().glob("*.whl")
    assert not wheel.name.endswith("-none-any.whl"), wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    objects = [name for name in names if name.endswith(".so")]
    assert len(objects) == 1
    assert objects[0].startswith("vllm_ext/_ascend.")
    assert not [name for name in names if name.startswith(("csrc_ascend", "benchmarks", "tests"))]
