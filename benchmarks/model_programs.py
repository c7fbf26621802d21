"""What is compiled for an entry of models.py, and how results of contenders are compared."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import model_contenders
import rounds
from model_entry import Entry

PASSES = ("forward", "backward")
GRADIENTS = ("d_query", "d_key", "d_value")

Program = jax.stages.Compiled | Exception  # compiled, or why it isn't


@dataclasses.dataclass(frozen=True)
class EntryPrograms:
    """Everything that is compiled for one entry."""

    arrays: jax.stages.Compiled  # makes the entry's arrays
    passes: Mapping[tuple[str, str], Program]  # by contender and pass


def gradients(attend: Callable) -> Callable:
    """Both passes: gradients of query, key and value. The gradient of the output comes last."""

    def run(query, key, value, *rest):
        *data, d_out = rest
        return jax.vjp(lambda *inputs: attend(*inputs, *data), query, key, value)[1](d_out)

    return run


def compile_all(
    entries: Sequence[Entry], names: Sequence[str], passes: Sequence[str]
) -> dict[str, EntryPrograms]:
    """Compile all that will be measured, on all cores: it takes longer than measuring."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:

        def submit(entry: Entry) -> tuple[Future, dict[tuple[str, str], Future]]:
            arrays = pool.submit(lambda: jax.jit(entry.arrays).lower().compile())
            runs = {
                (name, one_pass): pool.submit(_compile, entry, name, one_pass)
                for name in names
                for one_pass in passes
            }
            return arrays, runs

        submitted = {entry.name: submit(entry) for entry in entries}
        return {
            name: EntryPrograms(arrays.result(), {key: run.result() for key, run in runs.items()})
            for name, (arrays, runs) in submitted.items()
        }


def _compile(entry: Entry, name: str, one_pass: str) -> Program:
    try:
        call = model_contenders.call(name, entry)
        *inputs, d_out = entry.shapes(call.packed)
        inputs += [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in call.data]
        if one_pass == "forward":
            return jax.jit(call.attend).lower(*inputs).compile()
        return jax.jit(gradients(call.attend)).lower(*inputs, d_out).compile()
    except Exception as error:  # whatever a contender refuses with is its answer
        return error


class Reference:
    """Results of the contender that came first, with which the others' must agree at every token."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.tokens: dict[str, jax.Array] = {}

    def check(self, results: Mapping[str, jax.Array], packed: bool) -> None:
        """Raises ValueError where results differ from those of the same names that came first."""
        tokens = _tokens(self.entry, packed, results)
        if results.keys() <= self.tokens.keys():
            expected = {key: self.tokens[key] for key in results}
            for relative in _differences(tokens, expected).values():
                rounds.refuse_difference(float(relative))
        else:
            self.tokens |= tokens


# One program for all results of a pass: each program costs a fraction of a second to compile.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _tokens(entry: Entry, packed: bool, results: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {key: x if packed else entry.pack(x) for key, x in results.items()}


@jax.jit
def _differences(results: dict[str, jax.Array], expected: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {key: rounds.relative_difference(x, expected[key]) for key, x in results.items()}
