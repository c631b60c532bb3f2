"""Puts command lines to an engine's own parser. Run by the interpreter that has the engine.

Standard input: JSON list of argument lists. Standard output, last line: JSON list with, for each, what was
parsed (values as text) or `error`; and all flags that the parser has. Nothing is loaded and no device opened.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any


def vllm_parser() -> argparse.ArgumentParser:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415 - only where vLLM is
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    return make_arg_parser(FlexibleArgumentParser())  # type: ignore[no-any-return]  # of vLLM


def check_vllm(found: argparse.Namespace) -> None:
    """Beyond the parser: the engine's arguments, and the server's own check of what contradicts itself."""
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args  # noqa: PLC0415

    validate_parsed_serve_args(found)
    AsyncEngineArgs.from_cli_args(found)


def sglang_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs  # noqa: PLC0415 - only where SGLang is

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser


def check_sglang(found: argparse.Namespace) -> None:
    """Options that the parser keeps as text and SGLang reads later."""
    for name in (
        "json_model_override_args",
        "model_loader_extra_config",
        "kv_events_config",
        "deepep_config",
    ):
        text = getattr(found, name)
        if text:
            json.loads(text)


ENGINES: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], None]]] = {
    "vllm": (vllm_parser, check_vllm),
    "sglang": (sglang_parser, check_sglang),
}


def parse(
    parser: argparse.ArgumentParser, check: Callable[[argparse.Namespace], None], arguments: list[str]
) -> dict[str, Any]:
    try:
        found = parser.parse_args(arguments)
        check(found)
    except (SystemExit, argparse.ArgumentError, ValueError, TypeError) as error:
        return {"error": repr(error)}
    return {name: str(value) for name, value in vars(found).items()}


def main() -> None:
    make, check = ENGINES[sys.argv[1]]
    parser = make()
    parsed = [parse(parser, check, arguments) for arguments in json.load(sys.stdin)]
    flags = [flag for action in parser._actions for flag in action.option_strings]
    choices = {
        flag: [str(choice) for choice in action.choices]
        for action in parser._actions
        if action.choices
        for flag in action.option_strings
    }
    sys.stdout.write("\n" + json.dumps({"parsed": parsed, "flags": flags, "choices": choices}) + "\n")


if __name__ == "__main__":
    main()
