"""Replayed forwards (kv_cache.run_window, generate.py --compile) against running them: same tokens, few
recordings.

There is no GPU here: a tape of operations stands in for the CUDA graph, and nothing but the addresses on it
can flow in.
"""
import functools
import random

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import adapter
from brute_force import tiny_model
from generate import decode, generate
from kernels.cuda_graph import Graphs

pytest.importorskip("triton")
from kernels import block_decode

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim")   # inside the interpreter
V, MASK = 13, 5


@pytest.fixture(autouse=True)
def weights_as_on_cuda(monkeypatch):
    """One matrix of which the weights are views, none packed for the CPU."""
    monkeypatch.setattr("kernels.packed_linear.pack", lambda weight: None)


class Tape(TorchDispatchMode):
    """What a CUDA graph is, on the CPU: the operations of one run with the addresses they had. A replay does
    them again, at those addresses; no Python of the recorded function runs, so no number it read on the host
    can change."""
    host = "_local_scalar_dense", "nonzero", "lift_fresh"            # operations that read or write it

    def __init__(self, function, inputs, pool):
        super().__init__()
        function(*inputs)                                            # the warm-up
        self.inputs, self.calls, self.recording = inputs, [], True
        kernels = block_decode.window_kernel, block_decode.combine_kernel
        launches = {kernel: kernel.run for kernel in kernels}
        for kernel, run in launches.items():
            kernel.run = functools.partial(self.launch, run)
        with self:
            self.output = function(*inputs)
        for kernel, run in launches.items():
            kernel.run = run
        self.output.fill_(torch.nan)                                 # recording computes nothing

    def launch(self, run, *args, **options):
        self.recording = False                                       # the interpreter's own copies
        run(*args, **options)
        self.recording = True
        self.calls.append((run, args, options, None))

    def __torch_dispatch__(self, op, types, args=(), options=None):
        out = op(*args, **(options or {}))
        if self.recording:
            assert op.overloadpacket.__name__ not in self.host, f"{op}: from or to the host"
            tensors = [x for x in tree_leaves((args, options)) if isinstance(x, torch.Tensor)]
            mine = {x.untyped_storage().data_ptr() for x in tensors}
            views = all(x.untyped_storage().data_ptr() in mine for x in tree_leaves(out))
            if op._schema.is_mutable or not views:
                self.calls.append((op, args, options or {}, None if op._schema.is_mutable else out))
        return out

    def __call__(self):
        for op, args, options, out in self.calls:
            result = op(*args, **options)
            for old, new in zip(tree_leaves(out), tree_leaves(result)) if out is not None else ():
                old.copy_(new)
        result = self.output.clone()                                 # read before anything below
        for buffer in self.inputs:
            buffer.fill_(-10**6)   # an id out of range, a slot out of the cache
        self.output.copy_(result)
        return self.output


def attend_by_rule(q, k, v, cache_k, cache_v, rule, longest, splits=None):
    """The kernel's job without its interpreter, which is slow, and without reading a number on the host."""
    W, G, S = q.shape[2], q.shape[1] // k.shape[1], cache_k.shape[2]
    length, causal, seen, block = rule[:, :1], rule[:, 1:2], rule[:, 2:2 + W], rule[:, 2 + W:]
    slots, token = torch.arange(S), torch.arange(W)
    may = (token < causal)[:, None] & (token < seen[..., None])
    may = may | (block[..., None] >= 0) & (block[..., None] == block[:, None])   # (B, W, W)
    may = torch.cat(((slots < length)[:, None].expand(-1, W, -1), may), -1)[:, None]   # (B, 1, W, S + W)
    keys, values = (torch.cat(x, 2).repeat_interleave(G, 1) for x in ((cache_k, k), (cache_v, v)))
    scores = (q @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~may, -torch.inf)
    place = slots - length   # (B, S), of a slot in the window
    written = ((place >= 0) & (place < causal))[:, None, :, None]
    for cached, new in (cache_k, k), (cache_v, v):
        at = place.clamp(0, W - 1)[:, None, :, None].expand_as(cached)
        cached.copy_(torch.where(written, new.gather(2, at), cached))
    return scores.softmax(-1).nan_to_num(0.0) @ values


def decoded(model, prompts, k, **options):
    return [(r.tokens, r.nfe, r.stopped) for r in generate(model, prompts, k, attention="triton", **options)]


@pytest.fixture
def by_rule(monkeypatch):
    monkeypatch.setattr(block_decode, "block_decode", attend_by_rule)


WIDTHS = {"ntp": lambda k: {1}, "sbd": lambda k: {k, 2 * k}, "verified": lambda k: {1 + k, k + 2 * k}}


@pytest.mark.parametrize("mode", WIDTHS)
def test_replayed_forwards_decode_the_same_and_few_are_recorded(mode, by_rule):
    """Prompts of different lengths; rows that end at different times; a second call replays what the first
    one recorded."""
    rng, sizes, ends, captured = random.Random(mode), set(), 0, []

    def capture(*args):
        captured.append(args)
        return Tape(*args)
    for case in range(8):
        model = tiny_model(("llama", "qwen3")[case % 2], V, MASK, seed=case, head=0.3, dtype=torch.float32)
        for weight in adapter.attach(model, 2) if case % 4 > 1 else ():
            weight.data.normal_()
        k, B = rng.randint(2, 7), (1, 3, 5, 7)[case // 2]
        prompts = [[rng.randrange(V - 1) for _ in range(rng.choice((1, 2, 5, 9)))] for _ in range(B)]
        options = dict(mode=mode, gamma=1.0, max_new_tokens=14, stop_ids=rng.sample(range(V - 1), 2))
        truth = decoded(model, prompts, k, **options)
        ends += len({nfe for _, nfe, _ in truth}) > 1
        model.graphs, captured[:] = Graphs(capture), []
        assert decoded(model, prompts, k, **options) == truth, case
        cache, first = model.graphs.idle, len(captured)
        assert first == len(cache.graphs)
        sizes |= {n for n, _ in cache.graphs}
        assert {n for n, _ in cache.graphs} <= {1, 2, 4, B}
        assert {W for _, W in cache.graphs} <= WIDTHS[mode](k)
        assert decoded(model, prompts, k, **options) == truth and len(captured) == first
        assert decoded(model, prompts[:1], k, **options) == truth[:1] and len(captured) <= first + 2
        assert model.graphs.idle is cache
    assert sizes >= {1, 2, 4, 7} and ends >= 4


def test_replayed_triton_kernel_decodes_the_same(monkeypatch):
    """The kernel itself, interpreted, with more splits than a short text fills: the cache's capacity decides
    them."""
    longest = []
    splits = lambda problems, length, at_once: longest.append(length) or 3
    monkeypatch.setattr(block_decode, "choose_splits", splits)
    model = tiny_model(seed=2, head=0.3, dtype=torch.float32, num_key_value_heads=1)
    options = dict(mode="verified", hedges=2, max_new_tokens=5)
    truth = decoded(model, [[1, 2, 3], [4]], 3, **options)
    longest.clear()
    model.graphs = Graphs(Tape)
    assert decoded(model, [[1, 2, 3], [4]], 3, **options) == truth and model.graphs.idle.graphs
    assert set(longest) == {0, model.graphs.idle.k.shape[3]}         # 0: the prefill


def test_graphs_are_not_used_for_another_cache_or_other_weights(by_rule):
    """A longer text, more rows or a weight elsewhere: all is recorded anew. A cache in use is never lent a
    second time."""
    model = tiny_model(seed=2, head=0.3, dtype=torch.float32)
    model.graphs = Graphs(Tape)

    def check(prompts, n, new):
        idle, model.graphs.idle = model.graphs.idle, None
        graphs, model.graphs = model.graphs, None
        truth = decoded(model, prompts, 3, mode="ntp", max_new_tokens=n)
        model.graphs, graphs.idle = graphs, idle
        assert decoded(model, prompts, 3, mode="ntp", max_new_tokens=n) == truth
        assert (model.graphs.idle is idle) != new
    check([[1, 2]], 6, True)
    check([[3]], 6, False)
    check([[1, 2]], 7, True)
    check([[1, 2], [3]], 4, True)
    check([[1], [2]], 4, False)
    down = model.model.layers[1].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight * -2, requires_grad=False)
    check([[1], [2]], 4, True)
    down.weight.mul_(0.5)                                            # in place: where the graphs read it
    check([[1], [2]], 4, False)
    model.model.layers[0].self_attn.q_proj.weight.mul_(0.5)          # q, k and v are then laid out again
    check([[1], [2]], 4, True)
    options = dict(mode="ntp", max_new_tokens=4)
    steps = [decode(model, [[i]], 3, attention="triton", **options) for i in (1, 2)]
    together = list(zip(*steps))                                     # by turns
    check([[1], [2]], 4, False)
    texts = [[t for step in row for t in step[0].final] for row in zip(*together)]
    assert texts == [generate(model, [[i]], 3, attention="sdpa", **options)[0].tokens for i in (1, 2)]


@pytest.mark.parametrize("mode", WIDTHS)
def test_what_was_lent_comes_back_however_decoding_ends(mode, by_rule):
    """Closed early, dropped, or ended by an error: the cache waits again, and its graphs are right."""
    model, captured = tiny_model(seed=2, head=0.3, dtype=torch.float32), []
    options = dict(mode=mode, max_new_tokens=9, attention="triton")
    truth = generate(model, [[1, 2], [3]], 3, **options)

    def capture(*args):
        captured.append(args)
        return Tape(*args)

    model.graphs = Graphs(capture)
    generate(model, [[1, 2], [3]], 3, **options)
    cache, recorded = model.graphs.idle, len(captured)
    assert cache is not None and recorded

    def closed(steps):
        next(steps)
        assert model.graphs.idle is None
        steps.close()

    def dropped(steps):
        for _ in steps:
            break

    def failed(steps):
        with pytest.raises(ValueError, match="not finite"):
            for _ in steps:
                model.lm_head.weight.fill_(torch.nan)

    weight = model.lm_head.weight.clone()
    for end in closed, dropped, failed:
        end(decode(model, [[4, 5], [6]], 3, **options))
        assert model.graphs.idle is cache
        model.lm_head.weight.copy_(weight)
        again = generate(model, [[1, 2], [3]], 3, **options)
        assert [(row.tokens, row.nfe) for row in again] == [(row.tokens, row.nfe) for row in truth]
        assert model.graphs.idle is cache and len(captured) == recorded
    model.config.max_position_embeddings = 2**31
    with pytest.raises(ValueError, match="GiB free"):                # no room for a larger one
        generate(model, [[1]] * 3000, 3, **options | dict(max_new_tokens=2**31 - 1))
    assert model.graphs.idle is None
    again = generate(model, [[1, 2], [3]], 3, **options)
    assert [row.tokens for row in again] == [row.tokens for row in truth]


def test_prefill_and_what_the_kernel_does_not_do_are_not_recorded():
    model = tiny_model(seed=2, dtype=torch.float32)
    model.graphs = Graphs(lambda *args: pytest.fail("recorded"))
    for mode, limit, attention in ("verified", 0, "triton"), ("sbd", 0, "triton"), ("ntp", 3, "sdpa"):
        generate(model, [[1, 2, 3], [4]], 3, mode=mode, max_new_tokens=limit, attention=attention)
