"""Programs whose flags are the fields of a dataclass."""

import dataclasses
from collections.abc import Callable
from typing import Any

from absl import app, flags, logging

flags.disclaim_key_flags()  # flags are the program's, so that its --help shows them


def flag(default: Any, description: str, choices: list[str] | None = None) -> Any:
    """A field that is a flag of the program; its type decides the flag's kind."""
    return dataclasses.field(default=default, metadata={"description": description, "choices": choices})


def run(settings_type: type, program: Callable[[Any], Any]) -> None:
    """Calls `program` with the settings of the command line.

    Its ValueErrors and NotImplementedErrors say what is wrong with them, and end the process by one line.
    Other errors are bugs of the program, and keep their traceback.
    """
    fields = dataclasses.fields(settings_type)
    for field in fields:
        _define(field)

    def main(argv: list[str]) -> None:
        if len(argv) > 1:
            raise app.UsageError(f"flags only, got {argv[1:]}")
        logging.set_verbosity(logging.WARNING)  # JAX and orbax report each step of theirs at INFO
        values = {field.name: flags.FLAGS[_name(field)].value for field in fields}
        try:
            program(settings_type(**values))
        except (ValueError, NotImplementedError) as error:
            raise SystemExit(f"error: {error}") from error

    app.run(main)


def _name(field: dataclasses.Field) -> str:
    return field.name.replace("_", "-")


def _define(field: dataclasses.Field) -> None:
    name, default = _name(field), field.default
    description, choices = field.metadata["description"], field.metadata["choices"]
    if choices:
        flags.DEFINE_enum(name, default, choices, description)
    elif field.type is bool:
        flags.DEFINE_bool(name, default, description)
    elif field.type in (int, int | None):
        flags.DEFINE_integer(name, default, description)
    elif field.type is float:
        flags.DEFINE_float(name, default, description)
    else:
        flags.DEFINE_string(name, default, description)
