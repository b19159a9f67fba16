"""Hugging Face: names of published models, config.json and safetensors files, in and out.

Dicts and tensors only: no model is known here. What a file says is checked before it is used, and
refused in one line that says what was found and what was wanted.
"""
import json
import math
import os
import re
import reprlib
import secrets
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file


shown = reprlib.repr   # of a value found in a file: never longer than part of a line


def need(good, message: str) -> None:
    """ValueError with one line unless `good`."""
    if not good:
        raise ValueError(message)


# --- the published models

# Shapes as in their config.json. The mask ids are ids of the vocabulary that no text produces.
LLAMA3 = dict(vocab_size=128256, rope_theta=500000.0, max_position_embeddings=131072, bos_token_id=128000,
              eos_token_id=[128001, 128008, 128009], mask_id=128002, tie_word_embeddings=False)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
LLAMA3_1 = LLAMA3 | dict(rope_scaling=LLAMA3_ROPE)
LLAMA3_2 = LLAMA3 | dict(rope_scaling=LLAMA3_ROPE | dict(factor=32.0), tie_word_embeddings=True)
QWEN3 = dict(model_type="qwen3", vocab_size=151936, rope_theta=1000000.0, head_dim=128, rms_norm_eps=1e-6,
             max_position_embeddings=40960, bos_token_id=151643, eos_token_id=[151645, 151643],
             mask_id=151935, tie_word_embeddings=True)
SMOLLM2 = dict(vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, bos_token_id=1,
               eos_token_id=2, mask_id=4)
# The shape of the shipped checkpoints/tiny-*, for data/word_problems' tokenizer.
TINY = dict(vocab_size=512, max_position_embeddings=2048, eos_token_id=510, mask_id=511)
SHAPE = "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"

PRESETS = {name: (family | dict(zip(SHAPE, shape)), hub_id) for name, family, *shape, hub_id in (
    ("llama3.1-8b", LLAMA3_1, 4096, 14336, 32, 32, 8, "meta-llama/Llama-3.1-8B-Instruct"),
    ("llama3.1-70b", LLAMA3_1, 8192, 28672, 80, 64, 8, "meta-llama/Llama-3.1-70B-Instruct"),
    ("llama3.2-1b", LLAMA3_2, 2048, 8192, 16, 32, 8, "meta-llama/Llama-3.2-1B-Instruct"),
    ("llama3.2-3b", LLAMA3_2, 3072, 8192, 28, 24, 8, "meta-llama/Llama-3.2-3B-Instruct"),
    ("qwen3-0.6b", QWEN3, 1024, 3072, 28, 16, 8, "Qwen/Qwen3-0.6B"),
    ("qwen3-8b", QWEN3 | dict(tie_word_embeddings=False), 4096, 12288, 36, 32, 8, "Qwen/Qwen3-8B"),
    ("smollm2-135m", SMOLLM2, 576, 1536, 30, 9, 3, "HuggingFaceTB/SmolLM2-135M-Instruct"),
    ("smollm2-360m", SMOLLM2, 960, 2560, 32, 15, 5, "HuggingFaceTB/SmolLM2-360M-Instruct"),
    ("smollm2-1.7b", SMOLLM2 | dict(rope_theta=130000.0), 2048, 8192, 24, 32, 32,
     "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    # The paper's ablation model (Table 2, Fig. 4): 28 layers, hidden 3072; no weights were published.
    ("sbd-3b", LLAMA3 | dict(tie_word_embeddings=True), 3072, 8192, 28, 24, 8, None),
    ("tiny", TINY, 192, 512, 4, 6, 6, None),
    ("tiny-draft", TINY, 96, 256, 2, 3, 3, None))}


def preset_mask_id(name):
    """The mask id that a preset, or the hub id behind one, stands for; None for any other name."""
    return next((kw["mask_id"] for key, (kw, hub) in PRESETS.items() if str(name) in (key, hub)), None)


def newest_with(folder, file: str):
    """The folder if it holds that file, else, while training has only checkpoints there, the newest that
    does, or None."""
    if not str(folder) or not os.path.isdir(folder):
        return None
    steps = [path.parent for path in Path(folder).glob(f"step-*/{file}") if path.is_file()]
    return Path(folder) if os.path.exists(Path(folder) / file) else max(steps, default=None)


def find_folder(name_or_dir, weights=True) -> Path:
    """The local folder of a preset, hub id or path; downloads (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE apply)."""
    name = str(name_or_dir)
    if name and os.path.isdir(name):
        return newest_with(name, "config.json") or Path(name)
    hub_id = PRESETS[name][1] if name in PRESETS else name
    need(hub_id is not None, f"{name} has no published weights: use it as a shape only")
    need(re.fullmatch(r"(?!\.+/)[\w.-]+/[\w.-]+", hub_id, re.ASCII),
         f"{shown(name)} is no folder here, no preset ({', '.join(PRESETS)}) and no hub id owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    allow = ["*.json", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    try:
        return Path(snapshot_download(hub_id, allow_patterns=allow, ignore_patterns=["original/*", "onnx/*"]))
    except GatedRepoError:
        problem = "is gated: accept its licence on huggingface.co, then set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "is not on the hub, or private: check the name, or set HF_TOKEN"
    except Exception as error:   # offline, no route, time-out: the hub's client raises many kinds
        problem = ("is no folder here, is not in the hub's cache and could not be downloaded "
                   f"({type(error).__name__}): check the name, the connection and HF_HUB_OFFLINE")
    raise ValueError(f"{hub_id} {problem}")


# --- config.json

SIZE = int, 1, 2**24   # beyond any published size; tensors of two such sizes can still be described
LIMITS = dict.fromkeys(("vocab_size", *SHAPE, "head_dim", "max_position_embeddings"), SIZE) | dict(
    num_hidden_layers=(int, 1, 1000), rms_norm_eps=(float, 0, 1), rope_theta=(float, 1, 1e12))
ROPE_LLAMA3 = dict(factor=(float, 1, 1e6), low_freq_factor=(float, 1e-6, 1e6),
                   high_freq_factor=(float, 1e-6, 1e6), original_max_position_embeddings=SIZE)
# What transformers takes for what is left out. Where config.json says null, these are None:
NULLABLE = "num_key_value_heads", "bos_token_id", "eos_token_id"
LLAMA = dict.fromkeys(LIMITS) | dict(max_position_embeddings=2048, rms_norm_eps=1e-6, rope_theta=10000.0,
                                     tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
DEFAULTS = {"llama": LLAMA, "qwen3": LLAMA | dict(num_key_value_heads=32, head_dim=128, bos_token_id=None,
                                                  max_position_embeddings=32768, eos_token_id=None)}


def read_json(path: Path) -> dict:
    """The object that a JSON file holds."""
    good = path.is_file() and path.stat().st_size < 2**28   # bytes
    need(good, f"{path} is no file of at most 256 MiB, wanted readable JSON: download or write it again")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:   # no UTF-8, no JSON, nested too deeply
        raise ValueError(f"{path} is not readable JSON ({error}): download or write it again") from None
    need(isinstance(value, dict), f"{path} holds a {type(value).__name__}, wanted a JSON object")
    return value


def read_config(folder: Path, default_mask_id=None, mask_id=None) -> dict:
    """config.json, the rotary part in its older or newer form -> the fields of a LlamaConfig.

    `default_mask_id` stands in where the file stores none, `mask_id` replaces what it stores.
    """
    path = Path(folder) / "config.json"
    need(path.exists(), f"{folder} has no config.json, wanted a folder in Hugging Face layout")
    raw = read_json(path)
    kind, rope = raw.get("model_type"), raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    need(isinstance(rope, dict), f"{path}: rope_scaling is {shown(rope)}, wanted an object")
    given = {key: value for part in (raw, rope) for key, value in part.items()   # the rotary part's counts
             if value is not None or key in NULLABLE}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    layers = raw.get("layer_types") or []
    sliding = not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)
    for bad, what in (
            (kind not in ("llama", "qwen3"), f"model_type {shown(kind)}"),
            (raw.get("attention_bias") or raw.get("mlp_bias"), "biases in attention or MLP"),
            (raw.get("use_sliding_window") or sliding, "sliding window attention"),
            (raw.get("hidden_act", "silu") != "silu", f"hidden_act {shown(raw.get('hidden_act'))}"),
            (raw.get("quantization_config"), "quantized weights"),
            (given.get("partial_rotary_factor", 1.0) != 1.0, "partial rotary positions"),
            (rope_type not in ("default", "llama3"), f"rope type {shown(rope_type)}")):
        need(not bad, f"{path} asks for {what}; wanted plain Llama or Qwen-3 (no bias, full attention, "
                      "rope default or llama3): use another checkpoint")
    llama3 = {"rope_type": "llama3"} | {key: rope.get(key) for key in ROPE_LLAMA3}
    config = {name: given.get(name, default) for name, default in DEFAULTS[kind].items()}
    config |= dict(model_type=kind, rope_scaling=llama3 if rope_type == "llama3" else None)
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    generation = path.with_name("generation_config.json")   # where instruct models list all their stop ids
    if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    return config | dict(mask_id=given.get("mask_id", default_mask_id) if mask_id is None else mask_id)


def check_config(c: dict) -> None:
    """ValueError unless `c`, the fields of a LlamaConfig, are those of a model that can be built."""
    def check(name, good, wanted):
        need(good, f"config: {name} is {shown(c.get(name))}, wanted {wanted}")

    rope = c["rope_scaling"]
    is_llama3 = isinstance(rope, dict) and rope.get("rope_type") == "llama3"
    check("rope_scaling", rope is None or is_llama3, "none or rope_type llama3")
    c = (rope or {}) | c
    for name, (kind, low, high) in (LIMITS | ROPE_LLAMA3 if rope else LIMITS).items():
        value = c.get(name)
        good = type(value) in (int, kind) and low <= value <= high   # true is no number; NaN fits nowhere
        check(name, good or name == "head_dim" and value is None, f"{kind.__name__}, {low} to {high}")
    V, C, H, Hkv = c["vocab_size"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    need(c["head_dim"] or C % H == 0,
         f"config: hidden_size {C} is no multiple of num_attention_heads {H}: give head_dim")
    D = c["head_dim"] = c["head_dim"] or C // H
    check("head_dim", D % 2 == 0 < D and H * D <= SIZE[2], f"even (rotary), times {H} at most {SIZE[2]}")
    check("num_attention_heads", H % Hkv == 0, f"a multiple of num_key_value_heads {Hkv}")
    check("low_freq_factor", not rope or c["low_freq_factor"] < c["high_freq_factor"],
          "below high_freq_factor")
    check("model_type", c["model_type"] in tuple(DEFAULTS), "llama or qwen3")
    check("tie_word_embeddings", type(c["tie_word_embeddings"]) is bool, "true or false")
    for name in ("bos_token_id", "eos_token_id", "mask_id"):
        several = name == "eos_token_id" and isinstance(c[name], list | tuple)
        good = all(type(i) is int and 0 <= i < V for i in (c[name] if several else [c[name]]))
        need(good or c[name] is None,
             f"config: {name} {shown(c[name])} is outside the vocabulary, 0 to {V - 1}")


# --- weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or those that its index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    need(index.is_file(), f"{folder} has no model.safetensors and no index: only safetensors are loaded")
    weight_map = read_json(index).get("weight_map")
    need(isinstance(weight_map, dict) and weight_map, f"{index} has no weight_map: download it again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:   # a name, never a path: nothing outside the folder is read
        need(re.fullmatch(r"[\w.-]+\.safetensors", name) and (folder / name).is_file(),
             f"{index} names the shard {name[:80]!r}, no safetensors file beside it: download it again")
    return [folder / name for name in names]


def load_tensors(folder: Path, wanted: dict, tied: bool, device, dtype) -> dict:
    """name -> tensor for every name of `wanted` (a meta state dict); the files' headers are checked first.

    Where config.json says that the head is tied, it is the embedding, unless the files hold one that differs.
    """
    files, shapes, dtypes = {}, {}, {}   # each by tensor name; the files are open, their tensors not read yet
    for path in shards(folder):
        try:
            file = safe_open(path, framework="pt", device=str(device))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is corrupt or cut short ({error}): download it again") from None
        for name in file.keys():
            if not name.endswith("rotary_emb.inv_freq"):
                header = file.get_slice(name)
                files[name], shapes[name], dtypes[name] = file, tuple(header.get_shape()), header.get_dtype()
                need(dtypes[name] in FLOATS, f"{path}: {name} is stored as {dtypes[name]}, wanted one of "
                                             f"{', '.join(FLOATS)}: use a checkpoint that is not quantized")
    wanted = {name: tuple(tensor.shape) for name, tensor in wanted.items()
              if name != HEAD or name in files or not tied}
    advice = "its weights and config.json do not belong together"
    for problem, names in (("lacks the tensor", sorted(wanted.keys() - shapes.keys())),
                           ("has the unexpected tensor", sorted(shapes.keys() - wanted.keys()))):
        need(not names, f"{folder} {problem} {', '.join(names[:1])} ({len(names)} in all): {advice}")
    for name, shape in wanted.items():
        need(shapes[name] == shape,
             f"{folder}: {name} has shape {shapes[name]}, config.json asks for {shape}: {advice}")
    dtype = dtype or FLOATS[dtypes[TABLE]]
    total, free = sum(map(math.prod, shapes.values())) * dtype.itemsize, free_memory(device)   # bytes
    need(total <= free, f"{folder} needs {total / 2**30:.1f} GiB for its weights in {dtype}, {device} has "
                        f"{free / 2**30:.1f} GiB free: use a smaller model or dtype, or another device")
    # On the CPU, a tensor of the stored dtype stays a view of the mapped file.
    tensors = {name: file.get_tensor(name).to(dtype) for name, file in files.items()}
    if tied and (HEAD not in tensors or torch.equal(tensors[HEAD], tensors[TABLE])):
        tensors[HEAD] = tensors[TABLE]
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


# --- files written

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                   "chat_template.jinja", "vocab.json", "merges.txt", "added_tokens.json")


def write_whole(path: Path, write) -> None:
    """Call write(temporary path), flush to disk, rename: `path` is the old or the new file, whole."""
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")   # no other writer's
    try:
        with open(temporary, "xb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777   # what the umask leaves of a new file's
        write(temporary)
        temporary.chmod(mode)                                # safetensors makes private files
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written ({error})") from None
    finally:
        temporary.unlink(missing_ok=True)   # what a full disk or Ctrl-C left


def save_folder(folder: Path, config: dict, weights: dict, tokenizer_from=None) -> None:
    """Write config.json, generation_config.json and model.safetensors, and copy the tokenizer's files.

    config: the fields of a LlamaConfig. Each file is written whole: a kill leaves whole files only, and
    weights mapped from this very folder stay valid.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.contiguous() for name, weight in weights.items()
               if name != HEAD or not config["tie_word_embeddings"]}
    raw = config | dict(architectures=[config["model_type"].capitalize() + "ForCausalLM"], hidden_act="silu",
                        attention_bias=False, torch_dtype=str(weights[TABLE].dtype).removeprefix("torch."))
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if raw[key] is not None}
    write_whole(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))
    for shard in (folder / "model.safetensors.index.json", *folder.glob("model-*-of-*.safetensors")):
        shard.unlink(missing_ok=True)   # of what stood here before: some loaders prefer them
    for name, value in (("config.json", raw), ("generation_config.json", generation)):
        write_whole(folder / name, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))
    if tokenizer_from and Path(tokenizer_from).resolve() != folder.resolve():
        for source in (Path(tokenizer_from) / name for name in TOKENIZER_FILES):
            if source.is_file():
                write_whole(folder / source.name, lambda path: shutil.copyfile(source, path))
