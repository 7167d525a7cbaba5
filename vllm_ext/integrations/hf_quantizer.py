"""transformers' own `save_pretrained` and `from_pretrained` for `w4a16-grouped` checkpoints.

Saving: the quantised modules put the checkpoint's tensors into the state dict (quantized_experts.py); the model only
has to be marked as quantised. Loading: the experts' 16-bit parameters are taken off the model before transformers loads
the rest, and afterwards the packed experts are read layer by layer, from the same files.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from vllm_ext.integrations.expert_layouts import read_experts, weight_parameters
from vllm_ext.integrations.expert_modules import find_experts, projection_names, put_in_place
from vllm_ext.integrations.quantized_experts import OneExpert
from vllm_ext.integrations.swap import swap_experts
from vllm_ext.quantization import QUANT_METHOD, QuantizedWeight, Scheme, join_quantized
from vllm_ext.quantization.checkpoint import Checkpoint
from vllm_ext.quantization.layouts import TIED_PREFIXES, W13
from vllm_ext.quantization.names import is_ignored
from vllm_ext.quantization.packed_source import PackedProjection, find_packed
from vllm_ext.quantization.scheme import VERSION
from vllm_ext.quantization.tensor_file import CheckpointError

logger = logging.getLogger(__name__)

# What transformers finds in the files and not in the model: read by us.
_OURS = r"experts\.(.*\.)?\w+_(packed|scale|zero_point|shape)$"


class W4A16Config(QuantizationConfigMixin):
    """`quantization_config` of a model: a `Scheme`'s options. Raises ValueError on values the scheme refuses."""

    quant_method = QUANT_METHOD

    def __init__(self, **options: Any) -> None:
        self.scheme = Scheme.from_dict(options)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, as in config.json."""
        return self.scheme.to_dict()

    def to_diff_dict(self) -> dict[str, Any]:
        """All options: a checkpoint does not rely on this version's defaults."""
        return self.to_dict()

    def __getattr__(self, name: str) -> Any:
        if name == "version":
            return VERSION
        if name.startswith("__") or "scheme" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.scheme, name)


class W4A16Quantizer(HfQuantizer):
    """Loads packed experts, or quantises 16-bit ones once they are loaded."""

    requires_calibration = False

    def __init__(self, quantization_config: W4A16Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.scheme = quantization_config.scheme
        self.files: Sequence[str] = ()
        self.pending: dict[str, dict[str, nn.Parameter]] = {}
        self.all_packed = False
        self.serializable = True

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        if not self.pre_quantized:
            return model
        self.files = list(checkpoint_files or ())
        found = find_experts(model)
        self.all_packed = not any(is_ignored(name, self.scheme.ignore) for name in found)
        for name, module in found.items():
            if is_ignored(name, self.scheme.ignore):
                continue
            names = {part: key for key, part in module.named_modules()}
            taken = {}
            for owner, key, parameter in weight_parameters(module):
                taken[f"{names[owner]}.{key}".lstrip(".")] = parameter
                owner._parameters[key] = None
                # transformers would draw random weights for what its files do not hold.
                owner._is_hf_initialized = True  # type: ignore[assignment]
            self.pending[name] = taken
        for part in model.modules():
            # Ties of parameters that are gone; the layers are tied again when they are read.
            ties = getattr(part, "all_tied_weights_keys", None)
            if isinstance(ties, dict):
                kept = {k: v for k, v in ties.items() if _there(part, k) and _there(part, v)}
                part.all_tied_weights_keys = kept  # type: ignore[assignment]
        ignored = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
        model._keys_to_ignore_on_load_unexpected = {*ignored, _OURS}  # type: ignore[assignment]
        return model

    def _process_model_after_weight_loading(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        if not self.pre_quantized:
            swap_experts(model, self.scheme)
            mark_quantized(model, self.scheme)
            return model
        folders = {Path(file).parent for file in self.files}
        if len(folders) != 1:
            raise CheckpointError(
                f"{QUANT_METHOD}: the checkpoint's files must lie in one folder, got {sorted(map(str, folders))}"
            )
        layers = find_packed(Checkpoint.open(folders.pop()))
        for names, layer in match_layers(list(self.pending), list(layers)):
            self._load_layer(model, names, layers[layer])
        self.pending = {}
        return model

    def _load_layer(self, model: nn.Module, names: list[str], projections: list[PackedProjection]) -> None:
        for name in names:
            module = model.get_submodule(name)
            for key, parameter in self.pending[name].items():
                owner, _, leaf = key.rpartition(".")
                module.get_submodule(owner)._parameters[leaf] = parameter
        holder = model.get_submodule(names[0].rpartition(".")[0])
        device = next((p.device for p in holder.parameters() if p.device.type != "meta"), torch.device("cpu"))
        weights = read_experts(model.get_submodule(names[0]), names[0])
        weights.names = projection_names(model, weights.names)
        w13, w2 = (q.to(device) for q in join_projections(projections))
        if w13.shape != weights.w13.shape or w2.shape != weights.w2.shape:
            raise CheckpointError(
                f"{projections[0].layer}: the checkpoint holds {list(w13.shape)} and {list(w2.shape)}, config.json "
                f"asks for {list(weights.w13.shape)} and {list(weights.w2.shape)}"
            )
        hook = getattr(model.get_submodule(names[0]), "_hf_hook", None)
        dtype = weights.w13.dtype
        put_in_place(model, names, weights, w13, w2, "auto", dtype, hook)

    def update_weight_conversions(self, weight_conversions: list[Any]) -> list[Any]:
        """Without those that would stack the packed tensors of all experts: they are read by us, one by one."""
        if not self.pre_quantized or not self.all_packed:
            return weight_conversions
        return [c for c in weight_conversions if not all("experts" in target for target in c.target_patterns)]

    def is_serializable(self, **kwargs: Any) -> bool:
        """Whether a checkpoint can be written: not of dictionaries of experts, whose names it has no place for."""
        if not self.serializable:
            logger.warning("%s: dictionaries of experts (Switch, NLLB) cannot be saved in 4 bits", QUANT_METHOD)
        return self.serializable

    @property
    def is_trainable(self) -> bool:
        """Whether other parts of the model can be trained (adapters): not through the experts."""
        return False

    @property
    def is_compileable(self) -> bool:
        """`torch.compile` sees the experts as one operator."""
        return True


def _there(module: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError:
        return False
    return holder._parameters.get(key) is not None or holder._buffers.get(key) is not None


def match_layers(modules: Sequence[str], layers: Sequence[str]) -> list[tuple[list[str], str]]:
    """Pairs the model's expert modules (tied ones together) with the checkpoint's layers by the numbers in their names.

    Modules and tensors are called differently in many families ("mlp" and "block_sparse_moe"); layer numbers agree.
    Raises CheckpointError when a layer is missing, or the numbers do not decide.
    """
    by_number: dict[tuple[int, ...], list[str]] = {}
    for name in modules:
        by_number.setdefault(_numbers(name), []).append(name)
    stored: dict[tuple[int, ...], list[str]] = {}
    for layer in layers:
        stored.setdefault(_numbers(layer), []).append(layer)
    pairs = []
    for number, names in by_number.items():
        found = stored.get(number, [])
        kept = [layer for layer in found if not any(alias in layer for alias, _ in TIED_PREFIXES)] or found
        tied = sorted(names, key=lambda name: any(alias in name for alias, _ in TIED_PREFIXES))
        if not kept:
            raise CheckpointError(
                f"{tied[0]}: the checkpoint holds no packed experts for it; it was packed with other `ignore` patterns?"
            )
        if len(kept) > 1 or (len(tied) > 1 and not any(alias in tied[-1] for alias, _ in TIED_PREFIXES)):
            exact = [
                [(names_, layer) for layer in kept if layer.split(".")[0] == names_.split(".")[0]] for names_ in tied
            ]
            if any(len(match) != 1 for match in exact):
                raise CheckpointError(f"{tied[0]}: several layers of the checkpoint could be its experts: {kept}")
            pairs += [([match[0][0]], match[0][1]) for match in exact]
            continue
        pairs.append((tied, kept[0]))
    return pairs


def _numbers(name: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"(?<=\.)\d+(?=\.)", f".{name}."))


def join_projections(projections: Sequence[PackedProjection]) -> tuple[QuantizedWeight, QuantizedWeight]:
    """(w13 [E, 2I or I, H], w2 [E, H, I]) of one layer's projections."""
    experts: dict[int, dict[str, PackedProjection]] = {}
    for projection in projections:
        experts.setdefault(projection.expert, {})[projection.name] = projection
    first, second = [], []
    for number in sorted(experts):
        found = experts[number]
        rows = [found[name].read() for name in W13 if name in found]
        first.append(rows[0] if len(rows) == 1 else join_quantized(rows, 0))
        second.append(next(p.read() for p in found.values() if p.shard == "w2"))
    return join_quantized(first, stack=True), join_quantized(second, stack=True)


def earlier_scheme(model: Any) -> Scheme | None:
    """The scheme of the experts that are in 4 bits already, None where the model names none."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = getattr(getattr(base, "config", None), "quantization_config", None)
    return found.scheme if isinstance(found, W4A16Config) else None


def mark_quantized(model: Any, scheme: Scheme) -> None:
    """Let transformers know: `save_pretrained` writes the quantization_config, and the tensors need no conversion."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    if config is None or not hasattr(base, "save_pretrained"):
        return
    config.quantization_config = W4A16Config(**scheme.to_dict())
    base.hf_quantizer = W4A16Quantizer(config.quantization_config, pre_quantized=True)
    base.hf_quantizer.serializable = not any(
        isinstance(module, nn.ModuleDict) and any(isinstance(child, OneExpert) for child in module.children())
        for module in base.modules()
    )
    base.is_quantized = True
    base.quantization_method = QUANT_METHOD


def register() -> None:
    """Make transformers know the method; repeated calls change nothing, a foreign entry is left alone."""
    mappings: tuple[tuple[Mapping[str, Any], Any], ...] = (
        (AUTO_QUANTIZATION_CONFIG_MAPPING, W4A16Config),
        (AUTO_QUANTIZER_MAPPING, W4A16Quantizer),
    )
    for mapping, entry in mappings:
        mapping.setdefault(QUANT_METHOD, entry)  # type: ignore[attr-defined]
