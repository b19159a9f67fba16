"""The peers of verified decoding: speculative decoding with a draft model, and with prompt lookup.

Both are lossless at temperature 0, as verified decoding is: a draft is checked by the model in one forward and its
longest agreeing prefix is kept (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318). They differ in where
the draft comes from: a smaller model of the same tokenizer, or the last place in the text where its last tokens stood.
Both run over the same Llama and KVCache as generate.py, one text at a time, so that bench.py can compare them.
"""
import torch

from generate import Row, check_prompts
from kv_cache import KVCache, cached_attend, window


@torch.inference_mode()
def extend(model, cache, tokens):
    """One causal window over `tokens` -> the NTP prediction behind each of them, a list; commits nothing."""
    w = window(cache, [len(tokens)], [[]], 0)
    device = model.lm_head.weight.device
    logits = model.lm_head(model.hidden(torch.tensor([tokens], device=device), w.positions, cached_attend(cache, w)))[0]
    if model.config.mask_id is not None:
        logits[:, model.config.mask_id] = -torch.inf
    return logits.argmax(-1).tolist()


def speculate(model, prompt, propose, max_new_tokens=256, stop_ids=()) -> Row:
    """Greedy decoding of `prompt`, a list of ids, with the drafts of propose(text so far) -> list of ids.

    nfe counts the forwards of `model` as method section 5 does; the draft's own cost is in the seconds only.
    """
    check_prompts(model.config, [prompt], "ntp", 1)
    row = Row(0, min(max_new_tokens, model.config.max_position_embeddings - len(prompt)), None)
    cache = KVCache(model.config, 1, model.config.max_position_embeddings, model.lm_head.weight.device, model.lm_head.weight.dtype)
    following = extend(model, cache, prompt)[-1]
    cache.commit([len(prompt)])
    while not row.done:
        row.nfe += 1
        draft = []
        if following not in stop_ids and len(row.tokens) + 1 < row.limit:   # else this pass only outputs `following`
            draft = propose(prompt + row.tokens + [following])[:row.limit - len(row.tokens) - 1]
            predicted = extend(model, cache, [following] + draft)
            accepted = next((j for j, token in enumerate(draft) if token != predicted[j]), len(draft))
            cache.commit([1 + accepted])
            row.extend([following] + draft[:accepted], stop_ids)
            following = predicted[accepted]
        else:
            row.extend([following], stop_ids)
    return row


def draft_model(model, length: int):
    """propose(text) -> `length` greedy tokens of a smaller model; its cache keeps what the last texts share."""
    cache, known = KVCache(model.config, 1, model.config.max_position_embeddings, model.lm_head.weight.device, model.lm_head.weight.dtype), []

    def propose(text):
        nonlocal known
        shared = next((i for i, (a, b) in enumerate(zip(known, text)) if a != b), min(len(known), len(text)))
        shared = min(shared, len(text) - 1)
        cache.lengths[:] = shared                                  # what was drafted and refused is overwritten
        fresh, draft = text[shared:], []
        for _ in range(min(length, cache.k.shape[3] - len(text))):
            draft.append(extend(model, cache, fresh)[-1])
            cache.commit([len(fresh)])
            fresh = draft[-1:]
        known = text + draft[:-1]
        return draft

    return propose


def prompt_lookup(length: int, ngram: int = 3):
    """propose(text) -> the `length` tokens behind the latest earlier place of its last `ngram` (or fewer) tokens."""
    def propose(text):
        for n in range(min(ngram, len(text) - 1), 0, -1):
            for i in range(len(text) - n - 1, -1, -1):
                if text[i:i + n] == text[-n:]:
                    return text[i + n:i + n + length]
        return []

    return propose
