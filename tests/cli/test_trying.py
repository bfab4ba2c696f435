"""`headwater bench` and `headwater demo`."""

from pathlib import Path


def test_bench(run, tmp_path: Path):
    result = run("bench", tmp_path, "--seconds", 0.7, "--json")
    assert result.code == 0
    assert len(result.json["results"]) == 4
    assert all(each["per_second"] > 0 for each in result.json["results"])
    assert list(tmp_path.iterdir()) == []
    assert run("bench", tmp_path / "missing").code == 2


def test_bench_for_people(run, tmp_path: Path):
    shown = run("bench", tmp_path, "--seconds", 0.7, "--durability", "relaxed").out
    assert "publish_many, 1,000 at a time" in shown
    assert "synchronous=NORMAL" in shown


def test_demo(finish, tmp_path: Path):
    result = finish("demo", "--dir", tmp_path / "here")
    assert (result.code, result.err) == (0, "")
    for claim in (
        "✓ the first process died of SIGKILL",
        "✓ order 4 came first, marked as attempt 2",
        "✓ payment 1 was delivered again and paid",
        "✓ the row was delivered like any other message",
        "✓ each was acked once, and nobody is behind",
        "17 claims checked",
    ):
        assert claim in result.out
    assert "✗" not in result.out
    again = finish("demo", "--dir", tmp_path / "here")
    assert (again.code, again.out) == (2, "")
    assert "a demo has been here" in again.err
