"""A model's own answers to your prompts, as a training set: what an adapter learns to draft.

    python data/answers/prepare.py --init_from=smollm2-135m --prompts my.jsonl --out_dir data/mine

    {"prompt": "..."}                                      continued as it is; with --chat, answered
    {"messages": [{"role": "user", "content": "..."}]}     answered through the chat template

The targets are the answers, each with its stop id where the model ended it. A batch of answers is written to
answers.jsonl at once: after a kill the same command goes on behind the last whole one. Row i of the file
draws with seed + i, whatever --batch_size.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from cli import add_model, add_options, load_model, need, need_between, parser, run

import hashlib
import json
import os
import time

from data.bin import locked, write_set
from data.jsonl.prepare import hold_out, rows as rows_of
from eval import bar
from generate import Options, check_prompts, generate
from hf import write_whole

DRAWN = "max_new_tokens", "temperature", "top_k", "top_p", "seed"   # options of the answers


def check(row):
    """Raises ValueError unless the row is a prompt of one of the two kinds."""
    need(isinstance(row, dict), "not a JSON object")
    good = isinstance(row.get("prompt"), str) and row["prompt"] and "messages" not in row
    turns = row.get("messages")
    chat = isinstance(turns, list) and turns and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in turns) and turns[-1]["role"] == "user"
    need(good or chat and "prompt" not in row, 'wanted either "prompt", a text, or "messages", a list of '
                                               '{"role", "content"} whose last role is "user"')
    for text in [row.get("prompt", ""), *(m["content"] for m in turns or ())]:
        text.encode()   # half a surrogate pair is no text


def prompt_ids(row, tokenizer, chat):
    """The ids that the answer to a row goes on from."""
    if chat or "messages" in row:
        turns = row.get("messages") or [dict(role="user", content=row["prompt"])]
        return tokenizer.apply_chat_template(turns)
    return ([] if tokenizer.bos_id is None else [tokenizer.bos_id]) + tokenizer.encode(row["prompt"])


def kept(path, head):
    """The lines that an earlier run with the same `head` left in answers.jsonl, up to a torn one."""
    if not path.is_file():
        return []
    first, *lines = path.read_bytes().split(b"\n")[:-1] or [b""]
    need(first == json.dumps(head).encode(), f"{path} holds answers of another model, prompts or options: "
                                             "remove it, or give another --out_dir")
    whole = []
    for line in lines:
        try:
            whole.append(json.loads(line))
            whole[-1]["row"], whole[-1]["ids"]
        except (ValueError, KeyError, TypeError):
            return whole[:-1]
    return whole


def answer(model, tokenizer, prompts, path, head, args):
    """Answers to all prompts (ids) that no earlier run left -> {row: ids}; each batch reaches the disk."""
    lines = kept(path, head)
    write_whole(path, lambda aside: aside.write_text("".join(json.dumps(x) + "\n" for x in [head, *lines])))
    answers, B = {line["row"]: line["ids"] for line in lines}, args.batch_size
    began, start, told = time.monotonic(), len(answers), 0
    for batch in batches([len(p) for p in prompts], answers, B):
        options = dict({name: getattr(args, name) for name in DRAWN}, numbers=batch, mode="ntp")
        found = generate(model, [prompts[i] for i in batch], **options)
        answers |= {i: row.tokens for i, row in zip(batch, found)}
        with open(path, "a") as file:
            file.writelines(json.dumps(dict(row=i, text=tokenizer.decode(answers[i]), ids=answers[i])) + "\n"
                            for i in batch)
            file.flush()
            os.fsync(file.fileno())
        told += sum(len(answers[i]) for i in batch)
        seconds, done = time.monotonic() - began, len(answers)
        left = seconds / (done - start) * (len(prompts) - done) / 60                       # minutes
        bar(done / len(prompts), f"{done} answers, {told / seconds:,.0f} tokens/s, {left:.1f} min left", True)
    bar(1.0, "", False)
    return answers


def batches(lengths, done, B):
    """Rows still to do, B a batch: of 16 batches at a time those of similar length together, whose caches
    then hold little padding."""
    open_rows = [i for i in range(len(lengths)) if i not in done]
    for at in range(0, len(open_rows), 16 * B):
        near = sorted(open_rows[at:at + 16 * B], key=lambda i: lengths[i])
        yield from (near[i:i + B] for i in range(0, len(near), B))


def documents(prompts, answers, which):
    """Yields (ids, loss_mask): prompt and answer, the answer is the target."""
    for i, (prompt, wanted) in enumerate(zip(prompts, which)):
        if wanted:
            yield prompt + answers[i], [False] * len(prompt) + [True] * len(answers[i])


def parse(argv=None):
    p = parser(__doc__)
    p.add_argument("--prompts", required=True, nargs="+", type=Path, help=".jsonl files of prompts")
    p.add_argument("--chat", action="store_true", help='wrap each "prompt" into the chat template')
    p.add_argument("--batch_size", type=int, default=32, help="answers decoded at once")
    p.add_argument("--out_dir", type=Path, default=HERE, help="where answers.jsonl and the .bin files go")
    p.add_argument("--val_fraction", type=float, default=0.02, help="share held out; 0: no val")
    add_model(p, "the model that answers")
    add_options(p, Options, DRAWN, seed=0)
    args = p.parse_args(argv)
    need(args.init_from, "no model: give --init_from")
    need_between(args, batch_size=(1, 2**16), val_fraction=(0, 1), max_new_tokens=(1, 2**24),
                 seed=(0, 2**63 - 1))
    Options(**{name: getattr(args, name) for name in DRAWN})
    return args


def main(argv=None):
    args = parse(argv)
    rows = [row for _, row in rows_of(args.prompts, check)]                # reads and checks every row
    held_out = hold_out(len(rows), args.val_fraction, args.seed)
    model, tokenizer = load_model(args)
    prompts = [prompt_ids(row, tokenizer, args.chat) for row in rows]
    check_prompts(model.config, prompts, "ntp", 1)
    digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
    head = dict(init_from=args.init_from, mask_id=model.config.mask_id, prompts=digest,
                **{name: getattr(args, name) for name in DRAWN})
    args.out_dir.mkdir(parents=True, exist_ok=True)
    with locked(args.out_dir):
        answers = answer(model, tokenizer, prompts, args.out_dir / "answers.jsonl", head, args)
    splits = {split: documents(prompts, answers, wanted)
              for split, wanted in (("train", ~held_out), ("val", held_out)) if wanted.any()}
    write_set(args.out_dir, splits, model.config.stop_ids, tokenizer.vocab_size, say=True,
              tokenizer=args.init_from, tokenizer_hash=tokenizer.hash)


if __name__ == "__main__":
    run(main)
