"""CUDA graphs: decoding forwards recorded once and replayed, without Python's part of them.

The plain version stands beside the one call, `if model.graphs` in kv_cache.run_window: the forward itself. To
the kernel a window is three tensors: tokens (n, W), positions (n, W) and rule (n, 2 + 2 W). A mode has two
widths W at most (1; k, 2k; 1 + k, k + h k), and n is the next power of two of its B rows: so there are few
graphs, one for each (n, W). They know addresses only: those of the weights, of the cache with all its rows,
and of their own inputs.

B rows, W window tokens.
"""
import contextlib
import functools

import torch


@functools.cache
def side_stream(device):
    return torch.cuda.Stream(device)   # one for all graphs of a pool, and one workspace of cuBLAS


def cuda_graph(function, inputs, pool):
    """Record function(*inputs) -> replay(), which runs it on what `inputs` hold by then and returns the same
    tensor each time."""
    graph, stream = torch.cuda.CUDAGraph(), side_stream(inputs[0].device)
    with torch.cuda.device(stream.device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):         # compile, tune, load and set up what must not happen while recording
                function(*inputs)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            output = function(*inputs)

    def replay():
        graph.replay()
        return output
    return replay


class Graphs:
    """model.graphs: decoding replays graphs. They are bound to a cache, and so the last one waits here,
    `idle`."""

    def __init__(self, capture=cuda_graph):
        self.capture, self.idle = capture, None

    @contextlib.contextmanager
    def lend(self, make, batch_size: int, max_len: int, made_for):
        """A cache for one decoding: the idle one, if it is large enough and nothing that it was made for has
        moved, else a new one of make(). What was lent comes back, also after an early stop; one in use is
        never lent twice.
        """
        cache, self.idle = self.idle, None
        whole = (0,) * 4 if cache is None else cache.whole[0].shape
        if cache is None or cache.made_for != made_for or batch_size > whole[1] or max_len > whole[3]:
            cache = None               # its memory first
            cache = make()
            cache.made_for, cache.graphs = made_for, {}
            cache.pool = torch.cuda.graph_pool_handle() if cache.k.is_cuda else None
        try:
            yield cache.lend(batch_size)
        finally:
            self.idle = cache

    def replay(self, cache, forward, *inputs):
        """forward(*inputs), tensors of B rows and W columns each, as the replay of a graph of n rows -> its B
        rows."""
        tokens = inputs[0]
        (B, W), rows = tokens.shape, cache.whole[0].shape[1]
        n = min(1 << (B - 1).bit_length(), rows)
        if (n, W) not in cache.graphs:
            buffers = [x.new_zeros(n, x.shape[1]) for x in inputs]   # rule 0: nothing cached or written
            cache.graphs[n, W] = buffers, self.capture(forward, buffers, cache.pool)
        buffers, run = cache.graphs[n, W]
        for buffer, x in zip(buffers, inputs):
            buffer[:B].copy_(x, non_blocking=True)
            buffer[B:].zero_()
        return run()[:B]
