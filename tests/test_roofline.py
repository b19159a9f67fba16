"""The roofline: the published tables, corrected cells worked out by hand, and costs counted by other
means."""
import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import roofline
from model import Llama, LlamaConfig
from roofline import (DEVICES, SIZES, Device, end_to_end, forward_parts, forward_time, free_hedges,
                      free_window, knee, prefill_time, published_parts, slowdown, speedup, total,
                      verified_speedup, verified_window)

HERE = Path(__file__).parent
# one layer, 4 query heads sharing 2 KV heads of 4: every number below can be followed on paper
TOY = LlamaConfig(vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                  num_attention_heads=4, num_key_value_heads=2)
SLOW_MATHS, SLOW_MEMORY = Device(1e30, 1.0), Device(1.0, 1e30)   # seconds are flops; seconds are bytes


def cells(name):
    number = lambda name, text: float(text) if name in ("slowdown", "speedup") else int(text)
    with open(HERE / "reference" / name) as file:
        return [{k: number(k, v) for k, v in row.items()} for row in csv.DictReader(file)]


def test_table_3_published():
    rows = cells("table3.csv")
    assert len(rows) == 224
    for r in rows:   # printed with three digits
        ours = slowdown(r["block"], r["kv_len"], r["batch"], published=True)
        assert ours == pytest.approx(r["slowdown"], abs=1e-3), r


def test_table_4_published():
    rows = cells("table4.csv")
    assert len(rows) == 288
    for r in rows:
        ours = speedup(r["block"], r["nfe_speedup"], r["kv_len"], r["batch"], published=True)
        assert ours == pytest.approx(r["speedup"], abs=1e-3), r


def test_corrected_toy_forward_by_hand():
    # 3 rows, a window of 2 behind 10 cached tokens: T = 6 tokens, 12 keys a row
    widths = dict(weight_bytes=0.5, kv_bytes=2, act_bytes=4)
    parts = {p.name: p for p in forward_parts(2, 10, 3, config=TOY, device=SLOW_MATHS, **widths)}
    flops = dict(q_proj=2 * 6 * 16 * 16, k_proj=2 * 6 * 16 * 8, v_proj=2 * 6 * 16 * 8,
                 attention=2 * 2 * 6 * 12 * 16, o_proj=2 * 6 * 16 * 16, gate_proj=2 * 6 * 16 * 32,
                 up_proj=2 * 6 * 16 * 32, down_proj=2 * 6 * 32 * 16, lm_head=2 * 6 * 16 * 100)
    nbytes = dict(q_proj=6 * 16 * 4 + 256 * 0.5 + 6 * 16 * 4, k_proj=6 * 16 * 4 + 128 * 0.5 + 6 * 8 * 2,
                  v_proj=6 * 16 * 4 + 128 * 0.5 + 6 * 8 * 2, attention=2 * 6 * 16 * 4 + 2 * 3 * 12 * 8 * 2,
                  o_proj=6 * 16 * 4 + 256 * 0.5 + 6 * 16 * 4, gate_proj=6 * 16 * 4 + 512 * 0.5 + 6 * 32 * 4,
                  up_proj=6 * 16 * 4 + 512 * 0.5 + 6 * 32 * 4, down_proj=6 * 32 * 4 + 512 * 0.5 + 6 * 16 * 4,
                  lm_head=6 * 16 * 4 + 1600 * 0.5 + 6 * 100 * 4)
    assert {n: p.flops for n, p in parts.items()} == flops
    assert {n: p.bytes for n, p in parts.items()} == nbytes
    assert sum(p.time for p in parts.values()) == sum(flops.values())
    assert total(parts.values()).bound == "compute"
    slow = total(forward_parts(2, 10, 3, config=TOY, device=SLOW_MEMORY, **widths))
    assert slow.time == sum(nbytes.values()) and slow.bound == "memory"


def test_corrected_8b_cells_by_hand():
    """Llama-3.1-8B, batch 1, every width a byte, the paper's device, written out with plain numbers."""
    bandwidth = 3.35 * 1024**4

    def by_hand(w, kv):
        weights = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
        # a token, in and out
        acts = 32 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)) + 4096 + 128256
        moved = 32 * (2 * w * 4096 + 2 * (kv + w) * 1024)
        attention = max(32 * 4 * w * (kv + w) * 4096 / 989e12, moved / bandwidth)
        # linear layers are bound by memory up to 268 tokens
        return (weights + w * acts) / bandwidth + attention

    for w, kv in ((16, 16), (64, 65536), (32, 4096), (2, 0)):
        assert forward_time(w, kv, 1) == pytest.approx(by_hand(w, kv), rel=1e-12), (w, kv)
        assert slowdown(w, kv, 1) == pytest.approx(by_hand(w, kv) / by_hand(1, kv), rel=1e-12)


def test_corrected_cells_that_change_the_conclusion():
    """Real shapes, FFN 14336, the paper's constants: short KV is as cheap as printed, long KV is not."""
    assert slowdown(16, 128, 1) == pytest.approx(1.006, abs=5e-4)
    assert slowdown(16, 128, 16) == pytest.approx(1.096, abs=5e-4)
    assert slowdown(16, 16, 16) == pytest.approx(1.096, abs=2e-3)
    assert slowdown(64, 65536, 1) == pytest.approx(1.35, abs=5e-3)
    assert slowdown(64, 65536, 1, published=True) == pytest.approx(1.016, abs=1e-3)
    # the honest bandwidth softens it, no more
    datasheet = slowdown(64, 65536, 1, device=DEVICES["H100 SXM"])
    assert 1.25 < datasheet < 1.30


def test_flops_of_8b_forward_match_torch_counter():
    config, rows, window, cached = LlamaConfig.from_pretrained("llama3.1-8b"), 2, 16, 100
    with torch.device("meta"):
        model = Llama(config)
        tokens = torch.zeros(rows, window, dtype=torch.long)
        cache = torch.zeros(rows, config.num_key_value_heads, cached, config.head_dim)
        at = torch.arange(4)

        def attend(layer, q, k, v):
            groups = q.shape[1] // k.shape[1]
            k, v = (torch.cat((cache, x), 2).repeat_interleave(groups, 1) for x in (k, v))
            return torch.softmax(q @ k.mT, -1) @ v

        with FlopCounterMode(display=False) as whole, torch.no_grad():
            model(tokens, attend=attend)
        with FlopCounterMode(display=False) as some, torch.no_grad():
            model(tokens, attend=attend, at=at)
    assert total(forward_parts(window, cached, rows, config)).flops == whole.get_total_flops()
    assert total(forward_parts(window, cached, rows, config, logits=4)).flops == some.get_total_flops()


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-8b", "smollm2-135m"])
def test_bytes_match_summed_tensor_sizes(name):
    """Sizes of what each linear layer and each attention reads and writes, from the tensors of a meta
    forward."""
    config, rows, window, cached, seen = LlamaConfig.from_pretrained(name), 3, 16, 50, []

    def size(*tensors):
        seen.append(sum(t.numel() * t.element_size() for t in tensors))

    with torch.device("meta"):
        model = Llama(config).to(torch.bfloat16)
        cache = torch.zeros(rows, config.num_key_value_heads, cached, config.head_dim, dtype=torch.bfloat16)
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(lambda m, inputs, output: size(m.weight, *inputs, output))

        def attend(layer, q, k, v):
            k, v = torch.cat((cache, k), 2), torch.cat((cache, v), 2)
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            size(q, k, v, out)
            return out

        with torch.no_grad():
            model(torch.zeros(rows, window, dtype=torch.long), attend=attend)
    parts = forward_parts(window, cached, rows, config, weight_bytes=2, kv_bytes=2, act_bytes=2)
    assert total(parts).bytes == sum(seen)
    # and the weights alone: all parameters but the norms and, where it is not the head, the embedding
    weights = sum(p.numel() for n, p in model.named_parameters() if p.dim() == 2 and (
        n != "model.embed_tokens.weight" or config.tie_word_embeddings))
    free_of_tokens = forward_parts(1, 0, 1, config, weight_bytes=1, kv_bytes=0, act_bytes=0)
    assert total(free_of_tokens).bytes == weights


def test_peak_follows_the_widths():
    def rate(device, **widths):
        parts = forward_parts(4096, 0, 1, device=DEVICES[device], **widths)
        p = next(p for p in parts if p.name == "up_proj")
        assert p.bound == "compute"
        return p.flops / p.time

    assert rate("H100 SXM") == pytest.approx(1978.9e12)
    assert rate("H100 SXM", act_bytes=2) == pytest.approx(989.4e12)      # 8-bit weights, widened
    assert rate("A100 80G") == pytest.approx(312e12)                     # no FP8 at all
    for d in DEVICES.values():
        assert d.fp8 is None or d.fp8 == pytest.approx(2 * d.bf16, rel=0.02)


def test_one_token_and_one_forward_a_token():
    assert slowdown(1, 4096, 2) == 1
    assert speedup(1, 1, 0, 1) < 1   # a block of one: its pending token makes each forward two tokens wide
    # bytes only, and the weights dwarf the rest: the NFE speedup is the speedup
    free_maths = Device(1.0, 1e30)
    assert speedup(16, 4, 0, 1, device=free_maths) == pytest.approx(4, rel=0.02)


def test_speedup_is_eq_16():
    t = lambda w, **k: forward_time(w, 4096, 2, device=DEVICES["L40S"], **k)
    by_hand = 16 * t(1) / (t(32, logits=16) + 3 * t(16))
    assert speedup(16, 4, 4096, 2, device=DEVICES["L40S"]) == pytest.approx(by_hand, rel=1e-12)


def test_verified_speedup_and_window():
    # next, 15 draft tokens, blocks of 16
    assert verified_window(16, 1) == 32 and verified_window(16, 2) == 48
    by_hand = 9 * forward_time(1, 4096, 1) / forward_time(40.5, 4096, 1)
    assert verified_speedup(9, 40.5, 4096, 1) == pytest.approx(by_hand)
    assert verified_speedup(9, 1, 4096, 1) == 9


def test_free_window_is_the_last_under_five_percent():
    for kv_len, batch in ((256, 1), (4096, 4), (65536, 1), (256, 16)):
        free = free_window(kv_len, batch)
        assert slowdown(free, kv_len, batch) < 1.05 <= slowdown(free + 1, kv_len, batch)
        for block in (4, 8, 16):
            hedges = free_hedges(block, free)
            widths = verified_window(block, hedges), verified_window(block, hedges + 1)
            assert hedges in (0, block) or widths[0] <= free < widths[1]
    assert [free_hedges(16, free) for free in (15, 47, 48)] == [0, 1, 2] and free_hedges(4, 4096) == 4


def test_knee_is_the_last_window_bound_by_memory():
    for kv_len, batch in ((256, 1), (65536, 1), (1024, 16)):
        last = knee(kv_len, batch)
        assert total(forward_parts(last, kv_len, batch)).bound == "memory"
        assert total(forward_parts(last + 1, kv_len, batch)).bound == "compute"


def test_prefill_multiplies_half_the_keys_and_reads_one_row_of_logits():
    parts = {p.name: p for p in forward_parts(5, 0, 2, config=TOY, causal=True, logits=1)}
    assert parts["attention"].flops == 2 * 4 * 16 * (1 + 2 + 3 + 4 + 5)
    assert parts["lm_head"].flops == 2 * 2 * 16 * 100
    assert prefill_time(5, 2, config=TOY, device=SLOW_MATHS) == sum(p.flops for p in parts.values())


def test_end_to_end_adds_up_block_by_block():
    case = dict(config=TOY, device=SLOW_MATHS)
    prefill, ntp, sbd = end_to_end(7, 8, 4, 2, 3, **case)
    t = lambda w, kv, **k: forward_time(w, kv, 3, **case, **k)
    assert prefill == prefill_time(7, 3, **case)
    assert ntp == sum(t(1, 7 + j) for j in range(8))
    assert sbd == t(4, 7) + t(4, 7) + t(8, 11, logits=4) + t(4, 11)   # the first block has nothing pending


@pytest.mark.parametrize("call", [
    lambda: slowdown(0, 16, 1), lambda: slowdown(16, 16, 0), lambda: slowdown(16, -1, 1),
    lambda: slowdown(0, 16, 1, published=True), lambda: published_parts(1, 1, 0),
    lambda: speedup(16, 17, 16, 1), lambda: speedup(16, 0, 16, 1),
    lambda: speedup(16, float("nan"), 16, 1), lambda: free_window(16, 0)])
def test_bad_sizes_raise(call):
    with pytest.raises(ValueError, match="at least 1|at most the block"):
        call()


def test_command_prints_every_cell(capsys):
    roofline.main([])
    out = capsys.readouterr().out
    assert out.count("/") >= 512 and "1.016" in out and "1.345" in out


def test_command_prints_a_case_and_plots(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    roofline.main(["--model", "llama3.1-70b", "--device=h200", "--batch", "8", "--kv_len=32768",
                   "--plot", str(path)])
    out = capsys.readouterr().out
    assert all(word in out for word in ("lm_head", "total", "Free", "hedges", "Eq. 16", "end to end"))
    assert path.read_bytes().startswith(b"\x89PNG") and [p.name for p in tmp_path.iterdir()] == ["out.png"]


HUGE = [[f"--{name}={n}"] for name in SIZES for n in (10**12, 2**63, 10**400)]


@pytest.mark.parametrize("argv, words", [
    (["--device", "H1000"], "H200"), (["--model", "llama9"], "llama3.1-8b"),
    (["--batch", "0"], "wanted 1 to"), (["--block_size", "0"], "wanted 1 to"),
    (["--kv_len", "-1"], "wanted 0 to"), (["--nfe_speedup", "17"], "block size"),
    (["--nfe_speedup", "nan"], "block size"),
    (["--weight_bytes", "3"], "0.5"), (["--plot", "no/such/folder.png"], "folder"),
    (["--batch", "many"], "int"), (["--wat", "1"], "--wat"), *[(argv, "wanted") for argv in HUGE]])
def test_bad_input_is_one_line(argv, words, capsys):
    with pytest.raises(ValueError) as error:
        roofline.main(argv)
    assert words in str(error.value) and "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", SIZES)
def test_every_size_within_bounds_has_an_answer(name, capsys):
    for n in SIZES[name][:2]:
        roofline.main(["--nfe_speedup=1", "--block_size=1", f"--{name}={n}"])   # the last one given counts
    assert capsys.readouterr().out.count("end to end") == 2


@pytest.mark.parametrize("path", ["/proc/a.png", "/dev/null/a.png", "a" * 252 + ".png", "a\0.png",
                                  "folder.png"])
def test_a_plot_that_cannot_be_written_is_refused_at_once(path, monkeypatch, tmp_path, capsys):
    (tmp_path / "folder.png").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError)) as error:
        roofline.main([f"--plot={path}"])
    assert "\n" not in str(error.value) and capsys.readouterr().out == ""
    assert [p.name for p in tmp_path.iterdir()] == ["folder.png"]


def command(*arguments, **options):
    return subprocess.Popen([sys.executable, HERE.parent / "roofline.py", *arguments], stderr=subprocess.PIPE,
                            text=True, **options)


def test_a_refusal_of_the_command_is_one_line_and_exit_code_2():
    process = command("--kv_len=-1")
    assert process.communicate()[1] == f"roofline.py: --kv_len -1: wanted 0 to {2**31}\n"
    assert process.returncode == 2


def test_a_closed_pipe_ends_the_command_quietly():
    read, write = os.pipe()
    os.close(read)                                             # as `| head` does when it has seen enough
    process = command(stdout=write)
    os.close(write)
    assert process.communicate()[1] == "" and process.returncode == 141


@pytest.mark.parametrize("seconds", [0.5, 2])
def test_ctrl_c_ends_the_command_quietly(seconds):
    """Also while it still imports."""
    process = command("--new_tokens=131072", "--block_size=1", "--nfe_speedup=1", stdout=subprocess.DEVNULL)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "" and process.returncode == 130


def test_heads_that_do_not_divide_are_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(
        model_type="llama", vocab_size=100, hidden_size=96, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=4)))
    with pytest.raises(ValueError, match="multiple"):
        roofline.main(["--model", str(tmp_path)])


def test_missing_matplotlib_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        roofline.main([f"--plot={tmp_path}/out.png"])


def test_help_runs_as_a_script():
    process = command("--help", stdout=subprocess.PIPE)
    assert "--nfe_speedup" in process.communicate()[0] and process.returncode == 0
