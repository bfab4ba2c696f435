"""Makes the synchronous API from the asyncio one: `python tools/generate_sync.py`, or with `--check` only compares.

A token transformation, as psycopg has one: `async` and `await` go, names are replaced by those of NAMES.
"""

import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

API = Path(__file__).parent.parent / "src" / "headwater" / "api"
SOURCE, TARGET = API / "_async.py", API / "_sync.py"
HEADER = "# Generated from _async.py by tools/generate_sync.py: change that file, not this one.\n"

NAMES = {
    "AsyncIterator": "Iterator",
    "AsyncOnly": "SyncOnly",
    "AsyncOnlyLoop": "SyncOnlyLoop",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "async_transaction": "sync_transaction",
    "asynccontextmanager": "contextmanager",
    "in_pool": "in_place",
    "run_async": "run_blocking",
    "running_loop": "no_loop",
    "spawn_task": "spawn_thread",
}
TEXTS = [
    (r"The asyncio API: `headwater\.\w+\(\)`", "The synchronous API: `headwater.open()`"),
    (r"\basync (with|for|def)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\ban `with`", "a `with`"),
    (r"\bAsync(?=[A-Z])", ""),
]


def generate(source: str) -> str:
    source = re.sub(r"^IS_ASYNC = True$", "IS_ASYNC = False", source, flags=re.MULTILINE)
    source = re.sub(r"^    (@opening\n    |opening,\n)", "    ", source, flags=re.MULTILINE)
    parts: list[str] = []
    end = (1, 0)
    lines = [*source.splitlines(keepends=True), ""]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.ENDMARKER:
            break
        parts.append(_between(lines, end, token.start))
        end = token.end
        if token.type == tokenize.NAME and token.string in ("async", "await"):
            end = (end[0], end[1] + 1)  # with the blank behind it
        else:
            parts.append(_replaced(token))
    return _formatted(HEADER + "".join(parts))


def _replaced(token: tokenize.TokenInfo) -> str:
    text = token.string
    if token.type == tokenize.NAME:
        return NAMES.get(text, re.sub(r"^Async(?=[A-Z])", "", text))
    if token.type in (tokenize.STRING, tokenize.COMMENT):
        for pattern, replacement in TEXTS:
            text = re.sub(pattern, replacement, text)
    return text


def _between(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    return "".join([lines[start[0] - 1][start[1] :], *lines[start[0] : end[0] - 1], lines[end[0] - 1][: end[1]]])


def _formatted(text: str) -> str:
    for command in (["check", "--fix", "--select=I,F401", "--quiet"], ["format", "--quiet"]):
        run = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(TARGET), "-"]
        text = subprocess.run(run, input=text, capture_output=True, text=True, check=True).stdout
    return text


def main() -> int:
    made = generate(SOURCE.read_text())
    if "--check" in sys.argv:
        if made != TARGET.read_text():
            print(f"{TARGET.name} is not what {SOURCE.name} gives: run python {Path(__file__).name}", file=sys.stderr)
            return 1
    else:
        TARGET.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
