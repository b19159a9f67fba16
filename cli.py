"""The door of every command: its options, refusals, device, model, prompt and exit codes.

    refused or failed   one line on stderr, exit code 2
    Ctrl-C              130, without a traceback, also while the imports still run
    closed pipe         141: `| head` has seen enough
"""
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAIN = Path(getattr(sys.modules["__main__"], "__file__", None) or "-").resolve()
if MAIN.parent in {HERE, HERE / "kernels", *(HERE / "data").glob("*")}:   # not in a program that imports us
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))

import argparse
import dataclasses
import importlib.util
import select
import stat
import tempfile

import torch
from safetensors import SafetensorError

from hf import PRESETS, need
from model import Llama
from tokenizer import Tokenizer

PUBLISHED = ", ".join(name for name, (_, hub) in PRESETS.items() if hub)


def run(main, **interrupted):
    """Call main() as a command: the tail of every script. interrupted: what to say at Ctrl-C, `note=`."""
    name = Path(sys.argv[0]).name
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"{name}: {one_line(error)}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        if interrupted:
            print(f"\n{name}: {interrupted['note']}", file=sys.stderr)
        sys.exit(130)


def one_line(error) -> str:
    """What an error says, on one line, with control characters made visible."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def parser(doc: str) -> argparse.ArgumentParser:
    """A parser whose --help shows defaults and whose errors are one line, like any other refusal."""
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False,
                                description=doc.split("\n")[0])
    p.error = lambda message: need(False, f"{message}; --help lists all options")
    return p


def add_options(p, options, names=None, **defaults):
    """The fields of `options`, a dataclass with help and choices as their metadata, as options of parser p.

    names: those fields only. defaults: other defaults than the fields' own, by name.
    """
    for f in dataclasses.fields(options):
        if f.metadata and (names is None or f.name in names):
            p.add_argument(f"--{f.name}", type=f.metadata["type"], choices=f.metadata["choices"],
                           default=defaults.get(f.name, f.default), help=f.metadata["help"])


def add_model(p, init_from="default: the shipped model", default=None, dtypes=("float32", "bfloat16")):
    """--init_from, --base, --mask_id, --device and --dtype."""
    a = p.add_argument
    a("--init_from", default=default,
      help=f"folder, training output, hub id owner/name, or preset: {PUBLISHED}; {init_from}")
    a("--base", help="where --init_from is an adapter: its base, if it is not where adapter.json says")
    a("--mask_id", type=int, help="the mask token, where the model's config names none")
    a("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, mps")
    a("--dtype", choices=dtypes, help="of weights and cache; default bfloat16 on cuda, else float32")


def open_device(name: str) -> torch.device:
    """The device of that name; ValueError in one line if it is not there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        return device
    except Exception:   # RuntimeError, AssertionError, ImportError and more: each backend raises its own
        raise ValueError(f"--device {name} is not there: try --device=cpu") from None


def need_mask(config, name) -> None:
    """The one refusal of a model without a mask token."""
    need(config.mask_id is not None, f"{name} names no mask token: give --mask_id (mask_id), an id of its "
                                     "vocabulary that text never uses")


def need_between(args, **bounds) -> None:
    """The refusal of options outside their bounds, name=(least, most); None is not given."""
    for name, (least, most) in bounds.items():
        value = getattr(args, name)
        need(value is None or least <= value <= most, f"--{name} {value}: wanted {least} to {most}")


def need_package(asked, option, module, package) -> None:
    """The refusal of an option, where it was asked for, that needs what is not installed."""
    need(not asked or importlib.util.find_spec(module), f"{option} needs {package}: pip install {package}")


def check_file(option, path, suffixes=()) -> None:
    """Refuse a path (or None) that no file can be written to, before anything is computed for it."""
    if path is None:
        return
    need(not suffixes or path.suffix in suffixes, f"{option} {path}: wanted a name in {', '.join(suffixes)}")
    try:
        need("\0" not in str(path) and path.parent.is_dir() and (path.is_file() or not path.exists()),
             f"{option} {path}: wanted a file in a folder that exists")
        tempfile.NamedTemporaryFile(prefix=f"{path.name}.", suffix=".tmp", dir=path.parent).close()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written ({error.strerror}): name another file") from None


def check_plot(path) -> None:
    """The same for --plot, which also needs matplotlib."""
    check_file("--plot", path, (".png", ".pdf", ".svg"))
    need_package(path, "--plot", "matplotlib", "matplotlib")


def load_model(args, default=None):
    """The model and tokenizer that --init_from (or `default`), --base, --mask_id, --device and --dtype ask
    for."""
    device = open_device(args.device)
    dtype = getattr(torch, args.dtype or ("bfloat16" if device.type == "cuda" else "float32"))
    need(args.init_from or not args.base, "--base without --init_from: name an adapter's folder there")
    adapter = args.init_from if args.base else None
    name = args.base or args.init_from or default
    model = Llama.from_pretrained(name, device, dtype, args.mask_id, adapter)
    if getattr(args, "mode", None) == "sbd" and model.adapter and not model.adapter.get("place0"):
        print(f"{args.init_from} was not trained at place 0 of a block, which --mode=sbd reads: use "
              "--mode=verified, or train with --place0 --targets=data --full_mask_prob=0.5", file=sys.stderr)
    return model, Tokenizer.from_pretrained(model.folder)


def piped_text():
    """What is piped into this command; None if nothing is, without waiting for a pipe that stays silent."""
    try:
        kind = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return None
    if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)) or not select.select([sys.stdin], [], [], 0)[0]:
        return None
    return sys.stdin.read() or None


def read_prompt(args):
    """The text of --prompt, --prompt_file or a pipe; None if there is none of them."""
    need(args.prompt is None or args.prompt_file is None, "--prompt and --prompt_file: give one of them")
    if args.prompt_file is None:
        text = args.prompt if args.prompt is not None else piped_text()
    elif str(args.prompt_file) == "-":
        text = sys.stdin.read()
    else:
        need(args.prompt_file.is_file(), f"--prompt_file {args.prompt_file} is no file")
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--prompt_file {args.prompt_file} cannot be read ({error})") from None
    need(text != "", "the prompt is empty: give --prompt TEXT, --prompt_file FILE or pipe a text in")
    return text
