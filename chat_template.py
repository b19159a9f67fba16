"""A checkpoint's chat template, a program that somebody else wrote: rendered in a process of its own.

A template can loop, double a string until memory ends, or raise anything. `Template.render` therefore asks a
child process, one for each template, which lives on for the next messages. It has SECONDS for an answer,
LIMIT bytes of memory beyond its own, and no way back but its text or one line that says what went wrong.
"""
import contextlib
import json
import select
import subprocess
import sys
from datetime import datetime
from pathlib import Path

SECONDS, LIMIT, MOST = 5.0, 2**29, 2**24   # for one answer; bytes of memory; characters of text


class Template:
    """render(**variables) -> text; ValueError, one line, with the template's own complaint."""

    def __init__(self, source: str):
        self.source, self.child = source, None
        self.ask(source)                     # parses it

    def render(self, **variables) -> str:
        return self.ask(variables)

    def ask(self, request) -> str:
        if self.child is None or self.child.poll() is not None:
            command = [sys.executable, "-I", Path(__file__).resolve()]
            self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                          stderr=subprocess.DEVNULL)
            if request is not self.source:
                self.ask(self.source)
        try:
            self.child.stdin.write(json.dumps(request).encode() + b"\n")
            self.child.stdin.flush()
            line = self.answer()
            kind, text = json.loads(line)
        except (OSError, ValueError, TypeError) as error:
            self.close()
            known = isinstance(error, TypeError | TimeoutError)   # no JSON; too slow
            why = str(error) if known else "it takes more memory than it may"
            raise ValueError(why) from None
        if kind == "error":
            raise ValueError(text)
        return text

    def answer(self) -> bytes:
        """One line from the child; TimeoutError if it takes longer than SECONDS, b"" if it died."""
        line, output = b"", self.child.stdout
        while not line.endswith(b"\n"):
            if not select.select([output], [], [], SECONDS)[0]:
                raise TimeoutError(f"it runs for more than {SECONDS:g} seconds")
            part = output.read1(2**16)
            if not part:
                return b""
            line += part
        return line

    def close(self):
        if self.child is not None:
            self.child.kill()
            self.child.wait()
            self.child.stdin.close()
            self.child.stdout.close()
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
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() \
            if Path("/proc/self/statm").exists() else LIMIT
        resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT, used + LIMIT))
    template = None
    for line in sys.stdin.buffer:
        try:
            request = json.loads(line)
            if template is None:
                template, text = compiled(request), ""
            else:
                text = template.render(**request)
            answer = ["text", text] if len(text) <= MOST else ["error", f"it writes {len(text)} characters"]
        except BaseException as error:   # whatever a template raises
            words = " ".join(str(error)[:300].split()) or type(error).__name__
            answer = ["error", "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)]
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    serve()
