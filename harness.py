"""Benchmarks: the tasks of lm-eval, EleutherAI's harness, and the NFE speedup of what generates (Table 1).

    python harness.py --init_from=DIR --tasks gsm8k,mmlu --gamma 0.35

Texts are decoded as the options say; likelihoods are those of next-token prediction.
Shapes: B batch, L length, n targets, C hidden size, V vocabulary.
"""
from cli import add_model, load_model, need, need_between, need_mask, need_package, parser, run

import os
from collections import Counter, defaultdict
from pathlib import Path

import torch

from eval import NTP, add_cell, asked, bar, label, open_folder, write_json
from generate import decode
from sbd_loss import LOGITS
from tokenizer import TextStream

HERE = Path(__file__).resolve().parent
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")   # tasks name it so


class SBD:
    """What lm-eval asks of a model; `harness_model` completes it with lm-eval's own TemplateLM.

    .spent counts, by task, texts, forwards, and tokens until the end: stop text, stop id or limit.
    """

    eot_token_id = prefix_token_id = tokenizer_name = None         # in place of TemplateLM's properties

    def __init__(self, model, tok, cell, batch_size=64, max_new_tokens=256, seed=0):
        super().__init__()
        self.model, self.tok, self.cell, self.batch_size = model, tok, cell, batch_size
        self.max_new_tokens, self.seed, self.spent = max_new_tokens, seed, defaultdict(Counter)
        self.place, self.context = model.lm_head.weight.device, model.config.max_position_embeddings
        self.stop_ids = {*model.config.stop_ids, tok.eos_id} - {None}
        self.eot_token_id, self.tokenizer_name = tok.eos_id, str(tok.folder)
        self.prefix_token_id = tok.special_ids.get(tok.token_name("bos_token"), tok.eos_id)

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        ids = self.tok.encode_added(string)                        # a chat template names special tokens
        bos = self.tok.bos_id
        return ids if add_special_tokens is False or bos is None or ids[:1] == [bos] else [bos] + ids

    def apply_chat_template(self, chat_history, add_generation_prompt=True):
        text = self.tok.render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].strip()                 # a reply to go on with: nothing behind it
        return text[:text.rindex(last) + len(last)]

    # -------- likelihoods

    @torch.inference_mode()
    def _loglikelihood_tokens(self, requests, **kwargs):
        groups, answers = {}, [None] * len(requests)
        for i, (_, before, target) in enumerate(requests):         # choices of one token share their forward
            ids = tuple((before + target)[-self.context - 1:-1])
            groups.setdefault(ids, []).append((i, target[-self.context:]))
        inputs = sorted(groups, key=len, reverse=True)
        for begin in range(0, len(inputs), self.batch_size):
            bar(begin / len(inputs), "loglikelihood", False)
            part = inputs[begin:begin + self.batch_size]
            tokens = torch.tensor([[*ids] + [0] * (len(part[0]) - len(ids)) for ids in part])
            for hidden, ids in zip(self.model.hidden(tokens.to(self.place)), part):   # of (B, L, C)
                for i, target in groups[ids]:
                    answers[i] = self.score(hidden[len(ids) - len(target):len(ids)], target)
        return answers

    def score(self, hidden, target):
        """hidden (n, C) -> (log-probability of the n targets, whether each is the likeliest token)."""
        total, greedy, size = 0.0, True, max(1, LOGITS // self.model.config.vocab_size)
        for rows, t in zip(hidden.split(size), torch.tensor(target).to(self.place).split(size)):
            logits = self.model.lm_head(rows)                      # (n, V); the mask id is ordinary here
            p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            total += float(p.gather(-1, t[:, None]).sum())
            greedy = greedy and bool((p.argmax(-1) == t).all())
        return total, greedy

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
        windows = [[(None, *make_disjoint_window(w)) for w in get_rolling_token_windows(
            self.tok_encode(r.args[0]), self.prefix_token_id, self.context, 1)] for r in requests]
        scores = iter(self._loglikelihood_tokens([w for text in windows for w in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    # -------- texts

    def generate_until(self, requests, disable_tqdm=False):
        prompts = [self.tok_encode(r.args[0]) or [self.prefix_token_id] for r in requests]
        texts, groups = {}, {}
        for i in sorted(range(len(requests)), key=lambda i: -len(prompts[i])):
            groups.setdefault(self.wanted(requests[i].args[1]), []).append(i)
        for (limit, *draw), group in groups.items():
            room = self.context - min(limit, self.context // 2)    # as much of a prompt's end as leaves room
            for begin in range(0, len(group), self.batch_size):
                bar(len(texts) / len(requests), "generate_until", False)
                part = group[begin:begin + self.batch_size]
                options = dict(max_new_tokens=limit, seed=self.seed + len(texts)) | dict(draw)
                found = self.texts([requests[i] for i in part], [prompts[i][-room:] for i in part], options)
                texts |= dict(zip(part, found))
        return [texts[i] for i in range(len(requests))]

    def wanted(self, kwargs):
        """A request's limit, and how it is drawn, as pairs of options: none is greedy."""
        limit = next((int(kwargs[key]) for key in LIMITS if kwargs.get(key)), self.max_new_tokens)
        if not (kwargs.get("temperature") and kwargs.get("do_sample", True)):
            return limit,
        return limit, *((key, kwargs.get(key) or None) for key in ("temperature", "top_k", "top_p"))

    def texts(self, requests, prompts, options):
        """Decode one batch; each text ends in front of its own stop texts, which may name special tokens."""
        until = [request.args[1].get("until") or [] for request in requests]
        skip = {*self.tok.special_ids.values(), *self.stop_ids}
        streams = [TextStream(self.tok, [u] if isinstance(u, str) else u, skip) for u in until]
        texts = [""] * len(requests)
        for steps in decode(self.model, prompts, stop_ids=self.stop_ids, **self.cell | options):
            for step in steps:
                i, row = step.row.index, step.row
                texts[i] += streams[i].feed(step.final, row.done)
                row.done |= streams[i].found
                if row.done:
                    self.spent[requests[i].task_name].update(texts=1, tokens=streams[i].tokens, nfe=row.nfe)
        return texts


def harness_model(model, tokenizer, cell, **options):
    """An lm_eval model: likelihoods in NTP mode, texts decoded as `cell` says; options: as of SBD."""
    from lm_eval.api.model import TemplateLM                       # only here: a help text needs no harness
    return type("SBD", (SBD, TemplateLM), {})(model, tokenizer, cell, **options)


def benchmark(args, manager, lm):
    """Run lm-eval's tasks -> its results."""
    from lm_eval import simple_evaluate
    try:
        return simple_evaluate(model=lm, tasks=args.tasks, num_fewshot=args.num_fewshot, limit=args.limit,
                               apply_chat_template=args.chat, task_manager=manager, log_samples=False,
                               confirm_run_unsafe_code=args.run_code)
    except (OSError, ImportError, ValueError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, OSError):
            why = f"lm-eval could not get the data ({why}): check the connection"
        elif isinstance(error, ImportError):
            why = f"lm-eval needs another package for it ({why}): install that"
        elif "HF_ALLOW_CODE_EVAL" in str(error) or "unsafe" in str(error):
            why = "scoring it runs code that the model wrote; where that is safe, give --run_code"
        raise ValueError(f"{', '.join(args.tasks)}: {why}") from None


def report(found, lm, path):
    """Print lm-eval's table and the NFE speedup of every task that generates, and write both."""
    from lm_eval.utils import make_table
    print("\n".join(make_table(found, column) for column in ("results", "groups") if found.get(column)))
    if lm.spent:
        print(f"| task ({label(lm.cell)}) | texts | tokens | forwards | NFE speedup |\n|---|---|---|---|---|")
    for task, s in lm.spent.items():
        print(f"| {task} | {s['texts']} | {s['tokens']} | {s['nfe']} | {s['tokens'] / s['nfe']:.2f} |")
    names = "results", "groups", "n-shot", "n-samples", "versions"
    write_json(path, dict(cell=lm.cell, spent=lm.spent, **{key: found[key] for key in names if key in found}))


# ------------------------------------------------------------------------------------------- command line

def parse(argv=None):
    p = parser(__doc__)
    a = p.add_argument
    a("--tasks", required=True, help="tasks of lm-eval, NAME,NAME,...")
    a("--include_path", type=Path, help="a folder with task files of your own")
    a("--num_fewshot", type=int, help="examples before the question; default: the task's own number")
    a("--chat", action="store_true", help="wrap prompts into the checkpoint's chat template")
    a("--run_code", action="store_true", help="allow tasks whose scoring runs code that the model wrote")
    a("--limit", type=int, help="examples of each task; default: all")
    a("--max_new_tokens", type=int, default=256, help="most tokens a text, where a task names no limit")
    a("--batch_size", type=int, default=64, help="rows decoded together")
    a("--seed", type=int, default=0, help="of tasks that sample")
    a("--out_dir", type=Path, default=Path("out/eval"), help="tasks.json is written there")
    add_model(p, "default: the shipped model", dtypes=("float32", "bfloat16", "float16", "float64"))
    add_cell(p, "how texts are decoded")
    return p.parse_args(argv)


def check(args):
    """What can be refused before a model is loaded -> lm-eval's task manager."""
    need_between(args, limit=(1, 10**6), num_fewshot=(0, 1000), max_new_tokens=(1, 10**6),
                 batch_size=(1, 4096), seed=(0, 2**31 - 1))
    path, lists = args.include_path, "python -m lm_eval ls tasks lists them"
    need(all(args.tasks), f"--tasks: wanted names of tasks, NAME,NAME,...: {lists}")
    need(path is None or path.is_dir(), f"--include_path {path} is no folder")
    need_package(True, "--tasks", "lm_eval", "lm-eval")
    open_folder(args.out_dir)
    from lm_eval.tasks import TaskManager
    manager = TaskManager(include_path=path and str(path))
    unknown = [name for name in args.tasks if not manager.match_tasks([name])]
    need(not unknown, f"lm-eval knows no task {', '.join(unknown)}: {lists}, --include_path adds yours")
    return manager


def main(argv=None):
    args = parse(argv)
    args.tasks, cell = [name.strip() for name in args.tasks.split(",")], asked(args)
    manager = check(args)
    if args.run_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"                     # the metric's own consent
    shipped = "tiny-sbd" if cell and cell["mode"] == "sbd" else "tiny-verified"
    model, tokenizer = load_model(args, HERE / "checkpoints" / shipped)
    cell = cell or (NTP if model.config.mask_id is None else dict(mode="verified"))
    if cell != NTP:
        need_mask(model.config, args.init_from)
    lm = harness_model(model, tokenizer, cell, batch_size=args.batch_size,
                       max_new_tokens=args.max_new_tokens, seed=args.seed)
    found = benchmark(args, manager, lm)
    bar(1.0, "", False)
    report(found, lm, args.out_dir / "tasks.json")
    return found


if __name__ == "__main__":
    run(main)
