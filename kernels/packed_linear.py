"""Linear maps and norms in less time while decoding on the CPU: the same numbers, from copies of weights.

The plain version stands beside each: F.linear in `Linear`, one map after the other in `together`,
F.rms_norm in `rms_norm`. They run in training, under torch.compile and where `fuse` was not called.
The fast ones multiply few rows with weights in the order in which oneDNN reads them, in half the
time, and run the maps that share an input (q, k, v; gate, up) as one product.

A copy may stand in for its weight only while it equals it: it is kept with the `state` that it was
made from, and used only where `unchanged` says so.
"""
import platform

import torch
import torch.nn as nn
import torch.nn.functional as F

JOINED = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")   # siblings that share an input
ONEDNN = "_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported"


def decoding() -> bool:
    """Whether copies may stand in for the weights: in inference mode, where nobody asks for gradients."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return False
    return not torch.is_autocast_enabled("cpu")


class Linear(nn.Linear):
    """y = W x without a bias. A copy or move of the module drops what `fuse` made for it."""
    made = None   # for itself, or for the group it comes first of: (product, matrix, sizes, states)

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)
        self.low_rank = None   # adapter.py: what a token of a block gets beside W x

    def forward(self, x):
        made = self.made if decoding() else None
        if made is None or len(made[3]) > 1 or not unchanged(self, made[3][0]):
            return F.linear(x, self.weight)
        return packed_linear(x, made[1])

    def _apply(self, fn, recurse=True):
        self.made = None
        return super()._apply(fn, recurse)

    def __getstate__(self):
        return self.__dict__ | dict(made=None)


def together(x, *linears, joint=1):
    """x (..., C) through each of the linears -> their outputs (..., out), one by one.

    In decoding they come from one product, the first `joint` of them as one tensor.
    """
    made = getattr(linears[0], "made", None) if decoding() else None
    if made is None or not current(linears, made):
        return [linear(x) for linear in linears]
    product, matrix, sizes, _ = made
    return product(x, matrix).split_with_sizes(sizes[joint], -1)


def rms_norm(x, weight, eps: float, floor):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension. floor: eps as a float64 CPU tensor."""
    if torch.is_grad_enabled() or x.device.type != "cpu" or torch.compiler.is_compiling():
        return F.rms_norm(x, weight.shape, weight, eps)
    # The same in half as many kernels as PyTorch has for it on the CPU.
    high = x.float() if x.dtype != torch.float64 else x
    norm = torch.linalg.vector_norm(high, dim=-1, keepdim=True)
    scale = torch.addcmul(floor, norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return high.mul(scale).to(x.dtype).mul_(weight)


@torch.inference_mode(False)   # the weights stay ones that can be trained
@torch.no_grad()
def fuse(module, free: float) -> None:
    """Lay the matrices under `module` out for decoding, unless copies need more than `free` bytes.

    Decoding calls it each time; what is still good is kept. The parameters stay what they are, and
    what becomes of them counts: only a change through .data or NumPy between two forwards of one
    decoding does not.
    """
    groups = list(groups_of(module))
    weights = [linear.weight for group in groups for linear in group]
    if any(weight.is_inference() for weight in weights):   # PyTorch does not tell when such a weight changes
        return
    copies = sum(weight.nbytes for weight in weights if weight.device.type == "cpu")
    if copies > free and any(group[0].made is None for group in groups):
        return
    for group in groups:
        if group[0].made is None or not current(group, group[0].made, look=True):
            group[0].made = lay_out(group)
        if all(linear.low_rank is not None for linear in group):
            lay_low_rank(group)


def groups_of(module):
    """The linears under `module`, in lists: those that share an input, each of the others alone."""
    seen = set()
    for parent in module.modules():   # a parent comes before its children
        for names in JOINED:
            group = [parent._modules.get(name) for name in names]
            if all(type(m) is Linear for m in group) and len({m.weight.dtype for m in group}) == 1:
                seen.update(group)
                yield group
        if type(parent) is Linear and parent not in seen:
            yield [parent]


def lay_out(group):
    """One matrix for the group: packed where that is known, else one that several weights become views of."""
    alone = len(group) == 1
    sizes = [linear.out_features for linear in group]
    matrix = group[0].weight if alone else torch.cat([linear.weight for linear in group])
    packed = pack(matrix)
    if packed is None and alone:
        return None
    if packed is None:
        for linear, part in zip(group, matrix.split(sizes)):
            linear.weight.data = part
    states = [state(linear.weight, packed is not None) for linear in group]
    splits = {n: [sum(sizes[:n]), *sizes[n:]] for n in range(1, len(sizes))}   # by `joint`
    return (F.linear, matrix, splits, states) if packed is None else (packed_linear, packed, splits, states)


def lay_low_rank(group) -> None:
    """An adapter's A of the group side by side, and each (alpha / r) B, transposed, in the weights' dtype."""
    maps, kind = [linear.low_rank for linear in group], group[0].weight.dtype
    states = [(factor, factor._version, checksum(factor)) for low in maps for factor in (low.A, low.B)]
    made = maps[0].made
    if made is None or any(a is not b or rest != since for (a, *rest), (b, *since) in zip(states, made[3])):
        A = torch.cat([low.A for low in maps]).to(kind).t().contiguous()           # (in, sum of r)
        B = [(low.scale * low.B).to(kind).t().contiguous() for low in maps]        # (r, out) each
        maps[0].made = A, B, [linear.out_features for linear in group], states


def add_low_rank(parts, x, group, gate) -> bool:
    """Add g (alpha / r) B A x to parts, outputs of the group, in place, if A and B still are as laid out.

    parts: (N, out) each, the first may be several side by side; gate: as adapter.open_gate has it.
    """
    made = group[0].low_rank.made
    if made is None or not decoding() or len(made[2]) != len(group):
        return False
    if any(factor._version != since for factor, since, _ in made[3]):
        return False
    A, B, outs, _ = made
    numbers = isinstance(gate, torch.Tensor) and gate.dim() == 2
    rows = slice(None) if gate is True or numbers else gate
    low = x[rows] @ A                                                              # (n, sum of r)
    low = low * gate if numbers else low
    columns = parts if len(parts) == len(outs) else [*parts[0].split(outs[:-1], 1), parts[-1]]
    for y, each, b in zip(columns, low.chunk(len(outs), 1), B):
        y.index_add_(0, rows, each @ b) if isinstance(rows, torch.Tensor) else y[rows].addmm_(each, b)
    return True


def pack(weight):
    """A copy of weight (out, in) in oneDNN's own order; None where there is none, off x86 for one.

    A product of 1 to 48 rows takes about half the time of F.linear with it, in float32 and bfloat16.
    """
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or weight.nbytes % 8 or platform.machine() not in ("x86_64", "AMD64"):
        return None
    if not all(hasattr(ops, name) for name in ONEDNN):
        return None
    bfloat16 = weight.dtype == torch.bfloat16 and ops._is_mkldnn_bf16_supported()
    return ops._reorder_linear_weight(weight) if bfloat16 or weight.dtype == torch.float32 else None


def packed_linear(x, packed):
    """x (..., in) -> (..., out). It knows no gradients."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def current(linears, made, look=False) -> bool:
    """Whether the weights of these linears still are those that `made` was made from."""
    for linear, since in zip(linears, made[3]):
        if not unchanged(linear, since, look):
            return False
    return True


def unchanged(linear, since, look=False) -> bool:
    """Whether a linear still is its weight and no more: not replaced, changed in place, wrapped, hooked.

    Asked for every linear in every decoding forward, hence past nn.Module's slow attribute look-up.
    PyTorch does not count changes through .data, NumPy and its fused optimizers: `look`, once a
    decoding, sees those too.
    """
    weight = linear._parameters.get("weight")
    if not (weight is since[0] and weight.data_ptr() == since[1] and weight._version == since[2]
            and type(linear) is Linear and not linear._forward_hooks and not linear._forward_pre_hooks
            and "forward" not in linear.__dict__):
        return False
    return not look or weight.stride() == since[3] and (since[4] is None or checksum(weight) == since[4])


def state(weight, packed: bool):
    """What a copy of a weight is a copy of. The memory is held too: its address stays its own."""
    total = checksum(weight) if packed else None   # a view of the matrix is no copy
    return weight, weight.data_ptr(), weight._version, weight.stride(), total, weight.detach()


def checksum(weight) -> int:
    """Every changed bit changes it: the bits, 8 bytes at a time, summed modulo 2^64, at memory's speed."""
    flat = weight.detach().flatten()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    return int(flat.view(torch.int64).sum())
