"""CUDA graphs of decoding forwards."""
import functools
from dataclasses import dataclass

import torch


@functools.cache
def side_stream(device):
    return torch.cuda.Stream(device)   # one for all graphs of a pool, and one workspace of cuBLAS


def cuda_graph(function, inputs, pool):
    """Record function(*inputs) -> replay(), which runs it on what `inputs` hold by then and returns the same tensor each time."""
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


@dataclass
class Graphs:
    """model.graphs: decoding replays graphs. They are bound to a cache, and so the last one waits here for the next texts."""
    capture: object = cuda_graph
    idle: object = None
