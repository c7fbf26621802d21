"""The example that serves: its pages, its engine against full recomputation, and its figures."""

import collections
import dataclasses
import json
import pathlib
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import engine as engines  # noqa: E402
import inference  # noqa: E402
import loading  # noqa: E402
import paged_step  # noqa: E402
import serve  # noqa: E402
import workload  # noqa: E402
from batches import BatchServer  # noqa: E402
from engine import Capacity, Engine  # noqa: E402
from pages import PagePool, PrefixCache  # noqa: E402
from workload import Completion, Request  # noqa: E402

CAPACITY = Capacity(rows=3, step_tokens=8, pages=14, page_size=4, pages_per_sequence=8)


class StepClock:
    """Each look at it takes a second."""

    def __init__(self):
        self.time = 0.0

    def now(self) -> float:
        self.time += 1
        return self.time

    def wait_until(self, moment: float) -> None:
        self.time = max(self.time, moment)


@pytest.fixture(scope="module")
def model():
    return loading.load(loading.ModelSettings(random=True, layers=2, heads=4, key_heads=2, width=32))


def requests(count: int, rate: float = 0.0) -> list[Request]:
    text = np.random.default_rng(1).integers(256, size=500, dtype=np.uint8)
    return workload.random_requests(
        text, count=count, rate=rate, prefix_length=9, prompt_length=9, tokens=14, seed=2
    )


def check_against_recomputation(model: loading.Model, completions: list[Completion]) -> None:
    """Each token is the most likely one by a pass of the model without a cache over all tokens before it."""
    length = 9 + 9 + 14
    tokens = np.zeros((len(completions), length), np.int32)
    for row, completion in zip(tokens, completions, strict=True):
        whole = [*completion.request.prompt, *completion.tokens]
        row[: len(whole)] = whole
    most_likely = np.asarray(inference.recompute(model.graph, model.parameters, tokens)).argmax(-1)
    for row, completion in zip(most_likely, completions, strict=True):
        begin, count = len(completion.request.prompt) - 1, completion.request.tokens
        assert completion.tokens == row[begin : begin + count].tolist()


def check_all_free(engine: Engine) -> None:
    engine.prefixes.evict(engine.pool.size)
    assert engine.pool.free == engine.pool.size
    assert not engine.has_work


@hypothesis.settings(deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_no_page_has_two_owners_and_all_are_freed(data):
    size = data.draw(st.integers(1, 12), label="size")
    pool, held = PagePool(size), []
    for _ in range(data.draw(st.integers(0, 40), label="actions")):
        users = collections.Counter(page for pages in held for page in pages)
        assert pool.free == size - len(users)
        assert all(pool.users(page) == users[page] for page in range(size))
        action = data.draw(st.sampled_from(["allocate", "share", "release"]))
        if action == "allocate":
            count = data.draw(st.integers(0, size))
            if count > pool.free:
                with pytest.raises(ValueError, match=f"{count} pages were asked for"):
                    pool.allocate(count)
            else:
                pages = pool.allocate(count)
                assert len(set(pages)) == count and not users.keys() & set(pages)
                held.append(pages)
        elif held:
            i = data.draw(st.integers(0, len(held) - 1))
            if action == "share":
                for page in held[i]:
                    pool.share(page)
                held.append(list(held[i]))
            else:
                pool.release(held.pop(i))
    for pages in held:
        pool.release(pages)
    assert sorted(pool.allocate(size)) == list(range(size))


def test_free_pages_are_neither_shared_nor_freed():
    pool = PagePool(2)
    with pytest.raises(ValueError, match="page 1 is free: it can't be shared"):
        pool.share(1)
    pool.release(pool.allocate(1))
    with pytest.raises(ValueError, match="page 0 is free already"):
        pool.release([0])


def test_prefixes_are_shared_as_far_as_whole_pages_agree():
    pool = PagePool(8)
    prefixes = PrefixCache(pool, page_size=2)
    pages = pool.allocate(3)
    prefixes.add(b"abcde", pages)
    assert [pool.users(page) for page in pages] == [2, 2, 1]  # the last isn't full
    assert prefixes.share(b"abcdx") == pages[:2]
    assert prefixes.share(b"abxde") == pages[:1]
    assert prefixes.share(b"xbcde") == []
    assert prefixes.share(b"abcd") == pages[:1]  # its last byte has to be computed
    assert [pool.users(page) for page in pages] == [5, 3, 1]


def test_eviction_spares_pages_in_use_and_takes_the_oldest_first():
    pool = PagePool(5)
    prefixes = PrefixCache(pool, page_size=2)
    old, new, used = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for prompt, pages in ((b"aabb", old), (b"ccdd", new), (b"ee", used)):
        prefixes.add(prompt, pages)
    pool.release(old + new)
    prefixes.evict(1)
    assert pool.users(old[1]) == 0 and pool.users(old[0]) == 1
    prefixes.evict(5)  # more than there are: none is evicted
    assert pool.free == 1
    prefixes.evict(4)
    assert pool.free == 4 and pool.users(used[0]) == 2


@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_both_servers_give_the_tokens_of_full_recomputation(model, rate):
    served = requests(12, rate)
    engine = Engine(model, CAPACITY)
    continuous = engines.serve(engine, served, StepClock())
    check_against_recomputation(model, continuous)
    check_all_free(engine)
    assert engine.shared_tokens >= 8 * 4
    batches = BatchServer(model, rows=3, prompt_length=18, tokens=14).serve(served, StepClock())
    assert [c.tokens for c in batches] == [c.tokens for c in continuous]
    for completion in continuous + batches:
        assert completion.request.arrival < completion.first_at <= completion.finished_at
    assert len({token for completion in continuous for token in completion.tokens}) > 10


def test_one_row_and_a_pool_for_one_sequence(model):
    served = requests(4)
    for capacity in (
        Capacity(rows=1, step_tokens=1, pages=8, page_size=4, pages_per_sequence=8),
        Capacity(rows=4, step_tokens=5, pages=32, page_size=1, pages_per_sequence=32),
    ):
        engine = Engine(model, capacity)
        check_against_recomputation(model, engines.serve(engine, served, StepClock()))
        check_all_free(engine)


def test_requests_too_long_are_refused_and_hold_up_no_others(model):
    fits = Request(b"abc", 3, 0.0)
    refused = [
        Request(b"a" * 30, 4, 0.0),  # 33 tokens to keep: 9 pages
        Request(b"", 4, 0.0),
        Request(b"abc", 0, 0.0),
    ]
    engine = Engine(model, CAPACITY)
    *refusals, served = engines.serve(engine, [*refused, fits], StepClock())
    assert refusals[0].refusal == (
        "a request of 30 tokens that asks for 4 more needs 9 pages of 4 tokens; one may have 8"
    )
    assert all(not completion.tokens and completion.refusal for completion in refusals)
    check_against_recomputation(model, [served])
    figures = workload.figures([*refusals, served])
    assert figures["tokens_per_second"] > 0
    with pytest.raises(ValueError, match="no request was served"):
        workload.figures(refusals)


def test_decoding_goes_on_while_a_long_prompt_is_computed(model):
    engine = Engine(model, CAPACITY)
    short = engine.submit(Request(b"a", 12, 0.0))
    engine.step()
    long = engine.submit(Request(bytes(range(26)), 2, 0.0))  # 7 tokens of it a step
    clock = StepClock()
    for step in range(2, 6):
        engine.step()
        engine.collect(clock)
        assert (len(short.tokens), len(long.tokens)) == (step, 0 if step < 5 else 1)
    while engine.has_work:
        engine.step()
    engine.collect(clock)
    check_against_recomputation(model, [short, long])


def test_lost_pages_end_the_run(model):
    engine = Engine(model, CAPACITY)
    engine.pool.allocate(13)  # and nobody releases them
    with pytest.raises(RuntimeError, match="no request can start, though none runs: 1 pages are free"):
        engines.serve(engine, requests(1), StepClock())


def test_packed_steps():
    batch = paged_step.pack(
        [
            paged_step.RowWork(2, [paged_step.FROM_LAST_STEP], 5, [9, 4], True),
            paged_step.RowWork(0, [10, 11, 12], 3, [7, 8], False),
        ],
        size=6,
        rows=3,
        pages=20,
        page_size=4,
        pages_per_sequence=3,
    )
    assert batch.tokens.tolist() == [10, 11, 12, -1, 0, 0]
    assert batch.rows.tolist() == [0, 0, 0, 2, -1, -1]
    assert batch.positions.tolist()[:4] == [3, 4, 5, 5]
    assert batch.token_pages.tolist() == [7, 8, 8, 4, 20, 20]
    assert batch.lengths.tolist() == [6, 0, 6]
    assert batch.page_table.tolist() == [[7, 8, -1], [-1, -1, -1], [9, 4, -1]]
    assert batch.offsets.tolist() == [0, 3, 3, 4]
    assert batch.samples.tolist() == [False, False, True]


def test_requests_depend_on_the_seed_alone():
    first = requests(50, rate=10.0)
    assert first == requests(50, rate=10.0)
    assert len({request.prompt[:9] for request in first}) == 1
    assert {len(request.prompt) for request in first} == set(range(10, 19))
    assert {request.tokens for request in first} <= set(range(1, 15))
    moments = [request.arrival for request in first]
    assert moments == sorted(moments) and 2.5 < moments[-1] < 10
    assert {request.arrival for request in requests(5)} == {0.0}
    with pytest.raises(ValueError, match="too few for prompts of up to 8"):
        workload.random_requests(
            np.zeros(8, np.uint8), count=1, rate=0, prefix_length=4, prompt_length=4, tokens=1, seed=0
        )


def test_figures():
    completions = [
        Completion(Request(b"a", 2, 1.0), [5, 6], 2.0, 3.0),
        Completion(Request(b"a", 4, 2.0), [5, 6, 7, 8], 5.0, 7.0),
    ]
    figures = workload.figures(completions)
    assert figures["tokens_per_second"] == 1.0
    assert (figures["latency_mean"], figures["first_token_mean"]) == (3.5, 2.0)
    assert figures["latency_p95"] == pytest.approx(4.85)
    assert figures["first_token_p95"] == pytest.approx(2.9)


def test_capacities_that_make_no_sense():
    with pytest.raises(ValueError, match="pages must be at least 1, got 0"):
        dataclasses.replace(CAPACITY, pages=0)
    with pytest.raises(ValueError, match="a token for each of 3 rows, got step_tokens=2"):
        dataclasses.replace(CAPACITY, step_tokens=2)


def test_the_program_compares_both_servers_and_writes_figures(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "figures.json"
    text.write_text("".join(f"def f{i}(x):\n    return x + {i}\n\n\n" for i in range(300)))
    settings = serve.Settings(
        random=True,
        layers=1,
        width=32,
        text=str(text),
        requests=10,
        rate=0.0,
        prefix_length=32,
        tokens=16,
        out=str(out),
    )
    completions = serve.serve(settings)
    assert [c.tokens for c in completions["continuous"]] == [c.tokens for c in completions["batches"]]
    printed = capsys.readouterr().out
    assert "10 of 10 requests got the same tokens" in printed
    assert "time to first token, 95th percentile, ms" in printed
    result = json.loads(out.read_text())
    assert {"commit", "device", "platform", "versions", "date", "model", "capacity"} < set(result)
    assert (result["requests"], result["same_tokens"]) == (10, 10)
    assert [row["case"] for row in result["rows"]] == ["continuous", "batches"]
    assert all(row[figure] > 0 for row in result["rows"] for figure in serve.ROWS)


def test_errors_name_the_flag():
    settings = serve.Settings(random=True)
    with pytest.raises(ValueError, match="need 18 pages of 16, and --pages=17"):
        serve.serve(dataclasses.replace(settings, pages=17))
    with pytest.raises(ValueError, match="--tokens must be at least 1, got 0"):
        serve.serve(dataclasses.replace(settings, tokens=0))
    for name, values in {"prefix_length": [-5], "rate": [-1.0, float("nan")], "seed": [-1]}.items():
        for value in values:
            words = f"--{name.replace('_', '-')} must be at least 0, got {value}"
            with pytest.raises(ValueError, match=words):
                serve.serve(dataclasses.replace(settings, **{name: value}))
