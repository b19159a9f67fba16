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
import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint


def need(good, message: str) -> None:
    """ValueError with one line unless `good`."""
    if not good:
        raise ValueError(message)


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


def preset(family, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, hub_id, **other):
    return dict(family, hidden_size=hidden_size, intermediate_size=intermediate_size, num_hidden_layers=num_hidden_layers,
                num_attention_heads=num_attention_heads, **other), hub_id


# Names for the published models: their shape (as in their config.json) and their hub id. The mask ids
# are ids of the vocabulary that no text produces.
LLAMA3 = dict(vocab_size=128256, rope_theta=500000.0, num_key_value_heads=8, max_position_embeddings=131072,
              bos_token_id=128000, eos_token_id=[128001, 128008, 128009], mask_id=128002, tie_word_embeddings=False)
LLAMA3_1 = dict(LLAMA3, rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                          original_max_position_embeddings=8192))
LLAMA3_2 = dict(LLAMA3_1, rope_scaling=dict(LLAMA3_1["rope_scaling"], factor=32.0), tie_word_embeddings=True)
QWEN3 = dict(model_type="qwen3", vocab_size=151936, rope_theta=1000000.0, num_key_value_heads=8, head_dim=128,
             rms_norm_eps=1e-6, max_position_embeddings=40960, bos_token_id=151643, eos_token_id=[151645, 151643],
             mask_id=151935, tie_word_embeddings=True)
SMOLLM2 = dict(vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, bos_token_id=1, eos_token_id=2,
               mask_id=4)
PRESETS = {   # name: family, hidden, intermediate, layers, heads, hub id
    "llama3.1-8b": preset(LLAMA3_1, 4096, 14336, 32, 32, "meta-llama/Llama-3.1-8B-Instruct"),
    "llama3.1-70b": preset(LLAMA3_1, 8192, 28672, 80, 64, "meta-llama/Llama-3.1-70B-Instruct"),
    "llama3.2-1b": preset(LLAMA3_2, 2048, 8192, 16, 32, "meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2-3b": preset(LLAMA3_2, 3072, 8192, 28, 24, "meta-llama/Llama-3.2-3B-Instruct"),
    "qwen3-0.6b": preset(QWEN3, 1024, 3072, 28, 16, "Qwen/Qwen3-0.6B"),
    "qwen3-8b": preset(dict(QWEN3, tie_word_embeddings=False), 4096, 12288, 36, 32, "Qwen/Qwen3-8B"),
    "smollm2-135m": preset(SMOLLM2, 576, 1536, 30, 9, "HuggingFaceTB/SmolLM2-135M-Instruct", num_key_value_heads=3),
    "smollm2-360m": preset(SMOLLM2, 960, 2560, 32, 15, "HuggingFaceTB/SmolLM2-360M-Instruct", num_key_value_heads=5),
    "smollm2-1.7b": preset(dict(SMOLLM2, rope_theta=130000.0), 2048, 8192, 24, 32,
                           "HuggingFaceTB/SmolLM2-1.7B-Instruct", num_key_value_heads=32),
    # The paper's ablation model (Table 2, Fig. 4): 28 layers, hidden 3072; no weights were published.
    "sbd-3b": preset(dict(LLAMA3, tie_word_embeddings=True), 3072, 8192, 28, 24, None),
    # The shape of the shipped checkpoints/tiny-*, for data/word_problems' tokenizer.
    "tiny": (dict(vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
                  num_key_value_heads=6, max_position_embeddings=2048, eos_token_id=510, mask_id=511), None),
    "tiny-draft": (dict(vocab_size=512, hidden_size=96, intermediate_size=256, num_hidden_layers=2, num_attention_heads=3,
                        num_key_value_heads=3, max_position_embeddings=2048, eos_token_id=510, mask_id=511), None),
}


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


def pack(weight):
    """A copy of weight (out, in) in the order in which oneDNN reads it; None where there is none, off x86 for one.

    A product of 1 to 48 rows takes about half the time of F.linear with it, in float32 and in bfloat16.
    """
    if weight.device.type != "cpu" or weight.nbytes % 8 or platform.machine() not in ("x86_64", "AMD64") or not all(
            hasattr(torch.ops.mkldnn, op) for op in ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")):
        return None
    known = weight.dtype == torch.float32 or weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.ops.mkldnn._reorder_linear_weight(weight) if known else None


def packed_linear(x, packed):
    """x (..., in) -> (..., out). It knows no gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def checksum(weight):
    """Every changed bit changes it: the bits, 8 bytes at a time, summed modulo 2^64; as fast as memory is read."""
    flat = weight.detach().flatten()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return int(flat.view(torch.int64).sum())


def state(linear, packed):
    """What a copy of a linear's weight is a copy of. The weight's memory is held, so that its address stays its own."""
    weight = linear.weight
    return weight.detach(), weight.data_ptr(), weight._version, checksum(weight) if packed else None


def unchanged(linear, since, look=False):
    """Whether nothing stands between a linear and the weight it had: not replaced, changed in place, wrapped, hooked.

    Asked for every linear in every decoding forward, hence past nn.Module's slow attribute look-up. PyTorch does not count
    changes through .data, NumPy and its fused optimizers: `look`, once a decoding, sees those too.
    """
    weight = linear._parameters.get("weight")
    return (weight is not None and weight.data_ptr() == since[1] and weight._version == since[2] and type(linear) is Linear
            and not linear._forward_hooks and not linear._forward_pre_hooks and "forward" not in linear.__dict__
            and (not look or since[3] is None or checksum(weight) == since[3]))


class Fusible(nn.Module):
    """A module with something that `fuse` made for decoding. A copy or move of the module has to make its own."""
    made = None

    def usable(self):
        """What was made, where it may stand in for the weights: in inference mode alone."""
        if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        return self.made

    def _apply(self, fn, recurse=True):
        self.made = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return self.__dict__ | dict(made=None)


class Linear(Fusible, nn.Linear):
    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def fuse(self):
        if type(self) is Linear and (self.made is None or not unchanged(self, self.made[1], look=True)):
            packed = pack(self.weight)
            self.made = None if packed is None else (packed, state(self, True))

    def forward(self, x):
        made = self.usable()
        return packed_linear(x, made[0]) if made and unchanged(self, made[1]) else F.linear(x, self.weight)


class Together(Fusible):
    """Linears of one input, named by `names`, that decoding runs as one product where `fuse` has laid them out so."""
    names, joint = (), 1

    def is_fused(self, look=False):
        """Whether the weights still are those of the one product."""
        return self.made is not None and all(self._modules[name] is linear and unchanged(linear, since, look)
                                             for name, linear, since in self.made[3])

    def fuse(self):
        """Lay the weights out as one matrix: a packed copy where there is one, else a matrix of which they become views."""
        linears = [getattr(self, name) for name in self.names]
        if self.is_fused(look=True) or not all(type(linear) is Linear for linear in linears) or len({linear.weight.dtype for linear in linears}) > 1:
            return
        sizes, matrix = [linear.out_features for linear in linears], torch.cat([linear.weight for linear in linears])
        packed = pack(matrix)
        if packed is None:
            for linear, part in zip(linears, matrix.split(sizes)):
                linear.weight.data = part
        parts = [(name, linear, state(linear, packed is not None)) for name, linear in zip(self.names, linears)]
        product, what = (F.linear, matrix) if packed is None else (packed_linear, packed)
        self.made = product, what, [sum(sizes[:self.joint]), *sizes[self.joint:]], parts

    def together(self, x):
        """x (N, C) through each of the linears; once fused, the first `joint` of them come as one."""
        made = self.usable()
        if made is None or not self.is_fused():
            return [getattr(self, name)(x) for name in self.names]
        product, matrix, sizes, _ = made
        return product(x, matrix).split_with_sizes(sizes, -1)


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
        model.load_state_dict(load_tensors(folder, model.state_dict(), config, device, dtype), assign=True)
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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json")


def compile_layers(model: Llama, dynamic=None) -> Llama:
    """torch.compile both halves of every layer; the attention between them, which sees block sizes, stays out."""
    for layer in model.model.layers:
        layer.before_attention = torch.compile(layer.before_attention, dynamic=dynamic)
        layer.after_attention = torch.compile(layer.after_attention, dynamic=dynamic)
    model.compiled = True
    return model


ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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


def preset_mask_id(name):
    """The mask id that a preset, or the hub id behind one, stands for; None for any other name."""
    return next((kw["mask_id"] for key, (kw, hub) in PRESETS.items() if str(name) in (key, hub)), None)


def find_folder(name_or_dir, weights=True) -> Path:
    """The local folder of a preset, hub id or path; downloads (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE apply)."""
    name = str(name_or_dir)
    if name and Path(name).is_dir():
        unfinished = sorted(Path(name).glob("step-*")) if not (Path(name) / "config.json").exists() else []
        return unfinished[-1] if unfinished else Path(name)   # a training run under way: its newest checkpoint
    hub_id = PRESETS[name][1] if name in PRESETS else name
    need(hub_id is not None, f"{name} has no published weights: use it as a shape only")
    parts = hub_id.split("/")
    need(len(parts) == 2 and all(parts) and parts[0] not in (".", "..", "~"),
         f"{name!r} is no folder here, no preset ({', '.join(PRESETS)}) and no hub id owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    patterns = ["*.json", "*.model", "*.jinja"] + (["*.safetensors"] if weights else [])
    try:
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=["original/*", "onnx/*"]))
    except GatedRepoError:
        raise ValueError(f"{hub_id} is gated: accept its licence on huggingface.co, then set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ValueError(f"{hub_id} is not on the hub, or private: check the name, or set HF_TOKEN") from None
    except Exception as error:   # offline, no route, time-out: the hub's client raises many kinds
        raise ValueError(f"{hub_id} is no folder here, is not in the hub's cache and could not be downloaded "
                         f"({type(error).__name__}): check the name, the connection and HF_HUB_OFFLINE") from None


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not readable JSON ({error}): download or write it again") from None
    need(isinstance(value, dict), f"{path} holds a {type(value).__name__}, wanted a JSON object")
    return value


def read_config(folder: Path, mask_id=None, override_mask_id=None) -> LlamaConfig:
    """config.json in the older (rope_theta, rope_scaling) or newer (rope_parameters) form -> LlamaConfig.

    `mask_id` stands in where the file stores none, `override_mask_id` replaces what it stores.
    """
    path = Path(folder) / "config.json"
    need(path.is_file(), f"{folder} has no config.json: wanted a folder in Hugging Face layout (config.json, *.safetensors)")
    raw = read_json(path)
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    need(isinstance(rope, dict), f"{path} gives {rope!r} as its rope parameters, wanted a JSON object")
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    partial = rope.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    sliding = raw.get("use_sliding_window") or "sliding_attention" in (raw.get("layer_types") or ())
    for bad, what in (
            (raw.get("model_type") not in ("llama", "qwen3"), f"model_type {raw.get('model_type')!r}"),
            (raw.get("attention_bias") or raw.get("mlp_bias"), "biases in attention or MLP"),
            (sliding, "sliding window attention"),
            (raw.get("hidden_act", "silu") != "silu", f"hidden_act {raw.get('hidden_act')!r}"),
            (raw.get("quantization_config"), "quantized weights"),
            (partial != 1.0, "partial rotary positions"),
            (rope_type not in ("default", "llama3"), f"rope type {rope_type!r}"),
            (rope_type == "llama3" and not all(isinstance(rope.get(key), int | float) for key in ROPE_LLAMA3),
             f"rope type llama3 without all of {', '.join(ROPE_LLAMA3)}")):
        need(not bad, f"{path} asks for {what}; wanted plain Llama or Qwen-3 (no bias, full attention, rope default "
                      "or llama3): use another checkpoint")
    config = {f.name: raw[f.name] for f in dataclasses.fields(LlamaConfig) if raw.get(f.name) is not None}
    for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        need(key in config, f"{path} gives no {key}: it is not the config of a Llama or Qwen-3")
    config = dict(num_key_value_heads=raw["num_attention_heads"], tie_word_embeddings=False, rms_norm_eps=1e-6,
                  head_dim=128 if raw["model_type"] == "qwen3" else None) | config   # as transformers, where it is silent
    config["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    config["rope_scaling"] = {"rope_type": rope_type} | {k: rope[k] for k in ROPE_LLAMA3} if rope_type == "llama3" else None
    generation = path.with_name("generation_config.json")   # instruct models list all their stop ids only there
    if generation.is_file() and (eos := read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    config["mask_id"] = config.get("mask_id", mask_id) if override_mask_id is None else override_mask_id
    try:
        return LlamaConfig(**config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_tensors(folder: Path, wanted: dict, config: LlamaConfig, device, dtype) -> dict:
    """name -> tensor for every name of `wanted` (a meta state dict); the files' headers are checked first."""
    index, shards = folder / "model.safetensors.index.json", ["model.safetensors"]
    if not (folder / shards[0]).is_file():
        need(index.is_file(), f"{folder} has no model.safetensors and no {index.name}: only safetensors are loaded")
        weight_map = read_json(index).get("weight_map")
        need(isinstance(weight_map, dict) and weight_map, f"{index} has no weight_map (tensor: shard): download it again")
        shards = sorted(set(map(str, weight_map.values())))
    head_is_tied = lambda name: config.tie_word_embeddings and name == "lm_head.weight"
    files, shapes, dtypes = {}, {}, {}   # each by tensor name; the files are open, their tensors not read yet
    for path in (folder / shard for shard in shards):
        need(path.is_file(), f"{folder} lacks the shard {path.name} that {index.name} names: download it again")
        try:
            file = safe_open(path, framework="pt", device=str(device))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is corrupt or cut short ({str(error).splitlines()[0]}): download it again") from None
        for name in file.keys():
            if not head_is_tied(name) and not name.endswith("rotary_emb.inv_freq"):
                header = file.get_slice(name)
                files[name], shapes[name], dtypes[name] = file, tuple(header.get_shape()), header.get_dtype()
                need(dtypes[name] in FLOATS, f"{path}: {name} is stored as {dtypes[name]}, wanted one of "
                                             f"{', '.join(FLOATS)}: use a checkpoint that is not quantized")
    wanted = {name: tuple(tensor.shape) for name, tensor in wanted.items() if not head_is_tied(name)}
    advice = "its weights and config.json do not belong together"
    for problem, names in (("lacks the tensor", sorted(wanted.keys() - shapes.keys())),
                           ("has the unexpected tensor", sorted(shapes.keys() - wanted.keys()))):
        need(not names, f"{folder} {problem} {', '.join(names[:1])} ({len(names)} in all): {advice}")
    for name, shape in wanted.items():
        need(shapes[name] == shape, f"{folder}: {name} has shape {shapes[name]}, config.json asks for {shape}: {advice}")
    dtype = dtype or FLOATS[dtypes["model.embed_tokens.weight"]]
    total, free = sum(map(math.prod, shapes.values())) * dtype.itemsize, free_memory(device)   # bytes
    need(total <= free, f"{folder} needs {total / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, "
         f"{device} has {free / 2**30:.1f} GiB free: use a smaller model or dtype, or another device")
    # On the CPU, a tensor of the stored dtype stays a view of the mapped file; a converted one replaces its source.
    tensors = {name: file.get_tensor(name).to(dtype) for name, file in files.items()}
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def free_memory(device) -> float:
    """Bytes that weights may take on `device`; infinite where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(torch.device(device))[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return math.inf


def write_whole(path: Path, write) -> None:
    """Call write(temporary path), flush to disk, rename: the file at `path` is the old or the new one, whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)   # what a full disk or Ctrl-C left
