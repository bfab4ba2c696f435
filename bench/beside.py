"""The same lines by another checkout of Headwater and by this one, in turn: what a change costs or gains.

    python bench/beside.py ../old                     all lines; ../old/.venv/bin/python has its Headwater
    python bench/beside.py ../old file: --rounds 9    those whose names begin with "file:"

Both clients run on asyncio's own loop. Beside a rate stands the processor time per message, of the client and of
Headwater's server: on a busy machine it says more.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import postgres_ground
from common import describe_machine, median_columns
from lines import IN_MS, LINES, Measured, run
from report import Line, show

LEAST = 0.95  # of the other checkout's rate


def line_of(name: str, ours: list[Measured], theirs: list[Measured]) -> Line:
    (our, our_us), (their, their_us) = median_columns(ours), median_columns(theirs)
    if name in IN_MS:
        ratio = their / our
        return Line(
            name, f"{our:.2f} / {our_us:.2f} ms", f"{their:.2f} / {their_us:.2f} ms", ratio, "≥ 0.95 ×", ratio >= LEAST
        )
    ratio = our / their
    other = f"{their:,.0f}/s, {their_us:,.1f} µs; CPU {our_us / their_us:.2f} ×"
    return Line(name, f"{our:,.0f}/s, {our_us:,.1f} µs", other, ratio, "≥ 0.95 ×", ratio >= LEAST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("prefixes", nargs="*", default=[""])
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    other = asked.checkout.absolute() / ".venv" / "bin" / "python"
    print(describe_machine())
    lines: list[Line] = []
    with postgres_ground.prepared(0) as ground:
        for name in LINES:
            if name.startswith(tuple(asked.prefixes)):
                try:
                    lines.append(compared(name, str(other), asked.rounds, ground))
                except (RuntimeError, subprocess.SubprocessError) as exc:  # the other lines are measured all the same
                    lines.append(Line(name, "failed", str(exc)))
                print("  ".join(filter(None, (lines[-1].what, lines[-1].ours, lines[-1].other))), flush=True)
    show(f"Beside {asked.checkout}", lines)


def compared(name: str, other: str, rounds: int, ground: postgres_ground.Ground) -> Line:
    found: dict[str, list[Measured]] = {sys.executable: [], other: []}
    for _ in range(rounds):
        for python, each in found.items():
            each.append(measured(python, name, ground))
    return line_of(name, *found.values())


def measured(python: str, name: str, ground: postgres_ground.Ground) -> Measured:
    if not name.startswith("postgres"):
        return run(python, name, BENCH_PLAIN_LOOP="1")
    with ground.database() as url:
        return run(python, name, url)


if __name__ == "__main__":
    main()
