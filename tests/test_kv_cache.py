"""The cache after every commit and the logits of every window, against forwards without a cache, in float64;
and the rule of a window against its table."""
import random

import numpy as np
import pytest
import torch

from kv_cache import KVCache, cached_attend, may_attend, window, window_rule
from model import Llama, LlamaConfig

V, MASK = 29, 28
# Relative, as section 5 asks: float64 sums of order 1 in another order differ by some 1e-15.
ROUNDING = 1e-12


def tiny_model(dtype=torch.float64, **changes):
    """Random weights, large enough that attention is far from uniform."""
    shape = dict(vocab_size=V, hidden_size=24, intermediate_size=32, num_hidden_layers=2, mask_id=MASK,
                 num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False)
    model = Llama(LlamaConfig(**shape | changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(torch.randn(w.shape, generator=generator) * 0.3 + (1.0 if w.dim() == 1 else 0.0))
    return model.to(dtype).eval().requires_grad_(False)


def plain_forward(model, tokens, may=None):
    """One row without a cache: tokens (list), may (T, T) bool, default causal -> logits (T, V), keys and
    values (layers, Hkv, T, D).

    Positions are those of the text, so a block counts on behind its past.
    """
    T = len(tokens)
    may = torch.ones(T, T, dtype=torch.bool).tril() if may is None else may
    keys, values = [], []

    def attend(layer, q, k, v):
        keys.append(k[0])
        values.append(v[0])
        G = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(G, 1).transpose(-1, -2) / q.shape[-1] ** 0.5   # (1, H, T, T)
        return scores.masked_fill(~may, -torch.inf).softmax(-1) @ v.repeat_interleave(G, 1)

    logits = model(torch.tensor([tokens]), torch.arange(T), attend)
    return logits[0], torch.stack(keys), torch.stack(values)


def past_and_block(past, k):
    """Mask of [past | block of k]: the past is causal, the block sees all."""
    may = torch.ones(past + k, past + k, dtype=torch.bool).tril()
    may[past:] = True
    return may


def assert_close(ours, truth, tolerance=ROUNDING):
    assert ours.shape == truth.shape
    if truth.numel():
        difference = (ours - truth).abs().max().item()
        assert difference <= tolerance * truth.abs().max().item(), difference


def run_window(model, cache, causal, blocks, k, padding=0):
    """One forward: causal[b], a list of ids; blocks[b], a list of (seen, k ids) -> logits (B, W, V)."""
    w = window(cache, list(map(len, causal)), [[seen for seen, _ in row] for row in blocks], k)
    rows = [c + [id for _, ids in row for id in ids] for c, row in zip(causal, blocks)]
    W = max(map(len, rows))
    ids = torch.tensor([r + [padding] * (W - len(r)) for r in rows])
    return model(ids, w.positions, cached_attend(cache, w))


def check_window(model, text, causal, blocks, k, logits, tolerance=ROUNDING):
    """Every logit of a row's window equals that of a forward without a cache."""
    if causal:
        truth, _, _ = plain_forward(model, text + causal)
        assert_close(logits[:len(causal)], truth[len(text):], tolerance)
    for n, (seen, ids) in enumerate(blocks):
        past = text + causal[:seen]
        at = len(causal) + n * k
        truth, _, _ = plain_forward(model, past + ids, past_and_block(len(past), k))
        assert_close(logits[at:at + k], truth[len(past):], tolerance)


def check_cache(model, cache, texts, tolerance=ROUNDING):
    """The committed keys and values are those of one causal forward over the whole text."""
    assert cache.lengths.tolist() == list(map(len, texts))
    for b, text in enumerate(texts):
        if text:
            _, keys, values = plain_forward(model, text)
            assert_close(cache.k[:, b, :, :len(text)], keys, tolerance)
            assert_close(cache.v[:, b, :, :len(text)], values, tolerance)


def random_window(rng, kind, B, k):
    """What each row of a window holds: causal ids, and blocks of (seen, ids)."""
    def ids(n):
        return [rng.randrange(V) for _ in range(n)]

    def block():
        return [MASK if rng.random() < 0.6 else rng.randrange(V) for _ in range(k)]

    causal, blocks = [], []
    for _ in range(B):
        mixed = rng.choice(["causal", "blocks", "pending", "hedges", "nothing"]) if kind == "mixed" else kind
        lengths = {"prefill": rng.randint(3, 17), "causal": rng.randint(1, 6), "one": 1,
                   "pending": rng.choice([0, k, k]), "hedges": rng.randint(1, k + 1)}
        c = ids(lengths.get(mixed, 0))
        hedges = sorted(rng.sample(range(1, len(c) + 1), rng.randint(0, min(3, len(c)))))
        seen = {"blocks": [0], "pending": [len(c)], "hedges": hedges}.get(mixed, [])
        causal.append(c)
        blocks.append([(a, block()) for a in seen])
    if not any(causal) and not any(blocks):
        causal[0] = ids(1)
    return causal, blocks


KINDS = ["prefill", "causal", "one", "pending", "blocks", "blocks", "hedges", "mixed"]


@pytest.mark.parametrize("B, k, ragged, changes", [
    (1, 4, True, {}), (3, 4, True, {}), (3, 4, False, {}), (4, 1, True, {}),
    (2, 7, True, dict(num_key_value_heads=6)), (3, 3, True, dict(num_key_value_heads=1)),
    (2, 5, True, dict(model_type="qwen3", head_dim=6))])
def test_cache_after_every_commit_equals_full_forward(B, k, ragged, changes):
    """Random windows of every kind; each commit keeps all, some or none of the causal tokens, another number
    in each row unless `ragged` is False: then all rows have one length, the case that takes the paths without
    a mask."""
    model, rng = tiny_model(**changes), random.Random(100 * B + k)
    cache, texts = KVCache(model.config, B, 190, dtype=torch.float64), [[] for _ in range(B)]
    for step in range(26):
        kind = KINDS[step % 8] if step < 8 else rng.choice(KINDS[1:])
        if ragged:
            causal, blocks = random_window(rng, kind, B, k)
        else:
            first, seen = random_window(rng, "pending" if kind == "mixed" else kind, 1, k)
            causal = [[rng.randrange(V) for _ in first[0]] for _ in range(B)]
            blocks = [[(a, [rng.choice([MASK, 3, 4, 5]) for _ in range(k)]) for a, _ in seen[0]]
                      for _ in range(B)]
        logits = run_window(model, cache, causal, blocks, k)
        for b in range(B):
            check_window(model, texts[b], causal[b], blocks[b], k, logits[b])
        keep = [rng.choice([len(c), rng.randint(0, len(c))]) for c in causal]
        keep = keep if ragged else [min(keep)] * B
        cache.commit(torch.tensor(keep) if step % 2 else keep)
        texts = [text + c[:n] for text, c, n in zip(texts, causal, keep)]
        check_cache(model, cache, texts)
    assert min(map(len, texts)) > 10


def test_decoding_loop_of_algorithm_3_keeps_an_exact_cache():
    """[pending | block], then [block]: the finished block enters the cache as if it had been prompt."""
    model, k, rng = tiny_model(), 5, random.Random(0)
    texts = [[rng.randrange(V) for _ in range(n)] for n in (7, 2, 11)]
    cache, pending = KVCache(model.config, 3, 60, dtype=torch.float64), [[], [], []]
    run_window(model, cache, texts, [[], [], []], k)
    cache.commit(list(map(len, texts)))
    for _ in range(4):
        block = [[MASK] * k for _ in texts]
        for step in range(3):
            causal = pending if step == 0 else [[], [], []]
            blocks = [[(len(c), b)] for c, b in zip(causal, block)]
            logits = run_window(model, cache, causal, blocks, k)
            for b in range(3):
                check_window(model, texts[b], causal[b], blocks[b], k, logits[b])
            cache.commit(list(map(len, causal)))
            texts = [text + c for text, c in zip(texts, causal)]
            check_cache(model, cache, texts)
            reveal = lambda: step == 2 or rng.random() < 0.4
            block = [[rng.randrange(V) if id == MASK and reveal() else id for id in row] for row in block]
        pending = block
    assert cache.lengths.tolist() == [7 + 15, 2 + 15, 11 + 15]


def test_cache_in_float32_equals_full_forward_in_float64():
    model, exact, rng = tiny_model(torch.float32), tiny_model(), random.Random(1)
    cache, texts = KVCache(model.config, 2, 80), [[], []]
    for kind in ("prefill", "pending", "blocks", "hedges", "causal", "mixed", "pending"):
        causal, blocks = random_window(rng, kind, 2, 4)
        logits = run_window(model, cache, causal, blocks, 4)
        for b in range(2):
            # float32: unit roundoff 6e-8, two layers of sums over 24 and 32 terms, and rounded weights
            check_window(exact, texts[b], causal[b], blocks[b], 4, logits[b].double(), 2e-5)
        cache.commit(list(map(len, causal)))
        texts = [text + c for text, c in zip(texts, causal)]
        check_cache(exact, cache, texts, 2e-5)


# -------------------------------------------------------------------------------------- the rule of a window

def attends(q, key, length, num_causal, blocks, k):
    """Section 2 for one row and one pair: q, an index into the window; key, a slot of the cache, of the
    window from `length` on."""
    def block_of(i):
        return (i - num_causal) // k if i >= num_causal else None
    if key < length:
        return True                                                    # its row's cache
    key -= length
    if key >= num_causal + k * len(blocks):
        return False                                                   # scratch
    seen = q + 1 if block_of(q) is None else blocks[block_of(q)]
    if block_of(key) is None:
        return key < seen                                              # causal tokens with index < seen
    return block_of(q) == block_of(key)                                # all tokens of its own block


def test_window_rule_is_the_table_of_section_2():
    """Written out: a draft with hedges behind 0 and 2 of its tokens, an sbd block behind nothing, a token."""
    position, seen, block = window_rule([3, 0, 1], [[1, 3], [0], []], 2)
    assert position.tolist() == [[0, 1, 2, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6]]
    assert seen.tolist() == [[1, 2, 3, 1, 1, 3, 3], [0, 0, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7]]
    assert block.tolist() == [[-1, -1, -1, 0, 0, 1, 1], [0, 0, -1, -1, -1, -1, -1], [-1] * 7]
    may = may_attend(np.array([[1], [0], [2]]), seen, block, 8)
    picture = ["xx......", "xxx.....", "xxxx....", "xx..xx..", "xx..xx..", "xxxx..xx", "xxxx..xx"]   # row 0
    assert ["".join(".x"[int(x)] for x in row) for row in may[0]] == picture
    assert may[1, :2].tolist() == [[True] * 2 + [False] * 6] * 2
    assert may[2, 0].tolist() == [True] * 3 + [False] * 5


@pytest.mark.parametrize("k", [1, 2, 5])
def test_window_rule_and_its_mask_pair_by_pair(k):
    """Random layouts of rows of any length: the table read token by token, every slot of the cache asked."""
    rng = random.Random(k)
    for _ in range(150):
        B = rng.randint(1, 4)
        num_causal = [rng.randint(0, 7) for _ in range(B)]
        sees = [[rng.randint(0, c) for _ in range(rng.randint(0, 3))] for c in num_causal]
        num_causal[0] += not (num_causal[0] or sees[0])
        position, seen, block = window_rule(num_causal, sees, k)
        W = max(c + k * len(a) for c, a in zip(num_causal, sees))
        assert position.shape == seen.shape == block.shape == (B, W)
        lengths = np.array([[rng.randint(0, 9)] for _ in range(B)])
        may = may_attend(lengths, seen, block, end := int(lengths.max()) + W)
        assert may.shape == (B, W, end)
        for b, (c, behind) in enumerate(zip(num_causal, sees)):
            table = [(j, j + 1, -1) for j in range(c)]                 # position, seen, block
            table += [(a + i, a, n) for n, a in enumerate(behind) for i in range(k)]
            assert list(zip(position[b], seen[b], block[b]))[:len(table)] == table
            wanted = [[attends(q, key, lengths[b, 0], c, behind, k) for key in range(end)]
                      for q in range(len(table))]
            assert may[b, :len(table)].tolist() == wanted
            assert may[b].any(-1).all()                                # no row of padding is NaN


def mask_of(w, B, W, G):
    """Window.mask with its two shorthands spelled out -> bool (B, W, end)."""
    if w.causal:
        assert w.end == W
        return torch.ones(W, W, dtype=torch.bool).tril().expand(B, W, W)
    if w.mask is None:
        return torch.ones(B, W, w.end, dtype=torch.bool)
    assert w.mask.shape == (B, 1, G * W, w.end) and set(w.mask.unique().tolist()) <= {0.0, -torch.inf}
    heads = w.mask.view(B, G, W, w.end)
    assert (heads == heads[:, :1]).all()   # the same for all query heads of a key head
    return heads[:, 0] == 0


@pytest.mark.parametrize("k", [1, 2, 5])
def test_window_follows_the_rule_pair_by_pair(k):
    """Section 2's table, for cached rows of equal and different lengths, and every kind of window."""
    rng, config = random.Random(k), tiny_model().config
    for n in range(150):
        B, kind = rng.randint(1, 3), rng.choice(KINDS)
        causal, blocks = random_window(rng, kind, B, k)
        num_causal, seen = list(map(len, causal)), [[a for a, _ in row] for row in blocks]
        cache = KVCache(config, B, 70, dtype=torch.float64)
        cache.commit(([0] * B, [9] * B, [rng.randint(0, 12) for _ in range(B)])[n % 3])
        w = window(cache, num_causal, seen, k)
        W = max(c + k * len(a) for c, a in zip(num_causal, seen))
        assert w.positions.shape == (B, W)
        may = mask_of(w, B, W, 3)
        for b in range(B):
            length, real = int(cache.lengths[b]), num_causal[b] + k * len(seen[b])
            wanted = [[attends(q, key, length, num_causal[b], seen[b], k) for key in range(w.end)]
                      for q in range(real)]
            assert may[b, :real].tolist() == wanted
            places = [*range(num_causal[b]), *(a + i for a in seen[b] for i in range(k))]
            assert w.positions[b, :real].tolist() == [length + place for place in places]
            assert may[b].any(-1).all()                                # no row of padding is NaN


def test_block_never_leaks_into_past_or_another_block():
    """Change one block: its own logits change; no other block's, no causal token's and no committed key
    does, bit for bit."""
    model, k, rng = tiny_model(), 4, random.Random(2)
    a, b, other = ([rng.randrange(V) for _ in range(k)] for _ in range(3))
    causal, results = [[1, 2, 3], [4, 5, 6]], []
    for second in b, other:
        cache = KVCache(model.config, 2, 40, dtype=torch.float64)
        run_window(model, cache, [[7, 8, 9, 10], [11, 12]], [[], []], k)
        cache.commit([4, 2])
        logits = run_window(model, cache, causal, [[(1, a), (2, second), (3, b)], [(2, a)]], k)
        cache.commit([3, 3])
        results.append((logits, cache.k[:, 0, :, :7].clone(), cache.v[:, 0, :, :7].clone()))
    (before, *kept), (after, *kept_after) = results
    changed = (before != after).any(-1)
    assert changed[0].tolist() == [False] * (3 + k) + [True] * k + [False] * k and not changed[1].any()
    assert all(map(torch.equal, kept, kept_after))


def test_draft_tokens_behind_seen_never_reach_a_block():
    """Section 10: block_a sees next and draft[:a], never the rest of the draft."""
    model, k = tiny_model(), 4
    logits = []
    for draft in [1, 2, 3, 4], [1, 2, 9, 9]:
        cache = KVCache(model.config, 1, 40, dtype=torch.float64)
        run_window(model, cache, [[7, 8, 9]], [[]], k)
        cache.commit([3])
        logits.append(run_window(model, cache, [draft], [[(a, [MASK] * k) for a in (1, 2, 3, 4)]], k)[0])
    changed = (logits[0] != logits[1]).any(-1).tolist()
    assert changed == [False] * 2 + [True] * 2 + [False] * (2 * k) + [True] * (2 * k)


# -------------------------------------------------------------------------- padding, scratch, rows, overflow

def test_padding_changes_nothing():
    """A row alone equals the row in a batch, to rounding; what the padding holds changes nothing, bit for
    bit."""
    model, rng, k = tiny_model(), random.Random(3), 4
    batch, again = (KVCache(model.config, 4, 120, dtype=torch.float64) for _ in range(2))
    alone = [KVCache(model.config, 1, 120, dtype=torch.float64) for _ in range(4)]
    for kind in "prefill mixed pending hedges mixed causal mixed blocks mixed hedges".split():
        causal, blocks = random_window(rng, kind, 4, k)
        logits = run_window(model, batch, causal, blocks, k)
        logits_again = run_window(model, again, causal, blocks, k, padding=V - 2)
        keep = [rng.randint(0, len(c)) for c in causal]
        batch.commit(keep)
        again.commit(keep)
        for b in range(4):
            real, n = len(causal[b]) + k * len(blocks[b]), int(batch.lengths[b])
            assert torch.equal(logits[b, :real], logits_again[b, :real])
            assert torch.equal(batch.k[:, b, :, :n], again.k[:, b, :, :n])
            if real:
                [row] = run_window(model, alone[b], causal[b:b + 1], blocks[b:b + 1], k)
                assert_close(logits[b, :real], row)
                alone[b].commit(keep[b:b + 1])
            assert_close(batch.k[:, b, :, :n], alone[b].k[:, 0, :, :n])
            assert_close(batch.v[:, b, :, :n], alone[b].v[:, 0, :, :n])


def test_what_was_not_committed_is_never_read():
    """Scribble over every slot behind `lengths` before each forward: no logit changes, bit for bit."""
    model, rng, k = tiny_model(), random.Random(4), 4
    clean, scribbled = (KVCache(model.config, 3, 150, dtype=torch.float64) for _ in range(2))
    for step in range(12):
        causal, blocks = random_window(rng, KINDS[step % 8], 3, k)
        for b, n in enumerate(scribbled.lengths.tolist()):
            scribbled.k[:, b, :, n:] = 1e3
            scribbled.v[:, b, :, n:] = -1e3
        ours, truth = (run_window(model, cache, causal, blocks, k) for cache in (scribbled, clean))
        keep = [rng.randint(0, len(c)) for c in causal]
        for b in range(3):
            real = len(causal[b]) + k * len(blocks[b])
            assert torch.equal(ours[b, :real], truth[b, :real])
        clean.commit(keep)
        scribbled.commit(keep)


def test_rows_never_see_each_other():
    model, k = tiny_model(), 3
    results = []
    for other in 5, 6:
        cache = KVCache(model.config, 2, 40, dtype=torch.float64)
        run_window(model, cache, [[1, 2, 3, 4], [other] * 3], [[], []], k)
        cache.commit([4, 3])
        blocks = [[(2, [MASK] * k)], [(1, [other] * k)]]
        results.append(run_window(model, cache, [[1, 2], [other]], blocks, k))
    assert torch.equal(results[0][0], results[1][0])
    assert (results[0][1, :4] != results[1][1, :4]).any(-1).all()


def test_keep_drops_rows_and_the_rest_goes_on_exactly():
    model, rng, k = tiny_model(), random.Random(5), 4
    cache, texts = KVCache(model.config, 5, 90, dtype=torch.float64), [[] for _ in range(5)]

    def go(kind):
        causal, blocks = random_window(rng, kind, len(texts), k)
        logits = run_window(model, cache, causal, blocks, k)
        for b, text in enumerate(texts):
            check_window(model, text, causal[b], blocks[b], k, logits[b])
        cache.commit(list(map(len, causal)))
        texts[:] = [text + c for text, c in zip(texts, causal)]
        check_cache(model, cache, texts)

    go("prefill")
    for rows in [1, 2, 4], [0, 1, 2], [1, 2], [1]:
        cache.keep(rows)
        texts[:] = [texts[b] for b in rows]
        check_cache(model, cache, texts)
        for kind in "pending", "mixed", "hedges":
            go(kind)


def test_window_that_does_not_fit_is_refused():
    """By one token, with what there is and what is needed; the longest row decides, nothing is committed."""
    model = tiny_model()
    cache = KVCache(model.config, 2, 10, dtype=torch.float64)
    cache.commit([6, 2])
    with pytest.raises(ValueError, match=r"holds 10 tokens a row .* needs 11"):
        window(cache, [1, 1], [[1], [1]], 4)
    with pytest.raises(ValueError, match=r"holds 10 tokens a row .* needs 11"):
        window(cache, [5, 0], [[], []], 4)
    with pytest.raises(ValueError, match=r"holds 10 tokens a row .* needs 14"):
        window(cache, [0, 0], [[0, 0], [0]], 4)
    assert cache.lengths.tolist() == [6, 2]
    for fits in ([0, 0], [[0], [0]]), ([4, 1], [[], []]):
        window(cache, *fits, 4)


def test_commits_that_cannot_be_are_refused():
    cache = KVCache(tiny_model().config, 2, 10, dtype=torch.float64)
    cache.commit([6, 2])
    words = r"^cannot commit \[.*\] tokens to rows of \[6, 2\], cache of 10$"
    for n in [5, 0], [0, -1], [1], [1, 1, 1]:
        with pytest.raises(ValueError, match=words):
            cache.commit(n)
    assert cache.lengths.tolist() == [6, 2]
    cache.commit([4, 8])


@pytest.mark.parametrize("rows, tokens", [(1, 10**12), (10**6, 10**6), (10**9, 10**9), (2**16, 2**31)])
def test_a_cache_that_memory_has_no_room_for_is_refused_in_one_line(rows, tokens):
    words = f"^a cache of {rows} rows of {tokens} tokens takes .* GiB free: .*$"
    with pytest.raises(ValueError, match=words):
        KVCache(tiny_model().config, rows, tokens)


def test_a_lent_cache_is_empty_and_has_all_rows_again():
    cache = KVCache(tiny_model().config, 4, 10, dtype=torch.float64)
    cache.commit([1, 2, 3, 4])
    cache.keep([1, 3])
    for rows in 3, 1, 4:
        lent = cache.lend(rows)
        assert lent is cache and lent.lengths.tolist() == [0] * rows
        for mine, whole in zip((lent.k, lent.v), cache.whole):
            assert mine.shape[1] == rows and mine.data_ptr() == whole.data_ptr()


def test_cache_is_allocated_once():
    model = tiny_model()
    cache = KVCache(model.config, 2, 50, dtype=torch.float64)
    storage = cache.k.data_ptr(), cache.v.data_ptr()
    assert cache.k.shape == cache.v.shape == (2, 2, 2, 50, 4)
    for kind in "prefill", "pending", "blocks":
        causal, blocks = random_window(random.Random(6), kind, 2, 4)
        run_window(model, cache, causal, blocks, 4)
        cache.commit(list(map(len, causal)))
    cache.keep([1])
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == storage


def test_ragged_rows_under_autocast():
    """Autocast gives q, k and v its own dtype; the cache keeps the one it was made with."""
    model = tiny_model(torch.float32)
    cache = KVCache(model.config, 2, 16)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for causal in ([[1, 2, 3], [4]], [[5], [6]]):
            logits = run_window(model, cache, causal, [[], []], 4)
            cache.commit([len(c) for c in causal])
    for b, text in enumerate(([1, 2, 3, 5], [4, 6])):
        truth = plain_forward(model, text)[0][-1]
        assert (logits[b, 0].float() - truth).norm() <= 0.05 * truth.norm()      # bfloat16 keeps 8 bits
