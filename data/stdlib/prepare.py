"""The Python standard library's sources on this machine: real text for pretraining, without a download.

    python data/stdlib/prepare.py --tokenizer FOLDER_OR_HUB_ID

One document a file, ending in the tokenizer's EOS, everything but a leading BOS a target. A file's own
hash decides whether it is held out, so the same file lands in the same split on every machine.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from cli import need, parser, run

import hashlib
import sysconfig

from data.bin import write_set
from tokenizer import Tokenizer


def sources(root, with_tests=False):
    """{path: text} of the library's .py files in the order of their paths, each different text once."""
    skip = {"site-packages", "dist-packages"} | (set() if with_tests else {"test", "tests", "idle_test"})
    out, seen = {}, set()
    for path in sorted(root.rglob("*.py")):
        if skip & set(path.relative_to(root).parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):         # a few files show off other encodings
            continue
        if text.strip() and text not in seen:
            seen.add(text)
            out[path] = text
    return out


def is_held_out(text, val_fraction):
    """True for val_fraction of all texts, decided by the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < val_fraction * 2 ** 64


def documents(texts, tokenizer):
    """Yields (ids, loss_mask): BOS where the tokenizer has one, the text, EOS."""
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for text in texts:
        ids = tokenizer.encode(text) + [tokenizer.eos_id]
        yield bos + ids, [False] * len(bos) + [True] * len(ids)


def main(argv=None):
    p = parser("The Python standard library as pretraining text.")
    p.add_argument("--tokenizer", default=str(HERE.parent / "word_problems"),
                   help="folder, hub id or preset: that of the model to train (the default is small)")
    p.add_argument("--out_dir", type=Path, default=HERE, help="where the .bin files go")
    p.add_argument("--val_fraction", type=float, default=0.05, help="share of the files held out")
    p.add_argument("--tests", action="store_true", help="the library's own tests too")
    args = p.parse_args(argv)
    need(0 < args.val_fraction < 1, f"--val_fraction {args.val_fraction}: wanted a share between 0 and 1")
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = list(sources(root, args.tests).values())
    need(texts, f"no .py files in {root}: this Python carries its library in another form")
    tokenizer = Tokenizer.from_pretrained(args.tokenizer)
    need(tokenizer.eos_id is not None, f"the tokenizer of {args.tokenizer} has no EOS to end a file with")
    splits = {split: documents([t for t in texts if is_held_out(t, args.val_fraction) == held_out], tokenizer)
              for split, held_out in [("train", False), ("val", True)]}
    write_set(args.out_dir, splits, [tokenizer.eos_id], tokenizer.vocab_size, say=True,
              tokenizer=args.tokenizer, tokenizer_hash=tokenizer.hash)


if __name__ == "__main__":
    run(main)
