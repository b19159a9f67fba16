"""Multi-step arithmetic word problems with worked solutions, and their grader.

    python data/word_problems/prepare.py

A question varies in names, things, places, wording and numbers; its solution is a function of the
question: it restates every fact in order and shows the arithmetic. Much of that text follows from
what stands before it, which is what decoding many tokens a forward lives on:

    Mia has 14 apples. She buys 9 more and then gives 5 to Tom. How many apples does Mia have now?
    Mia has 14 apples.
    Mia buys 9 more apples: 14 + 9 = 23 apples.
    Mia gives 5 apples to Tom: 23 - 5 = 18 apples.
    The answer is 18.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from cli import need, need_between, need_package, parser, run

import json
import random
import re
from dataclasses import dataclass

from data.bin import write_set
from tokenizer import ALPHABET, Tokenizer

SEED, SIZES = 1234, {"train": 200_000, "val": 2_000}
EOS, MASK = "<|endoftext|>", "<|mask|>"
MAX_VALUE = 120

PEOPLE = {"Mia": "She", "Ana": "She", "Eva": "She", "Lea": "She", "Zoe": "She", "Ida": "She",
          "Tom": "He", "Ben": "He", "Max": "He", "Leo": "He", "Sam": "He", "Jon": "He"}
PLACES = ["park", "school", "market", "station", "lake"]

# One row a kind of problem. who: in the question, in the solution. {a} who, {u} the things counted, {n} a
# number, {b} somebody else, {p} a place; {x} is " {u}" in the solution and empty or " {u}" in the question.
THEMES = [
    dict(who=None, things=["apples", "pens", "cards", "coins", "shells", "nuts"], groups=["bags", "boxes"],
         up=["buys {n} more{x}", "finds {n} more{x} at the {p}", "gets {n} more{x} from {b}"],
         down=["gives {n}{x} to {b}", "loses {n}{x} at the {p}", "sells {n}{x}"],
         share=("shares them equally among {n} friends", "each friend get", "Each of the {n} friends gets")),
    dict(who=None, things=["dollars"], groups=["jars"],
         up=["earns {n} more{x}", "gets {n} more{x} from {b}"],
         down=["spends {n}{x} at the {p}", "gives {n}{x} to {b}", "spends {n}{x} on a book"],
         share=("shares them equally among {n} friends", "each friend get", "Each of the {n} friends gets")),
    dict(who=("A baker", "The baker"), things=["rolls", "cakes", "pies"], groups=["trays", "boxes"],
         up=["bakes {n} more{x}", "makes {n} more{x}"],
         down=["sells {n}{x}", "gives {n}{x} to the {p}", "sells {n}{x} to {b}"],
         share=("packs them equally into {n} boxes", "each box hold", "Each of the {n} boxes holds")),
    dict(who=("A farmer", "The farmer"), things=["hens", "ducks", "eggs"], groups=["barns", "nests"],
         up=["buys {n} more{x}", "gets {n} more{x} from {b}"],
         down=["sells {n}{x} at the {p}", "gives {n}{x} to {b}"],
         share=("puts them equally into {n} barns", "each barn hold", "Each of the {n} barns holds")),
    dict(who=("A library", "The library"), things=["books", "maps"], groups=["rooms", "boxes"],
         up=["buys {n} more{x}", "gets {n} more{x} from {b}"],
         down=["lends {n}{x} to {b}", "gives {n}{x} to the {p}"],
         share=("puts them equally on {n} shelves", "each shelf hold", "Each of the {n} shelves holds")),
    dict(who=("A bus", "The bus"), things=["people", "children"], groups=["rows"],
         up=["takes in {n} more{x} at the {p}", "takes in {n} more{x}"],
         down=["lets out {n}{x} at the {p}", "lets out {n}{x}"], share=None),
]
AGAIN = "gets as many{x} again"                                  # doubling, in every theme


@dataclass(frozen=True)
class Problem:
    prompt: str                       # the question and a newline
    solution: str                     # without the stop token
    answer: int


def change(rng, value, operands):
    """One step from a value: (kind, operand, sign, new value), all values in 2 .. MAX_VALUE."""
    while True:
        kind, n = rng.choice(["up", "up", "up", "down", "down", "down", "again"]), rng.randint(2, operands)
        sign, n, new = {"up": ("+", n, value + n), "down": ("-", n, value - n),
                        "again": ("*", 2, value * 2)}[kind]
        if 2 <= new <= MAX_VALUE:
            return kind, n, sign, new


def story(rng, steps):
    """One quantity that grows, shrinks, doubles and may be shared in the end."""
    theme = rng.choice(THEMES)
    a = rng.choice(list(PEOPLE))
    asked, told = theme["who"] or (a, a)
    pronoun = PEOPLE[a] if theme["who"] is None else "It" if told in ("The bus", "The library") else "He"
    u = rng.choice(theme["things"])
    share = theme["share"] if rng.random() < 0.25 else None
    if rng.random() < 0.4:                                       # it starts with a multiplication
        m, n, group = rng.randint(2, 9), rng.randint(2, 9), rng.choice(theme["groups"])
        value, steps = m * n, steps - 1
        each = f"{n} {u} in each of {m} {group}"
        question, lines = [f"{asked} has {each}."], [f"{told} has {each}: {n} * {m} = {value} {u}."]
    else:
        value = rng.randint(5, 60)
        question, lines = [f"{asked} has {value} {u}."], [f"{told} has {value} {u}."]
    clauses = []
    for _ in range(steps - bool(share)):
        kind, n, sign, new = change(rng, value, 20)
        words = dict(n=n, b=rng.choice([b for b in PEOPLE if b != a]), p=rng.choice(PLACES))
        clause = AGAIN if kind == "again" else rng.choice(theme[kind])
        clauses.append(clause.format(x=rng.choice(["", "", f" {u}"]), **words))
        lines.append(f"{told} {clause.format(x=f' {u}', **words)}: {value} {sign} {n} = {new} {u}.")
        value = new
    if share:
        friends = [d for d in range(2, 10) if value % d == 0 and 2 <= value // d <= 20]
        if not friends:
            return story(rng, steps)
        n = rng.choice(friends)
        clauses.append(share[0].format(n=n))
        lines.append(f"{share[2].format(n=n)} {value} / {n} = {value // n} {u}.")
        value //= n
    while clauses:                                               # one or two clauses a sentence
        opening = rng.choice([pronoun, pronoun, f"Then {pronoun.lower()}", f"After that, {pronoun.lower()}"])
        if len(clauses) > 1 and rng.random() < 0.5:
            question.append(f"{opening} {clauses.pop(0)} and{rng.choice(['', ' then'])} {clauses.pop(0)}.")
        else:
            question.append(f"{opening} {clauses.pop(0)}.")
    question.append(f"How many {u} does {share[1]}?" if share else
                    f"How many {u} does {told[0].lower() + told[1:] if theme['who'] else told} have "
                    f"{rng.choice(['now', 'in the end'])}?")
    return question, lines, value


def comparison(rng, steps):
    """People who have more, fewer or twice as many things as the one before, perhaps added up in the end."""
    together = rng.random() < 0.5
    names = rng.sample(list(PEOPLE), steps - together + 1)
    u, value = rng.choice(THEMES[0]["things"]), rng.randint(5, 30)
    question, lines = [f"{names[0]} has {value} {u}."], [f"{names[0]} has {value} {u}."]
    for before, name in zip(names, names[1:]):
        old = value
        kind, n, sign, value = change(rng, old, 12)
        how = {"up": f"{n} more{{x}} than", "down": f"{n} fewer{{x}} than",
               "again": "twice as many{x} as"}[kind]
        clause = f"{name} has {how} {before}"
        question.append(clause.format(x=rng.choice(["", f" {u}"])) + ".")
        lines.append(f"{clause.format(x=f' {u}')}: {old} {sign} {n} = {value} {u}.")
    if together:
        if old + value > MAX_VALUE:
            return comparison(rng, steps)
        pair = f"{names[-2]} and {names[-1]} have"
        question.append(f"How many {u} do {pair} together?")
        lines.append(f"{pair} {old} + {value} = {old + value} {u}.")
        value += old
    else:
        question.append(f"How many {u} does {names[-1]} have?")
    return question, lines, value


def problem(rng):
    """A problem of 2 to 4 steps of arithmetic."""
    kind = comparison if rng.random() < 0.15 else story
    question, lines, answer = kind(rng, rng.randint(2, 4))
    return Problem(" ".join(question) + "\n", "\n".join(lines) + f"\nThe answer is {answer}.", answer)


def problems(split="val", n=None):
    """The first n (default: all) problems of a split, always the same; no question is in both splits."""
    n = SIZES[split] if n is None else n
    need(split != "val" or n <= SIZES["val"], f"{n} held-out problems: there are {SIZES['val']}")
    held_out = {p.prompt for p in problems("val")} if split == "train" else ()
    rng, found = random.Random(f"{SEED} {split}"), {}
    while len(found) < n:
        p = problem(rng)
        if p.prompt not in held_out:
            found.setdefault(p.prompt, p)
    return list(found.values())


def grade(problem, text):
    """True if the number behind "The answer is" in a generated text is the problem's answer."""
    found = re.search(r"The answer is (-?[0-9][0-9,]*(?:\.[0-9]+)?)", text)
    return found is not None and float(found[1].replace(",", "")) == problem.answer


# -------------------------------------------------------------------------------------- tokenizer

# GPT-4's splitting with single digits: a word takes the space before it, a digit never does.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
           r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(dir, vocab_size=512):
    """Trains a byte-level BPE on the first 20,000 training problems; writes the two Hugging Face files."""
    import rustbpe
    bpe = rustbpe.Tokenizer()
    texts = (p.prompt + p.solution for p in problems("train", 20_000))
    bpe.train_from_iterator(texts, vocab_size - 2, pattern=PATTERN)
    ranks = {bytes(token): rank
             for token, rank in sorted(bpe.get_mergeable_ranks(), key=lambda item: item[1])}
    name = {byte: character for character, byte in ALPHABET.items()}
    show = lambda token: "".join(name[b] for b in token)
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:                       # merge it with the ranks below its own: two parts remain
            pairs = [ranks.get(x + y, rank) for x, y in zip(parts, parts[1:])]
            i = pairs.index(min(pairs))
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        if len(parts) == 2:
            merges.append([show(part) for part in parts])
    special = [dict(id=len(ranks) + i, content=content, single_word=False, lstrip=False, rstrip=False,
                    normalized=False, special=True) for i, content in enumerate([EOS, MASK])]
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern={"Regex": PATTERN}, behavior="Isolated", invert=False)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None,
                 end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, ignore_merges=False,
                 vocab={show(token): rank for token, rank in ranks.items()}, merges=merges)
    tokenizer = dict(version="1.0", truncation=None, padding=None, added_tokens=special, normalizer=None,
                     pre_tokenizer=dict(type="Sequence", pretokenizers=[split, byte_level]),
                     post_processor=None, decoder=byte_level, model=model)
    config = dict(tokenizer_class="PreTrainedTokenizerFast", eos_token=EOS, mask_token=MASK,
                  clean_up_tokenization_spaces=False, model_max_length=1 << 20)
    for file, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (dir / file).write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------ the data set

def documents(problems, tokenizer, loss_on_prompt, chunk=10_000):
    """Yields (ids, loss_mask): prompt, solution, stop token."""
    for i in range(0, len(problems), chunk):
        part = problems[i:i + chunk]
        for prompt, solution in zip(tokenizer.encode_batch([p.prompt for p in part]),
                                    tokenizer.encode_batch([p.solution for p in part])):
            yield (prompt + solution + [tokenizer.eos_id],
                   [loss_on_prompt] * len(prompt) + [True] * (len(solution) + 1))


def main(argv=None):
    p = parser("Arithmetic word problems with worked solutions.")
    p.add_argument("--out_dir", type=Path, default=HERE, help="where the .bin files go")
    p.add_argument("--num_train", type=int, default=SIZES["train"], help="training problems")
    p.add_argument("--num_val", type=int, default=SIZES["val"], help="held-out problems")
    p.add_argument("--loss_on_prompt", action="store_true", help="make the question a target too")
    p.add_argument("--train_tokenizer", action="store_true",
                   help="train tokenizer.json again first (always the same file; needs rustbpe)")
    args = p.parse_args(argv)
    need_between(args, num_train=(1, 10 * SIZES["train"]), num_val=(1, SIZES["val"]))
    need_package(args.train_tokenizer, "--train_tokenizer", "rustbpe", "rustbpe")
    if args.train_tokenizer:
        train_tokenizer(HERE)
    tokenizer = Tokenizer.from_pretrained(HERE)
    splits = {split: documents(problems(split, n), tokenizer, args.loss_on_prompt)
              for split, n in [("train", args.num_train), ("val", args.num_val)]}
    write_set(args.out_dir, splits, [tokenizer.eos_id], tokenizer.vocab_size, say=True,
              tokenizer=str(HERE), tokenizer_hash=tokenizer.hash)


if __name__ == "__main__":
    run(main)
