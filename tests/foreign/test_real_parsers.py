"""Every command that tests build is accepted by the engine's own parser, and means what was meant."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.launch_forms import FORMS, MODEL, Form, launch_of
from workers.protocol.engines.kinds import ChoiceOption, SwitchOption
from workers.protocol.engines.option import EngineTable, read_version
from workers.protocol.engines.tables import TABLES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("parse_launches.py")
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
GONE_BEFORE = {"vllm": {"--model-tag"}, "sglang": {"--load-publish-endpoint", "--enable-ssl-refresh"}}


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine's parser says of all forms."""

    parsed: dict[str, dict[str, str]]
    flags: frozenset[str]
    choices: dict[str, list[str]]


def ask(engine: str, python: Path, model: Path, folder: Path | None = None) -> Answer:
    forms = [form for form in FORMS if form.adapter.name == engine]
    environment = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
    if folder is not None:
        environment["PYTHONPATH"] = str(folder)
    commands = [[word.replace(str(MODEL), str(model)) for word in launch_of(form).argv[3:]] for form in forms]
    done = subprocess.run(
        [python, str(SCRIPT), engine],
        input=json.dumps(commands),
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=True,
    )
    said = json.loads(done.stdout.strip().splitlines()[-1])
    parsed = dict(zip((form.name for form in forms), said["parsed"], strict=True))
    return Answer(parsed, frozenset(said["flags"]), said["choices"])


@pytest.fixture(scope="module")
def answers(
    vllm_python: Path, sglang_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Answer]:
    # vLLM's arguments look for the model's folder.
    model = tmp_path_factory.mktemp("a model")
    (model / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return {
        "vllm": ask("vllm", vllm_python, model),
        "sglang": ask("sglang", vllm_python, model, sglang_folder),
    }


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_command_is_accepted_and_its_options_arrive(form: Form, answers: dict[str, Answer]) -> None:
    found = answers[form.adapter.name].parsed[form.name]
    assert "error" not in found, found
    table = TABLES[form.adapter.name]
    for name, value in form.options.items():
        option = table.by_name.get(name)
        if option is None or option.built or value is False:
            continue
        arrived = found[name]
        assert arrived not in ("None", "False", ""), name
        if isinstance(value, int | float) and not isinstance(value, bool):
            assert float(arrived) == value, name
    if form.rank is not None:
        assert (found["nnodes"], found["node_rank"]) == ("4", str(form.rank.rank))
    assert "my-model" in found["served_model_name"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_flag_of_the_table_is_one_of_the_engines(engine: str, answers: dict[str, Answer]) -> None:
    table, here = TABLES[engine], read_version(VERSIONS[engine])
    known = answers[engine].flags
    assert flags_of(table, here) - GONE_BEFORE[engine] <= known
    # Short spellings need only be the beginning of one.
    aliases = {alias for option in table.options if not option.objection(here) for alias in option.aliases}
    assert not {alias for alias in aliases if not any(flag.startswith(alias) for flag in known)}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_every_choice_of_the_table_is_one_of_the_engines(engine: str, answers: dict[str, Answer]) -> None:
    for option in TABLES[engine].options:
        known = answers[engine].choices.get(option.written)
        if known and isinstance(option.kind, ChoiceOption):
            assert set(option.kind.choices) <= set(known), option.name


def flags_of(table: EngineTable, version: tuple[int, ...]) -> set[str]:
    flags = {*table.agents_flags, *table.code_flags}
    for option in table.options:
        if option.built or option.objection(version):
            continue
        flags.add(option.written)
        if isinstance(option.kind, SwitchOption) and option.off_flag:
            flags.add(option.off_flag)
    return flags
