"""The gated adapter (method section 11): the published model, unchanged, drafts its own text.

    y = W x + g (alpha / r) B A x              for every linear map of every layer

g = 1 for the tokens of blocks, 0 for causal tokens: their states, keys and values stay the base model's,
whatever A, B and e_m are. So verified decoding gives the base model's own text, and the adapter decides only
in how many forwards. A mask token of a block is embedded as e_m; norms, table and head are the base's. An
adapter is never merged into the weights: a merged model is another model, with another text.

Shapes: N rows of a forward (B * T), C hidden size, r rank; A (r, in), B (out, r), e_m (C,).
"""
import hashlib
import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf import need, newest_with, read_json, shards, shown, write_whole
from kernels.packed_linear import add_low_rank, together

WEIGHTS, ABOUT = "adapter.safetensors", "adapter.json"


class LowRank(nn.Module):
    """A and B of one linear map; B = 0, so a new adapter changes nothing."""

    def __init__(self, linear, rank: int, scale: float):
        super().__init__()
        W = linear.weight
        kind = dict(device=W.device, dtype=torch.promote_types(W.dtype, torch.float32))
        self.A = nn.Parameter(torch.randn(rank, W.shape[1], **kind) / math.sqrt(W.shape[1]))
        self.B = nn.Parameter(torch.zeros(len(W), rank, **kind))
        self.scale = scale   # alpha / r
        self.made = None     # kernels/packed_linear.py: A and B laid out for decoding


def linears(model):
    """(name, linear) of every map that an adapter acts on."""
    return [(f"model.layers.{name}", m) for name, m in model.model.layers.named_modules()
            if isinstance(m, nn.Linear)]


def attach(model, rank: int, alpha=None) -> list:
    """Give the model a new adapter and freeze its own weights -> the trained parameters: A, B and e_m.

    alpha: by default the rank. e_m starts as the table's mean row, scaled to the rows' mean norm.
    """
    need(rank >= 1, f"adapter rank {rank}: wanted 1 or more")
    need(model.adapter is None, "the model has an adapter: detach it first")
    need(model.config.mask_id is not None, "the model's config has no mask_id: set one first")
    alpha = rank if alpha is None else alpha
    model.requires_grad_(False)
    for _, linear in linears(model):
        linear.low_rank = LowRank(linear, rank, alpha / rank)
    table = model.model.embed_tokens.weight.float()
    mean = table.mean(0)
    e_m = mean * (table.norm(dim=1).mean() / mean.norm().clamp(min=1e-12))
    model.mask_embedding = nn.Parameter(e_m.to(linear.low_rank.A.dtype))
    model.adapter = dict(rank=rank, alpha=alpha, mask_id=model.config.mask_id)
    return list(tensors(model).values())


def detach(model) -> None:
    """Take the adapter away: the model is its base again."""
    for _, linear in linears(model):
        linear.low_rank = None
    model.adapter = model.mask_embedding = None
    model.requires_grad_(True)


def tensors(model) -> dict:
    """name -> parameter of the adapter."""
    named = {f"{name}.{x}": getattr(linear.low_rank, x) for name, linear in linears(model) for x in "AB"}
    return named | dict(mask_embedding=model.mask_embedding)


# -------------------------------------------------------------------------------- in a forward

def open_gate(gate, compiled=False):
    """g as the layers take it: True, all rows; a slice or indices of rows; or g itself as numbers, (N, 1).

    gate (B, T) bool, True or None. Indices serve decoding on the CPU: elsewhere nobody waits to learn them,
    and compiled layers would be compiled again for each.
    """
    if gate is None or gate is True:
        return gate
    if compiled or gate.device.type != "cpu" or torch.is_grad_enabled():
        return gate.reshape(-1, 1)
    rows = gate.flatten().nonzero()[:, 0]
    if not len(rows):
        return None
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else rows


def through(x, *maps, gate=None, joint=1):
    """Method section 11: y = W x + g (alpha / r) B A x of each map; x (N, in) -> (N, out) each, in decoding
    the first `joint` as one tensor, as `together` has them."""
    parts = together(x, *maps, joint=joint) if len(maps) > 1 else [maps[0](x)]
    if gate is None or maps[0].low_rank is None or add_low_rank(parts, x, maps, gate):
        return parts
    added = torch.cat([product(x, m) for m in maps], 1)
    added = added if gate is True else added * as_numbers(gate, x)
    return [y + more for y, more in zip(parts, added.split([y.shape[1] for y in parts], 1))]


def product(x, m):
    """(alpha / r) B A x."""
    low = F.linear(x, m.low_rank.A.to(x.dtype)) * m.low_rank.scale                    # (N, r)
    return F.linear(low, m.low_rank.B.to(x.dtype))


def as_numbers(gate, x):
    """g of the rows of x (N, in), (N, 1)."""
    if isinstance(gate, torch.Tensor) and gate.dim() == 2:
        return gate
    g = torch.zeros(len(x), 1, dtype=torch.bool, device=x.device)
    g[slice(None) if gate is True else gate] = True
    return g


def embedded(model, x, tokens, gate):
    """x (N, C), the table's rows of tokens (N,), with e_m for the mask tokens of blocks."""
    if gate is None or model.adapter is None:
        return x
    is_mask = (tokens == model.config.mask_id)[:, None] & as_numbers(gate, x)
    return torch.where(is_mask, model.mask_embedding.to(x.dtype), x)


# -------------------------------------------------------------------------------- files

def fingerprint(folder) -> dict:
    """name -> sha256 over header, first and last MB and size of each file of a model's weights."""
    out = {}
    for path in shards(Path(folder)):
        size, digest = path.stat().st_size, hashlib.sha256()
        with open(path, "rb") as file:
            header = int.from_bytes(file.read(8), "little")
            for start, n in ((0, 8 + min(header, size)), (0, 2**20), (max(0, size - 2**20), 2**20)):
                file.seek(start)
                digest.update(file.read(n))
        digest.update(str(size).encode())
        out[path.name] = digest.hexdigest()
    return out


def save(model, folder, dtype=None, **about) -> None:
    """Write adapter.safetensors, in `dtype` where one is given, and adapter.json: no weights of the base.

    about: what else adapter.json records (base, full_mask_prob, place0, targets).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: x.detach().to(dtype or x.dtype).contiguous() for name, x in tensors(model).items()}
    model.adapter |= about
    if model.folder is not None:
        model.adapter = dict(base=str(model.folder)) | model.adapter | dict(weights=fingerprint(model.folder))
    write_whole(folder / WEIGHTS, lambda path: save_file(weights, path, metadata={"format": "pt"}))
    text = json.dumps(model.adapter, indent=2) + "\n"
    write_whole(folder / ABOUT, lambda path: path.write_text(text))


def read_about(folder) -> dict:
    """adapter.json of a folder, checked."""
    path = Path(folder) / ABOUT
    about = read_json(path)
    for name, kind, good in (("rank", int, lambda x: 1 <= x <= 2**16), ("alpha", (int, float), math.isfinite),
                             ("mask_id", int, lambda x: x >= 0)):
        value = about.get(name)
        need(isinstance(value, kind) and not isinstance(value, bool) and good(value),
             f"{path}: {name} is {shown(value)}: it is not the adapter.json of a gated adapter")
    return about


def base_of(name_or_dir, adapter=None):
    """What Llama.from_pretrained is to load: (base, folder of the adapter or None, its mask id or None).

    name_or_dir: a model, or the folder of an adapter, or of a training run under way that has one.
    """
    place = name_or_dir if adapter is None else adapter
    folder = newest_with(place, ABOUT)
    need(folder or adapter is None, f"{place} holds no {ABOUT}: wanted the folder of an adapter")
    if not folder or folder != Path(place) and os.path.isfile(os.path.join(place, "config.json")):
        return name_or_dir, None, None
    about = read_about(folder)
    base = about.get("base") if adapter is None else name_or_dir
    need(base and isinstance(base, str | Path), f"{folder / ABOUT} names no base: give --base")
    there = os.path.isdir(base) or not os.path.isabs(base)   # or a name of the hub
    need(there, f"{folder}: its base {base} is not there: bring it back, or name it as --base")
    return base, folder, about["mask_id"]


def load(model, folder, dtype=None) -> None:
    """Give the model the adapter that a folder holds, in the model's dtype or another; ValueError, one line,
    if it does not fit. Beside other weights than those of its training: one line on stderr."""
    about = read_about(folder)
    attach(model, about["rank"], about["alpha"])
    path, table = Path(folder) / WEIGHTS, model.model.embed_tokens.weight
    try:
        with safe_open(path, framework="pt", device=str(table.device)) as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
            wanted = {name: tuple(x.shape) for name, x in tensors(model).items()}
            need(shapes == wanted,
                 f"{path} is no adapter of rank {about['rank']} for this model: give its own as --base")
            for name, x in tensors(model).items():
                x.data = file.get_tensor(name).to(dtype or table.dtype)
    except (SafetensorError, OSError, ValueError) as error:
        detach(model)
        need(isinstance(error, ValueError), f"{path} is missing or damaged ({error}): bring it back")
        raise
    model.adapter = about
    if model.folder is not None and about.get("weights") not in (None, fingerprint(model.folder)):
        print(f"{folder} was trained beside other weights than those of {model.folder}: the text stays "
              "exact, but may take more forwards", file=sys.stderr)
