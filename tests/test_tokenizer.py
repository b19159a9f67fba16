"""tokenizer.py against `tokenizers`, `transformers` and Meta's own tokenizer.model, on any text we can think
of."""

import functools
import importlib.util
import json
import os
import random
import re
import select
import shutil
import sys
import sysconfig
import time
import unicodedata
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
from chat_template import Template
from tokenizer import LLAMA3, TextStream, Tokenizer, TokenizerError

tokenizers = pytest.importorskip("tokenizers")
from tokenizers import (AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors,
                        trainers)

ROOT = Path(__file__).resolve().parent.parent

QWEN2 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
LLAMA3_CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}"
    "{% for p in m['content'] %}{{ p['text'] }}"
    "{% endfor %}{% endif %}{{ '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}")
# As Qwen-3's: thoughts stay in the last reply only, and tool output is recognised by its text.
QWEN3_CHAT = """
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}
        {%- generation %}{{- content + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
POOL = [" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x00", "\x01",
        "\x04", "\x7f",
        "'s", "'S", "'LL", "'Ve", "'re", "'ſ", "n't", "1", "23", "2024", "٣", "Ⅷ", "½", "²", "五", "१२", "𝟘",
        "a", "The",
        " the", "Bé", "e\u0301", "\u0301", "\u0338", "Å", "ﬁ", "한글", "ᄒ\u1161ᆫ", "नमस्ते", "中文", "ǅ", "ß",
        "👩\u200d👩", "🇩🇪",
        "\u200b", "\ufeff", "\ufffd", "\ue000", "\U00100000", "\U00040000", "_", "-", "--", "==", "()",
        "{}", "/", ".", "...",
        "<|eot_id|>", "<|im_end|>", "<|mask|>", "<think>", "</think>", "<|endoftext|>", "<reponame>", "<",
        "|>", "x" * 60]


def texts(count, seed=0):
    """Random strings: pieces that tokenizers trip over, and single characters of every plane and script."""
    rng = random.Random(seed)
    for _ in range(count):
        parts = []
        for _ in range(rng.randint(1, 20)):
            c = chr(rng.choice([rng.randrange(0x300), rng.randrange(0xD800),
                                rng.randrange(0xE000, 0x110000)]))
            # Unassigned characters may be letters in a newer Unicode; marks newer than Unicode 9 reorder
            # differently in the two NFCs. Neither is in any text a model has seen.
            odd = unicodedata.category(c) == "Cn" or unicodedata.combining(c)
            parts.append(rng.choice(POOL) if odd or rng.random() < 0.7 else c)
        yield "".join(parts)


def stdlib(characters=1_000_000):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "".join(path.read_text(encoding="utf-8", errors="replace") for path in files)[:characters]


@functools.cache
def load(folder):
    return Tokenizer.from_pretrained(folder)


@functools.cache
def transformers_tokenizer(folder):
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def assert_same_ids(ours, truth, count=3000):
    truth.encode_special_tokens = True  # special tokens' names are ordinary text, as in our encode
    for text in [*texts(count), "", " ", stdlib(), " " * 1000 + "x", "\n" * 999, "é" * 500, "123456789" * 30]:
        expected = truth.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == expected, repr(text[:300])


def write_config(folder, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}
                                                             | config))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    smollm2 = pytest.importorskip("smollm2")
    folder = tmp_path_factory.mktemp("smollm2")
    try:
        smollm2.smollm2_tokenizer_json(folder)
    except smollm2.Missing as reason:
        pytest.skip(str(reason))
    return folder


@pytest.fixture(scope="module")
def meta(tmp_path_factory):
    """Meta's folder: tokenizer.model alone."""
    spec = importlib.util.find_spec("llama_models")
    if not spec:
        pytest.skip("Llama 3's tokenizer.model is not here: pip install --no-deps llama-models==0.3.0")
    folder = tmp_path_factory.mktemp("meta")
    source = Path(spec.submodule_search_locations[0]) / "llama3" / "tokenizer.model"
    (folder / "tokenizer.model").write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def llama3(meta, tmp_path_factory):
    """The same vocabulary as transformers converts it: 280,147 merges, ignore_merges, BOS by
    post_processor."""
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    hf = convert.TikTokenConverter(str(meta / "tokenizer.model")).converted()
    ours = load(meta)
    hf.add_special_tokens([AddedToken(t, normalized=False)
                           for t in sorted(ours.special_ids, key=ours.special_ids.get)])
    hf.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False),
                                             processors.TemplateProcessing(
        single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 128000)])])
    folder = tmp_path_factory.mktemp("llama3")
    hf.save(str(folder / "tokenizer.json"))
    write_config(folder, bos_token="<|begin_of_text|>", chat_template=LLAMA3_CHAT,
                 eos_token={"__type": "AddedToken", "content": "<|eot_id|>"})
    return folder


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    """A small tokenizer of Qwen-3's kind, trained here: NFC, Split then ByteLevel, added words that are not
    special."""
    hf = tokenizers.Tokenizer(models.BPE())
    hf.normalizer = normalizers.NFC()
    hf.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN2), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False,
                                                                                 use_regex=False)])
    hf.decoder = decoders.ByteLevel()
    hf.train_from_iterator([stdlib(500_000)], trainers.BpeTrainer(
        vocab_size=2000, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    hf.add_special_tokens([AddedToken(t, normalized=False)
                           for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    hf.add_tokens([AddedToken(t, normalized=False) for t in ("<think>", "</think>")])
    folder = tmp_path_factory.mktemp("qwen3")
    hf.save(str(folder / "tokenizer.json"))
    write_config(folder, eos_token="<|im_end|>", add_bos_token=False)
    (folder / "chat_template.jinja").write_text(QWEN3_CHAT)
    return folder


# ----------------------------------------------------------------------------- ids

@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen3"])
def test_ids_are_those_of_tokenizers(name, request):
    folder = request.getfixturevalue(name)
    truth = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = load(folder)
    assert ours.vocab_size == truth.get_vocab_size()
    assert_same_ids(ours, truth)


def test_meta_rank_file_gives_the_ids_of_metas_own_tokenizer(meta, llama3):
    ours, converted = load(meta), load(llama3)
    reference = pytest.importorskip("llama_models.llama3.tokenizer").Tokenizer(meta / "tokenizer.model")
    for text in [*texts(3000, seed=1), stdlib(300_000)]:
        assert ours.encode(text) == converted.encode(text) == reference.encode(text, bos=False, eos=False)
    for token in ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
                  "<|eom_id|>",
                  "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>",
                  "<|reserved_special_token_0|>"):
        assert ours.special_ids[token] == reference.special_tokens[token]
    assert (len(ours.special_ids), ours.vocab_size) == (256, 128256)
    assert (ours.bos_id, ours.eos_id, ours.special_ids["<|reserved_special_token_247|>"]) == (128000, 128001,
                                                                                              128255)


def test_random_merges_in_any_order_give_the_ids_of_tokenizers(tmp_path):
    """Merges out of order, made twice, unreachable tokens, ids in any order, a byte (the blank) that is
    missing."""
    refused = compared = 0
    for seed in range(400):
        rng = random.Random(seed)
        tokens, merges = ["a", "b", "c"], []
        for _ in range(rng.randint(1, 25)):
            pair = rng.choice(tokens), rng.choice(tokens)
            if len(pair[0] + pair[1]) <= 8 and pair not in merges:
                merges.append(pair)
                tokens += [pair[0] + pair[1]] * (pair[0] + pair[1] not in tokens)
        if seed % 2:
            rng.shuffle(merges)
        tokens += {"".join(rng.choices("abc", k=rng.randint(2, 5)))
                   for _ in range(rng.randint(0, 2))} - set(tokens)
        ids = rng.sample(range(len(tokens)), len(tokens))
        truth = tokenizers.Tokenizer(models.BPE(vocab=dict(zip(tokens, ids)), merges=merges,
                                                ignore_merges=seed % 3 == 0))
        truth.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(rng.choice([" ", "b"]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        truth.save(str(tmp_path / "tokenizer.json"))
        try:
            ours = Tokenizer.from_pretrained(tmp_path)
        except TokenizerError as error:  # the one case tiktoken cannot express
            refused += 1
            assert seed % 3 == 0 and "no merge makes" in str(error)
            continue
        for _ in range(30):
            text = "".join(rng.choices("abc ", k=rng.randint(1, 25)))
            assert ours.encode(text) == truth.encode(text).ids, (seed, text)
            compared += 1
    assert compared > 7000 and refused < 134


@pytest.mark.parametrize("steps", [
    [("Digits", True), ("ByteLevel", True)], [("Digits", False), ("ByteLevel", True)], [("ByteLevel", True)],
    [("ByteLevel", False)], [("Split", r"\p{N}{1,3}"), ("Split", LLAMA3), ("ByteLevel", False)],
    [("Split", "-"), ("ByteLevel", True)], [("Split", r"\p{Lu}\p{Ll}+"), ("ByteLevel", False)]], ids=str)
def test_pre_tokenizers_split_as_tokenizers_does(steps, qwen3, tmp_path):
    truth = tokenizers.Tokenizer.from_file(str(qwen3 / "tokenizer.json"))
    make = {"Digits": lambda x: pre_tokenizers.Digits(individual_digits=x),
            "ByteLevel": lambda x: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=x),
            "Split": lambda x: pre_tokenizers.Split(x if len(x) == 1 else Regex(x), "isolated")}
    truth.pre_tokenizer = pre_tokenizers.Sequence([make[kind](x) for kind, x in steps])
    truth.save(str(tmp_path / "tokenizer.json"))
    truth.encode_special_tokens = True
    ours = Tokenizer.from_pretrained(tmp_path)
    for text in texts(1500, seed=2):
        assert ours.encode(text) == truth.encode(text).ids, repr(text)


@pytest.mark.parametrize("name", ["smollm2", "meta", "llama3", "qwen3"])
def test_decode_undoes_encode_and_no_text_gives_a_special_id(name, request):
    ours = load(request.getfixturevalue(name))
    special = set(ours.special_ids.values())
    for text in [*texts(1500, seed=3), *ours.special_ids, "".join(ours.special_ids)]:
        ids = ours.encode(text)
        text = text.encode().translate(None, ours.missing)   # SmolLM2 has no token for 21 bytes, see above
        if ours.nfc:  # added words are cut out first, as in `tokenizers`: a mark behind <think> stays a mark
            parts = re.split("(</?think>)", text.decode())
            text = "".join(unicodedata.normalize("NFC", part) for part in parts).encode()
        assert not special & set(ids)
        assert ours.decode_bytes(ids) == text
        assert ours.decode(ids) == text.decode("utf-8", "replace")


def test_a_million_blanks_are_encoded(llama3):
    text = " " * 1_200_000 + "x"
    ours = load(llama3)
    ids = ours.encode(text)
    assert ours.decode(ids) == text
    text = text[-150_000:]  # tokenizers itself overflows on the long one
    assert ours.encode(text) == tokenizers.Tokenizer.from_file(str(llama3 / "tokenizer.json")).encode(
        text, add_special_tokens=False).ids


def test_lone_surrogates_become_replacement_characters(qwen3):
    ours = load(qwen3)
    assert ours.decode(ours.encode("a\ud800b \ud83d\ude00")) == "a\ufffdb 😀"


def test_ids_without_a_token_decode_to_nothing(qwen3):
    ours = load(qwen3)
    a, b = ours.encode("def"), ours.encode(" main")
    assert ours.decode([-1, *a, ours.vocab_size, 151935, *b]) == "def main"


def test_bytes_of_one_character_stream(qwen3):
    ours = load(qwen3)
    ids = ours.encode("🇩🇪")
    assert len(ids) > 2 and b"".join(ours.decode_bytes([id]) for id in ids).decode() == "🇩🇪"


def test_batch_equals_one_by_one(qwen3):
    ours, batch = load(qwen3), list(texts(200))
    assert ours.encode_batch(batch) == [ours.encode(text) for text in batch]


@pytest.mark.parametrize("name, bos, eos", [("llama3", 128000, 128009), ("smollm2", None, 2),
                                            ("qwen3", None, 2002)])
def test_bos_is_what_the_checkpoints_tokenizer_prepends(name, bos, eos, request):
    folder = request.getfixturevalue(name)
    hf = transformers_tokenizer(folder)
    ours = load(folder)
    assert (ours.bos_id, ours.eos_id) == (bos, eos) == (bos, hf.eos_token_id)
    assert hf("def main").input_ids == [bos] * (bos is not None) + ours.encode("def main")


def test_hash_sees_the_vocabulary_and_not_the_layout_of_the_file(qwen3, tmp_path):
    def hash_of(change):
        content = json.loads((qwen3 / "tokenizer.json").read_text())
        change(content)
        (tmp_path / "tokenizer.json").write_text(json.dumps(content, indent=7))
        return Tokenizer.from_pretrained(tmp_path).hash

    def relayout(content):
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        content["model"]["vocab"] = dict(reversed(content["model"]["vocab"].items()))

    same = load(qwen3).hash
    assert len(same) == 64 and hash_of(relayout) == same
    others = [hash_of(lambda c: c["added_tokens"][0].update(content="<|other|>")),
              hash_of(lambda c: c.update(normalizer=None)),
              hash_of(lambda c: c["added_tokens"][3].update(special=True)),
              hash_of(lambda c: c["model"]["merges"].insert(0, c["model"]["merges"].pop(5))),
              hash_of(lambda c: c["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=LLAMA3))]
    assert len({same, *others}) == 6


# ----------------------------------------------------------------------------- chat

def chat(*contents):
    roles = ["system", "user", "assistant", "user", "assistant"]
    return [{"role": role, "content": content} for role, content in zip(roles, contents)]


@pytest.mark.parametrize("name", ["smollm2", "llama3", "qwen3"])
@pytest.mark.parametrize("prompt", [True, False])
def test_chat_gives_the_ids_of_transformers(name, prompt, request):
    folder = request.getfixturevalue(name)
    hf = transformers_tokenizer(folder)
    ours = load(folder)
    for messages in [chat("Be brief.", " What is 2+2?\n"), chat("", "a", "<think>\nhm\n</think>\n\nb", "c"),
                     chat("x", "中文 é", "'S 12345\n\n\nend"), chat("s", "{{ 7 }} {% if %}\\n", "ok", "",
                                                                  "bye ")]:
        expected = hf.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
        expected = hf(expected, add_special_tokens=False).input_ids
        assert ours.apply_chat_template(messages, add_generation_prompt=prompt) == expected
        assert expected.count(ours.bos_id) <= 1 or name == "smollm2"


@pytest.mark.parametrize("name, stop", [("smollm2", "<|im_end|>"), ("llama3", "<|eot_id|>"),
                                        ("qwen3", "<|im_end|>")])
def test_messages_cannot_write_special_tokens(name, stop, request):
    ours = load(request.getfixturevalue(name))
    special = set(ours.special_ids.values())
    harmless = [id for id in ours.apply_chat_template(chat("s", "hi", "b")) if id in special]
    attacks = [f"a{stop}b", stop, f" {stop}\n", stop[:-1], "<", f"{stop[:4]} ", stop + chr(0x100000),
               *ours.special_ids]
    for attack in [*attacks[:7], *random.Random(0).sample(attacks, 5)]:
        ids = ours.apply_chat_template(chat("s", attack, "b"))
        assert [id for id in ids if id in special] == harmless
        assert attack.strip() in ours.decode(ids)
    ids = ours.apply_chat_template(chat("s", f"\U00100000\U00100001{stop}\U0010fffd", "b"))
    assert f"\U00100000\U00100001{stop}\U0010fffd" in ours.decode(ids)
    content = ours.encode(f"x {stop} y")  # the very ids of plain text
    ids = ours.apply_chat_template(chat("s", f"x {stop} y"))
    assert content in [ids[i:i + len(content)] for i in range(len(ids))]


def test_parts_of_a_message_cannot_join_to_a_special_token(llama3):
    ours = load(llama3)
    for cut in range(1, 9):
        parts = [{"type": "text", "text": "<|eot_id|>"[:cut]}, {"type": "text", "text": "<|eot_id|>"[cut:]}]
        ids = ours.apply_chat_template([{"role": "user", "content": parts}])
        assert ids.count(ours.special_ids["<|eot_id|>"]) == 1 and "<|eot_id|><|eot_id|>" in ours.decode(ids)


@pytest.mark.parametrize("name, stop", [("smollm2", "<|im_end|>"), ("llama3", "<|eot_id|>")])
def test_replies_are_marked_up_to_their_stop_token(name, stop, request):
    ours = load(request.getfixturevalue(name))
    messages = chat("s", "q1", "first reply", "q2", "second")
    ids, is_reply = ours.encode_chat(messages)
    assert ids == ours.apply_chat_template(messages, add_generation_prompt=False)
    assert ours.decode([id for id, reply in zip(ids, is_reply) if reply]) == f"first reply{stop}second{stop}"
    assert ids[:is_reply.index(True)] == ours.apply_chat_template(messages[:2])
    ids, is_reply = ours.encode_chat(messages, last_only=True)
    assert ours.decode([id for id, reply in zip(ids, is_reply) if reply]) == f"second{stop}"


def test_a_template_that_rewrites_replies_is_encoded_one_reply_at_a_time(qwen3):
    ours = load(qwen3)
    messages = chat("s", "q1", "<think>\nhm\n</think>\n\nfirst", "q2", "second")
    with pytest.raises(TokenizerError, match="last_only"):
        ours.encode_chat(messages)
    ids, is_reply = ours.encode_chat(messages[:3], last_only=True)
    reply = [id for id, reply in zip(ids, is_reply) if reply]
    assert ours.decode(reply) == "<think>\nhm\n</think>\n\nfirst<|im_end|>"
    assert ours.added["<think>"][0] in reply
    ids = ours.apply_chat_template(messages[:2], enable_thinking=False)
    assert ours.decode(ids).endswith("assistant\n<think>\n\n</think>\n\n")


def test_named_templates_and_the_templates_own_complaints(qwen3, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((qwen3 / "tokenizer.json").read_bytes())
    write_config(tmp_path, chat_template=[{"name": "tool_use", "template": "t"},
                                          {"name": "default", "template": (
        "{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}"
        "{{ messages[0] | tojson }}{{ strftime_now('%%') }}")}])
    ours = Tokenizer.from_pretrained(tmp_path)
    assert ours.decode(ours.apply_chat_template(chat("<é>"))) == '{"role": "system", "content": "<é>"}%'
    with pytest.raises(TokenizerError, match="one message only"):
        ours.apply_chat_template(chat("a", "b"))
    write_config(tmp_path)
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer.from_pretrained(tmp_path).apply_chat_template(chat("a"))


# ----------------------------------------------------------------------------- files

def test_a_saved_tokenizer_loads_here_and_in_transformers(qwen3, tmp_path):
    ours = Tokenizer.from_pretrained(str(qwen3))
    ours.save(tmp_path / "new" / "folder")
    again = Tokenizer.from_pretrained(tmp_path / "new" / "folder")
    again.save(tmp_path / "new" / "folder")  # onto itself: nothing to do
    assert again.hash == ours.hash
    hf = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(tmp_path / "new" / "folder")
    assert hf("def main").input_ids == ours.encode("def main") and hf.chat_template == QWEN3_CHAT


@pytest.mark.parametrize("content, words", [
    ({"model": {"type": "Unigram", "vocab": []}}, "Unigram"),
    ({"model": {"type": "WordPiece", "vocab": {}}}, "WordPiece"),
    ({"model": {"type": "BPE", "byte_fallback": True, "vocab": {}, "merges": []}}, "SentencePiece"),
    ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "Metaspace"}},
     "Metaspace"),
    ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": None}, "pre-tokenizer"),
    ({"model": {"type": "BPE", "vocab": {}, "merges": []}, "normalizer": {"type": "Lowercase"}}, "Lowercase"),
    ({"version": "1.0"}, "damaged"), ([], "JSON object"), ("{", "not JSON")], ids=str)
def test_other_tokenizers_are_refused_in_one_line(content, words, tmp_path):
    (tmp_path / "tokenizer.json").write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=words) as refusal:
        Tokenizer.from_pretrained(tmp_path)
    assert "\n" not in str(refusal.value) and str(tmp_path) in str(refusal.value)


def test_missing_and_foreign_files_are_refused_in_one_line(tmp_path):
    with pytest.raises(TokenizerError, match="neither"):
        Tokenizer.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is no folder here"):
        Tokenizer.from_pretrained(tmp_path / "absent")
    for content in (b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02",
                    b"IQ== 0\nIg== 1\n"):  # SentencePiece; too short
        (tmp_path / "tokenizer.model").write_bytes(content)
        with pytest.raises(TokenizerError, match="tokenizer.model"):
            Tokenizer.from_pretrained(tmp_path)


def test_a_hub_id_that_cannot_be_fetched_is_refused_in_one_line(monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="owner/absent is no folder here, is not in the hub") as refusal:
        Tokenizer.from_pretrained("owner/absent")
    assert "\n" not in str(refusal.value)


def test_a_hub_id_is_read_from_the_cache_when_offline(qwen3, monkeypatch, tmp_path):
    hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "models--owner--small" / "snapshots" / ("0" * 40)
    load(qwen3).save(snapshot)
    (tmp_path / "models--owner--small" / "refs").mkdir()
    (tmp_path / "models--owner--small" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert Tokenizer.from_pretrained("owner/small").hash == load(qwen3).hash


# ----------------------------------------------------------------------------- added tokens' flags

FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def with_added(folder, into, added):
    """A copy of the tokenizer in `folder`, with more added tokens."""
    content = json.loads((folder / "tokenizer.json").read_text())
    first = max(t["id"] for t in content["added_tokens"]) + 1
    content["added_tokens"] += [dict(t, id=first + i) for i, t in enumerate(added)]
    into.mkdir()
    (into / "tokenizer.json").write_text(json.dumps(content))
    return into


@pytest.mark.parametrize("normalizer", ["NFC", None])
def test_added_tokens_are_found_as_tokenizers_finds_them(normalizer, qwen3, tmp_path):
    """All flags at random: white space that is taken along or is a token, words of marks and joiners, names
    in names, of special tokens too, names that are not normalized. The ids of `tokenizers`."""
    names = ["[X]", "a[b", "[X", "<y>", "y>", "é!", "e\u0301!", " ", "\u00a0\n", "bq7", " Z7", "\u0301", "Ů"]
    parts = [*names, " ", "  ", "\n", "\t", "a", "b_", "7", ".", "e\u0301", "\u0085", "\x1c", "\x1f ",
             "\u200d", "\u0903", "²", "Ⅷ", "_", "<|im_end|>", "<think>", "U\u030a", "\u2003", "\u200b"]
    rng, seen = random.Random(3), Counter()
    for case in range(80):
        added = [dict(content=name, special=rng.random() < 0.4, **{f: rng.random() < 0.4 for f in FLAGS})
                 for name in rng.sample(names, rng.randint(1, 6))]
        folder = with_added(qwen3, tmp_path / str(case), added)
        if normalizer is None:
            content = json.loads((folder / "tokenizer.json").read_text())
            (folder / "tokenizer.json").write_text(json.dumps(content | dict(normalizer=None)))
        ours, theirs = Tokenizer(folder), tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        for _ in range(60):
            text = "".join(rng.choice(parts) for _ in range(rng.randint(1, 9)))
            for special in (False, True):
                theirs.encode_special_tokens = not special
                try:
                    expected = theirs.encode(text, add_special_tokens=False).ids
                except BaseException as error:        # theirs fails where a blank token has gone with another
                    assert type(error).__name__ == "PanicException"
                    continue
                assert ours.encode_added(text, special) == expected, (text, special, added)
                seen[special, bool(set(expected) & set(range(2005, 2020)))] += 1
            assert ours.encode(text) == ours.encode_added(text, special=False)
    assert min(seen.values()) > 500, seen


def test_flags_enter_the_hash_only_where_one_is_set(qwen3, tmp_path):
    flags = dict.fromkeys(FLAGS, False)
    added = dict(content="[X]", special=False)
    hashes = [Tokenizer(with_added(qwen3, tmp_path / f"{i}", [added | flags | {f: True for f in on}])).hash
              for i, on in enumerate([(), *((f,) for f in FLAGS), FLAGS[:2]])]
    assert len(set(hashes)) == 6
    bare = Tokenizer(with_added(qwen3, tmp_path / "bare", [added]))
    assert bare.hash == hashes[0] and not bare.flags


def test_hashes_that_checkpoints_and_data_sets_record_stay(smollm2):
    assert load(smollm2).hash == "1087ba2e3bb4de8a058b59ba9e8d4569617ebe0cfe6cb8791ee42deda26b7a34"
    ours = Tokenizer(ROOT / "data/word_problems").hash
    assert ours == "394928307ab73eeae31e229aea9ba95d3a8e91acdca01e5678577eadc00f8cff"
    for name in ("tiny-ntp", "tiny-sbd", "tiny-verified"):
        assert Tokenizer(ROOT / "checkpoints" / name).hash == ours


# ----------------------------------------------------------------------------- hostile files

HOSTILE = {
    "ids of 10^9": lambda t: t["added_tokens"][0].update(id=10**9),
    "an id of 2^63 in the vocabulary": lambda t: t["model"]["vocab"].update(zz=2**63),
    "a negative id": lambda t: t["model"]["vocab"].update(zz=-1),
    "an id that is true": lambda t: t["model"]["vocab"].update(zz=True),
    "an id that is text": lambda t: t["added_tokens"][0].update(id="7"),
    "no vocabulary": lambda t: t.pop("model"), "a list as vocabulary": lambda t: t["model"].update(vocab=[1]),
    "merges of one": lambda t: t["model"].update(merges=[["a"]]),
    "merges of None": lambda t: t["model"].update(merges=None),
    "a long token": lambda t: t["model"]["vocab"].update({"a" * 50_000: 5}),
    "added tokens that are no list": lambda t: t.update(added_tokens=7),
    "an added token without text": lambda t: t["added_tokens"].append(dict(id=3, content="", special=False)),
    "a pattern that is none": lambda t: t.update(pre_tokenizer=splitter("(")),
    "a pattern that matches nothing": lambda t: t.update(pre_tokenizer=splitter("")),
    "a pattern of megabytes": lambda t: t.update(pre_tokenizer=splitter("a" * 10**6)),
    "a normalizer of numbers": lambda t: t.update(normalizer=3),
    "long tokens that no merge makes": lambda t: t["model"]["vocab"].update(
        {"ab" * 500 + str(i): 600 + i for i in range(1000)}),
    "a thousand long special tokens": lambda t: t["added_tokens"].extend(
        dict(id=600 + i, content=f"{i}" + "a" * 1000, special=True) for i in range(1000)),
}


def splitter(pattern):
    split = dict(type="Split", pattern=dict(Regex=pattern), behavior="Isolated", invert=False)
    return dict(type="Sequence", pretokenizers=[split, dict(type="ByteLevel", add_prefix_space=False,
                                                            use_regex=False)])


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_in_one_line_at_once(name, tmp_path):
    content = json.loads((ROOT / "data/word_problems/tokenizer.json").read_text())
    HOSTILE[name](content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    began = time.monotonic()
    with pytest.raises(TokenizerError) as refusal:
        Tokenizer(tmp_path)
    assert "\n" not in str(refusal.value) and "tokenizer.json" in str(refusal.value)
    assert time.monotonic() - began < 5


def test_files_that_are_none_and_json_that_is_deep_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero"),
                 lambda: path.write_text("[" * 100_000), lambda: path.write_text("7")):
        make()
        with pytest.raises(TokenizerError, match="tokenizer.json is"):
            Tokenizer(tmp_path)
        path.rmdir() if path.is_dir() else path.unlink()


def test_a_pattern_that_explodes_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("tokenizer.SECONDS", 0.5)
    content = json.loads((ROOT / "data/word_problems/tokenizer.json").read_text())
    content["pre_tokenizer"] = splitter("(?:(?:a|aa)+)+b")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="takes more than 0.5 s"):
        Tokenizer(tmp_path).encode("a" * 60 + "c")


def test_a_pattern_that_explodes_a_little_everywhere_is_stopped(tmp_path, monkeypatch):
    """One bound for the whole text, however many pieces it has."""
    monkeypatch.setattr("tokenizer.SECONDS", 0.5)
    content = json.loads((ROOT / "data/word_problems/tokenizer.json").read_text())
    blank, explode = (splitter(pattern)["pretokenizers"] for pattern in (" ", "(?:(?:a|aa)+)+b"))
    content["pre_tokenizer"] = dict(type="Sequence", pretokenizers=[blank[0], *explode])
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    began = time.monotonic()
    with pytest.raises(TokenizerError, match="takes more than 0.5 s"):
        Tokenizer(tmp_path).encode(("a" * 20 + "c ") * 400)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("pattern", [r"(?=a)", r"\b", r"a*", r"(?<=s)"])
def test_a_pattern_that_matches_nothing_loses_no_text(pattern, tmp_path):
    content = json.loads((ROOT / "data/word_problems/tokenizer.json").read_text())
    content["pre_tokenizer"] = splitter(pattern)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="matches nothing at all"):
        Tokenizer(tmp_path).encode("Mia has 3 cats")


def test_a_saved_tokenizer_whose_files_are_gone_is_an_error(tmp_path):
    shutil.copytree(ROOT / "checkpoints/tiny-sbd", tmp_path / "gone")
    ours = Tokenizer(tmp_path / "gone")
    shutil.rmtree(tmp_path / "gone")
    with pytest.raises(TokenizerError, match="are gone from"):
        ours.save(tmp_path / "new")


TEMPLATES = {
    "loops": ("{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}"
              "{% endfor %}{% endfor %}{% endfor %}", "seconds"),
    "doubles a string": ("{% set ns = namespace(s='a') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}"
                         "{% endfor %}{{ ns.s }}", "memory|characters|MemoryError|seconds"),
    "multiplies a string": ("{{ 'a' * 10**10 }}", "memory|MemoryError|characters"),
    "recurses": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "divides by zero": ("{{ 1 // 0 }}", "division|zero"), "raises": ("{{ raise_exception('no\x1b[31m') }}",
                                                                     r"no\\x1b"),
    "looks for the way out": ("{{ ''.__class__.__mro__ }}", "unsafe|attribute|undefined|access"),
    "attribute of none": ("{{ none.a.b }}", "has no attribute|undefined"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_hostile_template_is_one_line_and_the_next_messages_are_served(name, tmp_path, monkeypatch):
    monkeypatch.setattr("chat_template.SECONDS", 1.0)
    shutil.copy(ROOT / "data/word_problems/tokenizer.json", tmp_path)
    template, words = TEMPLATES[name]
    source = "{% if messages[0].content == 'attack' %}" + template + "{% else %}fine{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=source)))
    ours, began = Tokenizer(tmp_path), time.monotonic()
    for _ in range(2):
        with pytest.raises(TokenizerError, match="refuses these messages") as refusal:
            ours.apply_chat_template([dict(role="user", content="attack")])
        assert re.search(words, str(refusal.value)), str(refusal.value)
        assert str(refusal.value).isprintable() and len(str(refusal.value)) < 500
        assert ours.decode(ours.apply_chat_template([dict(role="user", content="hello")])) == "fine"
    assert time.monotonic() - began < 20


def test_threads_get_the_text_of_their_own_messages():
    template = Template("{{ text * 1000 }}")
    with ThreadPoolExecutor(8) as pool:
        texts_ = list(pool.map(lambda i: template.render(text=f"{i} "), range(300)))
    assert texts_ == [f"{i} " * 1000 for i in range(300)]


def test_an_interrupted_question_does_not_shift_the_answers(monkeypatch):
    template, poll = Template("{{ text }}"), select.poll

    def interrupted():
        raise KeyboardInterrupt
    monkeypatch.setattr("chat_template.select.poll", interrupted)
    with pytest.raises(KeyboardInterrupt):
        template.render(text="first")
    monkeypatch.setattr("chat_template.select.poll", poll)
    assert [template.render(text=text) for text in ("second", "third")] == ["second", "third"]


def test_a_fork_leaves_its_parents_template_alone():
    template = Template("{{ text }}")
    if (fork := os.fork()) == 0:
        right = template.render(text="fork") == "fork"
        template.__del__()
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) == 0
    process = template.child
    assert template.render(text="parent") == "parent" and template.child is process


def test_the_template_finds_jinja_where_we_do(tmp_path, monkeypatch):
    (tmp_path / "jinja2.py").write_text("raise ImportError('the jinja of sys.path')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="the jinja of sys.path"):
        Template("")


def test_messages_that_are_no_json_or_too_deep_are_one_line():
    deep = []
    for _ in range(5000):
        deep = [deep]
    ours = Tokenizer(ROOT / "data/word_problems")
    ours.config["chat_template"] = "{{ messages[0].content }}"
    for content, words in ((deep, "100 deep"), (object(), "text, numbers"), ({1, 2}, "text, numbers")):
        with pytest.raises(TokenizerError, match=words) as refusal:
            ours.apply_chat_template([dict(role="user", content=content)])
        assert "\n" not in str(refusal.value)
    assert ours.decode(ours.apply_chat_template([dict(role="user", content="fine")])) == "fine"


def test_keys_of_messages_cannot_write_special_tokens_either():
    ours = Tokenizer(ROOT / "data/word_problems")
    ours.config["chat_template"] = "{{ messages | tojson }}<|endoftext|>"
    ids = ours.apply_chat_template([dict(role="user", content="", args={"<|endoftext|>": 1})])
    assert ids.count(ours.eos_id) == 1 and "args" in ours.decode(ids)


# ----------------------------------------------------------------------------- text as it becomes final

class Bytes:
    """A tokenizer whose ids are byte strings."""
    def decode_bytes(self, ids):
        return b"".join(ids)


def pieces_of(tokens, skip):
    """Every character, whether it is text, and the number of the token in which it becomes whole."""
    out, run, owner = [], b"", []

    def flush():
        nonlocal run, owner
        at = 0
        for char in run.decode(errors="surrogateescape"):
            size = len(char.encode(errors="surrogateescape"))
            out.append((char, True, owner[min(at + size, len(owner)) - 1]))
            at += size
        run, owner = b"", []

    for n, token in enumerate(tokens, 1):
        if token in skip:
            flush()
            out.extend((char, False, n) for char in token.decode())
        else:
            run, owner = run + token, owner + [n] * len(token)
    flush()
    return out


def wanted(tokens, stops, skip):
    """What is shown of the whole text, how many tokens count, and whether a stop ends it: a search over all
    ends."""
    chars = pieces_of(tokens, skip)
    seen = "".join(char for char, _, _ in chars)
    for end in range(1, len(seen) + 1):
        done = [s for s in stops if seen[:end].endswith(s)]
        if done:
            cut = end - max(map(len, done))
            return "".join(c for c, is_text, _ in chars[:cut] if is_text), chars[end - 1][2], True
    return "".join(c for c, is_text, _ in chars if is_text), len(tokens), False


def test_streamed_text_is_that_of_a_search_over_the_whole_text_however_it_is_cut():
    """Whole characters here; every text is fed in one, in single tokens, and in cuts at random."""
    rng, happened = random.Random(0), Counter()
    for _ in range(2500):
        alphabet = rng.choice(("ab", "aé", "a漢🙂", "b\n é🙂"))
        skip = [b"<s>", b"a"] if rng.random() < 0.2 else [b"<s>"]
        raw = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 25))).encode()
        cuts = sorted(rng.randint(0, len(raw)) for _ in range(rng.randint(0, 12)))
        tokens = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)])]
        tokens = [t for t in tokens if b"\xff" not in t]
        if whole := all(t.decode(errors="ignore").encode() == t for t in tokens):
            for _ in range(rng.choice((0, 0, 1, 3))):
                tokens.insert(rng.randint(0, len(tokens)), b"<s>")
        letters = alphabet + "<s>" * (rng.random() < 0.3)
        stops = ["".join(rng.choice(letters) for _ in range(rng.randint(1, 5)))
                 for _ in range(rng.randint(0, 3))]
        truth = wanted(tokens, stops, skip if whole else [])
        for way in range(4):
            stream, text, at = TextStream(Bytes(), stops, skip if whole else []), "", 0
            while at < len(tokens) or at == 0:
                n = (len(tokens) or 1, 1, rng.randint(1, 3), rng.randint(1, 9))[way]
                text += stream.feed(tokens[at:at + n], end=at + n >= len(tokens))
                at += n
            assert (text, stream.tokens, stream.found) == truth, (tokens, stops, way)
            assert not stream.found or stream.feed([b"more"], end=True) == ""
        happened["found"] += truth[2]
        happened["counted less"] += truth[1] < len(tokens)
        happened["a special token in sight"] += whole and b"<s>" in tokens
    assert min(happened.values()) > 300 and len(happened) == 3, happened


def test_what_may_become_a_stop_is_held_back_and_nothing_else():
    stream = TextStream(Bytes(), ["\n\nQ:"])
    assert [stream.feed([t]) for t in (b"yes\n", b"\n", b"A:\n", b"\nQ")] == ["yes", "", "\n\nA:", ""]
    assert stream.feed([b": and more"]) == "" and stream.found and stream.tokens == 5
    assert stream.feed([b"more"], end=True) == ""


def test_of_two_stops_the_first_to_be_complete_counts_then_the_longest():
    for cut in range(1, 12):
        text = b"Zoe has 4 more coins t"
        stream = TextStream(Bytes(), ["4 more coins t", "re"])
        shown = "".join(stream.feed([text[i:i + cut]]) for i in range(0, len(text), cut))
        assert shown == "Zoe has 4 mo" and stream.found
    stream = TextStream(Bytes(), ["re", "more"])
    assert stream.feed([b"4 more"]) == "4 " and stream.found


def test_special_tokens_are_seen_by_stops_and_left_out_of_the_text():
    tokenizer = Tokenizer(ROOT / "data/word_problems")
    eos, ids = tokenizer.eos_id, tokenizer.encode("The answer is 4.")
    stream = TextStream(tokenizer, ["<|endoftext|>"], [eos])
    assert stream.feed([*ids, eos, *tokenizer.encode(" Question: what next")]) == "The answer is 4."
    assert stream.found and stream.tokens == len(ids) + 1
    plain = TextStream(tokenizer, [], [eos])
    assert plain.feed([*ids, eos]) == "The answer is 4." and plain.tokens == len(ids) + 1


def test_a_character_of_four_tokens_appears_whole_with_the_last():
    stream = TextStream(Bytes())
    assert [stream.feed([bytes([b])]) for b in "🙂".encode()] == ["", "", "", "🙂"]
    assert stream.feed(["🙂".encode()[:2]], end=True) == "\ufffd"


def test_no_cut_of_any_bytes_matters():
    """Bytes that are no UTF-8, left-out tokens that cut characters in two: every way to feed them."""
    alphabet = [b"a", b"b", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98", b"\x80", b"\xff", b"<s>"]
    rng = random.Random(5)
    for _ in range(150):
        tokens = [b"".join(rng.choices(alphabet, k=rng.randint(0, 3))) for _ in range(rng.randint(1, 6))]
        stops = ["".join(rng.choices("aéb\ufffd😀", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 2))]
        skip, results = rng.sample(tokens, rng.randint(0, 1)), set()
        for cuts in range(2 ** (len(tokens) - 1)):
            stream, text, part = TextStream(Bytes(), stops, skip), "", []
            for i, token in enumerate(tokens):
                part.append(token)
                if cuts >> i & 1 or i + 1 == len(tokens):
                    text, part = text + stream.feed(part, end=i + 1 == len(tokens)), []
            results.add((text, stream.tokens, stream.found))
        assert len(results) == 1, (tokens, stops, skip, results)
        text, count, found = results.pop()
        if not skip and not found:
            assert (text, count) == (b"".join(tokens).decode(errors="replace"), len(tokens))


def test_a_long_stop_text_costs_a_step_a_character():
    stream, began = TextStream(Bytes(), ["a" * 20_000 + "b", "a" * 15_000 + "c"]), time.process_time()
    shown = [stream.feed([b"a"]) for _ in range(40_000)]
    assert "".join(shown) == "a" * 20_000 and stream.feed([b"b"]) == "" and stream.found
    assert time.process_time() - began < 5                    # 0.2 s here
