"""The transformer: Llama and Qwen-3, with Hugging Face weights in and out.

Set Block Decoding changes nothing here (paper, section 3): it is a mask and a loss. This file
therefore holds no mask, no sampling and no loss; whoever calls it passes `positions` and an
`attend` function, and may read the logits of some positions only.

Shapes: B batch, T tokens of a forward, V vocabulary, H query heads, Hkv key/value heads, D head
dimension, C hidden size.
"""
import dataclasses
import functools
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint

from hf import (PRESETS, ROPE_LLAMA3, TOKENIZER_FILES, find_folder, free_memory, load_tensors, need, preset_mask_id,
                write_whole)
from hf import read_config as read_fields
from kernels.packed_linear import Fusible, Linear, Together


@dataclass
class LlamaConfig:
    """Shape of a model; the fields are those of Hugging Face's config.json, plus `mask_id`."""
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int | None = None           # None: hidden_size / num_attention_heads
    max_position_embeddings: int = 2048   # the context, tokens
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None      # None or the "llama3" scaling of Llama-3.1 and 3.2
    tie_word_embeddings: bool = True
    model_type: str = "llama"             # "llama", or "qwen3" (RMSNorm on each head's q and k)
    bos_token_id: int | None = None
    eos_token_id: int | list | tuple | None = None   # the stop ids
    mask_id: int | None = None            # m of the paper: an id of the vocabulary that text never uses

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), (int | float if field.type is float else field.type)
            need(isinstance(value, kind), f"config: {field.name} is {value!r}, wanted {getattr(kind, '__name__', kind)}")
        V, H, Hkv = self.vocab_size, self.num_attention_heads, self.num_key_value_heads
        sizes = V, H, Hkv, self.hidden_size, self.intermediate_size, self.num_hidden_layers
        need(min(sizes) >= 1, "config: every size must be at least 1")
        need(self.head_dim or self.hidden_size % H == 0,
             f"config: hidden_size {self.hidden_size} is no multiple of num_attention_heads {H}: give head_dim")
        self.head_dim = self.head_dim or self.hidden_size // H
        need(self.model_type in ("llama", "qwen3"), f"config: model_type {self.model_type!r}, wanted llama or qwen3")
        need(H % Hkv == 0, f"config: num_attention_heads {H} is no multiple of num_key_value_heads {Hkv}")
        need(self.head_dim % 2 == 0 < self.head_dim, f"config: head_dim {self.head_dim}, wanted an even one (rotary)")
        need(self.mask_id is None or 0 <= self.mask_id < V, f"mask_id {self.mask_id} is outside the vocabulary, 0 to {V - 1}")

    @property
    def stop_ids(self) -> tuple:
        """Ids that end a text, as a tuple."""
        ids = self.eos_token_id
        return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)

    @classmethod
    def from_pretrained(cls, name_or_dir) -> "LlamaConfig":
        """The config of a preset, a hub id or a folder; ValueError in one line if it cannot be used."""
        if str(name_or_dir) in PRESETS:
            return cls(**PRESETS[str(name_or_dir)][0])
        folder = find_folder(name_or_dir, weights=False)
        return read_config(folder, mask_id=preset_mask_id(name_or_dir))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.size, self.eps = nn.Parameter(torch.ones(size)), (size,), eps
        self.floor = torch.tensor(eps, dtype=torch.float64, device="cpu")

    def forward(self, x):
        weight = self.weight
        x = x.to(weight.dtype)   # float32 under autocast
        if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
            return F.rms_norm(x, self.size, weight, self.eps)
        # The same in half as many kernels as PyTorch has for it on the CPU.
        high = x.float() if x.dtype != torch.float64 else x
        norm = torch.linalg.vector_norm(high, dim=-1, keepdim=True)
        return high.mul(torch.addcmul(self.floor, norm, norm, value=1 / self.size[0]).rsqrt_()).to(x.dtype).mul_(weight)


class Attention(Together):
    names = ("q_proj", "k_proj", "v_proj")

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.qk_norm = c.model_type == "qwen3"
        if self.qk_norm:
            self.q_norm, self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps), RMSNorm(c.head_dim, c.rms_norm_eps)
        self.heads, self.joint = [c.num_attention_heads, c.num_key_value_heads], 1 if self.qk_norm else 2

    def qkv(self, x, cos, sin):
        B, _, T, _ = cos.shape
        *turning, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in self.together(x))   # q and k, or both as one
        if self.qk_norm:
            turning = self.q_norm(turning[0]), self.k_norm(turning[1])
        # Under autocast, norms and angles promote q and k to float32: attention gets one dtype, that of v.
        turned = [rotate(y, cos, sin).to(v.dtype) for y in turning]
        q, k = turned if len(turned) == 2 else turned[0].split_with_sizes(self.heads, 1)
        return q, k, v                                                         # (B, H or Hkv, T, D)


class MLP(Together):
    names = ("gate_proj", "up_proj")

    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x):
        gate, up = self.together(x)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    # Two halves around the attention, so that torch.compile can have both and never sees a mask.
    def before_attention(self, x, cos, sin):
        return self.self_attn.qkv(self.input_layernorm(x), cos, sin)

    def after_attention(self, x, out):
        x = x + self.self_attn.o_proj(out.transpose(1, 2).reshape(len(x), -1))   # out (B, H, T, D)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x, cos, sin, layer, attend):
        return self.after_attention(x, attend(layer, *self.before_attention(x, cos, sin)))


class Llama(nn.Module):
    """Module and parameter names are those of the published weights, so a state dict is a checkpoint."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = c = config
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.model.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size)
        self.tie_weights()
        self.grad_checkpoint = False      # train.py: recompute each layer in backward
        self.graphs = None                # kv_cache.Graphs: decoding replays CUDA graphs of its forwards
        self.compiled = False             # its layers are: they run the weights themselves
        self.folder = None                # where the weights came from: its tokenizer files are saved along
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and not weight.is_meta:   # GPT-2's initialisation: residual branches start small
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 / math.sqrt(2 * c.num_hidden_layers) if residual else 0.02)

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.inference_mode(False)   # the weights stay ones that can be trained
    @torch.no_grad()
    def fuse(self):
        """Lay the matrices out for decoding, which calls this each time: q, k, v and gate, up of each layer as one product
        each, and on x86 in oneDNN's own order, a second copy of the weights. The parameters stay what they are, and what
        becomes of them counts; only a change through .data or NumPy between two forwards of one decoding does not.
        """
        linears = [module for module in self.modules() if type(module) is Linear]
        if any(linear.weight.is_inference() for linear in linears):   # PyTorch does not tell when such a weight changes
            return
        fusible = [module for module in (self.lm_head if self.compiled else self).modules() if isinstance(module, Fusible)]
        new = sum(linear.weight.nbytes for linear in linears) if any(module.made is None for module in fusible) else 0
        if linears and linears[0].weight.device.type == "cpu" and new > free_memory("cpu"):
            return
        joined = {id(getattr(module, name)) for module in fusible if isinstance(module, Together) for name in module.names}
        for module in fusible:
            if id(module) not in joined:
                module.fuse()

    def hidden(self, tokens, positions=None, attend=None):
        """tokens (B, T), positions (T,) or (B, T), default 0..T-1 -> hidden states before the head (B, T, C)."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.model.embed_tokens(tokens.flatten())                           # (B * T, C)
        cos, sin = rotary(self.config, positions.expand_as(tokens), x.dtype)
        for i, layer in enumerate(self.model.layers):
            args = (x, cos, sin, i, attend or causal)
            x = checkpoint(layer, *args, use_reentrant=False) if self.grad_checkpoint and self.training else layer(*args)
        return self.model.norm(x).view(*tokens.shape, -1)

    def forward(self, tokens, positions=None, attend=None, at=None):
        """Logits (B, T, V), float, unnormalised.

        tokens (B, T) ids; positions (T,) or (B, T), default 0..T-1; attend(layer, q (B, H, T, D),
        k, v (B, Hkv, T, D)) -> (B, H, T, D), default plain causal attention. `at`, (n,) or (B, n) indices
        into T, picks the positions whose logits are wanted -> (B, n, V); the head runs on those only.
        """
        x = self.hidden(tokens, positions, attend)
        if at is not None:
            x = x[:, at] if at.dim() == 1 else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
        return self.lm_head(x)

    @classmethod
    def from_pretrained(cls, name_or_dir, device="cpu", dtype=None, mask_id=None) -> "Llama":
        """Load a preset, a hub id `owner/name` or a folder in HF layout; dtype None keeps the stored one.

        Tensors are mapped from the safetensors files and assigned, so no weight is ever held twice.
        Raises ValueError, one line, for anything that cannot be loaded. `mask_id` overrides the stored one.
        """
        folder = find_folder(name_or_dir)
        config = read_config(folder, mask_id=preset_mask_id(name_or_dir), override_mask_id=mask_id)
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(load_tensors(folder, model.state_dict(), config.tie_word_embeddings, device, dtype), assign=True)
        model.tie_weights()
        model.folder = folder
        return model.eval()

    def save_pretrained(self, folder) -> None:
        """Write config.json, generation_config.json, model.safetensors (in the weights' dtype) and the tokenizer
        files of the folder this model came from: an HF folder that transformers and vLLM load.

        Each file is written aside, flushed to disk and renamed: a kill leaves whole files only, and weights
        mapped from this very folder stay valid.
        """
        folder, config = Path(folder), self.config
        folder.mkdir(parents=True, exist_ok=True)
        weights = {name: weight.contiguous() for name, weight in self.state_dict().items()
                   if not (config.tie_word_embeddings and name == "lm_head.weight")}
        raw = {key: value for key, value in dataclasses.asdict(config).items() if value is not None} | dict(
            architectures=["Qwen3ForCausalLM" if config.model_type == "qwen3" else "LlamaForCausalLM"], hidden_act="silu",
            attention_bias=False, torch_dtype=str(self.lm_head.weight.dtype).removeprefix("torch."))
        generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if key in raw}
        write_whole(folder / "model.safetensors", lambda path: save_file(weights, path, metadata={"format": "pt"}))
        for shard in (folder / "model.safetensors.index.json", *folder.glob("model-*-of-*.safetensors")):
            shard.unlink(missing_ok=True)   # of what stood here before: some loaders prefer them
        for name, value in (("config.json", raw), ("generation_config.json", generation)):
            write_whole(folder / name, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))
        if self.folder and Path(self.folder).resolve() != folder.resolve():
            for source in (Path(self.folder) / name for name in TOKENIZER_FILES):
                if source.is_file():
                    write_whole(folder / source.name, lambda path: shutil.copyfile(source, path))


def compile_layers(model: Llama, dynamic=None) -> Llama:
    """torch.compile both halves of every layer; the attention between them, which sees block sizes, stays out."""
    for layer in model.model.layers:
        layer.before_attention = torch.compile(layer.before_attention, dynamic=dynamic)
        layer.after_attention = torch.compile(layer.after_attention, dynamic=dynamic)
    model.compiled = True
    return model


@functools.lru_cache
@torch.inference_mode(False)
def rotary_frequency(head_dim, theta, llama3, dtype, device):
    """(D,) radians a position, negative in the first half of a head; the same for every forward, so computed once."""
    half = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    frequency = 1 / theta ** (half / head_dim)
    factor, low, high, context = llama3
    if factor is not None:   # "llama3": slow waves are stretched by `factor`, fast ones kept, smooth in between
        turns = context * frequency / (2 * math.pi)   # in the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / factor)
    return torch.cat((-frequency, frequency))


def rotary(config: LlamaConfig, positions, dtype):
    """Cosines and signed sines of the rotary angles of positions (B, T), each (B, 1, T, D), in `dtype`.

    The half-rotated layout of the published weights: dimension i turns together with i + D/2. Angles are
    taken in float32 as when the weights were trained, in float64 for a float64 model.
    """
    high = torch.float64 if dtype == torch.float64 else torch.float32
    s = config.rope_scaling or {}
    make = rotary_frequency if type(positions) is torch.Tensor else rotary_frequency.__wrapped__   # a FakeTensor is never kept
    frequency = make(config.head_dim, config.rope_theta, tuple(s.get(key) for key in ROPE_LLAMA3), high, positions.device)
    angle = positions.view(-1, 1, positions.shape[-1], 1).to(high) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """x (B, heads, T, D) turned by its position: rolling by D/2 swaps the halves, `sin` carries the sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal(layer, q, k, v):
    """The default `attend`: every token sees itself and all tokens before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def read_config(folder, mask_id=None, override_mask_id=None) -> LlamaConfig:
    """The config of a folder; ValueError in one line if it cannot be used."""
    fields = read_fields(folder, [f.name for f in dataclasses.fields(LlamaConfig)], mask_id, override_mask_id)
    try:
        return LlamaConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from None
