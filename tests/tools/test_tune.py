"""The search for tiles: where it goes, what it refuses and what it prints, with made-up times; no GPU."""

import dataclasses
import functools
import math
from pathlib import Path

import pytest

from jax_flash import cuda
from jax_flash._device import H100
from jax_flash._mask import Window
from jax_flash._spec import Operands
from jax_flash.cuda.compile import Compiled, CompileError
from jax_flash.cuda.sm90 import forward_plan, forward_tiles
from jax_flash.cuda.sm90.forward_tiles import TILES, ForwardTile, TileOption, TileRequirements, tile_options

SHARED_BYTES_PER_CTA = 232448
NEEDS = TileRequirements(128, 128, Window(None, None))
START = dataclasses.replace(
    tile_options(NEEDS)[0].tile,
    consumers=2,
    keys=128,
    stages=2,
    pingpong=False,
    query_stages=2,
    early_pv_steps=6,
)


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")


@dataclasses.dataclass(frozen=True)
class TileOfLater(ForwardTile):
    lazy: bool = False


@dataclasses.dataclass(frozen=True)
class TileWithoutChoices(ForwardTile):
    depth: int = 1


def test_every_field_has_choices():
    import tune

    assert set(tune.space()) == {field.name for field in dataclasses.fields(ForwardTile)}
    assert tune.space()["pingpong"] == (False, True)
    assert tune.space(TileOfLater) == {**tune.space(), "lazy": (False, True)}
    with pytest.raises(TypeError, match=r"no values for TileWithoutChoices\.depth"):
        tune.space(TileWithoutChoices)
    for head_dim in tune.HEAD_DIMS:
        for mask, window in tune.MASKS.items():
            tiles = [choice.tile for choice in tune.table_choices(head_dim, mask)]
            assert tiles == [
                choice.tile for choice in tile_options(TileRequirements(head_dim, head_dim, window))
            ]
            for tile in tiles:  # where a search starts
                assert all(getattr(tile, name) in values for name, values in tune.space().items())
                assert tune.possible(tile)
                cases = tune.cases(head_dim, mask, "bfloat16")
                assert (
                    tune.refusal(tile, cases, H100, SHARED_BYTES_PER_CTA, lambda _: Compiled(b"", "")) is None
                )


def test_splits_are_of_the_steps_that_the_keys_have():
    import tune

    splits = [tiles[0].early_pv_steps for tiles in tune.moves(START, "early_pv_steps", tune.space()) if tiles]
    assert splits == [1, 2, 3, 4, 5, 7, 8]  # of 128 / 16
    # Keys that are given up for a split leave it as it is.
    kept = next(
        tiles for tiles in tune.moves(START, "early_pv_steps", tune.space()) if tiles[0].early_pv_steps == 5
    )
    assert {(tile.keys, tile.early_pv_steps) for tile in kept} == {(128, 5), (112, 5), (96, 5), (80, 5)}
    # With other keys as many steps stay behind the row maxima, here 2, and one is before them at least.
    assert {tiles[0].keys: tiles[0].early_pv_steps for tiles in tune.moves(START, "keys", tune.space())} == {
        **{keys: keys // 16 - 2 for keys in range(48, 257, 16) if keys != 128},
    }
    early = dataclasses.replace(START, early_pv_steps=1)
    firsts = {tiles[0].keys: tiles[0].early_pv_steps for tiles in tune.moves(early, "keys", tune.space())}
    assert (firsts[112], firsts[144], firsts[256]) == (1, 2, 9)
    # Nothing else changes it.
    for field in ("consumers", "stages", "pingpong", "query_stages"):
        for tiles in tune.moves(START, field, tune.space()):
            assert all(tile.early_pv_steps == max(1, tile.keys // 16 - 2) for tile in tiles)

    choices = {name: (value,) for name, value in dataclasses.asdict(START).items()}
    every = tune.every({**choices, "keys": (48, 96), "early_pv_steps": (1, 3, 4, 6, 7)})
    assert {(tile.keys, tile.early_pv_steps) for tile in every} == {
        (48, 1),
        (48, 3),
        (96, 1),
        (96, 3),
        (96, 4),
        (96, 6),
    }


def test_a_choice_that_does_not_fit_gives_up_query_tiles_then_stages_then_keys():
    import tune

    def firsts(field):
        lists = tune.moves(START, field, tune.space())
        admitted = (
            next((t for t in tiles if t.shared_bytes(NEEDS) <= SHARED_BYTES_PER_CTA), None) for tiles in lists
        )
        return {getattr(tile, field): tile for tile in admitted if tile is not None}

    keys = firsts("keys")
    assert keys[112] == dataclasses.replace(START, keys=112, early_pv_steps=5)
    assert keys[176] == dataclasses.replace(START, keys=176, query_stages=1, early_pv_steps=9)
    assert 208 not in keys and 128 not in keys
    assert firsts("stages")[3] == dataclasses.replace(
        START, stages=3, keys=112, query_stages=1, early_pv_steps=5
    )
    assert firsts("stages")[4] == dataclasses.replace(
        START, stages=4, keys=80, query_stages=1, early_pv_steps=3
    )
    turns = dataclasses.replace(START, pingpong=True)
    assert first_that_fits(tune.moves(turns, "consumers", tune.space()))[0] == dataclasses.replace(
        START, consumers=1
    )
    assert firsts("pingpong") == {True: dataclasses.replace(START, pingpong=True)}


def milliseconds(tile, optimum):
    """Made-up: 1 at the optimum, and every field that is off costs more than the search overlooks."""
    cost = abs(tile.keys - optimum.keys) / 800
    for name in ("consumers", "stages", "pingpong", "query_stages"):
        cost += 0.05 * abs(getattr(tile, name) - getattr(optimum, name))
    cost += 0.01 * abs(tile.keys // 16 - tile.early_pv_steps - (optimum.keys // 16 - optimum.early_pv_steps))
    return [1 + cost, 10 * (1 + cost)]


def first_that_fits(lists):
    def fits(tile):
        return tile.shared_bytes(NEEDS) <= SHARED_BYTES_PER_CTA and not (
            tile.pingpong and tile.consumers == 1
        )

    firsts = (next(filter(fits, tiles), None) for tiles in lists)
    return [tile for tile in firsts if tile is not None]


@pytest.mark.parametrize(
    "changes",
    (
        {},
        {"keys": 176, "query_stages": 1, "pingpong": True, "early_pv_steps": 5},
        {"consumers": 3, "keys": 64, "query_stages": 1, "early_pv_steps": 4},
        {"consumers": 1, "keys": 96, "stages": 3, "early_pv_steps": 1},
    ),
)
def test_the_search_finds_the_optimum(changes):
    import tune

    optimum = dataclasses.replace(START, **changes)
    best, times, finished = tune.search(
        [START],
        tune.space(),
        first_that_fits,
        lambda tile: milliseconds(tile, optimum),
        math.inf,
    )
    assert finished and best == optimum and times[best] == [1, 10]
    assert len(times) < 80


def test_the_search_goes_on_from_the_tables_best_choice_and_times_all_beside_it():
    import tune

    optimum = dataclasses.replace(START, keys=176, query_stages=1, early_pv_steps=8)
    others = [
        dataclasses.replace(optimum, early_pv_steps=6),
        dataclasses.replace(START, keys=64, early_pv_steps=4),
    ]
    timed = []

    def measure(tile):
        timed.append(tile)
        # No way leads from START to the others by one field at a time.
        return [milliseconds(tile, optimum)[0] if tile.keys == 176 and tile.early_pv_steps < 9 else 2.0]

    def run(start):
        return tune.search(start, tune.space(), first_that_fits, measure, math.inf)

    assert run([START])[0] == START
    timed.clear()
    best, times, finished = run([START, *others])
    assert finished and best == optimum
    assert {START, *others} <= set(times)
    # Whatever was compared with the best one, last of all too, was compared with all of the table's.
    last = len(timed) - 1 - timed[::-1].index(optimum)
    assert timed[last : last + 4] == [optimum, START, *others]


def test_the_search_overlooks_small_gains_and_tiles_that_fail():
    import tune

    def measure(tile):
        if tile.keys > 128:
            raise tune.RefusedError("too many")
        return [1 - 0.004 * tile.pingpong]

    best, times, finished = tune.search([START], tune.space(), first_that_fits, measure, math.inf)
    assert finished and best == START
    assert max(tile.keys for tile in times) == 128


def test_the_search_keeps_what_it_has_when_its_time_is_over(monkeypatch):
    import tune

    clock = iter(range(1000))
    monkeypatch.setattr(tune.time, "monotonic", lambda: next(clock))
    best, times, finished = tune.search(
        [START], tune.space(), first_that_fits, lambda tile: [100 / tile.consumers], deadline=2
    )
    assert not finished and len(times) == 3
    assert best.consumers == 3


def test_the_search_leaves_a_tile_that_cannot_run():
    import tune

    def measure(tile):
        if tile == START:
            raise tune.RefusedError("spills")
        return [1.0]

    best, times, finished = tune.search([START], tune.space(), first_that_fits, measure, math.inf)
    assert finished and best != START and START not in times


def test_refuses_what_does_not_fit_and_what_the_compiler_warns_of():
    import tune

    compiled = []

    def refusal(log="0 bytes spill stores, 0 bytes spill loads", **changes):
        def compile(kernel):
            compiled.append(kernel)
            if log is None:
                raise CompileError("no such instruction")
            return Compiled(b"", log)

        tile = dataclasses.replace(START, **changes)
        return tune.refusal(tile, tune.cases(128, "windowed", "float16"), H100, SHARED_BYTES_PER_CTA, compile)

    assert "alternate" in refusal(consumers=1, pingpong=True)
    assert refusal(consumers=3, query_stages=1) is None  # 160 of 160
    assert "needs 208 registers a thread of 160" in refusal(consumers=3, keys=192, query_stages=1)
    windowed = dataclasses.replace(NEEDS, window=Window(None, 0))
    shared = dataclasses.replace(START, keys=192).shared_bytes(windowed)
    assert refusal(keys=192) == f"needs {shared} bytes of shared memory of {SHARED_BYTES_PER_CTA}"
    compiled.clear()
    assert refusal() is None
    # A causal kernel and one with a left side, for the dtype asked for.
    assert len(compiled) == 2 and all(dict(k.defines)["ELEMENT"] == "float16" for k in compiled)
    assert refusal("8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads") == "spills: 40 bytes"
    warning = "ptxas info : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    assert refusal(f"one\n{warning}\ntwo") == warning
    assert "does not compile: no such instruction" in refusal(None)


def test_refuses_a_real_kernel_that_spills():
    pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install 'jax_flash[test]'")
    import tune

    cases = tune.cases(128, "full", "bfloat16")
    table = tile_options(NEEDS)[0].tile
    assert tune.refusal(table, cases, H100, SHARED_BYTES_PER_CTA) is None
    spilling = dataclasses.replace(START, consumers=3, query_stages=1)
    assert tune.refusal(spilling, cases, H100, SHARED_BYTES_PER_CTA).startswith("spills: ")


def test_plans_have_the_candidate_and_then_the_tables_again():
    import tune

    cases = tune.cases(80, "windowed", "bfloat16")
    (table, *_) = tune.launches(tile_options(TileRequirements(80, 80, Window(None, 0)))[0].tile, cases, H100)
    tile = dataclasses.replace(START, keys=48, stages=4, early_pv_steps=2)
    for launch in tune.launches(tile, cases, H100):
        defines = dict(launch.kernel.defines)
        found = [defines[name] for name in ("KEYS", "STAGES", "EARLY_PV_STEPS", "HEAD_DIM")]
        assert found == [48, 4, 2, 80]
    operands = Operands(*cases[0].shapes())
    assert forward_plan.plan_forward(cases[0].spec(), operands, H100).launches[0] == table


def test_the_row_is_the_tables_source():
    import tune

    def row(head_dim, **best):
        text = f"{{{tune.table_row(head_dim, best)}}}"
        return eval(text, {"TileOption": TileOption, "ForwardTile": ForwardTile})

    full, windowed = TILES[128]
    found = dataclasses.replace(START, keys=80, early_pv_steps=3)
    assert row(128) == {128: (full, windowed)}
    assert row(128, windowed=found) == {128: (full, (TileOption(found),))}
    assert row(128, full=found) == {128: ((TileOption(found),), windowed)}
    assert len(full) > 1 and row(128, full=full[-1].tile) == {128: (full, windowed)}  # the row has it already
    assert row(72) == {72: TILES[96]}


def test_tunes_a_head_dim_with_made_up_times(monkeypatch, capsys):
    import calls
    import tune

    optimum = dataclasses.replace(START, keys=160, query_stages=1, early_pv_steps=8)
    wrong = dataclasses.replace(START, keys=64, early_pv_steps=2)
    other = dataclasses.replace(START, keys=112, early_pv_steps=7)  # not to be found but in the table

    def planned_tile():
        case = tune.cases()[0]
        return forward_plan.configure(case.spec(), Operands(*case.shapes())).tile

    def fake_forward(spec, operands):
        return operands.query * (-1 if planned_tile() == wrong else 1), None

    choices = {"consumers": (2, 3), "keys": (64, 128, 160), "stages": (2,), "query_stages": (1, 2)}
    choices |= {"early_pv_steps": (2, 6, 8), "sum_blocks": (0,)}
    monkeypatch.setattr(tune, "CHOICES", choices)
    monkeypatch.setattr(cuda, "forward", fake_forward)
    table = ((TileOption(START), TileOption(other, 0.97)), (TileOption(wrong),))
    monkeypatch.setattr(forward_tiles, "TILES", {128: table})
    monkeypatch.setattr(tune, "current", lambda: H100)
    monkeypatch.setattr(
        tune, "refusal", functools.partial(tune.refusal, compile=lambda kernel: Compiled(b"", ""))
    )
    monkeypatch.setattr(tune, "cases", lambda *_: [calls.Case(1, 16, 16, 2, 2, 128)])
    monkeypatch.setattr(
        tune.timing, "milliseconds", lambda function, *_: milliseconds(planned_tile(), optimum)[0]
    )
    for flags in ([], ["--exhaustive"]):
        best, rows = tune.tune(128, "full", tune.parse(["--head-dim", "128", *flags]))
        assert best == optimum
        timed = [row for row in rows if "mean" in row]
        assert ForwardTile(**timed[0]["tile"]) == best
        assert {START, other} <= {ForwardTile(**row["tile"]) for row in timed}
        means = [row["mean"] for row in timed]
        assert means == sorted(means, reverse=True)
        refused = {ForwardTile(**row["tile"]): row["refused"] for row in rows if "refused" in row}
        assert "differs from the first one's" in refused[wrong]
        assert all(tile.early_pv_steps <= tile.keys // 16 for tile in refused)
    assert tune.source(optimum) in capsys.readouterr().out


def test_says_why_it_cannot_run_here():
    import tune

    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        tune.main(["--head-dim", "64"])
    with pytest.raises(SystemExit):
        tune.parse(["--head-dim", "260"])
    assert tune.parse([]).head_dim == tune.HEAD_DIMS


def test_tiles_for_options_start_with_the_table_and_fit():
    import tune_options

    for head_dim in tune_options.TILES:
        for option, read in zip(tune_options.OPTIONS, (None, None, "mask", "bias"), strict=True):
            needs = TileRequirements(head_dim, head_dim, Window(None, 0), score_mods=1, loaded_operand=read)
            first, *others = tune_options.tiles(head_dim, option)
            assert first == tile_options(needs)[0].tile
            assert others and first not in others
            assert all(tile.shared_bytes(needs) <= SHARED_BYTES_PER_CTA for tile in (first, *others))
            assert all(tile.early_pv_steps <= tile.keys // 16 for tile in (first, *others))
