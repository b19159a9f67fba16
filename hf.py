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
LLAMA3 = dict(vocab_size=128256, rope_theta=500000.0, num_key_value_heads=8,
              max_position_embeddings=131072, bos_token_id=128000, eos_token_id=[128001, 128008, 128009],
              mask_id=128002, tie_word_embeddings=False)
LLAMA3_ROPE = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=8192)
LLAMA3_1 = dict(LLAMA3, rope_scaling=LLAMA3_ROPE)
LLAMA3_2 = dict(LLAMA3, rope_scaling=dict(LLAMA3_ROPE, factor=32.0), tie_word_embeddings=True)
QWEN3 = dict(model_type="qwen3", vocab_size=151936, rope_theta=1000000.0, num_key_value_heads=8,
             head_dim=128, rms_norm_eps=1e-6, max_position_embeddings=40960, bos_token_id=151643,
             eos_token_id=[151645, 151643], mask_id=151935, tie_word_embeddings=True)
SMOLLM2 = dict(vocab_size=49152, rope_theta=100000.0, max_position_embeddings=8192, bos_token_id=1,
               eos_token_id=2, mask_id=4)
# The shape of the shipped checkpoints/tiny-*, for data/word_problems' tokenizer.
TINY = dict(vocab_size=512, max_position_embeddings=2048, eos_token_id=510, mask_id=511)


def preset(family, hidden_size, intermediate_size, num_hidden_layers, num_attention_heads, hub_id, **other):
    return dict(family, hidden_size=hidden_size, intermediate_size=intermediate_size,
                num_hidden_layers=num_hidden_layers, num_attention_heads=num_attention_heads, **other), hub_id


PRESETS = {   # name: family, hidden, intermediate, layers, heads, hub id
    "llama3.1-8b": preset(LLAMA3_1, 4096, 14336, 32, 32, "meta-llama/Llama-3.1-8B-Instruct"),
    "llama3.1-70b": preset(LLAMA3_1, 8192, 28672, 80, 64, "meta-llama/Llama-3.1-70B-Instruct"),
    "llama3.2-1b": preset(LLAMA3_2, 2048, 8192, 16, 32, "meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2-3b": preset(LLAMA3_2, 3072, 8192, 28, 24, "meta-llama/Llama-3.2-3B-Instruct"),
    "qwen3-0.6b": preset(QWEN3, 1024, 3072, 28, 16, "Qwen/Qwen3-0.6B"),
    "qwen3-8b": preset(dict(QWEN3, tie_word_embeddings=False), 4096, 12288, 36, 32, "Qwen/Qwen3-8B"),
    "smollm2-135m": preset(SMOLLM2, 576, 1536, 30, 9, "HuggingFaceTB/SmolLM2-135M-Instruct",
                           num_key_value_heads=3),
    "smollm2-360m": preset(SMOLLM2, 960, 2560, 32, 15, "HuggingFaceTB/SmolLM2-360M-Instruct",
                           num_key_value_heads=5),
    "smollm2-1.7b": preset(dict(SMOLLM2, rope_theta=130000.0), 2048, 8192, 24, 32,
                           "HuggingFaceTB/SmolLM2-1.7B-Instruct", num_key_value_heads=32),
    # The paper's ablation model (Table 2, Fig. 4): 28 layers, hidden 3072; no weights were published.
    "sbd-3b": preset(dict(LLAMA3, tie_word_embeddings=True), 3072, 8192, 28, 24, None),
    "tiny": preset(TINY, 192, 512, 4, 6, None, num_key_value_heads=6),
    "tiny-draft": preset(TINY, 96, 256, 2, 3, None, num_key_value_heads=3),
}


def preset_mask_id(name):
    """The mask id that a preset, or the hub id behind one, stands for; None for any other name."""
    return next((kw["mask_id"] for key, (kw, hub) in PRESETS.items() if str(name) in (key, hub)), None)


def find_folder(name_or_dir, weights=True) -> Path:
    """The local folder of a preset, hub id or path; downloads (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE apply)."""
    name = str(name_or_dir)
    if name and os.path.isdir(name):
        folder = Path(name)
        if not (folder / "config.json").exists():   # a training run under way: its newest checkpoint
            steps = sorted(step for step in folder.glob("step-*") if (step / "config.json").is_file())
            folder = steps[-1] if steps else folder
        return folder
    hub_id = PRESETS[name][1] if name in PRESETS else name
    need(hub_id is not None, f"{name} has no published weights: use it as a shape only")
    need(re.fullmatch(r"(?!\.+/)[\w.-]+/[\w.-]+", hub_id, re.ASCII),
         f"{shown(name)} is no folder here, no preset ({', '.join(PRESETS)}) and no hub id owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    wanted = dict(allow_patterns=["*.json", "*.model", "*.jinja"] + ["*.safetensors"] * weights,
                  ignore_patterns=["original/*", "onnx/*"])
    try:
        return Path(snapshot_download(hub_id, **wanted))
    except GatedRepoError:
        problem = "is gated: accept its licence on huggingface.co, then set HF_TOKEN"
    except RepositoryNotFoundError:
        problem = "is not on the hub, or private: check the name, or set HF_TOKEN"
    except Exception as error:   # offline, no route, time-out: the hub's client raises many kinds
        problem = ("is no folder here, is not in the hub's cache and could not be downloaded "
                   f"({type(error).__name__}): check the name, the connection and HF_HUB_OFFLINE")
    raise ValueError(f"{hub_id} {problem}")


# --- config.json

REQUIRED = "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"
# What may be left out, and what transformers then takes. Of these, None where config.json says null:
LLAMA_DEFAULTS = dict(num_key_value_heads=None, head_dim=None, max_position_embeddings=2048,
                      rms_norm_eps=1e-6, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2)
DEFAULTS = {"llama": LLAMA_DEFAULTS,
            "qwen3": dict(LLAMA_DEFAULTS, num_key_value_heads=32, head_dim=128, max_position_embeddings=32768,
                          bos_token_id=None, eos_token_id=None)}
NULLABLE = "num_key_value_heads", "bos_token_id", "eos_token_id"
ROPE_LLAMA3 = "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
SIZE = int, 1, 2**24   # beyond any published size; tensors of two such sizes can still be described
LIMITS = dict.fromkeys(REQUIRED, SIZE) | dict(
    num_hidden_layers=(int, 1, 1000), num_key_value_heads=SIZE, head_dim=SIZE, max_position_embeddings=SIZE,
    rms_norm_eps=(float, 0, 1), rope_theta=(float, 1, 1e12), factor=(float, 1, 1e6),
    low_freq_factor=(float, 1e-6, 1e6), high_freq_factor=(float, 1e-6, 1e6),
    original_max_position_embeddings=SIZE)


def read_json(path: Path) -> dict:
    """The object that a JSON file holds."""
    need(path.is_file(), f"{path} is no file, wanted readable JSON: download or write it again")
    need(path.stat().st_size < 2**28, f"{path} is larger than 256 MiB, wanted a smaller JSON file")
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
    need(path.exists(), f"{folder} has no config.json: wanted a folder in Hugging Face layout "
                        "(config.json, *.safetensors)")
    raw = read_json(path)
    kind, rope = raw.get("model_type"), raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    need(isinstance(rope, dict), f"{path}: rope_scaling is {shown(rope)}, wanted an object")
    given = lambda name, default: next((d[name] for d in (rope, raw) if d.get(name) is not None), default)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    layers = raw.get("layer_types") or []
    sliding = not isinstance(layers, list) or any(layer != "full_attention" for layer in layers)
    for bad, what in (
            (kind not in ("llama", "qwen3"), f"model_type {shown(kind)}"),
            (raw.get("attention_bias") or raw.get("mlp_bias"), "biases in attention or MLP"),
            (raw.get("use_sliding_window") or sliding, "sliding window attention"),
            (raw.get("hidden_act", "silu") != "silu", f"hidden_act {shown(raw.get('hidden_act'))}"),
            (raw.get("quantization_config"), "quantized weights"),
            (given("partial_rotary_factor", 1.0) != 1.0, "partial rotary positions"),
            (rope_type not in ("default", "llama3"), f"rope type {shown(rope_type)}")):
        need(not bad, f"{path} asks for {what}; wanted plain Llama or Qwen-3 (no bias, full attention, "
                      "rope default or llama3): use another checkpoint")
    for name in REQUIRED:
        need(raw.get(name) is not None, f"{path} gives no {name}: it is not the config of a Llama or Qwen-3")
    config = {name: raw[name] for name in REQUIRED} | dict(model_type=kind, rope_scaling=None)
    for name, default in DEFAULTS[kind].items():
        null = name in NULLABLE and name in raw
        config[name] = default if raw.get(name) is None and not null else raw[name]
    if config["num_key_value_heads"] is None:
        config["num_key_value_heads"] = config["num_attention_heads"]
    config["rope_theta"] = given("rope_theta", 10000.0)
    if rope_type == "llama3":
        config["rope_scaling"] = {"rope_type": "llama3"} | {key: rope.get(key) for key in ROPE_LLAMA3}
    generation = path.with_name("generation_config.json")   # where instruct models list all their stop ids
    if generation.exists() and (eos := read_json(generation).get("eos_token_id")) is not None:
        config["eos_token_id"] = eos
    stored = default_mask_id if raw.get("mask_id") is None else raw["mask_id"]
    return config | dict(mask_id=stored if mask_id is None else mask_id)


def check_config(c: dict) -> None:
    """ValueError unless `c`, the fields of a LlamaConfig, are those of a model that can be built."""
    def check(good, name, value, wanted):
        need(good, f"config: {name} is {shown(value)}, wanted {wanted}")

    rope = c["rope_scaling"]
    check(rope is None or isinstance(rope, dict) and rope.get("rope_type") == "llama3", "rope_scaling", rope,
          "none or rope_type llama3")
    optional = ("head_dim",) if rope else ("head_dim", *ROPE_LLAMA3)
    for name, (kind, low, high) in LIMITS.items():
        value = (rope or {}).get(name) if name in ROPE_LLAMA3 else c[name]
        good = type(value) in (int, kind) and low <= value <= high   # true is no number; NaN fits nowhere
        check(good or value is None and name in optional, name, value, f"{kind.__name__}, {low} to {high}")
    V, C, H, Hkv = c["vocab_size"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    need(c["head_dim"] or C % H == 0,
         f"config: hidden_size {C} is no multiple of num_attention_heads {H}: give head_dim")
    D = c["head_dim"] or C // H
    check(D % 2 == 0 < D and H * D <= SIZE[2], "head_dim", D,
          f"an even one (rotary), times {H} at most {SIZE[2]}")
    need(H % Hkv == 0, f"config: num_attention_heads {H} is no multiple of num_key_value_heads {Hkv}")
    check(not rope or rope["low_freq_factor"] < rope["high_freq_factor"], "rope_scaling", rope,
          "a low_freq_factor below high_freq_factor")
    check(c["model_type"] in tuple(DEFAULTS), "model_type", c["model_type"], "llama or qwen3")
    tied = c["tie_word_embeddings"]
    check(type(tied) is bool, "tie_word_embeddings", tied, "true or false")
    for name in ("bos_token_id", "eos_token_id", "mask_id"):
        value = c[name]
        several = name == "eos_token_id" and isinstance(value, list | tuple)
        for i in value if several else () if value is None else (value,):
            check(type(i) is int, name, value, "ids" if several else "an id")
            need(0 <= i < V, f"config: {name} {shown(i)} is outside the vocabulary, 0 to {V - 1}")


# --- weights

FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder, one or those that its index names."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    need(index.is_file(),
         f"{folder} has no model.safetensors and no {index.name}: only safetensors are loaded")
    weight_map = read_json(index).get("weight_map")
    need(isinstance(weight_map, dict) and weight_map,
         f"{index} has no weight_map (tensor: shard): download it again")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:   # a name, never a path: nothing outside the folder is read
        need(re.fullmatch(r"[\w.-]+\.safetensors", name),
             f"{index} names the shard {shown(name)}, wanted the name of a safetensors file beside it")
        need((folder / name).is_file(),
             f"{folder} lacks the shard {name} that {index.name} names: download it again")
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
            problem = f"{path} is corrupt or cut short ({first_line(error)}): download it again"
            raise ValueError(problem) from None
        for name in file.keys():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            header = file.get_slice(name)
            files[name], shapes[name], dtypes[name] = file, tuple(header.get_shape()), header.get_dtype()
            need(dtypes[name] in FLOATS, f"{path}: {name} is stored as {dtypes[name]}, wanted one of "
                                         f"{', '.join(FLOATS)}: use a checkpoint that is not quantized")
    wanted = {name: tuple(tensor.shape) for name, tensor in wanted.items()}
    if tied and HEAD not in files:
        del wanted[HEAD]
    advice = "its weights and config.json do not belong together"
    for problem, names in (("lacks the tensor", sorted(wanted.keys() - shapes.keys())),
                           ("has the unexpected tensor", sorted(shapes.keys() - wanted.keys()))):
        need(not names, f"{folder} {problem} {', '.join(names[:1])} ({len(names)} in all): {advice}")
    for name, shape in wanted.items():
        need(shapes[name] == shape,
             f"{folder}: {name} has shape {shapes[name]}, config.json asks for {shape}: {advice}")
    dtype = dtype or FLOATS[dtypes[TABLE]]
    total, free = sum(map(math.prod, shapes.values())) * dtype.itemsize, free_memory(device)   # bytes
    need(total <= free, f"{folder} needs {total / 2**30:.1f} GiB for its weights in "
                        f"{str(dtype).removeprefix('torch.')}, {device} has {free / 2**30:.1f} GiB free: "
                        "use a smaller model or dtype, or another device")
    # On the CPU, a tensor of the stored dtype stays a view of the mapped file.
    tensors = {name: file.get_tensor(name).to(dtype) for name, file in files.items()}
    if tied and (HEAD not in tensors or torch.equal(tensors[HEAD], tensors[TABLE])):
        tensors[HEAD] = tensors[TABLE]
    return tensors


def first_line(error) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


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
        raise OSError(f"{path} cannot be written ({first_line(error)})") from None
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
    raw = config | dict(
        architectures=["Qwen3ForCausalLM" if config["model_type"] == "qwen3" else "LlamaForCausalLM"],
        hidden_act="silu", attention_bias=False, torch_dtype=str(weights[TABLE].dtype).removeprefix("torch."))
    generation = {key: raw[key] for key in ("bos_token_id", "eos_token_id") if raw[key] is not None}
    save = lambda path: save_file(weights, path, metadata={"format": "pt"})
    write_whole(folder / "model.safetensors", save)
    for shard in (folder / "model.safetensors.index.json", *folder.glob("model-*-of-*.safetensors")):
        shard.unlink(missing_ok=True)   # of what stood here before: some loaders prefer them
    for name, value in (("config.json", raw), ("generation_config.json", generation)):
        write_whole(folder / name, lambda path: path.write_text(json.dumps(value, indent=2) + "\n"))
    if tokenizer_from and Path(tokenizer_from).resolve() != folder.resolve():
        for source in (Path(tokenizer_from) / name for name in TOKENIZER_FILES):
            if source.is_file():
                write_whole(folder / source.name, lambda path: shutil.copyfile(source, path))
