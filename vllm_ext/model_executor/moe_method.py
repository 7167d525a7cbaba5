"""vLLM's MoE methods for routed experts in 4 bits: quantised while a 16-bit checkpoint loads, or loaded packed."""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm_ext import compat
from vllm_ext.model_executor.packed_experts import PackedExpertsLoader, PackedFormat
from vllm_ext.model_executor.report import QuantizationReport
from vllm_ext.ops.moe import CallOptions, PreparedExperts, prepare_experts
from vllm_ext.ops.moe.custom_op import call_experts, encode_call
from vllm_ext.options import Options
from vllm_ext.quantization import QuantizedWeight, Scheme

logger = logging.getLogger("vllm.vllm_ext.quantization")


class _RunsW4A16:
    """The part both methods share: from quantised weights to the layer's parameters, and the layer's computation."""

    prefix: str
    options: Options
    report: QuantizationReport
    tensors: list[tuple[str, torch.dtype | None]]
    meta: str
    hidden_size: int
    dtype: torch.dtype
    compiles_on_call: bool

    def _set_up(self, prefix: str, options: Options, report: QuantizationReport) -> None:
        self.prefix = prefix
        self.options = options
        self.report = report
        self.routes_itself = compat.cpu_router_is_internal()
        self.tensors = []
        self.meta = ""
        self.compiles_on_call = False

    @property
    def is_monolithic(self) -> bool:
        """Whether the method gets router logits instead of topk ids."""
        return self.routes_itself

    @property
    def supports_eplb(self) -> bool:
        """Expert weights can be moved between ranks as rows [local_experts, -1] of each parameter."""
        return True

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: vLLM's modular kernels are not used."""
        return None

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> None:
        """None: under data parallelism vLLM's runner gathers the ranks' tokens and scatters the sums itself."""
        return None

    def _finish(self, layer: Any, w13: QuantizedWeight, w2: QuantizedWeight, dtype: torch.dtype, before: int) -> None:
        """Put the weights into the order the device's kernels read and make them the layer's parameters."""
        activation, interleaved = moe_activation(layer.activation, self.prefix)
        biases = [getattr(getattr(layer, name, None), "data", None) for name in ("w13_bias", "w2_bias")]
        if interleaved and biases[0] is not None:
            biases[0] = separate_rows(biases[0])
        try:
            experts = prepare_experts(
                w13,
                w2,
                w13_bias=biases[0],
                w2_bias=biases[1],
                backend=self.options.moe_backend,
                device=w13.packed.device,
                dtype=dtype,
                # The hint lets a backend join experts into one matrix; EPLB moves each expert by itself.
                top_k=None if compat.uses_eplb(layer) else layer.top_k,
            )
        except RuntimeError as error:
            if self.options.moe_backend == "auto":
                raise
            raise RuntimeError(
                f"w4a16-grouped, layer {self.prefix}: {error}. The option moe_backend asks for it; leave that out for "
                "the fastest that runs here"
            ) from error
        self._adopt(layer, experts, activation)
        layer._already_called_process_weights_after_loading = True
        self.report.add(self.prefix, w2.shape[0], before, w13.nbytes + w2.nbytes)
        rank, ranks = compat.world_rank_and_size()
        if self.report.complete and len(self.report.done) > self.report.announced:
            self.report.announced = len(self.report.done)
            share = f" on rank {rank} of {ranks}" if ranks > 1 else ""
            logger.log(logging.DEBUG if rank else logging.INFO, "%s%s", self.report.summary(experts.backend), share)

    def _adopt(self, layer: Any, experts: PreparedExperts, activation: str) -> None:
        """Register the prepared tensors as the layer's parameters, so that sleep mode, reload and EPLB see them.

        The two main tensors keep the names `w13_weight` and `w2_weight`: under expert parallelism, weights of foreign
        experts are still looked up by those names after this layer is finished.
        """
        from vllm.model_executor.utils import replace_parameter

        renamed = {"w13": "w13_weight", "w2": "w2_weight"}
        moved = compat.uses_eplb(layer)
        self.tensors = []
        for key, tensor in experts.tensors.items():
            name = renamed.get(key, key)
            # NCCL sends no 16-bit integers.
            as_bytes = moved and tensor.dtype == torch.int16
            replace_parameter(layer, name, tensor.view(torch.uint8) if as_bytes else tensor)
            self.tensors.append((name, torch.int16 if as_bytes else None))
        for name in set(renamed.values()) - {name for name, _ in self.tensors}:
            # EPLB views every parameter as [experts, -1], which an empty one does not allow.
            empty = torch.zeros(
                experts.meta.num_experts, 1, dtype=torch.uint8, device=next(iter(experts.tensors.values())).device
            )
            replace_parameter(layer, name, empty)
        call = CallOptions(
            activation=activation,
            swiglu_alpha=_number(getattr(layer, "swiglu_alpha", None), 1.702),
            swiglu_limit=_number(getattr(layer, "swiglu_limit", None), 7.0),
            apply_router_weight_on_input=bool(layer.apply_router_weight_on_input),
            batch_invariant=self.options.batch_invariant or compat.batch_invariance_requested(),
        )
        _, self.meta = encode_call(experts, call)
        self.hidden_size, self.dtype = experts.meta.hidden_size, experts.meta.dtype
        device = next(iter(experts.tensors.values())).device
        self.compiles_on_call = experts.backend == "triton" and device.type == "cuda"

    def run_idle(self, layer: Any, tokens: int) -> None:
        """Run the layer on zeros, its experts evenly loaded, for what a first call does beside computing."""
        device = next(layer.parameters(recurse=False)).device
        experts = int(layer.global_num_experts)
        ids = torch.arange(tokens * layer.top_k, dtype=torch.int32, device=device).remainder(experts)
        ids = ids.view(tokens, layer.top_k)
        x = torch.zeros(tokens, self.hidden_size, dtype=self.dtype, device=device)
        self.apply(layer, x, torch.ones_like(ids, dtype=torch.float32), ids)

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routed experts' output [M, H]; shared experts are run by vLLM's runner."""
        tensors = [
            getattr(layer, name) if dtype is None else getattr(layer, name).view(dtype) for name, dtype in self.tensors
        ]
        return call_experts(x, topk_weights, topk_ids, layer.expert_map, tensors, self.meta)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Route and apply, where vLLM leaves routing to the method."""
        topk_weights, topk_ids = compat.select_experts_on_cpu(layer, x, router_logits)
        return self.apply(layer, x, topk_weights, topk_ids)


class AtLoadMoEMethod(_RunsW4A16, compat.online_moe_method_base()):  # type: ignore[misc]
    """Loads 16-bit experts on the meta device, quantises a layer once its last weight has arrived, and runs it."""

    def __init__(self, layer: Any, prefix: str, scheme: Scheme, options: Options, report: QuantizationReport) -> None:
        super().__init__(layer.moe_config)
        self._set_up(prefix, options, report)
        self.scheme = scheme
        self.without_checkpoint = compat.loads_dummy_weights()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register 16-bit parameters on the meta device, which vLLM fills once all of a layer's weights are there."""
        expert_loader = extra_weight_attrs["weight_loader"]
        extra_weight_attrs["weight_loader"] = load_part_or_whole
        super().create_weights(
            layer, num_experts, hidden_size, intermediate_size_per_partition, params_dtype, **extra_weight_attrs
        )
        for parameter in layer.parameters(recurse=False):
            if hasattr(parameter, "weight_loader"):
                parameter.__class__ = FilledByCopy
                parameter.expert_loader = expert_loader

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the layer's 16-bit experts by 4-bit ones."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        loaded = compat.elements_loaded(layer)
        wanted = sum(tensor.numel() for tensor in layer.parameters(recurse=False) if isinstance(tensor, FilledByCopy))
        if loaded < wanted and not self.without_checkpoint:
            raise ValueError(
                f"w4a16-grouped, layer {self.prefix}: {loaded} of {wanted} elements of its experts arrived; the "
                "checkpoint lacks the others, or the model's loader does not know their names: check it is complete"
            )
        w13, w2 = layer.w13_weight.data, layer.w2_weight.data
        _, interleaved = moe_activation(layer.activation, self.prefix)
        if interleaved:
            w13 = separate_rows(w13)
        before = 2 * (w13.numel() + w2.numel())
        expert_loaders = {name: getattr(layer, name).expert_loader for name in ("w13_weight", "w2_weight")}
        q13 = self.scheme.quantize(w13, "w13", name=f"{self.prefix}.w13_weight")
        q2 = self.scheme.quantize(w2, "w2", name=f"{self.prefix}.w2_weight")
        self._finish(layer, q13, q2, w13.dtype, before)
        # Experts of other ranks may arrive later; vLLM's loader declines them.
        for name, loader in expert_loaders.items():
            getattr(layer, name).weight_loader = loader


class FilledByCopy(torch.nn.Parameter):
    """A parameter on the meta device that loads what a model copies into it.

    Some models (gpt-oss) fill experts by `parameter.copy_(tensor)` and not through its loader; on the meta device that
    does nothing, and nothing would say so.
    """

    weight_loader: Any
    expert_loader: Any

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Load `source`, this rank's part of all experts, whole."""
        if not self.is_meta:
            return super().copy_(source, non_blocking)
        self.weight_loader(self, source)
        return self


def load_part_or_whole(param: Any, loaded_weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """vLLM's loader of one expert's projection; without saying which, all of this rank's experts at once."""
    if args or kwargs:
        return param.expert_loader(param, loaded_weight, *args, **kwargs)
    return param.data.copy_(loaded_weight)


class PackedMoEMethod(_RunsW4A16, compat.moe_method_base()):  # type: ignore[misc]
    """Loads experts that a checkpoint holds in 4 bits; each rank takes its part of every projection, exactly."""

    def __init__(
        self, layer: Any, prefix: str, packed: PackedFormat, options: Options, report: QuantizationReport
    ) -> None:
        super().__init__(layer.moe_config)
        self._set_up(prefix, options, report)
        self.packed = packed
        self.loader: PackedExpertsLoader | None = None
        self.without_checkpoint = compat.loads_dummy_weights()

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters the checkpoint's tensors are loaded into."""
        self.loader = PackedExpertsLoader(
            layer=layer,
            prefix=self.prefix,
            packed=self.packed,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size_per_partition,
            gated=bool(self.moe.is_act_and_mul),
            dtype=params_dtype,
        )
        self.loader.create_parameters(bool(self.moe.has_bias), extra_weight_attrs)

    def load(self, tensor: torch.Tensor, role: str, shard_id: str, expert_id: int) -> None:
        """Take one tensor of one projection of one expert, as vLLM's loaders do."""
        assert self.loader is not None
        self.loader.load(None, tensor, role, shard_id, expert_id)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Check that every tensor has arrived and put the experts into the kernels' order."""
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        assert self.loader is not None
        w13, w2 = self.loader.take(whole=not self.without_checkpoint)
        before = 2 * (w13.shape.numel() + w2.shape.numel())
        self._finish(layer, w13, w2, self.loader.dtype, before)


def separate_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of [E, 2I, ...] from interleaved (gate, up, gate, up, ...) to all gates, then all ups."""
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)


def _number(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def moe_activation(activation: Any, prefix: str) -> tuple[str, bool]:
    """vLLM's activation as our name, and whether a 16-bit checkpoint's gate and up rows are interleaved.

    Raises ValueError, naming the layer, for an activation the kernels do not compute.
    """
    name = str(getattr(activation, "value", activation)).removesuffix("_no_mul")
    if name in ("swigluoai", "swigluoai_uninterleave"):
        return "swigluoai", name == "swigluoai"
    if name == "gelu_pytorch_tanh":
        name = "gelu_tanh"
    supported = ("silu", "gelu", "gelu_tanh", "relu2")
    if name not in supported:
        raise ValueError(
            f"w4a16-grouped, layer {prefix}: activation {name!r} is not supported; supported are "
            f"{', '.join((*supported, 'swigluoai'))}. Serve the model without --quantization w4a16-grouped"
        )
    return name, False
