"""The cache after every commit, and the logits of every window, against forwards without a cache in float64."""
import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kv_cache import KVCache, cached_attend, window   # noqa: E402
from model import Llama, LlamaConfig                   # noqa: E402

V, MASK = 29, 28
# Float64 with activations of order 1: sums in another order differ by some 1e-15; section 5 asks for 1e-12, relative.
ROUNDING = 1e-12


def tiny_model(dtype=torch.float64, **changes):
    """Random weights, large enough that attention is far from uniform."""
    model = Llama(LlamaConfig(**dict(vocab_size=V, hidden_size=24, intermediate_size=32, num_hidden_layers=2, mask_id=MASK,
                                     num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=False) | changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for w in model.parameters():
            w.copy_(torch.randn(w.shape, generator=generator) * 0.3 + (1.0 if w.dim() == 1 else 0.0))
    return model.to(dtype).eval().requires_grad_(False)


def plain_forward(model, tokens, may=None):
    """One row without a cache: tokens (list), may (T, T) bool, default causal -> logits (T, V), keys, values (layers, Hkv, T, D).

    Positions are those of the text, so a block counts on behind its past.
    """
    T = len(tokens)
    may = torch.ones(T, T, dtype=torch.bool).tril() if may is None else may
    keys, values = [], []

    def attend(layer, q, k, v):
        keys.append(k[0])
        values.append(v[0])
        G = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(G, 1).transpose(-1, -2) / q.shape[-1] ** 0.5          # (1, H, T, T)
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
    return model(torch.tensor([r + [padding] * (W - len(r)) for r in rows]), w.positions, cached_attend(cache, w))


def check_window(model, text, causal, blocks, k, logits, tolerance=ROUNDING):
    """Every logit of a row's window equals that of a forward without a cache."""
    if causal:
        assert_close(logits[:len(causal)], plain_forward(model, text + causal)[0][len(text):], tolerance)
    for n, (seen, ids) in enumerate(blocks):
        past = text + causal[:seen]
        at = len(causal) + n * k
        assert_close(logits[at:at + k], plain_forward(model, past + ids, past_and_block(len(past), k))[0][len(past):], tolerance)


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
        c = ids({"prefill": rng.randint(3, 17), "causal": rng.randint(1, 6), "one": 1, "pending": rng.choice([0, k, k]),
                 "hedges": rng.randint(1, k + 1)}.get(mixed, 0))
        seen = {"blocks": [0], "pending": [len(c)],
                "hedges": sorted(rng.sample(range(1, len(c) + 1), rng.randint(0, min(3, len(c)))))}.get(mixed, [])
        causal.append(c)
        blocks.append([(a, block()) for a in seen])
    if not any(causal) and not any(blocks):
        causal[0] = ids(1)
    return causal, blocks


KINDS = ["prefill", "causal", "one", "pending", "blocks", "blocks", "hedges", "mixed"]


@pytest.mark.parametrize("B, k, ragged, changes", [
    (1, 4, True, {}), (3, 4, True, {}), (3, 4, False, {}), (4, 1, True, {}), (2, 7, True, dict(num_key_value_heads=6)),
    (3, 3, True, dict(num_key_value_heads=1)), (2, 5, True, dict(model_type="qwen3", head_dim=6))])
def test_cache_after_every_commit_equals_full_forward(B, k, ragged, changes):
    """Random windows of every kind; each commit keeps all, some or none of the causal tokens, another number in each row
    unless `ragged` is False: then all rows have one length, the case that takes the paths without a mask."""
    model, rng = tiny_model(**changes), random.Random(100 * B + k)
    cache, texts = KVCache(model.config, B, 190, dtype=torch.float64), [[] for _ in range(B)]
    for step in range(26):
        kind = KINDS[step % 8] if step < 8 else rng.choice(KINDS[1:])
        if ragged:
            causal, blocks = random_window(rng, kind, B, k)
        else:
            first, seen = random_window(rng, "pending" if kind == "mixed" else kind, 1, k)
            causal = [[rng.randrange(V) for _ in first[0]] for _ in range(B)]
            blocks = [[(a, [rng.choice([MASK, 3, 4, 5]) for _ in range(k)]) for a, _ in seen[0]] for _ in range(B)]
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
    """[pending | block] then [block] forwards: the finished block enters the cache as if it had been prompt."""
    model, k, rng = tiny_model(), 5, random.Random(0)
    texts = [[rng.randrange(V) for _ in range(n)] for n in (7, 2, 11)]
    cache, pending = KVCache(model.config, 3, 60, dtype=torch.float64), [[], [], []]
    run_window(model, cache, texts, [[], [], []], k)
    cache.commit(list(map(len, texts)))
    for _ in range(4):
        block = [[MASK] * k for _ in texts]
        for step in range(3):
            causal = pending if step == 0 else [[], [], []]
            logits = run_window(model, cache, causal, [[(len(c), b)] for c, b in zip(causal, block)], k)
            for b in range(3):
                check_window(model, texts[b], causal[b], [(len(causal[b]), block[b])], k, logits[b])
            cache.commit(list(map(len, causal)))
            texts = [text + c for text, c in zip(texts, causal)]
            check_cache(model, cache, texts)
            block = [[rng.randrange(V) if id == MASK and (step == 2 or rng.random() < 0.4) else id for id in row] for row in block]
        pending = block
    assert cache.lengths.tolist() == [7 + 15, 2 + 15, 11 + 15]


def test_cache_in_float32_equals_full_forward_in_float64():
    model, exact, rng = tiny_model(torch.float32), tiny_model(), random.Random(1)
    cache, texts = KVCache(model.config, 2, 80), [[], []]
    for kind in ("prefill", "pending", "blocks", "hedges", "causal", "mixed", "pending"):
        causal, blocks = random_window(rng, kind, 2, 4)
        logits = run_window(model, cache, causal, blocks, 4)
        for b in range(2):
            # float32: unit roundoff 6e-8, two layers of sums over 24 and 32 terms; weights alone differ by a roundoff
            check_window(exact, texts[b], causal[b], blocks[b], 4, logits[b].double(), 2e-5)
        cache.commit(list(map(len, causal)))
        texts = [text + c for text, c in zip(texts, causal)]
        check_cache(exact, cache, texts, 2e-5)


# -------------------------------------------------------------------------------------- the rule of a window

def may_attend(q, key, length, num_causal, blocks, k):
    """Section 2 for one row and one pair: q, an index into the window; key, a slot of the cache, of the window from `length` on."""
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


def mask_of(w, B, W, G):
    """Window.mask with its two shorthands spelled out -> bool (B, W, end)."""
    if w.causal:
        assert w.end == W
        return torch.ones(W, W, dtype=torch.bool).tril().expand(B, W, W)
    if w.mask is None:
        return torch.ones(B, W, w.end, dtype=torch.bool)
    assert w.mask.shape == (B, 1, G * W, w.end) and set(w.mask.unique().tolist()) <= {0.0, -torch.inf}
    heads = w.mask.view(B, G, W, w.end)
    assert (heads == heads[:, :1]).all()                               # the same for all query heads of a key head
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
        cache.commit([0] * B if n % 3 == 0 else [9] * B if n % 3 == 1 else [rng.randint(0, 12) for _ in range(B)])
        w = window(cache, num_causal, seen, k)
        W = max(c + k * len(a) for c, a in zip(num_causal, seen))
        assert w.positions.shape == (B, W)
        may = mask_of(w, B, W, 3)
        for b in range(B):
            length, real = int(cache.lengths[b]), num_causal[b] + k * len(seen[b])
            wanted = [[may_attend(q, key, length, num_causal[b], seen[b], k) for key in range(w.end)] for q in range(real)]
            assert may[b, :real].tolist() == wanted
            places = [*range(num_causal[b]), *(a + i for a in seen[b] for i in range(k))]
            assert w.positions[b, :real].tolist() == [length + place for place in places]
            assert may[b].any(-1).all()                                # no row of padding is NaN


def test_block_never_leaks_into_past_or_another_block():
    """Change one block: its own logits change; no other block's, no causal token's and no committed key does, bit for bit."""
    model, k, rng = tiny_model(), 4, random.Random(2)
    causal, (a, b, other) = [[1, 2, 3], [4, 5, 6]], ([[rng.randrange(V) for _ in range(k)] for _ in range(3)])
    results = []
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


# ---------------------------------------------------------------------------- padding, scratch, rows, overflow

def test_padding_changes_nothing():
    """A row alone equals the row in a batch, to rounding; what the padding holds changes nothing, bit for bit."""
    model, rng, k = tiny_model(), random.Random(3), 4
    batch, again = (KVCache(model.config, 4, 120, dtype=torch.float64) for _ in range(2))
    alone = [KVCache(model.config, 1, 120, dtype=torch.float64) for _ in range(4)]
    for kind in ("prefill", "mixed", "pending", "hedges", "mixed", "causal", "mixed", "blocks", "mixed", "hedges"):
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
                assert_close(logits[b, :real], run_window(model, alone[b], causal[b:b + 1], blocks[b:b + 1], k)[0])
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
        ours, truth = run_window(model, scribbled, causal, blocks, k), run_window(model, clean, causal, blocks, k)
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
        results.append(run_window(model, cache, [[1, 2], [other]], [[(2, [MASK] * k)], [(1, [other] * k)]], k))
    assert torch.equal(results[0][0], results[1][0]) and (results[0][1, :4] != results[1][1, :4]).any(-1).all()


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
    """By one token, with what there is and what is needed; the longest row decides, and nothing is committed."""
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
