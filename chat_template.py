"""A checkpoint's chat template, a program that somebody else wrote: rendered in a process of its own.

A template can loop, double a string until memory ends, or raise anything. `Template.render` therefore asks a
child process, one for each template, which lives on for the next messages. It has SECONDS for an answer,
LIMIT bytes of memory beyond its own, and no way back but its text or one line that says what went wrong.
"""
import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
from datetime import datetime
from pathlib import Path

SECONDS, LIMIT, MOST = 5.0, 2**29, 2**22   # for one answer; bytes of memory; characters of text
POSIX = hasattr(select, "poll")


class Template:
    """render(**variables) -> text; ValueError, one line, with the template's own complaint."""

    def __init__(self, source: str):
        self.source, self.child, self.owner = source, None, os.getpid()
        self.lock = threading.Lock()         # one question at a time
        self.start()                         # parses it

    def render(self, **variables) -> str:
        with self.lock:
            if self.owner != os.getpid():    # a fork must not talk to its parent's child
                self.child, self.owner = None, os.getpid()
            if self.child is None or self.child.poll() is not None:
                self.start()
            return self.ask(variables)

    def start(self):
        """A new child. It finds jinja2 where we would, and Ctrl-C at the terminal is not meant for it."""
        command = [sys.executable, "-I", Path(__file__).resolve()]
        self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, start_new_session=True)
        self.ask([sys.path, self.source])

    def ask(self, request) -> str:
        try:
            line = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:   # of what was asked; the child is as it was
            raise ValueError(f"they are not text, numbers, lists and dicts ({error})") from None
        kind = text = None
        try:
            kind, text = json.loads(self.answer(line))
        except (OSError, ValueError, TypeError) as error:          # it died, or runs on
            text = error if isinstance(error, TimeoutError) else "it takes more time or memory than it may"
        finally:
            if kind is None:                 # Ctrl-C too: its answer must not become the next question's
                self.close()
        if kind != "text":
            raise ValueError(text)
        return text

    def answer(self, line) -> bytes:
        """The child's line for this one; TimeoutError if it takes longer than SECONDS, b"" if it died."""
        watch = threading.Timer(SECONDS, self.child.kill)
        if not POSIX:                        # there only a thread can wait for a pipe, 0.2 ms a question
            watch.start()
        self.child.stdin.write(line + b"\n")
        self.child.stdin.flush()
        if POSIX:
            poll = select.poll()
            poll.register(self.child.stdout, select.POLLIN)
            if not poll.poll(1000 * SECONDS):
                raise TimeoutError(f"it runs for more than {SECONDS:g} seconds")
        line = self.child.stdout.readline()  # written at once, when it is ready
        watch.cancel()
        return line

    def close(self):
        if self.child is not None and self.owner == os.getpid():
            self.child.kill()
            self.child.wait()
            self.child.stdout.close()
            with contextlib.suppress(OSError):   # what it never read
                self.child.stdin.close()
            self.child = None

    def __del__(self):
        with contextlib.suppress(Exception):
            self.close()


# -------------------------------------------------------------------------------- in the child

def compiled(source):
    """The template in jinja's sandbox, with what the published ones call."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class GenerationTag(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}`, by which some mark replies: renders what it encloses."""
        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[jinja2.ext.loopcontrols, GenerationTag])
    env.filters["tojson"] = to_json
    env.globals.update(raise_exception=complain, strftime_now=lambda form: datetime.now().strftime(form))
    return env.from_string(source)


def to_json(x, ensure_ascii=False, **options):   # jinja's own escapes HTML
    return json.dumps(x, ensure_ascii=ensure_ascii, **options)


def complain(message):
    raise ValueError(message)


def serve():
    """A line in, a line out: the template's source first, then the variables of each text."""
    with contextlib.suppress(ImportError):
        import resource
        pages = Path("/proc/self/statm")
        used = int(pages.read_text().split()[0]) * resource.getpagesize() if pages.exists() else LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, used + LIMIT))
    template = None
    for line in sys.stdin.buffer:
        if POSIX:                            # should nobody be left to end us
            signal.alarm(math.ceil(2 * SECONDS))
        try:
            request, text = json.loads(line), ""
            if template is None:
                sys.path[:], source = request
                template = compiled(source)
            else:
                text = template.render(**request)
            answer = ["text", text] if len(text) <= MOST else ["error", f"it writes {len(text)} characters"]
        except BaseException as error:   # whatever a template raises
            words = " ".join(str(error)[:300].split()) or type(error).__name__
            answer = ["error", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)]
        print(json.dumps(answer), flush=True)
        if POSIX:
            signal.alarm(0)


if __name__ == "__main__":
    serve()
