"""`python -m bench.engines.contestant NAME MODEL_DIR …`: one engine that runs batches on demand.

A line on standard input is a batch, `{"prompts": [[token, …], …], "new_tokens": n}`; the answer is a line
on standard output, `{"seconds", "ttft_seconds": […], "tokens": [[…], …]}`. All requests of a batch are
handed over at once and each makes exactly `new_tokens` tokens, greedily. The first line out, `{}`, says
that the engine is ready. Each engine is used through its own interface inside a process, without HTTP.

Only the standard library is imported at the top: the environment of another engine lacks ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

_STEP_TOKENS = 512
_MAX_SEQUENCES = 32
_POOL_TOKENS = 32 * 1024


class Contestant(Protocol):
    """An engine that is loaded."""

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        """Generate for all prompts at once; see the module for what is returned."""
        ...


class ExaServe:
    """The built-in engine: scheduler, model, detokenisation and streams."""

    def __init__(self, model_dir: Path, *, threads: int, dtype: str, weights: str) -> None:
        """Load it and wait until it is ready; with `shared` weights as replicas of a node map them."""
        from workers.engines.torch_engine.config import read_model_config  # noqa: PLC0415 - see module
        from workers.engines.torch_engine.engine import TorchEngine  # noqa: PLC0415 - see module
        from workers.engines.torch_engine.settings import EngineSettings  # noqa: PLC0415 - see module

        settings = EngineSettings(
            model_dir=model_dir,
            model_name="made",
            device="cpu",
            dtype=dtype,
            num_blocks=_POOL_TOKENS // 16,
            max_num_seqs=_MAX_SEQUENCES,
            max_num_batched_tokens=_STEP_TOKENS,
            threads=threads,
            weights_cache=model_dir / "shared" if weights == "shared" else None,
        )
        self._engine = TorchEngine(settings, read_model_config(model_dir))
        self._engine.start()
        while self._engine.readiness().status == "loading":
            time.sleep(0.05)
        self._batches = 0

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        """Submit all and read their streams to the end."""
        self._batches += 1
        return asyncio.run(self._run(prompts, new_tokens))

    async def _run(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        from workers.engines.openai_server.port import GenerationTask  # noqa: PLC0415 - see module
        from workers.engines.openai_server.stream import GenerationStream  # noqa: PLC0415 - see module

        began = time.perf_counter()
        streams = []
        for number, prompt in enumerate(prompts):
            task = GenerationTask(
                f"{self._batches}.{number}", tuple(prompt), new_tokens, temperature=0.0, ignore_eos=True
            )
            stream = GenerationStream(
                loop=asyncio.get_running_loop(), metrics=self._engine.metrics, prompt_tokens=len(prompt)
            )
            self._engine.submit(task, stream)
            streams.append(stream)

        async def read(stream: GenerationStream) -> tuple[float, str]:
            delta = await stream.next_delta()
            first_seconds = time.perf_counter() - began
            text = [delta.text]
            while delta.finish is None:
                delta = await stream.next_delta()
                text.append(delta.text)
            if delta.finish != "length" or stream.completion_tokens != new_tokens:
                raise RuntimeError(f"a request ended with {delta.finish}: {stream.completion_tokens} tokens")
            return first_seconds, "".join(text)

        done = await asyncio.gather(*(read(stream) for stream in streams))
        return {
            "seconds": time.perf_counter() - began,
            "ttft_seconds": [first for first, _ in done],
            "tokens": [self._engine.encode_text(text) for _, text in done],
        }


class Transformers:
    """The continuous batching of transformers, on scaled-dot-product attention."""

    def __init__(self, model_dir: Path, *, threads: int, dtype: str, weights: str) -> None:  # noqa: ARG002 - ours only
        """Load it and start its thread."""
        import torch  # noqa: PLC0415 - see module
        from transformers import (  # noqa: PLC0415 - see module
            AutoModelForCausalLM,
            ContinuousBatchingConfig,
            GenerationConfig,
        )

        torch.set_num_threads(threads)
        model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
        page_tokens = 32
        batching = ContinuousBatchingConfig(
            page_size=page_tokens,
            num_blocks=_POOL_TOKENS // page_tokens,
            max_batch_tokens=_STEP_TOKENS,
            max_requests_per_batch=_MAX_SEQUENCES,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)  # type: ignore[no-untyped-call]  # theirs
        with torch.inference_mode():
            self._manager = model.init_continuous_batching(greedy, batching)
            self._manager.start()
        self._batches = 0

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        """Add all requests and wait for their results, which carry the time of each token."""
        self._batches += 1
        began = time.perf_counter()
        names = [f"{self._batches}.{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._manager.add_request(prompt, name, max_new_tokens=new_tokens, record_timestamps=True)
        results: dict[str, Any] = {}
        while len(results) < len(names):
            result = self._manager.get_result(timeout=60)
            if result is None or result.error:
                raise RuntimeError(f"transformers gave up: {result}")
            results[result.request_id] = result
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "ttft_seconds": [results[name].timestamps[0] - began for name in names],
            "tokens": [list(results[name].generated_tokens) for name in names],
        }


class Vllm:
    """vLLM's engine, stepped in this process."""

    def __init__(self, model_dir: Path, *, threads: int, dtype: str, weights: str) -> None:  # noqa: ARG002 - ours only
        """Load it."""
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": str(threads),
        }
        from vllm import LLM  # type: ignore[import-not-found]  # noqa: PLC0415 - see module

        self._engine = LLM(
            model=str(model_dir),
            dtype=dtype,
            max_model_len=2048,
            block_size=32,
            max_num_seqs=_MAX_SEQUENCES,
            max_num_batched_tokens=_STEP_TOKENS,
            enforce_eager=True,
            disable_log_stats=True,
        ).llm_engine
        self._batches = 0

    def run(self, prompts: Sequence[list[int]], new_tokens: int) -> dict[str, Any]:
        """Add all requests and step until none is left."""
        from vllm import SamplingParams  # noqa: PLC0415 - see module

        self._batches += 1
        began = time.perf_counter()
        names = [f"{self._batches}.{number}" for number in range(len(prompts))]
        greedy = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, greedy)
        first: dict[str, float] = {}
        tokens: dict[str, list[int]] = {}
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first.setdefault(output.request_id, time.perf_counter() - began)
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        return {
            "seconds": time.perf_counter() - began,
            "ttft_seconds": [first[name] for name in names],
            "tokens": [tokens[name] for name in names],
        }


CONTESTANTS: dict[str, Callable[..., Contestant]] = {
    "exaserve": ExaServe,
    "transformers": Transformers,
    "vllm": Vllm,
}


def main() -> int:
    """Serve batches until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--weights", default="private")
    arguments = parser.parse_args()
    # Engines write to standard output as they please; the answers get a way of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    make = CONTESTANTS[arguments.name]
    engine = make(
        arguments.model_dir, threads=arguments.threads, dtype=arguments.dtype, weights=arguments.weights
    )
    print("{}", file=answers, flush=True)
    for line in sys.stdin:
        batch = json.loads(line)
        print(json.dumps(engine.run(batch["prompts"], batch["new_tokens"])), file=answers, flush=True)
    answers.close()
    # The engines' own threads are not all daemons, and none has anything left to do.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
