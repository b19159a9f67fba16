"""model.py against transformers, against published figures, and against bad input."""
import copy
import dataclasses
import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import model as model_file
from hf import PRESETS, find_folder, write_whole
from kernels import packed_linear
from model import Llama, LlamaConfig, rotary
from smollm2 import smollm2_or_skip

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parent.parent

SMALL = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
             num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False)
LLAMA3_ROPE = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
SHAPES = {   # the model type, what differs from SMALL, and the rotary parameters
    "llama": ("llama", {}, {}),
    "llama-tied": ("llama", dict(tie_word_embeddings=True), {}),
    "llama-mha": ("llama", dict(num_key_value_heads=6), {}),
    "llama-mqa": ("llama", dict(num_key_value_heads=1), {}),
    "llama-head_dim": ("llama", dict(head_dim=16), {}),
    # theta 1000 and 16 dimensions: a frequency that is kept, one between, the others stretched;
    # 70 tokens go beyond 32
    "llama-llama3": ("llama", dict(head_dim=16), dict(rope_type="llama3", **LLAMA3_ROPE)),
    "llama-llama3-tied": ("llama", dict(head_dim=16, tie_word_embeddings=True),
                          dict(rope_type="llama3", **dict(LLAMA3_ROPE, factor=32.0))),
    "qwen3": ("qwen3", dict(head_dim=16, rms_norm_eps=1e-6), {}),
    "qwen3-tied": ("qwen3", dict(head_dim=10, tie_word_embeddings=True), {}),
}


FAMILIES = {"llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
            "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM)}


def reference(name="llama", dtype=torch.float64, theta=1000.0, seed=0, **changes):
    """A random-weight model of transformers; weights large enough that attention is far from uniform."""
    kind, shape, rope = SHAPES[name]
    Config, Model = FAMILIES[kind]
    rope = dict(rope or dict(rope_type="default"), rope_theta=theta)
    config = Config(**SMALL | shape | changes, rope_parameters=rope, bos_token_id=1, eos_token_id=2)
    generator = torch.Generator().manual_seed(seed)
    hf = Model(config).eval()
    with torch.no_grad():
        for weight in hf.parameters():
            mean = 1.0 if weight.dim() == 1 else 0.0
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.25 + mean)
    return hf.to(dtype)


def some_tokens(B=2, T=70, V=97, seed=1):
    return torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(seed))


def distance(ours, theirs):
    """Largest difference, relative to the largest logit."""
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max()).item()


def edit_json(path, **changes):
    """Set keys of a JSON file; a value of None removes the key."""
    value = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def edit_weights(path, change):
    """change(name -> tensor) in a safetensors file."""
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def folder(tmp_path):
    """A good folder in HF layout, of 3 small layers."""
    reference(dtype=torch.float32).save_pretrained(tmp_path / "good")
    return tmp_path / "good"


def refusal(call, *words):
    """The one line with which `call` is refused; it names each of `words`."""
    with pytest.raises(ValueError) as caught:
        call()
    line = str(caught.value)
    assert "\n" not in line and len(line) < 600
    for word in words:
        assert word in line, f"{word!r} is not in: {line}"
    return line


# --- the same function as transformers

# transformers takes rotary angles and norms in float32 also in a float64 model: equal to float32's rounding.
TOLERANCE = 2e-5


@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    hf, tokens = reference(name), some_tokens()
    hf.save_pretrained(tmp_path)
    ours = Llama.from_pretrained(tmp_path)
    with torch.no_grad():
        assert ours.lm_head.weight.dtype == torch.float64
        assert distance(ours(tokens), hf(tokens).logits) < TOLERANCE


@pytest.mark.parametrize("form", ["rope_parameters", "rope_scaling with rope_type", "rope_scaling with type"])
@pytest.mark.parametrize("name", ["llama", "llama-llama3", "qwen3"])
def test_config_is_read_in_its_older_and_its_newer_form(name, form, tmp_path):
    hf, tokens = reference(name), some_tokens()
    hf.save_pretrained(tmp_path)
    path, rope = tmp_path / "config.json", dict(SHAPES[name][2])
    if form == "rope_parameters":
        newer = dict(rope or {"rope_type": "default"}, rope_theta=1000.0)
        edit_json(path, rope_theta=None, rope_scaling=None, rope_parameters=newer)
    else:
        if rope and form.endswith("with type"):
            rope["type"] = rope.pop("rope_type")
        edit_json(path, rope_parameters=None, rope_theta=1000.0, rope_scaling=rope or None)
    config = LlamaConfig.from_folder(tmp_path)
    assert config.rope_theta == 1000.0 and bool(config.rope_scaling) == bool(rope)
    with torch.no_grad():
        assert distance(Llama.from_pretrained(tmp_path)(tokens), hf(tokens).logits) < TOLERANCE


def test_many_shards_load_as_one(tmp_path):
    hf, tokens = reference(), some_tokens()
    hf.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    with torch.no_grad():
        assert distance(Llama.from_pretrained(tmp_path)(tokens), hf(tokens).logits) < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_defaults_to_the_stored_one(dtype, tmp_path):
    reference(dtype=dtype).save_pretrained(tmp_path)
    assert {w.dtype for w in Llama.from_pretrained(tmp_path).parameters()} == {dtype}
    double = Llama.from_pretrained(tmp_path, dtype=torch.float64)
    assert {w.dtype for w in double.parameters()} == {torch.float64}


def test_weights_stored_in_two_dtypes_load_in_that_of_the_embedding(folder):
    edit_weights(folder / "model.safetensors",
                 lambda w: w.update({"model.norm.weight": w["model.norm.weight"].bfloat16()}))
    ours = Llama.from_pretrained(folder)
    assert {w.dtype for w in ours.parameters()} == {torch.float32}
    ours(some_tokens())


def test_at_picks_the_positions_whose_logits_are_wanted():
    model, tokens = Llama(LlamaConfig(vocab_size=97)).double(), some_tokens(B=3, T=12)
    with torch.no_grad():
        full = model(tokens)
        assert full.shape == (3, 12, 97)
        all_rows = torch.tensor([11, 0, 5])
        torch.testing.assert_close(model(tokens, at=all_rows), full[:, all_rows], rtol=1e-12, atol=1e-12)
        row_by_row = torch.tensor([[0, 3], [11, 11], [7, 2]])
        expected = torch.stack([full[b, row_by_row[b]] for b in range(3)])
        torch.testing.assert_close(model(tokens, at=row_by_row), expected, rtol=1e-12, atol=1e-12)
        assert model(tokens, at=torch.empty(0, dtype=torch.long)).shape == (3, 0, 97)


def test_positions_are_those_of_each_row():
    model, tokens = Llama(LlamaConfig(vocab_size=97)).double(), some_tokens(B=2, T=12)
    one, two = torch.arange(5, 29, 2), torch.arange(12).flip(0)
    with torch.no_grad():
        together = model(tokens, torch.stack((one, two)))
        torch.testing.assert_close(together[:1], model(tokens[:1], one), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together[1:], model(tokens[1:], two), rtol=1e-12, atol=1e-12)
        assert not torch.allclose(together[:1], model(tokens[:1]))   # these positions do matter
        # Rotary positions are relative: a shift of all of them changes nothing.
        torch.testing.assert_close(model(tokens, torch.arange(12) + 31), model(tokens), rtol=1e-9, atol=1e-9)


def test_positions_mean_what_they_mean_in_transformers():
    hf, tokens = reference("llama-llama3"), some_tokens(B=2, T=9)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8], [3, 3, 9, 40, 41, 42, 100, 101, 200]])
    rope = dict(rope_type="llama3", **LLAMA3_ROPE)
    ours = Llama(LlamaConfig(**SMALL, head_dim=16, rope_theta=1000.0, rope_scaling=rope)).double()
    ours.load_state_dict(hf.state_dict())
    everything = torch.ones(9, 9, dtype=torch.bool).tril()[None, None].expand(2, 1, 9, 9)
    with torch.no_grad():
        expected = hf(tokens, position_ids=positions, attention_mask=everything).logits
        assert distance(ours(tokens, positions), expected) < TOLERANCE


def test_attend_is_called_once_a_layer_with_rotated_heads():
    config = LlamaConfig(vocab_size=97, num_attention_heads=6, num_key_value_heads=2)
    model, tokens, calls = Llama(config), some_tokens(B=2, T=5), []

    def attend(layer, q, k, v):
        calls.append((layer, q.shape, k.shape, v.shape))
        return model_file.causal(layer, q, k, v)

    with torch.no_grad():
        torch.testing.assert_close(model(tokens, attend=attend), model(tokens))
    assert calls == [(i, (2, 6, 5, 32), (2, 2, 5, 32), (2, 2, 5, 32)) for i in range(4)]


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_attention_gets_one_dtype_under_autocast(model_type):
    model, seen = Llama(LlamaConfig(vocab_size=97, model_type=model_type)), []

    def attend(layer, q, k, v):
        seen.append({q.dtype, k.dtype, v.dtype})
        return model_file.causal(layer, q, k, v)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(some_tokens(T=5), attend=attend).float().sum().backward()
    assert all(dtypes == {torch.bfloat16} for dtypes in seen)


def test_recomputing_layers_in_backward_changes_no_gradient():
    model, tokens = Llama(LlamaConfig(vocab_size=97)).double().train(), some_tokens(T=10)
    model(tokens).square().mean().backward()
    plain = [w.grad.clone() for w in model.parameters()]
    model.zero_grad()
    model.grad_checkpoint = True
    model(tokens).square().mean().backward()
    for weight, grad in zip(model.parameters(), plain):
        torch.testing.assert_close(weight.grad, grad, rtol=1e-12, atol=1e-15)


def test_rotary_turns_the_first_dimension_one_radian_a_position():
    cos, sin = rotary(LlamaConfig(), torch.arange(4), torch.float64)          # each (1, 1, 4, 32)
    torch.testing.assert_close(cos[0, 0, :, 0], torch.arange(4.0, dtype=torch.float64).cos())
    torch.testing.assert_close(sin[0, 0, :, 16], torch.arange(4.0, dtype=torch.float64).sin())
    torch.testing.assert_close(sin[..., :16], -sin[..., 16:])


def test_rotary_angles_survive_a_forward_of_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode
    config = LlamaConfig(rope_theta=54321.0)   # of no other test: nothing is cached yet
    with FakeTensorMode():
        assert rotary(config, torch.arange(4), torch.float32)[0].shape == (1, 1, 4, 32)
    assert rotary(config, torch.arange(4), torch.float32)[0][0, 0, 0, 0].item() == 1.0
    with FakeTensorMode():
        rotary(config, torch.arange(4), torch.float32)


def test_hidden_size_must_fit_the_heads():
    refusal(lambda: LlamaConfig(hidden_size=64, num_attention_heads=6),
            "hidden_size 64", "num_attention_heads 6", "head_dim")
    assert LlamaConfig(hidden_size=64, num_attention_heads=6, head_dim=32).head_dim == 32


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_decoding_kernels_give_the_training_forward(kind):
    """Without gradients norms, q and k, and on x86 large float32 products, run through other kernels."""
    config = LlamaConfig(vocab_size=97, hidden_size=512, intermediate_size=768, num_hidden_layers=2,
                         num_attention_heads=8, model_type=kind)
    tokens = some_tokens(T=9)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        model = Llama(config).to(dtype)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        trained = model(tokens)
        with torch.inference_mode():
            torch.testing.assert_close(model(tokens), trained.detach(), rtol=tolerance, atol=tolerance)
            model.fuse()
            torch.testing.assert_close(model(tokens), trained.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_model_gives_the_same_logits(backend):
    if backend == "inductor" and not (shutil.which("g++") or shutil.which("c++")):
        pytest.skip("inductor needs a C++ compiler")
    rope = dict(rope_type="llama3", **LLAMA3_ROPE)
    model = Llama(LlamaConfig(vocab_size=97, num_hidden_layers=1, rope_scaling=rope)).eval()
    tokens, at = some_tokens(T=24), torch.tensor([3, 23])
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=backend)   # one graph, no Python between
        # float32, with sums in another order
        torch.testing.assert_close(compiled(tokens, at=at), model(tokens, at=at), rtol=1e-4, atol=1e-5)
    torch.compiler.reset()


# --- the real model

def test_greedy_text_of_the_real_smollm2_is_that_of_transformers():
    folder = smollm2_or_skip()
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Llama.from_pretrained(folder)
    assert ours.config.stop_ids == (2,) and ours.lm_head.weight.dtype == torch.float32
    chat = tokenizer.apply_chat_template([dict(role="user", content="Why is the sky blue?")],
                                         tokenize=False, add_generation_prompt=True)
    for prompt in ("The three primary colours are", "def fibonacci(n):\n", chat):
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            text = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
            new = text[0, ids.shape[1]:]
            # Token for token: by induction, if our argmax behind every prefix of their text is the next.
            at = torch.arange(ids.shape[1], text.shape[1]) - 1
            assert len(new) >= 20 and ours(text, at=at)[0].argmax(-1).tolist() == new.tolist()


# --- what save_pretrained writes

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-llama3", "llama-tied", "qwen3-tied"])
def test_transformers_loads_what_we_save(name, dtype, tmp_path):
    reference(name).save_pretrained(tmp_path / "a")
    ours, tokens = Llama.from_pretrained(tmp_path / "a", dtype=dtype, mask_id=5), some_tokens()
    ours.save_pretrained(tmp_path / "b")
    hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    assert type(hf) is type(reference(name)) and hf.dtype == dtype and hf.config.eos_token_id == 2
    assert hf.generation_config.eos_token_id == 2
    again = Llama.from_pretrained(tmp_path / "b")
    assert again.config == ours.config and again.config.mask_id == 5
    for (key, weight), (_, saved) in zip(ours.state_dict().items(), again.state_dict().items(), strict=True):
        assert torch.equal(weight, saved) and torch.equal(weight, hf.state_dict()[key])
    with torch.no_grad():
        assert torch.equal(again(tokens), ours(tokens))
        hf, ours = hf.double(), ours.double()
        assert distance(ours(tokens), hf(tokens).logits) < TOLERANCE


def test_a_new_model_is_saved_and_found_again(tmp_path):
    model = Llama(LlamaConfig(**PRESETS["tiny"][0]))
    model.save_pretrained(tmp_path / "new")
    again = Llama.from_pretrained(tmp_path / "new")
    assert again.config == model.config and again.config.mask_id == 511 and again.config.stop_ids == (510,)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.mask_id == 511
    assert LlamaConfig.from_pretrained(tmp_path / "new") == model.config


def test_tokenizer_files_and_mask_id_travel_along(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f"this is {name}")
    Llama.from_pretrained(folder, mask_id=7).save_pretrained(tmp_path / "b")
    Llama.from_pretrained(tmp_path / "b").save_pretrained(tmp_path / "c")
    assert json.loads((tmp_path / "c" / "config.json").read_text())["mask_id"] == 7
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "c" / name).read_text() == f"this is {name}"


def test_all_stop_ids_of_the_generation_config_count(folder, tmp_path):
    edit_json(folder / "generation_config.json", eos_token_id=[2, 9])
    model = Llama.from_pretrained(folder)
    assert model.config.stop_ids == (2, 9)
    model.save_pretrained(tmp_path / "b")
    assert LlamaConfig.from_folder(tmp_path / "b").stop_ids == (2, 9)
    assert LlamaConfig(eos_token_id=0).stop_ids == (0,) and LlamaConfig().stop_ids == ()


@pytest.mark.parametrize("shards", ["1GB", "100KB"])
def test_a_model_is_saved_over_the_folder_its_weights_are_mapped_from(shards, tmp_path):
    reference().save_pretrained(tmp_path, max_shard_size=shards)
    (tmp_path / "tokenizer.json").write_text("{}")
    model, tokens = Llama.from_pretrained(tmp_path, mask_id=3), some_tokens()
    with torch.no_grad():
        model.model.norm.weight.mul_(2)   # a mapped weight is written to in memory only
        before = model(tokens)
        model.save_pretrained(tmp_path)
        assert torch.equal(model(tokens), before)
        assert torch.equal(Llama.from_pretrained(tmp_path)(tokens), before)
        # float64 weights, float32 norms and angles in transformers
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert distance(before, hf(tokens).logits) < TOLERANCE
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]


def test_a_mapped_weight_is_never_written_to_its_file(folder):
    before = (folder / "model.safetensors").read_bytes()
    with torch.no_grad():
        for weight in Llama.from_pretrained(folder).parameters():
            weight.zero_()
    assert (folder / "model.safetensors").read_bytes() == before


def test_an_interrupted_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("old")

    def full_disk(temporary):
        temporary.write_text("ne")
        raise OSError("no space left")

    with pytest.raises(OSError):
        write_whole(path, full_disk)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
    with open(path) as reader:   # who has the old file open, or mapped, keeps it
        write_whole(path, lambda temporary: temporary.write_text("new"))
        assert reader.read() == "old" and path.read_text() == "new"


def test_two_writers_of_one_file_do_not_meet(tmp_path):
    path = tmp_path / "results.json"

    def slow(temporary):
        temporary.write_text("slow")
        write_whole(path, lambda other: other.write_text("fast"))   # comes between
        assert path.read_text() == "fast"

    write_whole(path, slow)
    assert path.read_text() == "slow" and list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_the_umask_decides_who_may_read_what_is_written(folder, tmp_path, umask):
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer.json").chmod(0o600)
    before = os.umask(umask)
    try:
        Llama.from_pretrained(folder).save_pretrained(tmp_path / "out")
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
        assert len(modes) == 4 and set(modes.values()) == {0o666 & ~umask}, modes
        assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    finally:
        os.umask(before)


def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(folder):
    resource = pytest.importorskip("resource")
    model, before = Llama.from_pretrained(folder), {path: path.read_bytes() for path in folder.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))   # bytes that a file may have
    try:
        with pytest.raises(OSError) as caught:
            model.save_pretrained(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(str(caught.value).splitlines()) == 1 and "model.safetensors" in str(caught.value)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


KILLED = """
import sys, torch
from model import Llama, LlamaConfig
config = LlamaConfig(vocab_size=2000, hidden_size=256, num_attention_heads=4, num_key_value_heads=4)
print("ready", flush=True)
for step in range(1000):
    model = Llama(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(step)
    model.save_pretrained(sys.argv[1])
    print(step, flush=True)
"""


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path):
    for delay in (0.02, 0.11):
        command = [sys.executable, "-c", KILLED, str(tmp_path)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
            assert [run.stdout.readline() for _ in range(2)] == ["ready\n", "0\n"]
            threading.Event().wait(delay)
            run.kill()
        model = Llama.from_pretrained(tmp_path)
        values = {w.unique().item() for w in model.parameters()}   # each weight one value
        assert len(values) == 1   # and all weights of one step


# --- the published models

@pytest.mark.parametrize("name, billions", [
    ("llama3.1-8b", 8.03), ("llama3.1-70b", 70.6), ("llama3.2-1b", 1.24), ("llama3.2-3b", 3.21),
    ("qwen3-0.6b", 0.596), ("qwen3-8b", 8.19), ("smollm2-135m", 0.1345), ("smollm2-360m", 0.3618),
    ("smollm2-1.7b", 1.71)])
def test_presets_have_the_published_number_of_parameters(name, billions):
    with torch.device("meta"):
        total = sum(weight.numel() for weight in Llama(LlamaConfig.from_pretrained(name)).parameters())
    published = f"{billions:g}"
    assert f"{total / 1e9:.{len(published.split('.')[1])}f}".rstrip("0") == published


# What the config.json files of these models say, copied out by hand:
# hidden, intermediate, layers, heads, kv heads, head_dim, vocabulary, context, theta, rope factor, eps, tied
PUBLISHED = {
    "llama3.1-8b": (4096, 14336, 32, 32, 8, 128, 128256, 131072, 500000.0, 8.0, 1e-5, False),
    "llama3.1-70b": (8192, 28672, 80, 64, 8, 128, 128256, 131072, 500000.0, 8.0, 1e-5, False),
    "llama3.2-1b": (2048, 8192, 16, 32, 8, 64, 128256, 131072, 500000.0, 32.0, 1e-5, True),
    "llama3.2-3b": (3072, 8192, 28, 24, 8, 128, 128256, 131072, 500000.0, 32.0, 1e-5, True),
    "qwen3-0.6b": (1024, 3072, 28, 16, 8, 128, 151936, 40960, 1000000.0, None, 1e-6, True),
    "qwen3-8b": (4096, 12288, 36, 32, 8, 128, 151936, 40960, 1000000.0, None, 1e-6, False),
    "smollm2-135m": (576, 1536, 30, 9, 3, 64, 49152, 8192, 100000.0, None, 1e-5, True),
    "smollm2-360m": (960, 2560, 32, 15, 5, 64, 49152, 8192, 100000.0, None, 1e-5, True),
    "smollm2-1.7b": (2048, 8192, 24, 32, 32, 64, 49152, 8192, 130000.0, None, 1e-5, True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_shape(name):
    c = LlamaConfig.from_pretrained(name)
    assert PUBLISHED[name] == (
        c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads,
        c.head_dim, c.vocab_size, c.max_position_embeddings, c.rope_theta,
        c.rope_scaling and c.rope_scaling["factor"], c.rms_norm_eps, c.tie_word_embeddings)
    if c.rope_scaling:
        assert c.rope_scaling | dict(factor=0) == dict(
            rope_type="llama3", factor=0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=8192)
    assert (c.model_type == "qwen3") == name.startswith("qwen3")
    if name.startswith("llama"):
        assert (c.bos_token_id, c.stop_ids, c.mask_id) == (128000, (128001, 128008, 128009), 128002)
    elif name.startswith("qwen3"):
        assert c.stop_ids == (151645, 151643) and 151669 <= c.mask_id < 151936
    else:
        assert (c.bos_token_id, c.stop_ids, c.mask_id) == (1, (2,), 4)


def test_the_papers_ablation_model_is_a_shape_without_weights():
    c = LlamaConfig.from_pretrained("sbd-3b")
    assert (c.num_hidden_layers, c.hidden_size) == (28, 3072)
    refusal(lambda: Llama.from_pretrained("sbd-3b"), "sbd-3b", "no published weights")


def test_the_preset_of_smollm2_is_the_real_one():
    real, preset = LlamaConfig.from_folder(smollm2_or_skip()), LlamaConfig.from_pretrained("smollm2-135m")
    assert real == dataclasses.replace(preset, mask_id=None)


# --- memory

MEASURE = """
import sys, threading, torch
from model import Llama
def anonymous():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))
dtype = getattr(torch, sys.argv[2])
torch.zeros(1000, 1000).bfloat16().float().sum()   # the libraries' own first use is not the model's
Llama.from_pretrained(sys.argv[3], dtype=dtype)
base = peak = anonymous()
done = threading.Event()
def sample():
    global peak
    while not done.wait(0.001):
        peak = max(peak, anonymous())
thread = threading.Thread(target=sample)
thread.start()
model = Llama.from_pretrained(sys.argv[1], dtype=dtype)
model(torch.arange(8)[None])
done.set()
thread.join()
print(max(peak, anonymous()) - base, sum(w.numel() * w.element_size() for w in model.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="RssAnon is Linux's")
def test_weights_are_never_held_twice(folder, tmp_path):
    shape = dict(vocab_size=16000, hidden_size=1024, intermediate_size=4096, num_attention_heads=8,
                 num_key_value_heads=4)
    with torch.device("meta"):
        config = LlamaConfig(num_hidden_layers=4, **shape)
        big = Llama(config)
    big = big.to_empty(device="cpu")
    with torch.no_grad():
        for weight in big.parameters():
            weight.fill_(0.01)
    big.save_pretrained(tmp_path / "big")
    assert (tmp_path / "big" / "model.safetensors").stat().st_size > 300e6
    for dtype in ("float32", "bfloat16", "float64"):
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "big"), dtype, str(folder)]
        out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        used, weights = map(int, out.split())
        assert used <= 1.15 * weights, f"{dtype}: {used / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights"
    shutil.rmtree(tmp_path / "big")


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(folder, monkeypatch):
    size = sum(w.numel() for w in Llama.from_pretrained(folder).parameters())
    monkeypatch.setattr("hf.safe_open", HeadersOnly)
    monkeypatch.setattr("hf.free_memory", lambda device: size * 4 - 1)
    refusal(lambda: Llama.from_pretrained(folder),
            str(folder), "GiB", "float32", "cpu", "smaller model or dtype")
    refusal(lambda: Llama.from_pretrained(folder, dtype=torch.float64), "float64")
    with pytest.raises(AssertionError):   # in half the bytes it fits, and is read
        Llama.from_pretrained(folder, dtype=torch.bfloat16)


class HeadersOnly:
    def __init__(self, *args, **kwargs):
        from safetensors import safe_open
        self.file = safe_open(*args, **kwargs)

    def keys(self):
        return self.file.keys()

    def get_slice(self, name):
        return self.file.get_slice(name)

    def get_tensor(self, name):
        raise AssertionError(f"{name} was read")


def test_free_memory_is_a_number_of_bytes():
    assert 1e7 < __import__("hf").free_memory("cpu")


# --- bad input: each is one clear line

def test_an_unknown_name_is_refused():
    refusal(lambda: Llama.from_pretrained("llama9-8b"), "'llama9-8b'", "llama3.1-8b", "owner/name")
    refusal(lambda: LlamaConfig.from_pretrained("llama9-8b"), "'llama9-8b'", "llama3.1-8b")
    refusal(lambda: Llama.from_pretrained("./nowhere/at-all"), "./nowhere/at-all", "no folder")
    refusal(lambda: Llama.from_pretrained("../nowhere"), "../nowhere", "no folder")
    refusal(lambda: Llama.from_pretrained("/nowhere/at-all"), "/nowhere/at-all", "no folder")
    refusal(lambda: Llama.from_pretrained(""), "no folder")


def test_a_folder_without_config_or_weights_is_refused(folder, tmp_path):
    refusal(lambda: Llama.from_pretrained(tmp_path), str(tmp_path), "config.json")
    (folder / "model.safetensors").unlink()
    refusal(lambda: Llama.from_pretrained(folder), str(folder), "model.safetensors", "only safetensors")


@pytest.mark.parametrize("text, word", [
    ("{", "not readable JSON"), ("", "not readable JSON"), ("[1]", "list"), ("\xff", "not readable JSON"),
    ("{}", "model_type"), ('{"a":' * 100_000, "not readable JSON"), ("9" * 5000, "not readable JSON")])
def test_a_config_that_is_not_a_json_object_is_refused(folder, text, word):
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    refusal(lambda: Llama.from_pretrained(folder), "config.json", word)


@pytest.mark.parametrize("changes, word", [
    (dict(model_type="mistral", sliding_window=4096), "mistral"),
    (dict(model_type="gpt2"), "gpt2"),
    (dict(model_type="qwen3", use_sliding_window=True, sliding_window=4096), "sliding window"),
    (dict(layer_types=["full_attention", "sliding_attention", "full_attention"]), "sliding window"),
    (dict(attention_bias=True), "bias"),
    (dict(mlp_bias=True), "bias"),
    (dict(hidden_act="gelu"), "gelu"),
    (dict(rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4)), "yarn"),
    (dict(rope_parameters=None, rope_scaling=dict(type="linear", factor=2.0)), "linear"),
    (dict(rope_parameters=None, rope_scaling=dict(type="dynamic", factor=2.0)), "dynamic"),
    (dict(rope_parameters=None, rope_scaling=dict(rope_type="llama3", factor=8.0)), "low_freq_factor"),
    (dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)), "partial"),
    (dict(rope_parameters="linear"), "rope"),
    (dict(quantization_config=dict(quant_method="fp8")), "quantized"),
    (dict(hidden_size=None), "hidden_size"),
    (dict(vocab_size="97"), "vocab_size"),
    (dict(num_hidden_layers=0), "num_hidden_layers is 0"),
    (dict(num_key_value_heads=4), "num_key_value_heads"),
    (dict(head_dim=9), "head_dim"),
    (dict(eos_token_id="</s>"), "eos_token_id"),
    (dict(mask_id=97), "mask_id 97"),
    (dict(mask_id=-1), "mask_id -1"),
])
def test_an_architecture_that_is_not_built_is_refused(folder, changes, word):
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", **changes)
    refusal(lambda: Llama.from_pretrained(folder), "config.json", word)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("given", [{}, dict(num_key_value_heads=None, bos_token_id=None, eos_token_id=None)])
def test_what_a_config_leaves_out_is_what_transformers_takes(kind, given, tmp_path):
    raw = dict(model_type=kind, vocab_size=97, hidden_size=320, intermediate_size=48, num_hidden_layers=2,
               num_attention_heads=32) | given
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = FAMILIES[kind][0].from_dict(raw)
    wanted = dict(rope_theta=theirs.rope_parameters["rope_theta"], rope_scaling=None, mask_id=None)
    assert theirs.rope_parameters["rope_type"] == "default"
    for name, value in vars(LlamaConfig.from_folder(tmp_path)).items():
        assert value == (wanted[name] if name in wanted else getattr(theirs, name)), name


@pytest.mark.parametrize("changes", [
    dict(rope_theta=None), dict(rope_scaling=None, rope_parameters=None, rope_theta=None),
    dict(rope_scaling=dict(rope_type="llama3", **LLAMA3_ROPE)),   # where both forms stand, the older one
    dict(rope_scaling=dict(type="default", rope_theta=77.0), rope_theta=88.0)])
def test_rotary_values_come_from_where_transformers_takes_them(folder, changes):
    raw = json.loads((folder / "config.json").read_text()) | dict(rope_theta=99.0) | changes
    raw = {key: value for key, value in raw.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    theirs, ours = transformers.LlamaConfig.from_dict(raw).rope_parameters, LlamaConfig.from_folder(folder)
    assert ours.rope_theta == theirs["rope_theta"]
    assert (ours.rope_scaling or {}).get("factor") == theirs.get("factor")


NO_SIZE = (0, -1, 1.5, True, "8", [8], {}, 10**12, 2**63, 10**400)
NO_FLOAT = (-1, True, "1", [1.0], {}, math.nan, math.inf, -math.inf, 10**400)
NO_ID = (-1, 97, 10**9, 2**63, 1.5, True, "2", {})
BAD = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim",
                     "num_attention_heads", "num_key_value_heads", "max_position_embeddings"), NO_SIZE),
    "rms_norm_eps": NO_FLOAT, "rope_theta": (0, *NO_FLOAT), "tie_word_embeddings": (1, "true", [True], {}),
    "bos_token_id": ([1], *NO_ID), "mask_id": ([1], *NO_ID),
    "eos_token_id": (*NO_ID, [2, None], *([2, bad] for bad in NO_ID), [[2]]),
    "model_type": ([], {}, 1), "layer_types": (5, "full", {"a": 1}), "hidden_act": ([], 1),
    "rope_scaling": ("llama3", 5, [1])}


def refused_values(folder, name, values, where=lambda changed: changed):
    """Each of the values of `name` is refused in a line that names it; `where` places it in the file."""
    raw = json.loads((folder / "config.json").read_text())
    raw.pop("rope_parameters", None)
    for value in values:
        (folder / "config.json").write_text(json.dumps(raw | where({name: value})))
        word = "window" if name == "layer_types" else name
        refusal(lambda: Llama.from_pretrained(folder), str(folder), word)


@pytest.mark.parametrize("name", BAD)
def test_every_field_of_a_config_is_checked_before_anything_is_built(folder, name):
    (folder / "generation_config.json").unlink()
    refused_values(folder, name, BAD[name])
    kept = json.loads((folder / "config.json").read_text())
    if name == "eos_token_id":   # it also stands in a file of its own
        (folder / "config.json").write_text(json.dumps(kept | {name: 2}))
        for value in BAD[name]:
            (folder / "generation_config.json").write_text(json.dumps({name: value}))
            refusal(lambda: Llama.from_pretrained(folder), str(folder), name)
    if name in LlamaConfig.__dataclass_fields__:
        for value in BAD[name]:
            refusal(lambda: LlamaConfig(**{"vocab_size": 97, name: value}), name)


@pytest.mark.parametrize("name", LLAMA3_ROPE)
def test_every_rotary_value_is_checked(folder, name):
    rope = dict(rope_type="llama3", rope_theta=1e4, **LLAMA3_ROPE)
    refused_values(folder, name, (0, None, *NO_FLOAT), lambda changed: dict(rope_scaling=rope | changed))
    refused_values(folder, "rope_theta", (0, *NO_FLOAT), lambda changed: dict(rope_scaling=rope | changed))
    refused_values(folder, "low_freq_factor", (4.0, 5), lambda changed: dict(rope_scaling=rope | changed))


def test_full_attention_with_an_unused_window_is_accepted(folder):
    edit_json(folder / "config.json", use_sliding_window=False, sliding_window=4096,
              layer_types=["full_attention"] * 3)
    Llama.from_pretrained(folder)


def test_a_mask_id_outside_the_vocabulary_is_refused(folder):
    refusal(lambda: Llama.from_pretrained(folder, mask_id=97), "mask_id 97", "0 to 96")
    assert Llama.from_pretrained(folder, mask_id=0).config.mask_id == 0


@pytest.mark.parametrize("damage", ["empty", "cut short", "zeros", "text"])
def test_a_damaged_shard_is_named(folder, damage):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "cut short": whole[:-100], "zeros": bytes(len(whole)),
                      "text": b"<html>not found</html>"}[damage])
    refusal(lambda: Llama.from_pretrained(folder), str(path), "corrupt or cut short", "download it again")


def test_a_missing_shard_and_an_index_without_weight_map_are_named(tmp_path):
    reference(dtype=torch.float32).save_pretrained(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    refusal(lambda: Llama.from_pretrained(tmp_path), str(tmp_path), shard.name, "download it again")
    index = tmp_path / "model.safetensors.index.json"
    for text, word in (('{"metadata": {}}', "weight_map"), ('{"weight_map": []}', "weight_map"),
                       ("nonsense", "JSON")):
        index.write_text(text)
        refusal(lambda: Llama.from_pretrained(tmp_path), index.name, word)


@pytest.mark.parametrize("shard", ["../good/model-00001.safetensors", "/etc/passwd", "..", "", None, 7,
                                   "a/b.safetensors", "x.bin", "a" * 10_000 + ".bin"])
def test_a_shard_is_a_file_of_the_folder(folder, shard):
    (folder / "model.safetensors").rename(folder / "model-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps(dict(weight_map={"model.norm.weight": "model-00001.safetensors"})))
    Llama.from_pretrained(folder)
    index.write_text(json.dumps(dict(weight_map={"model.norm.weight": shard})))
    refusal(lambda: Llama.from_pretrained(folder), index.name, "shard")


def test_links_to_files_are_files(folder, tmp_path):
    """The hub's cache is made of them."""
    for path in list(folder.iterdir()):
        path.rename(tmp_path / path.name)
        path.symlink_to(Path("..") / path.name)
    Llama.from_pretrained(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs on this system")
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors",
                                  "model.safetensors.index.json"])
def test_pipes_devices_and_folders_are_no_files(folder, name):
    (folder / "model.safetensors.index.json").write_text("{}")
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    path = folder / name

    def stop(*_):
        raise TimeoutError(f"{name} is waited for, or read without end")

    before = signal.signal(signal.SIGALRM, stop)
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        signal.setitimer(signal.ITIMER_REAL, 2)
        try:
            refusal(lambda: Llama.from_pretrained(folder), str(folder))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name, tensor, words", [
    ("model.layers.1.mlp.up_proj.weight", None, ("lacks",)),
    ("model.layers.3.mlp.up_proj.weight", torch.zeros(80, 48), ("unexpected",)),
    ("model.layers.1.self_attn.q_proj.bias", torch.zeros(48), ("unexpected",)),
    ("model.norm.weight", torch.zeros(47), ("(47,)", "(48,)")),
    ("model.norm.weight", torch.zeros(48, dtype=torch.int8), ("I8", "BF16")),
])
def test_weights_that_do_not_fit_the_config_are_named(folder, name, tensor, words):
    change = lambda w: w.pop(name) if tensor is None else w.update({name: tensor})
    edit_weights(folder / "model.safetensors", change)
    refusal(lambda: Llama.from_pretrained(folder), str(folder), name, *words)


@pytest.mark.parametrize("own", [True, False])
def test_a_stored_head_is_used_where_the_config_says_tied(folder, tmp_path, own):
    edit_json(folder / "config.json", tie_word_embeddings=True)
    if not own:
        edit_weights(folder / "model.safetensors",
                     lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"].clone()}))
    ours, tokens = Llama.from_pretrained(folder), some_tokens()
    assert (ours.lm_head.weight is ours.model.embed_tokens.weight) == (not own)
    with torch.no_grad():
        hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert distance(ours(tokens), hf(tokens).logits) < TOLERANCE
        ours.save_pretrained(tmp_path / "again")
        assert torch.equal(Llama.from_pretrained(tmp_path / "again")(tokens), ours(tokens))
        hf = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
        assert distance(ours(tokens), hf(tokens).logits) < TOLERANCE


def test_a_gated_model_says_so(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    def raising(kind):
        def download(*args, **kwargs):
            raise kind.__new__(kind, "a long\nstory of\nmany lines")   # without the HTTP answer it wants
        return download

    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(GatedRepoError))
    refusal(lambda: Llama.from_pretrained("llama3.1-8b"),
            "meta-llama/Llama-3.1-8B-Instruct", "gated", "HF_TOKEN")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", raising(RepositoryNotFoundError))
    refusal(lambda: Llama.from_pretrained("no-one/nothing"), "no-one/nothing", "not on the hub")


def test_offline_a_model_that_is_not_cached_is_refused(tmp_path):
    code = "from model import Llama; Llama.from_pretrained('smollm2-135m')"
    env = dict(os.environ, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
    last = run.stderr.strip().splitlines()[-1]
    assert run.returncode == 1 and "HF_HUB_OFFLINE" in last
    assert last.startswith("ValueError: HuggingFaceTB/SmolLM2-135M-Instruct")


def test_a_cached_model_loads_offline_with_its_presets_mask_id(folder, monkeypatch):
    import huggingface_hub
    seen = []

    def download(name, **kwargs):
        seen.append(name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    edit_json(folder / "config.json", vocab_size=97)
    assert Llama.from_pretrained("smollm2-135m").config.mask_id == 4
    assert Llama.from_pretrained("HuggingFaceTB/SmolLM2-360M-Instruct").config.mask_id == 4
    assert Llama.from_pretrained("some-one/else").config.mask_id is None
    edit_json(folder / "config.json", mask_id=9)
    assert Llama.from_pretrained("smollm2-135m").config.mask_id == 9   # what the checkpoint stores wins
    assert seen[0] == "HuggingFaceTB/SmolLM2-135M-Instruct" and find_folder(folder) == folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("path", ["model.layers.0." + name for name in (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")] + ["lm_head"])
def test_a_weight_replaced_or_changed_after_decoding_counts(path, dtype):
    """fuse lays weights out for decoding; one replaced, changed or hooked afterwards is never bypassed."""
    torch.manual_seed(0)
    model, x = Llama(LlamaConfig(**SMALL)).to(dtype).eval(), torch.tensor([[1, 2, 3]])
    model.fuse()
    linear = model.get_submodule(path)
    tolerance = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float64: 1e-9}[dtype]
    close = dict(rtol=tolerance, atol=tolerance)   # sums in another order

    def replace():
        linear.weight = torch.nn.Parameter(torch.randn_like(linear.weight))

    def replace_by_its_transpose():   # the same memory, the same bits
        if linear.in_features == linear.out_features:
            linear.weight = torch.nn.Parameter(linear.weight.data.t())
        else:
            replace()

    def replace_data():
        linear.weight.data = torch.randn_like(linear.weight)

    def change_in_place():
        with torch.no_grad():
            linear.weight.normal_()

    # PyTorch counts none of these changes; the next decoding calls `fuse`, which sees them.
    def change_data_in_place():
        linear.weight.data.mul_(-3)

    def one_element():
        linear.weight.data[1, 2] += 8

    def train():
        model(x).sum().backward()
        with torch.inference_mode():
            model.fuse()
        torch.optim.AdamW(model.parameters(), lr=1.0, fused=True).step()

    def logits(of):
        with torch.inference_mode():
            return of(x)

    uncounted = change_data_in_place, one_element, train
    for change in (replace, replace_by_its_transpose, replace_data, change_in_place, *uncounted):
        before = logits(model)
        change()
        if change in uncounted:
            model.fuse()
        fresh = Llama(LlamaConfig(**SMALL)).to(dtype).eval()
        fresh.load_state_dict(model.state_dict())
        wanted = logits(fresh)
        if change is not one_element:
            assert not torch.allclose(before, wanted, **close)
        torch.testing.assert_close(logits(model), wanted, **close)
        model.fuse()
        torch.testing.assert_close(logits(model), wanted, **close)

    def forward(x):
        calls.append(1)
        return torch.nn.functional.linear(x, linear.weight)

    for add in (lambda: linear.register_forward_hook(lambda *args: calls.append(1)),
                lambda: linear.register_forward_pre_hook(lambda *args: calls.append(1)),
                lambda: setattr(linear, "forward", forward)):
        model.fuse()
        calls, undo = [], add()
        logits(model)
        assert calls
        undo.remove() if undo else None


def is_joint(mlp):
    """Whether gate and up are one product in decoding."""
    made = mlp.gate_proj.made
    return made is not None and packed_linear.current((mlp.gate_proj, mlp.up_proj), made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decoding_weights_follow_the_model_and_stay_trainable(dtype):
    model, x = Llama(LlamaConfig(**SMALL)).to(dtype), torch.tensor([[1, 2, 3]])
    close = dict(rtol=2e-2, atol=2e-2) if dtype == torch.bfloat16 else {}
    with torch.inference_mode():
        before = model(x)
        model.fuse()
        torch.testing.assert_close(model(x), before, **close)
        torch.testing.assert_close(copy.deepcopy(model)(x), before, **close)
        assert model.lm_head(torch.ones(2, 0, 48, dtype=dtype)).shape == (2, 0, model.config.vocab_size)
    mlp = model.model.layers[0].mlp
    assert is_joint(mlp)
    model(x).sum().backward()
    assert not is_joint(model.to(torch.float16).model.layers[0].mlp)
    with torch.inference_mode():   # PyTorch does not tell whether such weights change: they are never copied
        made_here = Llama(LlamaConfig(**SMALL))
        made_here.fuse()
        assert not is_joint(made_here.model.layers[0].mlp) and made_here.lm_head.made is None


def test_decoding_makes_no_copy_that_memory_has_no_room_for(monkeypatch):
    monkeypatch.setattr("model.free_memory", lambda device: 1000)
    model = Llama(LlamaConfig(**SMALL))
    model.fuse()
    assert model.lm_head.made is None and not is_joint(model.model.layers[0].mlp)


def test_a_fused_model_is_freed_with_its_last_reference():
    model = Llama(LlamaConfig(**SMALL))
    model.fuse()
    gone = weakref.ref(model.model.layers[0].mlp.gate_proj)
    gc.disable()   # no cycle holds the copies until the collector comes by
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()
