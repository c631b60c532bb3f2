"""`python -m bench.chat_load --url URL --key-file FILE`: many-turn chats, a bounded number at once.

Keeps the live pages moving. Each session thinks between its turns, grows to a bounded length, then
makes room for a new one. SIGTERM ends it within a turn; the last line it prints is a JSON summary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.chat_client import ChatClient, ChatError, Turn

LONGEST_CONTEXT_TOKENS = 1500
_TURNS = (2, 12)
_THINK_SECONDS = (0.2, 2.5)
_ANSWER_TOKENS = (32, 192)
_LONGEST_PAUSE_SECONDS = 10.0
_TOPICS = (
    "the weather at sea", "a walk in the hills", "how bread is made", "trains at night",
    "an old clock", "the sound of rain", "letters from abroad", "a garden in winter",
)  # fmt: skip


@dataclass(slots=True)
class Tally:
    """What came of the load so far; shared by all sessions."""

    turns: int = 0
    failed: int = 0
    refused: int = 0
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, turn: Turn) -> None:
        """Count a finished turn."""
        with self._lock:
            self.turns += 1
            self.completion_tokens += turn.completion_tokens
            self.prompt_tokens += turn.prompt_tokens
            self.cached_tokens += turn.cached_tokens

    def add_failure(self, error: ChatError) -> None:
        """Count a turn that was refused (with a status) or broke off (without)."""
        with self._lock:
            if error.status:
                self.refused += 1
            else:
                self.failed += 1

    def summary(self) -> dict[str, int]:
        """Return the figures by name."""
        return {
            "turns": self.turns,
            "failed": self.failed,
            "refused": self.refused,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
        }


def run_load(
    client: ChatClient, *, sessions: int, seconds: float, tally: Tally, stopping: threading.Event
) -> None:
    """Keep `sessions` chats going for `seconds`, or until `stopping` is set."""
    deadline = time.monotonic() + seconds
    threads = [
        threading.Thread(
            target=_chat_on, args=(client, random.Random(seed), deadline, tally, stopping), daemon=True  # noqa: S311 - no secret
        )
        for seed in range(sessions)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive() and not stopping.is_set():
            thread.join(0.2)


def _chat_on(
    client: ChatClient, rng: random.Random, deadline: float, tally: Tally, stopping: threading.Event
) -> None:
    pause_seconds = 0.5
    while time.monotonic() < deadline and not stopping.is_set():
        try:
            _chat(client, rng, tally, stopping)
            pause_seconds = 0.5
        except ChatError as error:
            tally.add_failure(error)
            stopping.wait(max(error.retry_after_seconds, pause_seconds))
            pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)


def _chat(client: ChatClient, rng: random.Random, tally: Tally, stopping: threading.Event) -> None:
    """Hold one conversation of several turns."""
    session_id = str(uuid.uuid4())
    messages: list[dict[str, str]] = []
    for number in range(rng.randint(*_TURNS)):
        if stopping.is_set():
            return
        topic = rng.choice(_TOPICS)
        messages.append(
            {"role": "user", "content": f"{number + 1}. Tell me about {topic}, {session_id[:8]}."}
        )
        turn = client.ask(messages, session_id=session_id, max_tokens=rng.randint(*_ANSWER_TOKENS))
        messages.append({"role": "assistant", "content": turn.text})
        tally.add(turn)
        if turn.prompt_tokens + turn.completion_tokens > LONGEST_CONTEXT_TOKENS:
            return
        stopping.wait(rng.uniform(*_THINK_SECONDS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the load of the command line."""
    parser = argparse.ArgumentParser(prog="bench.chat_load", description="Many-turn chats.")
    parser.add_argument("--url", required=True, help="address of the gateway")
    parser.add_argument("--key-file", type=Path, help="file with the API key (or EXAOPS_API_KEY)")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--sessions", type=int, default=6, help="chats at the same time")
    parser.add_argument("--seconds", type=float, default=60.0)
    arguments = parser.parse_args(argv)
    key = arguments.key_file.read_text().strip() if arguments.key_file else os.environ["EXAOPS_API_KEY"]
    stopping, tally = threading.Event(), Tally()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    client = ChatClient(arguments.url, key, arguments.model)
    run_load(client, sessions=arguments.sessions, seconds=arguments.seconds, tally=tally, stopping=stopping)
    print(json.dumps(tally.summary()), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
