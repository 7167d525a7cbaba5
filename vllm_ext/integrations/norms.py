"""Every RMSNorm module of a Hugging Face model as one kernel, whichever of the usual forms it computes."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vllm_ext.ops.fused import rms_norm

_FORMS = {
    "plain": (0.0, False),
    "round, then weight": (0.0, True),
    "1 + weight": (1.0, False),
}
_SEEN = 64


@dataclass
class Patch:
    """What a patch replaced; `undo()` puts it back. `skipped` names modules it does not compute, with the reason."""

    count: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore what was there."""
        while self._undo:
            self._undo.pop()()


class _FusedForward:
    """A norm's forward; holds the module, so that moved or reloaded weights are seen."""

    def __init__(self, module: Any, eps: float, form: str) -> None:
        self.module, self.eps = module, eps
        self.offset, self.round_first = _FORMS[form]

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(
            hidden_states,
            getattr(self.module, "weight", None),
            self.eps,
            weight_offset=self.offset,
            round_before_weight=self.round_first,
        )


def norm_form(module: nn.Module) -> tuple[str, float]:
    """(form, eps) of an RMSNorm module, told by what it computes. Raises ValueError where no form fits."""
    eps = next(
        (getattr(module, n) for n in ("eps", "variance_epsilon") if isinstance(getattr(module, n, None), float)), None
    )
    if eps is None:
        raise ValueError("it has no eps")
    probe: Any = copy.deepcopy(module).to("cpu")
    weight = getattr(probe, "weight", None)
    generator = torch.Generator().manual_seed(0)
    if isinstance(weight, nn.Parameter):
        if weight.dim() != 1:
            raise ValueError(f"its weight has shape {list(weight.shape)}")
        probe = probe.to(torch.bfloat16)
        weight = probe.weight
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    columns = _SEEN if weight is None else weight.shape[0]
    x = torch.randn(4, columns, generator=generator).to(torch.bfloat16) * 3
    with torch.no_grad():
        found = probe(x)
        for form, (offset, round_first) in _FORMS.items():
            wanted = rms_norm(x, weight, eps, weight_offset=offset, round_before_weight=round_first)
            # Two roundings apart where a family rounds in another place; another form is far away.
            if found.dtype == x.dtype and torch.allclose(found.float(), wanted.float(), rtol=2**-6, atol=1e-3):
                exact = _closest(found, x, weight, eps)
                return exact or form, eps
    raise ValueError("it computes none of the known forms")


def _closest(found: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> str | None:
    for form, (offset, round_first) in _FORMS.items():
        if torch.equal(found, rms_norm(x, weight, eps, weight_offset=offset, round_before_weight=round_first)):
            return form
    return None


def patch_rms_norms(model: nn.Module) -> Patch:
    """Replace the forward of every module whose class is called ...RMSNorm by one kernel. Inference only.

    A module's form is probed once per class. Numbers agree with the stock module's within a rounding or two, not in
    every bit. `undo()` of the returned patch restores the model.
    """
    patch = Patch()
    forms: dict[tuple[type, bool], tuple[str, float] | str] = {}
    for name, module in model.named_modules():
        if not type(module).__name__.endswith("RMSNorm"):
            continue
        key = (type(module), getattr(module, "weight", None) is None)
        if key not in forms:
            try:
                forms[key] = norm_form(module)
            except (ValueError, RuntimeError, TypeError) as error:
                forms[key] = str(error)
        known = forms[key]
        if isinstance(known, str):
            patch.skipped[name] = known
            continue
        eps = next(
            getattr(module, n) for n in ("eps", "variance_epsilon") if isinstance(getattr(module, n, None), float)
        )
        patch._undo.append(set_forward(module, _FusedForward(module, eps, known[0])))
        patch.count += 1
    return patch


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Let `module` compute `forward`; the returned function restores its class's own.

    accelerate's hooks, which bring inputs and offloaded weights to a module's device, call `_old_forward`: they go on.
    """
    own: dict[str, Any] = module.__dict__
    own["_old_forward" if "_hf_hook" in own and "_old_forward" in own else "forward"] = forward

    def undo() -> None:
        if own.get("forward") is forward:
            del own["forward"]
        elif own.get("_old_forward") is forward:
            own["_old_forward"] = types.MethodType(type(module).forward, module)

    return undo
