"""The published byte-level BPE vocabularies, encoded by tiktoken.

A checkpoint ships its vocabulary as Meta's `tokenizer.model` (Llama 3: one base64 token and its rank a line)
or as Hugging Face's `tokenizer.json` (Llama 3.x, Qwen-3, SmolLM2, our own). Both become one
`tiktoken.Encoding` that gives the ids the checkpoint was trained on. tiktoken merges by the rank of the
merged token, tokenizer.json by the order of its merges, and its ids need not be in that order: our ranks are
therefore places in the list of merges, and `ids` maps them to token ids.

Known differences, all in text no model has seen: NFC uses Python's Unicode tables, `tokenizers` older ones
(marks newer than Unicode 9 are reordered differently); characters newer than Unicode 16 may be digits there
and not here.
"""

import base64
import codecs
import functools
import hashlib
import json
import os
import re
import shutil
import time
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import regex
import tiktoken

from adapter import base_of
from chat_template import Template
from hf import TOKENIZER_FILES, find_folder

WANTED = ("wanted a byte-level BPE tokenizer.json or Llama 3's tokenizer.model; "
          "use a Llama-3, Qwen-3 or SmolLM2 folder")
MOST_IDS, LONGEST = 2**22, 1024   # ids of a vocabulary; characters of a token
MOST_WORK = 2 * 10**7             # sum of squared lengths of tokens for which that is the price
SECONDS = 10.0                    # that an unknown pattern may take for a text, and a second more per 100,000

# tokenizer.json writes bytes as printable characters: themselves where printable, else the next from U+0100.
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
CONTROL = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(CONTROL)}   # -> byte

# Llama 3.1's special tokens from 128000 on; those between and behind are reserved_special_token_0, 1 ...
SPECIAL = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",
           7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
# Single digits cut out first, then GPT2 on what lies between: white space before a digit ends its piece.
DIGIT_GPT2 = r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"

# tiktoken's regex engine backtracks on a stack of fixed depth: a million blanks in a row overflow it.
LONG_BLANK = re.compile(r"(?<!\s)\s{100000}")
PLACEHOLDER = 0x100000  # private-use plane 16
# What `tokenizers` takes for white space and for a part of a word: Unicode's definitions, not Python's.
BLANK = {c for c in map(chr, range(0x3001)) if c.isspace()} - set("\x1c\x1d\x1e\x1f")
WORD = regex.compile(r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}]")
# How an added token is found in text, where it is not simply by its name. The last: in normalized text.
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


class TokenizerError(ValueError):
    """A tokenizer that cannot be used, said in one line."""


def need(good, message):
    """TokenizerError unless `good`."""
    if not good:
        raise TokenizerError(message)


# ----------------------------------------------------------------------------- merges -> ranks

def boundary_holds(left, right, number, halves, merge_rank):
    """Whether BPE on the text of `left + right` arrives at these two tokens: no merge across their boundary
    comes first. Undoes the two from the newest merge back, looking at the pair that faced the boundary."""
    while left in halves or right in halves:
        if number[left] > number[right]:
            limit, left = number[left], halves[left][1]
        else:  # a tie is the same token twice: the left one was merged first, the right one is undone first
            limit, right = number[right] + 1, halves[right][0]
        if merge_rank.get((left, right), limit) < limit:
            return False
    return True


def merge_alone(token, merge_rank):
    """BPE, spelled out: the tokens that `token`'s own characters merge into, and the last pair merged."""
    parts, last = list(token), None
    while pairs := [(merge_rank[p], i) for i, p in enumerate(zip(parts, parts[1:])) if p in merge_rank]:
        i = min(pairs)[1]
        last = (parts[i], parts[i + 1])
        parts[i:i + 2] = ["".join(last)]
    return parts, last


def merges_to_ranks(vocab, merges, ignore_merges):
    """tokenizer.json's vocab (token -> id) and merges (list of pairs) -> {token: rank}.

    tiktoken merges any two neighbours whose union is a token, tokenizer.json only listed pairs. Both do the
    same if every token has the rank of the one merge that makes it from its own text, and if tokens that no
    merge makes are left out. With `ignore_merges` a piece that is such a token is still found whole, so these
    go last.
    """
    merge_rank = {pair: 256 + i for i, pair in enumerate(merges)}
    number, halves = dict(ALPHABET), {}  # token -> rank; token -> the two tokens it is merged from
    for pair, rank in merge_rank.items():
        left, right = pair
        token = left + right
        if (token in vocab and token not in number and left in number and right in number
                and boundary_holds(left, right, number, halves, merge_rank)):
            number[token], halves[token] = rank, pair
    rest = [token for token in vocab if token not in number and ALPHABET.keys() >= set(token)]
    check_work(rest, "tokens that no merge makes")
    for next_rank, token in enumerate(rest, 256 + len(merges)):  # made before their parts, or by no merge
        parts, last = merge_alone(token, merge_rank)
        if parts == [token]:
            number[token] = merge_rank[last]
        elif ignore_merges:
            # Two parts tiktoken would join inside longer words as well.
            need(len(parts) > 2, f"has ignore_merges and {token!r}, which no merge makes")
            number[token] = next_rank
    return number


# ----------------------------------------------------------------------------- pre-tokenizer -> patterns

def steps(part, name):
    """What a normalizer, pre_tokenizer or post_processor does: a Sequence, one step, or nothing (null)."""
    part = part or {"type": "Sequence", name: []}
    return part[name] if part.get("type") == "Sequence" else [part]


def split_patterns(pre_tokenizer):
    """tokenizer.json's pre_tokenizer -> list of regexes, applied one after the other; a piece is a match."""
    *splits, last = steps(pre_tokenizer, "pretokenizers") or [{"type": "nothing"}]
    blank = " with add_prefix_space" if last.get("add_prefix_space") else ""
    need(last["type"] == "ByteLevel" and not blank, f"has a pre-tokenizer that ends in {last['type']}{blank}")
    patterns = []
    for step in splits:
        kind, behavior, pattern = step["type"], step.get("behavior"), step.get("pattern", {})
        source = pattern["Regex"] if "Regex" in pattern else re.escape(pattern.get("String", ""))
        if kind == "Digits":
            source, behavior = DIGIT if step["individual_digits"] else DIGIT + "+", "Isolated"
        removed = behavior == "Removed" and step["invert"]
        need(kind in ("Digits", "Split") and (removed or behavior == "Isolated"),
             f"has a pre-tokenizer {kind} {behavior or ''}")
        patterns.append(source if removed else whole_text(source))
    if last.get("use_regex", True):
        patterns.append(whole_text(GPT2))
    if patterns == [whole_text(DIGIT), whole_text(GPT2)]:
        return [DIGIT_GPT2]
    need(all(len(pattern) <= 20_000 and not regex.match(pattern, "", timeout=1) for pattern in patterns),
         "splits by a pattern that matches nothing at all, or is too long")
    return patterns or [r"[\s\S]+"]


def whole_text(pattern):
    """The pattern, with the text between two matches a match of its own: tiktoken would drop it."""
    return pattern if pattern == GPT2 else f"{pattern}|(?:(?!{pattern})[\\s\\S])+"   # GPT2 leaves nothing


# Those of the published vocabularies, on which tiktoken's engine needs no bound on time.
KNOWN = {LLAMA3, GPT2, DIGIT_GPT2, *map(whole_text, (DIGIT, LLAMA3, QWEN)), r"[\s\S]+"}


# ----------------------------------------------------------------------------- files

def read_tokenizer_model(path):
    """Meta's tokenizer.model -> the fields of a Tokenizer."""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except ValueError:
        ranks = {}
    need(sorted(ranks.values()) == list(range(128000)) and all(bytes([b]) in ranks for b in range(256)),
         f"{path} does not hold Llama 3's 128000 tokens and their ranks (SentencePiece?); {WANTED}")
    reserved = (f"reserved_special_token_{n}" for n in range(256))
    names = [SPECIAL.get(i) or next(reserved) for i in range(256)]
    added = {f"<|{name}|>": (128000 + i, True) for i, name in enumerate(names)}
    return dict(ranks=ranks, ids={r: r for r in ranks.values()}, tokens={r: t for t, r in ranks.items()},
                flags={}, added=added, patterns=[LLAMA3], nfc=False, bos="<|begin_of_text|>",
                eos="<|end_of_text|>")


def read_tokenizer_json(path):
    """Hugging Face's tokenizer.json -> the fields of a Tokenizer."""
    content = read_json(path)
    try:
        model, listed = content["model"], content.get("added_tokens") or []
        need(model.get("type", "BPE") == "BPE", f"is a {model.get('type')} tokenizer")
        need(not model.get("byte_fallback"), "is a BPE tokenizer with byte_fallback (SentencePiece)")
        for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
            need(not model.get(affix), f"marks the parts of words by {affix}")
        normalizers = [step["type"] for step in steps(content.get("normalizer"), "normalizers")]
        need({*normalizers} <= {"NFC"}, f"normalizes with {', '.join(normalizers)}, not NFC")
        patterns = split_patterns(content["pre_tokenizer"])
        added = {t["content"]: (t["id"], bool(t["special"])) for t in listed}
        flags = {t["content"]: tuple(bool(t.get(flag)) for flag in FLAGS) for t in listed}
        check_tokens(model["vocab"] | {token: id for token, (id, _) in added.items()})
        check_work(added, "added tokens")
        vocab = {token: id for token, id in model["vocab"].items() if not added.get(token, (0, False))[1]}
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        number = merges_to_ranks(vocab, merges, bool(model.get("ignore_merges")))
        text = {token: to_bytes(token) for token in ALPHABET | vocab}
        first = [step["single"][0] for step in steps(content.get("post_processor"), "processors")
                 if step.get("type") == "TemplateProcessing"]
        bos = next((part["SpecialToken"]["id"] for part in first if "SpecialToken" in part), None)
        return dict(ranks={text[token]: rank for token, rank in number.items()},
                    ids={rank: vocab.get(token, -1) for token, rank in number.items()},
                    tokens={id: text[token] for token, id in vocab.items()}, added=added, patterns=patterns,
                    flags={name: found for name, found in flags.items() if any(found)},
                    nfc=bool(normalizers), bos=bos, eos=None)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError, regex.error) as error:
        refused = isinstance(error, TokenizerError)
        why = error if refused else f"is damaged ({type(error).__name__}: {error})"
        raise TokenizerError(f"{path} {why}; {WANTED}") from None


def to_bytes(token):
    """What a token of tokenizer.json stands for; one beyond the alphabet, which no text gives, for itself."""
    try:
        return bytes(map(ALPHABET.__getitem__, token))
    except KeyError:
        return token.encode()


def check_tokens(vocab):
    """What a vocabulary, token -> id, may hold."""
    ids = [id for id in vocab.values() if type(id) is not int or not 0 <= id < MOST_IDS]
    need(not ids, f"gives the ids {ids[:3]} to tokens; ids are whole numbers below {MOST_IDS}")
    sizes = [len(token) for token in vocab if not 0 < len(token) <= LONGEST]
    need(not sizes, f"has tokens of {sizes[:3]} characters; 1 to {LONGEST} can be")


def check_work(tokens, what):
    """Bounds what costs the square of a token's length."""
    need(sum(len(token) ** 2 for token in tokens) <= MOST_WORK, f"has too many or too long {what}")


def is_there(path):
    """Whether there is such a file; TokenizerError for a folder, a pipe or a device of its name."""
    need(path.is_file() or not path.exists(), f"{path} is no regular file; download it again")
    return path.is_file()


def read_json(path):
    """A JSON object; {} if there is no such file. Raises TokenizerError if it is not JSON."""
    data = path.read_bytes() if is_there(path) else b"{}"
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}); download it again") from None
    need(isinstance(content, dict), f"{path} is not a JSON object; download it again")
    return content


# ----------------------------------------------------------------------------- the tokenizer

class Tokenizer:
    """Text <-> token ids of one checkpoint. `.bos_id`: the id its own tokenizer puts first, `.eos_id`: each
    may be None; `.special_ids`: name -> id, never given by encode; `.vocab_size`: the largest id + 1."""

    def __init__(self, folder):
        """folder: a Path. TokenizerError (a ValueError) if it holds no tokenizer we can reproduce exactly."""
        readers = {"tokenizer.json": read_tokenizer_json, "tokenizer.model": read_tokenizer_model}
        found = [name for name in readers if is_there(folder / name)]
        need(found, f"{folder} has neither tokenizer.json nor tokenizer.model; {WANTED}")
        fields = readers[found[0]](folder / found[0])
        self.folder, self.added, self.flags = folder, fields["added"], fields["flags"]
        maps, config = (read_json(folder / f"{n}.json") for n in ("special_tokens_map", "tokenizer_config"))
        self.config = maps | config
        self.special_ids = {name: id for name, (id, special) in self.added.items() if special}
        tokens = fields["tokens"] | {id: name.encode() for name, (id, _) in self.added.items()}  # id -> bytes
        self.vocab_size = max(tokens) + 1
        self.tokens = [tokens.get(id, b"") for id in range(self.vocab_size)]
        self.ids = [fields["ids"].get(rank, -1) for rank in range(max(fields["ids"]) + 1)]  # rank -> id
        self.missing = bytes(token[0] for token, rank in fields["ranks"].items() if self.ids[rank] < 0)
        self.patterns, self.nfc = fields["patterns"], fields["nfc"]
        self.known = len(self.patterns) == 1 and self.patterns[0] in KNOWN   # else not split by tiktoken
        self.bpe = tiktoken.Encoding(str(folder), pat_str=self.patterns[0] if self.known else GPT2,
                                     mergeable_ranks=fields["ranks"], special_tokens={})
        self.stages = {special: [stage for normalized in (False, True)
                                 if (stage := self.stage(special, normalized))] for special in (True, False)}
        named = {name: id for id, name in enumerate(self.tokens)}
        bos = fields["bos"] or (self.token_name("bos_token") if self.config.get("add_bos_token") else None)
        eos = self.token_name("eos_token") or fields["eos"]
        self.bos_id, self.eos_id = (named.get(t.encode()) if t else None for t in (bos, eos))

    @classmethod
    def from_pretrained(cls, name_or_dir):
        """A checkpoint's folder, a preset or a hub id `owner/name` (HF_HOME, HF_TOKEN and HF_HUB_OFFLINE
        apply), or an adapter's folder: its base's. Raises ValueError, one line."""
        return cls(find_folder(base_of(name_or_dir)[0], weights=False))

    def save(self, folder):
        """Copies the files this tokenizer was read from, so that transformers and vLLM load `folder`."""
        need(any((self.folder / name).is_file() for name in TOKENIZER_FILES[:2]),
             f"the tokenizer's files are gone from {self.folder}: put them back")
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.folder / name for name in TOKENIZER_FILES):
            if path.is_file() and path.resolve() != (folder / path.name).resolve():
                shutil.copyfile(path, folder / path.name)

    def token_name(self, role):
        """The text of `role` (such as "eos_token") in tokenizer_config.json, or None."""
        token = self.config.get(role)
        token = token.get("content") if isinstance(token, dict) else token
        return token if isinstance(token, str) else None

    @functools.cached_property
    def hash(self):
        """sha256, hex: equal for two tokenizers only if they give the same ids for every text."""
        order = [id for id in self.ids if id >= 0 and len(self.tokens[id]) > 1]
        what = (self.patterns, self.nfc, sorted(self.added.items()), order, self.tokens)
        what += (sorted(self.flags.items()),) if self.flags else ()
        return hashlib.sha256(ascii(what).encode()).hexdigest()

    # -------- text -> ids

    def encode(self, text):
        """Ids of plain text: no BOS, and never a special id, whatever the text. A lone surrogate is encoded
        as U+FFFD; a byte that the vocabulary lacks (SmolLM2: some control characters) is dropped, as
        `tokenizers` does.
        """
        return self.encode_added(text, special=False)

    def encode_batch(self, texts):
        """[encode(text) for text in texts], on all cores."""
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(self.encode, texts))

    def encode_added(self, text, special=True, restore=None):
        """Ids of `text`, in which the names of added tokens are these tokens, of special ones too if
        `special`; restore: see defuse."""
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = []
        for part in self.cut(text, special, self.stages[bool(special)]):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.encode_plain(part.translate(restore) if restore else part)
        return ids

    def stage(self, special, normalized):
        """(regex, {name as found: (id, special, lstrip, rstrip, single_word)}, normalized) of the added
        tokens that are looked for in normalized text, or of the others; None if none of them counts. Where
        special ones do not, those that do are words (Qwen-3's <think>), which text gives, as in `tokenizers`.
        """
        tokens = {}
        for name, token in self.added.items():
            *strips, is_normalized = self.flags.get(name, (False,) * 4)
            if is_normalized == normalized:
                tokens[self.composed(name) if normalized else name] = (*token, *strips)
        counts = any(special or not is_special for _, is_special, *_ in tokens.values())
        return (re.compile(any_of(tokens)), tokens, normalized) if counts else None

    def composed(self, text):
        return unicodedata.normalize("NFC", text) if self.nfc else text

    def cut(self, text, special, stages):
        """The text between added tokens, and the tokens' ids, in their order: as `tokenizers` finds them."""
        if not stages:
            yield text
            return
        (pattern, tokens, normalized), *later = stages
        text, done = self.composed(text) if normalized else text, 0
        for match in pattern.finditer(text):
            begin, end = match.span()
            id, is_special, lstrip, rstrip, single_word = tokens[match[0]]
            if is_special and not special:
                continue
            if single_word and (WORD.match(text[begin - 1:begin]) or WORD.match(text[end:end + 1])):
                continue
            while lstrip and begin > done and text[begin - 1] in BLANK:
                begin -= 1
            while rstrip and end < len(text) and text[end] in BLANK:
                end += 1
            yield from self.cut(text[done:begin], special, later)
            if end > (max(begin, done) if lstrip else begin):   # or, blank, it went along
                yield id
            done = end
        yield from self.cut(text[done:], special, later)

    def encode_plain(self, text):
        """Ids of text without added tokens: by tiktoken, for a known pattern and where no byte is missing."""
        text = self.composed(text)
        if self.known and (len(text) < 100000 or not LONG_BLANK.search(text)):
            ids = [self.ids[rank] for rank in self.bpe.encode_ordinary(text)]
            if not self.missing or -1 not in ids:
                return ids
        known, ids = {}, []
        for piece in self.split(text):
            if piece not in known:
                known[piece] = self.encode_piece(piece.encode())
            ids += known[piece]
        return ids

    def split(self, text):
        """The text cut by the patterns, one after the other, by an engine that can be stopped."""
        pieces, end = [text], time.monotonic() + SECONDS + len(text) / 100_000
        try:
            for pattern in self.patterns:
                pieces = [match[0] for piece in pieces for match in
                          regex.finditer(pattern, piece, timeout=max(end - time.monotonic(), 1e-3))]
                need(all(pieces), f"a pattern of {self.folder}'s tokenizer matches nothing at all; "
                                  "use another checkpoint")
            return pieces
        except TimeoutError:
            raise TokenizerError(f"the pattern of {self.folder}'s tokenizer takes more than {SECONDS:g} s "
                                 "for a text; use another checkpoint") from None

    def encode_piece(self, piece):
        if len(kept := piece.translate(None, self.missing)) < len(piece):   # merged as if never there, but
            piece = kept + self.missing[:1]       # not found whole: ignore_merges looks for it as it was
        return [id for rank in self.bpe._encode_single_piece(piece) if (id := self.ids[rank]) >= 0]

    # -------- ids -> text

    def decode_bytes(self, ids):
        """Bytes of the ids, for streaming: a character may end in a later token. Special ids give their
        names; ids without a token (Qwen-3's padded rows) nothing."""
        return b"".join(self.tokens[id] for id in ids if 0 <= id < self.vocab_size)

    def decode(self, ids):
        """decode_bytes as text; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    # -------- chat

    @functools.cached_property
    def chat_template(self):
        """The checkpoint's chat template. Raises TokenizerError if it has none."""
        file, source = self.folder / "chat_template.jinja", self.config.get("chat_template")
        if file.is_file():
            source = file.read_text(encoding="utf-8", errors="replace")
        elif isinstance(source, list):  # named ones
            source = next((t.get("template") for t in source
                           if isinstance(t, dict) and t.get("name") == "default"), None)
        need(source and isinstance(source, str),
             f"{self.folder} has no chat template (a base model?); use an instruct model")
        try:
            return Template(source)
        except ValueError as error:
            raise TokenizerError(f"the chat template of {self.folder} does not parse: {error}") from None

    def render(self, messages, add_generation_prompt, **variables):
        """The chat template's text. Raises TokenizerError with the template's own complaint."""
        template, roles = self.chat_template, [role for role in self.config if role.endswith("_token")]
        names = {role: name for role in roles if (name := self.token_name(role)) is not None}
        variables = dict(tools=None, documents=None) | names | variables | dict(
            messages=messages, add_generation_prompt=add_generation_prompt)
        try:
            return template.render(**variables)
        except ValueError as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from None

    @functools.cached_property
    def unsafe(self):
        """What must not reach the template as it is: special tokens' names, their beginnings at the end of a
        string (the next string could complete them), and the placeholders themselves."""
        starts = {name[:n] for name in self.special_ids for n in range(1, len(name))}
        return re.compile(f"{any_of(self.special_ids)}|(?:{any_of(starts)})(?=\\s*\\Z)"
                          f"|[{chr(PLACEHOLDER)}-{chr(0x10FFFD)}]")

    def defuse(self, value, found, depth=0):
        """`value` (messages: dicts, lists, strings) with everything unsafe replaced by one private-use
        character each; found: dict text -> character, filled here."""
        need(depth <= 100, "messages that are nested more than 100 deep")
        if isinstance(value, str):
            return self.unsafe.sub(lambda m: found.setdefault(m[0], chr(PLACEHOLDER + len(found))), value)
        if isinstance(value, (list, tuple)):
            return [self.defuse(v, found, depth + 1) for v in value]
        if isinstance(value, dict):
            return {self.defuse(k, found): self.defuse(v, found, depth + 1) for k, v in value.items()}
        return value

    def apply_chat_template(self, messages, add_generation_prompt=True, **variables):
        """messages: [{"role": ..., "content": ...}, ...] -> ids. Only the template writes special tokens:
        their names inside a message are encoded as ordinary characters. A BOS is there if the template writes
        one. variables: for the template, such as enable_thinking=False. Raises TokenizerError."""
        found = {}
        text = self.render(self.defuse(messages, found), add_generation_prompt, **variables)
        return self.encode_added(text, restore={ord(c): s for s, c in found.items()})

    def encode_chat(self, messages, last_only=False, **variables):
        """messages -> (ids, is_reply), two lists of one length: is_reply marks what the model has to say,
        each assistant message up to and including its stop token (last_only: the last message only). Prompts
        and replies are encoded apart, as when generating. Raises TokenizerError if a reply is written
        differently once more messages follow it (Qwen-3 drops earlier thoughts): call it once a reply, on
        messages[:i + 1], last_only."""
        found, parts, done = {}, [], 0
        messages = self.defuse(messages, found)
        text = self.render(messages, False, **variables)
        for i in [len(messages) - 1] if last_only else range(len(messages)):
            if messages[i]["role"] == "assistant":
                prompt = self.render(messages[:i], True, **variables)
                reply = self.render(messages[:i + 1], False, **variables)
                need(reply.startswith(prompt) and text.startswith(reply),
                     f"the chat template rewrites message {i} when others follow, or does not continue "
                     "its own prompt; encode a reply at a time, last_only=True")
                parts += [(text[done:len(prompt)], False), (text[len(prompt):len(reply)], True)]
                done = len(reply)
        ids, is_reply, special = [], [], {*self.special_ids.values()}
        for part, reply in [*parts, (text[done:], False)]:
            new = self.encode_added(part, restore={ord(c): s for s, c in found.items()})
            stop = max((i for i, id in enumerate(new, 1) if id in special), default=len(new))
            count = stop if reply else 0                        # a newline may stand behind the stop
            ids += new
            is_reply += [True] * count + [False] * (len(new) - count)
        return ids, is_reply


def any_of(names):
    """A regex that matches the longest of these names, as in tokenizers; nothing, where there are none."""
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)"


class TextStream:
    """Token ids in, text out as it becomes final: whole characters only, cut in front of the first stop text.

    Ids in `skip` (special ones, stop ids) are seen when stop texts are looked for, by their names, and left
    out of the text. Of several stops the one that is complete first counts, at the same character the
    longest. `.found`: a stop text is complete, and nothing comes any more. `.tokens`: how many of the ids fed
    count, all up to the one that completed the stop text.
    """

    def __init__(self, tokenizer, stop_texts=(), skip=()):
        self.tokenizer, self.skip = tokenizer, frozenset(skip)
        self.stops = [(len(stop), {char: sum(1 << i for i, other in enumerate(stop) if other == char)
                                   for char in {*stop}}) for stop in stop_texts if stop]   # where each stands
        self.matched = [0] * len(self.stops)      # bit n - 1: the text so far ends in the stop's first n
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.held, self.is_text = [], True        # characters, "" for those left out; does the next one count
        self.found, self.tokens = False, 0

    def feed(self, ids, end=False) -> str:
        """The text that `ids` make final; end: no more will come. What may be the beginning of a stop text is
        held back until it is not."""
        for id in ids:
            if self.found:
                break
            self.tokens += 1
            self.see(self.tokenizer.decode_bytes([id]), id not in self.skip)
        if end and not self.found:
            self.see(b"", True, end)
        keep = 0 if end or self.found else max((n.bit_length() for n in self.matched), default=0)
        final, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return "".join(final)

    def see(self, data, is_text, end=False):
        """Look at the bytes of one token; a character belongs to the token in which it begins."""
        if not self.decoder.getstate()[0]:        # none is begun
            self.is_text = is_text
        for char in self.decoder.decode(data, end):
            self.held.append(char if self.is_text else "")
            self.is_text = is_text
            self.matched = [(bits << 1 | 1) & places.get(char, 0)      # Shift-And: a step a character
                            for bits, (_, places) in zip(self.matched, self.stops)]
            complete = [n for bits, (n, _) in zip(self.matched, self.stops) if bits.bit_length() == n]
            if complete:
                self.found, self.held = True, self.held[:len(self.held) - max(complete)]
                break
