"""Algorithm 1: fine-tune a next-token model with the Set Block Decoding loss, or train that model first.

    python train.py                                            the shipped tiny model, minutes on a CPU
    python train.py --init_from=llama3.1-8b --dataset=DIR      the same loop on real weights

Weights and AdamW's states are float32 whatever the forward runs in: bfloat16 would round updates at lr 1e-5
away. Everything random follows from (seed, step, row of the step): a resumed run goes on as if it had never
stopped, and a step is the same sums for every split into micro-batches (method section 12).

Shapes: B batch_size, L seq_len, R rows of a step, k block size.
"""
from cli import PUBLISHED, need, need_mask, open_device, parser, run

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from data.bin import Dataset, Rows, batch, locked, num_ntp_targets, pack, targets
from eval import sweep, table
from hf import PRESETS, TOKENIZER_FILES, find_folder, free_memory, write_whole
from kernels.sbd_attention import BACKENDS, check_backend
from model import Llama, LlamaConfig, compile_layers
from sbd_loss import ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
WORD_PROBLEMS = HERE / "data/word_problems"
RECIPES = {   # method section 3: 2M tokens a step, 34k steps, 32k context
    "paper-8b": dict(lr=3e-4, warmup_steps=200, max_steps=34_000, seq_len=32_768, batch_size=1, grad_accum=64,
                     dtype="bfloat16", grad_checkpoint=True),
}
CHECKPOINTS = "step-" + "[0-9]" * 8
# What a (seed, step) means, and what the weights are: a resumed run cannot change these.
FIXED = ("recipe", "init_from", "dataset", "objective", "mask_id", "seed", "seq_len", "batch_size",
         "grad_accum", "block_size_min", "block_size_max", "full_mask_prob")
CELLS = [dict(mode="sbd", block_size=k, gamma=0.1) for k in (8, 16)] + \
    [dict(mode="verified", block_size=k, hedges=2) for k in (16, 24, 32)]


# -------------------------------------------------------------------------------- Algorithm 1

def train(run, args) -> None:
    """Algorithm 1: k and the noise of a step, the loss of its rows in micro-batches, one update of AdamW."""
    B, R = args.batch_size, args.batch_size * args.grad_accum
    for step in range(run.step, args.max_steps):
        k, noise = draw(args, step, R)                           # k ~ U{min, ..., max}; noise (R, L) bool
        batches = [batch(run.rows, range(i, i + B)) for i in range(step * R, (step + 1) * R, B)]
        num_targets = sum(map(num_ntp_targets, batches))         # of the whole step: Eq. 14 of all its rows
        for group in run.optimizer.param_groups:
            group["lr"] = learning_rate(args, step)
        for b, masked in zip(batches, noise.split(B)):
            result = losses(run.model, args, b, k, masked, num_targets)
            result.loss.backward()
            run.log.add(result)
        norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), args.grad_clip or math.inf)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=True)
        after(run, args, step + 1, norm)                         # a line, a checkpoint: whatever is due


def draw(args, step, num_rows):
    """Fig. 7, Eq. 13: a step's k ~ U{min, ..., max}, and which tokens of its rows are masked, (num_rows, L).

    Each row has its eta ~ U(0, 1), or, with probability full_mask_prob, 1 (draft-aware noise, method section
    10). All of it follows from (seed, step, row) alone: method section 12.
    """
    rng = np.random.default_rng([args.seed, step, 0])
    k = int(rng.integers(args.block_size_min, args.block_size_max + 1))
    noise = np.empty((num_rows, args.seq_len), bool)
    for row in range(num_rows):
        rng = np.random.default_rng([args.seed, step, row + 1])
        full, eta = rng.random(2)
        noise[row] = (full < args.full_mask_prob) | (rng.random(args.seq_len, np.float32) < eta)
    return k, torch.from_numpy(noise)


def losses(model, args, b, k, masked, num_targets=None):
    """One forward's loss; autocast keeps float32 weights and runs the matrix products in --dtype."""
    b, eta = b.to(args.device), masked.to(args.device, torch.float32)   # 1 where masked, 0 elsewhere: certain
    loss_mask, ntp_mask = targets(b, k)   # (B, L)
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        if args.objective == "ntp":
            return ntp_loss(model, b.tokens, ntp_mask, b.doc_ids, num_targets)
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
        k, noise = draw(args, i, 1)
        by_k.setdefault(k, []).append((i, noise[0]))
    for k, group in by_k.items():
        for part in (group[i:i + args.batch_size] for i in range(0, len(group), args.batch_size)):
            index, noise = zip(*part)
            sums += totals(losses(model, args, batch(rows, index), k, torch.stack(noise))).cpu()
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
    """Losses since the last line, read only at the next, and log.csv."""
    path: Path
    sums: torch.Tensor                           # (4,), as in `totals`, on the device
    first_bad: torch.Tensor                      # the first step that was not finite; infinity: none
    lines: list = field(default_factory=lambda: [HEAD])
    began: float = field(default_factory=time.monotonic)
    line_time: float = field(default_factory=time.monotonic)
    first_step: int = 0
    line_step: int = 0

    def add(self, result):
        self.sums += totals(result)

    def line(self, args, done, checked):
        """Print and write the line of step `done`; checked: validation losses or []."""
        now, (ntp, matp), lr = time.monotonic(), means(self.sums), learning_rate(args, done - 1)
        tokens = (done - self.line_step) * args.batch_size * args.grad_accum * args.seq_len
        rate = tokens / max(now - self.line_time, 1e-9)  # tokens a second
        left = (args.max_steps - done) * (now - self.began) / (done - self.first_step) / 60   # minutes
        validation = f"  validation ntp {checked[0]:.4f} matp {checked[1]:.4f}" if checked else ""
        print(f"step {done:5d}  ntp {ntp:.4f}  matp {matp:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s  "
              f"{left:.1f} min left{validation}", flush=True)
        numbers = [f"{x:.9g}" if x != "" else x for x in (ntp, matp, *(checked or ("", "")))]
        with self.path.open("a") as file:
            file.write(",".join([str(done), *numbers, f"{lr:.6g}", f"{rate:.0f}"]) + "\n")
        self.sums.zero_()
        self.line_step, self.line_time = done, time.monotonic()


@dataclass
class Run:
    model: Llama
    optimizer: torch.optim.Optimizer
    files: dict                                  # name -> bytes of the tokenizer's files
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
    groups = [dict(params=[w for w in model.parameters() if w.dim() == 2], weight_decay=args.weight_decay),
              dict(params=[w for w in model.parameters() if w.dim() != 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), fused=True)


def open_run(args, data, val, source, config, tokenizer) -> Run:
    """Data, model, optimizer and log, resumed where asked; from here on out_dir is this run's."""
    model = load(args, source, config, tokenizer)
    copies = args.block_size_max - 1 if args.objective == "sbd" else 0   # stop copies (method section 3)
    rows = pack(data, args.seq_len, copies, args.seed)
    val_rows = pack(val, args.seq_len, copies, args.seed) if val and args.eval_rows else None
    wide = torch.float32 if torch.device(args.device).type == "mps" else torch.float64
    log = Log(args.out_dir / "log.csv", torch.zeros(4, device=args.device, dtype=wide),
              torch.full((), math.inf, device=args.device))
    files = {name: (tokenizer.folder / name).read_bytes() for name in TOKENIZER_FILES
             if (tokenizer.folder / name).is_file()}   # their folder may go
    opened = Run(model, make_optimizer(model, args), files, rows, val_rows, log, 0)
    state = read_state(newest(args.out_dir), opened.optimizer, args.device) if args.resume else None
    for old in [*args.out_dir.glob("tmp-*"), *(args.out_dir.glob(CHECKPOINTS) if args.overwrite else ())]:
        remove(old)   # what a kill left, and what the user gave up
    if args.overwrite:
        (args.out_dir / "config.json").unlink(missing_ok=True)
    if state:
        groups = opened.optimizer.state_dict()["param_groups"]
        opened.optimizer.load_state_dict(dict(state["optimizer"], param_groups=groups))
        opened.step = log.first_step = log.line_step = state["step"]
        log.sums = state["sums"].to(args.device, wide)
        if log.path.is_file():   # a kill may have left lines behind the checkpoint, the last one torn
            for line in log.path.read_text(errors="replace").splitlines(keepends=True)[1:]:
                step = line.partition(",")[0]
                if line.endswith("\n") and step.isdecimal() and int(step) <= opened.step:
                    log.lines.append(line)
    write_whole(log.path, lambda path: path.write_text("".join(log.lines)))
    return opened


def load(args, source, config, tokenizer) -> Llama:
    """The model, with float32 weights."""
    if source:
        model = Llama.from_pretrained(source, args.device, torch.float32, config.mask_id)
        for weight in model.parameters():   # mapped from the file: as aligned in memory as weights that never
            weight.data = weight.data.clone()   # stopped, or matrix products could round differently
    else:
        torch.manual_seed(args.seed)
        model = Llama(config).to(args.device)
    model.folder, model.grad_checkpoint = None, args.grad_checkpoint   # the tokenizer's files: see Run
    return (compile_layers(model) if args.compile else model).train()


# --------------------------------------------------------------------------- the command: checkpoints

def newest(out_dir: Path):
    """The newest whole checkpoint folder of a run, or None."""
    whole = [path for path in out_dir.glob(CHECKPOINTS) if (path / "train_state.pt").is_file()]
    return max(whole, default=None)


def remove(path: Path):
    path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def save(run, args):
    """Write a checkpoint aside, rename it into place, and only then remove the ones before it."""
    final, aside = args.out_dir / f"step-{run.step:08d}", args.out_dir / f"tmp-{run.step:08d}"
    for old in (aside, final):
        if old.is_symlink() or old.exists():
            remove(old)
    write_model(run.model, run.files, aside)
    plain = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    state = dict(optimizer=run.optimizer.state_dict(), step=run.step, sums=run.log.sums, args=plain)
    write_whole(aside / "train_state.pt", lambda path: torch.save(state, path))
    flush_folder(aside)
    os.replace(aside, final)
    flush_folder(args.out_dir)
    for old in args.out_dir.glob(CHECKPOINTS):
        if old != final:
            remove(old)


def write_model(model, files, folder):
    """A Hugging Face folder: the model, and the tokenizer's files."""
    model.save_pretrained(folder)
    for name, content in files.items():
        write_whole(folder / name, lambda path: path.write_bytes(content))


def load_file(folder: Path, device) -> dict:
    """A checkpoint's train_state.pt, tensors and plain values only; ValueError if it is damaged."""
    path = folder / "train_state.pt"
    try:
        state = torch.load(path, map_location=device, weights_only=True, mmap=True)   # mapped: not read yet
        good = isinstance(state, dict) and isinstance(state["args"], dict) and type(state["step"]) is int \
            and state["step"] >= 0 and isinstance(state["optimizer"]["state"], dict) \
            and state["sums"].shape == (4,)
    except Exception:   # a damaged file ends in any of a dozen kinds of error
        good = False
    need(good, f"{path} is damaged, or not of this version: remove {folder}, or start again with --overwrite")
    return state


def read_state(folder: Path, optimizer, device) -> dict:
    """load_file, and every tensor's shape and dtype checked against the parameters: a kernel would not."""
    state = load_file(folder, device)
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    moments, good = state["optimizer"]["state"], False
    with contextlib.suppress(Exception):
        good = set(moments) == set(range(len(weights))) and all(
            set(moments[i]) == {"step", "exp_avg", "exp_avg_sq"} and moments[i]["step"].shape == ()
            and moments[i]["step"].dtype == torch.float32 and 0 <= float(moments[i]["step"]) < math.inf
            and all(moments[i][name].shape == w.shape and moments[i][name].dtype == w.dtype
                    and moments[i][name].layout == torch.strided for name in ("exp_avg", "exp_avg_sq"))
            for i, w in enumerate(weights))
    need(good, f"{folder / 'train_state.pt'} does not fit the model (a state missing, or of another shape): "
               f"remove {folder}, or start again with --overwrite")
    for state_of in moments.values():   # memory of its own, not the mapped file's
        state_of.update({name: tensor.clone() for name, tensor in state_of.items()})
    return state


def flush_folder(folder):
    """Renames inside a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def finish(model, args, files):
    """The finished model as a folder in out_dir, bfloat16; on word problems, how well it decodes."""
    write_model(model.to(torch.bfloat16), files, args.out_dir)
    flush_folder(args.out_dir)
    print(f"finished: python generate.py --init_from={args.out_dir} --prompt=...", flush=True)
    if args.sample_problems and HERE / "data" / args.dataset == WORD_PROBLEMS:
        from data.word_problems.prepare import problems
        model = Llama.from_pretrained(args.out_dir, args.device,
                                      torch.float32)   # what was saved, and not compiled
        longest = max(16, args.block_size_max) if args.objective == "sbd" else 0
        cells = [dict(mode="ntp")] + [cell for cell in CELLS if cell["block_size"] <= longest]
        tokenizer = Tokenizer.from_pretrained(args.out_dir)
        print(table(sweep(model, tokenizer, problems("val", args.sample_problems), cells)))


# --------------------------------------------------------------------------- the command: options

def place(name):
    """A folder by its absolute path, so that a run can be resumed from anywhere; any other name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


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
    a("--ntp_weight", type=float, default=1.0, help="weight of the NTP term; 0 is the paper's ablation")
    a("--matp_weight", type=float, default=1.0, help="weight of the MATP term")
    a("--block_size_min", type=int, default=2, help="k ~ U{min, ..., max}, one a step")
    a("--block_size_max", type=int, default=16,
      help="the longest block, one more than a document's stop copies")
    a("--full_mask_prob", type=float, default=0.0, help="share of rows that are all masks; the paper's is 0")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    a("--seq_len", type=int, default=512, help="tokens a row")
    a("--batch_size", type=int, default=8, help="rows a forward")
    a("--grad_accum", type=int, default=1, help="forwards a step")
    a("--max_steps", type=int, default=200, help="optimizer steps")
    a("--lr", type=float, default=1e-3, help="peak learning rate")
    a("--min_lr", type=float, default=0.0, help="learning rate at the end of the cosine")
    a("--warmup_steps", type=int, default=20, help="steps of linear warmup")
    a("--weight_decay", type=float, default=0.1, help="AdamW's, on matrices only")
    a("--beta1", type=float, default=0.9, help="AdamW's")
    a("--beta2", type=float, default=0.95, help="AdamW's")
    a("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    a("--log_interval", type=int, default=10, help="steps a line; losses are means over their targets")
    a("--eval_interval", type=int, default=100, help="steps between checkpoints and validation losses")
    a("--eval_rows", type=int, default=32, help="validation rows; 0: none")
    a("--sample_problems", type=int, default=100, help="held-out word problems decoded at the end; 0: none")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=("float32", "bfloat16"),
      help="of the forward (autocast); default bfloat16 on cuda, else float32")
    a("--attention", choices=BACKENDS, default="auto",
      help="backend of the attention; auto: triton on CUDA, else sdpa")
    a("--compile", action="store_true", help="torch.compile the layers")
    a("--grad_checkpoint", action="store_true", help="recompute layers in backward: less memory, more time")
    a("--seed", type=int, default=0, help="of initialisation, data order and noise")
    return p


def parse(argv=None):
    """The options; with --resume those of the run in out_dir, where none is given."""
    p = options()
    first = p.parse_args(argv)
    if not first.resume:
        p.set_defaults(**RECIPES.get(first.recipe, {}))
        return p.parse_args(argv)
    need(not first.overwrite, "--resume --overwrite: give one of them")
    folder = newest(first.out_dir)
    need(folder is not None,
         f"--resume: {first.out_dir} holds no checkpoint: leave --resume away to start a run there")
    state = load_file(folder, "cpu")
    saved = {name: value for name, value in state["args"].items()
             if name not in ("out_dir", "resume", "overwrite")}
    for action in p._actions:   # what was stored is looked at like anything else that is read
        if action.dest not in ("help", "out_dir", "resume", "overwrite"):
            value, kind = saved.get(action.dest, "missing"), {int: int, float: int | float}.get(action.type,
                                                                                                str)
            good = isinstance(value, bool) if action.nargs == 0 else value is action.default is None or (
                isinstance(value, kind) and type(value) is not bool and value in (action.choices or [value]))
            need(good, f"{folder / 'train_state.pt'} is damaged ({action.dest} is {value!r}): "
                       "start again with --overwrite")
    p.set_defaults(**saved)
    args = p.parse_args(argv)
    for name in FIXED:
        need(getattr(args, name) == saved[name], f"--{name} {getattr(args, name)}: the run in {args.out_dir} "
             f"has {saved[name]}; leave it away, or start another run in another --out_dir")
    need(args.max_steps >= state["step"],
         f"--max_steps {args.max_steps}: the run in {args.out_dir} is at step {state['step']} already")
    return args


def check_numbers(args):
    """Refuse what the options alone show; touches nothing."""
    for names, good, wanted in (
            ("batch_size grad_accum log_interval eval_interval block_size_min seq_len",
             lambda x: 1 <= x < 2**24,
             f"1 or more, below {2**24}"),
            ("max_steps", lambda x: 1 <= x < 10**8, "1 or more, below 10^8"),
            ("warmup_steps eval_rows seed", lambda x: 0 <= x < 2**63, "0 or more, below 2^63"),
            ("lr", lambda x: 0 < x < math.inf, "a number above 0"),
            ("min_lr weight_decay grad_clip ntp_weight matp_weight", lambda x: 0 <= x < math.inf,
             "a number from 0 up"),
            ("beta1 beta2", lambda x: 0 <= x < 1, "from 0 to below 1"),
            ("full_mask_prob", lambda x: 0 <= x <= 1, "0 to 1"),
            ("sample_problems", lambda x: 0 <= x <= 2000, "0 to 2000")):
        for name in names.split():
            need(good(getattr(args, name)), f"--{name} {getattr(args, name)}: wanted {wanted}")
    need(args.block_size_min <= args.block_size_max <= 4096,
         f"--block_size_min {args.block_size_min} is more than "
         f"--block_size_max {args.block_size_max}" if args.block_size_max <= 4096 else
         f"--block_size_max {args.block_size_max}: wanted at most 4096")
    device = open_device(args.device)
    if args.objective == "sbd":
        check_backend(args.attention, device, training=True)
    args.dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    need(not args.out_dir.exists() or args.out_dir.is_dir(),
         f"--out_dir {args.out_dir} is a file: give a folder")
    need(args.resume or args.overwrite or not (newest(args.out_dir)
                                               or (args.out_dir / "config.json").exists()),
         f"{args.out_dir} holds another run: give --resume, --overwrite or another --out_dir")


def check(args):
    """Refuse everything that can be refused, before weights are loaded or files touched.

    Returns the training set, the validation set or None, what to load the weights from or None (random ones),
    the model's config and its tokenizer.
    """
    check_numbers(args)
    at_random = args.init_from in PRESETS and PRESETS[args.init_from][1] is None   # a shape without weights
    source = newest(args.out_dir) if args.resume else None if at_random else args.init_from
    folder = source and find_folder(source, weights=False)
    need(not (args.overwrite and source and folder.resolve().is_relative_to(args.out_dir.resolve())),
         f"--overwrite would remove what --init_from {args.init_from} names: give another --out_dir")
    config = LlamaConfig.from_pretrained(source or args.init_from)
    config = config if args.mask_id is None else replace(config, mask_id=args.mask_id)
    if args.objective == "sbd":
        need_mask(config, args.init_from)
    need(2 <= args.seq_len <= config.max_position_embeddings,
         f"--seq_len {args.seq_len}: wanted 2 to {config.max_position_embeddings}, the model's context")
    with torch.device("meta"):
        parameters = sum(w.numel() for w in Llama(config).parameters())
    size, free = 16 * parameters, free_memory(args.device)   # bytes: weights, gradients, two states, float32
    need(size <= free, f"training {args.init_from} needs {size / 2**30:.1f} GiB for weights, gradients and "
         f"AdamW's states, {args.device} has {free / 2**30:.1f} GiB free: use a smaller model or more memory")
    dataset = HERE / "data" / args.dataset   # of an absolute path: that path
    if dataset == WORD_PROBLEMS and not (dataset / "meta.json").exists():  # the default data set makes itself
        print("preparing the word problems, under a minute", flush=True)
        need(not subprocess.run([sys.executable, dataset / "prepare.py"]).returncode,
             f"{dataset}/prepare.py failed")
    data = Dataset(dataset, "train")
    val = Dataset(dataset, "val") if "val" in data.meta["splits"] else None
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
    found = check(args)
    args.out_dir.mkdir(parents=True, exist_ok=True)
    with locked(args.out_dir):
        opened = open_run(args, *found)
        weights = sum(w.numel() for w in opened.model.parameters())
        print(f"{args.objective} on {args.dataset}: {weights / 1e6:.2f}M parameters, steps {opened.step} to "
              f"{args.max_steps} of {args.batch_size * args.grad_accum} x {args.seq_len} tokens, "
              f"{args.device} {args.dtype}, into {args.out_dir}", flush=True)
        # The first Ctrl-C or SIGTERM ends the run after the step at hand, a second one at once.
        stop = opened.stop
        on_signals(lambda number, frame: exit_at_once(number, frame) if stop else stop.append(number))
        train(opened, args)
        on_signals(exit_at_once)
        finish(opened.model, args, opened.files)


if __name__ == "__main__":
    run(main)
