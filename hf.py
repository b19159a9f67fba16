"""Hugging Face: names of published models, config.json and safetensors files, in and out.

Dicts and tensors only: no model is known here.
"""
import json
import math
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open


def need(good, message: str) -> None:
    """ValueError with one line unless `good`."""
    if not good:
        raise ValueError(message)


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


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json")


ROPE_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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


def read_config(folder: Path, names, mask_id=None, override_mask_id=None) -> dict:
    """config.json in the older (rope_theta, rope_scaling) or newer (rope_parameters) form -> the fields `names`.

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
    config = {name: raw[name] for name in names if raw.get(name) is not None}
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
    return config


FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def load_tensors(folder: Path, wanted: dict, tied: bool, device, dtype) -> dict:
    """name -> tensor for every name of `wanted` (a meta state dict); the files' headers are checked first."""
    index, shards = folder / "model.safetensors.index.json", ["model.safetensors"]
    if not (folder / shards[0]).is_file():
        need(index.is_file(), f"{folder} has no model.safetensors and no {index.name}: only safetensors are loaded")
        weight_map = read_json(index).get("weight_map")
        need(isinstance(weight_map, dict) and weight_map, f"{index} has no weight_map (tensor: shard): download it again")
        shards = sorted(set(map(str, weight_map.values())))
    head_is_tied = lambda name: tied and name == "lm_head.weight"
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
    if tied:
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
