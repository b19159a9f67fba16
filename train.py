"""Algorithm 1: fine-tune a next-token model with the Set Block Decoding loss, or train that model first.

    python train.py                                            the shipped tiny model, minutes on a CPU
    python train.py --init_from=llama3.1-8b --dataset=DIR      the same loop on real weights
    python train.py --recipe=adapter --init_from=...           a gated adapter beside unchanged weights

Weights and AdamW's states are float32 whatever the forward runs in: bfloat16 would round updates at lr 1e-5
away. Everything random follows from (seed, step, row of the step): a resumed run goes on as if it had never
stopped, and a step is the same sums for every split into micro-batches (method section 12).

Shapes: B batch_size, L seq_len, R rows of a step, k block size.
"""
from cli import PUBLISHED, need, need_mask, open_device, parser, run

import argparse
import contextlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

import adapter
from data.bin import Dataset, Rows, batch, locked, num_ntp_targets, pack, targets
from eval import sweep, table
from hf import PRESETS, TOKENIZER_FILES, find_folder, free_memory, write_whole
from kernels.sbd_attention import BACKENDS, check_backend
from model import Llama, LlamaConfig, compile_layers
from sbd_loss import adapter_loss, ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
WORD_PROBLEMS = HERE / "data/word_problems"
RECIPES = {   # method section 3: 2M tokens a step, 34k steps, 32k context
    "paper-8b": dict(lr=3e-4, warmup_steps=200, max_steps=34_000, seq_len=32_768, batch_size=1, grad_accum=64,
                     dtype="bfloat16", grad_checkpoint=True),
    # method section 11: the noise that verified decoding drafts from, and what learned fastest here
    "adapter": dict(adapter_rank=24, lr=2e-3, full_mask_prob=1.0, block_size_max=8, weight_decay=0.0,
                    batch_size=2),
}
# What a (seed, step) means, and what the weights are: a resumed run cannot change these.
FIXED = ("recipe", "init_from", "dataset", "objective", "mask_id", "seed", "seq_len", "batch_size",
         "grad_accum", "block_size_min", "block_size_max", "full_mask_prob", "adapter_rank", "adapter_alpha",
         "targets", "place0")
CELLS = [dict(mode="sbd", block_size=k, gamma=0.1) for k in (8, 16)] + \
    [dict(mode="verified", block_size=k, hedges=2) for k in (16, 24, 32)]


# -------------------------------------------------------------------------------- Algorithm 1

def train(run, args) -> None:
    """Algorithm 1: k and the noise of a step, the loss of its rows in micro-batches, one update of AdamW."""
    B, R = args.batch_size, args.batch_size * args.grad_accum
    for step in range(run.step, args.max_steps):
        k, noise = draw(args, step, range(R))                    # k ~ U{min, ..., max}; noise (R, L) bool
        batches = [batch(run.rows, range(i, i + B)) for i in range(step * R, (step + 1) * R, B)]
        num_targets = sum(map(num_ntp_targets, batches))         # of the whole step: Eq. 14 of all its rows
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        for b, masked in zip(batches, noise.split(B)):
            result = losses(run.model, args, b, k, masked, num_targets)
            result.loss.backward()
            run.log.sums += totals(result)
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), args.grad_clip or math.inf)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        after(run, args, step + 1, norm)                         # a line, a checkpoint: whatever is due


def draw(args, step, rows):
    """Fig. 7, Eq. 13: a step's k ~ U{min, ..., max}, and which tokens of these of its rows are masked, bool.

    Each row has its eta ~ U(0, 1), or, with probability full_mask_prob, 1 (draft-aware noise, method section
    10). All of it follows from (seed, step, number of the row in the step) alone: method section 12.
    """
    rng = np.random.default_rng([args.seed, 3, step])   # [seed, 0], [seed, 1, ...] are those of data/bin.py
    k = int(rng.integers(args.block_size_min, args.block_size_max + 1))
    noise = np.empty((len(rows), args.seq_len), bool)
    for masked, row in zip(noise, rows):
        rng = np.random.default_rng([args.seed, 2, step, row])
        full, eta = rng.random(2)
        masked[:] = (full < args.full_mask_prob) | (rng.random(args.seq_len, np.float32) < eta)
    return k, torch.from_numpy(noise)


def losses(model, args, b, k, masked, num_targets=None):
    """One forward's loss; autocast keeps float32 weights and runs the matrix products in --dtype."""
    b, eta = b.to(args.device), masked.to(args.device, torch.float32)   # 1 where masked, 0 elsewhere: certain
    loss_mask, ntp_mask = targets(b, k)   # (B, L)
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        if args.objective == "ntp":
            return ntp_loss(model, b.tokens, ntp_mask, b.doc_ids, num_targets)
        if args.adapter_rank:
            wanted = ntp_mask if args.targets == "self" else loss_mask   # of a stop copy NTP predicts nothing
            return adapter_loss(model, b.tokens, k, wanted, b.doc_ids, num_targets, args.targets, args.place0,
                                eta, None, args.attention)
        return sbd_loss(model, b.tokens, k, loss_mask, ntp_mask, b.doc_ids, num_targets,
                        args.ntp_weight, args.matp_weight, eta, None, args.attention)


def learning_rate(args, step):
    """Linear warmup, then a cosine from lr to min_lr."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


@torch.no_grad()
def validate(model, args, rows):
    """Mean NTP and MATP losses over all targets of the first --eval_rows rows, nats, always the same noise.

    A row's k and noise are its own, so that nothing depends on --batch_size.
    """
    model.eval()
    sums, by_k = torch.zeros(4, dtype=torch.float64), {}
    for i in range(min(args.eval_rows, len(rows))):
        k, noise = draw(args, i, [0])
        by_k.setdefault(k, []).append((i, noise))
    for k, drawn in by_k.items():
        for at in range(0, len(drawn), args.batch_size):
            index, noise = zip(*drawn[at:at + args.batch_size])
            sums += totals(losses(model, args, batch(rows, index), k, torch.cat(noise))).cpu()
    model.train()
    return means(sums)


def totals(result):
    """NTP's and MATP's sums of losses and numbers of targets, (4,)."""
    return torch.stack((result.ntp * result.num_ntp, result.num_ntp, result.matp * result.num_matp,
                        result.num_matp))


def means(sums) -> list:
    """The two mean losses, nats, 0 where there are no targets."""
    ntp, num_ntp, matp, num_matp = sums.tolist()
    return [ntp / max(num_ntp, 1), matp / max(num_matp, 1)]


# --------------------------------------------------------------------------- the command: a run and its log

HEAD = "step,ntp_loss,matp_loss,val_ntp_loss,val_matp_loss,lr,tokens_per_s\n"   # of log.csv


@dataclass
class Log:
    path: Path                 # of log.csv
    sums: torch.Tensor         # (4,), as in `totals`, since the last line; on the device until the next
    first_bad: torch.Tensor    # the first step that was not finite; infinity: none
    step: int                  # of the last line
    time: float                # of the last line, seconds

    def line(self, args, done, checked):
        """Print and write the line of step `done`; checked: validation losses or []."""
        now, (ntp, matp), lr = time.monotonic(), means(self.sums), learning_rate(args, done - 1)
        seconds = max(now - self.time, 1e-9) / (done - self.step)                     # a step
        rate = args.batch_size * args.grad_accum * args.seq_len / seconds             # tokens a second
        left = (args.max_steps - done) * seconds / 60                                 # minutes
        said = "matp {1:.4f}" if args.adapter_rank else "ntp {:.4f}  matp {:.4f}"   # an adapter has no NTP
        validation = f"  validation {said}".format(*checked) if checked else ""
        print(f"step {done:5d}  {said.format(ntp, matp)}  lr {lr:.2e}  {rate:,.0f} tokens/s  "
              f"{left:.1f} min left{validation}", flush=True)
        numbers = [f"{x:.9g}" for x in (ntp, matp, *checked)] + ([] if checked else ["", ""])
        with self.path.open("a") as file:
            file.write(",".join([str(done), *numbers, f"{lr:.6g}", f"{rate:.0f}"]) + "\n")
        self.sums.zero_()
        self.step, self.time = done, time.monotonic()


@dataclass
class Run:
    model: Llama
    optimizer: torch.optim.Optimizer
    files: dict                                  # name -> bytes of the tokenizer's files: their folder may go
    rows: Rows
    val_rows: Rows | None
    log: Log
    step: int                                    # steps done
    stop: list = field(default_factory=list)     # the signal that asked it to stop


def after(run, args, done, norm):
    """Whatever is due behind step `done`: a log line, validation, a checkpoint, the end after a signal."""
    run.step, log = done, run.log
    is_good = torch.isfinite(norm + log.sums.sum())
    log.first_bad = torch.where(is_good, log.first_bad, log.first_bad.clamp(max=done))
    save_now = done % args.eval_interval == 0 or done == args.max_steps
    line_now = done % args.log_interval == 0 or save_now
    if not (line_now or run.stop):
        return   # from here on the host waits for the device
    checked = validate(run.model, args, run.val_rows) if save_now and run.val_rows else []
    bad = min(log.first_bad.item(), math.inf if all(map(math.isfinite, checked)) else done)
    if bad < math.inf:
        good, advice = newest(args.out_dir), "there is no checkpoint yet: start again"
        advice = f"{good} is the last good checkpoint: --resume" if good else advice
        sys.exit(f"train.py: the loss or its gradient is not finite at step {bad:.0f}; "
                 f"{advice} with a lower --lr")
    if line_now:
        log.line(args, done, checked)
    if save_now or run.stop:
        save(run, args)
    if run.stop:
        print(f"stopped at step {done}; go on with: python train.py --resume --out_dir={args.out_dir}")
        exit_at_once(run.stop[0], None)


def make_optimizer(model, args):
    """AdamW; weight decay pulls on matrices only, not on the gains of the norms."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() == 2], weight_decay=args.weight_decay),
              dict(params=[w for w in weights if w.dim() != 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), fused=True)


def open_run(args, data, val, source, config, tokenizer) -> Run:
    """Model, optimizer, rows and log, resumed where asked; from here on out_dir is this run's."""
    need_place(args)   # once more, now that nobody else writes there
    model = load(args, source, config)
    optimizer = make_optimizer(model, args)
    kind = torch.float32 if torch.device(args.device).type == "mps" else torch.float64
    step, sums = 0, torch.zeros(4, device=args.device, dtype=kind)
    if args.resume:
        state = read_state(source, args.device, optimizer)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict(dict(state["optimizer"], param_groups=groups))
        step = state["step"]
        sums += sums.new_tensor(state["sums"].tolist())
    files = {name: (tokenizer.folder / name).read_bytes() for name in TOKENIZER_FILES
             if (tokenizer.folder / name).is_file()}
    need(files, f"{tokenizer.folder} has lost its tokenizer's files: bring them back")
    copies = args.block_size_max - 1 if args.objective == "sbd" else 0   # stop copies (method section 3)
    rows, val_rows = (split and pack(split, args.seq_len, copies, args.seed) for split in (data, val))
    for old in [*args.out_dir.glob("tmp-*"), *(checkpoints(args.out_dir) if args.overwrite else ())]:
        remove(old)   # what a kill left, and what the user gave up
    for name in ("config.json", adapter.ABOUT) if args.overwrite else ():
        (args.out_dir / name).unlink(missing_ok=True)
    path = args.out_dir / "log.csv"
    old = path.read_text(errors="replace") if args.resume and path.is_file() else ""
    lines = [line[0] for line in re.finditer(r"^([0-9]{1,8}),.*\n", old, re.M)
             if int(line[1]) <= step]   # a kill may have left later ones, the last one torn
    write_whole(path, lambda aside: aside.write_text(HEAD + "".join(lines)))
    log = Log(path, sums, torch.full((), math.inf, device=args.device), step, time.monotonic())
    return Run(model, optimizer, files, rows, val_rows, log, step)


def load(args, source, config) -> Llama:
    """The model, with float32 weights; or its base in --base_dtype and a float32 adapter."""
    if args.adapter_rank:
        base, started, _ = adapter.base_of(args.init_from)
        model = Llama.from_pretrained(base, args.device, getattr(torch, args.base_dtype), config.mask_id)
        torch.manual_seed(args.seed)
        if args.resume or started:
            adapter.load(model, source if args.resume else started, torch.float32)
        else:
            adapter.attach(model, args.adapter_rank, args.adapter_alpha or None)
    elif source:
        model = Llama.from_pretrained(source, args.device, torch.float32, config.mask_id)
        for weight in model.parameters():   # mapped from the file: as aligned in memory as weights that never
            weight.data = weight.data.clone()   # stopped, or matrix products could round differently
    else:
        torch.manual_seed(args.seed)
        model = Llama(config).to(args.device)
    model.folder = model.folder if args.adapter_rank else None   # the tokenizer's files: see Run
    model.grad_checkpoint = args.grad_checkpoint
    return (compile_layers(model) if args.compile else model).train()


# --------------------------------------------------------------------------- the command: checkpoints

KINDS = ("config.json", "model.safetensors"), (adapter.ABOUT, adapter.WEIGHTS)   # a model, or an adapter


def checkpoints(out_dir: Path) -> list[Path]:
    return sorted(out_dir.glob("step-" + "[0-9]" * 8))


def newest(out_dir: Path):
    """The newest whole checkpoint folder of a run, or None."""
    whole = [path for path in checkpoints(out_dir) if (path / "train_state.pt").is_file()
             and any(all((path / name).is_file() for name in kind) for kind in KINDS)]
    return whole[-1] if whole else None


def remove(path: Path):
    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def save(run, args):
    """Write a checkpoint aside, rename it into place, and only then remove the ones before it."""
    final, aside = args.out_dir / f"step-{run.step:08d}", args.out_dir / f"tmp-{run.step:08d}"
    for stray in (aside, final):
        if stray.is_symlink() or stray.exists():
            remove(stray)
    write_model(run.model, args, run.files, aside)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    state = dict(optimizer=run.optimizer.state_dict(), step=run.step, sums=run.log.sums, args=plain)
    try:
        write_whole(aside / "train_state.pt", lambda path: torch.save(state, path))
    except RuntimeError:   # torch's word for it
        raise OSError(f"{aside / 'train_state.pt'} cannot be written: is the disk full?") from None
    flush_folder(aside)
    os.replace(aside, final)
    flush_folder(args.out_dir)
    for old in checkpoints(args.out_dir):
        if old < final:   # a newer one is no checkpoint of this run
            remove(old)


def write_model(model, args, files, folder, dtype=None):
    """A Hugging Face folder: the model, and the tokenizer's files; or an adapter's, without its base."""
    if args.adapter_rank:
        names = "full_mask_prob", "place0", "targets", "block_size_max"
        about = {name: getattr(args, name) for name in names}
        return adapter.save(model, folder, dtype, base=adapter.base_of(args.init_from)[0], **about)
    (model if dtype is None else model.to(dtype)).save_pretrained(folder)
    for name, content in files.items():
        write_whole(folder / name, lambda path: path.write_bytes(content))


def flush_folder(folder):
    """Renames inside a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_state(folder: Path, device="cpu", optimizer=None) -> dict:
    """A checkpoint's train_state.pt; ValueError, one line, if it is damaged.

    For an `optimizer` the whole file is read against its checksums, and every tensor's shape and dtype are
    compared with the parameters': the kernel of the update would write wherever a wrong one leads.
    """
    path, good = folder / "train_state.pt", False
    with warnings.catch_warnings(), contextlib.suppress(Exception):   # damage ends in a dozen kinds of error
        warnings.simplefilter("ignore")
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)   # mapped: not read yet
        fits = type(state["step"]) is int and state["step"] > 0 and isinstance(state["args"], dict) \
            and [type(x) for x in state["sums"].tolist()] == 4 * [float]
        if optimizer:
            weights = [w for group in optimizer.param_groups for w in group["params"]]
            wanted = [dict(step=torch.zeros(()), exp_avg=w, exp_avg_sq=w) for w in weights]
            moments = state["optimizer"]["state"]
            kinds = lambda m: {name: (x.shape, x.dtype, x.layout) for name, x in m.items()}
            fits = fits and {i: kinds(m) for i, m in moments.items()} == dict(enumerate(map(kinds, wanted)))
            with zipfile.ZipFile(path) as file:
                fits = fits and file.testzip() is None
            for m in moments.values() if fits else ():   # memory of their own, not the file's
                m.update({name: x.clone(memory_format=torch.contiguous_format) for name, x in m.items()})
        good = fits
    need(good, f"{path} is damaged, or not of this model or version: remove {folder}, or start again with "
               "--overwrite")
    return state


def finish(model, args, files):
    """The finished model as a folder in out_dir, bfloat16; on word problems, how well it decodes."""
    write_model(model, args, files, args.out_dir, torch.bfloat16)
    flush_folder(args.out_dir)
    print(f"finished: python generate.py --init_from={args.out_dir} --prompt=...", flush=True)
    if args.sample_problems and HERE / "data" / args.dataset == WORD_PROBLEMS:
        from data.word_problems.prepare import problems
        model = Llama.from_pretrained(args.out_dir, args.device, torch.float32)   # as saved, and not compiled
        longest = max(16, args.block_size_max) if args.objective == "sbd" else 0
        cells = [dict(mode="ntp")] + [cell for cell in CELLS if cell["block_size"] <= longest]
        tokenizer = Tokenizer.from_pretrained(args.out_dir)
        print(table(sweep(model, tokenizer, problems("val", args.sample_problems), cells)))


# --------------------------------------------------------------------------- the command: options

def place(name):
    """A folder by its absolute path, so that a run can be resumed from anywhere; any other name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


NUMBERS = dict(   # least, most, default, help
    ntp_weight=(0, 1e9, 1.0, "weight of the NTP term; 0 is the paper's ablation"),
    matp_weight=(0, 1e9, 1.0, "weight of the MATP term"),
    block_size_min=(1, 4096, 2, "k ~ U{min, ..., max}, one a step"),
    block_size_max=(1, 4096, 16, "the longest block, one more than the stop copies behind a document"),
    full_mask_prob=(0, 1, 0.0, "share of rows that are all masks (draft-aware noise); the paper's is 0"),
    seq_len=(2, 2**24, 512, "tokens a row"),
    batch_size=(1, 2**24, 8, "rows a forward"),
    grad_accum=(1, 2**24, 1, "forwards a step"),
    max_steps=(1, 10**8 - 1, 200, "optimizer steps"),
    lr=(1e-15, 1e3, 1e-3, "peak learning rate"),
    min_lr=(0, 1e3, 0.0, "learning rate at the end of the cosine"),
    warmup_steps=(0, 10**8, 20, "steps of linear warmup"),
    weight_decay=(0, 1e3, 0.1, "AdamW's, on matrices only"),
    beta1=(0, 1 - 1e-9, 0.9, "AdamW's"),
    beta2=(0, 1 - 1e-9, 0.95, "AdamW's"),
    grad_clip=(0, 1e9, 1.0, "largest gradient norm; 0: no clipping"),
    log_interval=(1, 10**8, 10, "steps a line; losses are means over their targets"),
    eval_interval=(1, 10**8, 100, "steps between checkpoints, each after the validation losses"),
    eval_rows=(0, 2**31, 32, "validation rows; 0: none"),
    sample_problems=(0, 2000, 100, "held-out word problems decoded at the end; 0: none"),
    seed=(0, 2**63 - 1, 0, "of initialisation, data order and noise"),
    adapter_rank=(0, 4096, 0, "train a gated adapter of this rank, not the weights; 0: the weights"),
    adapter_alpha=(0, 1e6, 0.0, "its alpha, of the scale alpha / rank; 0: the rank"))


def options():
    p = parser(__doc__)
    a = p.add_argument
    a("--init_from", type=place, default=str(HERE / "checkpoints/tiny-ntp"),
      help=f"folder, hub id owner/name, or preset: {PUBLISHED}; tiny, tiny-draft and sbd-3b start at random")
    a("--dataset", type=place, default="word_problems", help="a folder of .bin files, or NAME for data/NAME")
    a("--out_dir", type=Path, default="out", help="checkpoints, log.csv and the finished model")
    a("--resume", action="store_true", help="go on from out_dir's newest checkpoint, with its options")
    a("--overwrite", action="store_true", help="start afresh in an out_dir that holds another run")
    a("--recipe", choices=RECIPES, help="the paper's hyperparameters as defaults")
    a("--objective", choices=("sbd", "ntp"), default="sbd", help="Eq. 14, or next-token prediction alone")
    a("--targets", choices=("self", "data"), default="self",
      help="adapter: learn the model's own distributions, or the tokens of the data")
    a("--place0", action="store_true", help="adapter: a block's first place is a target, as mode sbd needs")
    a("--base_dtype", choices=("float32", "bfloat16"),
      help="adapter: of the frozen weights; default bfloat16 on cuda, else float32")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    for name, (_, _, default, text) in NUMBERS.items():
        a(f"--{name}", type=type(default), default=default, help=text)
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=("float32", "bfloat16"),
      help="of the forward (autocast); default bfloat16 on cuda, else float32")
    a("--attention", choices=BACKENDS, default="auto", help="its backend; auto: triton on CUDA, else sdpa")
    a("--compile", action="store_true", help="torch.compile the layers")
    a("--grad_checkpoint", action="store_true", help="recompute layers in backward: less memory, more time")
    return p


def parse(argv=None):
    """The options; with --resume those of the run in out_dir, where none is given."""
    p, argv = options(), sys.argv[1:] if argv is None else argv
    args = p.parse_args(argv)
    if not args.resume:
        p.set_defaults(**RECIPES.get(args.recipe, {}))
        return p.parse_args(argv)
    need(not args.overwrite, "--resume --overwrite: give one of them")
    folder = newest(args.out_dir)
    need(folder, f"--resume: {args.out_dir} holds no checkpoint: leave --resume away to start a run there")
    state = read_state(folder)
    saved = {name: value for name, value in state["args"].items()
             if name not in ("out_dir", "resume", "overwrite")}
    words = [f"--{name}" if value is True else f"--{name}={value}" for name, value in saved.items()
             if value is not None and value is not False]   # read like a command line: types, choices
    try:
        need(state["args"].keys() == vars(args).keys(), "other options than today's")
        was, args = p.parse_args(words), p.parse_args([*words, *argv])
        need(all((saved[name] is None) == (getattr(was, name) is None) for name in saved), "one is empty")
    except ValueError as error:
        raise ValueError(f"{folder}/train_state.pt is damaged, or not of this version ({error}): "
                         f"remove {folder}, or start again with --overwrite") from None
    for name in FIXED:
        need(getattr(args, name) == getattr(was, name), f"--{name} {getattr(args, name)}: the run in "
             f"{args.out_dir} has {saved[name]}; leave it away, or start another run in another --out_dir")
    need(args.max_steps >= state["step"],
         f"--max_steps {args.max_steps}: the run in {args.out_dir} is at step {state['step']} already")
    return args


def check(args):
    """Refuse what the numbers alone show; touches nothing."""
    for name, (least, most, *_) in NUMBERS.items():
        given = getattr(args, name)
        need(least <= given <= most, f"--{name} {given}: wanted {least} to {most}")
    need(not args.adapter_rank or args.objective == "sbd", "--adapter_rank learns the sbd objective, not ntp")
    need(args.adapter_rank or args.targets == "self" and not args.place0,
         "--targets and --place0 are an adapter's: give --adapter_rank or --recipe=adapter")
    need(args.block_size_min <= args.block_size_max,
         f"--block_size_min {args.block_size_min} is more than --block_size_max {args.block_size_max}")


def need_place(args):
    """out_dir is a folder, or none yet, and holds another run only where that is asked for."""
    out = args.out_dir
    need(out.is_dir() or not out.exists(), f"--out_dir {out} is a file: give a folder")
    made = (out / "config.json").exists() or (out / adapter.ABOUT).exists()
    need(args.resume or args.overwrite or not (checkpoints(out) or made),
         f"{out} holds another run: give --resume, --overwrite or another --out_dir")


def need_memory(args, config):
    """Training takes at the very least: weights, gradients, AdamW's states and each layer's input."""
    with torch.device("meta"):
        parameters = sum(w.numel() for w in Llama(config).parameters())
    tokens = args.batch_size * args.seq_len * (1 if args.objective == "ntp" else 2)   # of a forward
    inputs = tokens * config.num_hidden_layers * config.hidden_size
    least, what = 16 * parameters + 4 * inputs, "weights, gradients, AdamW's states"
    if args.adapter_rank:   # inputs of the noisy half only; its own matrices are small beside that
        least, what = getattr(torch, args.base_dtype).itemsize * parameters + 2 * inputs, "weights"
    size, free = least / 2**30, free_memory(args.device) / 2**30
    need(size <= free, f"training {args.init_from} needs {size:.1f} GiB for {what} and layers' inputs, "
                       f"{args.device} has {free:.1f} GiB free: use more memory, or a smaller model or "
                       "--batch_size")
    rows = args.batch_size * args.grad_accum
    size, free = 20 * rows * args.seq_len / 2**30, free_memory("cpu") / 2**30   # ids, documents, masks, noise
    need(size <= free, f"--batch_size times --grad_accum: the {rows} rows of a step need {size:.1f} GiB, "
                       f"{free:.1f} GiB are free")


def find(args):
    """What a run is made from, seen to fit together before weights are loaded or files written.

    Returns the training set, the validation set or None, what to load the weights from or None (random ones),
    the model's config and its tokenizer.
    """
    device = open_device(args.device)
    if args.objective == "sbd":
        check_backend(args.attention, device, training=True)
    default = "bfloat16" if device.type == "cuda" else "float32"
    args.dtype, args.base_dtype = args.dtype or default, args.base_dtype or default
    need_place(args)
    at_random = args.init_from in PRESETS and PRESETS[args.init_from][1] is None   # a shape without weights
    source = newest(args.out_dir) if args.resume else None if at_random else args.init_from
    folder = args.init_from if args.adapter_rank else source
    folder = folder and find_folder(folder, weights=False)
    need(not (args.overwrite and source and folder.resolve().is_relative_to(args.out_dir.resolve())),
         f"--overwrite would remove what --init_from {args.init_from} names: give another --out_dir")
    started = adapter.base_of(args.init_from)[1]   # an adapter to go on from
    rank = adapter.read_about(started)["rank"] if started else args.adapter_rank
    need(rank == args.adapter_rank,
         f"--adapter_rank {args.adapter_rank}: --init_from is an adapter of rank {rank}")
    config = LlamaConfig.from_pretrained(source or args.init_from)
    config = config if args.mask_id is None else replace(config, mask_id=args.mask_id)
    if args.objective == "sbd":
        need_mask(config, args.init_from)
    need(args.seq_len <= config.max_position_embeddings,
         f"--seq_len {args.seq_len}: wanted 2 to {config.max_position_embeddings}, the model's context")
    need_memory(args, config)
    dataset = HERE / "data" / args.dataset   # of an absolute path: that path
    if dataset == WORD_PROBLEMS and not (dataset / "meta.json").exists():  # the default data set makes itself
        print("preparing the word problems, under a minute", flush=True)
        need(not subprocess.run([sys.executable, dataset / "prepare.py"]).returncode,
             f"{dataset}/prepare.py failed")
    data = Dataset(dataset, "train")
    val = Dataset(dataset, "val") if "val" in data.meta["splits"] and args.eval_rows else None
    tokenizer = Tokenizer.from_pretrained(folder or data.meta["tokenizer"])
    need(tokenizer.hash == data.meta["tokenizer_hash"] and data.vocab_size <= config.vocab_size,
         f"{dataset} was tokenized with another vocabulary, that of {data.meta['tokenizer']}: "
         f"prepare your data with --tokenizer={args.init_from}")
    return data, val, source, config, tokenizer


def on_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def exit_at_once(number, frame):
    sys.exit(128 + number)   # 130 for Ctrl-C, 143 for SIGTERM


def main(argv=None):
    on_signals(exit_at_once)
    args = parse(argv)
    check(args)
    found = find(args)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    with locked(args.out_dir):
        opened = open_run(args, *found)
        weights = sum(w.numel() for w in opened.model.parameters() if w.requires_grad)
        print(f"{args.objective} on {args.dataset}: {weights / 1e6:.2f}M parameters, steps {opened.step} to "
              f"{args.max_steps} of {args.batch_size * args.grad_accum} x {args.seq_len} tokens, "
              f"{args.device} {args.dtype}, into {args.out_dir}", flush=True)
        # The first Ctrl-C or SIGTERM ends the run after the step at hand, a second one at once.
        if args.adapter_rank and opened.val_rows and not args.resume:
            plain = argparse.Namespace(**vars(args) | dict(objective="ntp"))
            ntp, _ = validate(opened.model, plain, opened.val_rows)
            print(f"validation ntp {ntp:.4f}: the base model's, and so it stays", flush=True)
        stop = opened.stop
        on_signals(lambda number, frame: exit_at_once(number, frame) if stop else stop.append(number))
        train(opened, args)
        on_signals(exit_at_once)
        finish(opened.model, args, opened.files)


if __name__ == "__main__":
    run(main)
