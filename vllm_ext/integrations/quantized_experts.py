"""The modules that take the place of a Hugging Face layer's experts, one for each way such a module is called."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from vllm_ext.integrations.expert_layouts import Activation, ExpertWeights
from vllm_ext.integrations.layer_graphs import LayerGraphs
from vllm_ext.integrations.plain_order import plain_order
from vllm_ext.ops.moe import PreparedExperts, prepare_experts
from vllm_ext.ops.moe.custom_op import call_experts, encode_call
from vllm_ext.quantization import QuantizedWeight, packed


class _NoBackward(torch.autograd.Function):
    """Gives an output computed without gradients a backward that says why there is none."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, *sources: torch.Tensor) -> torch.Tensor:
        return out.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise RuntimeError(
            "quantize_experts: 4-bit experts serve inference and have no backward; train before quantising, or keep "
            "the layers to be trained through out of it with `ignore`"
        )


class QuantizedExperts(nn.Module):
    """Experts in 4 bits, called with (hidden_states [M, H], top_k_index [M, k], top_k_weights [M, k]).

    An index past the last expert (Hugging Face marks foreign experts by num_experts) or -1 is not routed. The weights
    are buffers in the backend's own order. `state_dict` holds them in the checkpoint's format instead.
    """

    def __init__(
        self, weights: ExpertWeights, w13: QuantizedWeight, w2: QuantizedWeight, *, backend: str, dtype: torch.dtype,
        top_k: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_experts, self.hidden_dim, self.intermediate_dim = w2.shape
        self._describe(weights)
        self.zero_point_kind = w13.zero_point_kind
        # A hint for the layout: with expert parallelism or identity experts the ids of a call are not all local.
        hint = None if weights.identity else top_k
        prepared = prepare_experts(
            w13, w2, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias, backend=backend, dtype=dtype, top_k=hint
        )
        assert weights.options is not None
        _, self.meta = encode_call(prepared, weights.options)
        self.experts_meta = prepared.meta
        self.tensor_names = list(prepared.tensors)
        for name, tensor in prepared.tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._plain: tuple[QuantizedWeight, QuantizedWeight] | None = None
        if plain_order(prepared, w13.zero_point_kind) is None:
            self._plain = (w13, w2)
        self.scale_dtype = w13.scale.dtype
        self._keep_biases(weights)
        # None launches kernel by kernel: `quantize_experts(replay=False)` asks for it, and where experts are called one
        # by one, rows differ from call to call.
        self.graphs: LayerGraphs | None = LayerGraphs() if weights.calling != "each" else None

    def _describe(self, weights: ExpertWeights) -> None:
        self.identity = weights.identity
        self.gated = weights.gated
        self.projections = weights.names if self.gated or len(weights.names) == 2 else weights.names[1:]
        self.saves_itself = weights.calling != "each"
        self.aliases: tuple[str, ...] = ()

    def _keep_biases(self, weights: ExpertWeights) -> None:
        self.stored_biases = list(weights.stored_biases)
        for index, bias in enumerate(weights.stored_biases.values()):
            self.register_buffer(f"stored_bias_{index}", bias, persistent=False)

    @property
    def prepared(self) -> PreparedExperts:
        """The experts as `fused_moe_w4a16` takes them."""
        return PreparedExperts(self.experts_meta, {name: getattr(self, name) for name in self.tensor_names})

    @property
    def nbytes(self) -> int:
        """Bytes of the prepared tensors."""
        return self.prepared.nbytes

    def computed(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[M, H] of the routed experts, launched kernel by kernel."""
        tensors = [getattr(self, name) for name in self.tensor_names]
        out = call_experts(x, top_k_weights, top_k_index, None, tensors, self.meta)
        if self.identity:
            passed = torch.where(top_k_index >= self.num_experts, top_k_weights, 0).sum(-1, keepdim=True)
            out = out + (x * passed).to(out.dtype)
        return out

    def routed(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[M, H] of the routed experts, whatever the way of calling."""
        recording = torch.is_grad_enabled() and (x.requires_grad or top_k_weights.requires_grad)
        if self.graphs is None or torch.compiler.is_compiling() or recording:
            out = self.computed(x, top_k_index, top_k_weights)
        else:
            buffers: Any = self._buffers
            addresses = tuple([buffers[name].data_ptr() for name in self.tensor_names])
            out = self.graphs(self.computed, addresses, x, top_k_index, top_k_weights)
        if recording:
            refused: torch.Tensor = _NoBackward.apply(out.detach(), x, top_k_weights)  # type: ignore[no-untyped-call]
            return refused
        return out

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The experts' output in the shape of `hidden_states`."""
        if hidden_states.dim() == top_k_index.dim() == 2:
            return self.routed(hidden_states, top_k_index, top_k_weights.view(top_k_index.shape))
        x = hidden_states.reshape(-1, self.hidden_dim)
        out = self.routed(x, top_k_index.view(x.shape[0], -1), top_k_weights.view(x.shape[0], -1))
        return out.view(hidden_states.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        if self.graphs is not None:
            self.graphs.clear()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        # Graphs are bound to this process and these addresses: a copy records its own.
        return {**self.__dict__, "graphs": None if self.graphs is None else LayerGraphs()}

    def quantized(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        """(w13, w2) in plain order, exactly what was quantised."""
        if self._plain is not None:
            return self._plain
        found = plain_order(self.prepared, self.zero_point_kind, self.scale_dtype)
        assert found is not None
        return found

    def checkpoint_tensors(self, module: str) -> dict[str, torch.Tensor]:
        """The experts as a `w4a16-grouped` checkpoint stores them: per expert and projection, biases as they are."""
        w13, w2 = self.quantized()
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(self.num_experts):
            tensors.update(self.expert_tensors(f"{module}.{expert}", w13, w2, expert))
        for index, name in enumerate(self.stored_biases):
            tensors[f"{module}.{name}"] = getattr(self, f"stored_bias_{index}")
        return tensors

    def expert_tensors(
        self, module: str, w13: QuantizedWeight, w2: QuantizedWeight, expert: int
    ) -> dict[str, torch.Tensor]:
        """One expert's projections under the module name `module`."""
        tensors: dict[str, torch.Tensor] = {}
        rows = w13.shape[1] // 2 if self.gated else w13.shape[1]
        parts = [_rows(w13, expert, i * rows, rows) for i in range(2 if self.gated else 1)]
        for name, part in zip(self.projections, [*parts, _rows(w2, expert, 0, w2.shape[1])], strict=True):
            tensors.update(packed.to_tensors(f"{module}.{name}", part))
        return tensors

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        module = prefix.removesuffix(".")
        if self.saves_itself and not any(module.endswith(alias) for alias in self.aliases):
            destination.update(self.checkpoint_tensors(module))

    def extra_repr(self) -> str:
        """Sizes, groups and backend."""
        m = self.experts_meta
        return (
            f"{m.num_experts} experts, hidden {m.hidden_size}, intermediate {m.intermediate_size}, 4 bits in groups of "
            f"{m.group_size_w13} and {m.group_size_w2}, {m.zero_point or 'no'} zero points, backend {m.backend}"
        )


def _rows(weight: QuantizedWeight, expert: int, first: int, count: int) -> QuantizedWeight:
    # Copies: a writer of checkpoints looks for tensors that share memory.
    part = slice(first, first + count)
    zero = None if weight.zero_point is None else weight.zero_point[expert, part].clone()
    shape = torch.Size((count, weight.shape[2]))
    return QuantizedWeight(
        weight.packed[expert, part].clone(), weight.scale[expert, part].clone(), zero, weight.group_size, shape
    )


class SortedExperts(QuantizedExperts):
    """Called as Llama 4's: rows come expert by expert, equally many each, already weighted."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[E * T, H] to [E * T, H]."""
        x = hidden_states.reshape(-1, self.hidden_dim)
        ids = torch.arange(self.num_experts, device=x.device, dtype=torch.int32)
        ids = ids.repeat_interleave(x.shape[0] // self.num_experts)[:, None]
        return self.routed(x, ids, torch.ones_like(ids, dtype=torch.float32))


class BlockExperts(QuantizedExperts):
    """Called as DBRX's, which returns [batch, tokens, H] whatever it is given."""

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[B, ..., H] to [B, tokens, H]."""
        out = super().forward(hidden_states, top_k_index, top_k_weights)
        return out.reshape(hidden_states.shape[0], -1, self.hidden_dim)


class LogitExperts(QuantizedExperts):
    """Called with the router's logits; routes as the module it replaces did."""

    def _describe(self, weights: ExpertWeights) -> None:
        super()._describe(weights)
        self.route = weights.route

    def forward(self, hidden_states: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """[M, H] to [M, H]."""
        assert self.route is not None
        ids, weights = self.route(router_logits)
        return super().forward(hidden_states, ids, weights)


class JetMoeExperts(nn.Module):
    """Takes the place of a JetMoE layer, whose sorting of tokens by expert the kernels do themselves."""

    def __init__(self, layer: nn.Module, experts: QuantizedExperts) -> None:
        super().__init__()
        self.router: Any = layer.router
        self.bias = layer.bias
        self.experts = experts

    def forward(self, layer_input: torch.Tensor) -> torch.Tensor:
        """[B, T, H]."""
        x = layer_input.reshape(-1, layer_input.shape[-1])
        top, ids = self.router.layer(x).float().topk(self.router.top_k, dim=1)
        out = self.experts(x, ids, torch.softmax(top, dim=1).type_as(x)) + self.bias
        return out.view(layer_input.shape)


class OneExpert(nn.Module):
    """One expert of a list whose parent calls them one by one: rows in, rows out, weights applied by the parent."""

    def __init__(self, experts: QuantizedExperts, expert: int) -> None:
        super().__init__()
        self.experts = experts
        self.expert = expert

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., H] to [..., H]."""
        x = hidden_states.reshape(-1, self.experts.hidden_dim)
        ids = torch.full((x.shape[0], 1), self.expert, dtype=torch.int32, device=x.device)
        weights = torch.ones_like(ids, dtype=torch.float32)
        return self.experts.routed(x, ids, weights).view(hidden_states.shape)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        w13, w2 = self.experts.quantized()
        destination.update(self.experts.expert_tensors(prefix.removesuffix("."), w13, w2, self.expert))


class DequantizingExperts(QuantizedExperts):
    """For activations no kernel computes: 4 bits in memory, each expert that is hit dequantised for its rows.

    Saves the memory and not the time; the report says which layers run so.
    """

    def __init__(
        self, weights: ExpertWeights, w13: QuantizedWeight, w2: QuantizedWeight, *, backend: str, dtype: torch.dtype,
        top_k: int | None = None,
    ) -> None:  # fmt: skip
        nn.Module.__init__(self)
        self.num_experts, self.hidden_dim, self.intermediate_dim = w2.shape
        self._describe(weights)
        self.compute_dtype = dtype
        self.activation: Activation = weights.activation
        self.groups = (w13.group_size, w2.group_size)
        self.shapes = (w13.shape, w2.shape)
        self.tensor_names = []
        self.graphs = None
        tensors = {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias}
        for name, weight in (("w13", w13), ("w2", w2)):
            tensors |= {
                f"{name}_packed": weight.packed,
                f"{name}_scale": weight.scale,
                f"{name}_zero": weight.zero_point,
            }
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor, persistent=False)
        self._keep_biases(weights)

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and their metadata."""
        return sum(weight.nbytes for weight in self.quantized())

    def quantized(self) -> tuple[QuantizedWeight, QuantizedWeight]:
        """(w13, w2) as they are kept."""
        found = []
        for name, group, shape in zip(("w13", "w2"), self.groups, self.shapes, strict=True):
            parts = [getattr(self, f"{name}_{part}") for part in ("packed", "scale", "zero")]
            found.append(QuantizedWeight(parts[0], parts[1], parts[2], group, shape))
        return found[0], found[1]

    def _one(self, weight: QuantizedWeight, expert: int) -> torch.Tensor:
        return _rows(weight, expert, 0, weight.shape[1]).dequantize(self.compute_dtype)

    def routed(self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """[M, H], expert after expert, slots summed in order."""
        w13, w2 = self.quantized()
        slots = x.new_zeros((*top_k_index.shape, self.hidden_dim))
        for expert in torch.unique(top_k_index).tolist():
            if not 0 <= expert < self.num_experts:
                continue
            token, slot = (top_k_index == expert).nonzero(as_tuple=True)
            biases: list[Any] = [self.w13_bias, self.w2_bias]
            bias = [None if b is None else b[expert].to(x.dtype) for b in biases]
            first = F.linear(x[token], self._one(w13, expert).to(x.dtype), bias[0])
            second = F.linear(self.activation(first), self._one(w2, expert).to(x.dtype), bias[1])
            slots[token, slot] = (second * top_k_weights[token, slot, None]).to(slots.dtype)
        return slots.sum(1)

    def extra_repr(self) -> str:
        """Sizes and groups."""
        return f"{self.num_experts} experts, hidden {self.hidden_dim}, 4 bits, dequantised on the fly"
