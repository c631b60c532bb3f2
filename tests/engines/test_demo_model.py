from __future__ import annotations

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, LlamaForCausalLM

from workers.engines.demo_model import main, make_demo_model


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def test_same_seed_gives_the_same_bytes(demo_model: Path, tmp_path: Path) -> None:
    assert main([str(tmp_path / "a")]) == 0
    assert digests(tmp_path / "a") == digests(demo_model)
    make_demo_model(tmp_path / "b", seed=1)
    assert digests(tmp_path / "b")["model.safetensors"] != digests(demo_model)["model.safetensors"]
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b"}  # no half-made folder is left


def test_whole_model_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_demo_model(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    make_demo_model(folder)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_loads_with_transformers_and_says_words(demo_model: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(demo_model)
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    assert 3 < millions < 4
    messages = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(str(text), add_special_tokens=False, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    fresh = output[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(fresh) == 40  # no end of text among them
    said = str(tokenizer.decode(fresh))
    assert said.isascii()
    assert said.isprintable()


def test_says_that_it_is_untrained(demo_model: Path) -> None:
    assert "untrained" in (demo_model / "README.md").read_text()
    assert json.loads((demo_model / "config.json").read_text())["max_position_embeddings"] == 4096
