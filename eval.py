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
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from data.bin import Batch, Dataset, batch, pack, targets
from data.word_problems.prepare import grade, problems
from generate import Options, decode
from hf import write_whole
from model import Llama
from sbd_loss import mask_tokens, ntp_targets, sbd_loss
from tokenizer import Tokenizer

HERE = Path(__file__).resolve().parent
GAMMAS = (0, 0.01, 0.1, 0.2, 0.35, 0.4, 0.6, 0.8, 1.5)                 # nats
NTP = dict(mode="ntp")
VERIFIED = [dict(mode="verified", block_size=16, hedges=h) for h in (1, 2, 4)]
CELLS = [NTP, *VERIFIED, *(dict(mode="sbd", block_size=k, gamma=g) for k in (8, 16) for g in GAMMAS)]
SAMPLED = [("eb-confidence", "gamma", (0.01, 0.1, 0.35, 0.8)), ("factor", "factor", (0.1, 0.5, 1.0, 2.0)),
           ("threshold", "threshold", (0.5, 0.7, 0.9, 0.99))]          # sampler, its bound, values
FULL = [*CELLS, *(dict(mode="sbd", block_size=16, sampler=sampler) | {bound: value}
                  for sampler, bound, values in SAMPLED for value in values)]
BLOCKS, SHARES = (2, 4, 8, 16, 32), (0.1, 0.25, 0.5, 0.75, 1.0)        # of the MATP table: k, shares masked
SBD_ONLY = ("gamma", "sampler", "factor", "threshold")
CELL = ("mode", "block_size", "hedges", *SBD_ONLY)   # the fields of Options that make a cell


# ------------------------------------------------------------------------------ accuracy against forwards

def sweep(model, tokenizer, problems, cells, batch_size=64, max_new_tokens=256,
          progress=lambda cell, done: None):
    """Decode every problem once a cell -> one dict a cell, as `counted` makes it."""
    prompts = encode(tokenizer, problems)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))   # a batch's rows end together
    results = []
    for cell in cells:
        rows, widths = [None] * len(prompts), []
        for begin in range(0, len(order), batch_size):
            progress(cell, begin)
            part = order[begin:begin + batch_size]
            for steps in decode(model, [prompts[i] for i in part], max_new_tokens=max_new_tokens, **cell):
                for step in steps:
                    rows[part[step.row.index]] = step.row
                    forward = step.accepted or not step.row.done       # else its last token was known already
                    if cell["mode"] == "verified" and forward:
                        widths.append(window(len(step.drafted), Options(**cell)))
        outputs = [row.tokens for row in rows]
        results.append(counted(cell, outputs, [row.nfe for row in rows], graded(tokenizer, problems, outputs),
                               sum(widths) / len(widths) if widths else None))
    return results


def encode(tokenizer, problems):
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    return [bos + tokenizer.encode(p.prompt) for p in problems]


def graded(tokenizer, problems, outputs):
    return [grade(problem, tokenizer.decode(tokens)) for problem, tokens in zip(problems, outputs)]


def window(d, o):
    """Tokens of a forward of verified decoding: [next | d drafted | a block for each likely outcome]."""
    return 1 + d + (o.block_size * min(o.hedges, d + 1) if o.block_size > 1 else 0)


def counted(cell, outputs, nfes, right, window):
    """One cell's result. By problem: outputs (token ids), nfes, right; then what they sum to. window: mean
    tokens of a forward, of verified decoding only."""
    tokens, nfe = sum(map(len, outputs)), sum(nfes)
    return dict(cell=cell, accuracy=sum(right) / len(right), tokens=tokens, nfe=nfe, speedup=tokens / nfe,
                window=window, outputs=outputs, nfes=nfes, right=right)


def clock(jobs, max_new_tokens):
    """Tokens a second of each job (model, cell, prompts) at batch 1; problem by problem all jobs in turn, so
    that whatever else slows the machine slows them all."""
    seconds, tokens, turns = [0.0] * len(jobs), [0] * len(jobs), len(jobs[0][2])
    for turn in range(-1, turns):    # the first one warms up and is not counted
        bar((turn + 1) / (turns + 1), f"wall clock, problem {turn + 1} of {turns}", turn <= 0)
        for j, (model, cell, prompts) in enumerate(jobs):
            began, n = time.perf_counter(), 0
            for steps in decode(model, [prompts[max(turn, 0)]], max_new_tokens=max_new_tokens, **cell):
                n += sum(len(step.final) for step in steps)
            if turn >= 0:
                seconds[j], tokens[j] = seconds[j] + time.perf_counter() - began, tokens[j] + n
    return [n / s for n, s in zip(tokens, seconds)]


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
    def one(key, form, unit=1):
        return "-" if s.get(key) is None else format(unit * s[key], form)

    def interval(key, form, unit=1):
        return "{} [{}, {}]".format(*(one(key + end, form, unit) for end in ("", "_low", "_high")))

    lines = ["| decoding | accuracy, % | mean NFE | NFE speedup | as NTP, % | p | mean window | wall clock |",
             "|---|" + "---|" * 7]
    for s in summary(results, seed):
        cells = [s["decoding"], interval("accuracy", ".1f", 100), interval("mean_nfe", ".1f"),
                 interval("speedup", ".2f"), one("as_ntp", ".1f", 100), one("p", ".2g"), one("window", ".1f"),
                 one("wall_clock", ".2f")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results, path, seed=0):
    """Accuracy against mean NFE, a line for each sampler and block size, Wilson's intervals shaded."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lines = {}
    for r, s in zip(results, summary(results, seed)):
        model = s["decoding"].partition(": ")[0] + ": " if ": " in s["decoding"] else ""
        lines.setdefault(model + label(r["cell"], bound=False), []).append(
            (s["mean_nfe"], *(100 * s[key] for key in ("accuracy", "accuracy_low", "accuracy_high"))))
    for name, points in lines.items():
        x, y, low, high = np.array(sorted(points)).T
        style, size = "k*" if name == "ntp" else "o-", 10 if len(x) == 1 else 4
        line, = axes.plot(x, y, style, markersize=size, label=name)
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        if len(x) == 1:
            axes.errorbar(x, y, np.stack((y - low, high - y)), color=line.get_color(), capsize=3)
    axes.set(xscale="log", xlabel="forwards a problem (mean NFE)", ylabel="accuracy, %")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:], dpi=150))


# -------------------------------------------------------------------------------- a sweep that can be resumed

def compare(args, models, cells):
    """Run the cells of every model that results.json does not hold yet, write it after each, print all."""
    path, tasks = args.out_dir / "results.json", problems("val", args.limit or 500)
    options, before, found = run_options(args, models, len(tasks)), {}, []
    if path.exists() and not args.overwrite:
        before, found = read_results(path, options, {name: t for name, (_, t) in models.items()}, tasks)
    jobs = [(name, cell) for name in models for cell in cells[name]]
    results = [r for r in found if (r["model"], r["cell"]) in jobs]
    others = [r for r in found if r not in results]
    if results:
        print(f"{path} holds {len(results)} of {len(jobs)} cells: going on from there", file=sys.stderr)
    notes = [note(name, *models[name], tasks[:64], args.seed) for name in models]

    def save():
        statistics = summary(results, args.seed)
        write_json(path, dict(options=before | options, notes=notes, summary=statistics,
                              results=results + others))
        write_csv(path.with_suffix(".csv"), statistics)

    missing = [job for job in jobs if job not in [(r["model"], r["cell"]) for r in results]]
    for i, (name, cell) in enumerate(missing):
        def progress(cell, done):
            bar((i + done / len(tasks)) / len(missing), f"{name}: {label(cell)}", done == 0)
        result, = sweep(*models[name], tasks, [cell], args.batch_size, args.max_new_tokens, progress)
        results.append(result | dict(model=name))
        results.sort(key=lambda r: jobs.index((r["model"], r["cell"])))
        save()
    timed = min(args.timed, len(tasks))
    if timed and not all(r.get("timed") == timed for r in results):
        prompts = {name: encode(tokenizer, tasks[:timed]) for name, (_, tokenizer) in models.items()}
        rates = clock([(models[r["model"]][0], r["cell"], prompts[r["model"]]) for r in results],
                      args.max_new_tokens)
        for r, rate in zip(results, rates):
            r.update(rate=rate, timed=timed)
    bar(1.0, "", False)
    save()
    print(table(results, args.seed), "", *notes, sep="\n")
    print(f"{len(tasks)} problems; {path}, {path.with_suffix('.csv')}")
    if args.plot:
        plot(results, args.plot, args.seed)
        print(args.plot)


def run_options(args, models, num_problems):
    """What has to be the same for results to stand in one table."""
    code = ("generate.py", "eb_sampler.py", "kv_cache.py", "model.py", "tokenizer.py",
            "data/word_problems/prepare.py")
    return dict(problems=num_problems, max_new_tokens=args.max_new_tokens, device=args.device,
                dtype=str(next(iter(models.values()))[0].lm_head.weight.dtype),
                code=hashlib.sha256(b"".join((HERE / name).read_bytes() for name in code)).hexdigest(),
                **{f"weights of {name}": weights_hash(model) for name, (model, _) in models.items()})


def weights_hash(model):
    """sha256, hex, of the config and the beginning of every tensor: training moves all of them."""
    h = hashlib.sha256(repr(model.config).encode())
    for weight in model.state_dict().values():
        h.update(weight.flatten()[:4096].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def read_results(path, options, tokenizers, tasks):
    """The options and the finished cells of an earlier run with the same options; ValueError if the file is
    damaged or another run's. Models that were not there before may join."""
    advice = "give --overwrite to start anew, or another --out_dir"
    need(path.is_file(), f"{path} is no file: {advice}")
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        models = {key: value for key, value in options.items() if key.startswith("weights of ")}
        before = models | stored["options"]
        differs = [key if len(str(before[key])) > 20 else f"{key} ({before[key]}, now {value})"
                   for key, value in options.items() if before[key] != value]
        found = [] if differs else [restored(r, before, tokenizers, tasks) for r in stored["results"]]
        cells = [(r["model"], r["cell"]) for r in found]
        need(all(cells.count(cell) == 1 for cell in cells), "a cell twice")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is damaged: {advice}") from None
    need(not differs, f"{path} holds results with other {', '.join(differs)}: {advice}")
    return before, found


def restored(r, options, tokenizers, tasks):
    """A stored result, nothing of it believed: every figure by problem is checked, sums are counted again.
    Raises ValueError, KeyError or TypeError for what `compare` cannot have written."""
    def are(kind, values, least=0, most=2**31):
        return type(values) is list and all(type(x) is kind and least <= x <= most for x in values)

    cell, outputs, nfes, right, mean = (r[key] for key in ("cell", "outputs", "nfes", "right", "window"))
    timed = {key: r[key] for key in ("rate", "timed") if key in r}
    o, n, tokenizer = Options(**cell), len(tasks), tokenizers.get(r["model"])
    k = 1 if o.mode == "ntp" else o.block_size                         # a forward decides 1 to k tokens,
    behind = k - 1 if o.mode == "sbd" else 0                           # some of them behind the end
    good = (f"weights of {r['model']}" in options and len(outputs) == len(nfes) == len(right) == n
            and are(bool, right) and are(int, nfes, 1)
            and all(are(int, t) and 1 <= len(t) <= options["max_new_tokens"] for t in outputs)
            and all(len(t) / k <= nfe <= len(t) + behind for t, nfe in zip(outputs, nfes))
            and (mean is None or o.mode == "verified" and are(float, [mean], 1, window(k - 1, o)))
            and (not timed or are(float, [timed["rate"]], 1e-9) and are(int, [timed["timed"]], 1, n))
            and (not tokenizer or right == graded(tokenizer, tasks, outputs)))
    need(good, "damaged")
    return counted(cell, outputs, nfes, right, mean) | timed | dict(model=r["model"])


def write_json(path, content):
    write_whole(path, lambda file: file.write_text(json.dumps(content, default=str), encoding="utf-8"))


def write_csv(path, rows):
    def write(temporary):
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    write_whole(path, write)


def bar(share, text, new):
    """A progress bar where stderr is a terminal, else a line for what is new."""
    if sys.stderr.isatty():
        done = round(30 * share)
        line = f"[{'#' * done}{'.' * (30 - done)}] {share:4.0%}  {text}" if text else ""
        print("\r\033[K" + line, end="", file=sys.stderr, flush=True)
    elif new:
        print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------- likelihoods (Table 2)

@torch.no_grad()
def losses(model, batches, block_size, eta, seed=0):
    """Mean NTP and MATP losses in nats over the targets of Batches, each token masked with probability eta.
    Stop copies are noise but no targets. All block sizes have the same noise and so the same MATP targets."""
    sums, counts = [0.0, 0.0], [0, 0]
    for i, b in enumerate(batches):
        b = b.to(model.lm_head.weight.device)
        ntp_mask = targets(b, 1)[1]
        noise = lambda: torch.Generator(b.tokens.device).manual_seed((seed << 32) + i)
        result = sbd_loss(model, b.tokens, block_size, b.loss_mask, ntp_mask, b.doc_ids, eta=eta,
                          generator=noise())
        is_masked = mask_tokens(b.tokens, model.config.mask_id, eta, noise())[1]
        n = int(ntp_targets(b.tokens, ntp_mask, b.doc_ids).sum()), int((is_masked & b.loss_mask).sum())
        sums = [s + float(mean) * c for s, mean, c in zip(sums, (result.ntp, result.matp), n)]
        counts = [c + m for c, m in zip(counts, n)]
    return [s / max(c, 1) for s, c in zip(sums, counts)]


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
    batches = []
    for prompt, problem in zip(encode(tokenizer, problems), problems):
        solution = tokenizer.encode(problem.solution)
        is_target = torch.tensor([[False] * len(prompt) + [True] * len(solution)])
        no = torch.zeros_like(is_target)
        batches.append(Batch(torch.tensor([prompt + solution]), no.long(), is_target, no))
    return verdict(name, batches, *losses(model, batches, 2, 0.5, seed))


def likelihood(args, name, model, tokenizer):
    """Validation NTP loss, and MATP loss by block size and share of masked tokens."""
    need_mask(model.config, name)
    data, context = Dataset(data_folder(args), args.split), model.config.max_position_embeddings
    need(data.meta["tokenizer_hash"] == tokenizer.hash and data.vocab_size <= model.config.vocab_size,
         f"{data.dir} was tokenized with another vocabulary ({data.meta['tokenizer']}) than {name}'s: "
         f"prepare it with --tokenizer={model.folder}")
    need(args.seq_len <= context, f"--seq_len {args.seq_len}: wanted 2 to {context}, the model's context")
    rows = pack(data, args.seq_len, max(BLOCKS) - 1, args.seed)
    parts = torch.arange(min(len(rows), args.limit or 64)).split(args.batch_size)
    batches = [batch(rows, part.tolist()) for part in parts]
    found = {}
    for k in BLOCKS:
        for share in SHARES:
            bar(len(found) / (len(BLOCKS) * len(SHARES)), f"block size {k}, {share:.0%} masked", True)
            found[k, share] = losses(model, batches, k, share, args.seed)
    bar(1.0, "", False)
    ntp, matp = found[BLOCKS[0], SHARES[0]][0], found[2, 0.5][1]
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


def data_folder(args):
    return Path(args.dataset) if Path(args.dataset).is_dir() else HERE / "data" / args.dataset


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
    cell = dict(mode="sbd" if given.keys() & set(SBD_ONLY) else "verified") | given
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
    """What can be refused before a model is loaded."""
    need_between(args, limit=(1, 10**6), timed=(0, 10**6), max_new_tokens=(1, 10**6), batch_size=(1, 4096),
                 seed=(0, 2**31 - 1), seq_len=(2, 10**6))
    need(args.dataset != "", "--dataset is empty: wanted a folder, or NAME for data/NAME")
    need(not (args.plot and args.dataset), "--plot draws the sweep: it does not go with --dataset")
    if args.dataset:
        Dataset(data_folder(args), args.split)
    else:
        problems("val", args.limit or 500)                             # refuses more than there are
    open_folder(args.out_dir)
    check_plot(args.plot)


def main(argv=None):
    args = parse(argv)
    cell = asked(args)
    check(args)
    sbd, verified = HERE / "checkpoints/tiny-sbd", HERE / "checkpoints/tiny-verified"
    first = verified if cell and cell["mode"] == "verified" and verified.exists() else sbd
    model, tokenizer = load_model(args, first)
    name = Path(args.init_from or model.folder).name
    if args.dataset:
        return likelihood(args, name, model, tokenizer)
    models, cells = {name: (model, tokenizer)}, {name: FULL if args.full else CELLS}
    if cell:
        cells[name] = [NTP] + [cell] * (cell != NTP)
    elif not args.init_from and verified.exists():
        second = Llama.from_pretrained(verified, args.device, model.lm_head.weight.dtype)
        models[verified.name] = second, Tokenizer.from_pretrained(verified)
        cells[verified.name] = [NTP, *(c | dict(block_size=32) for c in VERIFIED)]
    cells |= {name: [NTP] for name in models if models[name][0].config.mask_id is None}
    compare(args, models, cells)


if __name__ == "__main__":
    run(main, note="interrupted; the same command goes on behind the last finished cell")
