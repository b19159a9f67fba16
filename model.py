"""The transformer: Llama and Qwen-3, with Hugging Face weights in and out.

Set Block Decoding changes nothing here (paper, section 3): it is a mask and a loss. This file
therefore holds no mask, no sampling and no loss; whoever calls it passes `positions` and an
`attend` function, and may read the logits of some positions only.

Shapes: B batch, T tokens of a forward, V vocabulary, H query heads, Hkv key/value heads, D head
dimension, C hidden size.
"""
import dataclasses
import functools
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from adapter import base_of, embedded, load as load_adapter, open_gate, through
from hf import (PRESETS, ROPE_LLAMA3, check_config, find_folder, free_memory, load_tensors, preset_mask_id,
                read_config, save_folder)
from kernels.packed_linear import Linear, fuse, rms_norm


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
        check_config(vars(self))   # every field, nested values too
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def stop_ids(self) -> tuple:
        """Ids that end a text, as a tuple."""
        ids = self.eos_token_id
        return tuple(ids) if isinstance(ids, (list, tuple)) else () if ids is None else (ids,)

    @classmethod
    def from_pretrained(cls, name_or_dir) -> "LlamaConfig":
        """The config of a preset, a hub id or a folder; ValueError in one line if it cannot be used."""
        name_or_dir, folder, mask_id = base_of(name_or_dir)
        if folder:
            return dataclasses.replace(cls.from_pretrained(name_or_dir), mask_id=mask_id)
        if str(name_or_dir) in PRESETS:
            return cls(**PRESETS[str(name_or_dir)][0])
        return cls.from_folder(find_folder(name_or_dir, weights=False), preset_mask_id(name_or_dir))

    @classmethod
    def from_folder(cls, folder, default_mask_id=None, mask_id=None) -> "LlamaConfig":
        """The config of a folder. `default_mask_id`: where it stores none; `mask_id`: whatever it stores."""
        fields = read_config(folder, default_mask_id, mask_id)
        try:
            return cls(**fields)
        except ValueError as error:
            raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from None


@functools.lru_cache
@torch.inference_mode(False)
def rotary_frequency(head_dim, theta, llama3, dtype, device):
    """(D,) radians a position, negative in the first half of a head; the same for every forward: kept."""
    half = torch.arange(0, head_dim, 2, dtype=dtype, device=device)
    frequency = 1 / theta ** (half / head_dim)
    factor, low, high, context = llama3
    if factor is not None:   # "llama3": slow waves are stretched by `factor`, fast ones kept
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
    llama3 = tuple((config.rope_scaling or {}).get(key) for key in ROPE_LLAMA3)
    keep = type(positions) is torch.Tensor   # a FakeTensor is not
    make = rotary_frequency if keep else rotary_frequency.__wrapped__
    frequency = make(config.head_dim, config.rope_theta, llama3, high, positions.device)
    angle = positions.view(-1, 1, positions.shape[-1], 1).to(high) * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x, cos, sin):
    """x (B, heads, T, D) turned by its position: rolling by D/2 swaps the halves, `sin` carries the sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


def causal(layer, q, k, v):
    """The default `attend`: every token sees itself and all tokens before it."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps
        self.floor = torch.tensor(eps, dtype=torch.float64, device="cpu")

    def forward(self, x):
        weight = self.weight
        return rms_norm(x.to(weight.dtype), weight, self.eps, self.floor)   # float32 under autocast


class Attention(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = Linear(c.hidden_size, c.num_attention_heads * c.head_dim)
        self.k_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.v_proj = Linear(c.hidden_size, c.num_key_value_heads * c.head_dim)
        self.o_proj = Linear(c.num_attention_heads * c.head_dim, c.hidden_size)
        self.qk_norm = c.model_type == "qwen3"
        if self.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        # Where no norm comes between, q and k may come as one tensor and are rotated together.
        self.heads, self.joint = [c.num_attention_heads, c.num_key_value_heads], 1 if self.qk_norm else 2

    def qkv(self, x, cos, sin, gate):
        B, _, T, _ = cos.shape
        parts = through(x, self.q_proj, self.k_proj, self.v_proj, gate=gate, joint=self.joint)
        *turning, v = (y.view(B, T, -1, self.head_dim).transpose(1, 2) for y in parts)
        if self.qk_norm:
            turning = self.q_norm(turning[0]), self.k_norm(turning[1])
        # Under autocast, norms and angles promote q and k to float32: attention gets one dtype, that of v.
        turned = [rotate(y, cos, sin).to(v.dtype) for y in turning]
        q, k = turned if len(turned) == 2 else turned[0].split_with_sizes(self.heads, 1)
        return q, k, v                                                         # (B, H or Hkv, T, D)


class MLP(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size)

    def forward(self, x, g=None):
        gate, up = through(x, self.gate_proj, self.up_proj, gate=g)
        return through(F.silu(gate) * up, self.down_proj, gate=g)[0]


class Layer(nn.Module):
    def __init__(self, c: LlamaConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c)

    # Two halves around the attention, so that torch.compile can have both and never sees a mask.
    # gate: which rows the adapter acts on (method section 11), None where there is none.
    def before_attention(self, x, cos, sin, gate=None):
        return self.self_attn.qkv(self.input_layernorm(x), cos, sin, gate)

    def after_attention(self, x, out, gate=None):
        out = out.transpose(1, 2).reshape(len(x), -1)                        # out was (B, H, T, D)
        x = x + through(out, self.self_attn.o_proj, gate=gate)[0]
        return x + self.mlp(self.post_attention_layernorm(x), gate)

    def forward(self, x, cos, sin, layer, attend, gate=None):
        return self.after_attention(x, attend(layer, *self.before_attention(x, cos, sin, gate)), gate)


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
        self.adapter = self.mask_embedding = None   # adapter.py: what adapter.json records, and e_m
        self.folder = None                # where the weights came from: its tokenizer files are saved along
        small = 0.02 / math.sqrt(2 * c.num_hidden_layers)   # as in GPT-2, where residual branches begin
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and not weight.is_meta:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=small if residual else 0.02)

    def tie_weights(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def fuse(self):
        """Lay the matrices out for decoding, which calls this each time. Compiled layers keep the weights."""
        fuse(self.lm_head if self.compiled else self, free_memory("cpu"))

    def hidden(self, tokens, positions=None, attend=None, gate=None):
        """tokens (B, T), positions (T,) or (B, T), default 0..T-1 -> (B, T, C), before the head."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        gate = None if self.adapter is None else open_gate(gate, self.compiled or self.graphs is not None)
        x = self.model.embed_tokens(tokens.flatten())                           # (B * T, C)
        x = embedded(self, x, tokens.flatten(), gate)
        cos, sin = rotary(self.config, positions.expand_as(tokens), x.dtype)
        recompute = self.grad_checkpoint and self.training
        for i, layer in enumerate(self.model.layers):
            args = (x, cos, sin, i, attend or causal, gate)
            x = checkpoint(layer, *args, use_reentrant=False) if recompute else layer(*args)
        return self.model.norm(x).view(*tokens.shape, -1)

    def forward(self, tokens, positions=None, attend=None, at=None, gate=None):
        """Logits (B, T, V), float, unnormalised.

        tokens (B, T) ids; positions (T,) or (B, T), default 0..T-1; attend(layer, q (B, H, T, D),
        k, v (B, Hkv, T, D)) -> (B, H, T, D), default plain causal attention. `at`, (n,) or (B, n) indices
        into T, picks the positions whose logits are wanted -> (B, n, V); the head runs on those only.
        gate (B, T) bool: the tokens that an adapter acts on (g, method section 11), True: all; default none.
        """
        x = self.hidden(tokens, positions, attend, gate)
        if at is not None:
            x = x[:, at] if at.dim() == 1 else x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))
        return self.lm_head(x)

    @classmethod
    def from_pretrained(cls, name_or_dir, device="cpu", dtype=None, mask_id=None, adapter=None) -> "Llama":
        """Load a preset, a hub id `owner/name` or a folder in HF layout; dtype None keeps the stored one.

        adapter: the folder of a gated adapter that acts beside it; in place of a base's name, such a folder
        brings the base that it names.

        Tensors are mapped from the safetensors files and assigned, so no weight is ever held twice.
        Raises ValueError, one line, for anything that cannot be loaded. `mask_id` overrides the stored one.
        """
        name_or_dir, adapter, default = base_of(name_or_dir, adapter)
        mask_id = default if mask_id is None else mask_id
        folder = find_folder(name_or_dir)
        config = LlamaConfig.from_folder(folder, preset_mask_id(name_or_dir), mask_id)
        with torch.device("meta"):
            model = cls(config)
        weights = load_tensors(folder, model.state_dict(), config.tie_word_embeddings, device, dtype)
        config.tie_word_embeddings = weights["lm_head.weight"] is weights["model.embed_tokens.weight"]
        model.load_state_dict(weights, assign=True)
        model.tie_weights()
        model.folder = folder
        if adapter:
            load_adapter(model, adapter)
        return model.eval()

    def save_pretrained(self, folder) -> None:
        """Write a folder that transformers and vLLM load: config.json, generation_config.json,
        model.safetensors (in the weights' dtype), and the tokenizer files of where this model came from. An
        adapter is not merged into the weights: adapter.save writes it.
        """
        base = {name: weight for name, weight in self.state_dict().items()
                if "low_rank" not in name and name != "mask_embedding"}
        save_folder(Path(folder), dataclasses.asdict(self.config), base, self.folder)


def compile_layers(model: Llama, dynamic=None) -> Llama:
    """torch.compile both halves of every layer; the attention between them sees block sizes and stays out."""
    for layer in model.model.layers:
        layer.before_attention = torch.compile(layer.before_attention, dynamic=dynamic)
        layer.after_attention = torch.compile(layer.after_attention, dynamic=dynamic)
    model.compiled = True
    return model
