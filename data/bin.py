"""The .bin data format, packing of documents into rows, and the targets of a packed row.

Section "Packed data": a token sees only its own document, positions and blocks restart with each
document, and a document that ends in a stop id is followed by copies of that id.
B rows, L tokens a row, k = block_size. One folder is one data set, SPLIT is train or val:

    SPLIT.bin       uint32  token ids, document after document
    SPLIT.mask.bin  uint8   1 = this token is a target
    SPLIT.docs.bin  int64   (documents, 2): where it starts, in tokens; 1 if it ends in a stop id
    meta.json       what the tokenizer was, stop ids, and the counts of every split

Files are memory mapped, and packing reads only SPLIT.docs.bin, so a set may be larger than memory.
"""
import contextlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from hf import need

try:
    import fcntl
except ImportError:   # Windows
    fcntl = None

FILES = {".bin": np.uint32, ".mask.bin": np.uint8, ".docs.bin": np.int64}


# ---------------------------------------------------------------------------------------- writing

def write_split(files, split, documents, stop_ids, vocab_size):
    """Streams (ids, loss_mask) pairs into the open files {name: file}. Returns counts.

    Raises ValueError at an empty document, a mask of another length, a foreign id, or without any target.
    """
    tokens = targets = count = 0
    for ids, mask in documents:
        ids, mask = np.asarray(ids, np.int64), np.asarray(mask, bool)
        need(0 < len(ids) == len(mask), f"document {count}: {len(ids)} ids and {len(mask)} mask entries")
        need(0 <= ids.min() and ids.max() < vocab_size,
             f"document {count}: an id outside the vocabulary of {vocab_size}")
        doc = np.array([tokens, int(ids[-1]) in stop_ids])
        for (end, dtype), array in zip(FILES.items(), (ids, mask, doc)):
            files[split + end].write(array.astype(dtype).tobytes())
        tokens, targets, count = tokens + len(ids), targets + int(mask.sum()), count + 1
    need(targets, f"split {split}: nothing to learn from ({count} documents)")
    return {"tokens": tokens, "documents": count, "targets": targets}


def write_set(dir, splits, stop_ids, vocab_size, say=False, **about):
    """Writes a whole data set, splits = {"train": documents, "val": documents}, or leaves the old one.

    All is written to temporary files, renamed at the end. meta.json, without which nothing loads, is the
    first to go and the last to appear: a kill before the renames leaves the old set, one during them none.
    about: what else meta.json should say (tokenizer, tokenizer_hash). say: print the counts.
    """
    dir, stop_ids, files = Path(dir), sorted(set(stop_ids)), {}
    dir.mkdir(parents=True, exist_ok=True)
    names = [split + end for split in splits for end in FILES] + ["meta.json"]
    temporary = {name: dir / f"{name}.{os.getpid()}.tmp" for name in names}
    with locked(dir) as alone, contextlib.ExitStack() as stack:
        for path in [path for name in names for path in dir.glob(f"{name}.*.tmp")] if alone else ():
            path.unlink()                  # of a process that was killed
        for name, path in temporary.items():
            stack.callback(path.unlink, missing_ok=True)
            files[name] = stack.enter_context(open(path, "wb", buffering=1 << 20))
        counts = {split: write_split(files, split, documents, stop_ids, vocab_size)
                  for split, documents in splits.items()}
        meta = dict(vocab_size=vocab_size, stop_ids=stop_ids, **about, splits=counts)
        files["meta.json"].write(json.dumps(meta, indent=1).encode())
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        (dir / "meta.json").unlink(missing_ok=True)
        for name, path in temporary.items():
            os.replace(path, dir / name)
        folder = os.open(dir, os.O_RDONLY)
        os.fsync(folder)                   # the renames themselves reach the disk
        os.close(folder)
    for split, count in counts.items() if say else ():
        print(f"{dir}/{split}.bin:", ", ".join(f"{n:,} {name}" for name, n in count.items()))


@contextlib.contextmanager
def locked(folder):
    """Nobody else writes into `folder` meanwhile: a lock that dies with its process. Yields False where there
    are no locks (Windows, some network drives).

    ValueError, one line, if another process holds it.
    """
    path, alone = Path(folder) / ".lock", fcntl is not None
    need(path.is_file() or not path.exists(), f"{path} is no regular file: remove it")
    with open(path, "a") as file:
        try:
            if alone:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being written by another process: wait for it, or give another "
                             "folder") from None
        except OSError:                    # its file system knows no locks
            alone = False
        yield alone


# ---------------------------------------------------------------------------------------- reading

class Dataset:
    """One split of a data set. Raises ValueError, one line, if it is missing, cut off or inconsistent.

    tokens (N,) uint32, mask (N,) uint8: memory maps; starts, lengths, stops (documents,): int64;
    meta: meta.json (vocab_size, stop_ids, tokenizer, tokenizer_hash, splits).
    """

    def __init__(self, dir, split):
        self.dir, self.split = Path(dir), split
        path, script = self.dir / "meta.json", self.dir / "prepare.py"
        how = f"python {script}" if script.exists() else "one of data/*/prepare.py"
        need(path.exists(), f"no data set in {self.dir}: run {how} first")
        try:
            need(path.is_file(), "no file")
            self.meta = json.loads(path.read_text())
            self.vocab_size, self.stop_ids = self.meta["vocab_size"], self.meta["stop_ids"]
            counts = self.meta["splits"].get(split, {"tokens": 0, "documents": 0})
            sizes = counts["tokens"], counts["tokens"], 2 * counts["documents"]   # items of each file
            numbers = self.vocab_size, *self.stop_ids, *counts.values()
            names = self.meta.get("tokenizer"), self.meta.get("tokenizer_hash")
            need(all(type(n) is int and 0 <= n < 2**63 for n in numbers)
                 and max(self.stop_ids, default=0) < self.vocab_size
                 and all(isinstance(name, str | None) for name in names), "a value that cannot be")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): prepare the set again") from None
        splits = self.meta["splits"]
        need(split in splits, f"{self.dir} has no split {split!r}, only {', '.join(splits)}")
        arrays = []
        for (end, dtype), items in zip(FILES.items(), sizes):
            path, wanted = self.dir / f"{split}{end}", items * np.dtype(dtype).itemsize
            need(path.is_file() and path.stat().st_size == wanted,
                 f"{path} is no file of the {wanted} bytes that meta.json wants: prepare the set again")
            arrays.append(np.memmap(path, dtype, mode="r"))
        self.tokens, self.mask, docs = arrays
        self.starts, self.stops = np.ascontiguousarray(docs.reshape(-1, 2).T)
        ends = np.append(self.starts[1:], len(self.tokens))
        self.lengths = ends - self.starts
        need(self.starts[0] == 0 and (self.starts < ends).all() and np.isin(self.stops, (0, 1)).all(),
             f"{self.dir}/{split}.docs.bin is damaged: prepare the set again")


# ---------------------------------------------------------------------------------------- packing

@dataclass
class Rows:
    """Rows of seq_len tokens. Row r holds the pieces first[r] .. first[r+1]-1 of the arrays, in that
    order."""
    dataset: Dataset
    seq_len: int
    seed: int
    epoch: int
    start: np.ndarray                 # (pieces,) offset into dataset.tokens
    length: np.ndarray                # (pieces,) real tokens
    copies: np.ndarray                # (pieces,) stop copies behind them
    first: np.ndarray                 # (rows + 1,)
    orders: dict = field(default_factory=dict)

    def __len__(self):
        return len(self.first) - 1

    def order(self, epoch):
        """The order of the rows in that epoch, (rows,)."""
        if epoch not in self.orders:
            self.orders = {e: o for e, o in self.orders.items() if e == epoch - 1}     # keep the last two
            self.orders[epoch] = np.random.default_rng([self.seed, 1, epoch]).permutation(len(self))
        return self.orders[epoch]


def pack(dataset, seq_len, copies=0, seed=0, epoch=0):
    """Packs every document once into rows of seq_len tokens; copies = block_size_max - 1 (section 3).

    The seed shuffles the documents; greedily, in that order, each goes with its stop copies into the
    current row if it fits, else into a new one. The epoch only permutes the rows: every epoch has the
    same number of them, so a step count alone says where training stands. A longer document is cut into
    pieces of seq_len, each a document of its own, shuffled like any other; only its last piece has stop
    copies. Copies that would pass the end of a row that a text fills by itself are dropped.
    """
    assert seq_len > 0 and copies >= 0
    pieces = -(-dataset.lengths // seq_len)                                    # (documents,)
    doc = np.repeat(np.arange(len(pieces)), pieces)                            # (pieces,)
    offset = seq_len * (np.arange(len(doc)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
    start, length = dataset.starts[doc] + offset, np.minimum(dataset.lengths[doc] - offset, seq_len)
    is_last = offset + length == dataset.lengths[doc]
    copies = np.minimum(copies * dataset.stops[doc] * is_last, seq_len - length)

    order = np.random.default_rng([seed, 0]).permutation(len(doc))
    fills = (length + copies == seq_len)[order]
    order = np.concatenate([order[~fills], order[fills]])        # or they would cut other rows short
    start, length, copies = start[order], length[order], copies[order]
    ends = np.cumsum(length + copies)
    begins = ends - length - copies
    after = np.searchsorted(ends, begins + seq_len, side="right").tolist()     # the row from here ends there
    first = [0]
    while first[-1] < len(after):
        first.append(after[first[-1]])
    return Rows(dataset, seq_len, seed, epoch, start, length, copies, np.array(first))


@dataclass
class Batch:
    tokens: torch.Tensor              # (B, L) int64
    doc_ids: torch.Tensor             # (B, L) int64, numbered within a row; padding is a document of its own
    loss_mask: torch.Tensor           # (B, L) bool, real targets, without stop copies
    is_copy: torch.Tensor             # (B, L) bool, stop copies

    def to(self, device):
        return Batch(*(x.to(device, non_blocking=True) for x in vars(self).values()))


def batch(rows, indices):
    """The rows with these numbers, as a Batch. Numbers from len(rows) on continue into the next epochs."""
    data, shape = rows.dataset, (len(indices), rows.seq_len)
    pad = data.stop_ids[0] if data.stop_ids else 0
    tokens, begins = np.full(shape, pad, np.int64), np.zeros(shape, np.int64)
    loss_mask, is_copy = np.zeros(shape, bool), np.zeros(shape, bool)
    for b, index in enumerate(indices):
        epoch, at = divmod(int(index), len(rows))
        row, i = rows.order(rows.epoch + epoch)[at], 0
        for piece in range(rows.first[row], rows.first[row + 1]):
            start, n, c = rows.start[piece], rows.length[piece], rows.copies[piece]
            tokens[b, i:i + n] = data.tokens[start:start + n]
            loss_mask[b, i:i + n] = data.mask[start:start + n]
            tokens[b, i + n:i + n + c] = tokens[b, i + n - 1]                  # the stop id again
            is_copy[b, i + n:i + n + c] = True
            i += n + c
            begins[b, i:i + 1] = 1                                             # the next piece, or padding
    need(tokens.max(initial=0) < data.vocab_size,
         f"{data.dir}/{data.split}.bin holds an id outside the vocabulary: prepare the set again")
    return Batch(*map(torch.from_numpy, (tokens, begins.cumsum(1), loss_mask, is_copy)))


def targets(batch, block_size):
    """The masks of sbd_loss, (loss_mask, ntp_mask), both (B, L) bool.

    ntp_mask: real targets, but never a document's first token. loss_mask: real targets, and the stop
    copies in the block of their document's last real token, if that one is a target.
    """
    index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).expand_as(batch.tokens)
    is_first = torch.ones_like(batch.is_copy)
    is_first[:, 1:] = batch.doc_ids[:, 1:] != batch.doc_ids[:, :-1]
    start = torch.where(is_first, index, 0).cummax(1).values                   # where its document starts
    last = torch.where(batch.is_copy, 0, index).cummax(1).values  # of a copy: the last real token
    same_block = (index - start) // block_size == (last - start) // block_size
    copies = batch.is_copy & same_block & batch.loss_mask.gather(1, last)
    return batch.loss_mask | copies, batch.loss_mask & ~is_first


def num_ntp_targets(batch):
    """How many NTP targets the batch has, an int: the same for every block size."""
    return int(targets(batch, 1)[1].sum())
