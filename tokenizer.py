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
import binascii
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

from chat_template import Template
from adapter import base_of
from hf import find_folder

FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja")
WANTED = ("wanted a byte-level BPE tokenizer.json or Llama 3's tokenizer.model; "
          "use a Llama-3, Qwen-3 or SmolLM2 folder")
MOST_IDS, LONGEST = 2**22, 1024   # ids of a vocabulary; characters of a token
MOST_WORK = 2 * 10**7             # sum of squared lengths of tokens for which that is the price
SECONDS = 10.0                    # that an unknown pattern may take for a text, and a second more per 100,000

# tokenizer.json writes bytes as printable characters: themselves where printable, else the next from U+0100.
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
CONTROL = [b for b in range(256) if b not in PRINTABLE]
ALPHABET = {chr(b): b for b in PRINTABLE} | {chr(256 + n): b for n, b in enumerate(CONTROL)}   # -> byte

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


# ----------------------------------------------------------------------------- merges -> ranks

def boundary_holds(left, right, number, halves, merge_rank):
    """Whether BPE on the text of `left + right` arrives at exactly these two tokens: no merge across their
    boundary comes first. Undoes the two tokens from the newest merge back, looking at the pair that faced the
    boundary."""
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
    """tokenizer.json's vocab (token -> id) and merges (list of pairs) -> ({bytes: rank}, {rank: id}), -1 for
    a byte that the vocabulary lacks.

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
    next_rank = 256 + len(merges)
    left = [token for token in vocab if token not in number and ALPHABET.keys() >= set(token)]
    check_work(left, "tokens that no merge makes")
    for token in left:  # made by a merge listed before its parts', or by none
        parts, last = merge_alone(token, merge_rank)
        if parts == [token]:
            number[token] = merge_rank[last]
        elif ignore_merges and len(parts) == 2:  # tiktoken would join these two inside longer words as well
            raise TokenizerError(f"has ignore_merges and {token!r}, which no merge makes")
        elif ignore_merges:
            number[token], next_rank = next_rank, next_rank + 1
    ranks = {bytes(map(ALPHABET.__getitem__, token)): rank for token, rank in number.items()}
    return ranks, {rank: vocab.get(token, -1) for token, rank in number.items()}


# ----------------------------------------------------------------------------- pre-tokenizer -> patterns

def split_patterns(pre_tokenizer):
    """tokenizer.json's pre_tokenizer -> list of regexes, applied one after the other; a piece is one
    match."""
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *splits, byte_level = steps
    if byte_level["type"] != "ByteLevel" or byte_level.get("add_prefix_space"):
        blank = " with add_prefix_space" if byte_level.get("add_prefix_space") else ""
        raise TokenizerError(f"has a pre-tokenizer that ends in {byte_level['type']}{blank}")
    patterns = []
    for step in splits:
        kind, behavior, pattern = step["type"], step.get("behavior"), step.get("pattern", {})
        source = pattern["Regex"] if "Regex" in pattern else re.escape(pattern.get("String", ""))
        if kind == "Digits":
            patterns.append(whole_text(DIGIT if step["individual_digits"] else DIGIT + "+"))
        elif kind == "Split" and behavior == "Isolated":
            patterns.append(whole_text(source))
        elif kind == "Split" and behavior == "Removed" and step["invert"]:
            patterns.append(source)
        else:
            raise TokenizerError(f"has a pre-tokenizer {kind} {behavior or ''}")
    if byte_level.get("use_regex", True):
        patterns.append(whole_text(GPT2))
    if patterns == [whole_text(DIGIT), whole_text(GPT2)]:
        return [DIGIT_GPT2]
    for pattern in patterns:
        if pattern not in KNOWN and (len(pattern) > 20_000 or regex.match(pattern, "", timeout=1)):
            raise TokenizerError("splits by a pattern that matches nothing at all, or is too long")
    return patterns or [r"[\s\S]+"]


def whole_text(pattern):
    """The pattern, with the text between two matches a match of its own: tiktoken would drop it."""
    return pattern if pattern == GPT2 else f"{pattern}|(?:(?!{pattern})[\\s\\S])+"   # GPT2 leaves nothing


# Patterns that need no bound on time: those of the published vocabularies.
KNOWN = {LLAMA3, GPT2, DIGIT_GPT2, *map(whole_text, (DIGIT, LLAMA3, QWEN)), r"[\s\S]+"}


# ----------------------------------------------------------------------------- files

def read_tokenizer_model(path):
    """Meta's tokenizer.model -> the fields of a Tokenizer."""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise TokenizerError(f"{path} is not a tiktoken rank file (SentencePiece?); {WANTED}") from None
    if sorted(ranks.values()) != list(range(128000)) or len(ranks) != 128000:
        raise TokenizerError(f"{path} has {len(ranks)} tokens, not Llama 3's 128000; {WANTED}")
    if not all(bytes([b]) in ranks for b in range(256)):
        raise TokenizerError(f"{path} lacks a byte; download it again")
    named = {0: "begin_of_text", 1: "end_of_text", 4: "finetune_right_pad_id", 6: "start_header_id",
             7: "end_header_id", 8: "eom_id", 9: "eot_id", 10: "python_tag"}  # as in Llama 3.1 and later
    unnamed = [i for i in range(256) if i not in named]
    names = named | {i: f"reserved_special_token_{n}" for n, i in enumerate(unnamed)}
    added = {f"<|{names[i]}|>": (128000 + i, True) for i in range(256)}
    return dict(ranks=ranks, ids={r: r for r in ranks.values()}, tokens={r: t for t, r in ranks.items()},
                flags={}, added=added, patterns=[LLAMA3], nfc=False, bos="<|begin_of_text|>",
                eos="<|end_of_text|>")


def read_tokenizer_json(path):
    """Hugging Face's tokenizer.json -> the fields of a Tokenizer."""
    content = read_json(path)
    try:
        model = content["model"]
        normalizer = content.get("normalizer") or {"type": "Sequence", "normalizers": []}
        if model.get("type", "BPE") != "BPE" or model.get("byte_fallback"):
            kind = model["type"] + (" with byte_fallback (SentencePiece)"
                                    if model.get("byte_fallback") else "")
            raise TokenizerError(f"is a {kind} tokenizer")
        steps = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
        if unknown := [step["type"] for step in steps if step["type"] != "NFC"]:
            raise TokenizerError(f"normalizes with {unknown[0]}, not NFC")
        if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
            raise TokenizerError("marks the parts of words")
        patterns = split_patterns(content["pre_tokenizer"] or {"type": "none"})
        added = {t["content"]: (t["id"], bool(t["special"])) for t in content.get("added_tokens") or []}
        flags = {t["content"]: set_flags for t in content.get("added_tokens") or []
                 if any(set_flags := tuple(bool(t.get(flag)) for flag in FLAGS))}
        check_ids({**model["vocab"], **{token: id for token, (id, _) in added.items()}})
        check_work(added, "added tokens")
        vocab = {token: id for token, id in model["vocab"].items() if not added.get(token, (0, False))[1]}
        merges = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
        ranks, ids = merges_to_ranks(vocab, merges, bool(model.get("ignore_merges")))
        tokens = {id: b for b, rank in ranks.items() if (id := ids[rank]) >= 0}
        for token, id in vocab.items():  # tokens that no text gives have text too
            if id not in tokens:
                known = ALPHABET.keys() >= set(token)
                tokens[id] = bytes(map(ALPHABET.__getitem__, token)) if known else token.encode()
        return dict(ranks=ranks, ids=ids, tokens=tokens, added=added, flags=flags, patterns=patterns,
                    nfc=bool(steps), bos=first_of_template(content.get("post_processor")), eos=None)
    except TokenizerError as error:
        raise TokenizerError(f"{path} {error}; {WANTED}") from None
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError, regex.error) as error:
        raise TokenizerError(f"{path} is damaged ({type(error).__name__}: {error}); {WANTED}") from None


def check_ids(vocab):
    """What a vocabulary, token -> id, may hold."""
    for token, id in vocab.items():
        if type(id) is not int or not 0 <= id < MOST_IDS:
            raise TokenizerError(f"gives the id {id!r} to a token; ids are whole numbers below {MOST_IDS}")
        if not 0 < len(token) <= LONGEST:
            raise TokenizerError(f"has a token of {len(token)} characters; 1 to {LONGEST} can be")


def check_work(tokens, what):
    """Bounds what costs the square of a token's length."""
    if sum(len(token) ** 2 for token in tokens) > MOST_WORK:
        raise TokenizerError(f"has too many or too long {what}")


def first_of_template(processor):
    """The special token that a post_processor puts before every text, or None."""
    for step in (processor or {}).get("processors", [processor or {}]):
        if step.get("type") == "TemplateProcessing" and "SpecialToken" in step["single"][0]:
            return step["single"][0]["SpecialToken"]["id"]
    return None


def is_there(path):
    """Whether there is such a file; TokenizerError for a folder, a pipe or a device of its name."""
    if path.exists() and not path.is_file():
        raise TokenizerError(f"{path} is no regular file; download it again")
    return path.is_file()


def read_json(path):
    """A JSON object; {} if there is no such file. Raises TokenizerError if it is not JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if is_there(path) else {}
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} is not a JSON object; download it again")
    return content


# ----------------------------------------------------------------------------- the tokenizer

class Tokenizer:
    """Text <-> token ids of one checkpoint. `.bos_id`: the id its own tokenizer puts first, or None;
    `.eos_id`, or None; `.special_ids`: name -> id, never given by encode; `.vocab_size`: the largest id +
    1."""

    def __init__(self, folder):
        """folder: a Path. Raises TokenizerError (a ValueError) if it holds no tokenizer we can reproduce
        exactly."""
        self.folder = folder
        if is_there(folder / "tokenizer.json"):
            fields = read_tokenizer_json(folder / "tokenizer.json")
        elif is_there(folder / "tokenizer.model"):
            fields = read_tokenizer_model(folder / "tokenizer.model")
        else:
            raise TokenizerError(f"{folder} has neither tokenizer.json nor tokenizer.model; {WANTED}")
        self.config = (read_json(folder / "special_tokens_map.json")
                       | read_json(folder / "tokenizer_config.json"))
        self.patterns, self.nfc, self.added = fields["patterns"], fields["nfc"], fields["added"]
        self.special_ids = {name: id for name, (id, special) in self.added.items() if special}
        tokens = fields["tokens"] | {id: name.encode() for name, (id, _) in self.added.items()}  # id -> bytes
        self.vocab_size = max(tokens) + 1
        self.tokens = [tokens.get(id, b"") for id in range(self.vocab_size)]
        self.ids = [fields["ids"].get(rank, -1) for rank in range(max(fields["ids"]) + 1)]  # rank -> id
        self.missing = bytes(token[0] for token, rank in fields["ranks"].items() if self.ids[rank] < 0)
        self.trusted = KNOWN >= set(self.patterns)   # else under a bound on time, by the engine that has one
        self.bpe = tiktoken.Encoding(str(folder), pat_str=self.patterns[-1] if self.trusted else GPT2,
                                     mergeable_ranks=fields["ranks"], special_tokens={})
        self.flags = fields["flags"]
        # In which order added tokens are looked for, where special ones count (True) and where they do not:
        # then those left are words (Qwen-3's <think>), which text gives, as in `tokenizers`.
        self.stages = {True: [stage for normalized in (False, True) if (stage := self.stage(normalized))]}
        self.stages[False] = [stage for stage in self.stages[True]
                              if not all(special for _, special, *_ in stage[1].values())]
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
        if not any((self.folder / name).is_file() for name in FILES[:2]):
            raise TokenizerError(f"the tokenizer's files are gone from {self.folder}: put them back")
        Path(folder).mkdir(parents=True, exist_ok=True)
        for path in (self.folder / name for name in FILES):
            if path.exists() and path.resolve() != (Path(folder) / path.name).resolve():
                shutil.copyfile(path, Path(folder) / path.name)

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
        for part in self.cut(text, special) if self.stages[bool(special)] else [text]:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.encode_plain(part.translate(restore) if restore else part)
        return ids

    def stage(self, normalized):
        """(regex, {name as found: (id, special, lstrip, rstrip, single_word)}, normalized) of the added
        tokens that are looked for in normalized text, or of the others; None if there are none."""
        tokens = {}
        for name, token in self.added.items():
            *strips, is_normalized = self.flags.get(name, (False,) * 4)
            if is_normalized == normalized:
                name = unicodedata.normalize("NFC", name) if normalized and self.nfc else name
                tokens[name] = (*token, *strips)
        return (any_of(tokens), tokens, normalized) if tokens else None

    def cut(self, text, special, stage=0):
        """The text between added tokens, and the tokens' ids, in their order: as `tokenizers` finds them."""
        stages, done = self.stages[bool(special)], 0
        if stage == len(stages):
            yield text
            return
        pattern, tokens, normalized = stages[stage]
        if normalized and self.nfc:
            text = unicodedata.normalize("NFC", text)
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
            yield from self.cut(text[done:begin], special, stage + 1)
            if end > (max(begin, done) if lstrip else begin):   # or, blank, it went along
                yield id
            done = end
        yield from self.cut(text[done:], special, stage + 1)

    def encode_plain(self, text):
        """Ids of text without added tokens: tiktoken, where one pattern splits the text and no byte is
        missing."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        if self.trusted and len(self.patterns) == 1 and (len(text) < 100000 or not LONG_BLANK.search(text)):
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
                cut = []
                for piece in pieces:
                    left = None if self.trusted else max(end - time.monotonic(), 1e-3)
                    cut += [match[0] for match in regex.finditer(pattern, piece, timeout=left)]
                if not all(cut):
                    raise TokenizerError(f"a pattern of {self.folder}'s tokenizer matches nothing at all; "
                                         "use another checkpoint")
                pieces = cut
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
            named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
            source = named.get("default")
        if not source or not isinstance(source, str):
            raise TokenizerError(f"{self.folder} has no chat template (a base model?); use an instruct model")
        try:
            return Template(source)
        except ValueError as error:
            raise TokenizerError(f"the chat template of {self.folder} does not parse: {error}") from None

    def render(self, messages, add_generation_prompt, **variables):
        """The chat template's text. Raises TokenizerError with the template's own complaint."""
        roles = {role: self.token_name(role) for role in self.config if role.endswith("_token")}
        roles = {role: text for role, text in roles.items() if isinstance(text, str)}
        variables = {"tools": None, "documents": None} | roles | variables
        try:
            return self.chat_template.render(**variables, messages=messages,
                                             add_generation_prompt=add_generation_prompt)
        except TokenizerError:
            raise
        except ValueError as error:
            raise TokenizerError(f"the chat template refuses these messages: {error}") from None

    @functools.cached_property
    def unsafe(self):
        """What must not reach the template as it is: special tokens' names, their beginnings at the end of a
        string (the next string could complete them), and the placeholders themselves."""
        starts = sorted({name[:n] for name in self.special_ids for n in range(1, len(name))}, key=len,
                        reverse=True)
        names = any_of(self.special_ids).pattern if self.special_ids else "(?!)"
        return re.compile(f"{names}|(?:{'|'.join(map(re.escape, starts)) or '(?!)'})(?=\\s*\\Z)"
                          f"|[{chr(PLACEHOLDER)}-{chr(0x10FFFD)}]")

    def defuse(self, value, found, depth=0):
        """`value` (messages: dicts, lists, strings) with everything unsafe replaced by one private-use
        character each; found: dict text -> character, filled here."""
        if depth > 100:
            raise TokenizerError("messages that are nested more than 100 deep")
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
        found, ids, is_reply, done = {}, [], [], 0
        messages = self.defuse(messages, found)
        restore = {ord(c): s for s, c in found.items()}
        text = self.render(messages, False, **variables)

        def append(part, reply):
            new = self.encode_added(part, restore=restore)
            stops = [i for i, id in enumerate(new) if id in special]   # a newline may stand behind the stop
            count = (stops[-1] + 1 if stops else len(new)) if reply else 0
            ids.extend(new)
            is_reply.extend([True] * count + [False] * (len(new) - count))

        special = set(self.special_ids.values())
        for i in [len(messages) - 1] if last_only else range(len(messages)):
            if messages[i]["role"] == "assistant":
                prompt = self.render(messages[:i], True, **variables)
                reply = self.render(messages[:i + 1], False, **variables)
                if not (reply.startswith(prompt) and text.startswith(reply)):
                    raise TokenizerError(
                        f"the chat template rewrites message {i} when others follow, or does not continue "
                        "its own prompt; encode a reply at a time, last_only=True")
                append(text[done:len(prompt)], False)
                append(text[len(prompt):len(reply)], True)
                done = len(reply)
        append(text[done:], False)
        return ids, is_reply


def any_of(names):
    """A regex that matches any of these names, as one group; None for no names. The longest wins, as in
    tokenizers."""
    names = sorted(names, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None


class TextStream:
    """Token ids in, text out as it becomes final: whole characters only, cut in front of the first stop text.

    Ids in `skip` (special ones, stop ids) are seen when stop texts are looked for, by their names, and left
    out of the text. Of several stops the one that is complete first counts, at the same character the
    longest. `.found`: a stop text is complete, and nothing comes any more. `.tokens`: how many of the ids fed
    count, all up to the one that completed the stop text.
    """

    def __init__(self, tokenizer, stop_texts=(), skip=()):
        self.tokenizer, self.skip = tokenizer, frozenset(skip)
        self.stops = [(stop, borders(stop)) for stop in stop_texts if stop]
        self.matched = [0] * len(self.stops)      # how much of each stop text the text so far ends in
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
        keep = 0 if end or self.found else max(self.matched, default=0)
        final, self.held = self.held[:len(self.held) - keep], self.held[len(self.held) - keep:]
        return "".join(final)

    def see(self, data, is_text, end=False):
        """Look at the bytes of one token; a character belongs to the token in which it begins."""
        if not self.decoder.getstate()[0]:        # none is begun
            self.is_text = is_text
        for char in self.decoder.decode(data, end):
            self.held.append(char if self.is_text else "")
            self.is_text = is_text
            for i, (stop, border) in enumerate(self.stops):      # Knuth, Morris and Pratt: a step a character
                n = self.matched[i]
                while n and stop[n] != char:
                    n = border[n]
                self.matched[i] = n + (stop[n] == char)
            complete = [n for n, (stop, _) in zip(self.matched, self.stops) if n == len(stop)]
            if complete:
                self.found, self.held = True, self.held[:len(self.held) - max(complete)]
                break


def borders(text):
    """For every n: the length of the longest proper beginning of text[:n] that it also ends in."""
    out, n = [0, 0], 0
    for char in text[1:]:
        while n and text[n] != char:
            n = out[n]
        n += text[n] == char
        out.append(n)
    return out
