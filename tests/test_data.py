"""data/: the .bin format, packing and targets against slow references, and the three prepare.py."""
import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import cli
import data.bin
from data.bin import Dataset, Rows, batch, num_ntp_targets, pack, targets, write_set
from data.jsonl import prepare as jsonl
from data.stdlib import prepare as stdlib
from data.word_problems import prepare as words
from tokenizer import Tokenizer

STOP, VOCAB = 7, 100_000            # more than uint16 holds
WORDS = ROOT / "data/word_problems"


def random_documents(seed, count, longest):
    """Documents whose ids tell where they come from; three in four end in the stop id."""
    rng = np.random.default_rng(seed)
    docs = []
    for number in range(count):
        n = int(rng.integers(1, longest + 1))
        ids = 1000 + number * 100 + np.arange(n) % 100
        if rng.random() < 0.75:
            ids[-1] = STOP
        docs.append((ids.tolist(), (rng.random(n) < 0.6).tolist()))
    return docs


def dataset(dir, docs, split="train"):
    write_set(dir, {split: docs}, [STOP], VOCAB)
    return Dataset(dir, split)


def run(script, *args):
    """A command, run in this process: (exit code, stdout, stderr)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, sys.argv = sys.argv, [script, *map(str, args)]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.run({"word_problems": words, "jsonl": jsonl, "stdlib": stdlib}[script].main)
    except SystemExit as exit:
        code = exit.code
    finally:
        sys.argv = argv
    return subprocess.CompletedProcess(sys.argv, code, out.getvalue(), err.getvalue())


# ----------------------------------------------------------------------------------------- format

def test_dataset_gives_back_what_was_written(tmp_path):
    docs = random_documents(0, 50, 30)
    set_ = dataset(tmp_path, docs)
    assert set_.tokens.dtype == np.uint32 and isinstance(set_.tokens, np.memmap)
    assert set_.tokens.tolist() == [id for ids, _ in docs for id in ids]
    assert set_.mask.tolist() == [int(m) for _, mask in docs for m in mask]
    assert set_.lengths.tolist() == [len(ids) for ids, _ in docs]
    assert set_.stops.tolist() == [int(ids[-1] == STOP) for ids, _ in docs]
    counts = {"tokens": len(set_.tokens), "documents": 50, "targets": int(set_.mask.sum())}
    assert set_.meta["splits"]["train"] == counts


@pytest.mark.parametrize("name, change", [
    ("meta.json", None), ("meta.json", b"{"), ("meta.json", b"[]"), ("train.bin", None), ("train.bin",
                                                                                          b"123"),
    ("train.mask.bin", None), ("train.docs.bin", b""), ("train.docs.bin", "swap")])
def test_damaged_set_is_one_clear_line(tmp_path, name, change):
    dataset(tmp_path, random_documents(0, 5, 9))
    path = tmp_path / name
    if change is None:
        path.unlink()
    elif change == "swap":
        path.write_bytes(path.read_bytes()[::-1])
    else:
        path.write_bytes(change)
    with pytest.raises(ValueError) as error:
        Dataset(tmp_path, "train")
    words = str(error.value)
    assert "\n" not in words and str(tmp_path) in words and "prepare" in words


def test_a_document_that_starts_outside_the_set_is_found(tmp_path):
    """Starts so far apart that their differences overflow: every length looks right."""
    dataset(tmp_path, [([1, 2], [True] * 2)] * 4)
    docs = np.fromfile(tmp_path / "train.docs.bin", np.int64)
    docs[2], docs[4] = 2**63 - 1, -2**63 + 9
    docs.tofile(tmp_path / "train.docs.bin")
    with pytest.raises(ValueError, match="docs.bin is damaged"):
        Dataset(tmp_path, "train")


def test_unknown_split_names_those_there_are(tmp_path):
    dataset(tmp_path, random_documents(0, 5, 9))
    with pytest.raises(ValueError, match="no split 'val', only train"):
        Dataset(tmp_path, "val")


@pytest.mark.parametrize("bad", [([], []), ([1, 2], [True]), ([VOCAB], [True]), ([-1], [True])])
def test_failed_write_leaves_the_old_set(tmp_path, bad):
    docs = random_documents(0, 20, 9)
    dataset(tmp_path, docs)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match="document 3"):
        dataset(tmp_path, random_documents(1, 3, 9) + [bad])
    assert sorted(os.listdir(tmp_path)) == before
    assert Dataset(tmp_path, "train").tokens.tolist() == [id for ids, _ in docs for id in ids]


def test_killed_write_leaves_the_old_set(tmp_path):
    docs = random_documents(0, 20, 9)
    dataset(tmp_path, docs)
    def killed_half_way():
        for _ in range(20):
            yield [1] * 100_000, [True] * 100_000
        os.kill(os.getpid(), signal.SIGKILL)
    child = os.fork()
    if child == 0:
        dataset(tmp_path, killed_half_way())
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / f"train.bin.{child}.tmp").stat().st_size > 0
    assert Dataset(tmp_path, "train").tokens.tolist() == [id for ids, _ in docs for id in ids]
    dataset(tmp_path, docs)                        # the next one clears up behind it
    assert not list(tmp_path.glob("*.tmp"))


def test_a_full_disk_is_one_line_and_leaves_the_old_set(tmp_path):
    docs = random_documents(0, 20, 9)
    dataset(tmp_path, docs)
    code = ("import resource, runpy, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
            f"sys.argv = ['prepare.py', '--num_train=2000', '--num_val=2', '--out_dir={tmp_path}']\n"
            f"runpy.run_path({str(WORDS / 'prepare.py')!r}, run_name='__main__')")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2 and result.stderr.count("\n") == 1 and "File too large" in result.stderr
    assert Dataset(tmp_path, "train").tokens.tolist() == [id for ids, _ in docs for id in ids]
    assert not list(tmp_path.glob("*.tmp"))


def test_where_a_file_system_knows_no_locks_sets_are_written_all_the_same(tmp_path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(data.bin.fcntl, "flock", flock)
    docs = random_documents(0, 20, 9)
    (tmp_path / "train.bin.1.tmp").write_text("another process's, which may be at work")
    dataset(tmp_path, docs)
    assert Dataset(tmp_path, "train").tokens.tolist() == [id for ids, _ in docs for id in ids]
    assert [path.name for path in tmp_path.glob("*.tmp")] == ["train.bin.1.tmp"]
    monkeypatch.setattr(data.bin, "fcntl", None)                                # Windows
    dataset(tmp_path, docs[:7])
    assert len(Dataset(tmp_path, "train").lengths) == 7


def test_kill_between_renames_never_leaves_a_mixture(tmp_path, monkeypatch):
    old = [(ids, [True] * len(ids)) for ids, _ in random_documents(0, 20, 9)]
    new = [(np.array(ids) + 1, mask) for ids, mask in old]  # of the same sizes: the hard case
    for step in range(4):
        dataset(tmp_path, old)
        calls, replace = [], os.replace

        def killed(source, target):
            calls.append(target)
            if len(calls) > step:
                raise KeyboardInterrupt
            replace(source, target)
        monkeypatch.setattr(data.bin.os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            dataset(tmp_path, new)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="no data set"):
            Dataset(tmp_path, "train")


# ---------------------------------------------------------------------------------------- packing

def cut(docs, seq_len, copies):
    """The slow reference: the pieces that packing must place, as (tokens, mask, number of copies)."""
    out = []
    for ids, mask in docs:
        for i in range(0, len(ids), seq_len):
            piece = ids[i:i + seq_len]
            ends_in_stop = i + seq_len >= len(ids) and ids[-1] == STOP
            out.append((tuple(piece), tuple(mask[i:i + seq_len]),
                        min(copies, seq_len - len(piece)) * ends_in_stop))
    return out


def split_row(b, r):
    """One row of a batch -> its documents, (tokens, mask, number of copies) each, and the padding's
    length."""
    docs, ids = [], b.doc_ids[r].tolist()
    for number in sorted(set(ids)):
        at = [i for i, d in enumerate(ids) if d == number]
        assert at == list(range(at[0], at[-1] + 1))                            # in one piece
        tokens, copy = b.tokens[r, at].tolist(), b.is_copy[r, at].tolist()
        n = copy.count(False)
        assert not any(copy[:n]) and all(copy[n:]) and len(set(tokens[n - 1:])) <= 1 + (n == len(tokens))
        if n < len(tokens):
            assert tokens[n - 1:] == [STOP] * (len(tokens) - n + 1)
            assert not b.loss_mask[r, at].tolist()[n:].count(True)
        docs.append((tuple(tokens[:n]), tuple(b.loss_mask[r, at].tolist()[:n]), len(tokens) - n))
    padding = 0
    if docs and set(docs[-1][0]) == {STOP} and not any(docs[-1][1]):
        padding = len(docs.pop()[0])
    return docs, padding


CASES = [(16, 3, 40), (16, 0, 40), (32, 31, 60), (8, 3, 3), (7, 5, 30), (1, 2, 5), (64, 15, 20)]


@pytest.mark.parametrize("seq_len, copies, longest", CASES)
def test_every_document_once_an_epoch_and_rows_are_greedy(tmp_path, seq_len, copies, longest):
    docs = random_documents(seq_len, 60, longest)
    docs = [(ids, [True] * len(mask)) for ids, mask in docs]  # so that padding is told from a stop
    set_ = dataset(tmp_path, docs)
    for epoch in (0, 1, 5):
        rows = pack(set_, seq_len, copies, seed=3, epoch=epoch)
        b = batch(rows, range(len(rows)))
        assert b.tokens.shape == (len(rows), seq_len) and b.tokens.dtype == b.doc_ids.dtype == torch.int64
        assert b.loss_mask.dtype == b.is_copy.dtype == torch.bool
        found = [split_row(b, r) for r in range(len(rows))]
        assert sorted(d for row, _ in found for d in row) == sorted(cut(docs, seq_len, copies))
        # greedy: in the order of packing, no row's first document had room in the row before
        unshuffled = [found[np.flatnonzero(rows.order(epoch) == r)[0]] for r in range(len(rows))]
        for (_, padding), (row, _) in zip(unshuffled, unshuffled[1:]):
            assert len(row[0][0]) + row[0][2] > padding or len(row[0][0]) + row[0][2] == seq_len


def test_copies_are_only_dropped_where_a_text_fills_its_row(tmp_path):
    docs = [([5] * (n - 1) + [STOP], [True] * n) for n in range(1, 41)]
    rows = pack(dataset(tmp_path, docs), 16, 3)
    whole = {len(t): c for r in range(len(rows)) for t, _,
             c in split_row(batch(rows, [r]), 0)[0] if t[-1] == STOP}
    assert whole == {**{n: 3 for n in range(1, 14)}, 14: 2, 15: 1, 16: 0}


def slow_targets(tokens, doc_ids, loss_mask, is_copy, block_size):
    """Section 3, one position at a time, for one row."""
    loss, ntp = [], []
    for i in range(len(tokens)):
        document = [j for j in range(len(tokens)) if doc_ids[j] == doc_ids[i]]
        real = [j for j in document if not is_copy[j]]
        position = i - document[0]
        last = real[-1] - document[0]
        if is_copy[i]:
            loss.append(loss_mask[real[-1]] and position // block_size == last // block_size)
            ntp.append(False)
        else:
            loss.append(loss_mask[i])
            ntp.append(loss_mask[i] and i > 0 and doc_ids[i - 1] == doc_ids[i])
    return loss, ntp


@pytest.mark.parametrize("seq_len, copies, longest", CASES)
def test_targets_equal_a_position_by_position_reading(tmp_path, seq_len, copies, longest):
    rows = pack(dataset(tmp_path, random_documents(seq_len, 40, longest)), seq_len, copies)
    b = batch(rows, range(len(rows)))
    for block_size in (1, 2, 3, 5, copies + 1):
        loss_mask, ntp_mask = targets(b, block_size)
        for r in range(len(rows)):
            row = [x[r].tolist() for x in (b.tokens, b.doc_ids, b.loss_mask, b.is_copy)]
            assert (loss_mask[r].tolist(), ntp_mask[r].tolist()) == slow_targets(*row, block_size)
        assert num_ntp_targets(b) == int(ntp_mask.sum())


def test_stop_fills_its_block_at_every_place(tmp_path):
    """With k - 1 copies the block of the stop id is whole, wherever in it the text ends."""
    k = 4
    docs = [([5] * (n - 1) + [STOP], [True] * n) for n in range(1, 12)]
    rows = pack(dataset(tmp_path, docs), 24, k - 1)
    b = batch(rows, range(len(rows)))
    loss_mask, _ = targets(b, k)
    for r in range(len(rows)):
        for number in set(b.doc_ids[r][b.loss_mask[r]].tolist()):
            assert int(loss_mask[r][b.doc_ids[r] == number].sum()) % k == 0


def test_padding_is_never_a_target_and_a_document_of_its_own(tmp_path):
    b = batch(pack(dataset(tmp_path, [([5, 6, STOP], [True] * 3)]), 10, 2), [0])
    assert b.tokens[0].tolist() == [5, 6] + [STOP] * 8
    assert b.doc_ids[0].tolist() == [0] * 5 + [1] * 5
    assert b.loss_mask[0].tolist() == [True] * 3 + [False] * 7
    assert b.is_copy[0].tolist() == [False] * 3 + [True] * 2 + [False] * 5


def test_epochs_permute_the_same_rows_and_follow_each_other(tmp_path):
    set_ = dataset(tmp_path, random_documents(0, 80, 20))
    rows = pack(set_, 32, 3, seed=1)
    n = len(rows)
    epochs = [batch(rows, range(e * n, (e + 1) * n)).tokens for e in range(3)]
    for e in (2, 0, 1):  # stateless: in any order, from anew
        alone = pack(set_, 32, 3, seed=1, epoch=e)
        assert len(alone) == n and torch.equal(batch(alone, range(n)).tokens, epochs[e])
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[1], epochs[2])
    assert sorted(epochs[0].tolist()) == sorted(epochs[1].tolist())
    assert torch.equal(batch(rows, [n - 1, n]).tokens, torch.stack([epochs[0][-1], epochs[1][0]]))
    other = pack(set_, 32, 3, seed=2)
    assert not torch.equal(batch(other, [0, 1, 2]).tokens, epochs[0][:3])


def test_packing_200k_documents_takes_about_a_second():
    lengths = np.random.default_rng(0).integers(20, 200, 200_000)
    class Lengths:                                                             # packing needs nothing else
        starts, stops = np.cumsum(lengths) - lengths, np.ones(len(lengths), np.int64)
    Lengths.lengths = lengths
    began = time.process_time()
    rows = pack(Lengths, 512, 15)
    assert isinstance(rows, Rows) and time.process_time() - began < 2          # 0.1 s here; slower machines
    assert (lengths.sum() + 15 * len(lengths)) / (512 * len(rows)) > 0.85      # little padding


# ---------------------------------------------------------------------------------- word problems

def test_no_held_out_question_is_trained_on():
    train, val = words.problems("train"), words.problems("val")
    assert len(train) == 200_000 and len(val) == 2_000
    questions = {p.prompt for p in train}
    assert len(questions) == 200_000 and not questions & {p.prompt for p in val}


def test_problems_are_deterministic_and_n_takes_the_first():
    assert words.problems("val") == words.problems("val")
    assert words.problems("val", 7) == words.problems("val")[:7]
    assert words.problems("train", 50) == words.problems("train", 60)[:50]
    with pytest.raises(ValueError):
        words.problems("val", 2_001)


def test_solutions_show_correct_arithmetic_and_state_the_answer():
    for p in words.problems("val"):
        shown = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", p.solution)
        assert 2 <= len(shown) <= 4
        for a, sign, b, result in shown:
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b),
                    "/": int(a) / int(b)}[sign] == int(result)
            assert 0 <= int(result) <= 200
        assert int(shown[-1][3]) == p.answer and p.solution.endswith(f"\nThe answer is {p.answer}.")
        assert words.grade(p, p.solution)
        numbers = set(re.findall(r"\d+", p.prompt))                            # all of them are restated
        assert numbers <= set(re.findall(r"\d+", p.solution))


def test_grader_reads_the_number_behind_the_answer():
    p = words.Problem("?\n", "The answer is 18.", 18)
    for text in ("The answer is 18", "x = 3\nThe answer is 18.\n", "The answer is 18.0.",
                 "The answer is 18, so"):
        assert words.grade(p, text), text
    for text in ("", "18", "The answer is", "The answer is .", "The answer is 1", "The answer is 181.",
                 "The answer is -18.", "The answer is 18.5.", "The answer is 18,000.",
                  "The answer is eighteen"):
        assert not words.grade(p, text), text


def test_digits_stay_single_tokens_and_ids_are_contiguous():
    tokenizer = Tokenizer.from_pretrained(WORDS)
    content = json.loads((WORDS / "tokenizer.json").read_text())
    digit_tokens = [t for t in content["model"]["vocab"] if re.search(r"\d", t)]
    assert sorted(digit_tokens) == list("0123456789")
    ids = sorted([*content["model"]["vocab"].values(), *(t["id"] for t in content["added_tokens"])])
    assert ids == list(range(512)) and tokenizer.vocab_size == 512
    assert tokenizer.special_ids == {"<|endoftext|>": 510, "<|mask|>": 511} and tokenizer.eos_id == 510
    assert len(tokenizer.encode("14 + 9 = 123")) == 10                         # the space before a digit, too
    assert {510, 511}.isdisjoint(tokenizer.encode("<|endoftext|><|mask|>"))


def test_transformers_reads_the_same_ids():
    transformers = pytest.importorskip("transformers")
    ours, theirs = Tokenizer.from_pretrained(WORDS), transformers.AutoTokenizer.from_pretrained(str(WORDS))
    assert theirs.eos_token_id == ours.eos_id and len(theirs) == ours.vocab_size
    for text in [p.prompt + p.solution for p in words.problems("val", 300)] + [Path(os.__file__).read_text()]:
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == ours.decode(ours.encode(text)) == text


def test_committed_tokenizer_is_what_training_gives(tmp_path):
    pytest.importorskip("rustbpe")
    words.train_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (WORDS / name).read_bytes()


def test_word_problems_prepare_writes_prompt_solution_and_stop(tmp_path):
    result = run("word_problems", f"--out_dir={tmp_path}", "--num_train", 30, "--num_val=5")
    assert result.returncode == 0, result.stderr
    tokenizer, set_ = Tokenizer.from_pretrained(WORDS), Dataset(tmp_path, "train")
    assert set_.meta["tokenizer_hash"] == tokenizer.hash and set_.stop_ids == [tokenizer.eos_id]
    assert set_.vocab_size == tokenizer.vocab_size and len(Dataset(tmp_path, "val").lengths) == 5
    for p, start, n in zip(words.problems("train", 30), set_.starts, set_.lengths):
        ids, mask = set_.tokens[start:start + n].tolist(), set_.mask[start:start + n].tolist()
        prompt = tokenizer.encode(p.prompt)  # encoded apart, as in generation
        assert ids == prompt + tokenizer.encode(p.solution) + [tokenizer.eos_id]
        assert mask == [0] * len(prompt) + [1] * (n - len(prompt))
    assert run("word_problems", "--out_dir", tmp_path, "--num_train=3", "--num_val=1",
               "--loss_on_prompt").returncode == 0
    assert Dataset(tmp_path, "train").mask.all()


# ------------------------------------------------------------------------------------------ jsonl

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
WITH_BOS = "{{ bos_token }}" + CHATML
FORGETFUL = CHATML.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}(thought)"
                                              "{% endif %}{{ m.content }}")


def chat_tokenizer(dir, template, bos=False):
    """Our tokenizer with chat tokens, a template, and a BOS if wanted."""
    content = json.loads((WORDS / "tokenizer.json").read_text())
    for i, name in enumerate(["<|im_start|>", "<|im_end|>", "<|bos|>"]):
        content["added_tokens"].append({**content["added_tokens"][0], "id": 512 + i, "content": name})
    config = {"eos_token": "<|endoftext|>", "bos_token": "<|bos|>", "add_bos_token": bos,
              "chat_template": template}
    dir.mkdir()
    (dir / "tokenizer.json").write_text(json.dumps(content))
    (dir / "tokenizer_config.json").write_text(json.dumps(config))
    return dir


def documents_of(dir, split="train"):
    set_ = Dataset(dir, split)
    spans = [slice(start, start + n) for start, n in zip(set_.starts, set_.lengths)]
    return set_, [(set_.tokens[span].tolist(), set_.mask[span].tolist()) for span in spans]


def prepare_rows(tmp_path, rows, folder, *args):
    (tmp_path / "my.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return run("jsonl", tmp_path / "my.jsonl", f"--tokenizer={folder}", "--out_dir", tmp_path / "out", *args)


TALK = [{"role": "system", "content": "s"}, {"role": "user", "content": "Mia <|im_end|>"},
        {"role": "assistant", "content": "one"}, {"role": "user", "content": "Tom"},
        {"role": "assistant", "content": "two"}, {"role": "user", "content": "unanswered"}]


@pytest.mark.parametrize("template, bos", [(CHATML, False), (WITH_BOS, True)])
def test_jsonl_targets_are_completions_and_replies(tmp_path, template, bos):
    folder = chat_tokenizer(tmp_path / "tok", template, bos)
    rows = [{"text": "Mia has <|endoftext|>"}, {"prompt": "2 + 2 =", "completion": " 4"}, {"messages": TALK}]
    result = prepare_rows(tmp_path, rows, folder, "--val_fraction=0")
    assert result.returncode == 0, result.stderr
    set_, docs = documents_of(tmp_path / "out")
    tokenizer = Tokenizer.from_pretrained(folder)
    first = [514] if bos else []
    assert set_.stop_ids == [510, 513] and set_.stops.tolist() == [1, 1, 1]
    text, completion, chat = docs
    assert text[0] == first + tokenizer.encode(rows[0]["text"]) + [510]
    assert text[1] == [0] * len(first) + [1] * (len(text[0]) - len(first))
    assert completion[0] == first + tokenizer.encode("2 + 2 =") + tokenizer.encode(" 4") + [510]
    assert completion[1] == [0] * (len(completion[0]) - 3) + [1] * 3                   # " ", "4", EOS
    assert chat[0] == tokenizer.apply_chat_template(TALK[:5], add_generation_prompt=False)[:-1]
    assert chat[0].count(514) == int(bos) and chat[0].count(513) == 5 and chat[0][-1] == 513
    assert tokenizer.decode([t for t, m in zip(*chat) if m]) == "one<|im_end|>two<|im_end|>"


def test_jsonl_template_that_rewrites_history_gives_a_document_a_reply(tmp_path):
    folder = chat_tokenizer(tmp_path / "tok", FORGETFUL)
    assert prepare_rows(tmp_path, [{"messages": TALK}], folder, "--val_fraction=0").returncode == 0
    tokenizer = Tokenizer.from_pretrained(folder)
    replies = [tokenizer.decode([t for t, m in zip(*doc) if m]) for doc in documents_of(tmp_path / "out")[1]]
    assert replies == ["(thought)one<|im_end|>", "(thought)two<|im_end|>"]


GOOD = '{"text": "a"}'


@pytest.mark.parametrize("line", [
    "{", "[]", "3", "{}", '{"text": 3}', '{"text": ""}', '{"prompt": "a"}', '{"completion": "a"}',
    '{"prompt": "a", "completion": ""}', '{"text": "a", "messages": []}', '{"messages": []}',
    '{"messages": "a"}',
    '{"messages": [{"role": "user", "content": "a"}]}', '{"messages": [{"role": "assistant"}]}',
    '{"messages": [{"role": "assistant", "content": null}]}', '{"text": "\\ud800"}', b'{"text": "\xff"}',
    "[" * 10_000])
def test_jsonl_malformed_row_is_named_and_nothing_is_touched(tmp_path, line):
    folder, out = chat_tokenizer(tmp_path / "tok", CHATML), tmp_path / "out"
    assert prepare_rows(tmp_path, [{"text": "old"}] * 3, folder).returncode == 0
    before = {path: path.read_bytes() for path in out.iterdir()}
    data_ = line if isinstance(line, bytes) else line.encode()
    (tmp_path / "bad.jsonl").write_bytes(f"{GOOD}\n\n{GOOD}\n".encode() + data_ + f"\n{GOOD}".encode())
    with pytest.raises(ValueError, match=r"bad.jsonl:4: ") as error:
        list(jsonl.rows([tmp_path / "bad.jsonl"]))
    assert "\n" not in str(error.value)
    if line in ("{", "{}"):                                                    # the command, for two of them
        result = run("jsonl", tmp_path / "bad.jsonl", "--tokenizer", folder, "--out_dir", out)
        assert result.returncode == 2 and result.stdout == "" and result.stderr.count("\n") == 1
        assert "bad.jsonl:4: " in result.stderr
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_jsonl_other_errors_are_one_line_too(tmp_path):
    folder = chat_tokenizer(tmp_path / "tok", "{{ raise_exception('no system role') }}")
    row = {"messages": TALK}
    for rows, tokenizer, args, wanted in [
            ([row, row], folder, (), "no system role"), ([row, row], WORDS, (), "no chat template"),
            ([{"text": "a"}] * 2, tmp_path / "nowhere", (), "nowhere"), ([{"text": "a"}], folder, (),
                                                                         "too few"),
            ([{"text": "a"}] * 9, folder, ("--val_fraction=1",), "val_fraction"), ([], folder, (), "0 rows")]:
        result = prepare_rows(tmp_path, rows, tokenizer, *args)
        error = result.stderr
        assert result.returncode == 2 and wanted in error and error.count("\n") == 1, error
        assert not list((tmp_path / "out").glob("*"))
    result = run("jsonl", tmp_path / "missing.jsonl", "--tokenizer", folder)
    assert result.returncode == 2 and "missing.jsonl" in result.stderr and result.stderr.count("\n") == 1


def test_jsonl_held_out_rows_follow_the_seed(tmp_path):
    rows = [{"text": f"row {i}"} for i in range(20)]
    sets = []
    for seed in (0, 0, 1):
        assert prepare_rows(tmp_path, rows, WORDS, "--val_fraction", 0.2, f"--seed={seed}").returncode == 0
        train, val = documents_of(tmp_path / "out")[1], documents_of(tmp_path / "out", "val")[1]
        assert len(val) == 4 and len(train) == 16 and not [d for d in val if d in train]
        sets.append(val)
    assert sets[0] == sets[1] != sets[2]


# ----------------------------------------------------------------------------------------- stdlib

def test_stdlib_takes_sources_and_leaves_tests_and_packages(tmp_path):
    for name in ("b.py", "a/c.py", "a/twin.py", "test/d.py", "site-packages/e.py", "a/tests/f.py", "g.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("same" if "twin" in name or name == "b.py" else name)
    (tmp_path / "latin.py").write_bytes(b"\xff")
    (tmp_path / "empty.py").write_text("\n")
    names = lambda **options: [str(p.relative_to(tmp_path)) for p in stdlib.sources(tmp_path, **options)]
    assert names() == ["a/c.py", "a/twin.py"]
    assert names(with_tests=True) == ["a/c.py", "a/tests/f.py", "a/twin.py", "test/d.py"]


def test_stdlib_split_depends_on_the_text_alone():
    held_out = [stdlib.is_held_out(f"file {i}", 0.1) for i in range(2_000)]
    assert 150 < sum(held_out) < 250                                           # 200 +- 4 standard deviations
    assert all(stdlib.is_held_out(f"file {i}", 0.2) for i in range(2_000) if held_out[i])


def test_stdlib_documents_end_in_eos():
    tokenizer = Tokenizer.from_pretrained(WORDS)
    (ids, mask), = stdlib.documents(["import os\n"], tokenizer)
    assert ids == tokenizer.encode("import os\n") + [tokenizer.eos_id] and all(mask)


@pytest.mark.parametrize("script", ["word_problems", "stdlib", "jsonl"])
def test_help_shows_defaults(script):
    result = run(script, "--help")
    assert result.returncode == 0 and "default: " in result.stdout and "--out_dir" in result.stdout


def test_a_prepare_script_is_a_command_of_its_own(tmp_path):
    result = subprocess.run([sys.executable, WORDS / "prepare.py", "--num_train=0"], capture_output=True,
                            text=True,
                            cwd=tmp_path)
    assert result.returncode == 2 and result.stderr.startswith("prepare.py: --num_train"), result.stderr


# ------------------------------------------------------------------------ two at once, and damaged files

@pytest.mark.parametrize("script, args", [("word_problems", ["--num_train=20", "--num_val=2"])])
def test_a_folder_that_another_process_writes_is_left_alone(script, args, tmp_path):
    code = (f"from data.bin import locked\nwith locked({str(tmp_path)!r}):\n"
            "    print('held', flush=True)\n    input()")
    holder = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE)
    assert holder.stdout.readline() == b"held\n"
    result = run(script, *args, "--out_dir", tmp_path)
    assert result.returncode == 2 and "is being written by another process" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    holder.kill()                                             # the lock dies with its process
    holder.wait()
    assert run(script, *args, "--out_dir", tmp_path).returncode == 0
    Dataset(tmp_path, "train")


@pytest.mark.parametrize("name, value", [
    ("num_train", 10**12), ("num_train", 0), ("num_val", 10**12), ("num_val", -1)])
def test_word_problems_are_counted_before_they_are_made(name, value, tmp_path):
    result = run("word_problems", f"--{name}={value}", "--out_dir", tmp_path / "out")
    assert result.returncode == 2 and f"--{name} {value}: wanted 1 to" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", [
    dict(vocab_size="x"), dict(vocab_size=True), dict(vocab_size=-1), dict(stop_ids=None),
    dict(stop_ids=[1, None]), dict(stop_ids=[10**9]), dict(splits=[]),
    dict(splits=dict(train=dict(tokens=2**63, documents=1))),
    dict(splits=dict(train=dict(tokens="7", documents=1))), dict(splits=dict(train=7)), dict(tokenizer=3)])
def test_a_meta_json_that_cannot_be_is_refused_in_one_line(change, tmp_path):
    assert run("word_problems", "--num_train=5", "--num_val=2", "--out_dir", tmp_path).returncode == 0
    meta = json.loads((tmp_path / "meta.json").read_text())
    (tmp_path / "meta.json").write_text(json.dumps(meta | change))
    with pytest.raises(ValueError) as error:
        Dataset(tmp_path, "train")
    assert "\n" not in str(error.value) and str(tmp_path) in str(error.value)


def test_an_id_outside_the_vocabulary_is_found_in_the_batch(tmp_path):
    assert run("word_problems", "--num_train=5", "--num_val=2", "--out_dir", tmp_path).returncode == 0
    raw = np.fromfile(tmp_path / "train.bin", np.uint32)
    raw[3] = 512
    raw.tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match="outside the vocabulary"):
        batch(pack(Dataset(tmp_path, "train"), 2048), [0])
