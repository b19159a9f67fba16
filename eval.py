"""Accuracy against forwards (Fig. 1, 5, 12, 13, Tables 1, 2): decoding modes compared on the same problems.

    python eval.py                      the shipped models on 500 held-out word problems, with error bars
    python eval.py --dataset=NAME       likelihoods: NTP loss, MATP loss by masking and block size

A cell is the options of one generate() call: mode, block_size, gamma, sampler, hedges ... NFE speedup is
tokens / forwards over all problems together. lm-eval's benchmarks are in harness.py.
"""
from cli import (add_model, add_options, check_plot, load_model, need, need_between, need_mask, parser, run)

import argparse
import csv
import hashlib
import io
import json
import math
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch

from data.bin import Batch, Dataset, batch, pack, targets
from data.word_problems.prepare import grade, problems
from generate import USED_BY, Options, decode, generate
from hf import write_whole
from model import Llama
from sbd_loss import adapter_loss, ntp_loss, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
GAMMAS = (0, 0.01, 0.1, 0.2, 0.35, 0.4, 0.6, 0.8, 1.5)                 # nats
NTP = dict(mode="ntp")
VERIFIED = [dict(mode="verified", block_size=16, hedges=h) for h in (1, 2, 4)]
CELLS = [NTP, *VERIFIED, *(dict(mode="sbd", block_size=k, gamma=g) for k in (8, 16) for g in GAMMAS)]
SBD_16 = dict(mode="sbd", block_size=16)
FULL = [*CELLS, *(SBD_16 | dict(sampler="eb-confidence", gamma=g) for g in (0.01, 0.1, 0.35, 0.8)),
        *(SBD_16 | dict(sampler="factor", factor=f) for f in (0.1, 0.5, 1.0, 2.0)),
        *(SBD_16 | dict(sampler="threshold", threshold=t) for t in (0.5, 0.7, 0.9, 0.99))]
BLOCKS, SHARES = (2, 4, 8, 16, 32), (0.1, 0.25, 0.5, 0.75, 1.0)        # of the MATP table: k, shares masked
ENDS = ("", "_low", "_high")                         # of the keys of a value and its interval
CELL = ("mode", *USED_BY)                            # the fields of Options that make a cell


# ------------------------------------------------------------------------------ accuracy against forwards

def sweep(model, tokenizer, problems, cells, batch_size=64, max_new_tokens=256, progress=lambda done: None):
    """Decode every problem once a cell -> one dict a cell. By problem: outputs (token ids), nfes, right; and
    what they sum to. window: mean tokens of a forward, of verified decoding only."""
    prompts = encode(tokenizer, problems)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))   # a batch's rows end together
    results = []
    for cell in cells:
        rows, widths, o = [None] * len(prompts), [], Options(**cell)
        for begin in range(0, len(order), batch_size):
            progress(begin)
            part = order[begin:begin + batch_size]
            for steps in decode(model, [prompts[i] for i in part], max_new_tokens=max_new_tokens, **cell):
                for step in steps:
                    rows[part[step.row.index]] = step.row
                    forward = step.accepted or not step.row.done       # else its last token was known already
                    if o.mode == "verified" and forward:               # a block for each likely outcome
                        drafted, blocks = len(step.drafted), min(o.hedges, len(step.drafted) + 1)
                        widths.append(1 + drafted + (o.block_size * blocks if o.block_size > 1 else 0))
        outputs, nfes = [row.tokens for row in rows], [row.nfe for row in rows]
        right = [grade(problem, tokenizer.decode(tokens)) for problem, tokens in zip(problems, outputs)]
        tokens, nfe = sum(map(len, outputs)), sum(nfes)
        results.append(dict(cell=cell, accuracy=sum(right) / len(right), tokens=tokens, nfe=nfe,
                            speedup=tokens / nfe, window=sum(widths) / len(widths) if widths else None,
                            outputs=outputs, nfes=nfes, right=right))
    return results


def encode(tokenizer, problems):
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    return [bos + tokenizer.encode(p.prompt) for p in problems]


def clock(models, results, tasks, max_new_tokens):
    """Adds to each result its tokens a second at batch 1; task by task all of them in turn, so that whatever
    else slows the machine slows them all."""
    prompts = {name: encode(tokenizer, tasks) for name, (_, tokenizer) in models.items()}
    spent = np.zeros((len(results), 2))                                # tokens and seconds of each
    for turn in range(-1, len(tasks)):    # the first one warms up and is not counted
        bar((turn + 1) / (len(tasks) + 1), f"wall clock, problem {turn + 1} of {len(tasks)}", turn <= 0)
        for i, r in enumerate(results):
            began, prompt = time.perf_counter(), prompts[r["model"]][max(turn, 0)]
            row, = generate(models[r["model"]][0], [prompt], max_new_tokens=max_new_tokens, **r["cell"])
            spent[i] += (len(row.tokens), time.perf_counter() - began) if turn >= 0 else 0
    for r, (tokens, seconds) in zip(results, spent.tolist()):
        r.update(rate=tokens / seconds, timed=len(tasks))


# --------------------------------------------------------------------------------------------- statistics

def wilson(right, n, z=1.959963984540054):
    """Wilson's 95% interval of a share, right of n."""
    p, z2 = right / n, z * z / n
    middle, half = (p + z2 / 2) / (1 + z2), math.sqrt(z2 * p * (1 - p) + z2 * z2 / 4) / (1 + z2)
    return max(0.0, middle - half), min(1.0, middle + half)


def bootstrap(a, b, seed=0, draws=2000):
    """95% percentile interval of sum(a) / sum(b) when the problems, n pairs of a and b, are drawn again."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    index = np.random.default_rng(seed).integers(len(a), size=(draws, len(a)))
    return tuple(np.percentile(a[index].sum(1) / b[index].sum(1), (2.5, 97.5)).tolist())


def mcnemar(only_first, only_second):
    """McNemar's exact two-sided p-value: of the problems that one of two got right, each is a fair coin."""
    n = only_first + only_second
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(min(only_first, only_second) + 1)) / 2 ** n)


def label(cell, bound=True):
    """A cell in words, "eb k=16 gamma=0.1"; without its bound: what is one line of the plot."""
    o = Options(**cell)
    words = [o.sampler if o.mode == "sbd" else o.mode] + [f"k={o.block_size}"] * (o.mode != "ntp")
    short = dict(hedges="h", gamma="gamma", factor="factor", threshold="threshold")
    return " ".join(words + [f"{short[key]}={cell[key]}" for key in short if bound and key in cell])


def summary(results, seed=0):
    """The statistics of every result, a flat dict each; NTP is the one of the same model."""
    ntp = {r.get("model"): r for r in results if r["cell"]["mode"] == "ntp"}
    several, rows = len({r.get("model") for r in results}) > 1, []
    for r in results:
        n, base, lengths = len(r["right"]), ntp.get(r.get("model")), [len(t) for t in r["outputs"]]
        row = dict(decoding=(f"{r['model']}: " if several else "") + label(r["cell"]), problems=n)
        for key, value, interval in (("accuracy", r["accuracy"], wilson(sum(r["right"]), n)),
                                     ("mean_nfe", r["nfe"] / n, bootstrap(r["nfes"], [1] * n, seed)),
                                     ("speedup", r["speedup"], bootstrap(lengths, r["nfes"], seed))):
            row[key], (row[f"{key}_low"], row[f"{key}_high"]) = value, interval
        if base is not None:
            pairs = list(zip(r["right"], base["right"]))
            row["as_ntp"] = sum(map(list.__eq__, r["outputs"], base["outputs"])) / n
            row["p"] = mcnemar(pairs.count((True, False)), pairs.count((False, True)))
            row["wall_clock"] = r["rate"] / base["rate"] if "rate" in r and "rate" in base else None
        rows.append(row | dict(window=r["window"]))
    return rows


def table(results, seed=0) -> str:
    """The results as Markdown. [ ] are 95% intervals: Wilson's for accuracy, else a bootstrap over problems;
    p is McNemar's, of the difference in accuracy to NTP; the window is verified decoding's, tokens of a
    forward; wall clock is tokens/s at batch 1 over NTP's."""
    def shown(key, form, unit=1):
        values = [format(unit * s[key + end], form) for end in ENDS if s.get(key + end) is not None]
        return "{} [{}, {}]".format(*values) if len(values) == 3 else "".join(values) or "-"

    lines = ["| decoding | accuracy, % | mean NFE | NFE speedup | as NTP, % | p | mean window | wall clock |",
             "|---|" + "---|" * 7]
    for s in summary(results, seed):
        cells = [s["decoding"], shown("accuracy", ".1f", 100), shown("mean_nfe", ".1f"),
                 shown("speedup", ".2f"), shown("as_ntp", ".1f", 100), shown("p", ".2g"),
                 shown("window", ".1f"), shown("wall_clock", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results, path, seed=0):
    """Accuracy against mean NFE, a line for each sampler and block size, Wilson's intervals shaded."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes, lines = figure.subplots(), {}
    for r, s in zip(results, summary(results, seed)):
        name = s["decoding"].removesuffix(label(r["cell"])) + label(r["cell"], bound=False)
        lines.setdefault(name, []).append([s["mean_nfe"], *(100 * s[f"accuracy{end}"] for end in ENDS)])
    for name, points in lines.items():
        x, y, low, high = np.array(sorted(points)).T
        style, size = "k*" if name == "ntp" else "o-", 10 if len(x) == 1 else 4
        line, = axes.plot(x, y, style, markersize=size, label=name)
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        if len(x) == 1:
            axes.errorbar(x, y, np.stack((y - low, high - y)), color=line.get_color(), capsize=3)
    axes.set(xscale="log", xlabel="forwards a problem (mean NFE)", ylabel="accuracy, %")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=150))


# -------------------------------------------------------------------------------- a sweep that can be resumed

def compare(args, tasks, models, jobs):
    """Run the jobs (model, cell) that results.json does not hold yet, write it after each, print all."""
    path, options, found = args.out_dir / "results.json", run_options(args, models, len(tasks)), []
    if path.exists() and not args.overwrite:
        options, found = read_results(path, options)
    job_of = lambda r: (r["model"], r["cell"])
    missing = [job for job in jobs if job not in map(job_of, found)]
    if len(missing) < len(jobs):
        print(f"{path} holds {len(jobs) - len(missing)} of {len(jobs)} cells: going on from there",
              file=sys.stderr)
    notes = [note(name, *models[name], tasks[:64], args.seed) for name in models]

    def save():
        """Write all that is found -> what was asked for, in its order."""
        results = sorted((r for r in found if job_of(r) in jobs), key=lambda r: jobs.index(job_of(r)))
        statistics = summary(results, args.seed)
        content = dict(options=options, notes=notes, summary=statistics, results=found)
        write_json(path, content | dict(checksum=checksum(content)))
        write_csv(path.with_suffix(".csv"), statistics)
        return results

    for i, (name, cell) in enumerate(missing):
        def progress(done):
            bar((i + done / len(tasks)) / len(missing), f"{name}: {label(cell)}", done == 0)
        result, = sweep(*models[name], tasks, [cell], args.batch_size, args.max_new_tokens, progress)
        found.append(result | dict(model=name))
        save()
    results, timed = save(), min(args.timed, len(tasks))
    if timed and not all(r.get("timed") == timed for r in results):
        clock(models, results, tasks[:timed], args.max_new_tokens)
        save()
    bar(1.0, "", False)
    print(table(results, args.seed), "", *notes, sep="\n")
    print(f"{len(tasks)} problems; {path}, {path.with_suffix('.csv')}")
    if args.plot:
        plot(results, args.plot, args.seed)
        print(args.plot)


def run_options(args, models, num_problems):
    """What has to be the same for results to stand in one table."""
    code = ("generate.py", "eb_sampler.py", "kv_cache.py", "model.py", "adapter.py", "tokenizer.py",
            "data/word_problems/prepare.py")
    return dict(problems=num_problems, max_new_tokens=args.max_new_tokens, device=args.device,
                dtype=str(next(iter(models.values()))[0].lm_head.weight.dtype),
                code=hashlib.sha256(b"".join((HERE / name).read_bytes() for name in code)).hexdigest(),
                **{f"weights of {name}": weights_hash(model) for name, (model, _) in models.items()})


def weights_hash(model):
    """sha256, hex, of the config and the beginning of every tensor: training moves all of them."""
    weights = [weight.flatten()[:4096].cpu().contiguous() for weight in model.state_dict().values()]
    parts = [repr(model.config).encode(), *(weight.view(torch.uint8).numpy() for weight in weights)]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def checksum(content):
    """Shows that a results file was changed or cut since `compare` wrote it."""
    return zlib.crc32(json.dumps(content).encode())


def read_results(path, options):
    """The options and the finished cells of an earlier run with the same options; ValueError if the file is
    damaged or another run's. Models that were not there before may join."""
    advice = "give --overwrite to start anew, or another --out_dir"
    need(path.is_file(), f"{path} is no file: {advice}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        need(stored.pop("checksum") == checksum(stored), "damaged")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: {advice}") from None
    before = stored["options"]
    differs = [key if len(str(before[key])) > 20 else f"{key} ({before[key]}, now {value})"
               for key, value in options.items() if before.get(key, value) != value]
    need(not differs, f"{path} holds results with other {', '.join(differs)}: {advice}")
    return before | options, stored["results"]


def write_json(path, content):
    write_whole(path, lambda file: file.write_text(json.dumps(content, default=str), encoding="utf-8"))


def write_csv(path, rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)))
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, lambda file: file.write_bytes(text.getvalue().encode()))


def bar(share, text, new):
    """A progress bar where stderr is a terminal, else a line for what is new."""
    if sys.stderr.isatty():
        line = f"[{'#' * round(30 * share):.<30}] {share:4.0%}  {text}" if text else ""
        print("\r\033[K" + line, end="", file=sys.stderr, flush=True)
    elif new:
        print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------- likelihoods (Table 2)

@torch.no_grad()
def losses(model, batches, block_size, eta, seed=0):
    """Mean NTP and MATP losses in nats over the targets of Batches, each token masked with probability eta.
    Stop copies are noise but no targets. All block sizes have the same noise and so the same MATP targets."""
    sums, counts = np.zeros(2), np.zeros(2)
    for i, b in enumerate(batches):
        b = b.to(model.lm_head.weight.device)
        noise = torch.Generator(b.tokens.device).manual_seed((seed << 32) + i)
        ntp_mask, drawn = targets(b, 1)[1], dict(eta=eta, generator=noise)
        if model.adapter is None:
            ntp = r = sbd_loss(model, b.tokens, block_size, b.loss_mask, ntp_mask, b.doc_ids, **drawn)
        else:
            ntp = ntp_loss(model, b.tokens, ntp_mask, b.doc_ids)
            r = adapter_loss(model, b.tokens, block_size, b.loss_mask, b.doc_ids, None, "data", True, **drawn)
        n = np.array([int(ntp.num_ntp), int(r.num_matp)])
        sums, counts = sums + n * [float(ntp.ntp), float(r.matp)], counts + n
    return (sums / counts.clip(1)).tolist()


def verdict(name, batches, ntp, matp):
    """Says whether masked-token predictions are trained: `matp` is a loss with half of all tokens masked in
    blocks of two, where a trained model is about as good as NTP, and an untrained one no better than a guess
    by frequency."""
    counts = torch.cat([b.tokens[b.loss_mask] for b in batches]).unique(return_counts=True)[1].double()
    guess = -float((counts / counts.sum()).log() @ (counts / counts.sum()))
    figures = (f"{matp:.3g} nats a masked token in blocks of 2, half masked; next-token loss {ntp:.3g}, "
               f"a guess by frequency {guess:.3g}")
    if matp > min(guess, (ntp + guess) / 2):
        return (f"{name} is no SBD model: its masked-token predictions are UNTRAINED ({figures}); "
                "of its figures only those of ntp mean anything.")
    return f"{name} predicts masked tokens: {figures}."


def note(name, model, tokenizer, problems, seed):
    """The verdict on a model, from the problems' own solutions."""
    if model.config.mask_id is None:
        return f"{name} has no mask token, so only ntp is evaluated: give --mask_id."
    if model.adapter:
        return f"{name} is a gated adapter: ntp and verified are its base's text, whatever it learned."
    batches = []
    for prompt, problem in zip(encode(tokenizer, problems), problems):
        solution = tokenizer.encode(problem.solution)
        is_target = torch.tensor([[False] * len(prompt) + [True] * len(solution)])
        no = torch.zeros_like(is_target)
        batches.append(Batch(torch.tensor([prompt + solution]), no.long(), is_target, no))
    return verdict(name, batches, *losses(model, batches, 2, 0.5, seed))


def likelihood(args, data, name, model, tokenizer):
    """Validation NTP loss, and MATP loss by block size and share of masked tokens."""
    need_mask(model.config, name)
    context = model.config.max_position_embeddings
    need(data.meta["tokenizer_hash"] == tokenizer.hash and data.vocab_size <= model.config.vocab_size,
         f"{data.dir} was tokenized with another vocabulary ({data.meta['tokenizer']}) than {name}'s: "
         f"prepare it with --tokenizer={model.folder}")
    need(args.seq_len <= context, f"--seq_len {args.seq_len}: wanted 2 to {context}, the model's context")
    rows = pack(data, args.seq_len, max(BLOCKS) - 1, args.seed)
    parts = torch.arange(min(len(rows), args.limit or 64)).split(args.batch_size)
    batches = [batch(rows, part.tolist()) for part in parts]
    found, cases = {}, [(k, share) for k in BLOCKS for share in SHARES]
    for k, share in cases:
        bar(len(found) / len(cases), f"block size {k}, {share:.0%} masked", True)
        found[k, share] = losses(model, batches, k, share, args.seed)
    bar(1.0, "", False)
    ntp, matp = found[cases[0]][0], found[2, 0.5][1]
    about = [f"NTP loss {ntp:.4f} nats a token, {args.split} split of {data.dir}, {sum(map(len, parts))} "
             f"rows of {args.seq_len} tokens", verdict(name, batches, ntp, matp)]
    print(*about, "MATP loss, nats a masked token:", sep="\n")
    print("| block size |" + "".join(f" {share:.0%} masked |" for share in SHARES))
    print("|---" * (1 + len(SHARES)) + "|")
    for k in BLOCKS:
        print(f"| {k} |" + "".join(f" {found[k, share][1]:.4f} |" for share in SHARES))
    rows = [dict(block_size=k, share=share, ntp=a, matp=b) for (k, share), (a, b) in found.items()]
    write_json(args.out_dir / "likelihood.json", dict(notes=about, results=rows))
    write_csv(args.out_dir / "likelihood.csv", rows)


# ------------------------------------------------------------------------------------------- command line

def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--dataset", help="measure likelihoods on this folder of .bin files, or NAME for data/NAME")
    a("--split", default="val", help="--dataset: which split")
    a("--seq_len", type=int, default=512, help="--dataset: tokens a row")
    a("--full", action="store_true", help="sweep the samplers eb-confidence, factor and threshold too")
    a("--limit", type=int, help="word problems (default 500) or rows of --dataset (64)")
    a("--timed", type=int, default=32, help="problems timed at batch 1; 0: none")
    a("--max_new_tokens", type=int, default=256, help="most tokens a text")
    a("--batch_size", type=int, default=64, help="rows decoded together")
    a("--seed", type=int, default=0, help="of the bootstrap and the noise of --dataset")
    a("--out_dir", type=Path, default=Path("out/eval"), help="results; a stopped sweep goes on from them")
    a("--overwrite", action="store_true", help="start anew in an out_dir that holds other results")
    a("--plot", type=Path, nargs="?", const=True, help="accuracy against NFE; bare: OUT_DIR/accuracy.png")
    add_model(p, "default: the shipped models", dtypes=("float32", "bfloat16", "float16", "float64"))
    add_cell(p, "one cell in place of the sweep")
    args = p.parse_args(argv)
    args.plot = args.out_dir / "accuracy.png" if args.plot is True else args.plot
    return args


def add_cell(p, title):
    """The options that make a cell; only those that are given are there after parsing, for `asked`."""
    defaults = [f"{name} {getattr(Options(), name)}" for name in CELL[1:]]
    about = f"defaults: mode sbd where an option of sbd is given, else verified; {', '.join(defaults)}"
    group = p.add_argument_group(title, about)
    add_options(group, Options, names=CELL, **dict.fromkeys(CELL, argparse.SUPPRESS))


def asked(args):
    """The cell that the decoding options name; None if there are none. Raises ValueError."""
    given = {name: getattr(args, name) for name in CELL if hasattr(args, name)}
    if not given:
        return None
    cell = dict(mode="sbd" if ["sbd"] in map(USED_BY.get, given) else "verified") | given
    Options(**cell)
    return NTP if cell["mode"] == "ntp" else cell


def open_folder(path):
    """Make the folder of --out_dir; ValueError if nothing can be written there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(f"--out_dir {path} cannot be written ({error.strerror}): give another") from None


def check(args):
    """What can be refused before a model is loaded -> the word problems, or the Dataset of --dataset."""
    need_between(args, limit=(1, 10**6), timed=(0, 10**6), max_new_tokens=(1, 10**6), batch_size=(1, 4096),
                 seed=(0, 2**31 - 1), seq_len=(2, 10**6))
    need(args.dataset != "", "--dataset is empty: wanted a folder, or NAME for data/NAME")
    need(not (args.plot and args.dataset), "--plot draws the sweep: it does not go with --dataset")
    if args.dataset:
        folder = Path(args.dataset)
        data = Dataset(folder if folder.is_dir() else HERE / "data" / folder, args.split)
    else:
        data = problems("val", args.limit or 500)                      # refuses more than there are
    open_folder(args.out_dir)
    check_plot(args.plot)
    return data


def main(argv=None):
    args = parse(argv)
    cell, data = asked(args), check(args)
    sbd, verified = HERE / "checkpoints/tiny-sbd", HERE / "checkpoints/tiny-verified"
    first = verified if cell and cell["mode"] == "verified" and verified.exists() else sbd
    model, tokenizer = load_model(args, first)
    name = Path(args.init_from or model.folder).name
    if args.dataset:
        return likelihood(args, data, name, model, tokenizer)
    models, cells = {name: (model, tokenizer)}, FULL if args.full else CELLS
    jobs = [(name, c) for c in ([NTP] + [cell] * (cell != NTP) if cell else cells)]
    if not cell and not args.init_from and verified.exists():
        second = Llama.from_pretrained(verified, args.device, model.lm_head.weight.dtype)
        models[verified.name] = second, Tokenizer.from_pretrained(verified)
        jobs += [(verified.name, c) for c in (NTP, *(c | dict(block_size=32) for c in VERIFIED))]
    jobs = [(name, c) for name, c in jobs if c == NTP or models[name][0].config.mask_id is not None]
    compare(args, data, models, jobs)


if __name__ == "__main__":
    run(main, note="interrupted; the same command goes on behind the last finished cell")
