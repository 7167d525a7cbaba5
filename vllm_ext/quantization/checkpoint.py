"""A checkpoint folder: config.json, safetensors files and their index, opened without reading a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_ext.quantization.tensor_file import CheckpointError, TensorRef, read_header, reading

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True)
class Checkpoint:
    """What a folder holds. `files` are in order; `tensors` maps every name to its place."""

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]
    tensors: dict[str, TensorRef]
    indexed: bool
    stray: tuple[Path, ...]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open `folder` and check that its index, its files and their headers agree.

        Raises CheckpointError on anything missing, unreadable, truncated or contradictory.
        """
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: no such folder; give the folder that holds config.json and *.safetensors")
        config = read_json(folder / CONFIG)
        found = sorted(path for path in folder.glob("*.safetensors"))
        index = folder / INDEX
        indexed = index.exists()
        if indexed:
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise CheckpointError(f"{index}: has no weight_map; download it again")
            names = sorted(set(map(str, weight_map.values())))
            for name in names:
                if Path(name).name != name:
                    raise CheckpointError(f"{index}: {name!r} is no plain file name")
            files = [folder / name for name in names]
        else:
            weight_map = None
            files = found
            if not found:
                raise CheckpointError(f"{folder}: {_without_safetensors(folder)}")
            if len(found) > 1:
                raise CheckpointError(
                    f"{folder}: {len(found)} safetensors files but no {INDEX}, which says what belongs to the model; "
                    "download it again"
                )
        tensors: dict[str, TensorRef] = {}
        for file in files:
            if not file.exists():
                raise CheckpointError(f"{file}: missing, although {INDEX} lists it; download it again")
            for name, ref in read_header(file).items():
                if name in tensors:
                    raise CheckpointError(f"{file}: {name} is also in {tensors[name].file.name}")
                tensors[name] = ref
        if weight_map is not None:
            _check_index(index, weight_map, tensors)
        if not tensors:
            raise CheckpointError(f"{folder}: its safetensors files hold no tensors")
        return cls(folder, config, tuple(files), tensors, indexed, tuple(path for path in found if path not in files))

    @property
    def model_type(self) -> str:
        """`model_type` of the text model, "" when config.json has none."""
        text = self.config.get("text_config")
        kinds = (text.get("model_type") if isinstance(text, dict) else None, self.config.get("model_type"))
        return next((kind for kind in kinds if isinstance(kind, str)), "")

    @property
    def quantization(self) -> dict[str, Any] | None:
        """The `quantization_config` of the model or its text part, None when it has none."""
        text = self.config.get("text_config")
        for config in (self.config, text if isinstance(text, dict) else {}):
            for key in ("quantization_config", "compression_config"):
                if isinstance(config.get(key), dict):
                    return config[key]
        return None


def _check_index(index: Path, weight_map: dict[str, str], tensors: dict[str, TensorRef]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise CheckpointError(f"{index}: {name} is listed in {file}, which does not hold it; download it again")
        if tensors[name].file.name != file:
            raise CheckpointError(f"{index}: {name} is listed in {file} but is in {tensors[name].file.name}")
    for name, ref in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{index}: has no entry for {name} of {ref.file.name}; download it again")


def _without_safetensors(folder: Path) -> str:
    if any(path.suffix in PICKLED for path in folder.iterdir()):
        return "holds pickled weights only; pickle runs code when read, so convert the checkpoint to safetensors first"
    return "holds no safetensors files"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when `path` is missing, unreadable or something else."""
    with reading(path):
        text = path.read_bytes()
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must be a JSON object, is a {type(value).__name__}")
    return value
