"""Algorithm 1: fine-tune a next-token model with the Set Block Decoding loss, or train that model first.

    python train.py                                            the shipped tiny model, minutes on a CPU
    python train.py --init_from=llama3.1-8b --dataset=DIR      the same loop on real weights

Weights and AdamW's states are float32 whatever the forward runs in: bfloat16 weights would round updates
at lr 1e-5 away. Everything random in a step follows from (seed, step), so a run that is resumed goes on
exactly as if it had never stopped.

Shapes: B batch_size, L seq_len, k block size.
"""
import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from data.bin import Dataset, batch, num_ntp_targets, pack, targets
from eval import sweep, table
from kernels.sbd_attention import BACKENDS, check_backend
from hf import PRESETS, find_folder, free_memory, write_whole
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
FIXED = ("recipe", "init_from", "dataset", "objective", "mask_id", "seed", "seq_len", "batch_size", "grad_accum",
         "block_size_min", "block_size_max", "full_mask_prob")
CELLS = [dict(mode="sbd", block_size=k, gamma=0.1) for k in (8, 16)] + [dict(mode="verified", block_size=k, hedges=2) for k in (16, 24, 32)]


def place(name):
    """A folder by its absolute path, so that a run can be resumed from anywhere; any other name as it is."""
    return str(Path(name).resolve()) if Path(name).is_dir() else name


def parse(argv=None):
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0])
    a = p.add_argument
    a("--init_from", type=place, default=str(HERE / "checkpoints/tiny-ntp"),
      help=f"folder, hub id owner/name, or preset: {', '.join(PRESETS)} (one without weights starts at random)")
    a("--dataset", type=place, default="word_problems", help="a folder of .bin files, or NAME for data/NAME")
    a("--out_dir", type=Path, default="out", help="checkpoints, log.csv and the finished model")
    a("--resume", action="store_true", help="go on from the newest checkpoint of out_dir, with its options unless given again")
    a("--overwrite", action="store_true", help="start afresh in an out_dir that holds another run")
    a("--recipe", choices=RECIPES, help="the paper's hyperparameters as defaults")
    a("--objective", choices=("sbd", "ntp"), default="sbd", help="Eq. 14, or next-token prediction alone")
    a("--ntp_weight", type=float, default=1.0, help="weight of the NTP term; 0 is the paper's ablation")
    a("--matp_weight", type=float, default=1.0, help="weight of the MATP term")
    a("--block_size_min", type=int, default=2, help="k ~ U{min, ..., max}, one a step")
    a("--block_size_max", type=int, default=16, help="the longest block, and one more than the stop copies behind a document")
    a("--full_mask_prob", type=float, default=0.0, help="share of rows that are all masks (draft-aware noise); the paper's is 0")
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
    a("--log_interval", type=int, default=10, help="steps a line; losses are their mean")
    a("--eval_interval", type=int, default=100, help="steps between checkpoints, each after the validation losses")
    a("--eval_rows", type=int, default=32, help="validation rows; 0: none")
    a("--sample_problems", type=int, default=100, help="held-out word problems decoded at the end; 0: none")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=("float32", "bfloat16"), help="of the forward (autocast); default bfloat16 on cuda, else float32")
    a("--attention", choices=BACKENDS, default="auto", help="kernels/sbd_attention.py's backend; auto: triton on CUDA, else sdpa")
    a("--compile", action="store_true", help="torch.compile the layers")
    a("--grad_checkpoint", action="store_true", help="recompute each layer in backward: less memory, a third more time")
    a("--seed", type=int, default=0, help="of initialisation, data order and noise")
    first = p.parse_args(argv)
    if not first.resume:
        p.set_defaults(**RECIPES.get(first.recipe, {}))
        return p.parse_args(argv)
    if first.overwrite:
        raise ValueError("--resume --overwrite: give one of them")
    if (folder := newest(first.out_dir)) is None:
        raise ValueError(f"--resume: {first.out_dir} holds no checkpoint: leave --resume away to start a run there")
    saved = torch.load(folder / "train_state.pt", weights_only=True, mmap=True)   # mapped: the states are not read yet
    p.set_defaults(**{name: value for name, value in saved["args"].items() if name not in ("out_dir", "resume", "overwrite")})
    args = p.parse_args(argv)
    for name in FIXED:
        if (now := getattr(args, name)) != (was := saved["args"][name]):
            raise ValueError(f"--{name} {now}: the run in {args.out_dir} has {was}; leave it away, or start another run in another --out_dir")
    if args.max_steps < saved["step"]:
        raise ValueError(f"--max_steps {args.max_steps}: the run in {args.out_dir} is at step {saved['step']} already")
    return args


def newest(out_dir: Path):
    """The newest whole checkpoint folder of a run, or None."""
    return max(out_dir.glob(CHECKPOINTS), default=None)


def check(args):
    """Refuse everything that can be refused, before weights are loaded or files touched.

    Returns the training set, the validation set or None, what to load the weights from or None (random ones), the
    model's config and its tokenizer.
    """
    for names, good, wanted in (
            ("batch_size grad_accum max_steps log_interval eval_interval block_size_min", lambda x: x >= 1, "1 or more"),
            ("warmup_steps eval_rows seed", lambda x: x >= 0, "0 or more"),
            ("lr", lambda x: 0 < x < math.inf, "a number above 0"),
            ("min_lr weight_decay grad_clip ntp_weight matp_weight", lambda x: 0 <= x < math.inf, "a number from 0 up"),
            ("beta1 beta2", lambda x: 0 <= x < 1, "from 0 to below 1"),
            ("full_mask_prob", lambda x: 0 <= x <= 1, "0 to 1"),
            ("sample_problems", lambda x: 0 <= x <= 2000, "0 to 2000")):
        for name in names.split():
            if not good(getattr(args, name)):
                raise ValueError(f"--{name} {getattr(args, name)}: wanted {wanted}")
    if args.block_size_min > args.block_size_max:
        raise ValueError(f"--block_size_min {args.block_size_min} is more than --block_size_max {args.block_size_max}")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {args.device} is not there: try --device=cpu") from None
    if args.objective == "sbd":
        check_backend(args.attention, args.device, training=True)
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if args.out_dir.exists() and not args.out_dir.is_dir():
        raise ValueError(f"--out_dir {args.out_dir} is a file: give a folder")
    if not args.resume and not args.overwrite and (newest(args.out_dir) or (args.out_dir / "config.json").exists()):
        raise ValueError(f"{args.out_dir} holds another run: give --resume, --overwrite or another --out_dir")

    at_random = args.init_from in PRESETS and PRESETS[args.init_from][1] is None   # a shape without published weights
    source = newest(args.out_dir) if args.resume else None if at_random else args.init_from
    folder = source and find_folder(source, weights=False)
    if args.overwrite and source and folder.resolve().is_relative_to(args.out_dir.resolve()):
        raise ValueError(f"--overwrite would remove what --init_from {args.init_from} names: give another --out_dir")
    config = LlamaConfig.from_pretrained(source or args.init_from)
    if args.mask_id is not None:
        config = replace(config, mask_id=args.mask_id)
    if config.mask_id is None and args.objective == "sbd":
        raise ValueError(f"{args.init_from} names no mask token: give --mask_id, an id of its vocabulary that text never uses")
    if not 2 <= args.seq_len <= config.max_position_embeddings:
        raise ValueError(f"--seq_len {args.seq_len}: wanted 2 to {config.max_position_embeddings}, the model's context")
    with torch.device("meta"):
        parameters = sum(w.numel() for w in Llama(config).parameters())
    need, free = 16 * parameters, free_memory(args.device)   # bytes: weights, gradients and AdamW's two states, float32
    if need > free:
        raise ValueError(f"training {args.init_from} needs {need / 2**30:.1f} GiB for weights, gradients and AdamW's states, "
                         f"{args.device} has {free / 2**30:.1f} GiB free: use a smaller model or another device")

    dataset = HERE / "data" / args.dataset   # of an absolute path: that path
    if dataset == WORD_PROBLEMS and not (dataset / "meta.json").exists():   # the default data set makes itself
        print("preparing the word problems, under a minute", flush=True)
        if subprocess.run([sys.executable, dataset / "prepare.py"]).returncode:
            raise ValueError(f"{dataset}/prepare.py failed")
    data = Dataset(dataset, "train")
    val = Dataset(dataset, "val") if "val" in data.meta["splits"] else None
    tokenizer = Tokenizer.from_pretrained(folder or data.meta["tokenizer"])
    if tokenizer.hash != data.meta["tokenizer_hash"] or data.vocab_size > config.vocab_size:
        raise ValueError(f"{dataset} was tokenized with another vocabulary, that of {data.meta['tokenizer']}: "
                         f"prepare your data with --tokenizer={args.init_from}")
    return data, val, source, config, tokenizer


def load(args, source, config, tokenizer) -> Llama:
    """The model, with float32 weights."""
    if source:
        model = Llama.from_pretrained(source, args.device, torch.float32, config.mask_id)
        for weight in model.parameters():   # mapped from the file: as aligned in memory as weights that never stopped,
            weight.data = weight.data.clone()   # or matrix products could round differently
    else:
        torch.manual_seed(args.seed)
        model = Llama(config).to(args.device)
        model.folder = tokenizer.folder
    model.grad_checkpoint = args.grad_checkpoint
    return (compile_layers(model) if args.compile else model).train()


def draw(args, step, num_rows):
    """A step's block size k ~ U{min, ..., max}, masking probabilities eta (num_rows, 1) ~ U(0, 1) (Eq. 13), and
    the generator of the masks: functions of (seed, step)."""
    seed = (args.seed * 1_000_003 + step) % 2**32   # 32 bits: the CPU's generator ignores any more
    generator = torch.Generator().manual_seed(seed)
    k = int(torch.randint(args.block_size_min, args.block_size_max + 1, (1,), generator=generator))
    if args.device != "cpu":   # k was drawn on the host, and nobody waits for the device
        generator = torch.Generator(args.device).manual_seed(seed)
    eta = torch.rand(num_rows, 1, generator=generator, device=args.device)
    if args.full_mask_prob:   # draft-aware noise (method section 10): some rows show nothing of their blocks
        eta[torch.rand(num_rows, 1, generator=generator, device=args.device) < args.full_mask_prob] = 1.0
    return k, eta, generator


def losses(model, args, b, k, eta, generator, num_targets=None):
    """One forward's loss; autocast keeps float32 weights and runs the matrix products in --dtype."""
    b = b.to(args.device)
    loss_mask, ntp_mask = targets(b, k)   # (B, L)
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        if args.objective == "ntp":
            return ntp_loss(model, b.tokens, ntp_mask, b.doc_ids, num_targets)
        return sbd_loss(model, b.tokens, k, loss_mask, ntp_mask, b.doc_ids, num_targets,
                        args.ntp_weight, args.matp_weight, eta, generator, args.attention)


@torch.no_grad()
def validate(model, args, rows):
    """Mean NTP and MATP losses over the first --eval_rows rows, nats, always with the same noise."""
    model.eval()
    found = []
    for i in range(0, min(args.eval_rows, len(rows)), args.batch_size):
        b = batch(rows, range(i, min(i + args.batch_size, args.eval_rows, len(rows))))
        result = losses(model, args, b, *draw(args, i, len(b.tokens)))
        found.append(torch.stack((result.ntp, result.matp)))
    model.train()
    return torch.stack(found).mean(0).tolist()


def learning_rate(args, step):
    """Linear warmup, then a cosine from lr to min_lr."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


def make_optimizer(model, args):
    """AdamW; weight decay pulls on matrices only, not on the gains of the norms."""
    groups = [dict(params=[w for w in model.parameters() if w.dim() == 2], weight_decay=args.weight_decay),
              dict(params=[w for w in model.parameters() if w.dim() != 2], weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.beta1, args.beta2), fused=True)


def save(model, optimizer, args, step, **more):
    """Write a checkpoint aside, rename it into place, and only then remove the ones before it."""
    final, aside = args.out_dir / f"step-{step:08d}", args.out_dir / f"tmp-{step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    state = dict(optimizer=optimizer.state_dict(), step=step, **more,
                 args={name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()})
    write_whole(aside / "train_state.pt", lambda path: torch.save(state, path))
    flush_folder(aside)
    os.replace(aside, final)
    flush_folder(args.out_dir)
    model.folder = final   # the next checkpoint takes its tokenizer files from here, not from one that is gone by then
    for old in args.out_dir.glob(CHECKPOINTS):
        if old != final:
            shutil.rmtree(old)


def flush_folder(folder):
    """Renames inside a folder reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def on_signals(handler):
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def exit_at_once(number, frame):
    sys.exit(128 + number)   # 130 for Ctrl-C, 143 for SIGTERM


def train(argv=None):
    on_signals(exit_at_once)
    args = parse(argv)
    data, val, source, config, tokenizer = check(args)
    model = load(args, source, config, tokenizer)
    copies = args.block_size_max - 1 if args.objective == "sbd" else 0   # stop copies behind a document (method section 3)
    rows = pack(data, args.seq_len, copies, args.seed)
    val_rows = pack(val, args.seq_len, copies, args.seed) if val and args.eval_rows else None
    optimizer = make_optimizer(model, args)
    start, log_path = 0, args.out_dir / "log.csv"
    sums = torch.zeros(2, device=args.device)   # of the ntp and matp losses since the last line; read only at the next
    num_summed = 0                              # steps in them
    lines = ["step,ntp_loss,matp_loss,val_ntp_loss,val_matp_loss,lr,tokens_per_s\n"]
    args.out_dir.mkdir(parents=True, exist_ok=True)
    for old in [*args.out_dir.glob("tmp-*"), *(args.out_dir.glob(CHECKPOINTS) if args.overwrite else ())]:
        shutil.rmtree(old)   # what a kill left, and what the user gave up
    if args.overwrite:
        (args.out_dir / "config.json").unlink(missing_ok=True)
    if args.resume:
        state = torch.load(newest(args.out_dir) / "train_state.pt", map_location=args.device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"] | dict(param_groups=optimizer.state_dict()["param_groups"]))
        start, sums, num_summed = state["step"], state["sums"], state["num_summed"]
        if log_path.exists():   # a kill may have left lines behind the checkpoint, the last one torn
            written = log_path.read_text().splitlines(keepends=True)[1:]
            lines += [line for line in written if line.endswith("\n") and int(line.split(",")[0]) <= start]
    write_whole(log_path, lambda path: path.write_text("".join(lines)))
    print(f"{args.objective} on {args.dataset}: {sum(w.numel() for w in model.parameters()) / 1e6:.2f}M parameters, steps "
          f"{start} to {args.max_steps} of {args.batch_size * args.grad_accum} x {args.seq_len} tokens, {args.device} "
          f"{args.dtype}, into {args.out_dir}", flush=True)

    stop = []   # the first Ctrl-C or SIGTERM ends the run after the step at hand, a second one at once
    on_signals(lambda number, frame: exit_at_once(number, frame) if stop else stop.append(number))
    B, per_step = args.batch_size, args.batch_size * args.grad_accum   # rows
    first_bad = torch.full((), math.inf, device=args.device)   # the first step that was not finite
    began = line_time = time.time()
    line_step = start
    for step in range(start, args.max_steps):
        k, eta, generator = draw(args, step, per_step)
        lr = learning_rate(args, step)
        for group in optimizer.param_groups:
            group["lr"] = lr
        batches = [batch(rows, range(i, i + B)) for i in range(step * per_step, (step + 1) * per_step, B)]
        num_targets = sum(map(num_ntp_targets, batches))   # one constant for the whole step: Eq. 14 of the large batch
        for i, b in enumerate(batches):
            result = losses(model, args, b, k, eta[i * B:(i + 1) * B], generator, num_targets)
            result.loss.backward()
            sums += torch.stack((result.ntp, result.matp)) / args.grad_accum
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done, num_summed = step + 1, num_summed + 1
        first_bad = torch.where(torch.isfinite(norm + sums.sum()), first_bad, first_bad.clamp(max=done))

        save_now = done % args.eval_interval == 0 or done == args.max_steps
        line_now = done % args.log_interval == 0 or save_now
        if not (line_now or stop):
            continue   # from here on the host waits for the device
        checked = validate(model, args, val_rows) if save_now and val_rows else []
        bad = min(first_bad.item(), math.inf if all(map(math.isfinite, checked)) else done)
        if bad < math.inf:
            good = newest(args.out_dir)
            advice = f"{good} is the last good checkpoint: --resume" if good else "there is no checkpoint yet: start again"
            sys.exit(f"train.py: the loss or its gradient is not finite at step {bad:.0f}; {advice} with a lower --lr")
        if line_now:
            ntp, matp = (sums / num_summed).tolist()   # nats
            rate = (done - line_step) * per_step * args.seq_len / (time.time() - line_time)   # tokens a second
            left = (args.max_steps - done) * (time.time() - began) / (done - start) / 60      # minutes
            print(f"step {done:5d}  ntp {ntp:.4f}  matp {matp:.4f}  lr {lr:.2e}  {rate:,.0f} tokens/s  {left:.1f} min left"
                  + (f"  validation ntp {checked[0]:.4f} matp {checked[1]:.4f}" if checked else ""), flush=True)
            with log_path.open("a") as file:
                file.write(",".join([str(done), *(f"{x:.9g}" if x != "" else x for x in (ntp, matp, *(checked or ("", "")))),
                                     f"{lr:.6g}", f"{rate:.0f}"]) + "\n")
            sums.zero_()
            num_summed, line_step, line_time = 0, done, time.time()
        if save_now:
            save(model, optimizer, args, done, sums=sums, num_summed=num_summed)
        if stop:
            if not save_now:
                save(model, optimizer, args, done, sums=sums, num_summed=num_summed)
            print(f"stopped at step {done}; go on with: python train.py --resume --out_dir={args.out_dir}")
            exit_at_once(stop[0], None)
    on_signals(exit_at_once)
    finish(model, args, tokenizer)


def finish(model, args, tokenizer):
    """The finished model as a folder of its own in out_dir, bfloat16; on word problems, how well it decodes."""
    model.to(torch.bfloat16).save_pretrained(args.out_dir)
    flush_folder(args.out_dir)
    print(f"finished: python generate.py --init_from={args.out_dir} --prompt=...", flush=True)
    if args.sample_problems and HERE / "data" / args.dataset == WORD_PROBLEMS:
        from data.word_problems.prepare import problems
        model = Llama.from_pretrained(args.out_dir, args.device, torch.float32)   # what was saved, and not compiled
        longest = max(16, args.block_size_max) if args.objective == "sbd" else 0
        cells = [dict(mode="ntp")] + [cell for cell in CELLS if cell["block_size"] <= longest]
        print(table(sweep(model, tokenizer, problems("val", args.sample_problems), cells)))


def main(argv=None):
    try:
        train(argv)
    except (ValueError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
