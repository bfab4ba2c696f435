"""A worker process: on a word, begins each of many ids, and says which it was first at."""

from __future__ import annotations

import sys

from headwater.stores.dedupe import open_dedupe

if __name__ == "__main__":
    url, count = sys.argv[1], int(sys.argv[2])
    with open_dedupe(url) as queue:
        print("ready", flush=True)
        sys.stdin.readline()
        for number in range(count):
            if queue.begin("race", f"id-{number}", queue.clock.now_ms(), 60_000) == "first":
                queue.finish("race", f"id-{number}")
                print(number)
