"""The model of what the backward kernel moves between memory and L2."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


ROW, TOTAL = 128 * 64 * 2, 128 * 64 * 4


def test_a_large_cache_reads_each_array_once():
    import l2_traffic

    # Out, dO and sums are there from the kernel before; Q, K and V are read, and nothing has to leave.
    found = l2_traffic.backward([512] * 2, 4, 512, 64, 1, 1 << 40)
    assert found == (2 * 4 * 4 * 3 * ROW, 0)
    # Of short sequences there is less to read.
    assert l2_traffic.backward([512, 100], 4, 512, 64, 1, 1 << 40).read == 4 * 5 * 3 * ROW


def test_without_a_cache_every_visit_reads():
    import l2_traffic

    found = l2_traffic.backward([256], 1, 256, 64, 1, 0)
    visits, tiles, blocks = 4, 2, 2
    assert found.read == tiles * 2 * ROW + visits * (2 * ROW + TOTAL) + blocks * TOTAL
    assert found.written == tiles * 2 * ROW + visits * TOTAL + blocks * ROW


def test_many_heads_at_a_time_move_more():
    import l2_traffic

    alone, together = (l2_traffic.backward([512] * 4, 16, 512, 64, n, 8 << 20) for n in (1, 64))
    assert sum(together) > 1.5 * sum(alone)


def test_command_line(capsys):
    import l2_traffic

    l2_traffic.main(["--lengths", "512", "61", "--heads", "2", "--widths", "1", "2", "--mib", "1", "40"])
    assert len(capsys.readouterr().out.splitlines()) == 3
