"""Both peers give the text of next-token decoding, whatever is proposed."""
import pytest
import torch

from generate import generate
from model import Llama, LlamaConfig
from speculative import compare, draft_model, main, prompt_lookup, speculate


def random_model(seed, layers=2):
    torch.manual_seed(seed)
    model = Llama(LlamaConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_hidden_layers=layers,
                              num_attention_heads=2,
                              num_key_value_heads=1, max_position_embeddings=120, mask_id=19)).double()
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.data *= 8   # peaked predictions
    return model


@pytest.mark.parametrize("seed", range(8))
def test_speculative_text_is_that_of_ntp_decoding(seed):
    model, small = random_model(seed), random_model(seed + 100, layers=1)
    prompt = torch.randint(19, (1 + seed,), generator=torch.Generator().manual_seed(seed)).tolist()
    options = dict(max_new_tokens=30 + seed, stop_ids=(3,) if seed % 2 else ())
    [ntp] = generate(model, [prompt], mode="ntp", **options)
    for propose in (draft_model(small, 4), draft_model(model, 4), prompt_lookup(5), lambda text: [],
                    lambda text: [1] * 50):
        row = speculate(model, prompt, propose, **options)
        assert (row.tokens, row.stopped) == (ntp.tokens, ntp.stopped)
        assert row.nfe <= ntp.nfe


def test_a_perfect_draft_is_always_kept():
    model = random_model(0)
    row = speculate(model, [1, 2], draft_model(model, 4), max_new_tokens=25)
    assert row.nfe == 5   # every forward outputs `next` and 4 drafted tokens


def test_prompt_lookup_finds_the_latest_place_of_the_longest_ngram():
    propose = prompt_lookup(2, ngram=2)
    assert propose([5, 6, 7, 8, 5, 6, 9, 1, 5, 6]) == [9, 1]
    assert propose([6, 7, 8, 9, 4, 6]) == [7, 8]
    assert propose([1, 2, 3]) == []


def test_the_comparison_is_over_the_same_texts_and_its_lossless_ways_give_them_all():
    model, draft = random_model(0), random_model(1, layers=1)
    rows = {name: figures for name, *figures in compare(model, draft, [[1, 2], [3, 4, 5]], 4, 12, repeats=1)}
    assert rows["NTP"][:1] + rows["NTP"][2:] == [1.0, 0, 1.0]
    assert all(same == 1 for name, (*_, same) in rows.items() if not name.startswith("SBD"))
    assert all(speed > 0 for _, speed, _, _ in rows.values())
    assert all(extra == (sum(w.numel() for w in draft.parameters()) if name.startswith("draft") else 0)
               for name, (_, _, extra, _) in rows.items())
    assert not any(name.startswith("draft") for name, *_ in compare(model, None, [[1]], 4, 2, repeats=1))


def test_bad_options_are_refused_in_one_line(tmp_path):
    with pytest.raises(ValueError, match="--num_prompts 0: wanted 1 to 2000"):
        main(["--num_prompts=0"])
    random_model(0).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="same tokenizer"):
        main([f"--draft_from={tmp_path}", "--init_from=checkpoints/tiny-sbd"])


def test_no_new_tokens_are_no_forwards_and_no_end_that_never_comes():
    for limit in (0, 1):
        row = speculate(random_model(0), [1, 2, 3], prompt_lookup(4), max_new_tokens=limit)
        assert (len(row.tokens), row.nfe) == (limit, limit)
