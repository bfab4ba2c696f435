"""The power fails at any moment: with durability "full", nothing that was acknowledged may be missing afterwards."""

from __future__ import annotations

import itertools
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from power_disk import EVERYTHING, NOTHING, PAGE, Create, Delete, Disk, Fate, Mark, Step, Sync, Truncate, Write
from power_workload import NAME, Verdict, judge, record, what_was_known

ROUNDS = 90
SOME_CUTS, SOME_RELAXED_CUTS = 130, 50
EVERY_CUT_FATES = 6  # random ones, besides the two extremes


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """For the images: in memory where there is such a place, for they are many and none must last."""
    memory = Path("/dev/shm")
    directory = memory / f"headwater-{tmp_path.name}-{time.monotonic_ns()}" if memory.is_dir() else tmp_path / "images"
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    return pytestconfig.getoption("--dice")


def moments(steps: list[Step]) -> list[int]:
    """Where to cut: right before each sync, when most is at risk, and right after it, when least is."""
    return [at + after for at, step in enumerate(steps) if isinstance(step, Sync) for after in (0, 1)]


def some_fates(dice: random.Random) -> list[Fate]:
    kept = dice.choice([0.2, 0.5, 0.8, 0.95])
    return [EVERYTHING, NOTHING, Fate(kept, dice.choice([512, PAGE]), torn=dice.choice([0.0, 0.1]))]


def cut(
    steps: list[Step], cuts: set[int], fates: Callable[[], list[Fate]], scratch: Path, dice: random.Random
) -> Iterator[tuple[int, Fate, Verdict]]:
    disk = Disk()
    for at, step in enumerate([*steps, Mark("end", None)]):
        if at in cuts:
            known = what_was_known(itertools.islice(steps, at))
            for fate in fates():
                place = scratch / "image"
                place.mkdir()
                yield at, fate, judge(place, disk.image(fate, dice), known)
                shutil.rmtree(place)
        disk.replay(step)


def sample(dice: random.Random, steps: list[Step], count: int) -> set[int]:
    """Syncs, and some moments in between: in the midst of a commit or of a checkpoint."""
    at_syncs = moments(steps)
    between = dice.sample(range(len(steps)), count // 4)
    return {*dice.sample(at_syncs, min(count - len(between), len(at_syncs))), *between, len(steps)}


def test_nothing_acknowledged_is_lost(
    tmp_path: Path, scratch: Path, seed: int, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    every_cut = pytestconfig.getoption("--every-cut")
    dice = random.Random(f"cuts {seed}")
    steps = record(tmp_path, "full", ROUNDS, seed)
    if every_cut:
        cuts = {*moments(steps), *dice.sample(range(len(steps)), len(steps) // 4), len(steps)}
    else:
        cuts = sample(dice, steps, SOME_CUTS)

    def fates() -> list[Fate]:
        return some_fates(dice) + ([some_fates(dice)[2] for _ in range(EVERY_CUT_FATES)] if every_cut else [])

    images, bad = 0, []
    for at, fate, verdict in cut(steps, cuts, fates, scratch, dice):
        images += 1
        if verdict.broken or verdict.lost:
            bad.append(f"cut at step {at} of {len(steps)} ({fate}): {verdict.broken + verdict.lost}")
    known = what_was_known(steps)
    figures(
        f"power loss (dice {seed}): {images} images of {len(cuts)} cuts through {len(steps)} steps, "
        f"{len(known.published)} messages published, {sum(map(len, known.acked.values()))} acks; {len(bad)} images bad"
    )
    assert not bad, f"{len(bad)} of {images} images\n" + "\n".join(bad[:10])
    assert_the_workload_is_worth_it(steps)


def test_relaxed_durability_is_seen_to_lose_but_never_to_break(
    tmp_path: Path, scratch: Path, seed: int, pytestconfig: pytest.Config, figures: Callable[[str], None]
) -> None:
    """So that the test above is known to be able to fail, and `relaxed` to mean what its description says."""
    dice = random.Random(f"relaxed cuts {seed}")
    steps = record(tmp_path, "relaxed", ROUNDS, seed)
    count = len(moments(steps)) * 2 if pytestconfig.getoption("--every-cut") else SOME_RELAXED_CUTS
    syncs = Counter(step.file for step in steps if isinstance(step, Sync))
    cuts = {*sample(dice, steps, min(count, len(steps) // 4)), *dice.sample(range(len(steps)), SOME_RELAXED_CUTS // 2)}
    verdicts = [verdict for _, _, verdict in cut(steps, cuts, lambda: some_fates(dice), scratch, dice)]
    broken = [problem for verdict in verdicts for problem in verdict.broken]
    losses = sum(1 for verdict in verdicts if verdict.lost)
    figures(f"power loss, relaxed: {len(verdicts)} images, {losses} of them lost something acknowledged; {dict(syncs)}")
    assert not broken, "\n".join(broken[:10])
    assert losses > 0


def assert_the_workload_is_worth_it(steps: list[Step]) -> None:
    """It has commits, a WAL that began anew several times, checkpoints, a database that shrank, deleted files."""
    wal = NAME + "-wal"
    assert sum(1 for step in steps if isinstance(step, Sync) and step.file == wal) > ROUNDS
    assert sum(1 for step in steps if isinstance(step, Write) and step.file == wal and step.offset == 0) >= 4
    assert sum(1 for step in steps if isinstance(step, Sync) and step.file == NAME) >= 4
    assert any(isinstance(step, Truncate) and step.file == NAME for step in steps)
    assert any(isinstance(step, Create) for step in steps)
    assert any(isinstance(step, Delete) for step in steps)
    assert any(isinstance(step, Mark) and step.what == "pruning" for step in steps)
