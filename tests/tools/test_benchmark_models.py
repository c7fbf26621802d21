"""The benchmark of open models: its entries and arithmetic, its command line on the CPU, chart and table."""

import dataclasses
import json
import logging
import re
import types
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_flash

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    # The programs silence their peers, which outlasts them.
    monkeypatch.setattr(warnings, "filterwarnings", lambda *_, **__: None)
    monkeypatch.setattr(logging, "disable", lambda _: None)


def small(name="small", **changes):
    """An entry that a CPU measures in milliseconds."""
    from model_entry import Entry

    shape = dict(batch=2, queries=24, keys=24, heads=4, kv_heads=2, head_dim=16, value_head_dim=16)
    described = dict(name=name, model=f"Model {name}", source="made up", group="made up", dtype="float32")
    return Entry(**described | shape | changes)


# One of each kind of call.
SMALL = {
    "full": {},
    "causal": dict(causal=True),
    "window": dict(causal=True, window=5),
    "soft cap": dict(causal=True, soft_cap=2.0),
    "chunk": dict(queries=9, keys=30, causal=True),
    "cross": dict(queries=30, keys=7),
    "multi-query": dict(heads=3, kv_heads=1),
    "value head dim": dict(causal=True, head_dim=24, value_head_dim=16),
    "lengths": dict(lengths=(24, 5)),
    "causal lengths": dict(lengths=(1, 17), causal=True, window=6),
    "segments": dict(documents=(10, 14, 3, 20, 1), causal=True),
    "full segments": dict(documents=(24, 12, 12)),
    "varlen": dict(batch=1, queries=31, keys=31, documents=(11, 4, 16), varlen=True, causal=True),
}

each_small = pytest.mark.parametrize("changes", SMALL.values(), ids=SMALL)


def visible(entry):
    """By definition: which query sees which key, `(batch, queries, keys)`."""
    seen = np.zeros((entry.batch, entry.queries, entry.keys), bool)
    ends = np.cumsum(entry.documents)
    for b, i, j in np.ndindex(seen.shape):
        diagonal = i + entry.keys - entry.queries
        sees = not entry.causal or j <= diagonal
        sees &= entry.window is None or j > diagonal - entry.window
        if entry.lengths:
            sees &= i < entry.lengths[b] and j < entry.lengths[b]
        if entry.documents:
            query, key = (np.searchsorted(ends, b * entry.queries + x, side="right") for x in (i, j))
            sees &= query == key
        seen[b, i, j] = sees
    return seen


def test_entries_are_many_and_have_names_and_sources_of_their_own():
    from model_entries import ENTRIES

    assert len(ENTRIES) >= 28
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert len({(entry.model, entry.shape) for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert re.fullmatch(r"[a-z0-9.-]+", entry.name), "names go on the command line, with commas between"
        assert len(entry.source) > 20 and "://" not in entry.source
        assert entry.dtype == "bfloat16"


def test_entries_have_every_kind_of_call():
    from model_entries import ENTRIES

    def some(condition):
        return any(map(condition, ENTRIES))

    assert some(lambda e: e.soft_cap and e.window) and some(lambda e: e.soft_cap and not e.window)
    assert some(lambda e: e.value_head_dim != e.head_dim)
    assert some(lambda e: e.lengths) and some(lambda e: e.documents and not e.varlen)
    assert some(lambda e: e.varlen and e.causal) and some(lambda e: e.varlen and not e.causal)
    assert some(lambda e: e.causal and e.queries < e.keys) and some(lambda e: e.queries > e.keys)
    assert some(lambda e: e.kv_heads == 1 < e.heads) and some(lambda e: e.queries % 64)
    # The calls with few key heads on which the backward pass was slow.
    few = {(2, 8192, 8, 1, 128), (1, 4096, 28, 4, 128), (4, 2048, 14, 2, 64), (2, 4096, 16, 1, 128)}
    few |= {(1, 5000, 48, 3, 128), (1, 1024, 16, 16, 128), (1, 8192, 32, 8, 128), (2, 4096, 12, 12, 192)}
    few |= {(1, 4096, 8, 8, 128)}
    assert few <= {(e.batch, e.keys, e.heads, e.kv_heads, e.head_dim) for e in ENTRIES if e.causal}


def test_shapes_are_as_their_sources_say():
    from model_entries import ENTRIES

    for entry in ENTRIES:
        split = re.search(r"(?:TP|Ulysses) (\d)", entry.model)
        devices = int(split[1]) if split else 1
        if found := re.search(r"(?:num_attention_heads|\bn_heads|\bnum_heads|\bn_head) (\d+)", entry.source):
            assert entry.heads * devices == int(found[1]), entry.name
            width = re.search(r"(?:hidden_size|d_model|n_embd|\bdim) (\d+)", entry.source)
            if width and not re.search("head_dim", entry.source):
                assert entry.head_dim == int(width[1]) // int(found[1]), entry.name
        if found := re.search(r"num_key_value_heads (\d+)", entry.source):
            assert entry.kv_heads == max(1, int(found[1]) // devices), entry.name
        if found := re.search(r"(?<!_)head_dim (\d+)", entry.source):
            assert entry.head_dim == int(found[1]), entry.name


@each_small
def test_counts_visible_pairs(changes):
    entry = small(**changes)
    pairs = int(visible(entry).sum())
    assert entry.pairs == pairs
    forward, backward = entry.flops["forward"], entry.flops["backward"]
    assert forward == 2 * entry.heads * pairs * (entry.head_dim + entry.value_head_dim)
    assert backward == 2 * entry.heads * pairs * (3 * entry.head_dim + 2 * entry.value_head_dim)
    if entry.head_dim == entry.value_head_dim:
        assert backward == 2.5 * forward


def test_counts_as_the_other_benchmarks_do():
    import calls
    from model_entries import ENTRIES

    entries = {entry.name: entry for entry in ENTRIES}
    for name in ("llama3-70b-tp8", "mistral-7b", "llama3-8b-chunk", "wan-1.3b"):
        e = entries[name]
        case = calls.Case(e.batch, e.queries, e.keys, e.heads, e.kv_heads, e.head_dim, e.causal, e.window)
        assert e.flops["forward"] == case.flops


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(source=""), "no source"),
        (dict(kv_heads=3), "share 3 key heads"),
        (dict(window=4), "is of a causal call"),
        (dict(lengths=(3, 4), keys=30), "share no lengths"),
        (dict(lengths=(3,)), "aren't of 2 rows"),
        (dict(lengths=(3, 25)), "aren't of 2 rows"),
        (dict(documents=(20, 28)), "don't fill 2 rows"),
        (dict(documents=(24, 23)), "don't fill 2 rows"),
        (dict(documents=(24, 24), lengths=(24, 24)), "don't fill 2 rows"),
        (dict(documents=(24, 24), varlen=True), "in one row"),
    ],
)
def test_entries_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


def test_every_entry_is_run_by_cuda_and_by_pallas_on_hopper():
    import model_contenders
    from model_entries import ENTRIES

    def explained(entry):
        """What jax_flash says of the very call that would be measured."""
        for name in ("flash_attention", "flash_attention_varlen"):
            patch.setattr(jax_flash, name, jax_flash.explain)
        call = model_contenders.call("jax_flash_cuda", entry)
        *inputs, _ = entry.shapes(call.packed)
        return call.attend(*inputs, *(jnp.asarray(x) for x in call.data))

    with pytest.MonkeyPatch.context() as patch, jax_flash.planned_for("sm_90a"):
        for entry in ENTRIES:
            choices = {choice.name: choice for choice in explained(entry).choices}
            assert choices["cuda"].runs, f"{entry.name}: {choices['cuda']}"
            assert choices["pallas"].runs, f"{entry.name}: {choices['pallas']}"


def test_every_entry_is_a_valid_call_with_gradients():
    import model_contenders
    import model_programs
    from model_entries import ENTRIES

    for entry in ENTRIES:
        call = model_contenders.call("jax_flash_xla", entry)
        *inputs, d_out = entry.shapes(call.packed)
        data = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.data]
        assert jax.eval_shape(call.attend, *inputs, *data).shape == d_out.shape
        gradients = jax.eval_shape(model_programs.gradients(call.attend), *inputs, *data, d_out)
        assert [x.shape for x in gradients] == [x.shape for x in inputs]


@each_small
def test_ours_attend_to_what_an_entry_says(changes):
    import model_contenders

    entry = small(**changes)
    query, key, value, d_out = entry.arrays()
    call = model_contenders.call("jax_flash_xla", entry)
    inputs = [entry.pack(x) if call.packed else x for x in (query, key, value)]
    out = call.attend(*inputs, *map(jnp.asarray, call.data))

    group = entry.heads // entry.kv_heads
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / entry.head_dim**0.5
    if entry.soft_cap:
        scores = entry.soft_cap * jnp.tanh(scores / entry.soft_cap)
    weights = jax.nn.softmax(jnp.where(visible(entry)[:, None], scores, -jnp.inf))
    expected = entry.pack(jnp.einsum("bnts,bsnh->btnh", weights, value))
    assert not np.isnan(expected).any(), "no token sees nothing"
    np.testing.assert_allclose(out if call.packed else entry.pack(out), expected, rtol=1e-4, atol=1e-5)
    assert entry.pack(d_out).shape == expected.shape
    for row, length in enumerate(entry.lengths):
        assert not np.any(d_out[row, length:])


def test_peers_without_an_option_are_not_asked():
    import model_contenders

    def lacks(name, **changes):
        with pytest.raises(NotImplementedError) as raised:
            model_contenders.call(name, small(**changes))
        return str(raised.value)

    assert set(model_contenders.LACKS) | set(model_contenders.FA3) == set(model_contenders.ALL[3:])
    assert lacks("cudnn", **SMALL["soft cap"]) == "it has no soft cap"
    assert "head dim" in lacks("fa3_cu13", **SMALL["value head dim"])
    assert "packed documents" in lacks("tokamax", **SMALL["segments"])
    assert "sequence lengths" in lacks("jax_mgpu", **SMALL["lengths"])
    # FlashAttention-3 has padding and documents by its varlen functions.
    for kind in ("lengths", "segments", "varlen"):
        entry = small(**SMALL[kind])
        call = model_contenders.call("fa3_cu13", entry)
        assert call.packed
        (offsets,) = call.data
        assert offsets[0] == 0 and offsets[-1] == entry.shapes(packed=True)[0].shape[0]


@pytest.fixture
def made_up(monkeypatch):
    """A few small entries, and our portable kernels under the names of others."""
    import contenders
    import model_contenders
    import models

    entries = [small(name, **SMALL[name]) for name in ("causal", "lengths", "varlen", "soft cap")]
    monkeypatch.setattr(models, "ENTRIES", tuple(entries))
    ours = model_contenders._ours
    monkeypatch.setattr(model_contenders, "_ours", lambda name, entry: ours("xla", entry))
    xla = contenders.OURS["jax_flash_xla"]
    monkeypatch.setitem(contenders.PEERS, "tokamax", lambda *x, causal, window: xla(*x, causal, window))
    return [entry.name for entry in entries]


def test_command_line_on_the_cpu(tmp_path, capsys, made_up):
    import models

    out = tmp_path / "result.json"
    peers = ["jax_flash_cuda", "tokamax", "fa3_cu13"]
    flags = ["--peers", ",".join(peers), "--rounds", "1", "--out", str(out)]
    models.main([*flags, "--entries", "causal,soft cap"])
    result = json.loads(out.read_text())
    assert {"commit", "device", "versions", "date", "timing", "rows", "entries", "ratios"} <= set(result)
    assert [(row["case"], row["peer"]) for row in result["rows"]] == [
        (case, peer) for case in ("causal", "soft cap") for peer in peers
    ]
    ours, peer, missing = result["rows"][:3]
    for row in (ours, peer):
        for key, flops in small(**SMALL["causal"]).flops.items():
            # A difference of two times on a busy CPU may be negative.
            assert "noise" in row.get("error", "") or row[key] == pytest.approx(
                flops / row[f"{key}_milliseconds"] / 1e9
            )
    assert "dew_flash_attn" in missing["error"] and "forward" not in missing
    assert "it has no soft cap" in result["rows"][5]["error"]
    assert [ratio["case"] for ratio in result["ratios"]["forward"]] == ["causal"]
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    # What the file lacks is measured, and what it has stays, in the order of the entries.
    models.main([*flags, "--add", "--passes", "forward"])
    added = json.loads(out.read_text())
    assert list(dict.fromkeys(row["case"] for row in added["rows"])) == made_up
    assert added["rows"][:3] == result["rows"][:3]
    assert [entry["name"] for entry in added["entries"]] == made_up
    assert not any("backward" in row for row in added["rows"] if row["case"] == "lengths")
    # An entry that is named is measured again.
    models.main([*flags[2:], "--peers", "jax_flash_cuda", "--add", "--entries", "causal"])
    again = json.loads(out.read_text())
    assert [row["peer"] for row in again["rows"] if row["case"] == "causal"] == ["jax_flash_cuda"]
    assert len(again["rows"]) == len(added["rows"]) - 2
    assert "b2 s24 h4/2 d16 causal" in capsys.readouterr().out


def test_a_run_ends_with_its_minutes(tmp_path, capsys, made_up, monkeypatch):
    import models

    out = tmp_path / "result.json"
    now = [0.0]
    measure = models.measure

    def takes_a_minute(*arguments):
        now[0] += 60
        return measure(*arguments)

    monkeypatch.setattr(models, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(models, "measure", takes_a_minute)
    # The third entry would end after the minutes if it took as long as the slowest.
    models.main(["--peers", "jax_flash_cuda", "--rounds", "1", "--minutes", "2.5", "--out", str(out)])
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == made_up[:2]
    assert f"not measured in 2.0 minutes: {','.join(made_up[2:])}" in capsys.readouterr().out


def test_entries_in_parts_on_every_gpu(tmp_path, made_up, monkeypatch):
    """Each part is measured as its command says; together they have all entries, in their order."""
    import every_gpu
    import models

    out = tmp_path / "result.json"
    flags = ["--peers", "jax_flash_cuda", "--rounds", "1", "--passes", "forward", "--out", str(out)]

    def run(part, seconds, names):
        for number in range(len(names)):
            _, program, *arguments = part(number, len(names))
            assert Path(program).name == "models.py"
            models.main(arguments)
        return [0] * len(names)

    monkeypatch.setattr(every_gpu, "gpus", lambda: ["0", "3", "5"])
    monkeypatch.setattr(every_gpu, "run", run)
    monkeypatch.setattr("sys.argv", ["models.py", *flags, "--every-gpu"])
    models.main([*flags, "--every-gpu"])
    result = json.loads(out.read_text())
    assert [row["case"] for row in result["rows"]] == made_up and result["gpus"] == 3
    assert [entry["name"] for entry in result["entries"]] == made_up
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "result.png"]


def test_a_part_that_fails_is_told(tmp_path, made_up, monkeypatch, capsys):
    """What the others measured is written; what an earlier run left is not."""
    import every_gpu
    import models

    out = tmp_path / "result.json"
    flags = ["--peers", "jax_flash_cuda", "--rounds", "1", "--passes", "forward", "--out", str(out)]
    (tmp_path / "result.part0.json").write_text('{"rows": [{"case": "stale"}]}')

    def run(part, seconds, names):
        models.main(part(1, 2)[2:])
        return [1, 0]

    monkeypatch.setattr(every_gpu, "gpus", lambda: ["0", "1"])
    monkeypatch.setattr(every_gpu, "run", run)
    monkeypatch.setattr("sys.argv", ["models.py", *flags, "--every-gpu"])
    with pytest.raises(SystemExit, match="1 of 2 parts failed"):
        models.main([*flags, "--every-gpu"])
    assert [row["case"] for row in json.loads(out.read_text())["rows"]] == made_up[1::2]
    assert f"not measured: {','.join(made_up[::2])}" in capsys.readouterr().out


def test_results_that_differ_have_no_figures(monkeypatch):
    import contenders
    import models

    xla = contenders.OURS["jax_flash_xla"]

    @jax.custom_vjp
    def doubled(x):
        return x

    doubled.defvjp(lambda x: (x, None), lambda _, gradient: (2 * gradient,))
    changed = {
        "tokamax": lambda *x, causal, window: xla(*x, not causal, window),
        "cudnn": lambda q, k, v, causal, window: xla(q, k, doubled(v), causal, window),
    }
    for name, attend in changed.items():
        monkeypatch.setitem(contenders.PEERS, name, attend)
    entry = small(causal=True)
    names = ("jax_flash_xla", "tokamax", "cudnn")
    programs = models.compile_all([entry], names, models.PASSES)
    _, other_mask, other_gradient = models.measure(entry, names, programs[entry.name], 1)
    assert "forward" not in other_mask and "differs from the first one's" in other_mask["error"]
    assert "forward" in other_gradient and "backward" not in other_gradient
    assert "differs from the first one's" in other_gradient["error"]


@pytest.mark.parametrize(
    "wrong",
    (
        ["--entries", "llama3-8b-8k,gpt-9"],
        ["--passes", "sideways"],
        ["--peers", "nobody"],
        ["--add"],
        ["--every-gpu"],
    ),
)
def test_unknown_names_are_refused(wrong):
    import models

    with pytest.raises(SystemExit):
        models.main(wrong)


def test_lists_the_entries(capsys):
    import models
    from model_entries import ENTRIES

    models.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(ENTRIES)
    assert lines[0].startswith("llama3-8b-2k") and "b4 s2048 h32/8 d128 causal" in lines[0]


@pytest.fixture
def result():
    """A made-up result of every entry."""
    import models
    from model_entries import ENTRIES

    rows = []
    for place, entry in enumerate(ENTRIES):
        rates = {"jax_flash_cuda": 700, "jax_flash_pallas": 600, "cudnn": 500, "fa3_cu13": 400 + 10 * place}
        for peer, rate in rates.items():
            row = {"group": entry.group, "case": entry.name, "peer": peer, "forward": float(rate)}
            rows.append(row | {"backward": rate * 0.8})
        rows[-1] |= {"error": "no"}
        del rows[-1]["backward"]
    environment = {"device": "made up", "date": "2026-01-02T03", "versions": {"jax": "1"}}
    return environment | {"rows": rows} | models.described(rows)


def test_chart_of_every_entry(tmp_path, result):
    import models_chart

    path = tmp_path / "made_up.json"
    path.write_text(json.dumps(result))
    assert models_chart.draw(path).stat().st_size > 10000
    for row in result["rows"]:
        row.pop("backward", None)
    path.write_text(json.dumps(result))
    assert models_chart.draw(path).stat().st_size > 10000
    path.write_text(json.dumps(result | {"rows": []}))
    with pytest.raises(ValueError, match="no figures"):
        models_chart.draw(path)


def test_table_of_every_entry(result):
    import models_table
    from model_entries import ENTRIES

    text = models_table.table(result, "models_made_up")
    assert (
        text.partition("\n| --- ")[0].splitlines()[-1]
        == "| model | shape | `cuda` | `pallas` | best peer | `cuda` over it |"
    )
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == len(ENTRIES)
    assert rows[1].startswith("| Llama 3 8B | b1 s8192 h32/8 d128 causal | 700 / 560 | 600 / 480 |")
    assert rows[1].endswith("| 500 cuDNN / 400 cuDNN | 1.40 / 1.40 |")
    assert "| 850 FA3 / 400 cuDNN | 0.82 / 1.40 |" in rows[45]


def test_section_of_the_readme(result):
    import models_table
    from model_entries import ENTRIES

    text = models_table.section(result, "models_made_up")
    assert text.startswith("![Attention in open models") and "(benchmarks/results/models_made_up.png)" in text
    text = " ".join(text.split())
    assert f"{len(ENTRIES)} calls of attention as open models make them" in text
    assert "geometric mean: forward " in text and "; backward 1.40 of the best peer's, ahead in" in text
    assert f"of {len(result['ratios']['forward'])}; backward" in text


def test_entries_are_plain_values():
    entry = small()
    assert dataclasses.replace(entry) == entry and hash(entry) == hash(small())
