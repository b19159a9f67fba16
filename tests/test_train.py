"""train.py: a run that was killed, stopped or refused leaves what it should, and what it trains is Eq. 14."""
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cli
import train
from data.bin import Dataset, batch, num_ntp_targets, pack, write_set
from eval import label
from model import Llama, LlamaConfig
from smollm2 import smollm2_or_skip
from tokenizer import Tokenizer

ROOT = Path(train.__file__).parent
TOKENIZER = ROOT / "data/word_problems"
EOS, MASK = 510, 511
# Calls in this order: 4 steps, validation, checkpoint; 4 steps, validation, checkpoint; ...
SMALL = dict(seq_len=64, batch_size=4, max_steps=12, eval_interval=4, log_interval=3, eval_rows=4, lr=1e-2,
             warmup_steps=3, block_size_max=8, device="cpu", dtype="float32", sample_problems=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Options that train a model of 50k parameters on 300 documents of counting."""
    folder = tmp_path_factory.mktemp("small")
    torch.manual_seed(0)
    model = Llama(LlamaConfig(512, 32, 64, 2, 4, 2, max_position_embeddings=256, eos_token_id=EOS,
                              mask_id=MASK))
    model.folder = TOKENIZER
    model.save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    documents = [[*((rng.integers(400) + np.arange(rng.integers(8, 50))) % 500), EOS] for _ in range(300)]
    documents = [(ids, [i > 2 for i in range(len(ids))]) for ids in documents]
    write_set(folder / "data", dict(train=documents[:250], val=documents[250:]), [EOS], 512,
              tokenizer=str(TOKENIZER), tokenizer_hash=Tokenizer(TOKENIZER).hash)
    return dict(SMALL, init_from=folder / "model", dataset=folder / "data")


@pytest.fixture(autouse=True)
def signal_handlers():
    """Those of pytest are back in place after each test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def argv(options, **more):
    options = options | more
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
            if value is not None]


def losses_of(out_dir):
    """log.csv as text, without the tokens a second."""
    return [line.rsplit(",", 1)[0] for line in (out_dir / "log.csv").read_text().splitlines()]


def same_run(a, b):
    """Asserts that two finished runs have the same losses, weights and optimizer states, bit for bit."""
    assert losses_of(a) == losses_of(b)
    last = train.newest(a).name
    assert last == train.newest(b).name
    name = "model.safetensors" if (a / "model.safetensors").exists() else "adapter.safetensors"
    assert (a / last / name).read_bytes() == (b / last / name).read_bytes()
    assert (a / name).read_bytes() == (b / name).read_bytes()
    for i, state in enumerate(states := optimizer_states(a / last)):
        for name, value in state.items():
            assert torch.equal(value, optimizer_states(b / last)[i][name]), name
    assert states


def optimizer_states(folder):
    return list(torch.load(folder / "train_state.pt", weights_only=True)["optimizer"]["state"].values())


@pytest.fixture(scope="module")
def whole(small, tmp_path_factory):
    """The output folder of a run that nothing stopped."""
    out = tmp_path_factory.mktemp("whole") / "out"
    train.main(argv(small, out_dir=out))
    return out


def signal_at(name, call, number, twice=False):
    """Code that makes train.NAME send its own process a signal when it is called for the call-th time."""
    return f"""
import os, train
original, calls = train.{name}, []
def counted(*args, **kw):
    calls.append(0)
    if len(calls) == {call}:
        for _ in range({1 + twice}):
            os.kill(os.getpid(), {int(number)})
    return original(*args, **kw)
train.{name} = counted
"""


def run_and_signal(options, name, call, number, twice=False):
    """train.py in a process of its own that is signalled at that point -> the ended process."""
    code = signal_at(name, call, number, twice) + f"train.main({argv(options)!r})"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


# ------------------------------------------------------------------------------ stopping and going on

@pytest.mark.parametrize("name, call, left", [
    ("after", 7, 4),           # in step 7, behind the log line of step 6: newer than the checkpoint of step 4
    ("write_whole", 7, 4),     # in save at step 8: weights written, optimizer state not
    ("flush_folder", 3, 4),    # in save at step 8: all written, not renamed
    ("flush_folder", 4, 8),    # in save at step 8: renamed, the older checkpoint not removed yet
])
def test_kill_9_leaves_the_last_good_checkpoint_and_resume_is_bit_for_bit(small, whole, tmp_path, name, call,
                                                                          left):
    out = tmp_path / "out"
    assert run_and_signal(dict(small, out_dir=out), name, call, signal.SIGKILL).returncode == -signal.SIGKILL
    assert train.newest(out).name == f"step-{left:08d}"
    assert Llama.from_pretrained(out).lm_head.weight.dtype == torch.float32   # a run under way loads
    train.main(["--resume", f"--out_dir={out}"])
    same_run(out, whole)
    assert [path.name for path in out.glob("*-*")] == ["step-00000012"]  # nothing half-written stays behind
    for folder in (out, out / "step-00000012"):
        assert (folder / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()


def test_kill_9_before_the_first_checkpoint_leaves_a_folder_to_start_again_in(small, whole, tmp_path, capsys):
    out = tmp_path / "out"
    run_and_signal(dict(small, out_dir=out), "flush_folder", 1, signal.SIGKILL)
    assert train.newest(out) is None
    refused(["--resume", f"--out_dir={out}"], "holds no checkpoint", capsys)
    train.main(argv(small, out_dir=out))
    same_run(out, whole)


def test_an_adapter_is_killed_and_resumed_bit_for_bit_and_goes_on_from_its_folder(small, tmp_path, capsys):
    options = dict(small, adapter_rank=3, full_mask_prob=1, out_dir=tmp_path / "whole")
    train.main(argv(options))
    out, base = tmp_path / "out", (small["init_from"] / "model.safetensors").read_bytes()
    assert run_and_signal(dict(options, out_dir=out), "flush_folder", 3, signal.SIGKILL).returncode < 0
    assert train.newest(out).name == "step-00000004" and Llama.from_pretrained(out).adapter["rank"] == 3
    train.main(["--resume", f"--out_dir={out}"])
    same_run(out, tmp_path / "whole")
    files = {path.name for folder in (out, train.newest(out)) for path in folder.iterdir() if path.is_file()}
    assert files == {"adapter.json", "adapter.safetensors", "train_state.pt", "log.csv", ".lock"}
    assert (small["init_from"] / "model.safetensors").read_bytes() == base
    losses = [float(line.split(",")[2]) for line in losses_of(out)[1:]]
    assert losses[-1] < losses[0]   # of a random base, whose own entropy is nearly all of it
    more = dict(options, init_from=out, out_dir=tmp_path / "more")
    refused(argv(more, adapter_rank=4), "adapter of rank 3", capsys)
    refused(argv(more, adapter_rank=0), "adapter of rank 3", capsys)
    refused(argv(more, objective="ntp"), "not ntp", capsys)
    refused(argv(more, adapter_rank=0, place0=True), "give --adapter_rank", capsys)
    refused(argv(more, out_dir=out), "another run", capsys)
    train.main(argv(more))
    about = json.loads((tmp_path / "more/adapter.json").read_text())
    assert about["base"] == str(small["init_from"]) and about["targets"] == "self"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("name, call, done", [
    ("losses", 1, 1),          # the first step
    ("after", 6, 6),           # a step with a log line
    ("validate", 1, 4),        # the evaluation
    ("save", 2, 8),            # a checkpoint
    ("after", 12, 12),         # the last step: finishing is left to --resume
])
def test_ctrl_c_and_sigterm_save_and_resume_as_if_never_stopped(small, whole, tmp_path, monkeypatch, capsys,
                                                                number, code, name, call, done):
    out, calls, original = tmp_path / "out", [], getattr(train, name)

    def signalled(*args, **kw):
        calls.append(0)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return original(*args, **kw)

    monkeypatch.setattr(train, name, signalled)
    with pytest.raises(SystemExit) as exit:
        train.main(argv(small, out_dir=out))
    assert exit.value.code == code
    how = f"stopped at step {done}; go on with: python train.py --resume --out_dir={out}"
    assert how in capsys.readouterr().out
    assert train.newest(out).name == f"step-{done:08d}"
    monkeypatch.setattr(train, name, original)
    train.main(["--resume", f"--out_dir={out}"])
    same_run(out, whole)


def test_the_shell_sees_143_and_a_second_ctrl_c_ends_at_once(small, tmp_path):
    first = run_and_signal(dict(small, out_dir=tmp_path / "a"), "losses", 2, signal.SIGTERM)
    assert first.returncode == 143 and "--resume --out_dir=" in first.stdout and not first.stderr
    second = run_and_signal(dict(small, out_dir=tmp_path / "b"), "losses", 2, signal.SIGINT, twice=True)
    assert second.returncode == 130 and train.newest(tmp_path / "b") is None and not second.stderr


def test_a_finished_run_goes_on_to_more_steps(small, tmp_path):
    out = tmp_path / "out"
    train.main(argv(small, out_dir=out, max_steps=4))
    train.main(["--resume", f"--out_dir={out}", "--max_steps=8", "--lr=1e-3"])
    assert train.newest(out).name == "step-00000008"
    assert [line.split(",")[0] for line in losses_of(out)] == ["step", "3", "4", "6", "8"]


# ------------------------------------------------------------------------------ losses that are not finite

@pytest.mark.parametrize("call, step, left", [(2, 2, None), (6, 6, "step-00000004"), (8, 8, "step-00000004")])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_non_finite_loss_stops_the_run_and_keeps_the_last_good_checkpoint(small, tmp_path, monkeypatch, what,
                                                                          call, step, left):
    out, calls, original = tmp_path / "out", [], train.losses

    def broken(*args, **kw):
        result = original(*args, **kw)
        calls.extend([0] * (len(args) > 5))  # validation gives no num_targets
        if len(calls) == call:
            result.loss = result.loss * math.inf
            result.ntp = result.ntp * math.inf if what == "loss" else result.ntp
        return result

    monkeypatch.setattr(train, "losses", broken)
    with pytest.raises(SystemExit) as exit:
        train.main(argv(small, out_dir=out, grad_clip=0 if what == "gradient" else 1))
    message = exit.value.code
    assert f"not finite at step {step};" in message and "\n" not in message
    assert ("step-00000004 is the last good checkpoint" if left else "there is no checkpoint yet") in message
    assert [path.name for path in out.glob("step-*")] == ([left] if left else [])
    if left:
        assert all(w.isfinite().all() for w in Llama.from_pretrained(out).parameters())


def test_a_checkpoint_is_not_saved_where_the_validation_loss_is_not_finite(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "validate", lambda *args: [1.0, math.nan])
    with pytest.raises(SystemExit, match="not finite at step 4; there is no checkpoint yet"):
        train.main(argv(small, out_dir=tmp_path / "out"))
    assert train.newest(tmp_path / "out") is None


# ------------------------------------------------------------------------------ refusals

def refused(arguments, words, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["train.py"])
        cli.run(lambda: train.main(arguments))
    error = capsys.readouterr().err
    assert exit.value.code == 2
    assert words in error and error.count("\n") == 1 and error.startswith("train.py: "), error


@pytest.mark.parametrize("options, words", [
    (dict(lr=0), "--lr 0.0: wanted 1e-15 to 1000"),
    (dict(lr="nan"), "--lr nan: wanted"),
    (dict(lr="inf"), "--lr inf: wanted"),
    (dict(batch_size=0), "--batch_size 0: wanted 1 to 16777216"),
    (dict(grad_accum=-1), "--grad_accum -1: wanted"),
    (dict(max_steps=0), "--max_steps 0: wanted"),
    (dict(warmup_steps=-1), "--warmup_steps -1: wanted"),
    (dict(seed=-1), "--seed -1: wanted"),
    (dict(beta2=1), "--beta2 1.0: wanted 0 to 0.999999999"),
    (dict(ntp_weight=-1), "--ntp_weight -1.0: wanted"),
    (dict(full_mask_prob=1.5), "--full_mask_prob 1.5: wanted 0 to 1"),
    (dict(sample_problems=2001), "--sample_problems 2001: wanted 0 to 2000"),
    (dict(block_size_min=0), "--block_size_min 0: wanted"),
    (dict(block_size_min=9), "--block_size_min 9 is more than --block_size_max 8"),
    (dict(seq_len=257), "--seq_len 257: wanted 2 to 256, the model's context"),
    (dict(seq_len=1), "--seq_len 1: wanted 2 to"),
    (dict(mask_id=512), "mask_id 512 is outside the vocabulary"),
    (dict(device="cuda:77"), "--device cuda:77 is not there"),
    (dict(device="nothing"), "--device nothing is not there"),
    (dict(device="meta"), "--device meta is not there"),
    (dict(init_from="nothing"), "is no folder here, no preset"),
    (dict(init_from=ROOT / "tests"), "has no config.json"),
    (dict(dataset="nothing"), "run one of data/*/prepare.py first"),
    (dict(out_dir=ROOT / "train.py"), "is a file"),
    (dict(resume=True), "holds no checkpoint"),
    (dict(resume=True, overwrite=True), "give one of them"),
])
def test_bad_options_are_refused_in_one_line(small, tmp_path, capsys, options, words):
    refused(argv(small, **dict(out_dir=tmp_path / "out") | options), words, capsys)
    assert not (tmp_path / "out").exists()


def test_a_missing_data_set_names_its_prepare_script(small, tmp_path, capsys, monkeypatch):
    (tmp_path / "data/stdlib").mkdir(parents=True)
    (tmp_path / "data/stdlib/prepare.py").touch()
    monkeypatch.setattr(train, "HERE", tmp_path)
    refused(argv(small, dataset="stdlib", out_dir=tmp_path / "out"),
            f"run python {tmp_path}/data/stdlib/prepare.py first", capsys)


def test_the_word_problems_prepare_themselves(small, tmp_path, monkeypatch, capfd):
    """Here with a stand-in for prepare.py, which copies a small set."""
    folder = tmp_path / "data/word_problems"
    folder.mkdir(parents=True)
    copy = f"shutil.copytree({str(small['dataset'])!r}, {str(folder)!r}, dirs_exist_ok=True)"
    (folder / "prepare.py").write_text(f"import shutil\n{copy}\n")
    monkeypatch.setattr(train, "HERE", tmp_path)
    monkeypatch.setattr(train, "WORD_PROBLEMS", folder)
    train.main(argv(small, dataset="word_problems", max_steps=1, out_dir=tmp_path / "out"))
    assert train.newest(tmp_path / "out").name == "step-00000001"


def test_a_data_set_of_another_vocabulary_is_refused(small, tmp_path, capsys):
    meta = json.loads((small["dataset"] / "meta.json").read_text())
    shutil.copytree(small["dataset"], tmp_path / "other")
    meta |= dict(tokenizer="some/model", tokenizer_hash="0" * 64)
    (tmp_path / "other/meta.json").write_text(json.dumps(meta))
    refused(argv(small, dataset=tmp_path / "other", out_dir=tmp_path / "out"),
            "another vocabulary, that of some/model", capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_mask_token_needs_one_named(small, tmp_path, capsys):
    shutil.copytree(small["init_from"], tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    del config["mask_id"]
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    options = dict(small, init_from=tmp_path / "model", max_steps=1)
    refused(argv(options, out_dir=tmp_path / "a"), "names no mask token: give --mask_id", capsys)
    train.main(argv(options, out_dir=tmp_path / "b", objective="ntp"))
    train.main(argv(options, out_dir=tmp_path / "c", mask_id=509))
    assert Llama.from_pretrained(tmp_path / "c").config.mask_id == 509


def test_training_that_cannot_fit_into_memory_is_refused_before_loading(small, tmp_path, capsys, monkeypatch):
    parameters = sum(w.numel() for w in Llama.from_pretrained(small["init_from"]).parameters())
    monkeypatch.setattr(train, "load", lambda *args: pytest.fail("loaded"))
    inputs = 2 * 4 * 64 * 32 * 2                              # 4 rows of 64, clean and noisy, 2 layers of 32
    monkeypatch.setattr(train, "free_memory", lambda device: 16 * parameters + 4 * inputs - 1)
    refused(argv(small, out_dir=tmp_path / "out"),
            "needs 0.0 GiB for weights, gradients, AdamW's states and layers' inputs, cpu has", capsys)


def test_an_output_folder_of_another_run_is_kept(small, whole, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    words = "holds another run: give --resume, --overwrite or another --out_dir"
    refused(argv(small, out_dir=out), words, capsys)
    shutil.rmtree(out / "step-00000012")                      # a finished model alone is another run too
    refused(argv(small, out_dir=out), "holds another run", capsys)
    assert all(path.read_bytes() == data for path, data in files.items() if "step-" not in str(path))
    refused(argv(small, init_from=out, out_dir=out, overwrite=True),
            "--overwrite would remove what --init_from", capsys)
    train.main(argv(small, out_dir=out, overwrite=True, max_steps=4))
    assert [path.name for path in out.glob("step-*")] == ["step-00000004"]
    assert [line.split(",")[0] for line in losses_of(out)] == ["step", "3", "4"]


@pytest.mark.parametrize("options, words", [
    (dict(seq_len=32), "--seq_len 32: the run in"), (dict(batch_size=2), "--batch_size 2: the run in"),
    (dict(grad_accum=2), "--grad_accum 2: the run in"),
    (dict(block_size_max=16), "--block_size_max 16: the run in"),
    (dict(seed=1), "--seed 1: the run in"), (dict(objective="ntp"), "--objective ntp: the run in"),
    (dict(dataset="stdlib"), "--dataset stdlib: the run in"),
    (dict(recipe="paper-8b"), "--recipe paper-8b: the run in"),
    (dict(max_steps=11), "is at step 12 already")])
def test_resume_with_other_shapes_is_refused(whole, capsys, options, words):
    refused(argv(dict(resume=True, out_dir=whole), **options), words, capsys)


# ------------------------------------------------------------------------------ users' files and machines

def damaged_states(state, raw):
    """Variants of a train_state.pt: name -> bytes, or an object to save in its place."""
    moments = state["optimizer"]["state"]
    for cut in (0, 1, 100, len(raw) // 3, len(raw) - 30, len(raw) - 1):
        yield f"cut at {cut}", raw[:cut]
    yield "another file", b"PK\x03\x04 no zip"
    yield "a pickle of code", b"cos\nsystem\n(S'touch /tmp/never'\ntR."
    for name in ("optimizer", "step", "sums", "args"):
        yield f"without {name}", {key: value for key, value in state.items() if key != name}
        for value in (None, "x", -1, [], {}, torch.zeros(3), torch.zeros(4, dtype=torch.complex64)):
            yield f"{name} is {value}", state | {name: value}
    weight = moments[0]["exp_avg"]
    for name in ("exp_avg", "exp_avg_sq", "step"):
        for value in (torch.zeros(3), torch.zeros(1000, 1000), torch.zeros((), dtype=torch.int64), None, "x",
                      1.0, {}, weight.to(torch.float16), weight.to_sparse(), weight[:-1], weight.T):
            changed = dict(moments) | {0: dict(moments[0]) | {name: value}}
            yield f"state 0's {name} is {value}", state | dict(optimizer=dict(state=changed))
        less = {key: value for key, value in moments[0].items() if key != name}
        yield f"state 0 without {name}", state | dict(optimizer=dict(state=dict(moments) | {0: less}))
    yield "one state less", state | dict(optimizer=dict(state={i: s for i, s in moments.items() if i}))
    yield "one state more", state | dict(optimizer=dict(state=dict(moments) | {len(moments): moments[0]}))
    for name, value in (("lr", "x"), ("batch_size", 1.5), ("device", 3), ("init_from", None),
                        ("objective", "fast"), ("grad_clip", True), ("compile", 1), ("seq_len", 10**30),
                        ("seed", [1]), ("max_steps", torch.zeros(2)), ("help", True), (3, 3)):
        yield f"args' {name} is {value}", state | dict(args=state["args"] | {name: value})
    for name in ("lr", "seed", "compile"):
        yield f"args without {name}", state | dict(args={k: v for k, v in state["args"].items() if k != name})


def test_a_damaged_training_state_is_one_line_that_names_it(whole, tmp_path, capsys):
    """Every tensor's shape and dtype is checked before an optimizer that trusts them gets it."""
    out = tmp_path / "out"
    shutil.copytree(whole, out)
    path = out / "step-00000012/train_state.pt"
    raw, count = path.read_bytes(), 0
    state = torch.load(path, weights_only=True)
    for name, content in damaged_states(state, raw):
        path.unlink()
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        capsys.readouterr()
        code = None
        try:
            cli.run(lambda: train.main(["--resume", f"--out_dir={out}", "--max_steps=13"]))
        except SystemExit as exit:
            code = exit.code
        error = capsys.readouterr().err
        assert code == 2 and error.count("\n") == 1, (name, error)
        assert "weights_only" not in error and ("train_state.pt" in error or "--" in error), (name, error)
        count += 1
    path.write_bytes(raw)
    train.main(["--resume", f"--out_dir={out}", "--max_steps=13", "--eval_interval=13"])
    assert count > 80 and train.newest(out).name == "step-00000013"


def test_a_state_whose_memory_is_shared_or_in_another_order_is_made_whole(small, whole, tmp_path):
    """An expanded tensor has the right shape and too little memory behind it."""
    args, model, _ = options_of(small)
    optimizer = train.make_optimizer(model, args)
    state = torch.load(train.newest(whole) / "train_state.pt", weights_only=True)
    w = optimizer.param_groups[0]["params"][0]
    state["optimizer"]["state"][0].update(exp_avg=torch.ones(1, 1).expand(w.shape),
                                          exp_avg_sq=torch.rand(w.shape[::-1]).T)
    torch.save(state, tmp_path / "train_state.pt")
    found = train.read_state(tmp_path, "cpu", optimizer)["optimizer"]["state"][0]
    for name, x in found.items():
        assert torch.equal(x, state["optimizer"]["state"][0][name])
        assert x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes


def test_a_cut_state_is_refused_and_so_is_one_with_another_byte(small, whole, tmp_path):
    """Wherever it is cut; of the bytes only those of the padding between what is stored mean nothing."""
    args, model, _ = options_of(small)
    optimizer, path = train.make_optimizer(model, args), tmp_path / "train_state.pt"
    raw, rng, refusals = (train.newest(whole) / "train_state.pt").read_bytes(), random.Random(0), 0
    truth = torch.load(train.newest(whole) / "train_state.pt", weights_only=True)
    cuts = [raw[:rng.randrange(len(raw))] for _ in range(100)]
    flips = []
    for at in [rng.randrange(len(raw)) for _ in range(100)] + [rng.randrange(2000) for _ in range(100)] + \
            [len(raw) - 1 - rng.randrange(5000) for _ in range(100)]:
        flips.append(raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1:])
    for i, content in enumerate(cuts + flips):
        path.write_bytes(content)
        try:
            state = train.read_state(tmp_path, "cpu", optimizer)
        except ValueError as error:
            assert str(path) in str(error) and "weights_only" not in str(error)
            refusals += 1
            continue
        assert i >= len(cuts)
        assert (state["step"], state["args"]) == (truth["step"], truth["args"])
        assert torch.equal(state["sums"], truth["sums"])
        for i, found in state["optimizer"]["state"].items():
            for name, wanted in truth["optimizer"]["state"][i].items():
                assert torch.equal(found[name], wanted)
    assert refusals > 250


def test_two_trainings_into_one_folder_do_not_mix(small, whole, tmp_path, capsys):
    """The second is refused while the first runs, whatever it was asked; the lock dies with its process."""
    out = tmp_path / "out"
    code = signal_at("losses", 8, signal.SIGSTOP) + f"train.main({argv(small, out_dir=out)!r})"
    first = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        assert os.WIFSTOPPED(os.waitpid(first.pid, os.WUNTRACED)[1])            # behind its first checkpoint
        log = (out / "log.csv").read_text()
        for options in (["--resume", f"--out_dir={out}"], argv(small, out_dir=out, overwrite=True)):
            refused(options, "is being written by another process", capsys)
        assert (out / "log.csv").read_text() == log and train.newest(out).name == "step-00000004"
    finally:
        first.kill()
        first.wait()
    train.main(["--resume", f"--out_dir={out}"])
    same_run(out, whole)


def test_a_run_that_came_before_the_lock_is_kept(small, whole, tmp_path, monkeypatch, capsys):
    out, original = tmp_path / "out", train.find

    def find(args):
        found = original(args)
        shutil.copytree(whole, out)                           # another training, begun and ended meanwhile
        return found

    monkeypatch.setattr(train, "find", find)
    refused(argv(small, out_dir=out), "holds another run", capsys)
    same_run(out, whole)


def test_strays_in_the_output_folder_do_no_harm(small, tmp_path, capsys):
    """A newer folder that is no checkpoint, a link where one is written, a file where one will stand."""
    out = tmp_path / "out"
    train.main(argv(small, out_dir=out, max_steps=4))
    (out / "step-99999999").mkdir()
    (out / "step-99999999/notes.txt").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes.txt").write_text("mine")
    (out / "tmp-00000008").symlink_to(tmp_path / "elsewhere")
    (out / "step-00000008").write_text("no folder")
    train.main(["--resume", f"--out_dir={out}", "--max_steps=8"])
    assert train.newest(out).name == "step-00000008"
    for folder in (out / "step-99999999", tmp_path / "elsewhere"):
        assert (folder / "notes.txt").read_text() == "mine"
    (out / "config.json").unlink()                            # the finished model: now nothing is whole
    shutil.rmtree(out / "step-00000008")
    refused(argv(small, out_dir=out), "holds another run", capsys)
    refused(["--resume", f"--out_dir={out}"], "holds no checkpoint", capsys)
    for name in (*train.KINDS[0], "train_state.pt"):
        (out / "step-99999999" / name).write_text("{}")
    refused(["--resume", f"--out_dir={out}"], "step-99999999/train_state.pt is damaged", capsys)


def test_checkpoints_keep_their_tokenizer_whatever_happens_to_the_folder_it_came_from(small, tmp_path, capsys,
                                                                                      monkeypatch):
    source, out, original = tmp_path / "model", tmp_path / "out", train.after
    shutil.copytree(small["init_from"], source)

    def removing(run, args, done, norm):
        if done == 2:
            shutil.rmtree(source)
        if done == 6:
            shutil.rmtree(train.newest(out))                  # the checkpoint of step 4
        original(run, args, done, norm)

    monkeypatch.setattr(train, "after", removing)
    train.main(argv(small, init_from=source, out_dir=out, max_steps=8))
    for folder in (out, out / "step-00000008"):
        assert (folder / "tokenizer.json").read_bytes() == (TOKENIZER / "tokenizer.json").read_bytes()
    shutil.copytree(small["init_from"], source)               # one that goes before they were read is missed
    original = train.make_optimizer
    monkeypatch.setattr(train, "make_optimizer", lambda *args: shutil.rmtree(source) or original(*args))
    refused(argv(small, init_from=source, out_dir=tmp_path / "b"), "has lost its tokenizer's files", capsys)


@pytest.mark.parametrize("options", [
    dict(batch_size=10**12), dict(grad_accum=10**12), dict(seq_len=10**12), dict(max_steps=10**12),
    dict(block_size_max=10**12), dict(seed=2**70), dict(eval_rows=2**70), dict(log_interval=10**12)])
def test_huge_numbers_are_refused_at_once(small, tmp_path, capsys, options):
    refused(argv(small, **dict(out_dir=tmp_path / "out") | options), f"--{next(iter(options))}", capsys)


@pytest.mark.parametrize("options, words", [
    (dict(batch_size=10**6), "a smaller model or --batch_size"),               # 10^6 x 64 x 2 x 2 x 32 floats
    (dict(grad_accum=10**6), "the 4000000 rows of a step need 4.8 GiB, 4.0 GiB are free")])
def test_rows_that_no_memory_holds_are_refused_at_once(small, tmp_path, capsys, monkeypatch, options, words):
    monkeypatch.setattr(train, "free_memory", lambda device: 2**32)
    refused(argv(small, **dict(out_dir=tmp_path / "out") | options), words, capsys)


@pytest.mark.parametrize("room, words", [
    (1000, "model.safetensors cannot be written"), (50_000, "model.safetensors cannot be written"),
    (200_000, "train_state.pt cannot be written"), (290_000, "train_state.pt cannot be written")])
def test_a_file_that_does_not_fit_is_one_line_and_the_last_checkpoint_stays(small, tmp_path, capsys, room,
                                                                            words):
    """Files of more than `room` bytes cannot be written."""
    out = tmp_path / "out"
    train.main(argv(small, out_dir=out, max_steps=4))
    before = {path: path.read_bytes() for path in (out / "step-00000004").rglob("*")}
    sizes = [len(content) for content in before.values()]
    assert 50_000 < sorted(sizes)[-2] < 200_000 and 290_000 < max(sizes)   # weights, state
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        refused(["--resume", f"--out_dir={out}", "--max_steps=8"], words, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in (out / "step-00000004").rglob("*")} == before
    assert train.newest(out).name == "step-00000004"
    train.main(["--resume", f"--out_dir={out}", "--max_steps=8"])
    assert [path.name for path in out.glob("*-*")] == ["step-00000008"]


@pytest.mark.parametrize("call", range(1, 9))
def test_a_full_disk_is_one_line_and_the_last_good_checkpoint_stays(small, tmp_path, capsys, monkeypatch,
                                                                    call):
    """Wherever the disk fills up: the log, a weight file, the tokenizer's, the state."""
    out, calls = tmp_path / "out", []
    train.main(argv(small, out_dir=out, max_steps=4))
    before = {path: path.read_bytes() for path in (out / "step-00000004").rglob("*")}

    def full(descriptor, fsync=os.fsync):
        calls.append(0)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    refused(["--resume", f"--out_dir={out}", "--max_steps=8"], "No space left on device", capsys)
    assert {path: path.read_bytes() for path in (out / "step-00000004").rglob("*")} == before


def test_a_clock_that_stands_still_divides_by_nothing(small, tmp_path, monkeypatch):
    monkeypatch.setattr(train.time, "monotonic", lambda: 5.0)
    train.main(argv(small, out_dir=tmp_path / "out", max_steps=4))


# ------------------------------------------------------------------------------ one step

def options_of(small, **more):
    """Parsed options, and a model with its data, as train() makes them."""
    args = train.parse(argv(small, out_dir="nowhere", **more))
    data, val, source, config, tokenizer = train.find(args)
    rows = pack(data, args.seq_len, args.block_size_max - 1, args.seed)
    return args, train.load(args, source, config), rows


def test_accumulated_gradient_is_that_of_the_large_batch(small, tmp_path):
    """Rounding apart (sums in another order, float32): the same noise, the same constant, the same update."""
    one = tmp_path / "one"
    train.main(argv(small, out_dir=one, batch_size=8, max_steps=3, log_interval=1))
    wanted = Llama.from_pretrained(train.newest(one)).state_dict()
    for accum in (2, 8):
        out = tmp_path / str(accum)
        train.main(argv(small, out_dir=out, batch_size=8 // accum, grad_accum=accum, max_steps=3,
                        log_interval=1))
        for name, weight in Llama.from_pretrained(train.newest(out)).state_dict().items():
            # AdamW divides by the gradient's own size: where that is nearly 0 its rounding shows, 2% of lr
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=0.02 * 1e-2)
        for ours, theirs in zip(losses_of(out)[1:], losses_of(one)[1:]):   # validation included, at the end
            ours, theirs = ([float(x) for x in line.split(",") if x] for line in (ours, theirs))
            assert ours == pytest.approx(theirs, rel=1e-3)                     # float32, weights as above
    args, model, rows = options_of(small)
    whole = batch(rows, range(8))
    parts = [batch(rows, range(i, i + 2)) for i in range(0, 8, 2)]
    k, noise = train.draw(args, 5, range(8))
    loss = train.losses(model, args, whole, k, noise).loss
    loss.backward()
    wanted = [w.grad.clone() for w in model.parameters()]
    model.zero_grad()
    num_targets = sum(map(num_ntp_targets, parts))
    results = [train.losses(model, args, b, k, masked, num_targets).loss
               for b, masked in zip(parts, noise.split(2))]
    torch.testing.assert_close(sum(results), loss, rtol=1e-5, atol=0)          # float32 sums in another order
    sum(results).backward()
    for w, gradient in zip(model.parameters(), wanted):
        torch.testing.assert_close(w.grad, gradient, rtol=1e-4, atol=1e-6)


def test_learning_rate_is_linear_then_cosine():
    args = train.parse(["--lr=0.5", "--min_lr=0.1", "--warmup_steps=10", "--max_steps=110"])
    rates = [train.learning_rate(args, step) for step in range(120)]
    assert rates[:10] == pytest.approx([0.05 * i for i in range(1, 11)])
    assert rates[10] == pytest.approx(0.5) and rates[60] == pytest.approx(0.3)
    assert rates[110:] == pytest.approx([0.1] * 10)
    assert rates[35] == pytest.approx(0.1 + 0.4 * (1 + math.cos(math.pi / 4)) / 2)
    args = train.parse(["--warmup_steps=0", "--max_steps=1", "--lr=0.5"])
    assert train.learning_rate(args, 0) == 0.5


def test_block_size_is_uniform_and_both_ends_are_drawn():
    args = train.parse(["--block_size_min=2", "--block_size_max=16", "--device=cpu"])
    drawn = np.bincount([train.draw(args, step, [])[0] for step in range(6000)], minlength=17)
    assert drawn[:2].sum() == 0 and len(drawn) == 17
    assert (((drawn[2:] - 400) ** 2) / 400).sum() < 36.1     # chi-square, 14 degrees of freedom: 1 in 1000


def test_noise_follows_from_seed_step_and_row_alone():
    """Method section 12: not from how many rows a step has or who draws them; no row repeats another's."""
    a, b = (train.parse(["--device=cpu", f"--seed={seed}"]) for seed in (0, 1))
    noise = [[train.draw(args, step, range(8))[1] for step in range(40)] for args in (a, a, b)]
    assert torch.equal(torch.stack(noise[0]), torch.stack(noise[1]))
    k, rows = train.draw(a, 3, [6, 1])
    assert torch.equal(rows, noise[0][3][[6, 1]]) and k == train.draw(a, 3, range(100))[0]
    rows = torch.cat(noise[0] + noise[2])
    shares = rows.double().mean(-1)                                            # a row's eta, nearly
    assert len({bytes(row.numpy()) for row in rows}) > 0.98 * len(rows)        # but those of eta near 0 and 1
    assert abs(float(shares.mean()) - 0.5) < 4 / math.sqrt(12 * len(shares))   # U(0, 1), four standard errors
    assert abs(float(shares.var()) - 1 / 12) < 0.015                           # and its variance


def test_full_mask_prob_is_the_share_of_rows_that_are_all_masks():
    args = train.parse(["--full_mask_prob=0.3", "--device=cpu", "--seq_len=128"])
    full = torch.cat([train.draw(args, step, range(50))[1] for step in range(100)]).all(-1)
    assert abs(float(full.double().mean()) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 5000) + 1 / 128
    plain = train.draw(train.parse(["--device=cpu"]), 0, range(5000))[1].all(-1)   # eta ~ U(0, 1): 1 in 513
    assert plain.sum() < 40


@pytest.mark.parametrize("options", [dict(), dict(full_mask_prob=0.5), dict(objective="ntp"),
                                     dict(adapter_rank=3), dict(adapter_rank=3, targets="data", place0=True)])
def test_a_step_is_the_same_sums_for_every_split_into_micro_batches(small, options):
    """Method section 12, in float64: 1 x 4, 2 x 2 and 4 x 1 rows give the same gradient and logged losses."""
    found = []
    for size in (4, 2, 1):
        args, model, rows = options_of(small, batch_size=size, grad_accum=4 // size, **options)
        model = model.double()
        k, noise = train.draw(args, 7, range(4))
        parts = [batch(rows, range(28 + i, 28 + i + size)) for i in range(0, 4, size)]
        num_targets = sum(map(num_ntp_targets, parts))
        sums = torch.zeros(4, dtype=torch.float64)
        for b, masked in zip(parts, noise.split(size)):
            result = train.losses(model, args, b, k, masked, num_targets)
            result.loss.backward()
            sums += train.totals(result)
        gradients = [w.grad for w in model.parameters() if w.requires_grad]
        found.append([torch.tensor(train.means(sums)), *gradients])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0]):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_validation_does_not_depend_on_batch_size_and_is_a_mean_over_targets(small):
    args, model, _ = options_of(small, eval_rows=7)
    rows = pack(Dataset(small["dataset"], "val"), args.seq_len, args.block_size_max - 1, args.seed)
    found = []
    for args.batch_size in (1, 2, 3, 7, 64):
        found.append(train.validate(model.double(), args, rows))
    assert all(f == pytest.approx(found[0], rel=1e-10) for f in found)
    sums = np.zeros(4)
    for i in range(7):                                                         # row by row, by hand
        k, noise = train.draw(args, i, [0])
        r = train.losses(model, args, batch(rows, [i]), k, noise)
        n, m = int(r.num_ntp), int(r.num_matp)
        sums += [float(r.ntp) * n, n, float(r.matp) * m, m]
    assert found[0] == pytest.approx([sums[0] / sums[1], sums[2] / sums[3]], rel=1e-10)


def test_weights_stay_float32_where_bfloat16_would_round_updates_away(small, tmp_path):
    train.main(argv(small, out_dir=tmp_path / "out", dtype="bfloat16", lr=1e-5, warmup_steps=0,
                    weight_decay=0, max_steps=2))
    before, after = (Llama.from_pretrained(folder).state_dict()
                     for folder in (small["init_from"], train.newest(tmp_path / "out")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert after[name].dtype == torch.float32 and (after[name] != before[name]).double().mean() > 0.9
    assert all(value.dtype == torch.float32 for state in optimizer_states(train.newest(tmp_path / "out"))
               for value in state.values())
    large = before[name].abs() > 0.01  # spacing of bfloat16 there: 6e-5 and up
    step = (after[name] - before[name])[large].to(torch.bfloat16)
    updated = before[name].to(torch.bfloat16)[large] + step
    assert (updated == before[name].to(torch.bfloat16)[large]).double().mean() > 0.9
    assert Llama.from_pretrained(tmp_path / "out").lm_head.weight.dtype == torch.bfloat16   # finished


def test_recomputed_layers_give_the_same_losses(small, whole, tmp_path):
    train.main(argv(small, out_dir=tmp_path / "out", grad_checkpoint=True))
    assert losses_of(tmp_path / "out") == losses_of(whole)


def test_compiled_layers_give_the_same_losses_and_a_new_k_compiles_nothing(small, tmp_path, monkeypatch):
    from torch._dynamo.utils import counters
    monkeypatch.setattr(torch, "compile",
                        lambda f, compile=torch.compile, **kw: compile(f, backend="aot_eager", **kw))
    args, plain, rows = options_of(small)
    _, compiled, _ = options_of(small, compile=True)
    torch._dynamo.reset()
    graphs, blocks = [], []
    for step in range(16):
        result = []
        for model in (plain, compiled):
            k, noise = train.draw(args, step, range(4))
            b = batch(rows, range(4 * step, 4 * step + 4))
            result.append(train.losses(model, args, b, k, noise).loss)
            result[-1].backward()
        torch.testing.assert_close(result[1], result[0], rtol=1e-5, atol=0)    # float32
        graphs.append(counters["stats"]["unique_graphs"])
        blocks.append(k)
    assert len(set(blocks)) > 4 and graphs[0] > 0 and graphs[-1] == graphs[0]
    torch._dynamo.reset()


def test_ntp_objective_is_the_ntp_term_alone(small, tmp_path):
    train.main(argv(small, out_dir=tmp_path / "out", objective="ntp", max_steps=24))
    rows = [line.split(",") for line in losses_of(tmp_path / "out")[1:]]
    assert float(rows[-1][1]) < float(rows[0][1]) - 0.3 and all(float(row[2]) == 0 for row in rows)


def test_recipe_sets_the_papers_numbers_and_options_override_it():
    args = train.parse(["--recipe=paper-8b", "--lr=1e-4"])
    assert args.seq_len * args.batch_size * args.grad_accum == 2 ** 21                # 2M tokens a step
    assert (args.max_steps, args.warmup_steps, args.lr, args.seq_len) == (34_000, 200, 1e-4, 32_768)


def test_a_preset_without_weights_starts_at_random_from_the_seed(small, tmp_path):
    args = [train.parse(argv(small, init_from="tiny", out_dir=tmp_path, seed=seed)) for seed in (0, 0, 1)]
    weights = [train.load(a, *train.find(a)[2:4]).lm_head.weight for a in args]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_a_finished_run_on_word_problems_prints_accuracy_and_speedup(small, tmp_path, capsys):
    args = train.parse(argv(small, dataset="word_problems", out_dir=tmp_path / "out", sample_problems=2))
    files = {name: (TOKENIZER / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    train.finish(Llama.from_pretrained(small["init_from"]), args, files)
    printed = capsys.readouterr().out
    assert f"--init_from={tmp_path / 'out'}" in printed and "accuracy" in printed and "NFE speedup" in printed
    assert all(label(cell) in printed for cell in (dict(mode="ntp"), *train.CELLS[:3]))


# ------------------------------------------------------------------------------ the real model

def test_ten_steps_on_the_real_smollm2_lower_both_losses_and_load_in_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = smollm2_or_skip()
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(Path(json.__file__).read_text())
    documents = [(ids[i:i + 63] + [tokenizer.eos_id], [True] * 64) for i in range(0, 8 * 63, 63)]
    write_set(tmp_path / "data", dict(train=documents, val=documents[:4]), [tokenizer.eos_id],
              tokenizer.vocab_size, tokenizer=str(folder), tokenizer_hash=tokenizer.hash)
    out, options = tmp_path / "out", dict(seq_len=64, batch_size=2, eval_rows=4, block_size_max=8,
                                          device="cpu", dtype="float32")
    train.main(argv(options, init_from=folder, dataset=tmp_path / "data", out_dir=out, mask_id=4,
                    max_steps=10, log_interval=1, eval_interval=10, lr=1e-4, warmup_steps=2,
                    sample_problems=0))
    rows = [line.split(",") for line in losses_of(out)[1:]]
    assert [row[0] for row in rows] == [str(i) for i in range(1, 11)]
    # Single steps differ in rows and noise: compare the same four rows with the same noise, before and after.
    val = pack(Dataset(tmp_path / "data", "val"), 64, 7)
    before = train.validate(Llama.from_pretrained(folder, mask_id=4), train.parse(argv(options)), val)
    after = [float(x) for x in rows[-1][3:5]]
    assert after[0] < before[0] - 0.1 and after[1] < before[1] - 0.1, (before, after)   # nats
    shutil.rmtree(train.newest(out))                                           # 1.6 GB
    model = Llama.from_pretrained(out, dtype=torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert model.config.mask_id == 4
    tokens = torch.tensor([ids[:40]])
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(model(tokens), wanted, rtol=1e-3, atol=1e-3)   # float32, 30 layers
    their_ids = transformers.AutoTokenizer.from_pretrained(out)("def f(x):")["input_ids"]
    assert their_ids == tokenizer.encode("def f(x):")
