"""Prompts for data/answers/prepare.py, none of them of a benchmark: what small models are asked to do.

    python data/answers/prompts.py --out my.jsonl --num 12000

Code: the heads of the standard library's functions, with their docstrings, and functions described by our own
templates, with examples that were computed. Questions: word problems and our own templates, as chats; with
`pip install reasoning-gym` its tasks too. The same seed and Python give the same file.
"""
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent))
from cli import check_file, need_between, parser, run

import ast
import importlib.util
import json
import random
import sysconfig
import textwrap

from data.stdlib.prepare import sources
from data.word_problems.prepare import problems
from hf import write_whole

LONGEST = 1200   # characters of a prompt


def heads(texts):
    """Every documented function of these sources, cut behind its docstring, and any other in its middle."""
    for text in texts:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= 3:
                documented = ast.get_docstring(node) is not None
                end = node.body[0].end_lineno if documented else (node.lineno + node.end_lineno) // 2
                head = textwrap.dedent("\n".join(lines[node.lineno - 1:end])) + "\n"
                if 40 < len(head) < LONGEST:
                    yield head


# Functions described in our own words: (name, arguments, what it does, how to compute an example).
NUMBERS, WORDS = "numbers: List[int]", "words: List[str]"
FUNCTIONS = [
    ("largest_gap", NUMBERS, "the largest difference between two neighbours", lambda x: max(
        abs(a - b) for a, b in zip(x, x[1:]))),
    ("running_total", NUMBERS, "the sums of all prefixes of the list", lambda x: [
        sum(x[:i + 1]) for i in range(len(x))]),
    ("every_other", NUMBERS, "the elements at even indices", lambda x: x[::2]),
    ("count_above", NUMBERS, "how many numbers are larger than the mean", lambda x: sum(
        a > sum(x) / len(x) for a in x)),
    ("second_smallest", NUMBERS, "the second smallest different number", lambda x: sorted(set(x))[1]),
    ("alternate_sum", NUMBERS, "the sum with alternating signs, starting with plus", lambda x: sum(
        a * (-1) ** i for i, a in enumerate(x))),
    ("squares_of_odd", NUMBERS, "the squares of the odd numbers, in order", lambda x: [
        a * a for a in x if a % 2]),
    ("last_digits", NUMBERS, "the last digit of each number", lambda x: [a % 10 for a in x]),
    ("clip_to_ten", NUMBERS, "the list with every number above 10 replaced by 10", lambda x: [
        min(a, 10) for a in x]),
    ("is_increasing", NUMBERS, "True if each number is larger than the one before it", lambda x: all(
        a < b for a, b in zip(x, x[1:]))),
    ("most_common", NUMBERS, "the number that occurs most often, the smallest of several", lambda x: min(
        set(x), key=lambda a: (-x.count(a), a))),
    ("rotate_left", NUMBERS, "the list moved one place to the left, the first number at the end",
     lambda x: x[1:] + x[:1]),
    ("product_of_ends", NUMBERS, "the product of the first and the last number", lambda x: x[0] * x[-1]),
    ("divisible_by_three", NUMBERS, "the numbers that 3 divides", lambda x: [a for a in x if a % 3 == 0]),
    ("longest_word", WORDS, "the longest word, the first of several", lambda x: max(x, key=len)),
    ("initials", WORDS, "the first letters as one upper case string", lambda x: "".join(
        w[0] for w in x).upper()),
    ("word_lengths", WORDS, "a dictionary from each word to its length", lambda x: {w: len(w) for w in x}),
    ("reverse_each", WORDS, "the list with each word reversed", lambda x: [w[::-1] for w in x]),
    ("join_sorted", WORDS, "the words in alphabetical order, joined by commas", lambda x: ",".join(
        sorted(x))),
    ("count_vowels", WORDS, "how many vowels the words have together", lambda x: sum(
        c in "aeiou" for w in x for c in w)),
    ("short_words", WORDS, "the words of at most four letters", lambda x: [w for w in x if len(w) <= 4]),
    ("repeat_first", WORDS, "each word with its first letter doubled", lambda x: [w[0] + w for w in x]),
    ("ends_with_vowel", WORDS, "the words whose last letter is a vowel", lambda x: [
        w for w in x if w[-1] in "aeiou"]),
    ("unique_letters", WORDS, "all different letters of the words, sorted", lambda x: sorted(
        set("".join(x)))),
]
SAY = ("Return {}.", "Compute {}.", "Given a list, return {}.", "Write a function that returns {}.",
       "Find {}.")
NOUNS = ("river apple stone cloud table garden music window paper silver orange bridge winter candle "
         "tiger").split()


def described(rng):
    """A function's head with a docstring and one to three examples."""
    name, argument, what, f = rng.choice(FUNCTIONS)
    examples = []
    for _ in range(rng.randint(1, 3)):
        x = rng.sample(NOUNS, rng.randint(2, 4)) if argument == WORDS else \
            [rng.randint(0, 30) for _ in range(rng.randint(3, 6))]
        x = x if len(set(x)) > 1 else [1, 2, 3]
        examples += [f"    >>> {name}({x!r})", f"    {f(x)!r}"]
    quote = rng.choice(('"""', "'''"))
    say = rng.choice(SAY).format(what)
    head = [f"def {name}({argument}):", f"    {quote} {say}", *examples, f"    {quote}"]
    return "\n".join(["from typing import List", "", ""] * rng.randint(0, 1) + head) + "\n"


ASK = ("Explain {} to a child.", "Give me three tips about {}.", "What is {}?",
       "Write a short paragraph about {}.", "List the advantages and disadvantages of {}.",
       "How does {} work?", "Write a polite email about {}.", "Compare {} with {}.",
       "Write a short story about {}.", "Why do people care about {}?", "Describe {} in one sentence.",
       "What should a beginner know about {}?", "Summarize the history of {}.")
TOPICS = ("bread baking,the water cycle,bicycle repair,solar power,libraries,chess openings,sleep,honey bees,"
          "volcanoes,public transport,learning a language,photosynthesis,budget planning,the moon,"
          "earthquakes,running shoes,tea,old maps,computer networks,vaccines,gardening,glaciers,time zones,"
          "recycling,poetry,city parks,magnets,good meetings,penguins,batteries,rainbows,fractions,"
          "board games,working at night,Python lists,recursion,unit tests,databases,spreadsheets,"
          "text editors").split(",")


def question(rng):
    """A chat prompt of our own."""
    if rng.random() < 0.3:
        name, argument, what, _ = rng.choice(FUNCTIONS)
        kind = "numbers" if argument == NUMBERS else "words"
        return f"Write a Python function `{name}` that takes a list of {kind} and returns {what}."
    return rng.choice(ASK).format(*rng.sample(TOPICS, 2))


def puzzle(rng):
    """A task of reasoning-gym."""
    import reasoning_gym
    name = rng.choice(("basic_arithmetic", "chain_sum", "gsm_symbolic", "leg_counting", "letter_counting",
                       "lcm", "number_sorting", "spell_backward", "syllogism", "word_sorting",
                       "calendar_arithmetic"))
    return reasoning_gym.create_dataset(name, size=1, seed=rng.randrange(2**31))[0]["question"]


def main(argv=None):
    p = parser(__doc__)
    p.add_argument("--out", type=Path, required=True, help="the .jsonl file to write")
    p.add_argument("--num", type=int, default=12000, help="prompts; four of ten are chats")
    p.add_argument("--seed", type=int, default=0, help="of the choice")
    args = p.parse_args(argv)
    need_between(args, num=(1, 10**7), seed=(0, 2**63 - 1))
    check_file("--out", args.out, (".jsonl",))
    rng = random.Random(args.seed)
    code = sorted(set(heads(sources(Path(sysconfig.get_paths()["stdlib"])).values())))
    rng.shuffle(code)
    words = [p.prompt.rstrip() for p in problems("train", 2000)]
    gym = importlib.util.find_spec("reasoning_gym") is not None
    kinds = [question, lambda rng: rng.choice(words)] + [puzzle] * gym
    rows = {}   # each different prompt once
    for i in range(args.num):
        if i % 10 < 4:
            row = dict(messages=[dict(role="user", content=rng.choice(kinds)(rng))])
        else:
            row = dict(prompt=code.pop() if code and i % 10 < 9 else described(rng))
        rows[json.dumps(row, ensure_ascii=False)] = None
    write_whole(args.out, lambda path: path.write_text("\n".join(rows) + "\n", encoding="utf-8"))
    print(f"{args.out}: {len(rows)} different prompts")


if __name__ == "__main__":
    run(main)
