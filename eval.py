"""Accuracy against forwards (Fig. 1, 5, 12, 13, Tables 1, 2): decoding modes compared on the same held-out problems.

    python eval.py                                      the shipped model on 500 word problems, with error bars
    python eval.py --dataset=NAME                       likelihoods: NTP loss, MATP loss by masking and block size
    python eval.py --tasks gsm8k,mmlu --gamma 0.35      the benchmarks of lm-eval, and their NFE speedups

A cell is the options of one generate() call: mode, block_size, gamma, sampler, hedges ... NFE speedup is tokens /
forwards over all problems together. Shapes: B batch, L length, n targets, C hidden size, V vocabulary.
"""
import argparse
import contextlib
import csv
import hashlib
import importlib.util
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from data.bin import Batch, Dataset, batch, pack, targets
from data.word_problems.prepare import grade, problems
from eb_sampler import SAMPLERS
from generate import decode, generate, load
from hf import PRESETS, write_whole
from model import Llama
from sbd_loss import LOGITS, mask_tokens, ntp_targets, sbd_loss
from tokenizer import TextStream, Tokenizer, any_of

HERE = Path(__file__).resolve().parent
GAMMAS = (0, 0.01, 0.1, 0.2, 0.35, 0.4, 0.6, 0.8, 1.5)                 # nats
NTP = dict(mode="ntp")
VERIFIED = [dict(mode="verified", block_size=16, hedges=h) for h in (1, 2, 4)]
CELLS = [NTP, *VERIFIED, *(dict(mode="sbd", block_size=k, gamma=g) for k in (8, 16) for g in GAMMAS)]
FULL = [*CELLS, *(dict(mode="sbd", block_size=16, sampler=sampler) | {bound: value} for sampler, bound, values in (
    ("eb-confidence", "gamma", (0.01, 0.1, 0.35, 0.8)), ("factor", "factor", (0.1, 0.5, 1.0, 2.0)),
    ("threshold", "threshold", (0.5, 0.7, 0.9, 0.99))) for value in values)]
BLOCKS, SHARES = (2, 4, 8, 16, 32), (0.1, 0.25, 0.5, 0.75, 1.0)        # of the MATP table: block sizes, shares masked


# --------------------------------------------------------------------------------------- accuracy against forwards

def sweep(model, tokenizer, problems, cells, batch_size=64, max_new_tokens=256, progress=lambda cell, done: None):
    """Decode every problem once a cell -> one dict a cell:

    cell; accuracy; tokens and nfe, both summed; speedup = tokens / nfe; window, verified only: mean tokens of a forward;
    and by problem: outputs (token ids), nfes, right.
    """
    prompts = encode(tokenizer, problems)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))    # rows of a batch end at about the same time
    results = []
    for cell in cells:
        rows, widths = {}, []
        for begin in range(0, len(order), batch_size):
            progress(cell, begin)
            part = order[begin:begin + batch_size]
            for steps in decode(model, [prompts[i] for i in part], max_new_tokens=max_new_tokens, stop_ids=model.config.stop_ids, **cell):
                for step in steps:
                    rows[part[step.row.index]] = step.row
                    if cell["mode"] == "verified" and not (step.row.done and not step.accepted):   # else no forward was run
                        d, k = len(step.drafted), cell.get("block_size", 16)
                        widths.append(1 + d + (k * min(cell.get("hedges", 2), d + 1) if k > 1 else 0))
        rows = [rows[i] for i in range(len(prompts))]
        right = [grade(problem, tokenizer.decode(row.tokens)) for problem, row in zip(problems, rows)]
        tokens, nfe = sum(len(row.tokens) for row in rows), sum(row.nfe for row in rows)
        results.append(dict(cell=cell, accuracy=sum(right) / len(right), tokens=tokens, nfe=nfe, speedup=tokens / nfe,
                            window=sum(widths) / len(widths) if widths else None, outputs=[row.tokens for row in rows],
                            nfes=[row.nfe for row in rows], right=right))
    return results


def encode(tokenizer, problems):
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    return [bos + tokenizer.encode(p.prompt) for p in problems]


def clock(jobs, max_new_tokens, progress):
    """Tokens a second of each job (model, cell, prompts) at batch 1; problem by problem all jobs in turn, so that
    whatever else slows the machine slows them all."""
    seconds, tokens = [0.0] * len(jobs), [0] * len(jobs)
    for turn in range(-1, len(jobs[0][2])):                                # the first turn warms up and is not counted
        progress(turn)
        for j, (model, cell, prompts) in enumerate(jobs):
            began, n = time.perf_counter(), 0
            for steps in decode(model, [prompts[max(turn, 0)]], max_new_tokens=max_new_tokens, stop_ids=model.config.stop_ids, **cell):
                n += sum(len(step.final) for step in steps)
            if turn >= 0:
                seconds[j], tokens[j] = seconds[j] + time.perf_counter() - began, tokens[j] + n
    return [n / s for n, s in zip(tokens, seconds)]


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
    mode = cell["mode"]
    words = [cell.get("sampler", "eb") if mode == "sbd" else mode] + ([f"k={cell.get('block_size', 16)}"] if mode != "ntp" else [])
    short = {"hedges": "h"} | {key: key for key in ("gamma", "factor", "threshold")}
    return " ".join(words + [f"{short[key]}={cell[key]}" for key in short if bound and key in cell])


def summary(results, seed=0):
    """The statistics of every result, a flat dict each; NTP is the one of the same model."""
    ntp = {r.get("model"): r for r in results if r["cell"]["mode"] == "ntp"}
    several, rows = len({r.get("model") for r in results}) > 1, []
    for r in results:
        n, base, lengths = len(r["right"]), ntp.get(r.get("model")), [len(t) for t in r["outputs"]]
        row = dict(decoding=(f"{r['model']}: " if several else "") + label(r["cell"]), problems=n, accuracy=r["accuracy"])
        row["accuracy_low"], row["accuracy_high"] = wilson(sum(r["right"]), n)
        row["mean_nfe"] = r["nfe"] / n
        row["mean_nfe_low"], row["mean_nfe_high"] = bootstrap(r["nfes"], [1] * n, seed)
        row["speedup"] = r["speedup"]
        row["speedup_low"], row["speedup_high"] = bootstrap(lengths, r["nfes"], seed)
        if base is not None:
            pairs = list(zip(r["right"], base["right"]))
            row["as_ntp"] = sum(map(list.__eq__, r["outputs"], base["outputs"])) / n
            row["p"] = mcnemar(pairs.count((True, False)), pairs.count((False, True)))
            row["wall_clock"] = r["rate"] / base["rate"] if "rate" in r and "rate" in base else None
        rows.append(row | dict(window=r["window"]))
    return rows


def table(results, seed=0) -> str:
    """The results as Markdown. [ ] are 95% intervals: Wilson's for accuracy, else a bootstrap over problems; p is
    McNemar's, of the difference in accuracy to NTP; the window is verified decoding's, tokens of a forward; wall clock
    is tokens/s at batch 1 over NTP's."""
    lines = ["| decoding | accuracy, % | mean NFE | NFE speedup | as NTP, % | p | mean window | wall clock |", "|---|" + "---|" * 7]
    show = lambda value, form: "-" if value is None else format(value, form)
    for s in summary(results, seed):
        interval = lambda key, form, unit=1: f"{s[key] * unit:{form}} [{s[key + '_low'] * unit:{form}}, {s[key + '_high'] * unit:{form}}]"
        as_ntp = None if s.get("as_ntp") is None else 100 * s["as_ntp"]
        lines.append(f"| {s['decoding']} | {interval('accuracy', '.1f', 100)} | {interval('mean_nfe', '.1f')} | {interval('speedup', '.2f')} "
                     f"| {show(as_ntp, '.1f')} | {show(s.get('p'), '.2g')} "
                     f"| {show(s['window'], '.1f')} | {show(s.get('wall_clock'), '.2f')} |")
    return "\n".join(lines)


def plot(results, path, seed=0):
    """Accuracy against mean NFE, a line for each sampler and block size, Wilson's intervals shaded (Fig. 5, 12, 13)."""
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
        line, = axes.plot(x, y, "k*" if name == "ntp" else "o-", markersize=10 if len(x) == 1 else 4, label=name)
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color(), linewidth=0)
        if len(x) == 1:
            axes.errorbar(x, y, np.stack((y - low, high - y)), color=line.get_color(), capsize=3)
    axes.set(xscale="log", xlabel="forwards a problem (mean NFE)", ylabel="accuracy, %")
    axes.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.xaxis.set_minor_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axes.grid(alpha=0.3)
    axes.legend()
    write_whole(path, lambda temporary: figure.savefig(temporary, format=path.suffix[1:] or "png", dpi=150))


def compare(args, models, cells):
    """Run the cells of every model that results.json does not hold yet, write it after each, print the table."""
    path, tasks = args.out_dir / "results.json", problems("val", args.limit or 500)
    code = ("generate.py", "eb_sampler.py", "kv_cache.py", "model.py", "tokenizer.py", "data/word_problems/prepare.py")
    options = dict(problems=len(tasks), max_new_tokens=args.max_new_tokens, device=args.device, dtype=str(next(iter(models.values()))[0].lm_head.weight.dtype),
                   code=hashlib.sha256(b"".join((HERE / name).read_bytes() for name in code)).hexdigest(),
                   **{f"weights of {name}": weights_hash(model) for name, (model, _) in models.items()})
    found, before, notes = *read_results(path, options, args.overwrite), []
    wanted_cells = [(name, cell) for name in models for cell in cells[name]]
    results = [r for r in found if (r["model"], r["cell"]) in wanted_cells]
    others = [r for r in found if (r["model"], r["cell"]) not in wanted_cells]
    if results:
        print(f"{path} holds {len(results)} of {len(wanted_cells)} cells: going on from there", file=sys.stderr)

    def save():
        summaries = summary(results, args.seed)
        content = dict(options=before | options, notes=notes, summary=summaries, results=results + others)
        write_whole(path, lambda temporary: temporary.write_text(json.dumps(content)))
        write_csv(path.with_suffix(".csv"), summaries)

    path.parent.mkdir(parents=True, exist_ok=True)
    notes += [note(name, model, tokenizer, tasks[:64], args.seed) for name, (model, tokenizer) in models.items()]
    missing = [job for job in wanted_cells if job not in [(r["model"], r["cell"]) for r in results]]
    for i, (name, cell) in enumerate(missing):
        say = lambda cell, done: bar((i + done / len(tasks)) / len(missing), f"{name}: {label(cell)}", done == 0)
        result, = sweep(*models[name], tasks, [cell], args.batch_size, args.max_new_tokens, say)
        results.append(result | dict(model=name))
        results.sort(key=lambda r: wanted_cells.index((r["model"], r["cell"])))
        save()
    timed = min(args.timed, len(tasks))
    if timed and not all("rate" in r and r["timed"] == timed for r in results):
        prompts = {name: encode(tokenizer, tasks[:timed]) for name, (_, tokenizer) in models.items()}
        rates = clock([(models[r["model"]][0], r["cell"], prompts[r["model"]]) for r in results], args.max_new_tokens,
                      lambda turn: bar((turn + 1) / (timed + 1), f"wall clock, problem {turn + 1} of {timed}", turn <= 0))
        for r, rate in zip(results, rates):
            r.update(rate=rate, timed=timed)
    bar(1.0, "", False)
    save()
    print(table(results, args.seed) + "\n\n" + "\n".join(notes) + f"\n{len(tasks)} problems; {path}, {path.with_suffix('.csv')}")
    if args.plot:
        plot(results, args.plot, args.seed)
        print(args.plot)


def weights_hash(model):
    """sha256, hex, of the config and the beginning of every tensor: training moves all of them."""
    h = hashlib.sha256(repr(model.config).encode())
    for weight in model.state_dict().values():
        h.update(weight.flatten()[:4096].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def read_results(path, options, overwrite):
    """The finished cells and the options of a run with the same options; ValueError if the file is another run's."""
    if overwrite or not path.exists():
        return [], {}
    try:
        stored = json.loads(path.read_text())
        results, before = stored["results"], stored["options"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path} is damaged: give --overwrite or another --out_dir") from None
    differs = [key if len(str(value)) > 20 else f"{key} ({before[key]}, now {value})" for key, value in options.items() if before.get(key, value) != value]
    if differs:
        raise ValueError(f"{path} holds results with other {', '.join(differs)}: give --overwrite to start anew, or another --out_dir")
    return results, before


def write_csv(path, rows):
    def write(temporary):
        with temporary.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
    write_whole(path, write)


def bar(share, text, new):
    """A progress bar where stderr is a terminal, else a line for what is new."""
    if sys.stderr.isatty():
        done = round(30 * share)
        print("\r\033[K" + (f"[{'#' * done}{'.' * (30 - done)}] {share:4.0%}  {text}" if text else ""), end="", file=sys.stderr, flush=True)
    elif new:
        print(f"{share:4.0%}  {text}", file=sys.stderr, flush=True)


# --------------------------------------------------------------------------------------- likelihoods (Table 2)

@torch.no_grad()
def losses(model, batches, block_size, eta, seed=0):
    """Mean NTP and MATP losses in nats over the targets of Batches, each token masked with probability eta. Stop
    copies are noise but no targets, and the noise is the same for every block size: so are the MATP targets."""
    sums, counts = [0.0, 0.0], [0, 0]
    for i, b in enumerate(batches):
        b = b.to(model.lm_head.weight.device)
        ntp_mask = targets(b, 1)[1]
        noise = lambda: torch.Generator(b.tokens.device).manual_seed((seed << 32) + i)
        result = sbd_loss(model, b.tokens, block_size, b.loss_mask, ntp_mask, b.doc_ids, eta=eta, generator=noise())
        n = [int(ntp_targets(b.tokens, ntp_mask, b.doc_ids).sum()),
             int((mask_tokens(b.tokens, model.config.mask_id, eta, noise())[1] & b.loss_mask).sum())]
        sums = [s + float(mean) * c for s, mean, c in zip(sums, (result.ntp, result.matp), n)]
        counts = [c + m for c, m in zip(counts, n)]
    return [s / max(c, 1) for s, c in zip(sums, counts)]


def verdict(name, batches, ntp, matp):
    """Says whether masked-token predictions are trained: `matp` is a loss with half of all tokens masked in blocks of
    two, where a trained model is about as good as NTP, and an untrained one no better than a guess by frequency."""
    counts = torch.cat([b.tokens[b.loss_mask] for b in batches]).unique(return_counts=True)[1].double()
    guess = -float((counts / counts.sum()).log() @ (counts / counts.sum()))
    figures = f"{matp:.3g} nats a masked token in blocks of 2, half masked; next-token loss {ntp:.3g}, a guess by frequency {guess:.3g}"
    if matp > min(guess, (ntp + guess) / 2):
        return f"{name} is no SBD model: its masked-token predictions are UNTRAINED ({figures}); of its figures only those of ntp mean anything."
    return f"{name} predicts masked tokens: {figures}."


def note(name, model, tokenizer, problems, seed):
    """The verdict on a model, from the problems' own solutions."""
    if model.config.mask_id is None:
        return f"{name} names no mask token, so only ntp is evaluated: give --mask_id, an id of its vocabulary that text never uses."
    texts = [(p, tokenizer.encode(q.solution)) for p, q in zip(encode(tokenizer, problems), problems)]
    L = max(len(p) + len(s) for p, s in texts)
    tokens, doc_ids, is_target = torch.zeros(len(texts), L, dtype=torch.int64), torch.ones(len(texts), L, dtype=torch.int64), torch.zeros(len(texts), L, dtype=torch.bool)
    for row, (p, s) in enumerate(texts):
        tokens[row, :len(p) + len(s)] = torch.tensor(p + s)
        doc_ids[row, :len(p) + len(s)], is_target[row, len(p):len(p) + len(s)] = 0, True   # padding is a document of its own
    batches = [Batch(*part) for part in zip(*(t.split(8) for t in (tokens, doc_ids, is_target, torch.zeros_like(is_target))))]
    return verdict(name, batches, *losses(model, batches, 2, 0.5, seed))


def likelihood(args, name, model, tokenizer):
    """Validation NTP loss, and MATP loss by block size and share of masked tokens."""
    folder = Path(args.dataset) if Path(args.dataset).is_dir() else HERE / "data" / args.dataset
    data = Dataset(folder, args.split)
    if data.meta["tokenizer_hash"] != tokenizer.hash or data.vocab_size > model.config.vocab_size:
        raise ValueError(f"{folder} was tokenized with another vocabulary ({data.meta['tokenizer']}) than {name}'s: prepare it with --tokenizer={model.folder}")
    if not 2 <= args.seq_len <= model.config.max_position_embeddings:
        raise ValueError(f"--seq_len {args.seq_len}: wanted 2 to {model.config.max_position_embeddings}, the model's context")
    rows = pack(data, args.seq_len, max(BLOCKS) - 1, args.seed)
    count = min(len(rows), args.limit or 64)
    batches = [batch(rows, range(i, min(i + args.batch_size, count))) for i in range(0, count, args.batch_size)]
    if model.config.mask_id is None:
        raise ValueError(f"{name} names no mask token: give --mask_id, an id of its vocabulary that text never uses")
    found, lines = {}, ["| block size |" + "".join(f" {share:.0%} masked |" for share in SHARES), "|---" * (1 + len(SHARES)) + "|"]
    for k in BLOCKS:
        for share in SHARES:
            bar(len(found) / (len(BLOCKS) * len(SHARES)), f"block size {k}, {share:.0%} masked", True)
            found[k, share] = losses(model, batches, k, share, args.seed)
        lines.append(f"| {k} |" + "".join(f" {found[k, share][1]:.4f} |" for share in SHARES))
    bar(1.0, "", False)
    ntp = found[BLOCKS[0], SHARES[0]][0]
    about = [f"NTP loss {ntp:.4f} nats a token, {args.split} split of {folder}, {count} rows of {args.seq_len} tokens",
             verdict(name, batches, ntp, found[2, 0.5][1])]
    print("\n".join([*about, "MATP loss, nats a masked token:", *lines]))
    args.out_dir.mkdir(parents=True, exist_ok=True)
    rows = [dict(block_size=k, share=share, ntp=a, matp=b) for (k, share), (a, b) in found.items()]
    write_whole(args.out_dir / "likelihood.json", lambda temporary: temporary.write_text(json.dumps(dict(notes=about, results=rows), indent=1)))
    write_csv(args.out_dir / "likelihood.csv", rows)


# --------------------------------------------------------------------------------------- benchmarks through lm-eval

@contextlib.contextmanager
def harness():
    """The lm_eval package. It imports Hugging Face's `evaluate`, a package with this file's name, so that one goes
    into sys.modules for as long as the harness works."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("--tasks needs the package lm-eval, which is not installed: pip install lm-eval")
    path, own = list(sys.path), sys.modules.pop("evaluate", None)
    sys.path[:] = [p for p in path if Path(p).resolve() != HERE]
    try:
        importlib.import_module("evaluate")
        import lm_eval
        import lm_eval.tasks
        import lm_eval.utils
        sys.path[:] = path
        yield lm_eval
    finally:
        sys.path[:] = path
        if own is not None:
            sys.modules["evaluate"] = own


def harness_model(model, tokenizer, cell, batch_size=64, max_new_tokens=256, seed=0, progress=lambda share, text: None):
    """An lm_eval model (inside `with harness()`): likelihoods in NTP mode, texts decoded as `cell` says. Its .spent
    counts, by task, texts, tokens until the end of the solution (stop text, stop id or limit) and forwards."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
    device, context, stop_ids = model.lm_head.weight.device, model.config.max_position_embeddings, {*model.config.stop_ids, tokenizer.eos_id}
    special, names = set(tokenizer.special_ids.values()), any_of(tokenizer.added)

    class SBD(TemplateLM):
        eot_token_id = tokenizer.eos_id
        prefix_token_id = tokenizer.special_ids.get(tokenizer.token_name("bos_token"), tokenizer.eos_id)
        tokenizer_name = str(tokenizer.folder)

        def __init__(self):
            super().__init__()
            self.spent = {}

        def tok_encode(self, string, add_special_tokens=None, **kwargs):
            ids = tokenizer.encode_added(string, names)                    # a rendered chat template names special tokens
            bos = [] if add_special_tokens is False or tokenizer.bos_id is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
            return bos + ids

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            text = tokenizer.render(chat_history, add_generation_prompt)
            if add_generation_prompt:
                return text
            last = chat_history[-1]["content"].strip()                     # a reply to go on with: nothing behind it
            return text[:text.rindex(last) + len(last)]

        @torch.inference_mode()
        def _loglikelihood_tokens(self, requests, **kwargs):
            groups, answers, size = {}, [None] * len(requests), max(1, LOGITS // model.config.vocab_size)
            for i, (_, before, target) in enumerate(requests):             # choices of one token share their forward
                groups.setdefault(tuple((before + target)[-context - 1:-1]), []).append((i, target[-context:]))
            inputs = sorted(groups, key=len, reverse=True)
            for begin in range(0, len(inputs), batch_size):
                progress(begin / len(inputs), "loglikelihood")
                part = inputs[begin:begin + batch_size]
                hidden = model.hidden(torch.tensor([[*ids] + [0] * (len(part[0]) - len(ids)) for ids in part]).to(device))   # (B, L, C)
                for h, ids in zip(hidden, part):
                    for i, target in groups[ids]:
                        total, greedy, n = 0.0, True, len(target)
                        for rows, t in zip(h[len(ids) - n:len(ids)].split(size), torch.tensor(target).to(device).split(size)):
                            logits = model.lm_head(rows)                   # (n, V); the mask id is an ordinary one here
                            p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
                            total, greedy = total + float(p.gather(-1, t[:, None]).sum()), greedy and bool((p.argmax(-1) == t).all())
                        answers[i] = total, greedy
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            windows = [[(None, *make_disjoint_window(w)) for w in get_rolling_token_windows(self.tok_encode(r.args[0]), self.prefix_token_id, context, 1)]
                       for r in requests]
            scores = iter(self._loglikelihood_tokens([w for text in windows for w in text]))
            return [sum(next(scores)[0] for _ in text) for text in windows]

        def generate_until(self, requests, disable_tqdm=False):
            prompts, groups, texts = [self.tok_encode(r.args[0]) for r in requests], {}, [""] * len(requests)
            for i, (_, g) in enumerate(r.args for r in requests):
                limits = [g[key] for key in ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens") if g.get(key)]
                limit, temperature = int((limits or [max_new_tokens])[0]), g.get("temperature") or 0.0
                draw = dict(temperature=temperature, top_k=g.get("top_k"), top_p=g.get("top_p")) if g.get("do_sample", True) and temperature else {}
                groups.setdefault((limit, *draw.items()), []).append(i)
                prompts[i] = prompts[i][-(context - min(limit, context // 2)):]    # as much of its end as leaves room
            done = 0
            for (limit, *draw), order in groups.items():
                order.sort(key=lambda i: -len(prompts[i]))
                for part in (order[begin:begin + batch_size] for begin in range(0, len(order), batch_size)):
                    progress(done / len(requests), "generate_until")
                    until = [requests[i].args[1].get("until") or [] for i in part]
                    streams = [TextStream(tokenizer, [u] if isinstance(u, str) else u) for u in until]
                    spent = [self.spent.setdefault(requests[i].task_name, dict(texts=0, tokens=0, nfe=0)) for i in part]
                    for steps in decode(model, [prompts[i] for i in part], max_new_tokens=limit, stop_ids=stop_ids, **cell | dict(seed=seed + done) | dict(draw)):
                        for step in steps:
                            row, stream = step.row, streams[step.row.index]
                            for token in step.final:                       # one by one: no token behind a stop text counts
                                spent[row.index]["tokens"] += 1
                                texts[part[row.index]] += stream.feed([] if token in special or token in stop_ids else [token])
                                if stream.found:
                                    row.done = True
                                    break
                            if row.done:
                                texts[part[row.index]] += stream.feed([], end=True)
                                spent[row.index]["texts"], spent[row.index]["nfe"] = spent[row.index]["texts"] + 1, spent[row.index]["nfe"] + row.nfe
                    done += len(part)
            return texts

    return SBD()


def benchmark(args, model, tokenizer, cell):
    """Run lm-eval's tasks and print its table, and the NFE speedup of every task that generates."""
    with harness() as lm_eval:
        manager = lm_eval.tasks.TaskManager(include_path=str(args.include_path) if args.include_path else None)
        names = args.tasks.split(",")
        unknown = [name for name in names if not manager.match_tasks([name])]
        if unknown:
            raise ValueError(f"lm-eval knows no task {', '.join(unknown)}: python -m lm_eval ls tasks lists its own, --include_path adds a folder of yours")
        lm = harness_model(model, tokenizer, cell, args.batch_size, args.max_new_tokens, args.seed, lambda share, text: bar(share, text, False))
        try:
            found = lm_eval.simple_evaluate(model=lm, tasks=names, num_fewshot=args.num_fewshot, limit=args.limit, apply_chat_template=args.chat,
                                            task_manager=manager, confirm_run_unsafe_code=args.run_code, log_samples=False)
        except OSError as error:
            raise ValueError(f"lm-eval could not get the data of {args.tasks} ({(str(error).splitlines() or [type(error).__name__])[0]}): check the connection") from None
        except ValueError as error:
            if "HF_ALLOW_CODE_EVAL" not in str(error) and "unsafe" not in str(error):
                raise
            raise ValueError(f"{args.tasks}: scoring it runs code that the model wrote; where that is safe, give --run_code") from None
        bar(1.0, "", False)
        print("\n".join(lm_eval.utils.make_table(found, column) for column in ("results", "groups") if found.get(column)))
    lines = [f"| task ({label(cell)}) | texts | tokens | forwards | NFE speedup |", "|---|---|---|---|---|"]
    lines += [f"| {task} | {s['texts']} | {s['tokens']} | {s['nfe']} | {s['tokens'] / s['nfe']:.2f} |" for task, s in lm.spent.items()]
    if lm.spent:
        print("\n".join(lines))
    args.out_dir.mkdir(parents=True, exist_ok=True)
    content = dict(cell=cell, spent=lm.spent, **{key: found[key] for key in ("results", "groups", "n-shot", "n-samples", "versions") if key in found})
    write_whole(args.out_dir / "tasks.json", lambda temporary: temporary.write_text(json.dumps(content, indent=1, default=str)))
    return found


# --------------------------------------------------------------------------------------- command line

def parse(argv=None):
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, description=__doc__.split("\n")[0])
    a = p.add_argument
    a("--init_from", help=f"folder, training output, hub id owner/name, or preset: {', '.join(n for n, (_, hub) in PRESETS.items() if hub)}; default: the shipped models")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    a("--dataset", help="measure likelihoods on this folder of .bin files, or NAME for data/NAME")
    a("--split", default="val", help="--dataset: which split")
    a("--seq_len", type=int, default=512, help="--dataset: tokens a row")
    a("--tasks", help="run these tasks of lm-eval, NAME,NAME,...")
    a("--include_path", type=Path, help="--tasks: a folder with task files of your own")
    a("--num_fewshot", type=int, help="--tasks: examples before the question; default: the task's own number")
    a("--chat", action="store_true", help="--tasks: wrap prompts into the checkpoint's chat template")
    a("--run_code", action="store_true", help="--tasks: allow tasks whose scoring runs code that the model wrote")
    a("--mode", choices=("sbd", "ntp", "verified"), help="this and the six below: one cell in place of the sweep; default: sbd if a sampler's option is given, else verified")
    a("--block_size", type=int, help="k, tokens decoded together; default 16")
    a("--gamma", type=float, help="entropy budget of one step, nats; default 0.1")
    a("--hedges", type=int, help="verified: blocks a window; default 2")
    a("--sampler", choices=SAMPLERS, help="which masked tokens to reveal; default eb")
    a("--factor", type=float, help="--sampler=factor: its f; default 1.0")
    a("--threshold", type=float, help="--sampler=threshold: the confidence that reveals a token; default 0.9")
    a("--full", action="store_true", help="sweep the samplers eb-confidence, factor and threshold too")
    a("--limit", type=int, help="word problems (default 500), rows of --dataset (64) or examples of each task (all)")
    a("--timed", type=int, default=32, help="problems timed at batch 1; 0: none")
    a("--max_new_tokens", type=int, default=256, help="most tokens a text, where a task names no limit")
    a("--batch_size", type=int, default=64, help="rows decoded together")
    a("--seed", type=int, default=0, help="of the bootstrap, the noise of --dataset, and tasks that sample")
    a("--out_dir", type=Path, default=Path("out/eval"), help="results as JSON and CSV; an interrupted sweep goes on from them")
    a("--overwrite", action="store_true", help="start anew in an out_dir that holds other results")
    a("--plot", type=Path, nargs="?", const=True, help="draw accuracy against mean NFE; default file: accuracy.png in out_dir")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=("float32", "bfloat16", "float16", "float64"), help="of weights and cache; default bfloat16 on cuda, else float32")
    args = p.parse_args(argv)
    args.compile, args.plot = False, args.out_dir / "accuracy.png" if args.plot is True else args.plot
    return args


def check(args):
    """What can be refused before a model is loaded."""
    for name, least in (("limit", 1), ("timed", 0), ("max_new_tokens", 1), ("batch_size", 1), ("num_fewshot", 0), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} {value}: wanted at least {least}")
    if args.tasks and args.dataset:
        raise ValueError("--tasks and --dataset: give one of them")
    if args.plot and (args.tasks or args.dataset):
        raise ValueError("--plot draws the sweep over word problems: it goes with neither --tasks nor --dataset")
    for wanted, module, package in ((args.plot, "matplotlib", "matplotlib"), (args.tasks, "lm_eval", "lm-eval")):
        if wanted and importlib.util.find_spec(module) is None:
            raise ValueError(f"{'--plot' if module == 'matplotlib' else '--tasks'} needs the package {package}, which is not installed: pip install {package}")
    if not args.tasks and not args.dataset:
        problems("val", args.limit or 500)                                 # refuses more than there are


def asked(args):
    """The cell that the decoding options name; None if there are none."""
    given = {key: getattr(args, key) for key in ("block_size", "gamma", "hedges", "sampler", "factor", "threshold") if getattr(args, key) is not None}
    if not given and args.mode is None and not args.tasks:
        return None
    mode = args.mode or ("sbd" if given.keys() & {"gamma", "sampler", "factor", "threshold"} else "verified")
    return dict(mode=mode) | (given if mode != "ntp" else {})


def main(argv=None):
    args = parse(argv)
    check(args)
    cell = asked(args)
    args.mode = cell and cell["mode"]
    model, tokenizer = load(args)
    name = Path(args.init_from or model.folder).name
    if args.tasks:
        if args.run_code:
            os.environ["HF_ALLOW_CODE_EVAL"] = "1"                         # the metric's own consent
        return benchmark(args, model, tokenizer, cell if model.config.mask_id is not None or args.mode != "verified" else NTP)
    if args.dataset:
        return likelihood(args, name, model, tokenizer)
    models, cells = {name: (model, tokenizer)}, {name: FULL if args.full else CELLS}
    if cell:
        cells[name] = [NTP] + [cell] * (cell != NTP)
    elif not args.init_from and (shipped := HERE / "checkpoints/tiny-verified").exists():
        verified = Llama.from_pretrained(shipped, args.device, model.lm_head.weight.dtype)
        models[shipped.name] = verified, Tokenizer.from_pretrained(shipped)
        cells[shipped.name] = [NTP, *(c | dict(block_size=32) for c in VERIFIED)]
    cells |= {name: [NTP] for name in models if models[name][0].config.mask_id is None}
    for name, (model, _) in models.items():
        for cell in cells[name]:                                           # refuses what cannot be decoded before anything is
            generate(model, [[0]], max_new_tokens=0, **cell)
    compare(args, models, cells)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        print(f"eval.py: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\neval.py: interrupted; the same command goes on behind the last finished cell", file=sys.stderr)
        sys.exit(130)
