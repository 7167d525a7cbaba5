"""`accelerate_generate`: every part of the kit on an unmodified Hugging Face model and its own sampler."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_ext.integrations import canvas_decoder, canvas_sampler
from vllm_ext.integrations.canvas_decoder import CanvasDecoder
from vllm_ext.integrations.canvas_sampler import CanvasSampler
from vllm_ext.integrations.capture import CapturedForward, capture
from vllm_ext.integrations.fused_layers import Watched, unsupported
from vllm_ext.integrations.norms import Patch, patch_rms_norms
from vllm_ext.integrations.prompt_encoder import PromptEncoder
from vllm_ext.integrations.qkv import join_projections
from vllm_ext.integrations.quantize import quantize_experts
from vllm_ext.integrations.swap import Report

logger = logging.getLogger(__name__)

# What `generate` passes to a denoising step; anything more is the caller's, and goes to the stock step.
_STEP_ARGUMENTS = frozenset(
    (
        "decoder_forward",
        "current_canvas",
        "argmax_canvas",
        "input_ids",
        "decoder_position_ids",
        "self_conditioning_logits",
        "mask_mapping",
        "past_key_values",
        "finished_denoising",
        "cur_step",
        "sampler",
        "logits_processor",
        "diffusion_stopping_criteria",
    )
)


@dataclass
class Acceleration:
    """What `accelerate_generate` changed; prints as lines.

    experts    the report of the expert swap, None where it was switched off
    norms, projections  modules that now run as one kernel, or share one product
    decoder    "fused layers", "the model's modules", each "captured" or not
    sampler    "fused" or "stock"
    notes      what could not be done, and why
    relative_error  of a forward's logits against the stock modules over the same (quantised) experts; None unless
               `verify` was given
    """

    experts: Report | None = None
    norms: int = 0
    projections: int = 0
    decoder: str = "the model's modules"
    sampler: str = "stock"
    notes: list[str] = field(default_factory=list)
    relative_error: float | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the model's own norms, projections, decoder and sampler. Experts stay in 4 bits."""
        while self._undo:
            self._undo.pop()()

    def __str__(self) -> str:
        lines = [str(self.experts)] if self.experts is not None else ["experts: as they were"]
        lines.append(f"{self.norms} norms as one kernel each, {self.projections} groups of projections as one product")
        lines.append(f"decoder: {self.decoder}; sampler: {self.sampler}")
        if self.relative_error is not None:
            lines.append(f"logits differ from the stock modules' by {self.relative_error:.2e} (relative, in norm)")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def accelerate_generate(
    model: Any,
    *,
    experts: bool = True,
    norms: bool = True,
    projections: bool = True,
    fused_layers: bool = True,
    encoder: bool = False,
    capture: bool = True,
    sampler: bool = True,
    group_sizes: tuple[int, int] = (128, 64),
    ignore: Sequence[str] = (),
    backend: str = "auto",
    progress: bool = True,
    verify: torch.Tensor | None = None,
) -> Acceleration:
    """Make `model.generate()` faster, part by part, without touching the caller's code. For inference.

    experts       routed experts in 4 bits (`quantize_experts` with group_sizes, ignore, backend); skipped with a note
                  where they are already
    norms         each RMSNorm one kernel
    projections   q, k, v one product, gate and up another (merge LoRA adapters first)
    fused_layers  DiffusionGemma: the decoder as seventeen launches a layer; needs norms and projections
    encoder       the same for its encoder, which runs once a canvas
    capture       replay the decoder's forward from a CUDA graph. Models that generate token by token get a static cache
                  instead, with which transformers compiles and captures their forward itself
    sampler       DiffusionGemma: temperature, entropies, argmax and the drawn tokens in one pass over the vocabulary,
                  with stock code's random numbers
    verify        prompt ids [B, T]: compare a forward's logits (a denoising step's, where the model denoises) with the
                  stock modules', see `relative_error`

    Raises ValueError where the experts cannot be quantised (see `quantize_experts`) or `verify` holds no prompts.
    """
    if verify is not None and not (isinstance(verify, torch.Tensor) and verify.dim() == 2 and verify.numel()):
        raise ValueError(
            f"accelerate_generate: verify must be prompt ids [B, T], got {getattr(verify, 'shape', verify)}"
        )
    done = Acceleration()
    if experts:
        try:
            done.experts = quantize_experts(
                model, group_sizes=group_sizes, ignore=ignore, backend=backend, progress=progress
            )
        except ValueError as error:
            if "already in 4 bits" not in str(error):
                raise
            done.notes.append("the experts were in 4 bits already")
    # What PEFT wraps generates through its own methods, which are the ones to replace.
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    denoises = hasattr(model, "_denoising_step") and hasattr(model, "_prepare_denoiser_inputs")
    probe = _probe if denoises else _forward_logits
    stock = None if verify is None else probe(model, verify)
    if norms:
        done.norms = _adopt(done, patch_rms_norms(model), "norms")
    if projections:
        done.projections = _adopt(done, join_projections(model), "projections")
    if denoises:
        fused = fused_layers and norms and projections
        _accelerate_denoising(model, done, fused, capture, sampler)
        if encoder and fused:
            _fuse_encoder(model, done)
    elif capture:
        _use_static_cache(model, done)
    if stock is not None and verify is not None:
        done.relative_error = float((probe(model, verify) - stock).norm() / stock.norm())
    return done


def _adopt(done: Acceleration, patch: Patch, what: str) -> int:
    done._undo.append(patch.undo)
    reasons: dict[str, list[str]] = {}
    for name, reason in patch.skipped.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        done.notes.append(f"{what}: {len(names)} modules as they were ({names[0]}, ...): {reason}")
    return patch.count


def _use_static_cache(model: Any, done: Acceleration) -> None:
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "cache_implementation"):
        done.notes.append("capture: the model does not generate")
        return
    before = config.cache_implementation
    config.cache_implementation = "static"
    done._undo.append(lambda: setattr(config, "cache_implementation", before))
    done.decoder = "the model's modules, static cache"
    if next(model.parameters()).device.type != "cuda":
        done.notes.append("capture: transformers compiles a forward over a static cache on GPUs only")


def _accelerate_denoising(model: Any, done: Acceleration, fused: bool, captured: bool, sampler: bool) -> None:
    devices = {parameter.device for parameter in model.model.decoder.parameters()}
    on_one_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    if captured and not on_one_gpu:
        done.notes.append("capture: a CUDA graph needs a decoder on one GPU; it runs uncaptured")
    captured = captured and on_one_gpu
    if fused:
        reason = canvas_decoder.supports(model)
        if reason is not None:
            done.notes.append(f"fused layers: {reason}")
            fused = False
    steps = _DenoisingSteps(model, fused, captured, sampler)
    for name, method in (("_denoising_step", steps.step), ("_prepare_denoiser_inputs", steps.prepare)):
        setattr(model, name, types.MethodType(method, model))
        done._undo.append(lambda name=name: model.__dict__.pop(name, None))  # type: ignore[misc]
    done.decoder = ("fused layers" if fused else "the model's modules") + (", captured" if captured else "")
    done.sampler = "fused" if sampler else "stock"


def _fuse_encoder(model: Any, done: Acceleration) -> None:
    text_model = getattr(model.model.encoder, "language_model", None)
    reason = "no text encoder" if text_model is None else unsupported(text_model.layers)
    if text_model is None or reason is not None:
        done.notes.append(f"encoder: {reason}")
        return
    text_model.forward = PromptEncoder(text_model)
    done._undo.append(lambda: text_model.__dict__.pop("forward", None))


class _DenoisingSteps:
    """Takes the place of two of `generate`'s methods; whatever it does not know goes to the stock ones."""

    def __init__(self, model: Any, fused: bool, captured: bool, sampler: bool) -> None:
        self.model, self.fused = model, fused
        self.watched = Watched(model.model.decoder, model.lm_head)
        self.stock_step: Any = type(model)._denoising_step
        self.stock_prepare: Any = type(model)._prepare_denoiser_inputs
        self.decoder = CanvasDecoder(model) if fused else None
        self.captured = CapturedForward(model) if captured and not fused else None
        self.graphs = captured and fused
        self.sampler = CanvasSampler() if sampler else None
        self.graph: Any = None
        self.ids = self.positions = self.out = torch.empty(0)

    def prepare(self, model: Any, **inputs: Any) -> Any:
        """`_prepare_denoiser_inputs`: the prompt has been encoded, a canvas begins."""
        prepared = self.stock_prepare(model, **inputs)
        if model is not self.model:
            return prepared
        self._follow_weights()
        canvas, _, masks, _ = prepared
        if self.decoder is not None:
            fresh = self.decoder.load_prefix(inputs["past_key_values"], masks, *canvas.shape)
            self.graph = None if fresh else self.graph
        if self.captured is not None:
            self.captured.new_canvas()
        return prepared

    def _follow_weights(self) -> None:
        """Make anew what was joined from, or captured over, weights that have been moved or replaced since."""
        if not self.watched.changed():
            return
        self.watched = Watched(self.model.model.decoder, self.model.lm_head)
        self.graph = None
        self.captured = self.captured and CapturedForward(self.model)
        if self.fused:
            reason = canvas_decoder.supports(self.model)
            if reason is not None:
                logger.warning("accelerate_generate: the model's own modules run, for fused layers cannot: %s", reason)
            self.decoder = CanvasDecoder(self.model) if reason is None else None

    def step(self, model: Any, **inputs: Any) -> Any:
        """`_denoising_step`. A copy of the model, which has these methods too, takes the stock step."""
        if model is not self.model or set(inputs) - _STEP_ARGUMENTS:
            return self.stock_step(model, **inputs)
        unknown = canvas_sampler.supports(
            inputs["sampler"], inputs["logits_processor"], inputs["diffusion_stopping_criteria"]
        )
        forward = inputs["decoder_forward"] if self.captured is None else self.captured
        if self.decoder is not None:
            forward = self._forward
        if self.sampler is None or unknown is not None:
            return self.stock_step(model, **{**inputs, "decoder_forward": forward})
        canvas = inputs["current_canvas"]
        if self.decoder is not None:
            logits, softcap = self._logits(inputs, canvas, inputs["decoder_position_ids"]), self.decoder.softcap
            processed = self.decoder.processed
        else:
            logits, softcap = self._stock_logits(forward, inputs).flatten(0, 1), None
            processed = torch.empty(
                logits.shape, dtype=model.model.decoder.embed_tokens.weight.dtype, device=canvas.device
            )
        heat = canvas_sampler.temperature(inputs["logits_processor"], inputs["cur_step"])
        found = self.sampler.statistics(logits, softcap, heat, processed)
        if self.decoder is not None and found.log_sum is not None:
            self.decoder.log_sum.copy_(found.log_sum)
        following, argmax, finished = self.sampler.choose(
            found,
            canvas,
            inputs["argmax_canvas"],
            inputs["finished_denoising"],
            inputs["sampler"],
            inputs["diffusion_stopping_criteria"],
            inputs["cur_step"],
        )
        return following, argmax, processed.view(*canvas.shape, -1), finished

    @staticmethod
    def _stock_logits(forward: Any, inputs: dict[str, Any]) -> torch.Tensor:
        out: torch.Tensor = forward(
            decoder_input_ids=inputs["current_canvas"],
            self_conditioning_logits=inputs["self_conditioning_logits"],
            decoder_attention_mask=inputs["mask_mapping"],
            past_key_values=inputs["past_key_values"],
            decoder_position_ids=inputs["decoder_position_ids"],
        ).logits
        return out

    def _logits(self, inputs: dict[str, Any], canvas: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B * L, V] of the fused layers, before the soft cap."""
        decoder = self.decoder
        assert decoder is not None
        given = inputs["self_conditioning_logits"]
        if given is None:
            decoder.start_canvas()
        elif given.data_ptr() != decoder.processed.data_ptr():
            decoder.condition_on(given)
        if not self.graphs or not canvas.is_cuda:
            return decoder.logits(canvas, positions)
        if self.graph is None:
            self.ids, self.positions = canvas.clone(), positions.clone()
            self.graph, self.out = capture(lambda: decoder.logits(self.ids, self.positions), canvas.device)
        self.ids.copy_(canvas)
        self.positions.copy_(positions)
        self.graph.replay()
        return self.out

    def _forward(self, **inputs: Any) -> Any:
        """The fused layers where the stock sampler expects the model's forward."""
        decoder = self.decoder
        assert decoder is not None
        canvas = inputs["decoder_input_ids"]
        raw = self._logits(inputs, canvas, inputs["decoder_position_ids"]).float().view(*canvas.shape, -1)
        return types.SimpleNamespace(logits=torch.tanh(raw / decoder.softcap) * decoder.softcap)


@torch.no_grad()
def _forward_logits(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    given = {"decoder_input_ids": prompt[:, :1]} if model.config.is_encoder_decoder else {}
    logits: torch.Tensor = model(input_ids=prompt, **given).logits
    return logits.float()


@torch.no_grad()
def _probe(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Processed logits of a canvas' second denoising step, through the methods `generate` calls."""
    from transformers import LogitsProcessorList

    config, _ = model._prepare_generation_config(None)
    batch, length, text = prompt.shape[0], model.config.canvas_length, model.config.text_config
    device = prompt.device
    attention = torch.ones_like(prompt, dtype=torch.bool)
    cache = model._prepare_cache_for_generation(
        generation_config=config, batch_size=batch, max_length=prompt.shape[1] + length
    )
    places = torch.arange(prompt.shape[1] + length, dtype=torch.int32, device=device)[None]
    ids, masks = model._prepare_encoder_inputs(
        input_ids=prompt, attention_mask=attention, encoder_position_ids=places[:, : prompt.shape[1]],
        past_key_values=cache, is_prefill=True, canvas_length=length, batch_size=batch,
    )  # fmt: skip
    model.model.encoder(
        input_ids=ids, attention_mask=masks, past_key_values=cache, position_ids=places[:, : prompt.shape[1]]
    )
    chooser = model._prepare_sampler(config)
    canvas, _, mapping, finished = model._prepare_denoiser_inputs(
        decoder_attention_mask=torch.nn.functional.pad(attention, (0, length), value=True), past_key_values=cache,
        sampler=chooser, diffusion_stopping_criteria=None, batch_size=batch, device=device, model_kwargs={},
    )  # fmt: skip
    canvas = (torch.arange(canvas.numel(), device=device).view_as(canvas) * 7919) % text.vocab_size
    logits = None
    for _ in range(2):
        _, _, logits, _ = model._denoising_step(
            decoder_forward=model.forward, current_canvas=canvas, argmax_canvas=canvas, input_ids=prompt,
            decoder_position_ids=places[:, prompt.shape[1] :], self_conditioning_logits=logits, mask_mapping=mapping,
            past_key_values=cache, finished_denoising=finished, cur_step=1, sampler=chooser,
            logits_processor=LogitsProcessorList(), diffusion_stopping_criteria=None,
        )  # fmt: skip
    assert logits is not None
    return logits.float().clone()
