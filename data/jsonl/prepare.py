"""Your own .jsonl files, one JSON object a line, as a training set for any checkpoint's tokenizer.

    python data/jsonl/prepare.py my.jsonl --tokenizer FOLDER_OR_HUB_ID --out_dir data/mine

    {"text": "..."}                            targets: all of it
    {"prompt": "...", "completion": "..."}     targets: the completion
    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
                                               targets: the assistant's turns, each with its end of turn

Every document ends in its stop token, which is a target: EOS, or for messages the chat template's end of
turn (what follows the last assistant turn is dropped). A BOS, where the tokenizer has one, is no target.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from cli import need, need_between, parser, run

import gzip
import json

import numpy as np

from data.bin import write_set
from tokenizer import Tokenizer


def check(row):
    """Raises ValueError unless the row is one of the three kinds."""
    need(isinstance(row, dict), "not a JSON object")
    parts, keys = [row], [key for key in ("text", "prompt", "completion", "messages") if key in row]
    need(keys in (["text"], ["prompt", "completion"], ["messages"]),
         'wanted either "text", or "prompt" and "completion", or "messages"')
    if keys == ["messages"]:
        parts, keys = row["messages"], ["role", "content"]
        need(isinstance(parts, list) and all(isinstance(part, dict) for part in parts),
             '"messages" must be a list of objects with "role" and "content"')
        need("assistant" in [part.get("role") for part in parts],
             'no message of the role "assistant": nothing to learn')
    for part in parts:
        for key in keys:
            may_be_empty = key == "prompt" or key == "content" and part.get("role") != "assistant"
            need(isinstance(part.get(key), str) and (part[key] or may_be_empty),
                 f'"{key}" must be a string{"" if may_be_empty else " that is not empty"}')
            part[key].encode()                        # half a surrogate pair is no text


def rows(files, check=check):
    """Yields (where, row) for every line that is not blank; raises ValueError naming file and line."""
    for path in files:
        need(path.is_file(), f"{path} is no file: give .jsonl files")
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                        check(row)
                    except (ValueError, RecursionError) as error:
                        raise ValueError(f"{path}:{number}: {error}") from None
                    yield f"{path}:{number}", row


def encode_chat(messages, tokenizer):
    """[(ids, loss_mask), ...]: one document, or one a reply where the template rewrites what came before
    it."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[:turns[-1] + 1]
    try:
        out = [tokenizer.encode_chat(messages)]
    except ValueError:                                # Qwen-3 drops earlier thoughts, for one
        out = [tokenizer.encode_chat(messages[:i + 1], last_only=True) for i in turns]
    for n, (ids, mask) in enumerate(out):
        end = max(i for i, is_target in enumerate(mask) if is_target) + 1
        need(ids[end - 1] in tokenizer.special_ids.values(),
             "the chat template ends an assistant turn without a special token")
        out[n] = ids[:end], mask[:end]                # a newline behind the end of turn is never generated
    return out


def encode(row, tokenizer):
    """The documents of a row, [(ids, loss_mask), ...]."""
    if "messages" in row:
        return encode_chat(row["messages"], tokenizer)        # a template writes its BOS itself
    need(tokenizer.eos_id is not None, "this tokenizer has no EOS to end a text with")
    bos = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = bos + tokenizer.encode(row.get("prompt", ""))
    target = tokenizer.encode(row.get("completion", row.get("text"))) + [tokenizer.eos_id]
    return [(prompt + target, [False] * len(prompt) + [True] * len(target))]


def documents(files, tokenizer, wanted):
    """Yields the (ids, loss_mask) of the rows i with wanted[i]."""
    for (where, row), want in zip(rows(files), wanted):
        if want:
            try:
                yield from encode(row, tokenizer)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None


def hold_out(num_rows, val_fraction, seed):
    """Which rows are held out, bool (num_rows,); ValueError where none would be left to train on."""
    num_val = max(1, round(val_fraction * num_rows)) if val_fraction else 0
    need(num_val < num_rows, f"{num_rows} rows: too few, --val_fraction holds out {num_val} of them")
    return np.random.default_rng(seed).permutation(num_rows) < num_val


def main(argv=None):
    p = parser("Your own .jsonl files as a training set.")
    p.add_argument("files", nargs="+", type=Path, help=".jsonl files")
    p.add_argument("--tokenizer", required=True, help="folder, hub id or preset: that of the model to train")
    p.add_argument("--out_dir", type=Path, default=HERE, help="where the .bin files go")
    p.add_argument("--val_fraction", type=float, default=0.05, help="share of the rows held out; 0: no val")
    p.add_argument("--seed", type=int, default=0, help="decides which rows are held out")
    args = p.parse_args(argv)
    need_between(args, val_fraction=(0, 1), seed=(0, 2**63 - 1))
    is_chat = ["messages" in row for _, row in rows(args.files)]             # reads and checks every row
    held_out = hold_out(len(is_chat), args.val_fraction, args.seed)
    tokenizer = Tokenizer.from_pretrained(args.tokenizer)
    stop_ids = {tokenizer.eos_id} - {None}
    if any(is_chat):                                                         # the template's end of turn
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        stop_ids.add(encode_chat(probe, tokenizer)[0][0][-1])
    splits = {split: documents(args.files, tokenizer, wanted)
              for split, wanted in (("train", ~held_out), ("val", held_out)) if wanted.any()}
    write_set(args.out_dir, splits, stop_ids, tokenizer.vocab_size, say=True,
              tokenizer=args.tokenizer, tokenizer_hash=tokenizer.hash)


if __name__ == "__main__":
    run(main)
