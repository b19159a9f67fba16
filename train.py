"""Algorithm 1: fine-tune a next-token model with the Set Block Decoding loss, or train that model first.

    python train.py                                            the shipped tiny model, minutes on a CPU
    python train.py --init_from=llama3.1-8b --dataset=DIR      the same loop on real weights

Weights and AdamW's states are float32 whatever the forward runs in: bfloat16 weights would round updates
at lr 1e-5 away. Everything random in a step follows from (seed, step), so a run that is resumed goes on
exactly as if it had never stopped.
"""
import argparse
import contextlib
import csv
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from data.bin import Dataset, batch, num_ntp_targets, pack, targets
from model import PRESETS, Llama, LlamaConfig, compile_layers, find_folder, preset_mask_id, read_config, write_whole
from sbd_loss import ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).parent
RECIPES = {   # section 7.1 of the paper: 2M tokens a step, 34k steps
    "paper-8b": dict(lr=3e-4, warmup_steps=200, max_steps=34_000, seq_len=32_768, batch_size=1, grad_accum=64,
                     dtype="bfloat16", grad_checkpoint=True),
}


def parse(argv=None):
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0])
    a = p.add_argument
    a("--init_from", default=str(HERE / "checkpoints/tiny-ntp"), help=f"folder, hub id owner/name, or preset: {', '.join(PRESETS)} (one without weights starts at random)")
    a("--dataset", default="word_problems", help="a folder of .bin files, or NAME for data/NAME")
    a("--out_dir", type=Path, default=Path("out"), help="checkpoints, log.csv and the finished model")
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
    a("--max_steps", type=int, default=400, help="optimizer steps")
    a("--lr", type=float, default=1e-3, help="peak learning rate")
    a("--min_lr", type=float, default=0.0, help="learning rate at the end of the cosine")
    a("--warmup_steps", type=int, default=20, help="steps of linear warmup")
    a("--weight_decay", type=float, default=0.1, help="AdamW's, on matrices only")
    a("--beta1", type=float, default=0.9, help="AdamW's")
    a("--beta2", type=float, default=0.95, help="AdamW's")
    a("--grad_clip", type=float, default=1.0, help="largest gradient norm; 0: no clipping")
    a("--log_interval", type=int, default=10, help="steps a line")
    a("--eval_interval", type=int, default=200, help="steps between validation losses and checkpoints")
    a("--eval_rows", type=int, default=32, help="validation rows; 0: none")
    a("--sample_problems", type=int, default=100, help="held-out word problems decoded at the end; 0: none")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=("float32", "bfloat16"), help="of the forward (autocast); default bfloat16 on cuda, else float32")
    a("--attention", choices=("auto", "sdpa"), default="auto", help="kernels/sbd_attention.py's backend")
    a("--compile", action="store_true", help="torch.compile the layers")
    a("--grad_checkpoint", action="store_true", help="recompute each layer in backward: less memory, a third more time")
    a("--seed", type=int, default=0, help="of initialisation, data order and noise")
    first = p.parse_args(argv)
    if first.recipe:
        p.set_defaults(**RECIPES[first.recipe])
    if first.resume:
        state = newest(first.out_dir)
        if state is None:
            raise ValueError(f"--resume: {first.out_dir} holds no checkpoint: leave --resume away to start a run there")
        saved = torch.load(state / "train_state.pt", weights_only=True)["args"]
        p.set_defaults(**{k: v for k, v in saved.items() if k not in ("out_dir", "resume", "overwrite")})
    return p.parse_args(argv)


def newest(out_dir: Path):
    """The newest whole checkpoint folder of a run, or None."""
    return max(out_dir.glob("step-" + "[0-9]" * 8), default=None)


def check(args):
    """Everything that can be refused is refused here, before weights are loaded or files touched."""
    positive = ("batch_size", "grad_accum", "max_steps", "log_interval", "eval_interval", "lr")
    for name in positive:
        if not getattr(args, name) > 0:
            raise ValueError(f"--{name} {getattr(args, name)}: wanted more than 0")
    if not 1 <= args.block_size_min <= args.block_size_max:
        raise ValueError(f"--block_size_min {args.block_size_min} --block_size_max {args.block_size_max}: wanted 1 <= min <= max")
    if not 0 <= args.full_mask_prob <= 1:
        raise ValueError(f"--full_mask_prob {args.full_mask_prob}: wanted 0 to 1")
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError):
        raise ValueError(f"--device {args.device} is not there: try cpu") from None
    args.dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    if not args.resume and not args.overwrite and (newest(args.out_dir) or (args.out_dir / "config.json").exists()):
        raise ValueError(f"{args.out_dir} holds another run: give --resume, --overwrite or another --out_dir")
    folder = Path(args.dataset) if Path(args.dataset).is_dir() else HERE / "data" / args.dataset
    if folder == HERE / "data/word_problems" and not (folder / "meta.json").exists():   # the default set makes itself
        subprocess.run([sys.executable, folder / "prepare.py"], check=True)
    train, val = Dataset(folder, "train"), Dataset(folder, "val")
    scratch = args.init_from in PRESETS and PRESETS[args.init_from][1] is None
    source = newest(args.out_dir) if args.resume else None if scratch else find_folder(args.init_from)
    if source is None:
        config, source_tokenizer = LlamaConfig.from_pretrained(args.init_from), train.meta["tokenizer"]
    else:
        config, source_tokenizer = read_config(source, mask_id=preset_mask_id(args.init_from)), source
    tokenizer = Tokenizer.from_pretrained(source_tokenizer)
    if tokenizer.hash != train.meta["tokenizer_hash"] or train.vocab_size > config.vocab_size:
        raise ValueError(f"{folder} was tokenized with another vocabulary ({train.meta['tokenizer']}) than {args.init_from}'s: "
                         f"prepare it with --tokenizer={args.init_from}")
    if args.seq_len > config.max_position_embeddings or args.seq_len < 2:
        raise ValueError(f"--seq_len {args.seq_len}: wanted 2 to {config.max_position_embeddings}, the model's context")
    if args.mask_id is None and config.mask_id is None and args.objective == "sbd":
        raise ValueError(f"{args.init_from} names no mask token: give --mask_id, an id of its vocabulary that text never uses")
    return train, val, source, tokenizer


def load(args, source, tokenizer) -> Llama:
    """The model with float32 weights."""
    if source is None:
        torch.manual_seed(args.seed)
        model = Llama(LlamaConfig.from_pretrained(args.init_from)).to(args.device)
        model.folder = tokenizer.folder
        if args.mask_id is not None:
            model.config.mask_id = args.mask_id
    else:
        model = Llama.from_pretrained(source, args.device, torch.float32, args.mask_id if args.mask_id is not None else preset_mask_id(args.init_from))
    model.grad_checkpoint = args.grad_checkpoint
    if args.compile:
        compile_layers(model)
    return model.train()


def losses(model, args, rows, indices, block_size, generator, num_targets=None):
    """One forward's loss; autocast keeps float32 weights and runs the matrix products in --dtype."""
    b = batch(rows, indices).to(args.device)
    loss_mask, ntp_mask = targets(b, block_size)
    with torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.dtype == "bfloat16"):
        if args.objective == "ntp":
            return ntp_loss(model, b.tokens, ntp_mask, b.doc_ids, num_targets)
        eta = torch.rand(len(indices), 1, generator=generator, device=args.device)
        if args.full_mask_prob:   # draft-aware noise: some rows show nothing of their blocks
            eta[torch.rand(len(indices), 1, generator=generator, device=args.device) < args.full_mask_prob] = 1.0
        return sbd_loss(model, b.tokens, block_size, loss_mask, ntp_mask, b.doc_ids, num_targets,
                        args.ntp_weight, args.matp_weight, eta, generator, args.attention)


def step_generator(args, step):
    """A generator that depends on (seed, step) only, and the step's block size k ~ U{min, ..., max}."""
    generator = torch.Generator(args.device).manual_seed((args.seed << 32) + step)
    k = torch.randint(args.block_size_min, args.block_size_max + 1, (1,), generator=generator, device=args.device)
    return generator, int(k)


@torch.no_grad()
def validate(model, args, rows):
    """Mean NTP and MATP losses over the first --eval_rows rows, always with the same noise."""
    model.eval()
    sums, n = [0.0, 0.0], 0
    for i in range(0, min(args.eval_rows, len(rows)), args.batch_size):
        generator, k = step_generator(args, i)
        result = losses(model, args, rows, range(i, min(i + args.batch_size, len(rows))), k, generator)
        sums, n = [sums[0] + float(result.ntp), sums[1] + float(result.matp)], n + 1
    model.train()
    return [s / n for s in sums]


def learning_rate(args, step):
    """Linear warmup, then a cosine from lr to min_lr."""
    if step < args.warmup_steps:
        return args.lr * (step + 1) / args.warmup_steps
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    return args.min_lr + 0.5 * (args.lr - args.min_lr) * (1 + math.cos(math.pi * min(done, 1.0)))


def save(model, optimizer, args, step):
    """Write a checkpoint aside, rename it into place, and only then remove the ones before it."""
    final = args.out_dir / f"step-{step:08d}"
    if final.exists():
        return
    aside = args.out_dir / f"tmp-{step:08d}"
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    state = dict(optimizer=optimizer.state_dict(), step=step, args={k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()})
    write_whole(aside / "train_state.pt", lambda path: torch.save(state, path))
    os.replace(aside, final)
    for old in args.out_dir.glob("step-*"):
        if old != final:
            shutil.rmtree(old)


def main():
    args = parse()
    train, val, source, tokenizer = check(args)
    model = load(args, source, tokenizer)
    copies = args.block_size_max - 1 if args.objective == "sbd" else 0
    rows, val_rows = pack(train, args.seq_len, copies, args.seed), pack(val, args.seq_len, copies, args.seed)
    matrices = [w for w in model.parameters() if w.dim() == 2]
    others = [w for w in model.parameters() if w.dim() != 2]
    optimizer = torch.optim.AdamW([dict(params=matrices, weight_decay=args.weight_decay), dict(params=others, weight_decay=0.0)],
                                  lr=args.lr, betas=(args.beta1, args.beta2), fused=True)
    start = 0
    log_path = args.out_dir / "log.csv"
    args.out_dir.mkdir(parents=True, exist_ok=True)
    lines = []
    if args.resume:
        state = torch.load(source / "train_state.pt", map_location=args.device, weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        if log_path.exists():   # a kill may have left lines behind the checkpoint
            lines = [line for line in csv.reader(log_path.open()) if line[0] == "step" or int(line[0]) <= start]
    elif args.overwrite:
        for old in [*args.out_dir.glob("step-*"), *args.out_dir.glob("tmp-*")]:
            shutil.rmtree(old)
        (args.out_dir / "config.json").unlink(missing_ok=True)
    log_file = log_path.open("w", newline="")
    log = csv.writer(log_file)
    log.writerows(lines or [("step", "ntp_loss", "matp_loss", "val_ntp_loss", "val_matp_loss", "lr", "tokens_per_s")])
    parameters = sum(w.numel() for w in model.parameters())
    print(f"{args.objective} on {args.dataset}, {parameters / 1e6:.2f}M parameters, steps {start} to {args.max_steps} of "
          f"{args.batch_size * args.grad_accum} x {args.seq_len} tokens, {args.device} {args.dtype}, into {args.out_dir}")

    stop_signal = []   # Ctrl-C and SIGTERM end the run after the step at hand
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stop_signal.append(number))

    per_step = args.batch_size * args.grad_accum
    since, since_step, began = time.time(), start, time.time()
    for step in range(start, args.max_steps):
        generator, k = step_generator(args, step)
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(args, step)
        micro = [range(step * per_step + i * args.batch_size, step * per_step + (i + 1) * args.batch_size) for i in range(args.grad_accum)]
        num_targets = sum(num_ntp_targets(batch(rows, m)) for m in micro)
        sums = [0.0, 0.0]
        for m in micro:
            result = losses(model, args, rows, m, k, generator, num_targets)
            result.loss.backward()
            sums = [sums[0] + float(result.ntp) / args.grad_accum, sums[1] + float(result.matp) / args.grad_accum]
        if not math.isfinite(sum(sums)):
            raise ValueError(f"the loss is not finite at step {step}: the last good checkpoint is {newest(args.out_dir)}; "
                             "resume from it with a lower --lr")
        if args.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        last = done == args.max_steps or bool(stop_signal)
        evaluate = args.eval_rows and (done % args.eval_interval == 0 or done == args.max_steps)
        if done % args.log_interval == 0 or last:
            rate = (done - since_step) * per_step * args.seq_len / (time.time() - since)
            left = (args.max_steps - done) * (time.time() - began) / (done - start)
            checked = validate(model, args, val_rows) if evaluate else []
            print(f"step {done:5d}  ntp {sums[0]:.4f}  matp {sums[1]:.4f}  lr {learning_rate(args, step):.2e}  {rate:,.0f} tokens/s  "
                  f"{left / 60:.1f} min left" + (f"  validation ntp {checked[0]:.4f} matp {checked[1]:.4f}" if checked else ""), flush=True)
            log.writerow((done, f"{sums[0]:.6f}", f"{sums[1]:.6f}", *([f"{c:.6f}" for c in checked] or ["", ""]), f"{learning_rate(args, step):.6g}", f"{rate:.0f}"))
            log_file.flush()
            since, since_step = time.time(), done
        if done % args.eval_interval == 0 or last:
            save(model, optimizer, args, done)
        if stop_signal and done < args.max_steps:
            print(f"stopped at step {done}; go on with: python train.py --resume --out_dir={args.out_dir}")
            sys.exit(128 + stop_signal[0])
    finish(model, args)


def finish(model, args):
    """The finished model as a folder of its own in out_dir: bfloat16 weights, no optimizer state."""
    model.to(torch.bfloat16).save_pretrained(args.out_dir)
    print(f"finished: python generate.py --init_from={args.out_dir}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"train.py: {error}", file=sys.stderr)
        sys.exit(2)
