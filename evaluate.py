"""Accuracy against forwards (Fig. 1, Fig. 5, Table 1): every decoding mode on the same held-out problems.

    python evaluate.py

NFE speedup is tokens / forwards, over all problems together.
"""
import sys
import time
from pathlib import Path

from generate import decode

HERE = Path(__file__).parent
NTP = dict(mode="ntp")
GAMMAS = (0, 0.01, 0.1, 0.35, 0.6, 1.5)
CELLS = [NTP, *(dict(mode="verified", block_size=16, hedges=h) for h in (1, 2, 4)),
         *(dict(mode="sbd", block_size=k, gamma=g) for k in (8, 16) for g in GAMMAS)]


def sweep(model, tokenizer, problems, cells, batch_size=64, max_new_tokens=256, progress=lambda text: None):
    """Decode every problem once a cell, a cell being options of generate() -> one dict a cell:

    cell; accuracy; tokens and nfe, both summed; speedup = tokens / nfe; window, verified only: mean tokens of a forward;
    and by problem: outputs (token ids), nfes, right.
    """
    bos = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    prompts = [bos + tokenizer.encode(p.prompt) for p in problems]
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))    # rows of a batch end at about the same time
    results = []
    for cell in cells:
        rows, widths = {}, []
        for begin in range(0, len(order), batch_size):
            part = order[begin:begin + batch_size]
            progress(f"{label(cell)}: {begin} of {len(order)} problems")
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


def grade(problem, text):
    from data.word_problems import prepare
    return prepare.grade(problem, text)


def label(cell):
    """A cell in words: "sbd k=16 gamma=0.1"."""
    short = dict(block_size="k", hedges="h")
    return " ".join([cell["mode"], *(f"{short.get(key, key)}={value}" for key, value in cell.items() if key != "mode")])


def table(results) -> str:
    """The results as a Markdown table; "as NTP" is the share of outputs identical to NTP's, where it is among them."""
    ntp = next((r for r in results if r["cell"]["mode"] == "ntp"), None)
    lines = ["| decoding | accuracy | mean NFE | NFE speedup | as NTP |", "| --- | ---: | ---: | ---: | ---: |"]
    for r in results:
        n = len(r["right"])
        same = f"{sum(a == b for a, b in zip(r['outputs'], ntp['outputs'])) / n:.1%}" if ntp else "-"
        lines.append(f"| {label(r['cell'])} | {r['accuracy']:.1%} | {r['nfe'] / n:.1f} | {r['speedup']:.2f} | {same} |")
    return "\n".join(lines)


def main():
    from data.word_problems.prepare import problems
    from model import Llama
    from tokenizer import Tokenizer
    import torch
    folder = sys.argv[1] if len(sys.argv) > 1 else HERE / "checkpoints/tiny-sbd"
    model = Llama.from_pretrained(folder, dtype=torch.float32)
    began = time.time()
    results = sweep(model, Tokenizer.from_pretrained(model.folder), problems("val", int(sys.argv[2]) if len(sys.argv) > 2 else 500), CELLS,
                    progress=lambda text: print(text, file=sys.stderr))
    print(table(results))
    print(f"{time.time() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
