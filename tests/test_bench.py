"""bench.py: its arithmetic by hand, what it counts against the decoding it watched, tiny runs, refusals.

Nothing here is about speed.
"""
import errno
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bench
import generate as decoding
from eb_sampler import SAMPLERS
from model import Llama, LlamaConfig
from roofline import Device, forward_time

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "checkpoints" / "tiny-sbd")


@pytest.fixture(scope="module")
def tiny():
    return Llama.from_pretrained(TINY)


def test_equation_16_by_hand():
    # k = 16 in l = 4 forwards: 16 * 10 ms against one of 15 ms and three of 12 ms
    assert bench.equation_16(10, 12, 15, k=16, nfe_speedup=4) == pytest.approx(160 / (15 + 3 * 12))
    assert bench.equation_16(1, 1, 1, k=16, nfe_speedup=4) == 4   # equal forwards: the NFE speedup itself
    # one forward a block: t(k) is not used
    assert bench.equation_16(2, 5, 7, k=8, nfe_speedup=8) == pytest.approx(16 / 7)


@pytest.mark.parametrize("k, S, forwards", [
    (16, 4, [4, 4, 4]), (16, 3, [5, 5, 6]), (16, 1, [16, 16, 16]), (8, 8, [1, 1, 1]), (5, 2, [2, 3, 2, 3]),
    (16, 2.5, [6, 6, 7, 6, 7])])
def test_schedule_spends_k_over_s_forwards_a_block(k, S, forwards):
    reveals, spent = bench.schedule(k, S), []
    for _ in forwards:
        block = []
        while sum(block) < k:
            block.append(next(reveals))
        assert sum(block) == k and max(block) - min(block) <= 1          # whole blocks, evenly
        spent.append(len(block))
    assert spent == forwards


def test_replay_reveals_from_left_to_right():
    rule, masked = bench.replay(4, 4 / 3), np.ones((1, 4), bool)   # three forwards a block of 4: 1, 1, 2
    assert rule(None, None, masked, None).tolist() == [[True, False, False, False]]
    assert rule(None, None, masked[:, 1:], None).tolist() == [[True, False, False]]
    assert rule(None, None, masked[:, 2:], None).tolist() == [[True, True]]


@pytest.mark.parametrize("mode, W, k, h, expected", [
    ("ntp", 1, 16, 2, (1, 0, 1)), ("sbd", 16, 16, 2, (0, 1, 16)), ("sbd", 32, 16, 2, (16, 1, 16)),
    ("verified", 17, 16, 2, (1, 1, 16)), ("verified", 48, 16, 2, (16, 2, 31)),
    ("verified", 41, 16, 2, (9, 2, 24)), ("verified", 30, 16, 4, (14, 1, 29)),
    ("verified", 1, 1, 2, (1, 0, 1))])
def test_layout_of_a_decoding_window(mode, W, k, h, expected):
    # (causal tokens, blocks, logits read): verified reads next and draft, and a block but for its first place
    assert bench.layout(mode, W, k, h) == expected
    assert expected[0] + k * expected[1] == W


def test_interleaved_runs_in_rounds():
    calls = []
    functions = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = bench.interleaved(functions, repeats=3, least=0)
    assert "".join(calls) == "ab" "ab" + "ab" * 3     # two warm-ups, then three rounds
    assert {name: len(s) for name, s in seconds.items()} == {"a": 3, "b": 3}


def test_ratio_is_the_median_of_the_rounds_ratios():
    assert bench.ratio([2, 30, 8], [1, 10, 2]) == 3   # 2, 3, 4; of the medians it would be 4


def test_forwards_of_sees_every_decoding_forward(tiny):
    prompt, h = list(range(20, 50)), 2
    for mode, k in (("sbd", 4), ("ntp", 1), ("verified", 4)):
        steps = []
        seen = bench.forwards_of(tiny, lambda: steps.extend(step for [step] in decoding.decode(
            tiny, [prompt], mode=mode, block_size=k, hedges=h, max_new_tokens=24, stop_ids=())))
        assert len(steps) == steps[-1].row.nfe
        if mode == "sbd":   # a window is the block, behind the finished one where one is pending
            assert len(seen) == len(steps) and {W for _, W in seen} == {k, 2 * k}
            assert sum(W == 2 * k for _, W in seen) == math.ceil(24 / k) - 1
        else:               # the first token is the prefill's; a `next` that ends the row needs no forward
            assert seen[0] == (len(prompt), 1 + k * (mode == "verified"))
            assert len(seen) in (len(steps), len(steps) - 1)
            drafts, blocks = [len(s.drafted) for s in steps], h * (mode == "verified")
            widths = [1 + d + k * min(blocks, d + 1) for d in drafts]
            assert [W for _, W in seen] == widths[:len(seen)]
            tokens_before = np.cumsum([0] + [len(s.final) for s in steps])
            assert [kv_len for kv_len, _ in seen] == [len(prompt) + n for n in tokens_before[:len(seen)]]
    assert "hidden" not in vars(tiny)                                     # nothing is left behind


def test_forward_job_runs_the_window_that_decoding_would(tiny):
    cache = bench.filled_cache(tiny, 1, 20, 48)
    seen = bench.forwards_of(tiny, bench.forward_job(tiny, cache, 16, 9, 2, 24))
    # it commits nothing: every call is the same
    assert seen == [(20, 41)] and cache.lengths.tolist() == [20]


class Products(torch.overrides.TorchFunctionMode):
    """Collects the number of weights of each linear product."""
    def __init__(self, seen):
        self.seen = seen

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.nn.functional.linear:
            self.seen.append(args[1].numel())
        return function(*args, **kwargs or {})


def test_linears_job_multiplies_every_weight_once(tiny, monkeypatch):
    # all products through F.linear, where they can be counted
    monkeypatch.setattr("kernels.packed_linear.pack", lambda weight: None)
    tiny.float().fuse()
    seen = []
    with Products(seen):
        bench.linears_job(tiny, 1)()
        bench.linears_job(tiny, 1, torch_own=True)()
    assert sum(seen) == 2 * sum(m.weight.numel() for m in tiny.modules() if isinstance(m, torch.nn.Linear))


def test_random_model_is_made_in_its_dtype():
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
    model = bench.random_model(config, torch.device("cpu"), torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert not any(p.is_meta for p in model.parameters())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, p in model.named_parameters():
        assert (p == 1).all() if p.dim() == 1 else 0.01 < p.float().std() < 0.03, name
    with torch.inference_mode():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]]))).all()


QUICK = ["--repeats=2", "--num_prompts=2", "--max_new_tokens=20", "--kv_lens=8,16", "--batches=1,2",
         "--batch_size=1", "--seq_len=16"]


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bench, "BIG", 2**23)
    monkeypatch.setattr(bench, "SIDE", 64)


def positive(value):
    """Every number of the figures, but for those that may be 0 or absent, is above 0."""
    if isinstance(value, dict):
        return all(positive(v) for name, v in value.items() if name != "replayed")
    if isinstance(value, list):
        return all(map(positive, value))
    return value is None or isinstance(value, str) or value > 0


def test_a_tiny_run_writes_all_figures(small, tmp_path, capsys):
    bench.main([*QUICK, f"--json={tmp_path}/figures.json"])
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert positive(figures) and f"{torch.get_num_threads()} threads" in figures["title"]
    measured = {(f["batch"], f["kv_len"], f["window"]) for f in figures["forwards"]}
    names = *bench.WINDOWS, "prefill", "linears", "torch's linears"
    assert measured == set(itertools.product((1, 2), (8, 16), names))
    bandwidth, peak = figures["ceilings"]["bandwidth"], figures["ceilings"]["matmul_flops"]
    memory = figures["ceilings"]["memory"][str(4 * figures["parameters"])]
    assert bandwidth == max(memory.values())
    one = next(f for f in figures["forwards"] if f["window"] == 1)
    case = dict(config=LlamaConfig.from_pretrained(TINY), device=Device(bandwidth, peak))
    assert one["roofline"]["time"] == forward_time(1, 8, 1, **case, weight_bytes=4, kv_bytes=4, act_bytes=4)
    d = figures["decoding"]
    # the prefill's tokens need none
    assert d["ntp"]["tokens"] == d["ntp"]["nfe"] == 40 and d["ntp"]["forwards"] == 38
    for i, (wall, predicted) in enumerate(zip(d["sbd"]["wall_clock"], d["sbd"]["predicted"])):
        assert wall == pytest.approx(d["sbd"]["decode_tokens_per_s"][i] / d["ntp"]["decode_tokens_per_s"][i])
        t = [d["forward_s"][name][i] for name in ("ntp 1", "sbd 16", "sbd 32")]
        assert predicted == pytest.approx(bench.equation_16(*t, 16, d["sbd"]["nfe_speedup"]))
    v = d["verified"]
    assert v["predicted"][0] == pytest.approx((v["tokens"] - 2) / v["forwards"] * d["forward_s"]["ntp 1"][0]
                                              / d["forward_s"][f"verified {round(v['mean_window'])}"][0])
    assert set(figures["training"]["seconds"]) == {"ntp", "sbd", "adapter"}
    assert "REPLAYING" not in capsys.readouterr().out


def test_random_weights_replay_the_schedule_through_the_decoding_loop(small, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench.main(["--init_from=tiny", "--random_weights", "--nfe_speedup=4", *QUICK, "--max_new_tokens=32",
                "--dtype=bfloat16", "--batches=1", f"--json={tmp_path}/a.json", f"--plot={tmp_path}/a.svg"])
    d = json.loads((tmp_path / "a.json").read_text())["decoding"]
    assert "REPLAYING 4 tokens a forward" in capsys.readouterr().out
    assert d["replayed"] == 4 and "verified" not in d and "replay" not in SAMPLERS
    # each prompt: two blocks of 16 in 4 forwards each; the first of the second block carries the first block
    assert d["sbd"]["tokens"] == 64 and d["sbd"]["nfe"] == d["sbd"]["forwards"] == 16
    assert d["sbd"]["mean_window"] == (16 * 7 + 32) / 8
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")
    bench.main(["--init_from=tiny", "--random_weights", *QUICK, f"--json={tmp_path}/b.json"])
    # without a schedule its NFE means nothing
    assert "sbd" not in json.loads((tmp_path / "b.json").read_text())["decoding"]


def refused(arguments, monkeypatch) -> str:
    """The one line with which main refuses, before anything is loaded, timed or printed."""
    monkeypatch.setattr(Llama, "from_pretrained", lambda *a: pytest.fail("weights were read"))
    monkeypatch.setattr(bench, "ceilings", lambda *a: pytest.fail("something was timed"))
    with pytest.raises((ValueError, OSError)) as error:
        bench.main(arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("arguments, message", [
    (["--repeats=0"], "--repeats 0"), (["--block_size=0"], "block_size 0"),
    (["--max_new_tokens=1"], "--max_new_tokens 1"), (["--kv_lens=0"], "--kv_lens"),
    (["--kv_lens=1,x"], "--kv_lens"), (["--batches=-1"], "--batches"), (["--gamma=nan"], "nan"),
    (["--nfe_speedup=17"], "--nfe_speedup 17"), (["--nfe_speedup=0.5"], "--nfe_speedup 0.5"),
    (["--kv_lens=2000"], "context"), (["--seq_len=3000"], "context"), (["--max_new_tokens=3000"], "context"),
    (["--against=transformers", "--nfe_speedup=2"], "leave out --nfe_speedup"),
    (["--against=vllm"], "--against"), (["--kernels", "--nfe_speedup=2"], "leave out --nfe"),
    (["--against=transformers", "--random_weights"], "leave out --random"),
    (["--mask_id=512"], "mask_id 512"), (["--plot=a.gif"], "a.gif"), (["--device=gpu"], "--device gpu"),
    (["--device=hpu"], "--device hpu"), (["--device=meta"], "--device meta"),
    (["--init_from=/nowhere/at/all"], "/nowhere/at/all"), (["--batches=100000000"], "GiB"),
    (["--batch_size=65536", "--seq_len=2048"], "GiB"), (["--num_prompts=60000"], "60000 held-out"),
    (["--speed=3"], "--speed")])
def test_refusals_before_anything_is_loaded(arguments, message, monkeypatch):
    assert message in refused(arguments, monkeypatch)


@pytest.mark.parametrize("n", [10**12, 2**63, 10**400], ids=["10^12", "2^63", "10^400"])
@pytest.mark.parametrize("name", ["block_size", "hedges", "max_new_tokens", "kv_lens", "batches",
                                  "nfe_speedup", *bench.COUNTS])
def test_huge_numbers_are_refused(name, n, monkeypatch):
    assert "wanted" in refused([f"--{name}={n}"], monkeypatch)


@pytest.mark.parametrize("path", ["/nowhere/a.json", "/proc/a.json", "/dev/full", "/dev/null/a.json",
                                  "a" * 252, ".", ""])
@pytest.mark.parametrize("more", [[], ["--kernels"]])
def test_a_file_that_cannot_be_written_is_refused_at_once(path, more, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "--json" in refused([f"--json={path}", *more], monkeypatch) and not list(tmp_path.iterdir())


def test_a_full_disk_is_one_line_and_leaves_the_old_file(monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "a.json").write_text("old")
    monkeypatch.setattr(bench, "bench", lambda args: {})
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        bench.main([f"--json={tmp_path}/a.json"])
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"a.json": "old"}


def test_missing_matplotlib_and_no_mask_id_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        bench.main([f"--plot={tmp_path}/a.png"])
    config = json.loads((Path(TINY) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "mask_id"}))
    with pytest.raises(ValueError, match="give --mask_id"):
        bench.main([f"--init_from={tmp_path}"])


def test_exit_code_2_and_one_line():
    run = subprocess.run([sys.executable, ROOT / "bench.py", "--repeats=0"], capture_output=True, text=True)
    assert run.stderr == "bench.py: --repeats 0: wanted 1 to 1000\n"
    assert run.returncode == 2 and run.stdout == ""


def test_ctrl_c_and_a_closed_pipe_end_the_command_quietly():
    command = [sys.executable, ROOT / "bench.py", "--repeats=1000"]
    options = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                   env=os.environ | dict(PYTHONUNBUFFERED="1"))
    process = subprocess.Popen(command, **options)
    assert "parameters" in process.stdout.readline()           # it runs
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "" and process.returncode == 130
    process = subprocess.Popen(command, **options)
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141
